"""Runs in learners on a Ray cluster: they decide like a local run, and survive deaths."""

import contextlib
import dataclasses
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import yaml

if importlib.util.find_spec("ray") is None:  # imported by the first run, with its environment
    pytest.skip("the extra `ray` is not installed", allow_module_level=True)

import toy_runs
from learners import assert_same_rounds
from toy import Table, corpus, settings_of
from toy_runs import events, run

from adloco_jax.elastic import cluster
from adloco_jax.errors import ConfigError, ResourceError
from probes import runs

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.usefixtures("one_device")
slow = pytest.mark.slow  # a cluster starts slowly

RAY = {"kind": "ray", "heartbeat_s": 5.0, "restart_s": 60.0, "steps": "equal"}
ELASTIC = toy_runs.GROWING | {"engine": RAY}


@pytest.fixture(autouse=True)
def marked(monkeypatch, tmp_path):
    """Marks the processes that a test starts, so that it can find them."""
    monkeypatch.setenv("CHAOS", str(tmp_path))


@dataclasses.dataclass(frozen=True)
class Slow(Table):
    """The toy's rows, read slowly."""

    seconds: float = 0.2

    def batch(self, trainer, worker_id, start, count):
        time.sleep(self.seconds)
        return super().batch(trainer, worker_id, start, count)


def when_it_has_read(workdir, number, rounds, act):
    """Acts once on a learner's process, in a thread, when it has logged this many rounds."""

    def watch():
        for _ in range(1200):
            found = runs.living(Path(workdir)).get(number)
            if found and found["rounds"] >= rounds:
                act(found["pid"])
                return
            time.sleep(0.05)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def ends(run, seconds=10.0):
    """Whether all processes of a run's cluster end."""
    until_s = time.time() + seconds
    while runs.left_running(run) and time.time() < until_s:
        time.sleep(0.1)
    return not runs.left_running(run)


def folder_of_cluster(run):
    pids = map(int, filter(str.isdecimal, os.listdir("/proc")))
    (folder,) = {runs.cluster_folder(pid, run) for pid in pids} - {None}
    return Path(folder)


@slow
def test_a_run_in_learners_decides_reads_and_counts_as_a_local_one(tmp_path):
    local, elastic = run(tmp_path / "local"), run(tmp_path / "ray", settings_of(**ELASTIC))
    assert_same_rounds(elastic, local)
    assert all(e["wire_bytes"] > 0 for e in events(elastic.workdir, "round"))
    merged = [[e["members"] for e in events(w, "merge")] for w in (elastic.workdir, local.workdir)]
    assert merged[0] == merged[1] != []
    assert elastic.loss == pytest.approx(local.loss, abs=1e-5)
    assert runs.audit(elastic.workdir) == [] and ends(tmp_path)


@slow
def test_learners_that_die_or_hang_are_replaced_and_every_sequence_is_read(tmp_path):
    threads = [
        when_it_has_read(tmp_path, 0, 1, lambda pid: os.kill(pid, signal.SIGKILL)),
        when_it_has_read(tmp_path, 2, 1, lambda pid: os.kill(pid, signal.SIGSTOP)),
    ]
    settings = settings_of(**ELASTIC | {"num_rounds": 12})
    ended = run(tmp_path, settings, corpus=Slow(corpus().rows))
    for thread in threads:
        thread.join()
    lost = {e["learner"]: e for e in events(tmp_path, "learner", what="lost")}
    assert {number: line["trainer"] for number, line in lost.items()} == {0: 0, 2: 1}
    assert lost[0]["why"] == "its process or its node has ended" and "no sign" in lost[2]["why"]
    joined = [e["learner"] for e in events(tmp_path, "learner", what="joined")]
    assert {*joined} == {0, 1, 2, 3} and joined.count(2) == 2  # a trainer's only one: it waits
    assert ended.state.control.round == 12
    counted = sum(e["tokens"] for e in events(tmp_path, "round"))
    assert counted == ended.state.control.tokens_total
    assert len(events(tmp_path, "end", reason="finished")) == 1
    assert runs.audit(tmp_path) == [] and ends(tmp_path)


@slow
def test_a_killed_drivers_processes_end_and_its_command_goes_on(tmp_path):
    folder, short = tmp_path / "run", ["inner.steps_per_round=2", "checkpoint.every_rounds=2"]
    with runs.driver(folder, ["num_rounds=100000", *short]) as process:
        saved = runs.wait_for(lambda: runs.events(folder, "checkpoint"), process, 300)
        assert saved and runs.left_running(folder) > 4
        left = folder_of_cluster(folder)
        process.kill()
        assert ends(folder, 60)
    shutil.rmtree(left)  # as the guide says
    last = runs.events(folder, "checkpoint")[-1]["round"]
    with runs.driver(folder, [f"num_rounds={last + 2}", *short]) as process:
        assert process.wait(400) == 0
    assert f"resuming after round {last}" in (tmp_path / "run.log").read_text()
    assert runs.audit(folder) == [] and ends(tmp_path)


@slow
def test_a_cluster_of_our_own_listens_on_loopback_and_refuses_a_client_without_the_token(tmp_path):
    with cluster.connected("", 1, None, lambda: True):
        import ray

        address = ray.get_runtime_context().gcs_address
        found = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True).stdout
        listeners = {}  # Ray's processes by port
        for line in found.splitlines():
            address_of, owner = line.split()[3], re.search(r"pid=(\d+)", line)
            if owner and runs.is_of(int(owner[1]), tmp_path):
                host, _, port = address_of.rpartition(":")
                listeners[int(port)] = host
        assert int(address.rpartition(":")[2]) in listeners and len(listeners) >= 4
        assert {*listeners.values()} <= {"127.0.0.1", "[::ffff:127.0.0.1]"}
        environ = without_ray() | {"HOME": str(tmp_path)}
        environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        code = f"import ray; ray.init(address={address!r}, log_to_driver=False); print('joined')"
        for mode in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}):
            outside = subprocess.Popen(
                [sys.executable, "-c", code], env=environ | mode, stdout=-1, stderr=-2, text=True
            )
            timer = threading.Timer(90, outside.kill)
            timer.start()
            said, _ = outside.communicate()
            timer.cancel()
            assert "Unauthenticated" in said and "joined" not in said
    assert ends(tmp_path)


@slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_user_can_do_nothing_in_the_folder_of_a_cluster_of_our_own(tmp_path):
    with cluster.connected("", 1, None, lambda: True):
        folder = folder_of_cluster(tmp_path)
        tries = "ls {0}", "ls {0}/ray", "touch {0}/ray/x", "mv {0}/ray {0}/other"
        for words in tries:
            command = words.format(folder).split()
            assert subprocess.run(command, user="nobody", capture_output=True).returncode != 0
    assert not folder.exists()


def without_ray():
    """The environment without what a run in this process has set for its cluster."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


AFTERWARDS = """
import os
from adloco_jax.elastic import cluster
from adloco_jax.errors import ConfigError
with cluster.connected("", 1, None, lambda: True):
    import ray
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
print(ray.get(ray.put(3)))
try:
    cluster.check_possible(None, None)
except ConfigError as error:
    print(error)
"""


@slow
def test_after_a_run_with_a_cluster_of_its_own_the_users_ray_works_as_before(tmp_path):
    home = tempfile.mkdtemp(dir="/tmp")  # a socket's path must be short
    command, environ = [sys.executable, "-c", AFTERWARDS], without_ray() | {"RAY_TMPDIR": home}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    shutil.rmtree(home, ignore_errors=True)
    number, refusal = done.stdout.splitlines()
    assert number == "3" and "connected to Ray already; call ray.shutdown() first" in refusal


def test_without_ray_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"engine.kind = ray: .*adloco_jax\[ray\]"):
        run(tmp_path / "r", settings_of(**ELASTIC))
    assert not (tmp_path / "r").exists()


@slow
def test_a_cluster_that_is_not_there_is_named_in_one_line(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    settings = settings_of(**ELASTIC | {"engine": RAY | {"address": address}})
    with pytest.raises(ConfigError, match=f"{address}: no Ray cluster .*refused") as error:
        run(tmp_path / "r", settings)
    assert "\n" not in str(error.value)


@slow
def test_learners_that_cannot_start_end_the_run_with_the_cause(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Broken(Table):
        def __reduce__(self):
            return int, ("not rows",)

    with pytest.raises(ResourceError, match=r"0 of 4 learners .*learner \d: .*not rows"):
        run(tmp_path / "r", settings_of(**ELASTIC), corpus=Broken(corpus().rows))
    assert ends(tmp_path)


# -- A cluster that is there ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_nodes():
    """The cluster that the guide's commands start, with two nodes: a folder, port, token, run."""
    folder = Path(tempfile.mkdtemp(prefix="adloco-", dir="/tmp"))
    (folder / "token").write_text("5" * 64)
    with socket.socket() as free:
        free.bind(("127.0.0.2", 0))
        port = free.getsockname()[1]
    text = (ROOT / "docs" / "guides" / "elastic.md").read_text("utf-8")
    (block,) = re.findall(r"```bash\n(# on every machine.*?)```", text, re.DOTALL)
    block = re.sub(r"^# .*\n", "", block, flags=re.MULTILINE).replace("\\\n", " ")
    block = block.replace("/path/to/token", str(folder / "token"))
    # On one machine each node has an address of its own; Ray would replace 127.0.0.1.
    *exports, head, other, train = block.replace("ADDRESS", "127.0.0.2").splitlines()
    token = "\n".join([*exports, "export RAY_USAGE_STATS_ENABLED=0"])
    head += " --include-dashboard=false"
    other += " --node-ip-address=127.0.0.3"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = without_ray() | {"RAY_TMPDIR": str(folder), "PYTHONPATH": str(ROOT), "PATH": path}
    nodes = []
    with open(folder / "ray.log", "w") as log:
        for started in (head, other):
            words = f"{token}\nexec {started} --num-cpus=1 --block".replace("6379", str(port))
            node = subprocess.Popen(["bash", "-c", words], env=environ, stdout=log, stderr=log)
            nodes.append(node)
            address = ("127.0.0.2", port)
            for _ in range(1200):
                with contextlib.suppress(OSError), socket.create_connection(address, timeout=1):
                    break
                time.sleep(0.1)
    try:
        yield folder, port, environ, f"{token}\n{train}"
    finally:
        for pid in {*runs.with_open_files(str(folder)), *(node.pid for node in nodes)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for node in nodes:
            node.wait()
        shutil.rmtree(folder, ignore_errors=True)


@slow
@pytest.mark.parametrize("way", ["guide", "slurm", "kubernetes"])
def test_the_commands_of_the_guide_and_of_the_files_train_on_two_nodes(two_nodes, tmp_path, way):
    folder, port, environ, command = two_nodes
    if way == "slurm":  # with stand-ins for what Slurm and Ray would start on each node
        command = (ROOT / "scripts" / "ray.sbatch").read_text("utf-8")
        stands_in = {"srun": 'shift; exec "$@"', "scontrol": "echo 127.0.0.2"}
        stands_in["ray"] = 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"'
        (tmp_path / "bin").mkdir()
        for name, text in stands_in.items():
            (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / "bin" / name).chmod(0o755)
        environ = environ | {"PATH": f"{tmp_path}/bin{os.pathsep}{environ['PATH']}"}
        environ |= {"SLURM_JOB_NODELIST": "a", "SLURM_JOB_NUM_NODES": "2"}
        (tmp_path / "runs").mkdir()
        shutil.copyfile(folder / "token", tmp_path / "runs" / "ray.token")
    elif way == "kubernetes":  # KubeRay gives its pods the token
        command = yaml.safe_load((ROOT / "scripts" / "ray.yaml").read_text("utf-8"))
        command = command["spec"]["entrypoint"].replace("/runs/adloco", "runs/ray")
        command = command.replace("127.0.0.1", "127.0.0.2")
        environ = environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5" * 64}
    command = command.replace("adloco train", "python -m adloco_jax.main train")
    command = re.sub(r"\bquickstart\b|configs/quickstart.py", f"{ROOT}/probes/faults.py", command)
    command = command.replace("runs/elastic", "runs/ray").replace("6379", str(port))
    command = re.sub(r"(max_learners=|quorum=)[34]", r"\g<1>2", command)
    words = ["bash", "-c", f"{command.rstrip()} --config.num_rounds=2"]
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    workdir = tmp_path / "runs" / "ray"
    assert len({e["learner"] for e in events(workdir, "learner", what="joined")}) == 2
    assert [e["reason"] for e in events(workdir, "end")] == ["finished"]
    assert runs.audit(workdir) == [] and not runs.living(workdir)  # no learner, but the cluster
    with socket.create_connection(("127.0.0.2", port), timeout=5):
        pass
