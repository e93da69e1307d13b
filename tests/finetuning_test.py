"""The commands of docs/guides/finetuning.md, with the weights that `make real` installs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "guides" / "finetuning.md").read_text(encoding="utf-8")
MODEL = os.environ.get("ADLOCO_SMOLLM2")


@pytest.mark.slow
@pytest.mark.skipif(MODEL is None, reason="make real installs the weights, and names their folder")
def test_the_page_fine_tunes_real_weights(data_dir, tmp_path):
    (commands,) = (
        block for block in re.findall(r"```bash\n(.*?)```", PAGE, re.S) if "smol" in block
    )
    (tmp_path / "smollm2").symlink_to(Path(MODEL).resolve())
    (tmp_path / "chats.jsonl").symlink_to(data_dir / "chats" / "wordnet_train.jsonl")
    script = f'set -e; adloco() {{ {sys.executable} -m adloco_jax "$@"; }}\n{commands}'
    # As users run it: unlike tiny programs, these earn the optimizations back.
    environ = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": ""}
    environ |= {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = map(json.loads, (tmp_path / "tuned" / "ledger.jsonl").read_text().splitlines())
    *_, loss = (line["loss"] for line in lines if line["event"] == "eval")
    assert loss < 3.2  # 3.9 before
    assert (tmp_path / "whole" / "model.safetensors").exists()
