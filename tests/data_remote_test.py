"""Data and weights from addresses: an S3 server and a web server on loopback."""

import functools
import gzip
import http.server
import re
import shutil
import sys
import threading

import boto3
import fsspec
import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from moto.server import ThreadedMotoServer
from texts import numbered_documents, write_documents
from toy import data_settings

from adloco_jax.data import files, load_corpus, load_tokenizer
from adloco_jax.data.corpus import column_of_texts, source_of
from adloco_jax.data.prepared import shard_changes
from adloco_jax.errors import ConfigError, DataError, ResourceError
from adloco_jax.models import Llama, hf
from adloco_jax.models.layers import param_shapes
from adloco_jax.settings import DataSettings

TEXTS = numbered_documents(60)


@pytest.fixture(scope="module")
def server():
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def bucket(server, monkeypatch, tmp_path):
    """An empty bucket, and a function that uploads files of a folder to it."""
    names = {"AWS_ENDPOINT_URL": server, "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", **names}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    created = boto3.resource("s3").create_bucket(Bucket="texts")

    def upload(folder, to):
        for path in folder.rglob("*"):
            if path.is_file():
                created.upload_file(str(path), f"{to}/{path.relative_to(folder)}")
        return f"s3://texts/{to}"

    yield upload
    created.objects.delete()
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.fixture
def copied(monkeypatch):
    """The names of the files that are downloaded, in order."""
    names, real = [], files.download
    monkeypatch.setattr(files, "download", lambda f, to: (names.append(f.name), real(f, to)))
    return names


def load(path, note=lambda line: None, **changes):
    keys = dict(source="jsonl", sequence_length=15, heldout_frac=0.1) | changes
    return load_corpus(data_settings(path=str(path), **keys), note=note)


def write_jsonl(folder):
    for number in range(3):
        write_documents(folder, TEXTS[number::3], f"part-{number}.jsonl{'.gz' * (number > 0)}")


def write_text(folder):
    (folder / "b").mkdir(parents=True)
    (folder / "a.txt").write_text("a line\n\n" * 400)
    (folder / "b" / "empty.txt").touch()
    for name in (".hidden.txt", "_SUCCESS", "b/_temporary/a.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("not read")


@pytest.mark.parametrize(
    ("source", "write", "glob"),
    [
        ("jsonl", write_jsonl, "part-[12].jsonl*"),
        ("text", write_text, "**/a*.txt"),
    ],
)
def test_an_address_gives_the_rows_and_records_of_the_files(tmp_path, bucket, source, write, glob):
    write(tmp_path / "folder")
    address = bucket(tmp_path / "folder", "data/folder")
    for end in ("", f"/{glob}"):
        local = load(f"{tmp_path / 'folder'}{end}", source=source)
        found = load(f"{address}{end}", source=source)
        assert found.fingerprint == local.fingerprint
        assert found.shards == local.shards and len(local.shards[0]["sha256"]) == 64
    assert source_of(address) == source


def test_a_folder_of_the_cache_is_found_on_another_machine(tmp_path, bucket, copied, monkeypatch):
    write_jsonl(tmp_path / "folder")
    address = bucket(tmp_path / "folder", "data/folder")
    made = load(address)
    shutil.copytree(tmp_path / "cache", tmp_path / "there")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "there"))
    copied.clear()
    assert load(address).fingerprint == made.fingerprint and copied == []


CHATS = {"messages": [{"role": "user", "content": "?"}], "id": "0"}


def test_chats_at_an_address_are_known_by_their_columns(tmp_path, bucket, web, copied):
    folder = tmp_path / "web"
    write_documents(folder, [CHATS] * 9, "a.jsonl")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([CHATS]), folder / "a.parquet")
    (folder / "a.csv").write_text("id,prompt,completion\n1,?,!\n")
    stored = bucket(folder, "data")
    for source, address, column in (
        ("jsonl", f"{stored}/a.jsonl", "messages"),
        ("parquet", f"{stored}/a.parquet", "messages"),  # the web server has no ranges
        *(("hf", f"{root}/a.csv", "prompt+completion") for root in (stored, web)),
        *(("hf", f"{root}/gone.jsonl", "text") for root in (stored, web)),
    ):
        given = {"source": source, "path": address}
        assert column_of_texts(DataSettings().model_copy(update=given)) == column
    assert copied == []


def test_an_object_beside_a_folder_of_its_name_and_a_question_mark_are_read(tmp_path, bucket):
    write_documents(tmp_path / "one", TEXTS, "what?.jsonl")
    address = bucket(tmp_path / "one", "d/same.jsonl")
    boto3.resource("s3").Object("texts", "d/same.jsonl").put(Body=b'{"text": "other"}\n{"text": 1}')
    for path in ("s3://texts/d", "s3://texts/d/**"):
        found = files.find(path, key="data.path")
        assert list(found) == ["same.jsonl", "same.jsonl/what?.jsonl"]
    assert list(files.find("s3://texts/d/*", key="data.path")) == ["same.jsonl"]
    assert list(files.find(f"{address}/what?.jsonl", key="data.path")) == ["what?.jsonl"]
    assert str(DataError(f"{address}/what?.jsonl:1: bad")) == f"{address}/what?.jsonl:1: bad"


def test_rows_are_kept_until_an_object_is_rewritten(tmp_path, bucket, copied):
    write_jsonl(tmp_path / "folder")
    address = bucket(tmp_path / "folder", "data")
    first = load(address)
    assert load(address).fingerprint == first.fingerprint and len(copied) == 3
    path = tmp_path / "folder" / "part-0.jsonl"
    path.write_bytes(path.read_bytes().replace(b"<0>", b"<X>"))
    bucket(tmp_path / "folder", "data")
    changed = load(address)
    assert changed.fingerprint != first.fingerprint
    assert shard_changes(first.shards, changed.shards) == ["part-0.jsonl: edited"]


REFUSED = {
    "data/gone.jsonl": "data.path=s3://texts/data/gone.jsonl: no such file or folder",
    "data/*.txt": r"data.path=s3://texts/data/\*.txt: no file matches",
    "data/bad.jsonl": r"^s3://texts/data/bad.jsonl:2: not one JSON object per line",
    "data/cut.jsonl.gz": "^s3://texts/data/cut.jsonl.gz: damaged or unreadable",
}


def test_a_fault_is_the_line_of_a_local_file_with_the_address(tmp_path, bucket):
    write_documents(tmp_path, [], "bad.jsonl").write_bytes(b'{"text": "fine"}\n{"text": \n')
    cut = gzip.compress(b'{"text": "fine"}\n' * 99)[:-9]
    write_documents(tmp_path, [], "cut.jsonl.gz").write_bytes(cut)
    bucket(tmp_path, "data")
    for name, message in REFUSED.items():
        with pytest.raises(DataError, match=message) as error:
            load(f"s3://texts/{name}")
        assert "\n" not in str(error.value) and str(tmp_path) not in str(error.value)


class Web(http.server.SimpleHTTPRequestHandler):
    """Serves a folder; a path that contains the number of an error is refused with it.

    Files whose name has "encoded" are sent with the header of a content that is compressed.
    """

    def end_headers(self):
        if "encoded" in self.path:
            self.send_header("Content-Encoding", "gzip")
        super().end_headers()

    def send_head(self):
        if number := re.search("[45]\\d\\d", self.path):
            self.send_error(int(number[0]))
            return None
        return super().send_head()

    def log_message(self, *args):
        pass


@pytest.fixture
def web(tmp_path):
    (tmp_path / "web").mkdir()
    handler = functools.partial(Web, directory=tmp_path / "web")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("name", ["encoded.jsonl", "encoded.jsonl.gz", "plain.jsonl.gz"])
def test_a_file_that_a_server_sends_compressed(tmp_path, web, name):
    path = write_documents(tmp_path, TEXTS, "a.jsonl")
    content = gzip.compress(path.read_bytes())
    (tmp_path / "web" / name).write_bytes(content if "encoded" in name else path.read_bytes())
    assert load(f"{web}/{name}").fingerprint == load(path).fingerprint
    with pytest.raises(DataError, match="no such file"):
        load(f"{web}/gone.jsonl")
    write_documents(tmp_path, [CHATS] * 9, "chats.jsonl")
    (tmp_path / "web" / name).write_bytes(gzip.compress((tmp_path / "chats.jsonl").read_bytes()))
    given = DataSettings().model_copy(update={"source": "jsonl", "path": f"{web}/{name}"})
    assert column_of_texts(given) == "messages"


def test_no_access_and_no_server_are_one_line(bucket, web, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", web)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    refused, lost = (
        (ConfigError, ": no access .*set cred"),
        (ResourceError, "answer .* run the same"),
    )
    for address, (kind, message) in (
        ("s3://status-403/a.jsonl", refused),
        (f"{web}/401.jsonl", refused),
        (f"{web}/429.jsonl", lost),
        (f"{web}/503.jsonl", lost),
        ("s3://status-503/a.jsonl", lost),
        ("http://127.0.0.1:9/a.jsonl", lost),
    ):
        with pytest.raises(kind, match=message) as error:
            load(address)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (
            "https://me:secret@host/a.jsonl",
            "is an address; .* without a user or a query",
        ),
        ("https://host/a?sig=secret", "is an address; .* without a user or a query"),
        ("ftp://host/a.jsonl", "data.path: is an address; give a path, a name"),
        ("gs://bucket/a.jsonl", r"gcsfs.*pip install 'adloco_jax\[remo"),
    ],
)
def test_an_address_that_cannot_be_read_is_refused_without_its_secret(
    monkeypatch, address, message
):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigError, match=message) as error:
        load(address)
    assert "secret" not in str(error.value) and "\n" not in str(error.value)


def test_weights_come_from_an_address(tmp_path, bucket, copied):
    sizes = dict(vocab_size=257, width=8, num_layers=1, num_heads=2, num_kv_heads=1, mlp_width=8)
    network = Llama(**sizes, max_length=8)
    params = jax.tree.map(lambda x: np.full(x.shape, 0.5, np.float32), param_shapes(network))
    hf.save(params, tmp_path / "model", load_tokenizer("bytes"), network=network)
    (tmp_path / "model" / "notes.txt").write_text("not copied")
    address = bucket(tmp_path / "model", "model")
    found = hf.inspect(address)
    assert (found.network, found.stored_as, found.lacks) == (network, (), "")
    assert copied == ["config.json"]
    for _ in range(2):
        jax.tree.map(np.testing.assert_array_equal, hf.load(address).params, params)
    assert copied[1:] == ["config.json", "model.safetensors"]

    assert load_tokenizer(address).encode_batch(["on a server"])[0].tolist() == [*b"on a server"]

    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    bucket(tmp_path / "model", "model")
    with pytest.raises(DataError, match=f"^{address}/model.safetensors: damaged"):
        hf.load(address)
    weights.unlink()
    (tmp_path / "model" / "original").mkdir()
    (tmp_path / "model" / "original" / "model.safetensors").write_text("in a folder")
    with pytest.raises(ConfigError, match=r"model.init_from=s3://texts/n: it has no file"):
        hf.load(bucket(tmp_path / "model", "n"))
