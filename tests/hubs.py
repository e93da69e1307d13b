"""A Hugging Face hub on this machine, for tests: the tool whose path ADLOCO_LOCAL_HUB holds."""

import contextlib
import gzip
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


def make_hub(root, data_dir, *options: str) -> Path:
    """Makes a hub with C4, a small stand-in for MicroLlama, and TinyLlama's tokenizer."""
    if "ADLOCO_LOCAL_HUB" not in os.environ:
        pytest.skip("ADLOCO_LOCAL_HUB is not set: no hub on this machine")
    tokenizer = data_dir / "tokenizers" / "mistral-v1.model"
    words = ["make", root, "--c4", data_dir / "c4", "--tokenizer", tokenizer]
    tool = [sys.executable, os.environ["ADLOCO_LOCAL_HUB"]]
    subprocess.run([*tool, *map(str, words), "--shards", "4", *options], check=True)
    return root


def add_bert(root, data_dir) -> None:
    """Adds reviews in IMDB's layout, and a small BERT as BERT base."""
    import jax
    import pyarrow
    import pyarrow.parquet
    import tokenizers

    from adloco_jax import hf
    from adloco_jax.models import Bert
    from adloco_jax.models.layers import param_shapes

    with gzip.open(data_dir / "sentiment" / "movie_reviews.jsonl.gz") as lines:
        reviews = [json.loads(line) for line in lines][::10]
    reviews.sort(key=lambda review: review["label"])  # sorted, like IMDB's
    folder = root / "datasets" / "stanfordnlp" / "imdb" / "plain_text"
    folder.mkdir(parents=True)
    for split, rows in (("train", reviews[::2]), ("test", reviews[1::2])):
        table = pyarrow.Table.from_pylist(
            [{key: row[key] for key in ("text", "label")} for row in rows]
        )
        pyarrow.parquet.write_table(table, folder / f"{split}-00000-of-00001.parquet")
    card = "---\nconfigs:\n- config_name: plain_text\n  data_files:\n"
    for split in ("train", "test"):
        card += f"  - split: {split}\n    path: plain_text/{split}-00000-of-00001.parquet\n"
    (folder.parent / "README.md").write_text(card + "---\n")

    network = Bert(
        vocab_size=600,
        width=16,
        num_layers=1,
        num_heads=2,
        mlp_width=32,
        max_length=64,
        num_classes=2,
    )
    model = root / "models" / "google-bert" / "bert-base-uncased"
    model.parent.mkdir(parents=True)
    params = jax.tree.map(lambda x: jax.numpy.full(x.shape, 0.01), param_shapes(network))
    hf.save(params, model, network=network)
    backend = tokenizers.BertWordPieceTokenizer(lowercase=True)
    texts = [review["text"] for review in reviews]
    backend.train_from_iterator(texts, vocab_size=600, show_progress=False)
    backend.save(str(model / "tokenizer.json"))
    named = {"tokenizer_class": "BertTokenizer", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    (model / "tokenizer_config.json").write_text(json.dumps(named))


@contextlib.contextmanager
def served(root: Path, folder: Path):
    """Serves a hub; yields the environment of commands, and a function that stops it.

    The JSON in `folder / "faults"` says how the hub misbehaves.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["serve", root, "--port", port, "--faults", folder / "faults"]
    words += ["--log", folder / "log"]
    tool = [sys.executable, os.environ["ADLOCO_LOCAL_HUB"]]
    server = subprocess.Popen([*tool, *map(str, words)], stdout=subprocess.DEVNULL)

    def stop() -> None:
        server.kill()
        server.wait()

    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield (
            {
                "HF_ENDPOINT": f"http://127.0.0.1:{port}",
                "HF_HOME": str(folder / "home"),
                "HF_HUB_OFFLINE": "0",
                "XDG_CACHE_HOME": str(folder / "cache"),
                "FAULTS": str(folder / "faults"),
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
            },
            stop,
        )
    finally:
        stop()
