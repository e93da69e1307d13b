"""A data set of a hub on this machine: its rows, and one line for each kind of fault."""

import builtins
import hashlib
import json
import os
import re
import subprocess
import sys
from unittest import mock

import huggingface_hub
import pytest
from hubs import TOKENIZER, served
from texts import write_documents

from adloco_jax.data import hub
from adloco_jax.errors import DataError

# One process runs all cases, because libraries read the hub's address at import.
PROGRAM = """
import dataclasses, json, os, pathlib, shutil, sys
from toy import data_settings
from adloco_jax.data import load_corpus
from adloco_jax.data.corpus import column_of_texts
from adloco_jax.settings import DataSettings
from adloco_jax.data import hub
from adloco_jax.errors import UserError
assert hub.FIRST_ANSWER_S == 10
hub.FIRST_ANSWER_S = 2.0  # spares a wait
for name, faults, changes, keeps_cache in json.loads(sys.argv[1]):
    pathlib.Path(os.environ["FAULTS"]).write_text(json.dumps(faults))
    if not keeps_cache:
        shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)
    keys = dict(source="hf", path="allenai/c4", name="en", heldout_split="validation")
    keys |= dict(sequence_length=64, num_sequences=300) | changes
    if keys["path"].startswith("own/"):
        keys["text_column"] = column_of_texts(DataSettings().model_copy(update=keys))
    os.environ.pop("HF_TOKEN", None)
    if token := keys.pop("token", None):
        os.environ["HF_TOKEN"] = token
    lines = []
    try:
        corpus = load_corpus(data_settings(**keys), note=lines.append)
        assert corpus.manifest.loss == "answers" or not keys["path"].startswith("own/")
        found = [0, corpus.fingerprint, corpus.commit, len(corpus.rows), len(corpus.heldout_rows)]
    except UserError as error:
        found = [error.exit_code, str(error)]
    print(json.dumps([name, found, lines]), flush=True)
"""
ADDRESS = {"path": "hf://datasets/allenai/c4/en/c4-validation.*.json.gz", "source": "jsonl"}
ADDRESS |= {"name": "", "heldout_split": "", "num_sequences": 90}
CHATS = {"path": "own/chats", "name": "", "heldout_split": "", "num_sequences": 3}
CHATS["heldout_frac"] = 0.3
CASES = {  # faults of the server, changes of the config, exit code, words of the line
    "gated, with a token": (
        {"gated": "allenai/c4"},
        {"token": "hf_SecretOfMine"},
        2,
        "to ask for access|gated",
    ),
    "name": (
        {},
        {"path": "no/such"},
        2,
        "data.path=no/such.*: no such file or .* hub: .*Not Found",
    ),
    "revision": ({}, {"revision": "nope"}, 2, "data.revision=nope.*Revision Not Found"),
    "split": ({}, {"split": "nope"}, 2, "Bad split: nope. Available splits: .*train.*validation"),
    "missing": ({"missing": "c4-train.00000"}, {}, 2, "Entry Not Found"),
    "altered": ({"alter": "c4-validation.00000"}, {}, 3, "cannot be read .CRC check failed"),
    "cut": (
        *({"cut_after": 100_000}, {"tokenizer": TOKENIZER, "vocab_size": 32_000}),
        *(5, "data.tokenizer=.*does not answer .*once it does"),
    ),
    "slow": ({"latency_s": 3}, {}, 5, "does not answer"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory, hub_root):
    """The result of each case, by name."""
    folder = tmp_path_factory.mktemp("hub")
    cases = [("good", {}, {}, False), ("kept", {"latency_s": 3}, {}, True)]
    cases += [("flaky", {"fail_every": 3}, {}, False), ("address", {}, ADDRESS, False)]
    write_documents(
        hub_root / "datasets" / "own" / "chats",
        [{"prompt": f"{n}? ", "completion": "Yes.", "id": n} for n in range(99)],
        "train.jsonl",
    )
    cases += [("chats", {}, CHATS, False), ("kept chats", {"latency_s": 3}, CHATS, True)]
    cases += [(name, case[0], case[1], False) for name, case in CASES.items()]
    with served(hub_root, folder) as environment:
        # The address of a mirror may contain a password.
        environment["HF_ENDPOINT"] = environment["HF_ENDPOINT"].replace("//", "//me:SecretOfMine@")
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps(cases)],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=500,
        )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert "SecretOfMine" not in done.stdout + done.stderr
    records = [line for line in done.stdout.splitlines() if line.startswith("[")]
    waits = [line for line in done.stderr.splitlines() if "Retrying in" in line]
    return {name: case for name, *case in map(json.loads, records)} | {"waits": waits}


@pytest.mark.slow
def test_rows_of_the_hub_are_bounded_kept_and_survive_a_flaky_server(found):
    code, fingerprint, commit, num_rows, num_heldout = found["good"][0]
    assert (code, len(commit), num_rows, num_heldout) == (0, 40, 300, 96)
    assert found["flaky"][0][1] == found["kept"][0][1] == fingerprint
    assert found["address"][0][0] == 0 and found["address"][0][3] == 90
    assert "the hub does not answer; using the rows made last" in found["kept"][1][0]
    assert found["waits"]  # the library's own line


@pytest.mark.slow
def test_chats_of_the_hub_are_known_by_their_columns_also_while_it_does_not_answer(found):
    assert found["chats"][0][0] == 0 and found["chats"][0] == found["kept chats"][0]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_each_fault_is_one_line_with_its_key_and_code(found, name):
    *_, code, words = CASES[name]
    (got, line), _ = found[name]
    assert got == code and re.search(words, line) and "\n" not in line
    assert "data." in line or "hf://" in line


def test_a_file_of_the_cache_is_hashed_once_and_again_after_a_change(tmp_path, monkeypatch):
    content = b"weights"
    blob = tmp_path / "blobs" / hashlib.sha256(content).hexdigest()
    folder = tmp_path / "snapshots" / "main"
    for made in (blob.parent, folder):
        made.mkdir(parents=True)
    blob.write_bytes(content)
    (folder / "config.json").symlink_to(blob)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(folder))
    given = dict(one_of=["config.json"], where="model.init_from=a/b")
    with mock.patch.object(builtins, "open", wraps=open) as opened:
        for _ in range(3):
            assert hub.download("a/b", [], **given) == folder
    assert [call.args[0] for call in opened.mock_calls if call.args] == [blob]
    blob.write_bytes(b"changed")
    with pytest.raises(DataError, match="a/b: config.json does not have the hash that the hub"):
        hub.download("a/b", [], **given)


def test_files_in_folders_of_a_repository_do_not_choose_what_is_read(tmp_path, monkeypatch):
    (tmp_path / "vocab.json").touch()
    asked = []

    def snapshot(name, *, allow_patterns, local_files_only, **_):
        if local_files_only:
            raise OSError
        asked.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    files = [mock.Mock(rfilename=name) for name in ("original/tokenizer.model", "vocab.json")]
    api = mock.Mock(model_info=lambda *_, **__: mock.Mock(siblings=files))
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    hub.download("somebody/llama", [], one_of=["*.model", "vocab.*"], where="model")
    assert asked == ["vocab.*"]


def test_a_cache_that_lacks_a_shard_is_not_taken_for_whole(tmp_path, monkeypatch):
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (tmp_path / names["a"]).touch()
    asked = []

    def snapshot(name, *, local_files_only, **_):
        asked.append(local_files_only)
        if not local_files_only:
            (tmp_path / names["b"]).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    files = [mock.Mock(rfilename=name) for name in names.values()]
    api = mock.Mock(model_info=lambda *_, **__: mock.Mock(siblings=files))
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    for _ in range(2):
        hub.download("somebody/llama", [], one_of=["*.safetensors"], where="model")
    assert asked == [True, False, True]
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    hub.download("somebody/llama", [], one_of=["*.safetensors"], where="model")
    assert asked[3:] == [True, False]
