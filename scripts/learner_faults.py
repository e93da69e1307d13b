"""Disturb a learner or the driver of a run with a ticket, and time what the run loses.

python scripts/learner_faults.py [stop] [clock] [version] [address] [tokenizer]

Needs root and `ip`. A driver without a learner of its own and
two learners, A and B, train the quickstart's model in network namespaces of their own. Seconds are
those from one round's end to the next, beyond the usual ones. By default all faults are tried.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from studies.direct import PYTHON, SPACES, ip, network, within  # noqa: E402

DRIVER, A, B = SPACES
HEARTBEAT_S = 20.0
OPTIONS = {
    "num_rounds": 2000,
    "inner.steps_per_round": 60,
    "ensemble.num_workers": 2,
    "eval.every_rounds": 50,
    "checkpoint.every_s": 5,
    "engine.kind": "direct",
    "engine.relay": "off",
    "engine.trains_here": False,
    "engine.heartbeat_s": HEARTBEAT_S,
}
MAIN = "import sys; from adloco_jax.main import main; sys.argv[0] = 'adloco'; sys.exit(main())"
OTHER_VERSION = f"import adloco_jax; adloco_jax.__version__ = '0.0.1'; {MAIN}"
# `faketime` cannot be used, as Python 3.11 does not sleep under it.
OTHER_CLOCK = f"import time; real = time.time; time.time = lambda: real() + DAYS * 86400; {MAIN}"


class Run:
    """A driver and its learners, in a folder."""

    def __init__(self, folder: Path, options: dict | None = None):
        """Start the driver, and wait for its ticket."""
        self.folder, self.workdir = folder, folder / "run"
        self.options = OPTIONS | (options or {})
        self.started: list[subprocess.Popen] = []
        self.driver = self.start_driver()

    def start(self, space: str, log: str, *command: str) -> subprocess.Popen:
        """Start a command in a namespace; what it prints is added to a log."""
        environ = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XDG_CONFIG_HOME": str(self.folder / space),
            "XDG_CACHE_HOME": str(self.folder / space / "cache"),
        }
        with open(self.folder / log, "a") as file:
            process = subprocess.Popen(
                within(space, *command), stdout=file, stderr=file, env=environ, cwd=self.folder
            )
        self.started.append(process)
        return process

    def start_driver(self) -> subprocess.Popen:
        """Start the driver, and wait until it has printed its ticket."""
        words = [f"--config.{key}={value}" for key, value in self.options.items()]
        printed = self.text("driver").count("to join")
        train = (*PYTHON, "adloco_jax", "train", "diloco", "--workdir", str(self.workdir), *words)
        driver = self.start(DRIVER, "driver", *train)
        while self.text("driver").count("to join") == printed:
            time.sleep(0.1)
            assert driver.poll() is None, self.text("driver")
        return driver

    def join(self, space: str, log: str, by: tuple[str, ...] = ()) -> subprocess.Popen:
        """Start a learner with the newest ticket; `by` is the command in place of `adloco`."""
        ticket = (self.workdir / "learners" / "ticket").read_text()
        command = by or (*PYTHON, "adloco_jax")
        return self.start(space, log, *command, "join", ticket)

    def text(self, log: str) -> str:
        """Return what was printed to a log so far."""
        path = self.folder / log
        return path.read_text(errors="replace") if path.exists() else ""

    def events(self, kind: str) -> list[dict]:
        """Return the ledger's lines of a kind."""
        path = self.workdir / "ledger.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in found if event["event"] == kind]

    def wait(self, what: Callable[[], object], limit_s: float = 180.0) -> float:
        """Wait until something holds; return the seconds."""
        start_s = time.monotonic()
        while not what():
            time.sleep(0.05)
            if time.monotonic() > start_s + limit_s:
                raise TimeoutError(self.text("driver")[-2000:])
        return time.monotonic() - start_s

    def wait_rounds(self, number: int) -> float:
        """Wait for some more rounds; return the seconds."""
        wanted = len(self.events("round")) + number
        return self.wait(lambda: len(self.events("round")) >= wanted)

    def usual_s(self) -> float:
        """Return the median of the last rounds' seconds."""
        return statistics.median(event["step_s"] for event in self.events("round")[-8:])

    def close(self) -> None:
        """End all processes."""
        for process in self.started:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


def stop(run: Run) -> None:
    """Stop learner B for 10 s, and for longer than the heartbeat."""
    run.join(A, "A")
    learner = run.join(B, "B")
    run.wait(lambda: run.text("B").count("joined as"))
    run.wait_rounds(10)
    for seconds in (10.0, HEARTBEAT_S + 10.0):
        usual_s, joined = run.usual_s(), run.text("B").count("joined as")
        learner.send_signal(signal.SIGSTOP)
        timer = threading.Timer(seconds, learner.send_signal, [signal.SIGCONT])
        timer.start()
        first_s = max(run.wait_rounds(1) for _ in range(2))  # one may have had B's response before
        timer.join()
        lost = [event["why"] for event in run.events("learner") if event["what"] == "lost"]
        back = ""
        if lost:
            back_s = run.wait(lambda n=joined: run.text("B").count("joined as") > n)
            back = f"; lost ({lost[-1]}), joined again {back_s:.1f} s after it went on"
        run.wait_rounds(6)
        print(
            f"B is stopped for {seconds:.0f} s: a round takes {first_s:.1f} s, usual"
            f" {usual_s:.1f} s{back}",
            flush=True,
        )


def clock(run: Run) -> None:
    """Let learner B have a clock that is a day ahead, and then one a day behind."""
    run.join(A, "A")
    for number, days in enumerate((1, -1)):
        log = f"B{number}"
        code = OTHER_CLOCK.replace("DAYS", str(days))
        learner = run.join(B, log, by=(sys.executable, "-c", code))
        joined_s = run.wait(lambda log=log: run.text(log).count("joined as"))
        run.wait_rounds(1)
        before = len([e for e in run.events("learner") if e["what"] == "lost"])
        run.wait_rounds(8)
        lost = len([e for e in run.events("learner") if e["what"] == "lost"]) - before
        counted = {e["workers_counted"] for e in run.events("round")[-8:]}
        print(
            f"clock off by {days} days: joined after {joined_s:.1f} s; then lost {lost} times in"
            f" 8 rounds of {run.usual_s():.1f} s; workers counted {counted}",
            flush=True,
        )
        other = [e for e in run.events("learner") if e["what"] not in ("joined", "lost")]
        print(f"what else the ledger says: {other[-3:]}", flush=True)
        learner.terminate()
        learner.wait()


def version(run: Run) -> None:
    """Let a learner of another version ask to join."""
    run.join(A, "A")
    run.wait_rounds(2)
    start_s = time.monotonic()
    learner = run.join(B, "B", by=(sys.executable, "-c", OTHER_VERSION))
    code = learner.wait()
    took_s = time.monotonic() - start_s
    run.wait_rounds(4)
    print(f"another version: exit code {code} after {took_s:.1f} s: {run.text('B').strip()}")
    print(f"others' rounds: {run.usual_s():.1f} s", flush=True)


def address(run: Run) -> None:
    """Give the driver's computer another address for good, and start the driver again."""
    learner = run.join(A, "A")
    run.wait_rounds(6)
    ip("-n", DRIVER, "addr", "del", "10.79.0.2/24", "dev", "wan")
    ip("-n", DRIVER, "addr", "add", "10.79.0.3/24", "dev", "wan")
    ip("-n", DRIVER, "route", "replace", "default", "via", "10.79.0.1")
    before = len(run.events("round"))
    time.sleep(60)
    print(f"the driver's address has changed: {len(run.events('round')) - before} rounds in 60 s")
    print(f"driver says: {run.text('driver').splitlines()[-1]}")
    print(f"learner says: {run.text('A').splitlines()[-2:]}; exit code {learner.poll()}")
    start_s = time.monotonic()
    run.driver.send_signal(signal.SIGINT)
    run.driver.wait()
    stopped_s = time.monotonic()
    run.driver = run.start_driver()
    ticket_s = time.monotonic()
    run.join(B, "B")
    before = len(run.events("round"))
    run.wait(lambda: len(run.events("round")) > before)
    print(
        f"^C {stopped_s - start_s:.1f} s, until the new ticket {ticket_s - stopped_s:.1f} s, from"
        f" `adloco join` with it to the first round's end {time.monotonic() - ticket_s:.1f} s",
        flush=True,
    )


def tokenizer(run: Run) -> None:
    """Let a learner join that has neither the text nor the tokenizer's file."""
    start_s = time.monotonic()
    run.join(B, "B")
    joined_s = run.wait(lambda: run.text("B").count("joined as"))
    run.wait_rounds(2)
    print(
        f"without text and tokenizer: joined after {joined_s:.1f} s, second round's end after"
        f" {time.monotonic() - start_s:.1f} s",
        flush=True,
    )


def own_tokenizer(folder: Path) -> dict:
    """Write a text and a tokenizer where only the driver reads them; return the run's options."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    text = folder / "texts" / "text.txt"
    text.parent.mkdir()
    library = ROOT / "adloco_jax"
    text.write_text("\n\n".join(path.read_text() for path in sorted(library.rglob("*.py"))))
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<eos>"], initial_alphabet=alphabet
    )
    made.train([str(text)], trainer)
    path = folder / "texts" / "tokenizer.json"
    made.save(str(path))
    return {"data.path": str(text), "data.tokenizer": str(path), "model.vocab_size": 600}


FAULTS = {
    "stop": stop,
    "clock": clock,
    "version": version,
    "address": address,
    "tokenizer": tokenizer,
}


def main() -> None:
    """Try the faults that are named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("faults", nargs="*", default=[*FAULTS], choices=[*FAULTS])
    for name in parser.parse_args().faults:
        with tempfile.TemporaryDirectory() as scratch, network(""):
            folder = Path(scratch)
            options = {"engine.max_learners": 2 if name in ("stop", "clock") else 1}
            if name == "tokenizer":
                options |= own_tokenizer(folder)
            run = Run(folder, options)
            try:
                if name == "tokenizer":  # the learner cannot have read them at the driver's
                    os.rename(folder / "texts", folder / "moved")
                FAULTS[name](run)
            finally:
                run.close()


if __name__ == "__main__":
    main()
