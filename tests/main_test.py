import contextlib
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from operator import attrgetter
from pathlib import Path
from unittest import mock

import jax
import pytest
from filelock import FileLock

from adloco_jax import BATCH_TESTS, __version__, errors, training
from adloco_jax import main as cli
from adloco_jax.cli.keys import override
from adloco_jax.cli.parser import parse
from adloco_jax.cli.train import configure
from adloco_jax.config import completed
from adloco_jax.errors import ConfigError, DataError
from adloco_jax.models.configured import build_model
from adloco_jax.run.kept import folder as run_folder
from adloco_jax.run.kept.folder import check_workdir, recorded_settings, write_config
from adloco_jax.settings import OPTIONS, default_of, meaning
from probes import crashes

pytestmark = pytest.mark.usefixtures("one_device")

ROOT = Path(__file__).resolve().parents[1]
DEFAULT = "from adloco_jax.config import default_config as get_config\n"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> Path:
    """A fresh working folder outside the checkout."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def configured(*words: str, config: str = "quickstart"):
    _, settings = configure(parse(["train", f"--config={config}", *words]))
    return completed(settings, reads=False)


def refused(capsys, *argv: str) -> list[str]:
    """The stderr lines of a command that must end with exit code 2 and write nothing."""
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err and os.listdir() == []
    return err.splitlines()


# --- Overrides that work --------------------------------------------------------------------


def test_overrides_reach_the_config():
    words = """--config.num_rounds=3 --config.inner.learning_rate 1e-4 --config.inner.clip_norm=1
        --config.data.num_sequences=100 --config.model.remat --config.log.wandb no
        --config.log.tensorboard False
        --config.batching.test_batch_size 16 --config.batching.test=ramp
        --config.batching.ramp='((0, 4), (3, 8))' --config.batching.buckets=(2,4)
        --config.batching.buckets=8 --config.inner.tx=sgd --config.inner.tx=adamw"""
    settings = configured(*shlex.split(words))
    given = (settings.num_rounds, settings.data.num_sequences, settings.batching.test_batch_size)
    assert given == (3, 100, 16)
    assert (settings.inner.learning_rate, settings.inner.clip_norm) == (1e-4, 1.0)
    assert settings.model.remat is True and settings.log.wandb is False
    assert settings.log.tensorboard is False
    assert settings.batching.ramp == ((0, 4), (3, 8))
    # The last override wins.
    assert (settings.batching.buckets, settings.inner.tx) == ((8,), "adamw")


def test_an_override_sets_a_key_that_the_config_lacks(elsewhere):
    (elsewhere / "own.py").write_text("from ml_collections import ConfigDict as get_config\n")
    settings = configured("--config.seed=3", "--config.model.width=128", config="own.py")
    assert (settings.seed, settings.model.width) == (3, 128)


def overridden(*words: str):
    """The config that the words of the command line make of the quickstart's."""
    config = importlib.import_module("adloco_jax.configs.quickstart").get_config()
    options = vars(parse(["train", "quickstart", *words]))
    for key in OPTIONS:
        if (text := options[f"config.{key}"]) is not None:
            override(config, key, text)
    return config


def test_every_key_can_be_overridden_by_its_own_value():
    before = overridden()
    values = {key: attrgetter(key)(before) for key in OPTIONS} | OPTIONAL | {"engine.kind": "ray"}
    after = overridden(*(f"--config.{key}={value}" for key, value in values.items()))
    assert {key: attrgetter(key)(after) for key in OPTIONS} == values


OPTIONAL = {key: OPTIONS[key].default or 60 for key in OPTIONS if default_of(key) is None}
OPTIONAL |= {"ensemble.initial_workers": 3, "ensemble.spawn_frac": 0.5, "batching.memory_frac": 0.5}
OPTIONAL |= {"data.tokenizer": "bytes"}


def test_none_unsets_an_optional_key():
    values = [f"--config.{key}={value}" for key, value in OPTIONAL.items()]
    unset = [f"--config.{key}=none" for key in OPTIONAL]
    for words, expected in ((values + unset, dict.fromkeys(OPTIONAL)), (unset + values, OPTIONAL)):
        config = overridden(*words)
        assert {key: attrgetter(key)(config) for key in OPTIONAL} == expected


def test_a_config_is_found_from_any_folder_and_beside_the_command_first(elsewhere):
    for name in ("diloco", "configs/diloco.py", str(ROOT / "configs" / "diloco.py")):
        assert configured(config=name).merge.policy == "none"
    (elsewhere / "configs").mkdir()
    (elsewhere / "configs" / "diloco.py").write_text(DEFAULT)
    assert configured(config="configs/diloco.py").merge.policy == "worst_with_worst"


def test_a_config_imports_its_neighbours_by_folder(tmp_path, elsewhere, monkeypatch):
    (elsewhere / "experiments").mkdir()
    (elsewhere / "experiments" / "base.py").write_text("raise AssertionError('not a neighbour')")
    monkeypatch.syspath_prepend(str(elsewhere))
    folder = tmp_path / "experiments"
    folder.mkdir()
    (folder / "base.py").write_text(DEFAULT)
    (folder / "wide.py").write_text(
        "from experiments import base\n"
        "def get_config():\n    c = base.get_config()\n    c.model.width = 128\n    return c\n"
    )
    path_before = list(sys.path)
    assert configured(config=str(folder / "wide.py")).model.width == 128
    assert sys.path == path_before


# --- Commands -------------------------------------------------------------------------------


def test_help_says_what_every_key_means_allows_and_how_to_unset_it(capsys):
    assert cli.main(["--config=quickstart", "--help"]) == 0
    out = capsys.readouterr().out
    assert "config.merge:\n  Which trainers are merged into one, and when" in out
    entries = out.split("  --config.")
    assert [entry.partition(" ")[0] for entry in entries[1:]] == list(OPTIONS)
    by_key = {entry.partition(" ")[0]: " ".join(entry.split()) for entry in entries}
    assert by_key["batching.eta"].endswith("a number, greater than 0, at most 100 (default: 0.8)")
    assert by_key["inner.clip_norm"].endswith("(default: unset); unset with =none")
    assert by_key["data.heldout_path"].endswith("text (default: ''); unset with =''")
    assert all(len(meaning(key).split()) > 1 for key in OPTIONS)


def test_every_command_has_help_that_does_not_wait_for_jax(elsewhere):
    commands = [["--version"], ["--help"], [], ["configs"], ["help"], ["version"]]
    commands += [["help", name] for name in cli.COMMANDS]
    code = f"""
import sys
from adloco_jax.main import main
for words in {commands}:
    assert main(words) == 0
    print("=== end of", words)
assert not {{"jax", "numpy"}} & set(sys.modules)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    printed = subprocess.check_output(command, env=environment, text=True).split("=== end of ")
    assert printed[0] == f"adloco_jax {__version__}\n"
    overview, *again = (printed[index].partition("\n")[2] for index in (1, 2, 4))
    assert again == [overview] * 2 and "adloco train quickstart" in overview
    for text, (name, add) in zip(printed[6:], cli.COMMANDS.items(), strict=False):
        card = add.__doc__.partition("\n")[0]
        assert f"{name} {card}" in " ".join(overview.split())
        assert f"usage: adloco {name} " in text and card in " ".join(text.split())


# First guesses of a new user, and the command that the answer names.
GUESSES = {
    "export": "write: adloco export runs/first",
    "export quickstart": "write: adloco export runs/first",
    "export runs/first --out runs": "--out runs: exists already and is not empty",
    "generate runs/first --sample=5": "did you mean --samples?",
    "generate runs/first": "write: adloco export runs/first",
    "report": "write: adloco report runs/first",
    "runs/first": "write: adloco report runs/first",
    "train runs/first --workdir runs/second": "runs/first: a run, which stays in its folder",
    "export runs/first --config.seed=3": "did you mean --config?",
    "train quickstart --data=x.txt": "did you mean --config.data.source or --config.data.path?",
    "plan quickstart --save x.json": "add --device KINDxN",
    "exprt runs/first": "did you mean adloco export runs/first?",
}


@pytest.mark.parametrize("words", GUESSES)
def test_a_wrong_first_guess_is_answered_with_the_right_command(elsewhere, capsys, words):
    run = elsewhere / "runs" / "first"
    run.mkdir(parents=True)
    (run / "ledger.jsonl").write_text("")
    assert cli.main(words.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and GUESSES[words] in err and err.count("\n") == 1


def test_shipped_configs_are_listed_by_name_and_can_be_imported(capsys):
    assert cli.main(["configs"]) == 0
    listed = capsys.readouterr().out.splitlines()
    names = [path.stem for path in (ROOT / "configs").glob("[!_]*.py")]
    assert len([line for line in listed if line.startswith("  ")]) == len(names)
    for name in names:
        module = importlib.import_module(f"adloco_jax.configs.{name}")
        assert any(
            line.split(maxsplit=1) == [name, module.__doc__.splitlines()[0]] for line in listed
        )


def test_the_schema_has_every_key_with_its_meaning_and_limits(capsys):
    assert cli.main(["configs", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    for key in OPTIONS:
        group, _, name = key.rpartition(".")
        part = schema["$defs"][f"{group.capitalize()}Settings"] if group else schema
        assert " ".join(part["properties"][name]["description"].split()) == meaning(key)
    eta = schema["$defs"]["BatchingSettings"]["properties"]["eta"]
    assert (eta["exclusiveMinimum"], eta["maximum"], eta["default"]) == (0, 100, 0.8)


# --- Overrides and files that do not --------------------------------------------------------


UNKNOWN = {
    "--config.inner.learning_rat=3": "inner.learning_rat: no such key; did you mean inner.",
    "--config.inner=3": "inner: no such key",
    "--config.batching.buckets[0]=3": "batching.buckets[0]: no such key; did you mean batching.",
    "--noconfig.inner.tx=x": "--noconfig.inner.tx=x: no such option; did you mean --config.",
    "--confg=3": "--confg=3: no such option; did you mean --config?",
    "stray": "stray: unexpected; a text to train on is --config.data.path=stray",
}
BAD = {
    "--config.inner.learning_rate=-1": "inner.learning_rate = -1.0: must be greater than 0",
    "--config.num_rounds=1e3": "num_rounds = '1e3': must be a valid integer",
    "--config.batching.ramp={[1]}": "batching.ramp = '{[1]}': must be a valid tuple",
    "--config.inner.clip_norm=nan": "inner.clip_norm = nan",
    "--config.outer.tx=adam": "outer.tx = 'adam': must be 'nesterov' or",
    "--config.model.width=66": "model.num_heads = 4, model.width = 66: ",
}


def test_all_unknown_words_and_then_all_bad_values_are_listed_at_once(capsys):
    for words, expected in (([*UNKNOWN, *BAD], UNKNOWN), (BAD, BAD)):
        lines = refused(capsys, "train", "quickstart", *words)
        assert len(lines) == len(expected)
        for start in expected.values():
            assert any(line.startswith(start) for line in lines), start
    (line,) = refused(capsys, "train", "--config=quickstart", "--config.model.remat", "maybe")
    assert line.startswith("maybe: unexpected")


def test_what_was_found_is_said(elsewhere, capsys, monkeypatch):
    (elsewhere / "a.jsonl").write_text(json.dumps({"messages": []}))
    monkeypatch.setattr(training, "train", lambda settings, *_, **__: print(settings.data.source))
    assert cli.main(["train", "quickstart", "--config.data.path=a.jsonl"]) == 0
    assert capsys.readouterr().out == (
        "found: data.source=jsonl by the files of a.jsonl, data.text_column=messages by the files"
        " of a.jsonl; set a key to choose another value\njsonl\n"
    )


@pytest.mark.parametrize(("size", "config"), [("10M", "diloco"), ("100M", "growing_pool")])
def test_one_size_sets_the_model_and_its_tokens(size, config):
    text = ["--config.data.path=a.txt", "--config.data.tokenizer=bytes"]
    settings = configured(f"--size={size}", *text, config=config)
    params = jax.eval_shape(build_model(settings.model)[0], jax.random.key(0))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert 0.85 < count / (1e6 * int(size[:-1])) < 1.02
    assert 0.99 < settings.num_tokens / (20 * count) < 1.01
    model = settings.model
    assert model.width == 64 * model.num_layers == 128 * model.num_heads


def test_a_config_of_one_size_and_an_unknown_size_are_refused():
    with pytest.raises(ConfigError, match=r"quickstart.py: TypeError: .* 'size'"):
        configured("--size=10M")
    with pytest.raises(ConfigError, match="--size: invalid choice: '12M'"):
        configured("--size=12M", config="diloco")


def test_no_line_and_no_traceback_shows_a_secret(capfd, monkeypatch):
    address = "https://me:Hunter2@hub.example/c4?X-Amz-Signature=Hunter2&b=1"
    library = f"401 for {address} with Bearer Hunter2.x, token hf_Hunter2"
    for error in (ConfigError(library), OSError(library), ValueError(library)):
        monkeypatch.setattr(cli, "parse", mock.Mock(side_effect=error))
        if isinstance(error, ValueError):
            monkeypatch.setattr(cli.sys, "exit", lambda code: None)
            monkeypatch.setattr(cli.sys, "argv", ["adloco"])
            cli.command()  # an internal error keeps its traceback
        else:
            cli.main([])
        shown = capfd.readouterr().err
        assert "https://hub.example/c4" in shown and "token hf_..." in shown
        assert "Hunter2" not in shown
    assert "Hunter2" not in errors.reason(ValueError(library)) + str(DataError(library))
    plain = "a/b.json: user@host, 3 > 2? yes: http://x/y#z"
    assert errors.without_secrets(plain) == plain


def test_a_broken_config_file_is_refused(capsys, tmp_path):
    changed = "def get_config():\n    c = default_config()\n    {}\n    return c"
    changed = f"from adloco_jax.config import default_config\n{changed}"
    for text, expected in (
        ("def get_config(:", "SyntaxError"),
        ("import nowhere_to_be_found", "line 1: ModuleNotFoundError"),
        ("def get_config():\n    return undefined", "line 2: NameError"),
        ("def get_config():\n    raise SystemExit('no')", "line 2: SystemExit: no"),
        ("x = 1", "needs a get_config()"),
        ("def get_config():\n    return {}", "needs a get_config()"),
        ("\0", "null bytes"),
        (changed.format("c.inner.txx = 1"), 'config is locked. Did you mean "tx"'),
        (changed.format("c.num_rounds = '3'"), "line 4: TypeError"),
    ):
        (tmp_path / "mine.py").write_text(text)
        words = ["--config.seed=1", "--config.data.path=x.txt"]
        lines = refused(capsys, f"--config={tmp_path / 'mine.py'}", *words)
        assert expected in "\n".join(lines)
        assert len(lines) == 1


def test_errors_end_with_their_own_code_and_one_line(capsys, monkeypatch):
    for error, code, line in (
        (ConfigError("one clear line"), 2, "one clear line\n"),
        (DataError("one clear line"), 3, "one clear line\n"),
        (MemoryError("no more"), 5, "out of resources: no more\n"),
        (OSError(24, "Too many"), 5, "out of resources: [Errno 24] Too many\n"),
        (RuntimeError("RESOURCE_EXHAUSTED: x"), 5, "out of resources: RESOURCE_EXHAUSTED: x\n"),
    ):
        monkeypatch.setattr(cli, "parse", mock.Mock(side_effect=error))
        assert cli.main([]) == code
        assert capsys.readouterr().err == line
    monkeypatch.setattr(cli, "parse", mock.Mock(side_effect=RuntimeError("a mistake of ours")))
    with pytest.raises(RuntimeError):
        cli.main([])


# --- As a process ---------------------------------------------------------------------------


def test_a_platform_that_is_not_here_is_one_line(elsewhere):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cuda"}
    commands = [["train", "quickstart"], ["plan", "quickstart"], ["generate", "some/model"]]
    code = f"from adloco_jax.main import main\nprint([main(words) for words in {commands}])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[2, 2, 2]\n" and list(elsewhere.iterdir()) == []
    lines = done.stderr.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("JAX_PLATFORMS=cuda: JAX cannot use it here") for line in lines)


def test_an_interrupt_ends_a_command_even_in_a_callback_of_the_garbage_collector(elsewhere):
    code = """
import gc, signal, sys
from adloco_jax import main
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a job that a shell started in the background
gc.callbacks.append(lambda phase, info: signal.raise_signal(signal.SIGINT))
sys.argv = ["adloco", "train", "quickstart"]
main.command()
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize("words", [["configs"], ["train", "qickstart"]])
def test_a_closed_pipe_ends_a_command_quietly(words):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "adloco_jax.main", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with os.fdopen(write, "w") as pipe:
        outputs = {"stdout": pipe, "stderr": pipe if "qickstart" in words else subprocess.PIPE}
        done = subprocess.run(command, env=environment, **outputs, timeout=60)
    assert done.returncode == 141 and not done.stderr


# --- Runs that go on ------------------------------------------------------------------------

TINY = ["--config=quickstart", "--config.num_rounds=1", "--config.model.width=16"]
TINY += ["--config.model.num_layers=1", "--config.model.mlp_width=16", "--workdir=run"]
TINY += ["--config.data.source=text", f"--config.data.path={ROOT}/docs/*.md"]
TINY += ["--config.data.num_sequences=200", "--config.inner.steps_per_round=2"]
TINY += ["--config.ensemble.num_trainers=1", "--config.ensemble.num_workers=1"]
TINY += ["--config.batching.test=constant"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert cli.main([*TINY, f"--workdir={folder}"]) == 0
    return folder


@pytest.fixture
def run(finished, elsewhere) -> Path:
    """A finished run of `TINY`, as `run` in the working folder."""
    return Path(shutil.copytree(finished, elsewhere / "run"))


def test_a_finished_run_prints_its_table_again_and_warns_of_damage(run, capsys):
    ledger = (run / "ledger.jsonl").read_bytes()
    assert cli.main(TINY) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "run: already finished; nothing was trained"
    table = lines[-9:]
    assert any(line.startswith("held-out loss ") for line in table)
    (run / "checkpoints" / "1" / "host.json").write_text("{}")
    assert cli.main(TINY) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-9:] == table
    assert err.startswith("damaged: ") and "1/host.json" in err and len(err.splitlines()) == 1
    assert (run / "ledger.jsonl").read_bytes() == ledger
    shutil.rmtree(run / "checkpoints")
    faults = run_folder.faults_if_finished(run, configured(*TINY[1:]))
    assert faults == [f"{run}/checkpoints: gone, or empty"]


def test_a_finished_run_says_how_to_train_on_until_all_rows_are_read(run, capsys):
    assert cli.main(TINY) == 0
    command = capsys.readouterr().out.splitlines()[-1].partition("was read once: adloco ")[2]
    _, settings = configure(parse(shlex.split(command)))
    assert (settings.num_rounds, settings.num_tokens) == (None, 200 * 64)  # rows of 64 tokens
    assert run_folder.faults_if_finished(run, completed(settings, run)) is None


def test_flags_let_a_run_resume_with_changes(run, capsys, monkeypatch):
    changed = [*TINY, "--config.num_rounds=2", "--config.inner.learning_rate=1e-4"]
    assert cli.main(changed) == 2
    out, err = capsys.readouterr()
    assert out == "" and "inner.learning_rate: was 0.001, is 0.0001" in err
    assert "--accept-config-change" in err.splitlines()[-1]
    resumed = mock.Mock()
    monkeypatch.setattr(training, "train", resumed)
    assert cli.main([*changed, "--accept_config_change"]) == 0
    assert resumed.call_args.kwargs["accept_config_change"]


def test_every_printed_command_resumes_the_run_when_pasted(elsewhere, capsys, monkeypatch):
    fresh = ["train", *(word for word in TINY if "workdir" not in word), "--config.num_rounds=7"]

    def paste(text: str, done: int) -> None:
        (command,) = re.findall("to resume(?: it)?: (adloco .*)", text)
        assert cli.main(shlex.split(command)[1:]) == 75
        assert f"resuming after round {done}\n" in capsys.readouterr().out

    stop = threading.Event()
    stop.set()  # after each round
    requests = mock.Mock(return_value=contextlib.nullcontext(stop))
    with monkeypatch.context() as patch:
        patch.setattr("adloco_jax.host.processes.stop_requests", requests)
        assert cli.main(fresh) == 75
        header, preemption = capsys.readouterr()
        (run,) = Path("runs").iterdir()
        paste(header, 1)
        paste(preemption, 2)
        with monkeypatch.context() as full:
            crashes.install("save.begin", lambda: crashes.fail("ENOSPC"), patch=full.setattr)
            assert cli.main(["train", str(run)]) == 5
        full_disk = capsys.readouterr().err
        paste(full_disk, 3)
        assert len([*Path("runs").iterdir()]) == 1
        other = [word.replace("num_rounds=7", "num_rounds=8") for word in fresh]
        patch.setattr("adloco_jax.training.train", lambda *args, **kwargs: None)
        for words, said in ((fresh, [str(run)]), (other, [])):
            assert cli.main(words) == 0
            out = capsys.readouterr().out
            assert re.findall("(.*): an unfinished run of this command", out) == said
            assert "a finished run" not in out
            if said:
                begun = out
    paste_to_end = shlex.split(begun.partition("to resume it: ")[2])[1:]
    assert cli.main([*paste_to_end, "--config.num_rounds=5"]) == 0
    assert "resuming after round 4\n" in capsys.readouterr().out
    assert cli.main(["train", str(run), "--config.num_rounds=5"]) == 0
    assert f"{run}: already finished" in capsys.readouterr().out
    monkeypatch.setattr("adloco_jax.training.train", lambda *args, **kwargs: None)
    assert cli.main(fresh) == 0
    said = f"^{run}: an unfinished run|{run}: a finished run of this command; runs/.* starts anew\n"
    assert re.search(said, capsys.readouterr().out)


OWN = """
from adloco_jax import BATCH_TESTS
from configs import quickstart

def get_config():
    BATCH_TESTS["own"] = BATCH_TESTS["constant"]
    config = quickstart.get_config()
    config.batching.test = "own"
    return config
"""


@mock.patch.dict(BATCH_TESTS)
def test_a_run_with_an_entry_of_a_config_file_is_read_with_that_file_again(
    elsewhere, capsys, monkeypatch
):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    (elsewhere / "own.py").write_text(OWN)
    settings = configured(config="own.py")
    write_config(elsewhere, settings)
    del BATCH_TESTS["own"]
    command = ["export", str(elsewhere), "--out=model"]
    assert cli.main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "batching.test = 'own': no entry of this library; run the config file" in line
    assert cli.main([*command, "--config=own.py"]) == 2  # the run has no checkpoint
    assert "no checkpoint, have none" in capsys.readouterr().err
    assert recorded_settings(elsewhere) == settings
    (elsewhere / "ledger.jsonl").touch()
    assert cli.main(["plan", str(elsewhere), "--config=own.py"]) == 0
    with pytest.raises(ConfigError, match="'mine': must be 'norm' or .* 'own'"):
        configured("--config.batching.test=mine")


def test_a_folder_that_is_taken_is_refused_before_data_are_loaded(elsewhere, capsys, monkeypatch):
    refuse = mock.Mock(side_effect=AssertionError)
    monkeypatch.setattr("adloco_jax.run.before.assemble.load_corpus", refuse)
    (elsewhere / "run").mkdir()
    with FileLock(elsewhere / "run" / ".lock"):
        assert cli.main(TINY) == 2
    assert "workdir run: another process runs there" in capsys.readouterr().err
    monkeypatch.setattr("tempfile.mkdtemp", mock.Mock(side_effect=PermissionError(13, "denied")))
    assert cli.main([*TINY, "--workdir=other"]) == 2
    assert "workdir other: cannot be written (denied)" in capsys.readouterr().err


def test_no_option_that_names_something_to_write_takes_an_address(elsewhere, capsys):
    found = []
    for command in cli.COMMANDS:
        assert cli.main([command, "--help"]) == 0
        for option in re.findall(r"(--[\w-]+) (?:FILE|FOLDER)\b", capsys.readouterr().out):
            found.append(f"{command} {option}")
            (line,) = refused(capsys, command, option, "s3://me:secret@bucket/run1", "x")
            assert line.startswith("s3://bucket/run1: an address; name a path here")
    for wanted in ("train --workdir", "export --out", "plan --save"):
        assert wanted in found
    for workdir in ("gs://bucket/run1", Path("gs://bucket/run1"), "file:///run1"):
        with pytest.raises(ConfigError, match="workdir .*: an address"):
            check_workdir(workdir)
    assert list(elsewhere.iterdir()) == []
