"""A Hugging Face hub on this machine, for tests: the tool whose path ADLOCO_LOCAL_HUB holds."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = "TinyLlama/TinyLlama-1.1B-step-50K-105b"


def make_hub(root, data_dir) -> Path:
    """Makes a hub with C4, a small stand-in for MicroLlama, and TinyLlama's tokenizer."""
    if "ADLOCO_LOCAL_HUB" not in os.environ:
        pytest.skip("ADLOCO_LOCAL_HUB is not set: no hub on this machine")
    tokenizer = data_dir / "tokenizers" / "mistral-v1.model"
    words = ["make", root, "--c4", data_dir / "c4", "--tokenizer", tokenizer]
    tool = [sys.executable, os.environ["ADLOCO_LOCAL_HUB"]]
    subprocess.run([*tool, *map(str, words), "--shards", "4"], check=True)
    return root


def add_qwen3(model) -> None:
    """Adds a tiny Qwen3 with a byte-level tokenizer."""
    import jax
    import tokenizers
    from nets import config_of

    from adloco_jax.models import Llama, hf
    from adloco_jax.models.layers import param_shapes

    sizes = {"width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 24}
    network = Llama(vocab_size=384, max_length=64, head_size=6, qk_norm=True, tied=True, **sizes)
    model.parent.mkdir(parents=True)
    key = jax.random.key(0)
    params = jax.tree.map(
        lambda leaf: 0.02 * jax.random.normal(key, leaf.shape), param_shapes(network)
    )
    config = config_of(network, "qwen3", head_dim=6, tie_word_embeddings=True)
    hf.save(params, model, network=network, config=config)
    backend = tokenizers.ByteLevelBPETokenizer()
    ends = ["<|endoftext|>", "<|im_end|>"]
    backend.train_from_iterator(["Text of one's own. " * 40], vocab_size=300, special_tokens=ends)
    backend.save(str(model / "tokenizer.json"))
    named = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": ends[1], "pad_token": ends[0]}
    (model / "tokenizer_config.json").write_text(json.dumps(named))


@contextlib.contextmanager
def served(root: Path, folder: Path):
    """Serves a hub; yields the environment of commands.

    The JSON in `folder / "faults"` says how the hub misbehaves.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["serve", root, "--port", port, "--faults", folder / "faults"]
    words += ["--log", folder / "log"]
    tool = [sys.executable, os.environ["ADLOCO_LOCAL_HUB"]]
    server = subprocess.Popen([*tool, *map(str, words)], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield {
            "HF_ENDPOINT": f"http://127.0.0.1:{port}",
            "HF_HOME": str(folder / "home"),
            "HF_HUB_OFFLINE": "0",
            "XDG_CACHE_HOME": str(folder / "cache"),
            "FAULTS": str(folder / "faults"),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        }
    finally:
        server.kill()
        server.wait()
