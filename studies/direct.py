"""Whole rounds of two learners with a ticket, in a bucket on an S3 server, and in a shared folder.

python -m studies.direct                      what is recorded in studies/direct.jsonl
python -m studies.direct --run FOLDER         the runs that are missing there
python -m studies.direct --run FOLDER --only ticket,S3 --rates 50mbit --repeats 1

Needs root, `ip` and `tc`. The driver and two learners are processes in network namespaces of their
own, behind a router. Every device sends at the rate (`tbf`), so all three have a link of it in each
direction. The S3 server (moto) runs beside the driver, whose requests to it cross no link. A folder
is on this machine's disk; there `engine.link` holds each process to the rate. All runs train the
same: 8.5 million parameters, differences in int4, two short updates a round.
"""

import argparse
import contextlib
import datetime
import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "studies" / "direct.jsonl"
PYTHON = [sys.executable, "-m"]
WAYS = ("ticket", "S3", "folder")
RATES = {"10mbit": "10Mbit/s", "50mbit": "50Mbit/s", "": ""}  # of tc, and of engine.link
ROUNDS = 6  # the first has parameters in float32, and compiles
PARTS = ("computing_s", "uploading_s", "waiting_s", "downloading_s")
ROUTER = "adloco-router"
SPACES = ("adloco-driver", "adloco-one", "adloco-two")
S3 = "10.79.0.2:9090"  # in the driver's namespace
SETTINGS = {
    "num_rounds": ROUNDS,
    "model.width": 256,
    "model.num_layers": 8,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.mlp_width": 1024,
    "model.max_length": 32,
    "data.sequence_length": 32,
    "data.num_sequences": 4000,
    "ensemble.num_workers": 2,
    "inner.tx": "adamw",
    "inner.learning_rate": 1e-3,
    "inner.steps_per_round": 2,
    "batching.initial_batch_size": 1,
    "batching.max_batch_size": 1,
    "eval.num_sequences": 4,
    "eval.every_rounds": ROUNDS,
    "checkpoint.every_rounds": ROUNDS,
    "outer.precision": "int4",
    "engine.max_learners": 2,
    "engine.steps": "equal",
}


def ip(*words: str) -> None:
    """Run a command of `ip` that must succeed."""
    subprocess.run(["ip", *words], check=True)


def within(space: str, *words: str) -> list[str]:
    """Return the command that runs words in a namespace."""
    return ["ip", "netns", "exec", space, *words]


@contextlib.contextmanager
def network(rate: str) -> Iterator[None]:
    """Make namespaces for the driver and two learners, and a router to which each has a link."""
    spaces = (ROUTER, *SPACES)
    for space in spaces:
        subprocess.run(["ip", "netns", "del", space], stderr=subprocess.DEVNULL)
        ip("netns", "add", space)
        ip("-n", space, "link", "set", "lo", "up")
    for number, space in enumerate(SPACES):
        peer = f"to{number}"
        ip("link", "add", "wan", "netns", space, "type", "veth", "peer", peer, "netns", ROUTER)
        for where, device, host in ((space, "wan", 2), (ROUTER, peer, 1)):
            ip("-n", where, "addr", "add", f"10.79.{number}.{host}/24", "dev", device)
            ip("-n", where, "link", "set", device, "up")
            if rate:
                shape = ("qdisc", "add", "dev", device, "root", "tbf", "rate", rate)
                tc = ["tc", "-n", where, *shape, "burst", "32kb", "latency", "400ms"]
                subprocess.run(tc, check=True)
        ip("-n", space, "route", "add", "default", "via", f"10.79.{number}.1")
    subprocess.run(within(ROUTER, "sysctl", "-qw", "net.ipv4.ip_forward=1"), check=True)
    try:
        yield
    finally:
        for space in spaces:
            ip("netns", "del", space)


def wire_bytes() -> int:
    """Return the bytes that the router has received from the learners, and sent to them."""
    command = ["ip", "-n", ROUTER, "-s", "-j", "link"]
    links = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    total = 0
    for link in links:
        if link["ifname"] in ("to1", "to2"):
            total += sum(link["stats64"][way]["bytes"] for way in ("rx", "tx"))
    return total


def cpu_s(process: subprocess.Popen) -> float:
    """Return the seconds of processor time of a process so far, in user and system mode."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def serve_s3() -> None:
    """Serve one empty bucket, until this process is killed."""
    from moto.server import ThreadedMotoServer

    host, _, port = S3.partition(":")
    ThreadedMotoServer(host, int(port), verbose=False).start()
    bucket = urllib.request.Request(f"http://{S3}/bkt", method="PUT")
    urllib.request.urlopen(bucket).close()
    print("ready", flush=True)
    while True:
        time.sleep(60)


def rounds_of(workdir: Path) -> list[dict]:
    """Return the ledger's lines of rounds that are complete."""
    path = workdir / "ledger.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in events if event["event"] == "round"]


def run(folder: Path, way: str, rate: str) -> dict:
    """Train once over one way; return what was measured of each round."""
    folder.mkdir(parents=True)
    environ = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "ADLOCO_KEY": "ab" * 32,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{S3}",
        "AWS_ALLOW_HTTP": "true",
        "XDG_CONFIG_HOME": str(folder / "config"),
    }
    address = "s3://bkt/run" if way == "S3" else f"file://{folder}/bucket"
    keys = {"engine.kind": "bucket", "engine.address": address}
    if way == "folder" and rate:
        keys["engine.link"] = RATES[rate]
    if way == "ticket":
        keys = {"engine.kind": "direct", "engine.relay": "off", "engine.trains_here": False}
    words = [f"--config.{key}={value}" for key, value in (SETTINGS | keys).items()]
    workdir = folder / "run"

    with contextlib.ExitStack() as stack:

        def start(space: str, log: str, *command: str) -> subprocess.Popen:
            with open(folder / log, "w") as file:
                process = subprocess.Popen(
                    within(space, *PYTHON, *command), stdout=file, stderr=file, env=environ
                )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        stack.enter_context(network(rate))
        if way == "S3":
            start(SPACES[0], "s3.log", "studies.direct", "--s3")
            while "ready" not in (folder / "s3.log").read_text():
                time.sleep(0.1)
        start_s = time.monotonic()
        driver = start(
            SPACES[0],
            "driver.log",
            "adloco_jax",
            "train",
            "diloco",
            "--workdir",
            f"{workdir}",
            *words,
        )
        invited = folder / "driver.log"
        while "to join" not in invited.read_text():
            time.sleep(0.1)
            assert driver.poll() is None, invited.read_text()
        if way == "ticket":
            address = (workdir / "learners" / "ticket").read_text()
        for number, space in enumerate(SPACES[1:], 1):
            start(space, f"learner-{number}.log", "adloco_jax", "join", address)

        ends = []  # seconds since the start, bytes on the wire, processor seconds; of each round
        while driver.poll() is None:
            while len(ends) < len(rounds_of(workdir)):
                ends.append((time.monotonic() - start_s, wire_bytes(), cpu_s(driver)))
            time.sleep(0.05)
        assert driver.returncode == 0, invited.read_text()

    (exported,) = (workdir / "export").glob("*.safetensors")
    rounds = rounds_of(workdir)
    steps = [(b[1] - a[1], b[2] - a[2]) for a, b in itertools.pairwise(ends)]
    return {
        "way": way,
        "rate": rate,
        "date": datetime.date.today().isoformat(),
        "first_s": round(ends[0][0], 2),  # from the driver's start to the end of the first round
        "round_s": [round(each["step_s"], 3) for each in rounds[1:]],
        "wire_bytes": [num_bytes for num_bytes, _ in steps],
        "driver_cpu_s": [round(seconds, 2) for _, seconds in steps],
        **{part: [round(each[part] / 2, 3) for each in rounds[1:]] for part in PARTS},
        "losses": [each["train_loss"] for each in rounds],
        "export": hashlib.sha256(exported.read_bytes()).hexdigest(),
    }


def table(lines: list[dict]) -> str:
    """Describe recorded runs: medians of rounds after the first, and the range of their seconds."""
    described = []
    for rate, way in itertools.product(RATES, WAYS):
        group = [line for line in lines if (line["rate"], line["way"]) == (rate, way)]
        if not group:
            continue

        def all_of(name: str, group: list[dict] = group) -> list[float]:
            return [value for line in group for value in line[name]]

        seconds = all_of("round_s")
        parts = ", ".join(f"{part[:-2]} {statistics.median(all_of(part)):.2f}" for part in PARTS)
        megabytes = statistics.median(all_of("wire_bytes")) / 1e6
        described.append(
            f"{rate or 'unshaped'}, {way}: a round {statistics.median(seconds):.2f} s"
            f" ({min(seconds):.2f} to {max(seconds):.2f}, {len(seconds)} rounds); of a learner:"
            f" {parts}; {megabytes:.2f} MB on the wire; driver"
            f" {statistics.median(all_of('driver_cpu_s')):.2f} s of processor time; first round"
            f" after {statistics.median(line['first_s'] for line in group):.1f} s"
        )
    for name in ("losses", "export"):
        num_found = len({json.dumps(line[name]) for line in lines})
        described.append(f"different {name} of {len(lines)} runs: {num_found}")
    return "\n".join(described)


def main() -> None:
    """Do the runs that are missing, and print what is recorded."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run", type=Path, help="folder for runs that are missing")
    parser.add_argument("--only", default=",".join(WAYS), help="ways, with commas")
    parser.add_argument("--rates", default=",".join(RATES), help="rates of tc, with commas")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--s3", action="store_true", help="serve a bucket (for itself)")
    given = parser.parse_args()
    if given.s3:
        serve_s3()
    lines = (
        [json.loads(line) for line in RECORD.read_text().splitlines()] if RECORD.exists() else []
    )
    if given.run:
        # Ways take turns, so that what else the machine does meets all of them.
        for rate, repeat, way in itertools.product(
            given.rates.split(","), range(given.repeats), given.only.split(",")
        ):
            done = [line for line in lines if (line["rate"], line["way"]) == (rate, way)]
            if len(done) > repeat:
                continue
            folder = given.run.resolve() / f"{way}-{rate or 'unshaped'}-{time.time():.0f}"
            lines.append(run(folder, way, rate))
            with open(RECORD, "a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
            print(table([lines[-1]]), flush=True)
    print(table(lines))


if __name__ == "__main__":
    main()
