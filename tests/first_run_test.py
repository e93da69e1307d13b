"""The shipped configs with a hub on this machine; only overrides make them small."""

import json
import os
import signal
import subprocess
import sys

import pytest
from hubs import ROOT, TOKENIZER, add_qwen3, served

from adloco_jax.data.tokenizers import load_tokenizer
from adloco_jax.models import hf
from adloco_jax.run.kept.ledger import read

pytestmark = pytest.mark.slow

MODEL = "keeeeenw/MicroLlama"
# sizes of the small stand-in model
SIZES = ("width", "num_layers", "num_heads", "num_kv_heads", "mlp_width")
SHORT = {
    **{f"model.{name}": "none" for name in SIZES},
    **{"model.dtype": "float32", "data.sequence_length": 32, "data.num_sequences": 200},
    **{"ensemble.num_trainers": 1, "ensemble.num_workers": 1, "merge.policy": "none"},
    **{"num_rounds": 2, "inner.steps_per_round": 1, "batching.test": "constant"},
    **{"batching.max_batch_size": 1, "batching.batch_cap": 1, "eval.num_sequences": 4},
    **{"checkpoint.every_rounds": 1},
}


def adloco(
    environment, *words, cwd, program=("adloco_jax.main",), **more
) -> subprocess.CompletedProcess:
    """Runs a command as a user types it."""
    command = [sys.executable, "-m", *program, *map(str, words)]
    env = os.environ | environment | more
    how = {"cwd": cwd, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, env=env, **how)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def options(**more) -> list[str]:
    """Options (`data__path` as --config.data.path), and those that make a run short."""
    given = SHORT | {key.replace("__", "."): value for key, value in more.items()}
    return [f"--config.{key}={value}" for key, value in given.items()]


CARD = ("--config", ROOT / "configs" / "microllama.py")


@pytest.fixture(scope="module")
def hub(tmp_path_factory, hub_root):
    """The environment of commands that use the hub, and the folder with the hub's log."""
    folder = tmp_path_factory.mktemp("hub")
    with served(hub_root, folder) as environment:
        yield environment, folder


def test_the_card_runs_is_killed_and_resumes_without_the_hub(hub, tmp_path):
    environment, folder = hub
    words = [*CARD, *options(), "--workdir", "run"]
    crash = {"program": ("probes.crashes", "save.begin:2"), "PYTHONPATH": str(ROOT)}
    killed = adloco(environment, *words, cwd=tmp_path, **crash)
    assert killed.returncode == -signal.SIGKILL and killed.stderr == ""
    asked = (folder / "log").read_text()
    for file in (f"{MODEL}//model.safetensors", f"{TOKENIZER}//tokenizer.json"):
        # one download; its log line has the name twice
        assert asked.count(f"GET /cdn/models/{file}") == 2
    assert "c4//en/c4-train.00000" in asked and "c4//en/c4-validation.00000" in asked
    before = (folder / "log").read_text()
    resumed = adloco(environment, *words, cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert (folder / "log").read_text() == before
    assert (resumed.returncode, resumed.stderr) == (0, "")
    assert "resuming after round 1" in resumed.stdout
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert len(config["data_commit"]) == 40
    assert read(tmp_path / "run" / "ledger.jsonl")[-1]["reason"] == "finished"
    exported = hf.load(tmp_path / "run" / "export").network
    assert (exported.vocab_size, exported.width) == (32_000, 64)


def test_a_trained_qwen3_continues_on_own_text_as_the_readme_says(hub_root, hub, tmp_path):
    """The command's options only make the run short; sizes and tokenizer are the checkpoint's."""
    name = "Qwen/Qwen3-0.6B"
    add_qwen3(hub_root / "models" / name)
    environment, _ = hub
    (tmp_path / "texts").mkdir()
    lines = (json.dumps({"text": f"Text {n} of one's own. " * 8}) for n in range(200))
    (tmp_path / "texts" / "a.jsonl").write_text("\n".join(lines))
    words = ["train", "finetune", f"--config.model.init_from={name}", "--workdir=run"]
    words += ["--config.data.path=texts/*.jsonl", "--config.data.sequence_length=32"]
    words += ["--config.num_rounds=1", "--config.inner.steps_per_round=2"]
    words += ["--config.inner.warmup_updates=1", "--config.model.dtype=float32"]
    done = adloco(environment, *words, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    adapter = tmp_path / "run" / "export" / "adapter_config.json"
    described = json.loads(adapter.read_text())
    assert described["base_model_name_or_path"] == name
    described["base_model_name_or_path"] = str(
        hub_root / "models" / name
    )  # this process has no hub
    adapter.write_text(json.dumps(described))
    exported = hf.load(adapter.parent)
    assert exported.network.tied and exported.network.qk_norm and exported.network.head_size == 6
    settings = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert settings["data"]["tokenizer"] is None and settings["model"]["vocab_size"] == 384
    assert f"tokenizer: {name}, " in done.stdout
    first, last = (tmp_path / "run" / "export", hub_root / "models" / name)
    assert load_tokenizer(str(first)).fingerprint == load_tokenizer(str(last)).fingerprint
