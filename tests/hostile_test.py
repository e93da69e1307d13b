"""Malicious files: no code runs, no outside file is opened, no memory is exhausted."""

import ast
import contextlib
import hashlib
import io
import json
import os
import resource
import shutil
import sys
from pathlib import Path

import pytest

from adloco_jax import main as cli
from adloco_jax.config import executed
from adloco_jax.data.tokenizers import load_tokenizer
from adloco_jax.errors import DataError

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*ROOT.glob("adloco_jax/**/*.py"), *ROOT.glob("scripts/*.py")])

# Readers that execute what they read, and calls that start a shell.
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
MODULES |= {"torch", "yaml", "code", "codeop"}
CALLS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {"system", "popen"}
TRUSTING = {"allow_pickle", "trust_remote_code", "shell"}


def offences(source: str) -> list[str]:
    """The calls of a module that could execute somebody else's file."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id in CALLS:
                found.append(called.id)
            if isinstance(called, ast.Attribute) and called.attr in ATTRIBUTES:
                found.append(called.attr)
            for keyword in node.keywords:
                is_off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in TRUSTING and not is_off:
                    found.append(keyword.arg)
    return found


def test_nothing_reads_a_file_that_can_run():
    for path in SOURCES:
        # Scripts measure PyTorch.
        allowed = {"torch"} if path.name in ("side_by_side.py", "smollm2.py") else set()
        source = path.read_text()
        assert set(offences(source)) <= allowed and "torch.load" not in source, path
    users = [path.name for path in SOURCES if "runpy" in path.read_text()]
    assert users == ["names.py"]


# --- Tokenizers -----------------------------------------------------------------------------


def test_code_beside_a_tokenizer_is_not_run(tmp_path):
    canary = tmp_path / "canary"
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "vocab.txt").touch()
    (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w')\nclass Evil: pass\n")
    own_code = {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    settings = json.dumps({"tokenizer_class": "Evil"} | own_code)
    (folder / "tokenizer_config.json").write_text(settings)
    config = json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}})
    (folder / "config.json").write_text(config)
    with pytest.raises(DataError, match="damaged or no tokenizer"):
        load_tokenizer(str(folder))
    assert not canary.exists()


def deep(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize(
    "content",
    [deep(100_000), json.dumps(dict.fromkeys(map(str, range(10**4)), 1)), "[" * 10**6],
    ids=["deep", "wide", "open"],
)
@pytest.mark.parametrize("name", ["tokenizer.json", "folder/tokenizer_config.json"])
def test_a_forged_tokenizer_is_refused_in_a_line(tmp_path, name, content):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "vocab.txt").touch()
    (tmp_path / name).write_text(content)
    path = tmp_path / ("folder" if name.startswith("folder") else name)
    with pytest.raises(DataError) as caught:
        load_tokenizer(str(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "as_folder"), [("spiece.model", False), ("vocab.txt", True)])
def test_a_tokenizer_of_a_terabyte_is_refused_unread(tmp_path, name, as_folder):
    with open(tmp_path / name, "wb") as file:
        file.truncate(2**40)  # a sparse file
    path = tmp_path if as_folder else tmp_path / name
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match="1099511627776 bytes"):
        load_tokenizer(str(path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB


# --- Folders that somebody sent ---------------------------------------------------------------

CONFIG = """
from toy import tiny_config

def get_config():
    data = {"source": "text", "path": "texts/*.txt", "num_sequences": 64, "heldout_frac": 0.1}
    return tiny_config(data=data)
"""
SENT = "runs/sent/seed-0"
FROM_FOLDER = {
    "train": [SENT, "--config.num_rounds=2"],
    "plan": ["--config=tiny.py", f"--workdir={SENT}"],
    "report": [SENT, "--out=page"],
    "export": [SENT, "--out=model"],
    "generate": [f"{SENT}/export", "--tokens=2"],
}


@pytest.fixture(scope="module")
def honest(tmp_path_factory, one_device):
    """A folder with a config file, texts, and a finished run."""
    folder = tmp_path_factory.mktemp("honest")
    (folder / "texts").mkdir()
    for name in "abcdefgh":
        (folder / "texts" / f"{name}.txt").write_text(f"This is text {name}. " * 40)
    (folder / "tiny.py").write_text(CONFIG)
    with contextlib.chdir(folder):
        assert cli.main(["--config=tiny.py", f"--workdir={SENT}"]) == 0
    return folder


@pytest.mark.parametrize("command", FROM_FOLDER)
def test_no_command_runs_what_a_folder_holds_or_names(
    honest, tmp_path, monkeypatch, capsys, command
):
    monkeypatch.chdir(shutil.copytree(honest, tmp_path / "w"))
    run, canary = Path(SENT), tmp_path / "canary"
    evil = f"open({str(canary)!r}, 'w').close()\nclass Evil: pass\n"
    for folder in (run, run / "export", run / "report", run / "checkpoints"):
        for name in ("config", "evil", "sitecustomize", "conftest", "__init__"):
            (folder / f"{name}.py").write_text(evil)
    record = json.loads((run / "config.json").read_text())
    named = {"path": str((run / "config.py").resolve()), "text": evil, "entries": ["batching.test"]}
    named["sha256"] = hashlib.sha256(evil.encode()).hexdigest()
    (run / "config.json").write_text(json.dumps(record | {"config_file": named}))
    forged = {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoConfig": "evil.Evil"}}
    for name, more in (("tokenizer_config", {"tokenizer_class": "Evil"}), ("config", {})):
        path = run / "export" / f"{name}.json"
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(content | forged | more))
    payload = b"cposix\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR."
    for name in ("pytorch_model.bin", "state.pkl", "tokenizer.pkl"):
        (run / "export" / name).write_bytes(payload)
        (run / name).write_bytes(payload)
    done = cli.main([command, *FROM_FOLDER[command]]), canary.exists(), capsys.readouterr().err
    assert done == (0, False, "")


def test_every_command_that_takes_a_folder_is_tried():
    # join reads a bucket, and ticket prints a file without reading it.
    assert set(FROM_FOLDER) == set(cli.COMMANDS) - {"configs", "join", "ticket"}


# --- Config files and folders ---------------------------------------------------------------


MAKE = {
    "folder": Path.mkdir,
    "fifo": os.mkfifo,
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 16),
    "huge": lambda path: (path.touch(), os.truncate(path, 2**40)),
}


@pytest.mark.parametrize("kind", [*MAKE, "/dev/zero", "a\0b.py"])
def test_what_is_no_config_file_is_refused(tmp_path, capsys, kind):
    path = tmp_path / "config.py"
    if kind in MAKE:
        MAKE[kind](path)
    assert cli.main([f"--config={path if kind in MAKE else kind}"]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and "config" in err
    assert path not in executed  # which the processes of a run execute, too


@pytest.mark.parametrize(
    ("command", "encoding"), [("train", "latin-1"), ("report", "utf-8"), ("generate", "ascii")]
)
def test_no_text_and_no_name_ends_a_command(
    honest, tmp_path, monkeypatch, one_device, command, encoding
):
    monkeypatch.chdir(shutil.copytree(honest, tmp_path / "w"))
    (Path("texts") / "a.txt").rename("texts/caf\udce9 \u4e2d.txt")
    Path("texts/b.txt").write_text("caf\u00e9 \u4e2d\u6587 " * 80)
    words = {
        "train": ["--config=tiny.py", "--workdir=new", "--config.data.path=texts/[!\udce8]*"],
        "report": [SENT, f"--out={tmp_path}/page"],
        "generate": [f"{SENT}/export", "--tokens=2", "--prompt=caf\udce9 \u4e2d"],
    }
    output = io.TextIOWrapper(io.BytesIO(), encoding, "strict")
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "argv", ["adloco", command, *words[command]])
    with pytest.raises(SystemExit) as ended:
        cli.command()
    assert ended.value.code == 0 and output.errors == "backslashreplace"


def test_a_folder_whose_name_is_not_utf_8_is_refused_at_the_start(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("tiny.py").write_text(CONFIG)
    for words in (
        ["train", "--config=tiny.py", "--workdir=caf\udce9"],
        ["plan", "--config=tiny.py", "--workdir=caf\udce9"],
        ["export", ".", "--out=caf\udce9"],
    ):
        assert cli.main(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith("surrogates not allowed; name another")
    assert os.listdir() == ["tiny.py"]
