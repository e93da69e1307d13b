"""Kill and stop learners of real runs, and measure the results (studies/reliability.md).

python scripts/chaos.py                           90 faults of learners: all recovered from?
python scripts/chaos.py --scale short             two of them, within two minutes
python scripts/chaos.py --every 60 --minutes 4    goodput: a random learner is killed every 60 s

The last one makes two runs of so many minutes, in the second of which learners are killed.

Learners are actors of Ray or, with `--transport bucket` (the default of `--every`), join through a
folder. There a learner that ends is started again by this script, as a service manager would, and
one that is stopped goes on after STOPPED_S.

Every trial is a line of `<folder>/results.jsonl`; the same command continues a stopped test. The
logs of the learners give their processes and the sequences that they have read.
"""

import argparse
import contextlib
import functools
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from adloco_jax.elastic.messages import USES  # noqa: E402
from adloco_jax.run.kept.ledger import read  # noqa: E402
from adloco_jax.study.summary import goodput  # noqa: E402
from probes.runs import (  # noqa: E402
    audit,
    driver,
    events,
    first_counted_s,
    keys_of,
    left_running,
    living,
    logs,
    wait_for,
)

FAULTS = ["kill"] * 70 + ["stop"] * 20
STOPPED_S = 30


# -- Runs ------------------------------------------------------------------------------------


@contextlib.contextmanager
def joining(run: Path, options: list[str]) -> Iterator[None]:
    """Keep four learners in a run through a bucket: one that ends is started again."""
    keys, ended = keys_of(options), threading.Event()
    if keys["engine.kind"] != "bucket":
        yield
        return
    logs = run / "learners" / f"{int(1000 * time.time())}"
    command = [sys.executable, "-m", "adloco_jax.main", "join", keys["engine.address"]]
    command += ["--workdir", str(logs)]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    there: list[subprocess.Popen | None] = [None] * 4

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


def started_s(pid: int) -> float:
    """When a process was started."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[19]
    up_s = int(ticks) / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + up_s


def strike(kind: str, pid: int) -> None:
    """Kill a learner's process, or stop it; one that joins through a bucket goes on later."""
    with contextlib.suppress(ProcessLookupError):
        is_rays = b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes()
        os.kill(pid, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        if kind == "stop" and not is_rays:
            threading.Timer(STOPPED_S, os.kill, (pid, signal.SIGCONT)).start()


def _all_at_work(run: Path) -> bool:
    """Whether four learners have ended a round."""
    return sum(each["rounds"] > 0 for each in living(run).values()) >= 4


def _keys(run: Path, given: argparse.Namespace, *keys: str) -> list[str]:
    """The options of a run that only a signal ends."""
    if given.transport == "bucket":
        keys = (*keys, f"engine.address=file://{run.resolve()}.bucket")
    return [f"engine.kind={given.transport}", "num_rounds=1000000", *keys, *given.option]


# -- Trials ----------------------------------------------------------------------------------


def single(given: argparse.Namespace, kinds: list[str], rng: random.Random) -> Iterator[dict]:
    """Cause faults at random times of one run, each after the run has recovered from the last."""
    run = given.folder / "single"
    how = _keys(run, given, "inner.steps_per_round=10")
    with joining(run, how), driver(run, how) as process:
        for trial, kind in enumerate(kinds):
            if not wait_for(lambda: _all_at_work(run), process, 240):
                raise SystemExit("not all learners are at work")
            time.sleep(rng.uniform(0, 2))
            there, struck_s = living(run), time.time()
            lost = rng.choice([number for number, each in there.items() if each["rounds"]])
            strike(kind, there[lost]["pid"])
            seconds = []
            for stream in there[lost]["streams"]:
                again = functools.partial(first_counted_s, run, stream, struck_s)
                seconds.append(round((wait_for(again, process, 240) or 1e12) - struck_s, 2))
            result = {"trial": trial, "what": kind, "learner": lost, "seconds": seconds}
            yield result | {"passed": 0 < max(seconds, default=0) < 300}
        process.send_signal(signal.SIGTERM)
        code, stop_s = process.wait(120), time.time()
        is_rays = given.transport == "ray"  # learners of a bucket wait for another driver
        while is_rays and (living(run) or left_running(run)) and time.time() < stop_s + 60:
            time.sleep(0.1)
        left_s = round(time.time() - stop_s, 2)
    causes = Counter(e["why"] for e in events(run, "learner") if e["what"] == "lost")
    found = {"audit": audit(run)[:3], "left_s": left_s, "exit": code, "lost": causes}
    yield {"trial": "end", "what": found, "passed": code == 75 and not found["audit"]}


def every(given: argparse.Namespace) -> Iterator[dict]:
    """Kill a random learner every so many seconds, and compare with a run without kills."""
    curves: dict[str, list[tuple[float, float]]] = {}
    calm_tokens_per_s, rng = 0.0, random.Random(given.seed)
    for way in ("calm", "killed"):
        run = given.folder / f"{way}-{given.transport}-{given.every:g}-{given.seed}"
        often = ("inner.steps_per_round=60", "eval.every_rounds=1", "engine.heartbeat_s=5")
        how = _keys(run, given, *often, f"seed={given.seed}")
        with joining(run, how), driver(run, how) as process:
            if not wait_for(lambda run=run: _all_at_work(run), process, 600):
                raise SystemExit(f"not all learners are at work, see {run}.log")
            begin_s, num_before = time.time(), len(events(run, "round"))
            num_evals = len(_curve(run))
            started: dict[int, float] = {}  # processes of learners, by id
            num_kills = 0
            while process.poll() is None and time.time() < begin_s + 60 * given.minutes:
                time.sleep(0.2)
                there = living(run)
                for pid in (each["pid"] for each in there.values()):
                    with contextlib.suppress(OSError):  # one that ends just now
                        started.setdefault(pid, started_s(pid))
                is_due = time.time() > begin_s + given.every * (num_kills + 1)
                if way == "killed" and there and is_due:
                    strike("kill", rng.choice([*there.values()])["pid"])
                    num_kills += 1
            seconds = time.time() - begin_s
            process.send_signal(signal.SIGTERM)
            code = process.wait(120)
        lines, curves[way] = events(run, "round")[num_before:], _curve(run)[max(num_evals - 1, 0) :]
        tokens, audited = sum(line["tokens"] for line in lines), audit(run)
        found = {"way": way, "kills": num_kills, "seconds": round(seconds), "exit": code}
        found |= {"tokens": tokens, "tokens_per_s": round(tokens / seconds)}
        found |= {"share": _shares(run, lines, started, begin_s, seconds)}
        found |= {"passed": code == 75 and not audited, "audit": audited[:3]}
        found |= {"final_loss": curves[way][-1][1]}
        if way == "calm":
            calm_tokens_per_s = tokens / seconds
        else:
            reached = max(curve[-1][1] for curve in curves.values())
            to_loss = {each: _reached_s(curve, reached) for each, curve in curves.items()}
            found["goodput"] = round(tokens / seconds / calm_tokens_per_s, 3)
            found["goodput_within"] = goodput(read(run / "ledger.jsonl"))
            found |= {"loss": reached, "seconds_to_loss": to_loss}
        yield found


def _shares(
    run: Path, lines: list[dict], started: dict[int, float], begin_s: float, seconds: float
) -> dict[str, float]:
    """What four learners used their seconds for since `begin_s`, as shares."""
    spent = {use: sum(line[f"{use}_s"] for line in lines) for use in USES}
    every = [lines for part in logs(run).values() for lines in part.values()]
    firsts = [first for first, *_ in every if first["time"] > begin_s]
    spent["starting"] = sum(e["time"] - started.get(e["pid"], e["time"]) for e in firsts)
    notes = (note for _, *notes in every for note in notes)
    spent["compiling"] = sum(e["stall_s"] for e in notes if e["time"] > begin_s)
    spent["other"] = 4 * seconds - sum(spent.values())
    return {use: round(s / 4 / seconds, 3) for use, s in spent.items()}


def _curve(run: Path) -> list[tuple[float, float]]:
    """Seconds and held-out loss of the evaluations."""
    found = [e for e in events(run, "eval") if e["trainer"] == "consensus"]
    return [(e["wall_s"], e["loss"]) for e in found]


def _reached_s(curve: list[tuple[float, float]], loss: float) -> float:
    """Seconds from the first evaluation to the first one with at most this loss."""
    return round(next(at_s for at_s, found in curve if found <= loss) - curve[0][0], 1)


def main() -> int:
    """Run the trials that a results file lacks; return the number of failed trials."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transport", choices=("ray", "bucket"))
    parser.add_argument("--every", type=float, help="seconds from one kill to the next")
    parser.add_argument("--minutes", type=float, default=20.0, help="with --every: of each run")
    parser.add_argument("--scale", choices=("short", "long"), default="long")
    parser.add_argument("--folder", type=Path, default=Path("chaos"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("option", nargs="*", help="KEY=VALUE of the runs' config")
    given = parser.parse_intermixed_args()
    os.environ.setdefault("ADLOCO_KEY", secrets.token_hex(32))  # learners start before the driver
    given.transport = given.transport or ("ray" if given.every is None else "bucket")
    kind = "single" if given.every is None else "every"
    given.folder.mkdir(parents=True, exist_ok=True)
    results = given.folder / "results.jsonl"
    done = [json.loads(line) for line in results.open()] if results.exists() else []
    num_done = sum(e["kind"] == "single" and e["trial"] != "end" for e in done)
    kinds = random.Random(given.seed).sample(FAULTS, len(FAULTS))[num_done:]
    kinds = kinds if given.scale == "long" else ["kill", "stop"]
    rng = random.Random(f"{given.seed} {num_done}")
    failed = 0
    with open(results, "a", buffering=1) as file:
        for result in every(given) if given.every else single(given, kinds, rng):
            print(json.dumps({"kind": kind, **result}), file=file)
            print(json.dumps(result), flush=True)
            failed += not result["passed"]
    return failed


if __name__ == "__main__":
    sys.exit(main())
