"""One broken or hostile learner of four: the loss with and without `outer.clip_workers`.

python -m studies.clipping                what is recorded in studies/clipping.jsonl
python -m studies.clipping --run FOLDER   the runs that are missing there

Four workers, each in a learner of its own, in memory. From round 3 on the last one sends its update
times 10, times 1,000 or with the other sign; or all the time it trains on rows whose tokens are
shuffled. Without a clip its update is never scaled (`outer.clip_workers` = 1e9).
"""

import argparse
import contextlib
import functools
import itertools
import json
import runpy
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from adloco_jax import TRANSPORTS, TransportEntry, train
from adloco_jax.configs import diloco
from adloco_jax.elastic import learner as learners
from adloco_jax.run.kept.ledger import read

ROOT = Path(__file__).resolve().parents[1]
InMemory: Any = runpy.run_path(str(ROOT / "examples" / "transport.py"))["InMemory"]
RECORD = ROOT / "studies" / "clipping.jsonl"
HOSTILE = 3  # number of the learner
FACTORS = {"x 10": 10.0, "x 1000": 1e3, "other sign": -1.0}
KINDS = ("", *FACTORS, "shuffled rows")  # empty: nothing is wrong
NO_CLIP = 1e9
SMALL = {
    "num_rounds": 12,
    "model.width": 32,
    "model.num_layers": 2,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.mlp_width": 64,
    "model.max_length": 32,
    "data.sequence_length": 32,
    "data.num_sequences": 8000,
    "ensemble.num_workers": 4,
    "inner.steps_per_round": 30,
    "batching.initial_batch_size": 8,
    "batching.max_batch_size": 8,
    "eval.num_sequences": 128,
    "eval.every_rounds": 12,
    "checkpoint.every_rounds": 12,
    "engine.kind": "hostile",
    "engine.steps": "equal",
}
METHODS = {
    "muon": {},
    "adamw": {
        "inner.tx": "adamw",
        "inner.learning_rate": 0.003,
        "outer.learning_rate": 0.7,
        "outer.momentum": 0.9,
        "outer.average": 0.0,
    },
}


Programs: Any = learners.Programs
_programs: dict[str, Any] = {}


def shared_programs(method: str, *given: Any) -> Any:
    """Return the programs of a method, which are compiled once for all learners and seeds."""
    if method not in _programs:
        _programs[method] = Programs(*given)
    return _programs[method]


class Shuffled:
    """Rows whose tokens are in another order, so that none follows from those before."""

    def __init__(self, rows: Any):
        self._rows = rows

    def batch(self, *where: int) -> np.ndarray:
        """Return the rows that are asked for, shuffled."""
        return np.random.default_rng(where[2]).permuted(self._rows.batch(*where), axis=1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)


class Hostile(InMemory):
    """Learners in memory, one of which does something else."""

    what = ""

    def reply(self, handle: tuple[int, int], method: str, arguments: dict) -> Any:
        """Return a learner's reply, changed if it is the hostile one's."""
        learner = self.learner(handle)
        is_hostile = handle[0] == HOSTILE
        if is_hostile and self.what == "shuffled rows" and not isinstance(learner.corpus, Shuffled):
            learner.corpus = Shuffled(learner.corpus)
        reply = super().reply(handle, method, arguments)
        factor = FACTORS.get(self.what)
        if not (is_hostile and factor and method == "run_round" and arguments["request"].round > 2):
            return reply
        (response,) = reply.value
        sent = response.differences
        packed_R = jax.tree.map(lambda leaf: leaf * np.float32(factor), sent.packed_R)
        changed = response._replace(differences=sent._replace(packed_R=packed_R))
        return reply._replace(value=[changed])


def connect(address: str, num_learners: int, given: Any, is_over: Callable[[], bool]) -> Any:
    """Return the transport of a run; there is nothing to close."""
    return contextlib.nullcontext(Hostile(given))


TRANSPORTS["hostile"] = TransportEntry(connect)


def run(folder: Path, method: str, what: str, clip: float, seed: int) -> dict:
    """Train once; return the loss, and how many updates were clipped."""
    config = diloco.get_config()
    options = SMALL | METHODS[method] | {"seed": seed, "outer.clip_workers": clip}
    config.update_from_flattened_dict(options)
    Hostile.what = what
    learners.Programs = functools.partial(shared_programs, method)
    workdir = folder / f"{method}-{what}-{clip:g}-{seed}".replace(" ", "_")
    found = {"method": method, "what": what, "clip": clip, "seed": seed}
    result = train(config, workdir)
    lines = [e for e in read(workdir / "ledger.jsonl") if e["event"] == "learner"]
    clipped = [e["learner"] for e in lines if e["what"] == "clipped"]
    honest = sum(number != HOSTILE for number in clipped)
    return found | {"loss": result.loss, "clipped": len(clipped), "honest_clipped": honest}


def table(lines: list[dict]) -> str:
    """Describe recorded runs: median loss, range, and clipped updates of a run, of honest ones."""
    groups: dict[tuple, list[dict]] = {}
    for line in lines:
        groups.setdefault((line["method"], line["what"], line["clip"]), []).append(line)
    described = []
    for (method, what, clip), group in groups.items():
        losses = sorted(line["loss"] for line in group)
        counts = [(line["clipped"], line["honest_clipped"]) for line in group]
        name = f"{method}, {what or 'nothing wrong'}, clip {clip:g}"
        described.append(
            f"{name}: {statistics.median(losses):.4g} ({losses[0]:.4g} to {losses[-1]:.4g}),"
            f" {len(losses)} seeds, clipped {counts}"
        )
    return "\n".join(described)


def main() -> None:
    """Print what is recorded; with `--run`, do the runs that are missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="do the runs, in a folder")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--methods", default="muon,adamw")
    parser.add_argument("--kinds", default=",".join(KINDS))
    given = parser.parse_args()
    lines = [json.loads(line) for line in RECORD.read_text().splitlines()]
    if given.run is None:
        print(table(lines))
        return
    given.run.mkdir(parents=True, exist_ok=True)
    done = {(e["method"], e["what"], e["clip"], e["seed"]) for e in lines}
    seeds, methods = map(int, given.seeds.split(",")), given.methods.split(",")
    for case in itertools.product(methods, given.kinds.split(","), (NO_CLIP, 3.0), seeds):
        if case not in done:
            line = run(given.run, *case)
            with open(RECORD, "a") as file:
                file.write(json.dumps(line) + "\n")
            print(line, flush=True)


if __name__ == "__main__":
    main()
