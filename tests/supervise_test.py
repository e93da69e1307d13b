"""Groups of small programs under supervision, each misbehaving in its own way; no JAX in them."""

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import pytest

from adloco_jax.run import checkpoint, supervise

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import launch_local  # noqa: E402

# What each program begins with: its number, how often it was started, a run's folder to write to.
# None outlives a minute, so that no fault here leaves one behind.
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
def until(condition):
    while not condition():
        time.sleep(0.02)
def on_stop(function):
    signal.signal(signal.SIGTERM, lambda *_: function())
    signal.signal(signal.SIGINT, lambda *_: function())
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


def is_alive(path):
    try:
        os.kill(int(path.read_text()), 0)
    except ProcessLookupError:
        return False
    return True


def test_all_done_is_zero_and_says_nothing(group, tmp_path):
    assert group("record()") == (0, "", "")
    assert num_starts(tmp_path) == num_starts(tmp_path, 1) == 1


def test_each_process_is_told_its_place(group):
    code, err, out = group(
        """
        print(me, options["num_processes"], options["coordinator"].split(":")[0])
        """,
        num_processes=3,
    )
    assert code == 0
    assert out == "0 3 127.0.0.1\n"
    assert sorted(err.splitlines()) == ["[1] 1 3 127.0.0.1", "[2] 2 3 127.0.0.1"]


def test_a_killed_process_ends_the_rest_and_the_group_goes_on_from_its_checkpoint(group, tmp_path):
    code, err, _ = group(
        """
        if start == 2:
            sys.exit()
        save(7)
        until((workdir / "pid-0-1").exists)
        if me == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        """
    )
    assert code == 0
    [line] = err.splitlines()
    assert re.match(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d process 1 of 2 was killed by SIGKILL; .* from round 7 ",
        line,
    )
    assert not is_alive(tmp_path / "run" / "pid-0-1")
    assert num_starts(tmp_path) == num_starts(tmp_path, 1) == 2


def test_a_killed_process_0_is_replaced_too(group):
    code, err, _ = group(
        """
        if start == 1:
            until((workdir / "pid-1-1").exists)
            if me == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        """
    )
    assert code == 0
    assert "process 0 of 2 was killed by SIGKILL" in err and "from the beginning" in err


def test_an_unexpected_exit_code_restarts_the_group_and_names_what_was_said(group, tmp_path):
    code, err, _ = group(
        """
        if start == 1 and me == 1:
            sys.exit("RuntimeError: a peer has gone")
        """
    )
    assert code == 0
    assert "process 1 of 2 ended with exit code 1: RuntimeError: a peer has gone; all" in err
    assert num_starts(tmp_path) == 2


def test_a_process_that_ignores_the_end_is_killed(group, tmp_path):
    start_s = time.monotonic()
    code, _, _ = group(
        """
        if start == 2:
            sys.exit()
        if me == 0:
            on_stop(lambda: None)
            (workdir / "deaf").touch()
            time.sleep(60)
        until((workdir / "deaf").exists)
        sys.exit(1)
        """,
        grace_s=0.5,
    )
    assert code == 0
    assert time.monotonic() - start_s < 40  # it would go on for a minute
    assert not is_alive(tmp_path / "run" / "pid-0-1")


def test_what_a_killed_process_had_started_goes_with_it(group, tmp_path):
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
        until((workdir / "pid-child").exists)
        sys.exit(1)
        """,
        grace_s=0.5,
    )
    assert code == 0
    # Its parent has gone, so that another collects it, in a moment.
    deadline_s = time.monotonic() + 20
    while is_alive(tmp_path / "run" / "pid-child") and not is_zombie(tmp_path / "run/pid-child"):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def is_zombie(path):
    status = Path("/proc", path.read_text(), "stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_stopped_process_is_found_by_the_silent_ledger_and_killed(group, tmp_path):
    code, err, _ = group(
        """
        if start == 2:
            sys.exit()
        save(3)
        record()
        if me == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)
        """,
        watchdog_s=3.0,
        grace_s=0.5,
    )
    assert code == 0
    assert "ledger.jsonl has not changed for 3 s (stopped: process 1 of 2); all" in err
    assert "from round 3" in err
    assert not is_alive(tmp_path / "run" / "pid-1-1")
    assert num_starts(tmp_path) == 2


def test_a_ledger_that_grows_keeps_the_watchdog_quiet(group, tmp_path):
    code, err, _ = group(
        """
        for _ in range(60):
            if me == 0:
                record()
            time.sleep(0.1)
        """,
        watchdog_s=4.0,
    )
    assert (code, err, num_starts(tmp_path)) == (0, "", 1)


def test_a_pause_of_the_whole_machine_is_not_silence(group, tmp_path, monkeypatch):
    def later():
        return time.monotonic() + 1000 * (tmp_path / "run" / "ready").exists()

    clock = types.SimpleNamespace(monotonic=later, sleep=time.sleep, strftime=time.strftime)
    monkeypatch.setattr(supervise, "time", clock)
    program = "time.sleep(1); (workdir / 'ready').touch(); time.sleep(1)"
    assert group(program, watchdog_s=30.0) == (0, "", "")
    assert num_starts(tmp_path) == 1


def test_a_group_that_is_always_stuck_ends_as_out_of_resources(group, tmp_path):
    code, err, _ = group("time.sleep(60)", watchdog_s=0.5, max_restarts=1)
    assert code == 5
    assert err.splitlines()[-1].startswith("the processes are stuck: ")
    assert num_starts(tmp_path) == 2


def test_restarts_without_progress_end_with_the_cause(group, tmp_path):
    code, err, _ = group("save(5); sys.exit(9 if me else 0)")
    # The first failure comes after a new checkpoint; the three that follow bring nothing.
    assert code == 9
    assert num_starts(tmp_path) == 4
    *restarts, last = err.splitlines()
    assert [f"restart {n} of 3" in line for n, line in enumerate(restarts, 1)] == [True] * 3
    assert last == (
        "process 1 of 2 ended with exit code 9; given up after 3 restarts without progress"
    )


def test_a_signal_as_the_last_cause_is_out_of_resources(group, tmp_path):
    code, err, _ = group(
        """
        if me == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        """,
        max_restarts=0,
    )
    assert code == 5
    assert err == (
        "process 0 of 2 was killed by SIGKILL; given up after 0 restarts without progress\n"
    )
    assert num_starts(tmp_path) == 1


def test_progress_allows_further_restarts(group, tmp_path):
    code, err, _ = group("save(start); sys.exit(9 if start < 6 else 0)", max_restarts=1)
    assert code == 0
    assert num_starts(tmp_path) == 6
    assert all("restart 1 of 1" in line for line in err.splitlines() if "start again" in line)


def test_a_smaller_micro_batch_to_try_is_progress(group, tmp_path):
    # Out of memory at 64, 32, 16 and 8; a note that says the same again would be none.
    code, err, _ = group(
        """
        if start < 5:
            note = workdir / f".max_batch_size-round-1-process-{me}"
            note.write_text(str(2 ** (6 - start)))
            sys.exit(5)
        """,
        max_restarts=1,
    )
    assert code == 0
    assert num_starts(tmp_path) == 5
    code, err, _ = group(
        """
        (workdir / ".max_batch_size-round-1-process-1").write_text("2")
        sys.exit(5)
        """,
        max_restarts=1,
    )
    assert code == 5 and "given up after 1 restarts" in err


def test_a_checkpoint_below_the_highest_is_no_progress(group, tmp_path):
    # As where the newest is damaged, set aside, and written again: for ever, if that counted.
    code, _, _ = group(
        """
        if me == 0:
            save(8)
            if start % 2 == 0:
                (workdir / "checkpoints" / "8").rmdir()
                save(6)
            sys.exit(1)
        """
    )
    assert code == 1
    assert num_starts(tmp_path) == 4


def test_checkpoints_are_those_that_a_run_would_go_on_from(tmp_path):
    folder = tmp_path / "checkpoints"
    assert supervise._newest_round(tmp_path) == -1
    for name in ("3", "12", "020", "40.orbax-tmp", "damaged-50"):
        (folder / name).mkdir(parents=True)
    (folder / "60").write_text("a file")
    assert supervise._newest_round(tmp_path) == checkpoint.list_rounds(folder)[0] == 12


@pytest.mark.parametrize("mistake", [2, 3, 4])
def test_a_mistake_is_not_repeated(group, tmp_path, mistake):
    code, err, _ = group(
        f"""
        if me == 1:
            print("data.path: no such file", file=sys.stderr)
            sys.exit({mistake})
        time.sleep(60)
        """
    )
    assert code == mistake
    assert num_starts(tmp_path) == 1
    assert err.splitlines() == [
        "[1] data.path: no such file",
        f"process 1 of 2 ended with exit code {mistake}: data.path: no such file",
    ]


def test_a_mistake_counts_also_where_another_process_broke_first(group, tmp_path):
    # The one that made it may take longer to leave than the one that misses it.
    code, _, _ = group(
        """
        if me == 0:
            on_stop(lambda: sys.exit(3))
            (workdir / "ready").touch()
            time.sleep(60)
        until((workdir / "ready").exists)
        os.abort()
        """
    )
    assert code == 3
    assert num_starts(tmp_path) == 1


def test_the_cause_is_named_rather_than_its_consequence(group, monkeypatch):
    monkeypatch.setattr(supervise, "_SETTLE_S", 20.0)
    code, err, _ = group(
        """
        if start == 2:
            sys.exit()
        if me == 0:
            (workdir / "gone").touch()
            os.abort()
        until((workdir / "gone").exists)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert code == 0
    assert "process 1 of 2 was killed by SIGKILL" in err


def test_a_saved_preemption_ends_the_group(group, tmp_path):
    code, err, _ = group("sys.exit(75)")
    assert (code, err, num_starts(tmp_path)) == (75, "", 1)


def test_a_preempted_process_leaves_the_others_time_to_save(group, tmp_path):
    code, _, _ = group(
        """
        if me == 0:
            sys.exit(75)
        time.sleep(1.5)
        (workdir / "saved").touch()
        sys.exit(75)
        """
    )
    assert code == 75
    assert (tmp_path / "run" / "saved").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_is_forwarded_to_all_and_waits_for_them_to_save(group, tmp_path, request, number):
    if signal.getsignal(number) == signal.SIG_IGN:  # SIGHUP, where the tests run under nohup
        signal.signal(number, signal.SIG_DFL)
        request.addfinalizer(lambda: signal.signal(number, signal.SIG_IGN))
    before = signal.getsignal(number)
    code, err, _ = group(
        f"""
        def stop():
            (workdir / f"told-{{me}}").touch()
            until((workdir / f"told-{{1 - me}}").exists)
            time.sleep(0.5)
            (workdir / f"saved-{{me}}").touch()
            sys.exit(75)
        on_stop(stop)
        (workdir / f"ready-{{me}}").touch()
        if me == 0:
            until((workdir / "ready-1").exists)
            os.kill(os.getppid(), {int(number)})
        forever()
        """
    )
    assert (code, err) == (75, "")
    assert {path.name for path in (tmp_path / "run").glob("saved-*")} == {"saved-0", "saved-1"}
    assert num_starts(tmp_path) == 1
    assert signal.getsignal(number) == before


def test_a_second_signal_kills(group, tmp_path):
    start_s = time.monotonic()
    code, err, _ = group(
        """
        on_stop(lambda: (workdir / f"told-{me}").touch())
        (workdir / f"ready-{me}").touch()
        if me == 0:
            until((workdir / "ready-1").exists)
            os.kill(os.getppid(), signal.SIGTERM)
            until((workdir / "told-1").exists)
            os.kill(os.getppid(), signal.SIGTERM)
        forever()
        """
    )
    assert code == 128 + signal.SIGTERM
    assert err == "killed by a second SIGTERM\n"
    assert time.monotonic() - start_s < 40  # they would go on for a minute
    assert num_starts(tmp_path) == 1


def test_a_stop_before_anything_could_be_saved_is_no_reason_to_start_again(group, tmp_path):
    code, err, _ = group(
        """
        if me == 0:
            until((workdir / "pid-1-1").exists)
            os.kill(os.getppid(), signal.SIGTERM)
        forever()
        """
    )
    assert code == 128 + signal.SIGTERM
    assert "was stopped by SIGTERM before it could save" in err
    assert num_starts(tmp_path) == 1


def test_a_group_stuck_while_it_stops_is_ended(group, tmp_path):
    code, err, _ = group(
        """
        on_stop(lambda: None)
        (workdir / f"ready-{me}").touch()
        if me == 0:
            until((workdir / "ready-1").exists)
            os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(60)
        """,
        watchdog_s=2.0,
        grace_s=0.5,
    )
    assert code == 5
    assert err.startswith("the processes are stuck")
    assert num_starts(tmp_path) == 1


def test_every_start_has_a_port_of_its_own(group, tmp_path):
    code, _, _ = group("sys.exit(0 if start == 4 else 1)")
    assert code == 0
    ports = (tmp_path / "run" / "starts-0").read_text().splitlines()
    assert len(set(ports)) == 4
    assert ports == (tmp_path / "run" / "starts-1").read_text().splitlines()


def test_a_port_taken_in_between_is_a_failed_start(group, tmp_path, monkeypatch):
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    free_port, first = supervise._free_port, [taken.getsockname()[1]]
    monkeypatch.setattr(supervise, "_free_port", lambda used: (first or [free_port(used)]).pop())
    with taken:
        code, err, _ = group(
            """
            import socket
            if me == 0:
                host, port = options["coordinator"].split(":")
                socket.create_server((host, int(port))).close()
            """
        )
    assert code == 0
    assert "process 0 of 2 ended with exit code 1" in err and "restart 1 of 3" in err
    assert num_starts(tmp_path) == 2


def test_a_flood_is_cut_but_not_its_end(group):
    code, err, out = group(
        """
        if me == 1:
            for number in range(50_000):
                print("line", number)
            sys.exit(2)
        print("bar 1%\\rbar 2%", end="")
        """
    )
    assert code == 2
    assert out == "bar 1%\rbar 2%"
    lines = err.splitlines()
    assert lines[0] == "[1] line 0"
    assert lines[-2] == "[1] line 49999"
    assert len(lines) < 5000
    assert any(re.fullmatch(r"\[1\] \.\.\. \d+ lines left out", line) for line in lines)


def test_none_is_left_running_when_another_cannot_be_started(group, tmp_path, monkeypatch):
    class Refusing(subprocess.Popen):
        def __init__(self, command, **others):
            if "--process_id=1" in command:
                deadline_s = time.monotonic() + 20
                while not (tmp_path / "run" / "pid-0-1").exists():
                    assert time.monotonic() < deadline_s
                    time.sleep(0.02)
                raise BlockingIOError(11, "no more processes")
            super().__init__(command, **others)

    monkeypatch.setattr(subprocess, "Popen", Refusing)
    with pytest.raises(BlockingIOError):
        group("time.sleep(60)")
    pid = tmp_path / "run" / "pid-0-1"
    deadline_s = time.monotonic() + 20
    while not pid.read_text():
        assert time.monotonic() < deadline_s
    assert not is_alive(pid)


def launch(*words, cwd, **others):
    command = [sys.executable, str(ROOT / "scripts" / "launch_local.py"), *map(str, words)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_of_mine=1"}
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **others,
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--config=quickstart"], "--workdir: missing"),
        (["--workdir=runs/a", "--process_id=1"], "--process_id: is given"),
        (["--workdir=runs/a", "--distributed"], "--distributed: is given"),
    ],
)
def test_the_launcher_refuses_in_one_line(words, said, tmp_path):
    process = launch("--processes", 2, "--", *words, cwd=tmp_path)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    assert err.startswith(said) and err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [["--workdir=a", "--workdir=b"], ["-workdir", "b"], ["--config", "c", "--workdir", "b"]],
)
def test_the_launcher_reads_the_workdir_as_the_run_does(words):
    assert launch_local.workdir_of(words) == Path("b")


def test_emulated_devices_are_appended_to_the_flags():
    flag = "--xla_force_host_platform_device_count=4"
    assert launch_local.environment({}, None) == {"JAX_PLATFORMS": "cpu"}
    assert launch_local.environment({"JAX_PLATFORMS": ""}, None) == {"JAX_PLATFORMS": ""}
    assert launch_local.environment({}, 4) == {"XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"}
    assert launch_local.environment({"XLA_FLAGS": "--a=1"}, 4)["XLA_FLAGS"] == f"--a=1 {flag}"


@pytest.mark.parametrize("signals", [0, 1], ids=["to its end", "stopped"])
def test_the_launcher_runs_main_in_every_process(tmp_path, signals):
    # In the folder that `python -m` looks in first, a package of that name.
    package = tmp_path / "adloco_jax"
    package.mkdir()
    (package / "__init__.py").touch()
    body = """
    on_stop(lambda: sys.exit(75))
    assert options["config"] == "x.py" and os.environ["XLA_FLAGS"].startswith("--xla_of_mine=1 ")
    print("here", os.environ["XLA_FLAGS"][-1], flush=True)
    if "config.forever" in options:
        (workdir / f"ready-{me}").touch()
        forever()
    """
    (package / "main.py").write_text(PRELUDE + textwrap.dedent(body))
    more = ["--config.forever=1"] * signals
    process = launch(
        "--processes=2",
        "--devices-per-process=3",
        "--",
        "--config=x.py",
        f"--workdir={tmp_path / 'run'}",
        *more,
        cwd=tmp_path,
    )
    deadline_s = time.monotonic() + 60
    while signals and len(list(tmp_path.glob("run/ready-*"))) < 2:
        assert process.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.05)
    if signals:
        process.terminate()
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (75 * signals, "here 3\n", "[1] here 3\n")
