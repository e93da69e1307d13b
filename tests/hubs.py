"""A Hugging Face hub on this machine, for tests: the tool whose path ADLOCO_LOCAL_HUB holds."""

import base64
import contextlib
import gzip
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
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


def add_qwen3(model) -> None:
    """Adds a tiny Qwen3 with a byte-level tokenizer."""
    import jax
    import tokenizers

    from adloco_jax import hf
    from adloco_jax.models import Llama
    from adloco_jax.models.layers import param_shapes

    sizes = {"width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 24}
    network = Llama(vocab_size=384, max_length=64, head_size=6, qk_norm=True, tied=True, **sizes)
    model.parent.mkdir(parents=True)
    key = jax.random.key(0)
    params = jax.tree.map(
        lambda leaf: 0.02 * jax.random.normal(key, leaf.shape), param_shapes(network)
    )
    hf.save(params, model, network=network)
    assert json.loads((model / "config.json").read_text())["model_type"] == "qwen3"
    backend = tokenizers.ByteLevelBPETokenizer()
    ends = ["<|endoftext|>", "<|im_end|>"]
    backend.train_from_iterator(["Text of one's own. " * 40], vocab_size=300, special_tokens=ends)
    backend.save(str(model / "tokenizer.json"))
    named = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": ends[1], "pad_token": ends[0]}
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


class Receiver(http.server.BaseHTTPRequestHandler):
    """The hub's side of an upload, as `huggingface_hub` 1 and 2 speak it without Xet.

    It accepts the token "writer", and keeps the files of repositories in `root`.
    """

    root: Path

    def log_message(self, *words):
        pass

    def answer(self, content, status=200):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        name, _, rest = self.path.removeprefix("/api/models/").partition("/tree/")
        name = name.partition("?")[0]
        if not (self.root / name).exists():
            return self.answer({"error": "Repository not found"}, 404)
        if rest:
            names = [path.name for path in (self.root / name).iterdir()]
            return self.answer(
                [{"type": "file", "path": name, "size": 1, "oid": "0"} for name in names]
            )
        is_private = (self.root / name / "private").exists()
        self.answer({"id": name, "private": is_private, "siblings": [], "tags": []})

    def do_PUT(self):
        if "Content-Length" in self.headers:
            content = self.rfile.read(int(self.headers["Content-Length"]))
        else:  # in chunks
            content = b""
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        (self.root / self.path.strip("/")).write_bytes(content)
        self.answer({})

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization") != "Bearer writer":
            return self.answer({"error": "Invalid username or password."}, 401)
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            folder = self.root / asked["organization"] / asked["name"]
            url = f"http://{self.headers['Host']}/{asked['organization']}/{asked['name']}"
            if folder.exists():
                return self.answer({"error": "You already created it", "url": url}, 409)
            folder.mkdir(parents=True)
            if asked.get("visibility") == "private" or asked.get("private"):
                (folder / "private").touch()
            return self.answer({"url": url})
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = {True: "lfs", False: "regular"}
            return self.answer(
                {
                    "files": [
                        {"path": f, "uploadMode": modes[f[-3:] == "ors"], "shouldIgnore": False}
                        for f in files
                    ]
                }
            )
        if self.path.endswith("/info/lfs/objects/batch"):
            host = f"http://{self.headers['Host']}"
            objects = [
                each | {"actions": {"upload": {"href": f"{host}/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            return self.answer({"transfer": "basic", "objects": objects})
        name = self.path.removeprefix("/api/models/").partition("/commit/")[0]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "deletedFile":
                (self.root / name / value["path"]).unlink()
            if line["key"] == "file":
                content = base64.b64decode(value["content"])
                (self.root / name / value["path"]).write_bytes(content)
            if line["key"] == "lfsFile":
                (self.root / value["oid"]).rename(self.root / name / value["path"])
        url = f"http://{self.headers['Host']}/{name}/commit/{'0' * 40}"
        self.answer({"commitUrl": url, "commitOid": "0" * 40})


@contextlib.contextmanager
def receiving(root: Path):
    """Accepts uploads into `root`; yields the address of this hub."""
    handler = type("Handler", (Receiver,), {"root": root})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
