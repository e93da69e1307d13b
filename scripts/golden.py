"""Compare what small runs of every kind end with, before and after a change of the code.

python scripts/golden.py record before.json     on one commit
python scripts/golden.py compare before.json    on another one; prints the values that differ

Each run is done twice: uninterrupted, and killed after a checkpoint and resumed. What is kept are
the deterministic ledger lines, the control, and the SHA-256 of every exported array. Values differ
between machines, so the file is for one machine only.
"""

import argparse
import concurrent.futures
import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("ADLOCO_DATA_DIR", ROOT / "data"))
sys.path.insert(0, str(ROOT))

from adloco_jax import main as cli  # noqa: E402
from adloco_jax.run.kept import checkpoint  # noqa: E402
from adloco_jax.run.kept.ledger import read  # noqa: E402

_TINY = """model.width=16 model.num_layers=2 model.num_heads=2 model.num_kv_heads=1
    model.mlp_width=32 model.max_length=16 data.sequence_length=16 data.num_sequences=500
    eval.num_sequences=4"""
_SHORT = "num_rounds=6 inner.steps_per_round=4 eval.every_rounds=2 checkpoint.every_rounds=1"
_FAULTS = f"{ROOT}/probes/faults.py"
# Round lengths of learners depend on their speed if there are several trainers.
_LEARNERS = "ensemble.num_trainers=1 ensemble.num_workers=2 ensemble.initial_workers=none"
_LEARNERS += " merge.policy=none batching.test=constant engine.heartbeat_s=120 engine.steps=equal"
_LEARNERS += " engine.kind="
CASES = {
    "quickstart": f"quickstart {_TINY} {_SHORT} merge.every_rounds=3",
    "growing pool": f"growing_pool {_TINY} {_SHORT} num_tokens=none batching.eta=0.1",
    "streaming": f"streaming_diloco {_TINY} {_SHORT} num_tokens=none",
    "chats": f"finetune {_SHORT} model.init_from={DATA}/cases/chatml inner.warmup_updates=2"
    f" data.path={DATA}/cases/qa.jsonl data.sequence_length=64 batching.initial_batch_size=2"
    " batching.batch_cap=2 batching.max_batch_size=2 eval.num_sequences=4 ensemble.num_workers=2",
    "two processes": _FAULTS,
    "ray": f"{_FAULTS} {_LEARNERS}ray",
    "bucket": f"{_FAULTS} {_LEARNERS}bucket",
}


_DETERMINISTIC_EVENTS = ("round", "sync", "eval", "merge", "refusal", "spawn")


def deterministic_lines(events: Iterable[dict]) -> list[dict]:
    """Return the lines that two runs with the same config and seed share, to compare with `==`.

    They are the round, sync, eval, merge, refusal and spawn lines without fields in seconds (`_s`).
    """
    return [
        {name: value for name, value in event.items() if not name.endswith("_s")}
        for event in events
        if event["event"] in _DETERMINISTIC_EVENTS
    ]


def _command(*words: str, log: Path) -> subprocess.Popen:
    environ = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environ |= {"JAX_COMPILATION_CACHE_DIR": str(log.parents[1] / "programs")}
    environ |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "ADLOCO_KEY": "k" * 32}
    with open(log, "a") as file:
        command = [sys.executable, "-m", "adloco_jax", *words]
        return subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | environ)


@contextlib.contextmanager
def _started(case: str, workdir: Path) -> Iterator[list[subprocess.Popen]]:
    """Start the processes of a run, its own one first; kill them when the context ends."""
    name, *options = CASES[case].split()
    log, address = workdir.with_suffix(".log"), f"file://{workdir}.bucket"
    if case == "bucket":
        options.append(f"engine.address={address}")
    words = ["train", name, f"--workdir={workdir}", *(f"--config.{each}" for each in options)]
    words_of = [words]
    if case == "two processes":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            words.append(f"--coordinator=127.0.0.1:{probe.getsockname()[1]}")
        words_of = [[*words, "--num_processes=2", f"--process_id={number}"] for number in (0, 1)]
    if case == "bucket":
        words_of += [["join", address, f"--workdir={workdir}.learners"]] * 2
    group = [_command(*words, log=log) for words in words_of]
    try:
        yield group
    finally:
        for process in group:
            process.kill()
            process.wait()


def _num_checkpoints(workdir: Path) -> int:
    path = workdir / "ledger.jsonl"
    return path.read_text().count('"event": "checkpoint"') if path.exists() else 0


def end_of(case: str, folder: Path, *, kill: bool) -> dict:
    """Do a run, and return what it ends with: values by name."""
    workdir = folder / f"{case.replace(' ', '-')}-{'killed' if kill else 'whole'}"
    if kill:
        with _started(case, workdir) as group:
            while _num_checkpoints(workdir) < 3 and group[0].poll() is None:
                time.sleep(0.01)
    with _started(case, workdir) as group:
        code = group[0].wait(timeout=900)
    log = workdir.with_suffix(".log")
    # Ray's cluster may outlive a driver that was killed; it ends by itself.
    code = code or cli.main(["export", str(workdir), "--out", f"{workdir}.export"])
    if code:
        return {"ended with": f"{code}: {log.read_text()[-2000:]}"}
    checkpoints = workdir / "checkpoints"
    control = checkpoint.read_host(checkpoints / str(checkpoint.list_rounds(checkpoints)[0]))
    found = {f"control.{name}": value for name, value in control["control"].items()}
    for number, line in enumerate(deterministic_lines(read(workdir / "ledger.jsonl"))):
        found |= {f"line {number}.{name}": value for name, value in line.items()}
    for path in sorted(Path(f"{workdir}.export").glob("*.safetensors")):
        for name, array in load_file(path).items():
            found[f"{path.name}.{name}"] = hashlib.sha256(array.tobytes()).hexdigest()
    return found


def main() -> int:
    """Record values, or print those that differ from recorded ones."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--cases", default=",".join(CASES), help="names, separated by commas")
    given = parser.parse_args()
    recorded = json.loads(given.file.read_text()) if given.file.exists() else {}
    num_different = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        folders = [Path(folder) / case.replace(" ", "-") for case in given.cases.split(",")]
        for each in folders:
            each.mkdir()

        def ends(case: str, folder: Path) -> list[dict]:
            return [end_of(case, folder, kill=kill) for kill in (False, True)]

        cases = given.cases.split(",")
        for case, (whole, killed) in zip(cases, pool.map(ends, cases, folders), strict=True):
            whole, killed = json.loads(json.dumps([whole, killed]))
            expected = whole if given.what == "record" else recorded[case]
            for kind, found in (("whole", whole), ("killed", killed)):
                names = [n for n in found | expected if expected.get(n) != found.get(n)]
                num_different += len(names)
                print(f"{case}, {kind}: {len(found)} values, {len(names)} differ", flush=True)
                for name in names[:20]:
                    print(f"  {name}: {expected.get(name)} -> {found.get(name)}", flush=True)
            recorded[case] = expected
    given.file.write_text(json.dumps(recorded, indent=1))
    return int(num_different > 0)


if __name__ == "__main__":
    sys.exit(main())
