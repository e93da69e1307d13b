"""Kill, stop and slow learners of real runs, and measure the results (studies/reliability.md).

python scripts/chaos.py single                90 faults of learners: all of them recovered from?
python scripts/chaos.py nodes                 10 nodes lost, of a cluster of two
python scripts/chaos.py soak --seed 1         random deaths, hangs and a death of the driver
python scripts/chaos.py slow                  one learner of four, four times slower
python scripts/chaos.py --scale short         a little of `single`, within two minutes
python scripts/chaos.py --every 60 --minutes 4    goodput: a random learner is killed every 60 s

The last one makes two runs of so many minutes, in the second of which learners are killed, through
a folder as bucket, or over Ray with `--transport ray`.

With `--transport bucket`, learners join through an S3 server on loopback. `single` then has faults
of the bucket too, second drivers that take over from one that is stopped, and an attacker that
changes answers on their way, which the ledger must refuse and name. There a learner that
ends is started again by this script, as a service manager would, and one that is stopped goes on
after STOPPED_S. `nodes` needs Ray.

Every trial is a line of `<folder>/results.jsonl`; the same command continues a stopped test. The
logs of the learners give their processes and the sequences that they have read.
"""

import argparse
import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from adloco_jax.run.events import USES  # noqa: E402
from probes import faulty_store  # noqa: E402
from probes.runs import (  # noqa: E402
    audit,
    driver,
    events,
    first_counted_s,
    keys_of,
    left_running,
    living,
    logs,
    parts,
    wait_for,
)

FAULTS = {"single": ["kill"] * 70 + ["stop"] * 20, "nodes": ["node"] * 10, "soak": [], "slow": []}
FAULTS |= {"every": []}
# Of the bucket: how long each lasts, and which requests have it (a share, and one of these faults).
BUCKET_FAULTS = {
    "noise": (15, 0.3, ("503", "reset", "lost", "cut", "wrong", "slow")),
    "expired": (15, 1.0, ("expired",)),
    "gone": (60, 1.0, ("reset",)),
    "forged": (20, 0.5, ("forged",)),
}
THROUGH_BUCKET = ["kill"] * 30 + ["stop"] * 10 + ["noise"] * 42 + ["expired"] * 8 + ["gone"] * 5
THROUGH_BUCKET += ["driver"] * 5 + ["forged"] * 5
STOPPED_S = 30
NODE = {"num_cpus": 2, "include_dashboard": False, "node_ip_address": "127.0.0.1"}


# -- Runs ------------------------------------------------------------------------------------


@contextlib.contextmanager
def joining(run: Path, options: list[str]) -> Iterator[None]:
    """Keep learners in a run through a bucket: one that ends is started again."""
    keys, ended = keys_of(run, options), threading.Event()
    if keys["engine.kind"] != "bucket":
        yield
        return
    logs = run / "learners" / f"{int(1000 * time.time())}"
    command = [sys.executable, "-m", "adloco_jax.main", "join", keys["engine.address"]]
    command += ["--workdir", str(logs)]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    there: list[subprocess.Popen | None]
    there = [None] * int(keys.get("engine.max_learners", keys["ensemble.num_workers"]))

    def keep() -> None:
        with open(run.parent / f"{run.name}.learners.log", "a") as log:
            while not ended.wait(0.5):
                for index, process in enumerate(there):
                    if process is None or process.poll() is not None:
                        how = {"stdout": log, "stderr": log, "env": environ}
                        there[index] = subprocess.Popen(command, **how)

    run.parent.mkdir(parents=True, exist_ok=True)
    keeper = threading.Thread(target=keep, daemon=True)
    keeper.start()
    try:
        yield
    finally:
        ended.set()
        keeper.join()
        for process in filter(None, there):
            process.kill()
            process.wait()


def forged(rng: random.Random, data: bytes) -> bytes:
    """Change an array of a learner's answer, or make its update huge; its SHA-256 fits."""
    arrays = load(data[64:])
    keys = [key for key in arrays if key.endswith((".loss_SR", ".seconds", ".between_s"))]
    if not keys:
        return data
    if rng.random() < 0.5:
        arrays = {k: x * x.dtype.type(1e6) if "packed" in k else x for k, x in arrays.items()}
    else:
        own = arrays[key := rng.choice(keys)]
        wrong = [np.full_like(own, math.nan), own.ravel()[:0], own + 1e300, own.astype("f4")]
        arrays[key] = rng.choice(wrong)
    return hashlib.sha256(save(arrays)).hexdigest().encode() + save(arrays)


@contextlib.contextmanager
def bucket(rng: random.Random) -> Iterator[tuple[list[str], list[int]]]:
    """Start an S3 server, whose requests have the faults of the kind that the first list has.

    The second one gets the learner of each forged answer.
    """
    now: list[str] = []
    changed: list[int] = []

    def fate(method: str, path: str, number: int) -> str:
        _, share, faults = BUCKET_FAULTS[now[0]] if now else (0, 0.0, [""])
        is_possible = now != ["forged"] or (method == "PUT" and "/responses/" in path)
        return rng.choice(faults) if is_possible and rng.random() < share else ""

    def forge(path: str, body: bytes) -> bytes:
        new = forged(rng, body)
        changed.extend([int(path.split("/")[-2].partition("-")[0])] * (new != body))
        return new

    with (
        faulty_store.s3_server("chaos") as server,
        faulty_store.faulty(server, fate, forge) as url,
    ):
        os.environ |= faulty_store.environment(url)
        yield now, changed


def _stat(pid: int) -> list[str]:
    """Fields of a process from its parent's id on."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[1:]


def started_s(pid: int) -> float:
    """When a process was started."""
    up_s = int(_stat(pid)[18]) / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + up_s


def strike(kind: str, pid: int) -> None:
    """Cause a fault of a learner's process."""
    with contextlib.suppress(ProcessLookupError):
        is_rays = b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes()
        os.kill(pid, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        if kind == "stop" and not is_rays:
            threading.Timer(STOPPED_S, os.kill, (pid, signal.SIGCONT)).start()


# -- Trials ----------------------------------------------------------------------------------


def two_nodes() -> Any:
    """A cluster of two nodes with room for two learners each, with a token, on loopback."""
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.urandom(32).hex()}
    os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # keeps the loopback address
    os.environ |= {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    cluster.add_node(**NODE)
    return cluster


def copied(run: Path, copy: Path) -> Path:
    """Copy the folder of a run whose driver is stopped, without the learners' logs."""
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("*.jsonl"))
    shutil.copy(run / "ledger.jsonl", copy)
    return copy


def lose_node(cluster: Any, there: dict[int, dict]) -> list[int]:
    """End the second node of a cluster with its learners, start another; return the learners."""
    (node,) = cluster.worker_nodes
    raylet = node.all_processes["raylet"][0].process.pid
    lost = [number for number, each in there.items() if int(_stat(each["pid"])[0]) == raylet]
    cluster.remove_node(node, allow_graceful=False)
    for number in lost:
        strike("kill", there[number]["pid"])
    cluster.add_node(**NODE)
    return lost


def single(
    run: Path,
    kinds: list[str],
    rng: random.Random,
    options: list[str],
    now: list[str],
    changed: list[int],
) -> Iterator[dict]:
    """Cause faults at random times of one run, each after the run has recovered from the last.

    A lost node takes its learners with it, and another node joins. `now` and `changed` are
    `bucket`'s.
    """
    with contextlib.ExitStack() as stack:
        how, cluster = ["num_rounds=1000000", "inner.steps_per_round=10", *options], None
        folder = run  # of the driver that works
        if "node" in kinds:
            cluster = two_nodes()
            stack.callback(cluster.shutdown)
            how.append(f"engine.address={cluster.address}")
        stack.enter_context(joining(run, how))
        process = stack.enter_context(driver(run, how))
        for trial, kind in enumerate(kinds):
            if not wait_for(lambda: _all_at_work(run), process, 240):
                raise SystemExit("not all learners are at work")
            time.sleep(rng.uniform(0, 2))
            there, struck_s = living(run), time.time()
            if kind == "node":
                lost = lose_node(cluster, there)
            elif kind in BUCKET_FAULTS:
                now.append(kind)
                time.sleep(BUCKET_FAULTS[kind][0])
                now.clear()
                lost, struck_s = [*there], time.time()
            elif kind == "driver":
                lost, before = [*there], process
                before.send_signal(signal.SIGSTOP)
                address = f"engine.address={keys_of(run, how)['engine.address']}"
                copy = run.with_name(f"{run.name}-{int(struck_s)}")
                process = stack.enter_context(driver(copied(folder, copy), [*how, address]))
                folder = copy
            else:
                lost = [rng.choice([n for n, each in there.items() if each["rounds"]])]
                strike(kind, there[lost[0]]["pid"])
            seconds = []
            for stream in (stream for number in lost for stream in there[number]["streams"]):
                again = functools.partial(first_counted_s, run, stream, struck_s)
                seconds.append(round((wait_for(again, process, 240) or 1e12) - struck_s, 2))
            result = {"trial": trial, "what": kind, "learners": lost, "seconds": seconds}
            result["passed"] = 0 < max(seconds, default=0) < 300
            if kind == "forged":
                is_told = functools.partial(all_named, folder, changed)
                result["passed"] = bool(wait_for(is_told, process, 120))
                result["answers"] = len(changed)
            if kind == "driver":  # the first one comes back, and must end
                before.send_signal(signal.SIGCONT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    result["exit"] = before.wait(120)
                result["passed"] &= result.get("exit") == 5
            yield result
        process.send_signal(signal.SIGTERM)
        code, stop_s = process.wait(120), time.time()
        is_rays = keys_of(run, how)["engine.kind"] == "ray"  # others wait for another driver
        while is_rays and (living(run) or left_running(run)) and time.time() < stop_s + 60:
            time.sleep(0.1)
        left_s = round(time.time() - stop_s, 2)
    causes = Counter(e["why"] for e in events(folder, "learner") if e["what"] == "lost")
    found = {"audit": audit(run)[:3], "left_s": left_s, "exit": code, "lost": causes}
    yield {"trial": "end", "what": found, "passed": code == 75 and not found["audit"]}


def all_named(run: Path, changed: list[int]) -> bool:
    """Whether the ledger says of each forged answer that it was refused or rejected."""
    found = (e["learner"] for e in events(run, "learner") if e["what"] in ("refused", "rejected"))
    return Counter(found) >= Counter(changed)


def _all_at_work(run: Path) -> bool:
    """Whether four learners have ended a round."""
    return sum(each["rounds"] > 0 for each in living(run).values()) >= 4


def ride(run: Path, how: list[str], tape: list, *, restart: bool, seconds: float) -> dict:
    """Run under a list of faults (seconds, learner or None for the driver, kind).

    The fault of an absent learner waits until the learner is present. With `restart` each fault
    ends the driver and so all learners (a hang ends them after 20 s), and the same command
    continues the run. A learner's seconds count from the start of its process.
    """
    tape, up, struck, starts, code = [*tape], {}, [], 0, 1
    begin_s, is_on = time.time(), False
    while code and time.time() < begin_s + seconds:
        starts += 1
        with driver(run, how) as process:
            while (code := process.poll()) is None and time.time() < begin_s + seconds:
                time.sleep(0.2)
                there, now_s = living(run), time.time()
                with contextlib.suppress(OSError):  # one that ends just now
                    up |= {e["pid"]: now_s - started_s(e["pid"]) for e in there.values()}
                is_on = is_on or _all_at_work(run)
                begin_s = begin_s if is_on else now_s
                due = [f for f in tape if f[0] < now_s - begin_s and f[1] in {None, *there}]
                for fault in due[:1]:
                    tape.remove(fault)
                    _, number, kind = fault
                    if number is not None:
                        struck += [(now_s, stream, kind) for stream in there[number]["streams"]]
                        strike(kind, there[number]["pid"])
                        time.sleep(20 if restart and kind == "stop" else 0)
                    if number is None or restart:
                        process.kill()
    wall_s = time.time() - begin_s
    found = [first_counted_s(run, stream, at_s) for at_s, stream, _ in struck]
    after = [f - at_s for f, (at_s, *_) in zip(found, struck, strict=True) if f is not None]
    lines, audited = events(run, "round"), audit(run)
    workers = sum(line["workers"] for line in lines)
    spans = [(e[-1]["time"] - e[0]["time"]) / max(len(e) - 1, 1) for e in parts(run).values()]
    return {
        "passed": (code == 0 or restart) and not audited,
        "audit": audited[:3],
        "starts_of_the_driver": starts,
        "faults": [kind for *_, kind in struck],
        "seconds_to_counted": sorted(round(s, 1) for s in after),
        "median_s": round(statistics.median(after), 1) if after else None,
        "participation": round(sum(line["workers_counted"] for line in lines) / workers, 3),
        "tokens": sum(line["tokens"] for line in lines),
        "round_s": round(statistics.mean(spans), 2),
        "up_s": round(sum(up.values())),
        "wall_s": round(wall_s),
        "losses": _losses(run),
    }


def soak(folder: Path, seed: int, rounds: int, done: list, options: list[str]) -> Iterator[dict]:
    """Random deaths, one of them the driver's: without a spare, with one, with full restarts."""
    how = [f"num_rounds={rounds}", f"seed={seed}", "checkpoint.every_rounds=5"]
    how += ["eval.every_rounds=5", "inner.steps_per_round=240", *options]
    before = {e["way"]: e for e in done if e["seed"] == seed}
    for way in [w for w in ("calm", "faults", "spare", "restart") if w not in before]:
        calm, run, restart = before.get("calm"), folder / f"{way}-{seed}", way == "restart"
        tape = tape_of(seed, rounds, calm["round_s"]) if calm else []
        keys = [*how, "engine.max_learners=5"] if way == "spare" else how
        seconds = before["faults"]["wall_s"] if restart else 1e9
        found = before[way] = {"way": way, "seed": seed}
        with joining(run, keys):
            found |= ride(run, keys, tape, restart=restart, seconds=seconds)
        if calm:
            rate = calm["tokens"] / rounds / calm["round_s"] / 4
            tokens, loss = found["losses"][-1]
            calm_loss = float(np.interp(tokens, *zip(*calm["losses"], strict=True)))
            found["goodput"] = round(found["tokens"] / found["up_s"] / rate, 3)
            found["loss_ratio"] = round(loss / calm_loss, 4)  # at equal tokens
        yield found


def every(folder: Path, given: argparse.Namespace) -> Iterator[dict]:
    """Kill a random learner every so many seconds, and compare with a run without kills."""
    found: dict[str, dict] = {}
    rng = random.Random(given.seed)
    for way in ("calm", "killed"):
        run = folder / f"{way}-{given.transport}-{given.every:g}-{given.seed}"
        how = ["num_rounds=1000000", "inner.steps_per_round=60", "eval.every_rounds=1"]
        how += ["engine.heartbeat_s=5", f"seed={given.seed}", *given.option]
        if given.transport == "bucket":
            how.append(f"engine.address=file://{run.resolve()}.bucket")
        with joining(run, how), driver(run, how) as process:
            if not wait_for(lambda run=run: _all_at_work(run), process, 600):
                raise SystemExit(f"not all learners are at work, see {run}.log")
            begin_s, num_before, num_evals = (
                time.time(),
                len(events(run, "round")),
                len(_curve(run)),
            )
            started: dict[int, float] = {}  # processes of learners, by id
            num_kills = 0
            while process.poll() is None and time.time() < begin_s + 60 * given.minutes:
                time.sleep(0.2)
                there = living(run)
                for pid in (each["pid"] for each in there.values()):
                    with contextlib.suppress(OSError):  # one that ends just now
                        started.setdefault(pid, started_s(pid))
                if (
                    way == "killed"
                    and there
                    and time.time() > begin_s + given.every * (num_kills + 1)
                ):
                    strike("kill", rng.choice([*there.values()])["pid"])
                    num_kills += 1
            seconds = time.time() - begin_s
            process.send_signal(signal.SIGTERM)
            code = process.wait(120)
        lines, curve = events(run, "round")[num_before:], _curve(run)[max(num_evals - 1, 0) :]
        lives = [e for part in logs(run).values() for e in part.values() if e[0]["time"] > begin_s]
        spent = {use: sum(line[f"{use}_s"] for line in lines) for use in USES}
        spent["starting"] = sum(
            e[0]["time"] - started.get(e[0]["pid"], e[0]["time"]) for e in lives
        )
        notes = (e for part in logs(run).values() for each in part.values() for e in each[1:])
        spent["compiling"] = sum(e["stall_s"] for e in notes if e["time"] > begin_s)
        spent["other"] = 4 * seconds - sum(spent.values())
        tokens, audited = sum(line["tokens"] for line in lines), audit(run)
        found[way] = {"way": way, "kills": num_kills, "seconds": round(seconds), "exit": code}
        found[way] |= {"tokens": tokens, "tokens_per_s": round(tokens / seconds), "curve": curve}
        found[way] |= {"share": {use: round(s / 4 / seconds, 3) for use, s in spent.items()}}
        found[way] |= {"passed": code == 75 and not audited, "audit": audited[:3]}
        found[way] |= {"final_loss": curve[-1][1]}
        if way == "killed":
            reached = max(each["final_loss"] for each in found.values())
            to_loss = {w: _reached_s(each["curve"], reached) for w, each in found.items()}
            found[way]["goodput"] = round(tokens / seconds / found["calm"]["tokens_per_s"], 3)
            found[way]["goodput_within"] = _goodput_within(run, num_before)
            found[way] |= {"loss": reached, "seconds_to_loss": to_loss}
        yield {key: value for key, value in found[way].items() if key != "curve"}


def _goodput_within(run: Path, num_before: int) -> float:
    """Tokens per second over those of the same run's rounds without a fault, if the load varies."""
    spent, is_calm = np.zeros((2, 2)), True
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    for line in (e for e in lines if e["event"] in ("round", "learner")):
        num_before -= line["event"] == "round"
        if line["event"] == "round" and num_before < 0:
            is_calm &= line["workers_counted"] == line["workers"]
            own = np.array([line["tokens"], line["step_s"]])
            spent += [own, own * is_calm]
        is_calm = line["event"] == "round"
    (tokens, seconds), (calm_tokens, calm_s) = spent
    return round(tokens / seconds * calm_s / calm_tokens, 3)


def _curve(run: Path) -> list[tuple[float, float]]:
    """Seconds and held-out loss of the evaluations."""
    found = [e for e in events(run, "eval") if e["trainer"] == "consensus"]
    return [(e["wall_s"], e["loss"]) for e in found]


def _reached_s(curve: list[tuple[float, float]], loss: float) -> float:
    """Seconds from the first evaluation to the first one with at most this loss."""
    return round(next(at_s for at_s, found in curve if found <= loss) - curve[0][0], 1)


def tape_of(seed: int, rounds: int, round_s: float) -> list[tuple[float, int | None, str]]:
    """Draw faults in order of time; a learner lives for twenty rounds on average."""
    rng = random.Random(f"faults {seed}")
    tape: list = [(rng.uniform(0.3, 0.7) * rounds * round_s, None, "driver")]
    for number in range(4):
        lives = (rng.expovariate(1 / (20 * round_s)) for _ in range(100))
        for at_s in itertools.accumulate(lives):
            tape.append((at_s, number, "stop" if rng.random() < 0.1 else "kill"))
    return sorted(tape, key=lambda fault: fault[0])


def _losses(run: Path) -> list[tuple[int, float]]:
    """Tokens and held-out loss of the evaluations."""
    found = [e for e in events(run, "eval") if e["trainer"] == "consensus"]
    return [(e["tokens_total"], e["loss"]) for e in found]


def slow(folder: Path, rounds: int, options: list[str]) -> Iterator[dict]:
    """Slow one of four learners to a quarter: wait for all, use a quorum, or updates by speed."""
    ways = {"all": ["steps=equal"], "quorum": ["steps=equal", "quorum=3"], "by_speed": []}
    for name, keys in ways.items():
        run = folder / f"slow-{name}"
        how = ["ensemble.num_trainers=1", "inner.steps_per_round=40", "engine.grace_s=0.2"]
        how += [f"num_tokens={rounds * 40960}", "num_rounds=none", *options]
        how += [f"engine.{key}" for key in keys]
        with joining(run, how), driver(run, how) as process:
            wait_for(lambda run=run: _all_at_work(run), process, 180)
            victim = living(run)[3]["pid"]
            while process.poll() is None:  # a quarter of the time
                for number, share_s in ((signal.SIGCONT, 0.05), (signal.SIGSTOP, 0.15)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(victim, number)
                    time.sleep(share_s)
        steps = [line["step_s"] for line in events(run, "round")]
        tokens, loss = _losses(run)[-1]
        result = {"way": name, "passed": process.returncode == 0, "rounds": len(steps)}
        result |= {"median_round_s": round(statistics.median(steps[2:]), 2)}
        yield result | {"tokens": tokens, "loss": loss}


def main() -> int:
    """Run the trials that a results file lacks; return the number of failed trials."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", default="single", choices=FAULTS)
    parser.add_argument("--transport", choices=("ray", "bucket"), help="default: ray")
    parser.add_argument("--every", type=float, help="seconds from one kill to the next")
    parser.add_argument("--minutes", type=float, default=20.0, help="with --every: of each run")
    given = {"scale": "long", "folder": Path("chaos"), "rounds": 60, "seed": 0}
    for name, value in given.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("option", nargs="*", help="KEY=VALUE of the runs' config")
    given = parser.parse_intermixed_args()
    given.what = given.what if given.every is None else "every"
    given.transport = given.transport or ("ray" if given.every is None else "bucket")
    is_bucket, all_kinds = given.transport == "bucket", FAULTS[given.what]
    if is_bucket and given.what == "nodes":
        parser.error("nodes: only with --transport ray")
    if is_bucket and given.what == "single":
        all_kinds = THROUGH_BUCKET
    given.option.insert(0, f"engine.kind={given.transport}")
    given.folder.mkdir(parents=True, exist_ok=True)
    results = given.folder / "results.jsonl"
    done = [json.loads(line) for line in results.open()] if results.exists() else []
    done = [e for e in done if e["kind"] == given.what and e.get("trial") != "end"]
    kinds = random.Random(given.seed).sample(all_kinds, len(all_kinds))
    short = ["kill", "stop"] + ["noise", "forged"] * is_bucket
    kinds = kinds[len(done) :] if given.scale == "long" else short
    rng = random.Random(f"{given.seed} {len(done)}")
    stack = contextlib.ExitStack()
    now, changed = ([], [])
    if is_bucket and given.what != "every":
        now, changed = stack.enter_context(bucket(rng))
    ways = {
        "soak": soak(given.folder, given.seed, given.rounds, done, given.option),
        "slow": slow(given.folder, given.rounds, given.option),
        "every": every(given.folder, given),
    }
    how = rng, given.option, now, changed
    one = single(given.folder / given.what, kinds, *how) if kinds else ()
    trials = ways.get(given.what, one)
    failed = 0
    with stack, open(results, "a", buffering=1) as file:
        for result in trials:
            print(json.dumps({"kind": given.what, **result}), file=file)
            print(json.dumps(result), flush=True)
            failed += not result["passed"]
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main())
