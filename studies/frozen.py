"""What do frozen weights in eight or four bits cost, when an adapter is fine-tuned beside them?

    python -m studies.frozen              print the record's table, and what is not made yet
    python -m studies.frozen --run MODEL  make what is missing, first; MODEL is a folder with
                                          SmolLM2-135M-Instruct, as `make real` writes it

The chats are wordnet_train.jsonl and the first `HELDOUT` of wordnet_heldout.jsonl, in the folder
chats of ADLOCO_DATA_DIR.

Declared before any run on the seeds of `SEEDS`, which no choice had used:

1. `adloco train finetune` with `SETTINGS` and `model.base_dtype` bfloat16, int8 or nf4: 12 updates
   of 4 rows of 128 tokens, which are about 8 chats. A seed decides which chats these are, and how
   the adapter begins. Rate, rank and batch are those of studies/finetune.jsonl, not tuned for any
   arm. Computed in float32, because CPUs are slow in bfloat16.
2. Compared: the held-out loss of answers that the run itself reports, in nats per token, seed by
   seed with bfloat16; and the loss before training.
3. Seconds of an update, on the first seed: `REPEATS` times an update of each arm in turn, in one
   process, with the program that a run compiles. The first of each is not counted.
4. Bytes of that program by `memory_analysis`, for the CPU.
"""

import argparse
import functools
import itertools
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

import adloco_jax
from adloco_jax.config import completed, validate
from adloco_jax.configs import finetune
from adloco_jax.core.inner import inner_steps
from adloco_jax.core.outer import start_round
from adloco_jax.data import load_corpus
from adloco_jax.engine.evaluate import mean_loss
from adloco_jax.engine.model import configured_model, program_spec, with_weights
from adloco_jax.engine.programs import Programs
from adloco_jax.engine.spec import this_machine
from adloco_jax.row_batch import as_row_batch
from studies import tables

RECORD = Path(__file__).with_name("frozen.jsonl")
KINDS = ("bfloat16", "int8", "nf4")
SEEDS = (71, 72, 73)
HELDOUT = 60  # chats
REPEATS = 8
SETTINGS = {
    "adapter.rank": 8,
    "adapter.alpha": 16.0,
    "model.dtype": "float32",
    "data.sequence_length": 128,
    "ensemble.num_workers": 1,
    "inner.steps_per_round": 12,
    "inner.learning_rate": 5e-4,
    "inner.weight_decay": 0.0,
    "outer.tx": "sgd",  # with rate 1: the worker's own weights
    "outer.learning_rate": 1.0,
    "batching.initial_batch_size": 4,
    "eval.num_sequences": HELDOUT,  # rows; there are fewer
    "eval.sample_tokens": 0,
    "num_epochs": None,
    "num_rounds": 1,
}


def config_of(model: str, kind: str, seed: int, heldout: Path) -> ConfigDict:
    """Return the config of a run."""
    config = finetune.get_config()
    chats = Path(os.environ["ADLOCO_DATA_DIR"]) / "chats"
    changes = SETTINGS | {
        "model.init_from": model,
        "model.base_dtype": kind,
        "data.path": str(chats / "wordnet_train.jsonl"),
        "data.heldout_path": str(heldout),
        "seed": seed,
    }
    for key, value in changes.items():
        *groups, name = key.split(".")
        functools.reduce(lambda node, group: node[group], groups, config)[name] = value
    return config


def heldout_chats(folder: Path) -> Path:
    """Write the first held-out chats to a file in a folder."""
    whole = Path(os.environ["ADLOCO_DATA_DIR"]) / "chats" / "wordnet_heldout.jsonl"
    lines = whole.read_text(encoding="utf-8").splitlines(keepends=True)
    file = folder / "heldout.jsonl"
    file.write_text("".join(lines[:HELDOUT]), encoding="utf-8")
    return file


class Arm(NamedTuple):
    """One way to hold frozen weights, compiled."""

    loss: float  # of held-out answers, before training
    update: Callable[[], object]  # makes another update of the same rows
    num_bytes: dict[str, int]


def compiled_arm(config: ConfigDict) -> Arm:
    """Compile an update of the config's run, and evaluate its model before training."""
    settings, machine = completed(validate(config)), this_machine()
    model = configured_model(settings, machine)
    model, _ = with_weights(model, settings.model, machine, seed=settings.seed)
    spec = program_spec(settings, model, machine)
    corpus = load_corpus(settings, note=lambda line: None)
    adapter = jax.jit(model.init_fn)(jax.random.key(settings.seed))

    programs = Programs(spec)
    programs.set_frozen(model.base.params)
    batch_size = settings.batching.initial_batch_size
    heldout = corpus.heldout_rows[np.arange(len(corpus.heldout_rows))]
    loss = mean_loss(programs, adapter, heldout, batch_size)
    programs.close()

    ensemble = adloco_jax.init(
        adapter, num_trainers=1, num_workers=1, inner_tx=spec.inner_tx, outer_tx=spec.outer_tx
    )
    workers = jax.jit(start_round)(ensemble)
    first = as_row_batch(corpus.rows[np.arange(batch_size)])
    first = first.replace(tokens=np.int32(first.tokens))
    rows = jax.tree.map(lambda array_BL: array_BL[None, None], first)
    rates = np.full((1, 1), settings.inner.learning_rate, np.float32)

    def steps(workers, base, rows_TRB, rates_TR):
        return inner_steps(
            workers,
            rows_TRB,
            functools.partial(spec.loss_fn, base=base),
            inner_tx=spec.inner_tx,
            learning_rate_TR=rates_TR,
            sequential=True,
            examples_per_pass=spec.examples_per_pass,
        )

    jitted = jax.jit(steps, donate_argnums=0)
    program = jitted.lower(workers, model.base.params, rows, rates).compile()
    memory = program.memory_analysis()
    num_bytes = {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
    }

    def update() -> object:
        nonlocal workers
        workers, losses_TR, _ = program(workers, model.base.params, rows, rates)
        return losses_TR

    return Arm(loss, update, num_bytes)


def interleaved(updates: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Return seconds of updates that were made in turn, by arm."""
    seconds: dict[str, list[float]] = {kind: [] for kind in updates}
    for turn in range(REPEATS + 1):
        for kind, update in updates.items():
            began_s = time.perf_counter()
            jax.block_until_ready(update())
            if turn:
                seconds[kind].append(time.perf_counter() - began_s)
    return seconds


def compare(model: str, folder: Path) -> Iterator[dict]:
    """Yield the record's lines about losses before training, seconds and bytes."""
    heldout = heldout_chats(folder)
    arms = {kind: compiled_arm(config_of(model, kind, SEEDS[0], heldout)) for kind in KINDS}
    seconds = interleaved({kind: arm.update for kind, arm in arms.items()})
    for kind, arm in arms.items():
        line = {"kind": kind, "seed": None, "before": arm.loss, "seconds": seconds[kind]}
        yield line | {"bytes": arm.num_bytes, "load": os.getloadavg()[0]}


def tuned(model: str, kind: str, seed: int, folder: Path) -> dict:
    """Train an adapter; return the record's line."""
    began_s, load = time.monotonic(), os.getloadavg()[0]
    workdir = folder / "run"
    shutil.rmtree(workdir, ignore_errors=True)
    config = config_of(model, kind, seed, heldout_chats(folder))
    result = adloco_jax.train(config, workdir)
    line = {"kind": kind, "seed": seed, "loss": result.loss, "load": load}
    return line | {"wall_s": time.monotonic() - began_s}


def read() -> list[dict]:
    """Read the record, if there is one."""
    if not RECORD.exists():
        return []
    return [json.loads(line) for line in RECORD.read_text().splitlines()]


def append(line: dict) -> None:
    """Append a line to the record."""
    with open(RECORD, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def make_missing(model: str) -> None:
    """Make what the record lacks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed, kind in itertools.product(SEEDS, KINDS):
            if (kind, seed) not in {(line["kind"], line["seed"]) for line in read()}:
                append(tuned(model, kind, seed, folder))
        if not any(line["seed"] is None for line in read()):
            for line in compare(model, folder):
                append(line)


def quartiles(values: list[float], form: str) -> str:
    """Return the median of some values, and their quartiles."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def table(lines: list[dict]) -> str:
    """Return the table of the record."""
    losses = {(line["kind"], line["seed"]): line["loss"] for line in lines if "loss" in line}
    costs = {line["kind"]: line for line in lines if "seconds" in line}
    head = ("frozen weights", "before", *(f"seed {seed}" for seed in SEEDS), "median")
    rows = [(*head, "seconds an update", "of bfloat16's", "arguments, MB", "temporaries, MB")]
    for kind in KINDS:
        found = [losses[kind, seed] for seed in SEEDS]
        cost, wide = costs[kind], costs["bfloat16"]
        pairs = [a / b for a, b in zip(cost["seconds"], wide["seconds"], strict=True)]
        rows.append(
            (
                kind,
                f"{cost['before']:.3f}",
                *(f"{loss:.3f}" for loss in found),
                f"{statistics.median(found):.3f}",
                quartiles(cost["seconds"], ".2f"),
                quartiles(pairs, ".2f"),
                f"{cost['bytes']['arguments'] / 1e6:,.0f}",
                f"{cost['bytes']['temporaries'] / 1e6:,.0f}",
            )
        )
    return tables.markdown_table(rows)


def main() -> None:
    """Print the record's table, or what is missing; with `--run`, make that."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", metavar="MODEL", help="make the runs that are missing, first")
    given = parser.parse_args()
    if given.run:
        make_missing(given.run)
    made = {(line["kind"], line["seed"]) for line in read()}
    wanted = {*itertools.product(KINDS, (*SEEDS, None))}
    for kind, seed in sorted(wanted - made, key=str):
        print(f"not made yet: {kind}, {'seconds and bytes' if seed is None else f'seed {seed}'}")
    if made == wanted:
        print(table(read()))


if __name__ == "__main__":
    main()
