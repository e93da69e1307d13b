"""Benchmarks of the costs that AdLoCo adds to plain training; each ends with one line of JSON.

    python scripts/benchmark.py statistics | round | trainers | prepare | pytorch
                                [--repeats N] [--shapes S ...] [--batches B ...] [--trainers M ...]

Alternatives are timed alternately within one process, after compilation and a first call. The timer
waits for each call. Figures are medians with quartiles; ratios are ratios of medians. The figures,
with machine and date, are in studies/BENCHMARKS.md.
"""

import argparse
import contextlib
import dataclasses
import functools
import gzip
import io
import json
import os
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from side_by_side import (
    SHAPES,
    InnerSteps,
    Shape,
    functions_of,
    random_tokens,
    settings_of,
    side_by_side,
)
from timing import interleave, machine, ratio, report

import adloco_jax
from adloco_jax.config import Settings, default_config, validate
from adloco_jax.data.corpus import make_job
from adloco_jax.data.rows import prepare
from adloco_jax.data.sources import stdlib_documents
from adloco_jax.data.tokenizers import load_tokenizer
from adloco_jax.engine.programs import needed_bytes
from adloco_jax.run.kept.ledger import read
from adloco_jax.training import fit

SMALL = SHAPES["small"]
TINY = SMALL.model | {"width": 128, "mlp_width": 352, "num_layers": 2}


def statistics(options: argparse.Namespace) -> dict:
    """Compare the time of per-example statistics with that of the batch's plain gradient."""
    result: dict = {"case": "statistics", "model": SMALL.model}
    for batch in (4, 8, 32):
        times, extra_mib = statistics_times(SMALL, batch, list(WAYS), options.repeats)
        for name in WAYS:
            result.setdefault(f"{name}_over_plain", {})[str(batch)] = ratio(times, name, "plain")
            result.setdefault(f"{name}_extra_mib", {})[str(batch)] = extra_mib[name]
        report(f"b = {batch}", times)
    return result


WAYS: dict[str, dict] = {
    "taps": {"estimator": "taps", "inner_products": False},
    "vmap": {"estimator": "vmap", "inner_products": False},
    "taps_and_jvp": {"estimator": "taps", "inner_products": True},
}


def statistics_times(
    shape: Shape, batch: int, names: list[str], repeats: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of the plain gradient and of some WAYS, and their additional memory in MiB."""
    init_fn, loss_fn = functions_of(settings_of(shape))
    params, rows = jax.jit(init_fn)(jax.random.key(0)), random_tokens(shape, batch, 1)[0, 0]
    ways = {"plain": jax.value_and_grad(loss_fn)}
    for name in names:
        ways[name] = functools.partial(adloco_jax.gradient_stats, loss_fn, **WAYS[name])
    compiled = {name: jax.jit(way).lower(params, rows).compile() for name, way in ways.items()}
    calls = {name: functools.partial(way, params, rows) for name, way in compiled.items()}
    extra_mib = {
        name: round((needed_bytes(way) - needed_bytes(compiled["plain"])) / 2**20, 1)
        for name, way in compiled.items()
    }
    return interleave(calls, repeats), extra_mib


def round_overhead(options: argparse.Namespace) -> dict:
    """Compare a whole round, with batch-size test and host work, with its inner steps alone."""
    shape, batch = Shape(TINY, 128, num_steps=50), 8
    times = round_times(shape, batch, rounds=-(-options.repeats // 4), blocks=4)
    report(f"S = {shape.num_steps}, batch {batch}", times)
    over = ratio(times, "round", "bare inner steps")
    return {"case": "round", "steps": shape.num_steps, "batch": batch, "round_over_bare": over}


def round_times(shape: Shape, batch: int, *, rounds: int, blocks: int) -> dict[str, list[float]]:
    """Seconds of whole rounds and of bare inner steps, in alternating blocks."""
    overrides = {"num_rounds": rounds + 2, "eval.every_rounds": rounds + 2}
    overrides |= {"inner.steps_per_round": shape.num_steps, "batching.buckets": (batch,)}
    sizes = ("initial_batch_size", "max_batch_size", "batch_cap")
    overrides |= {f"batching.{name}": batch for name in sizes}
    settings = settings_of(shape, **overrides)
    bare = InnerSteps(settings, random_tokens(shape, batch, 1))
    bare()
    times: dict[str, list[float]] = {"round": [], "bare inner steps": []}
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", f"{folder}/programs")
        for block in range(blocks):
            events = fit_random(settings, f"{folder}/{block}")
            lines = [e for e in events if e["event"] == "round"]
            # Without the first round, which waits for compilation, and the last, which prepares
            # nothing.
            times["round"] += [line["step_s"] for line in lines[1:-1]]
            times["bare inner steps"] += interleave({"bare": bare}, rounds)["bare"]
    return times


def fit_random(settings: Settings, workdir: str) -> list[dict]:
    """Run on random bytes without output; return the ledger."""
    init_fn, loss_fn = functions_of(settings)
    rows = _RandomRows(settings.data.sequence_length)
    with contextlib.redirect_stdout(io.StringIO()):
        fit(settings, corpus=rows, init_fn=init_fn, loss_fn=loss_fn, workdir=workdir)
    return read(f"{workdir}/ledger.jsonl")


@dataclasses.dataclass(frozen=True)
class _RandomRows:
    """Rows of random bytes, enough for any benchmark."""

    length: int
    fingerprint: str = "random"
    tokens_per_byte: float = 1.0
    shards: tuple = ()

    @property
    def heldout_rows(self) -> np.ndarray:
        return self.batch(1, 0, 0, 16)

    def batch(self, trainer: int, stream: int, start: int, count: int) -> np.ndarray:
        generator = np.random.default_rng([trainer, stream, start])
        return generator.integers(0, 256, (count, self.length + 1), dtype=np.int32)


def trainers(options: argparse.Namespace) -> dict:
    """Inner steps of 1, 2, 4 and 8 trainers of one worker each, at equal work in all.

    Workers run one after another, as by default on a CPU, and all at once. Memory is the compiler's
    figure, divided by the number of trainers times one trainer's.
    """
    runs = {}
    for count in (1, 2, 4, 8):
        shape = dataclasses.replace(SMALL, num_steps=16 // count)
        tokens = random_tokens(shape, 8, count)
        for how, sequential in (("in turn", True), ("at once", False)):
            run = InnerSteps(settings_of(shape), tokens, sequential=sequential)
            runs[f"{count} {how}"] = run
    times = interleave(runs, options.repeats)
    report("16 updates of batch 8 in all", times)
    one = runs["1 in turn"].needed_bytes
    return {
        "case": "trainers",
        "time_over_one": {name: ratio(times, name, "1 in turn") for name in runs},
        "memory_over_as_many": {
            name: round(run.needed_bytes / int(name.split()[0]) / one, 3)
            for name, run in runs.items()
        },
        "mib_of_one": round(one / 2**20),
    }


def preparation(options: argparse.Namespace) -> dict:
    """The preparation of a folder, against the bare tokenizer on text in memory.

    The text is three copies of the standard library with different first lines, as gzipped JSON
    lines in shards. The tokenizer is a byte-level BPE that is trained on a part of the text.
    """
    settings = validate(default_config())
    library = list(stdlib_documents(None, settings.data))
    texts = [f"# {copy}\n{text}" for copy in range(3) for text in library]
    size = sum(len(text.encode()) for text in texts)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = _train_tokenizer(texts[::60], f"{folder}/tokenizer.json")
        os.mkdir(f"{folder}/shards")
        for number in range(8):
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[number::8])
            Path(f"{folder}/shards/{number}.json.gz").write_bytes(gzip.compress(lines.encode(), 6))
        encoder = load_tokenizer(tokenizer)
        changes = {"source": "jsonl", "path": f"{folder}/shards", "sequence_length": 512}
        job = make_job(settings.data.model_copy(update=changes), encoder)

        def encode():
            for start in range(0, len(texts), 100):
                encoder.encode_batch(texts[start : start + 100])

        def whole():
            prepare(job, Path(folder, f"out{time.monotonic_ns()}"))

        times = interleave({"bare tokenizer": encode, "prepare": whole}, options.repeats)
    report(f"{size / 1e6:.1f} MB of text", times)
    return {
        "case": "prepare",
        "megabytes_per_s": round(size / float(np.median(times["prepare"])) / 1e6, 2),
        "of_bare_tokenizer": ratio(times, "bare tokenizer", "prepare"),
    }


def _train_tokenizer(texts: list[str], path: str) -> str:
    import tokenizers

    backend = tokenizers.ByteLevelBPETokenizer()
    backend.train_from_iterator(texts, vocab_size=8000, show_progress=False)
    backend.save(path)
    return path


def pytorch(options: argparse.Namespace) -> dict:
    """Compare the inner loop with PyTorch's; see side_by_side.py."""
    return side_by_side(options.shapes, options.batches, options.trainers, options.repeats)


CASES = {
    "statistics": statistics,
    "round": round_overhead,
    "trainers": trainers,
    "prepare": preparation,
    "pytorch": pytorch,
}


def main() -> None:
    """Run one benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--shapes", nargs="+", default=["small", "large"], help="of pytorch")
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 16], help="of pytorch")
    parser.add_argument("--trainers", nargs="+", type=int, default=[1, 4], help="of pytorch")
    options = parser.parse_args()
    print(machine())
    print(json.dumps(CASES[options.case](options)))


if __name__ == "__main__":
    main()
