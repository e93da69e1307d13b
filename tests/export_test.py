"""Checkpoints to start from, models out of a run's folder, and text from them."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adloco_jax import hf
from adloco_jax.data.tokenizers import load_tokenizer
from adloco_jax.errors import CheckpointError, ConfigError, DataError
from adloco_jax.models.llama import Llama, generate, next_token_loss
from adloco_jax.run import checkpoint
from adloco_jax.run.build import pretrained_params
from adloco_jax.run.config import default_config, validate
from adloco_jax.run.export import read_trained
from adloco_jax.run.ledger import read
from adloco_jax.training import train

pytestmark = pytest.mark.usefixtures("one_device")

ROOT = Path(__file__).resolve().parents[1]


def tiny(**model):
    """A config of one short round; `model` overrides its sizes."""
    config = default_config()
    config.num_rounds = 1
    sizes = dict(width=16, num_layers=2, num_heads=2, num_kv_heads=1, mlp_width=24, max_length=32)
    config.model.update(sizes | model)
    config.data.sequence_length = 16
    config.data.num_sequences = 200
    config.ensemble.num_trainers = config.ensemble.num_workers = 2
    config.inner.steps_per_round = 2
    config.inner.learning_rate = 1e-2
    config.batching.max_batch_size = 4
    config.eval.num_sequences = 8
    config.checkpoint.every_rounds = 1
    return config


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two rounds, whose two trainers have not merged."""
    config = tiny()
    config.num_rounds = 2
    return train(config, tmp_path_factory.mktemp("trained") / "r")


def assert_same(first, second):
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def trainer_of(params_M, position):
    return jax.tree.map(lambda x: x[position], params_M)


# --- Out of a run -----------------------------------------------------------------------------


def test_a_run_leaves_its_consensus_for_hugging_face(trained):
    loaded = hf.load(trained.workdir / "export")
    assert_same(loaded.params, trained.params)
    assert load_tokenizer(str(trained.workdir / "export")).eot_id == 256


def test_any_trainer_of_any_checkpoint_is_read(trained):
    for position in (0, 1):
        one = read_trained(trained.workdir, trainer=position)
        assert (one.round, one.source) == (2, f"trainer {position}")
        assert_same(one.params, trainer_of(trained.ensemble.params_M, position))
    before = read_trained(trained.workdir, round=1, trainer=0)
    assert before.round == 1
    assert np.any(
        before.params["head"]["kernel"] != read_trained(trained.workdir).params["head"]["kernel"]
    )


def test_the_consensus_is_chosen_again_as_in_the_run(trained):
    again = read_trained(trained.workdir)
    (last,) = [
        e["source"]
        for e in read(trained.workdir / "ledger.jsonl")
        if e["event"] == "eval" and e["round"] == 2 and e["trainer"] == "consensus"
    ]
    assert again.source == last
    assert_same(again.params, trained.params)


def test_what_is_not_there_is_named(trained, tmp_path):
    with pytest.raises(ConfigError, match="round 7, have 1, 2"):
        read_trained(trained.workdir, round=7)
    with pytest.raises(ConfigError, match="no trainer 5, have 0, 1"):
        read_trained(trained.workdir, trainer=5)
    with pytest.raises(CheckpointError, match="name the folder of a run"):
        read_trained(tmp_path)


def test_a_damaged_checkpoint_is_not_exported(tmp_path):
    result = train(tiny(), tmp_path / "r")
    path = result.workdir / "checkpoints" / "1" / "host.json"
    path.write_text(path.read_text() + " ")
    with pytest.raises(CheckpointError, match="host.json.*choose another round"):
        read_trained(result.workdir)
    assert checkpoint.list_rounds(result.workdir / "checkpoints") == [1]


def test_scripts_export_and_write(trained, tmp_path):
    def run(script, *arguments):
        command = [sys.executable, ROOT / "scripts" / script, *map(str, arguments)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    out = tmp_path / "out"
    done = run("export.py", "--workdir", trained.workdir, "--out", out, "--trainer", 1)
    assert done.returncode == 0 and done.stdout == f"{out}: round 2, trainer 1, float32\n"
    assert_same(hf.load(out).params, trainer_of(trained.ensemble.params_M, 1))
    again = run("export.py", "--workdir", trained.workdir, "--out", out)
    assert again.returncode == 2 and "exists already" in again.stderr
    # More tokens than the model can read become as many as it can.
    text = run("generate.py", "--model", out, "--prompt", "def", "--tokens", 99, "--samples", 2)
    assert text.returncode == 0 and text.stdout.count("-" * 72 + "\ndef") == 2
    assert text.stderr.splitlines() == [
        "--tokens 99: the model reads 32 tokens and the prompt has 4; writing 28"
    ]
    for arguments, fault in [
        (["--model", out, "--prompt", "x" * 31], "--prompt: 32 tokens, the model reads 32"),
        (["--model", tmp_path / "no"], "no such folder"),
    ]:
        done = run("generate.py", *arguments)
        assert done.returncode in (2, 3) and fault in done.stderr
        assert len(done.stderr.splitlines()) == 1


# --- Starting from a checkpoint ---------------------------------------------------------------


def start_of(config, workdir) -> list:
    """The parameters of every trainer before the first update: with a learning rate of nothing."""
    config.inner.learning_rate = 1e-30
    config.inner.weight_decay = 0.0
    config.outer.tx = "sgd"
    return train(config, workdir).ensemble.params_M


def test_all_trainers_start_from_the_checkpoint(trained, tmp_path):
    config = tiny(init_from=str(trained.workdir / "export"))
    params_M = start_of(config, tmp_path / "r")
    for position in (0, 1):
        assert_same(trainer_of(params_M, position), trained.params)


def test_a_head_is_drawn_anew_and_is_the_same_for_all(trained, tmp_path):
    config = tiny(init_from=str(trained.workdir / "export"), reinit_head=True)
    params_M = start_of(config, tmp_path / "r")
    head_M = np.asarray(params_M["head"]["kernel"])
    np.testing.assert_array_equal(head_M[0], head_M[1])
    assert abs(head_M.std() - 0.02) < 2e-3
    assert np.any(head_M[0] != trained.params["head"]["kernel"])
    np.testing.assert_array_equal(
        params_M["embed"]["embedding"][1], trained.params["embed"]["embedding"]
    )


def test_going_on_needs_the_checkpoint_no_more(trained, tmp_path):
    export = tmp_path / "export"
    hf.save(trained.params, export, network=hf.load(trained.workdir / "export").network)
    config = tiny(init_from=str(export))
    train(config, tmp_path / "r")
    export.rename(tmp_path / "elsewhere")
    config.num_rounds = 2
    assert train(config, tmp_path / "r").controller.round == 2


def test_another_size_is_refused_before_anything_is_made(trained, tmp_path):
    config = tiny(init_from=str(trained.workdir / "export"), width=32, norm_eps=1e-6)
    with pytest.raises(ConfigError) as caught:
        train(config, tmp_path / "r")
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["model.width = 32", "model.norm_eps = 1e-06"]
    assert "has 16; set --config.model.width to that" in lines[0]
    with pytest.raises(DataError, match="no such folder"):
        train(tiny(init_from="./nowhere"), tmp_path / "r")
    assert list(tmp_path.iterdir()) == []


def test_a_longer_context_is_no_other_model(trained):
    config = tiny(init_from=str(trained.workdir / "export"), max_length=64)
    assert_same(pretrained_params(validate(config)), trained.params)


# --- Text ------------------------------------------------------------------------------------


def test_generation_takes_the_likeliest_or_draws():
    network = Llama(13, 8, 2, 2, 1, 12, max_length=12)
    params = network.init(jax.random.key(3), jnp.zeros((1, 1), jnp.int32))["params"]
    params = jax.tree.map(lambda x: 8 * x, params)  # far from uniform
    prompt_BL = jnp.array([[1, 2, 3], [4, 5, 6]])
    made = generate(
        network, params, prompt_BL, num_tokens=5, temperature=0.0, key=jax.random.key(0)
    )
    expected = prompt_BL
    for _ in range(5):
        logits = network.apply({"params": params}, expected)
        expected = jnp.concatenate([expected, jnp.argmax(logits[:, -1:], -1)], axis=1)
    np.testing.assert_array_equal(made, expected)
    drawn = [
        np.asarray(
            generate(
                network, params, prompt_BL, num_tokens=5, temperature=5.0, key=jax.random.key(seed)
            )
        )
        for seed in (0, 0, 1)
    ]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert np.any(drawn[0] != drawn[2]) and np.any(drawn[0][0, 3:] != drawn[0][1, 3:])


def test_the_exported_loss_is_the_runs_own(trained):
    """What the ledger reports is what the exported files give on the same rows."""
    loaded = hf.load(trained.workdir / "export")
    rows = jnp.arange(34).reshape(2, 17) % 257
    ours = jax.jit(next_token_loss(loaded.network))(loaded.params, rows)
    theirs = jax.jit(next_token_loss(loaded.network))(trained.params, rows)
    assert float(ours) == float(theirs)
    assert json.loads((trained.workdir / "export" / "config.json").read_text())["vocab_size"] == 257
