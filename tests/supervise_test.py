"""Groups of small programs under supervision, each failing in its own way; no JAX in them."""

import itertools
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import pytest

from adloco_jax.run import supervise

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import launch_local  # noqa: E402

# What each program begins with: its number, how often it was started, a run's folder to write to.
# None outlives a minute, so that a fault here leaves none behind.
PRELUDE = """
import os, resource, signal, sys, time
from pathlib import Path
signal.alarm(60)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
options = dict(word[2:].split("=") for word in sys.argv[1:])
me, workdir = int(options["process_id"]), Path(options["workdir"])
workdir.mkdir(exist_ok=True)
with open(workdir / f"starts-{me}", "a+") as file:
    file.write(options["coordinator"] + "\\n")
    file.seek(0)
    start = len(file.readlines())
(workdir / f"pid-{me}-{start}").write_text(str(os.getpid()))
def save(number):
    (workdir / "checkpoints" / str(number)).mkdir(parents=True, exist_ok=True)
def record():
    with open(workdir / "ledger.jsonl", "a") as file:
        file.write('{"event": "round"}\\n')
def until(name):
    while not (workdir / name).exists():
        time.sleep(0.02)
def on_stop(function):
    signal.signal(signal.SIGTERM, lambda *_: function())
    signal.signal(signal.SIGINT, lambda *_: function())
def kill_me(number):
    os.kill(os.getpid(), number)
def forever():
    while True:
        record()
        time.sleep(0.05)
"""


@pytest.fixture
def group(tmp_path, capfd, monkeypatch):
    """Runs a program as a group: exit code, standard error, standard output."""
    monkeypatch.setattr(supervise, "_POLL_S", 0.02)

    def run(program, *, num_processes=2, grace_s=20.0, **limits):
        path = tmp_path / "program.py"
        path.write_text(PRELUDE + textwrap.dedent(program))
        code = supervise.supervise(
            [sys.executable, "-S", str(path), f"--workdir={tmp_path / 'run'}"],
            tmp_path / "run",
            num_processes=num_processes,
            grace_s=grace_s,
            **limits,
        )
        out, err = capfd.readouterr()
        return code, err, out

    return run


def num_starts(tmp_path, number=0):
    return len((tmp_path / "run" / f"starts-{number}").read_text().splitlines())


def wait_for(condition):
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def is_alive(path):
    """Whether the process of a recorded id runs, and has not ended without being collected."""
    try:
        os.kill(int(path.read_text()), 0)
    except ProcessLookupError:
        return False
    status = Path("/proc", path.read_text(), "stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_killed_process_ends_the_rest_and_all_resume_from_the_checkpoint(group, tmp_path):
    code, err, _ = group(
        """
        if start == 2:
            sys.exit()
        save(7)
        until("pid-0-1")
        if me == 1:
            kill_me(signal.SIGKILL)
        time.sleep(60)
        """
    )
    [line] = err.splitlines()
    when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.match(rf"{when} process 1 of 2 was killed by SIGKILL; .* from round 7 ", line)
    assert code == 0 and not is_alive(tmp_path / "run" / "pid-0-1")
    assert num_starts(tmp_path) == num_starts(tmp_path, 1) == 2


def test_a_process_that_ignores_sigterm_is_killed_with_its_children(group, tmp_path):
    code, _, _ = group(
        """
        if start == 2:
            sys.exit()
        if me == 0:
            child = os.fork()
            if not child:
                signal.alarm(60)
            on_stop(lambda: None)
            if child:
                (workdir / "pid-child").write_text(str(child))
            time.sleep(60)
        until("pid-child")
        sys.exit(1)
        """,
        grace_s=0.5,
    )
    assert code == 0 and not is_alive(tmp_path / "run" / "pid-0-1")
    wait_for(lambda: not is_alive(tmp_path / "run" / "pid-child"))  # collected by another process


def test_a_stopped_process_is_found_by_the_silent_ledger_and_killed(group, tmp_path):
    code, err, _ = group(
        """
        if start == 2:
            sys.exit()
        save(3)
        record()
        if me == 1:
            kill_me(signal.SIGSTOP)
        time.sleep(60)
        """,
        watchdog_s=2.0,
        grace_s=0.2,
    )
    assert code == 0
    assert "ledger.jsonl has not changed for 2 s; all" in err and "from round 3" in err
    assert not is_alive(tmp_path / "run" / "pid-1-1")
    assert num_starts(tmp_path) == 2


@pytest.mark.parametrize(
    ("grows", "pause_s", "expected"), [(True, 1.0, 0), (False, 1000.0, 0), (False, 1.0, 5)]
)
def test_the_watchdog_counts_the_seconds_that_the_ledger_is_silent(
    tmp_path, monkeypatch, grows, pause_s, expected
):
    # A process that ends at the 21st poll, a second after the other; a pause is of the machine.
    ledger, polls, now_s = tmp_path / "ledger.jsonl", itertools.count(), [0.0]

    def sleep(_):
        now_s[0] += 1.0 if now_s[0] else pause_s
        if grows:
            ledger.write_text("x" * int(now_s[0]))

    clock = types.SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep)
    monkeypatch.setattr(supervise, "time", clock)
    popen = types.SimpleNamespace(pid=os.getpid(), returncode=0)
    popen.poll = lambda: 0 if next(polls) == 20 else None
    process = supervise._Process(popen, "process 0", None, None)
    watchdog_s = 30.0 if pause_s > 1 else 10.0
    assert supervise._follow([process], ledger, watchdog_s, 10.0, []).code == expected


def test_restarts_without_progress_end_with_the_cause(group):
    code, err, _ = group("save(5); sys.exit('a peer has gone' if me else 0)", max_restarts=1)
    # The first failure comes after a new checkpoint; the one that follows brings nothing.
    assert code == 1 and err.count("restart 1 of 1") == 1
    assert err.splitlines()[-1] == (
        "process 1 of 2 ended with exit code 1: a peer has gone;"
        " gave up after 1 restarts without progress"
    )


def test_a_signal_as_the_last_cause_is_out_of_resources(group):
    code, err, _ = group("me or kill_me(signal.SIGKILL); time.sleep(60)", max_restarts=0)
    assert code == 5
    assert err == (
        "process 0 of 2 was killed by SIGKILL; gave up after 0 restarts without progress\n"
    )


def test_a_higher_checkpoint_is_progress_and_a_lower_one_is_not(group, tmp_path):
    # The newest, damaged and set aside, is written again: endless restarts, if that counted.
    code, err, _ = group(
        """
        if me == 0:
            save(min(start, 3))
            if start == 4:
                (workdir / "checkpoints" / "3").rmdir()
            sys.exit(1)
        """,
        max_restarts=1,
    )
    assert code == 1 and "gave up after 1 restarts" in err
    assert num_starts(tmp_path) == 4


def test_a_smaller_micro_batch_to_try_is_progress(group, tmp_path):
    # Out of memory at 64, 32 and 16; a note that says the same again is no progress.
    code, err, _ = group(
        """
        note = workdir / f".max_batch_size-round-1-process-{me}"
        note.write_text(str(2 ** max(6 - start, 3)))
        sys.exit(5)
        """,
        max_restarts=1,
    )
    assert code == 5 and "gave up after 1 restarts" in err
    assert num_starts(tmp_path) == 4


def test_a_mistake_is_not_repeated(group, tmp_path):
    code, err, _ = group('me and (print("data.path: none"), sys.exit(3)); time.sleep(60)')
    assert (code, num_starts(tmp_path)) == (3, 1)
    assert err.splitlines() == [
        "[1] data.path: none",
        "process 1 of 2 ended with exit code 3: data.path: none",
    ]


def test_a_mistake_found_after_another_process_broke_is_the_cause(group, tmp_path):
    code, _, _ = group(
        """
        me or (on_stop(lambda: sys.exit(3)), (workdir / "ready").touch(), time.sleep(60))
        until("ready")
        os.abort()
        """
    )
    assert (code, num_starts(tmp_path)) == (3, 1)


def test_the_cause_is_named_rather_than_its_consequence():
    def ended(code):
        return supervise._Process(types.SimpleNamespace(returncode=code), "", None, None)

    codes = [0, -signal.SIGABRT, 1, -signal.SIGKILL, 5, 75, 3]
    assert [p.popen.returncode for p in sorted(map(ended, codes), key=supervise._rank)] == [
        *(3, 75, 5, -signal.SIGKILL, 1, -signal.SIGABRT, 0)
    ]


def test_a_preempted_process_leaves_the_others_time_to_save(group, tmp_path):
    code, err, _ = group("me and (time.sleep(1.2), (workdir / 'saved').touch()); sys.exit(75)")
    assert (code, err, num_starts(tmp_path)) == (75, "", 1)
    assert (tmp_path / "run" / "saved").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_stop_is_forwarded_to_all_and_waits_for_them_to_save(group, tmp_path, request, number):
    if signal.getsignal(number) == signal.SIG_IGN:  # SIGHUP, if the tests run under nohup
        signal.signal(number, signal.SIG_DFL)
        request.addfinalizer(lambda: signal.signal(number, signal.SIG_IGN))
    before = signal.getsignal(number)
    code, err, _ = group(
        f"""
        def stop():
            (workdir / f"stopped-{{me}}").touch()
            until(f"stopped-{{1 - me}}")
            time.sleep(0.2)
            (workdir / f"saved-{{me}}").touch()
            sys.exit(75)
        on_stop(stop)
        (workdir / f"ready-{{me}}").touch()
        if me == 0:
            until("ready-1")
            os.kill(os.getppid(), {int(number)})
        forever()
        """
    )
    assert (code, err, num_starts(tmp_path)) == (75, "", 1)
    assert {path.name for path in (tmp_path / "run").glob("saved-*")} == {"saved-0", "saved-1"}
    assert signal.getsignal(number) == before


STOPS = """
on_stop(lambda: (workdir / f"stopped-{me}").touch())
(workdir / f"ready-{me}").touch()
if me == 0:
    until("ready-1")
    os.kill(os.getppid(), signal.SIGTERM)
    until("stopped-1")
"""


@pytest.mark.parametrize(
    ("program", "expected", "message"),
    [
        (
            STOPS + "me or os.kill(os.getppid(), signal.SIGTERM)\nforever()",
            143,
            "killed by a second",
        ),
        (STOPS + "time.sleep(60)", 5, "the processes are stuck"),
        (
            STOPS.replace("on_stop", "#") + "forever()",
            143,
            "stopped by SIGTERM before it could save",
        ),
    ],
)
def test_a_group_that_does_not_save_at_a_stop_is_not_restarted(
    group, tmp_path, program, expected, message
):
    code, err, _ = group(program, watchdog_s=1.5, grace_s=0.2)
    assert code == expected and message in err
    assert num_starts(tmp_path) == 1


def test_none_is_left_running_if_another_cannot_be_started(group, tmp_path, monkeypatch):
    pid = tmp_path / "run" / "pid-0-1"

    class Refusing(subprocess.Popen):
        def __init__(self, command, **others):
            if "--process_id=1" in command:
                wait_for(lambda: pid.exists() and pid.read_text())
                raise BlockingIOError(11, "no more processes")
            super().__init__(command, **others)

    monkeypatch.setattr(subprocess, "Popen", Refusing)
    with pytest.raises(BlockingIOError):
        group("time.sleep(60)")
    assert not is_alive(pid)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config=quickstart"], "--workdir: missing"),
        (["--workdir=runs/a", "--process_id=1"], "--process_id: is given"),
    ],
)
def test_the_launcher_refuses_in_one_line(words, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["launch_local.py", "--processes", "2", "--", *words])
    assert launch_local.main() == 2
    assert capsys.readouterr().err.startswith(message)


def test_the_launcher_reads_the_workdir_as_the_run_does():
    for words in (["--workdir=a", "--workdir=b"], ["--config", "c", "-workdir", "b"]):
        assert launch_local.workdir_of(words) == Path("b")


def test_emulated_devices_are_appended_to_the_flags():
    flag = "--xla_force_host_platform_device_count=4"
    assert launch_local.environment({"JAX_PLATFORMS": ""}, None) == {"JAX_PLATFORMS": ""}
    assert launch_local.environment({}, 4) == {"XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"}
    assert launch_local.environment({"XLA_FLAGS": "--a=1"}, 4)["XLA_FLAGS"] == f"--a=1 {flag}"


def test_the_launcher_runs_main_in_every_process_and_forwards_a_stop(tmp_path):
    # A package of that name in the folder that `python -m` looks in first.
    package = tmp_path / "adloco_jax"
    package.mkdir()
    (package / "__init__.py").touch()
    body = """
    on_stop(lambda: sys.exit(75))
    assert options["config"] == "x.py" and os.environ["XLA_FLAGS"].startswith("--xla_of_mine=1 ")
    print("here", os.environ["XLA_FLAGS"][-1], flush=True)
    (workdir / f"ready-{me}").touch()
    forever()
    """
    (package / "main.py").write_text(PRELUDE + textwrap.dedent(body))
    process = subprocess.Popen(
        [
            *(sys.executable, str(ROOT / "scripts" / "launch_local.py"), "--processes=2"),
            *("--devices-per-process=3", "--", "--config=x.py", f"--workdir={tmp_path / 'run'}"),
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_of_mine=1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    wait_for(lambda: process.poll() is not None or len(list(tmp_path.glob("run/ready-*"))) == 2)
    process.terminate()
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (75, "here 3\n", "[1] here 3\n")
