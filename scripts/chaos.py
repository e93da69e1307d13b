"""Kills, stops and slows learners of real runs on Ray, and measures what is left: RELIABILITY.md.

python scripts/chaos.py single --trials 100   faults one after another: all of them recovered from?
python scripts/chaos.py soak --seed 1         random deaths, hangs and a death of the driver
python scripts/chaos.py slow                  one learner of four, four times slower
python scripts/chaos.py --scale short         a little of `single`, within two minutes

Every trial is a line of `<folder>/results.jsonl`; stopped and started again, it goes on. Learners
are found by the logs that they write themselves, and these alone say which sequences were read.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Two trainers with two workers each, on the quickstart's model and text; batches do not grow.
RUN = """
    quickstart engine.kind=ray engine.heartbeat_s=5 engine.restart_s=120 ensemble.num_trainers=2
    ensemble.num_workers=4 batching.test=constant merge.policy=none eval.every_rounds=10
    checkpoint.every_s=20 checkpoint.keep=1
""".split()


# -- What learners have logged ---------------------------------------------------------------


def logs(run: Path) -> dict[str, dict[tuple[int, int], list[dict]]]:
    """By start of the driver, and by learner and life: who it is, then what it has read."""
    found: dict = defaultdict(dict)
    for path in sorted(run.glob("learners/*/*.jsonl")):
        lines = []
        for text in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # the last line of one that was killed
                lines.append(json.loads(text))
        if lines:
            number, life = map(int, path.stem.split("-"))
            found[path.parent.name][number, life] = lines
    return found


def audit(run: Path) -> list[str]:
    """Streams of which something was left out, or counted twice; by the learners' logs alone.

    A part counts if its stream goes on where it ends. Parts that count must follow one another
    from the stream's beginning, or from where a checkpoint has it, to what was read last.
    """
    faults = []
    for attempt, lives in logs(run).items():
        parts = defaultdict(set)
        for line in (line for lines in lives.values() for line in lines[1:]):
            end = line["start"] + line["count"]
            parts[line["trainer"], line["stream"]].add((line["start"], end))
        for stream, ranges in parts.items():
            starts = sorted({start for start, _ in ranges})
            for start, following in zip(starts, starts[1:], strict=False):
                if (start, following) not in ranges:
                    faults.append(f"{attempt}: stream {stream}: {start} to {following}")
    return faults


def first_counted_s(run: Path, stream: tuple[int, int], after_s: float) -> float | None:
    """When the first part of a stream that counts was read after a time; None: not yet."""
    lines = [
        line
        for lives in logs(run).values()
        for lines in lives.values()
        for line in lines[1:]
        if (line["trainer"], line["stream"]) == stream
    ]
    starts = {line["start"] for line in lines}
    counted = [e["time"] for e in lines if e["start"] + e["count"] in starts]
    return min((t for t in counted if t > after_s), default=None)


def living(run: Path) -> dict[int, dict]:
    """The processes of learners that are there, by number: pid, streams, time of the last round."""
    attempts = logs(run)
    if not attempts:
        return {}
    lives = attempts[max(attempts)]
    found = {}
    for number, life in lives:
        first, *rest = lives[number, life]
        if life == max(each for n, each in lives if n == number) and _is_there(first["pid"]):
            streams = {(line["trainer"], line["stream"]) for line in rest[-1:]}
            found[number] = {"pid": first["pid"], "streams": streams, "rounds": len(rest)}
    return found


def _is_there(pid: int) -> bool:
    try:
        return b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def is_of(pid: int, run: Path) -> bool:
    """Whether a process is of a cluster that the driver of a run has started."""
    return cluster_folder(pid, run) is not None


def cluster_folder(pid: int, run: Path) -> str | None:
    """The folder of a run's cluster, if a process is of one."""
    with contextlib.suppress(OSError):
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"CHAOS={run}".encode() in environ:
            mark = b"RAY_AUTH_TOKEN_PATH="
            paths = [entry.removeprefix(mark).decode() for entry in environ if mark in entry]
            return next((str(Path(p).parent) for p in paths if p.startswith("/tmp/adloco-")), None)
    return None


def with_open_files(folder: str) -> list[int]:
    """The processes that have files of a folder open, whatever their environment says."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            files = os.listdir(f"/proc/{pid}/fd")
            if any(os.readlink(f"/proc/{pid}/fd/{file}").startswith(folder) for file in files):
                found.append(int(pid))
    return found


def left_running(run: Path) -> int:
    """How many processes there are of clusters that the driver of a run has started."""
    return sum(is_of(int(pid), run) for pid in os.listdir("/proc") if pid.isdecimal())


# -- Runs ------------------------------------------------------------------------------------


@contextlib.contextmanager
def driver(run: Path, options: list[str]) -> Iterator[subprocess.Popen]:
    """A run's process; it is ended at the end."""
    name, *keys = [*RUN, *options]
    command = [sys.executable, "-m", "adloco_jax.main", "train", name, "--workdir", str(run)]
    command += [f"--config.{key}" for key in keys]
    run.parent.mkdir(parents=True, exist_ok=True)
    environ = os.environ | {"PYTHONPATH": str(ROOT), "CHAOS": str(run)}
    with open(run.parent / f"{run.name}.log", "a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environ)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def events(run: Path, name: str) -> list[dict]:
    """The ledger's lines of one kind."""
    path = run / "ledger.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [event for event in found if event["event"] == name]


def wait_for(what, process: subprocess.Popen, seconds: float):
    """What a function returns, once that is something; None if the run has ended or time is up."""
    until_s = time.time() + seconds
    while time.time() < until_s and process.poll() is None:
        if found := what():
            return found
        time.sleep(0.1)
    return None


def strike(kind: str, pid: int) -> None:
    """A fault of a learner's process."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)


# -- Trials ----------------------------------------------------------------------------------


def single(folder: Path, trials: int, rng: random.Random, options: list[str]) -> Iterator[dict]:
    """Faults at random instants of one run, each after the last one was recovered from."""
    run = folder / "single"
    with driver(run, ["num_rounds=1000000", "inner.steps_per_round=10", *options]) as process:
        for trial in range(trials):
            ready = wait_for(lambda: _all_at_work(run), process, 180)
            if ready is None:
                yield {"trial": trial, "passed": False, "what": "not all learners are at work"}
                return
            time.sleep(rng.uniform(0, 2))
            number, victim = rng.choice(sorted(living(run).items()))
            kind, struck_s = rng.choices(["kill", "stop"], [7, 2])[0], time.time()
            strike(kind, victim["pid"])
            (stream,) = victim["streams"]
            found = wait_for(lambda s=stream, t=struck_s: first_counted_s(run, s, t), process, 120)
            seconds = None if found is None else round(found - struck_s, 2)
            result = {"trial": trial, "what": kind, "learner": number, "seconds": seconds}
            yield result | {"passed": found is not None and process.poll() is None}
        process.send_signal(signal.SIGTERM)
        code, stop_s = process.wait(120), time.time()
    while left_running(run) and time.time() < stop_s + 60:
        time.sleep(0.1)
    what = {"exit": code, "audit": audit(run)[:3], "left_s": round(time.time() - stop_s, 2)}
    yield {"trial": "end", "what": what, "passed": code == 75 and not audit(run)}


def _all_at_work(run: Path) -> bool:
    there = living(run)
    return len(there) == 4 and all(each["rounds"] for each in there.values())


def soak(folder: Path, seed: int, rounds: int, options: list[str]) -> Iterator[dict]:
    """A run under deaths, one of them the driver's, beside the same run without any."""
    how = [f"num_rounds={rounds}", f"seed={seed}", "checkpoint.every_rounds=5", *options]
    calm, rate, round_s = folder / f"calm-{seed}", 0.0, 0.0
    with driver(calm, how) as process:
        assert process.wait() == 0, f"{calm}.log says why"
    rate, round_s = _tokens(calm) / _up_s(calm), events(calm, "end")[-1]["wall_s"] / rounds
    rng, run, deaths, starts = random.Random(seed), folder / f"soak-{seed}", [], 0
    mean_s = 20 * round_s  # of a learner's life
    driver_dies_s, start_s = rng.uniform(0.3, 0.7) * rounds * round_s, time.time()
    while starts < 4:
        starts += 1
        with driver(run, how) as process:
            next_s = time.time() + rng.expovariate(4 / mean_s)
            while process.poll() is None:
                time.sleep(0.1)
                if driver_dies_s and time.time() - start_s > driver_dies_s:
                    driver_dies_s = 0.0
                    process.kill()
                there = living(run)
                if time.time() < next_s or not there:
                    continue
                next_s = time.time() + rng.expovariate(4 / mean_s)
                number, victim = rng.choice(sorted(there.items()))
                kind = "stop" if rng.random() < 0.1 else "kill"
                deaths += [(time.time(), stream, kind) for stream in victim["streams"]]
                strike(kind, victim["pid"])
            if process.returncode == 0:
                break
    found = [first_counted_s(run, stream, at_s) for at_s, stream, _ in deaths]
    seconds = [f - at_s for f, (at_s, *_) in zip(found, deaths, strict=True) if f is not None]
    lines = events(run, "round")
    counted = sum(line["workers_counted"] for line in lines)
    loss, calm_loss = (_loss(at) for at in (run, calm))
    yield {
        "seed": seed,
        "passed": process.returncode == 0 and not audit(run) and starts == 2,
        "deaths": len(deaths),
        "starts_of_the_driver": starts,
        "median_s_to_counted": round(statistics.median(seconds), 1) if seconds else None,
        "participation": round(counted / sum(line["workers"] for line in lines), 3),
        "goodput": round(_tokens(run) / (_up_s(run) * rate), 3),
        "loss": loss,
        "loss_undisturbed": calm_loss,
        "round_s": round(round_s, 2),
        "audit": audit(run)[:3],
    }


def _tokens(run: Path) -> int:
    return events(run, "end")[-1]["tokens_total"]


def _loss(run: Path) -> float:
    return [e["loss"] for e in events(run, "eval") if e["trainer"] == "consensus"][-1]


def _up_s(run: Path) -> float:
    """Seconds in which learners' processes were up, from their starts to their last rounds."""
    lives = [lines for attempt in logs(run).values() for lines in attempt.values()]
    return sum(lines[-1]["time"] - lines[0]["time"] for lines in lives)


def slow(folder: Path, rounds: int, options: list[str]) -> Iterator[dict]:
    """One learner of four at a quarter of its speed: all waited for, a quorum, by speed."""
    ways = {
        "all": ["engine.steps=equal"],
        "quorum": ["engine.quorum=3", "engine.grace_s=0.2"],
        "by_speed": ["engine.steps=by_speed"],
    }
    for name, keys in ways.items():
        run = folder / f"slow-{name}"
        how = [f"num_rounds={rounds}", "ensemble.num_trainers=1", "inner.steps_per_round=40"]
        with driver(run, [*how, "engine.heartbeat_s=30", *keys, *options]) as process:
            wait_for(lambda run=run: _all_at_work(run), process, 180)
            victim = living(run)[3]["pid"]
            while process.poll() is None:  # a quarter of the time
                for number, share_s in ((signal.SIGCONT, 0.05), (signal.SIGSTOP, 0.15)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(victim, number)
                    time.sleep(share_s)
        steps = [line["step_s"] for line in events(run, "round")][2:]
        losses = {e["tokens_total"]: e["loss"] for e in events(run, "eval")}
        result = {"way": name, "passed": process.returncode == 0, "losses": losses}
        yield result | {"median_round_s": round(statistics.median(steps), 2)}


def main() -> int:
    """Runs the trials that a results file does not have; returns how many have failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", default="single", choices=["single", "soak", "slow"])
    parser.add_argument("--scale", choices=["short", "long"], default="long")
    parser.add_argument("--folder", type=Path, default=Path("chaos"))
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("option", nargs="*", help="KEY=VALUE of the runs' config")
    given = parser.parse_intermixed_args()
    results = given.folder / "results.jsonl"
    done = [json.loads(line) for line in results.open()] if results.exists() else []
    done = [e for e in done if e["kind"] == given.what and e.get("trial") != "end"]
    trials = 2 if given.scale == "short" else given.trials - len(done)
    rng = random.Random(f"{given.seed} {len(done)}")
    kinds = {
        "single": lambda: single(given.folder, trials, rng, given.option),
        "soak": lambda: soak(given.folder, given.seed, given.rounds, given.option),
        "slow": lambda: slow(given.folder, given.rounds, given.option),
    }
    failed = 0
    for result in kinds[given.what]() if trials > 0 else ():
        given.folder.mkdir(parents=True, exist_ok=True)
        with open(results, "a") as file:
            file.write(json.dumps({"kind": given.what, **result}) + "\n")
        print(json.dumps(result), flush=True)
        failed += not result["passed"]
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main())
