"""Benchmarks of what AdLoCo adds to plain training; each ends with one line of JSON.

    python scripts/benchmark.py statistics | round | compile | trainers | prepare | rows
                                | program | pytorch [--repeats N]
                                [--shapes S ...] [--batches B ...] [--trainers M ...]

Alternatives are timed in turn within one process, after their compilation and a first call, and
each call is waited for; figures are medians with quartiles, ratios are of medians.
docs/BENCHMARKS.md keeps the figures with machine and date.
"""

import argparse
import contextlib
import dataclasses
import functools
import gzip
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from program_cost import Cost, program_cost
from side_by_side import SHAPES, side_by_side
from timing import interleave

import adloco_jax
from adloco_jax.core.outer import inner_steps, start_round
from adloco_jax.data import Corpus, load_corpus, packing
from adloco_jax.data.prepare import Request, prepare, tokenising_pool, worker_tokenizer
from adloco_jax.data.sources import stdlib_documents
from adloco_jax.models.llama import Llama, next_token_loss
from adloco_jax.run.build import (
    build_model,
    build_network,
    inner_transform,
    worker_parallelism,
)
from adloco_jax.run.config import Settings, default_config, validate
from adloco_jax.run.ledger import read
from adloco_jax.run.programs import needed_bytes
from adloco_jax.run.throughput import flops_per_token
from adloco_jax.training import fit

MODEL = SHAPES["small"].model | {"max_length": SHAPES["small"].sequence_length}
BATCHES = (4, 8, 32)


def statistics(repeats: int) -> dict:
    """Per-example statistics against the plain gradient of the same batch."""
    model = Llama(**MODEL, scan_layers=False)  # as runs do on a CPU
    loss_fn = next_token_loss(model)
    params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    result: dict = {"case": "statistics", "model": MODEL}
    ways = {
        "plain": lambda p, t: jax.value_and_grad(loss_fn)(p, t),
        "taps": functools.partial(_stats, loss_fn, estimator="taps", inner_products=False),
        "vmap": functools.partial(_stats, loss_fn, estimator="vmap", inner_products=False),
        "chunks": functools.partial(
            _stats, loss_fn, estimator="chunks", chunk_size=2, inner_products=False
        ),
        "jvp": functools.partial(_stats, loss_fn, estimator="jvp", inner_products=True),
        "taps_and_jvp": functools.partial(_stats, loss_fn, estimator="taps", inner_products=True),
    }
    for batch in BATCHES:
        rows = jax.random.randint(jax.random.key(batch), (batch, 129), 0, 257)
        compiled = {name: jax.jit(way).lower(params, rows).compile() for name, way in ways.items()}
        times = interleave(
            {n: functools.partial(c, params, rows) for n, c in compiled.items()}, repeats
        )
        plain = needed_bytes(compiled["plain"])
        for name in list(ways)[1:]:
            ratio = np.median(times[name]) / np.median(times["plain"])
            result.setdefault(f"{name}_over_plain", {})[str(batch)] = round(float(ratio), 3)
            extra = (needed_bytes(compiled[name]) - plain) / 2**20
            result.setdefault(f"{name}_extra_mib", {})[str(batch)] = round(extra, 1)
        report(f"b = {batch}", times)
    return result


def round_overhead(repeats: int) -> dict:
    """A whole round of the runner, test and host work included, against its bare inner steps."""
    blocks, rounds = 4, -(-repeats // 4)
    settings = _settings(batch=8, rounds=rounds + 2, steps=50)
    init_fn, loss_fn = build_model(settings)
    rows, inner_tx = _rows(settings), inner_transform(settings)
    ensemble = adloco_jax.init(
        init_fn(jax.random.key(0)),
        num_trainers=1,
        num_workers=1,
        inner_tx=inner_tx,
        outer_tx=inner_tx,
    )
    tokens = jnp.asarray(rows.batch(0, 0, 0, 50 * 8).reshape(50, 1, 8, -1))
    rates = jnp.full((50, 1), settings.inner.learning_rate)
    bare = jax.jit(
        lambda workers, tokens: inner_steps(
            workers,
            tokens,
            loss_fn,
            inner_tx=inner_tx,
            learning_rate_TR=rates,
            worker_parallelism=worker_parallelism(settings),
        ),
        donate_argnums=0,
    )
    workers, *_ = bare(start_round(ensemble), tokens)
    times: dict[str, list[float]] = {"round": [], "bare inner steps": []}
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", f"{folder}/programs")
        for block in range(blocks):
            workdir = f"{folder}/{block}"
            with contextlib.redirect_stdout(io.StringIO()):
                fit(settings, corpus=rows, init_fn=init_fn, loss_fn=loss_fn, workdir=workdir)
            lines = [e for e in read(f"{workdir}/ledger.jsonl") if e["event"] == "round"]
            # Not the first, which waits for compilation, nor the last, which prepares nothing.
            times["round"] += [line["step_s"] for line in lines[1:-1]]
            for _ in range(rounds):
                start_s = time.perf_counter()
                workers, *_ = jax.block_until_ready(bare(workers, tokens))
                times["bare inner steps"].append(time.perf_counter() - start_s)
    report("S = 50, batch 8", times)
    ratio = float(np.median(times["round"]) / np.median(times["bare inner steps"]))
    return {"case": "round", "steps": 50, "batch": 8, "round_over_bare": round(ratio, 3)}


def compilation(repeats: int) -> dict:
    """Compilation, cold and warm, of a run that grows from 1 to 64 and into accumulation."""
    del repeats  # one run each: compilation is what is timed
    result: dict = {"case": "compile"}
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"XDG_CACHE_HOME": f"{folder}/cache"}
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        for name in ("cold", "warm"):
            command = [sys.executable, "-m", "adloco_jax.main", "--config", "quickstart"]
            command += ["--workdir", f"{folder}/{name}", *GROWING_RUN]
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
            events = read(f"{folder}/{name}/ledger.jsonl")
            compiles = [e for e in events if e["event"] == "compile"]
            rounds = {e["round"]: e for e in events if e["event"] == "round"}.values()
            seconds = sum(e["seconds"] for e in compiles)
            stalled = sum(e["stall_s"] for e in rounds)
            after_first = seconds - sum(
                e["seconds"] for e in compiles if e["where"] == "foreground"
            )
            result[name] = {
                "programs": len(compiles),
                "hits": sum(e["cache"] == "hit" for e in compiles),
                "compile_s": round(seconds, 2),
                "background_s": round(after_first, 2),
                "stall_s": round(stalled, 2),
                "hidden": round(1 - stalled / seconds, 3),
                "wall_s": events[-1]["wall_s"],
                "batches": sorted({e["micro_batch_size"] for e in events if e["event"] == "round"}),
                "most_accum": max(e["num_accum_steps"] for e in events if e["event"] == "round"),
            }
            print(name, result[name])
    return result


# The quickstart's model; rounds of 2000 updates, so that there is something to hide behind.
GROWING_RUN = [
    "--config.num_rounds=8",
    "--config.ensemble.num_trainers=1",
    "--config.ensemble.num_workers=1",
    "--config.merge.policy=none",
    "--config.inner.steps_per_round=2000",
    "--config.batching.eta=0.05",
    "--config.batching.initial_batch_size=1",
    "--config.batching.max_batch_size=64",
    "--config.batching.buckets=(1, 2, 4, 8, 16, 32, 64)",
    "--config.batching.batch_cap=128",
    "--config.switch.mode=accumulate",
    "--config.eval.every_rounds=8",
]


def trainers(repeats: int) -> dict:
    """The inner steps of 1, 2, 4 and 8 trainers, each with its own worker, at equal work in all.

    Workers in turn, as a CPU's default is, and all at once. Memory is the compiler's, over as many
    times that of one trainer.
    """
    settings = _settings(batch=8, rounds=1, steps=4, model=MODEL)
    init_fn, loss_fn = build_model(settings)
    inner_tx = inner_transform(settings)
    rows = _rows(settings)
    runs, needed = {}, {}
    for count in (1, 2, 4, 8):
        ensemble = adloco_jax.init(
            init_fn(jax.random.key(0)),
            num_trainers=count,
            num_workers=count,
            inner_tx=inner_tx,
            outer_tx=inner_tx,
        )
        steps = 16 // count
        tokens = rows.batch(0, 0, 0, steps * count * 8).reshape(steps, count, 8, -1)
        rates = jnp.full((steps, count), settings.inner.learning_rate)
        for how, parallelism in (("in turn", 1), ("at once", None)):
            step = jax.jit(
                functools.partial(
                    inner_steps,
                    loss_fn=loss_fn,
                    inner_tx=inner_tx,
                    learning_rate_TR=rates,
                    worker_parallelism=parallelism,
                ),
                donate_argnums=0,
            )
            workers = jax.jit(start_round)(ensemble)
            program = step.lower(workers, jnp.asarray(tokens)).compile()
            runs[f"{count} {how}"] = _keeping(program, workers, jnp.asarray(tokens))
            needed[f"{count} {how}"] = needed_bytes(program)
    times = interleave(runs, repeats)
    report("16 updates of batch 8 in all", times)
    one = np.median(times["1 in turn"])
    return {
        "case": "trainers",
        "time_over_one": {n: round(float(np.median(t) / one), 3) for n, t in times.items()},
        "memory_over_as_many": {
            n: round(size / int(n.split()[0]) / needed["1 in turn"], 3)
            for n, size in needed.items()
        },
        "mib_of_one": round(needed["1 in turn"] / 2**20),
    }


def _keeping(program: Callable, workers: PyTree, tokens: jax.Array) -> Callable:
    """Calls a program again and again on what it gave."""
    state = [workers]

    def call():
        state[0], *_ = program(state[0], tokens)
        return state[0]

    return call


def program(repeats: int) -> dict:
    """MicroLlama's inner update as compiled here, and the share of a GPU's rate that it leaves.

    One update of each of four trainers, 8 sequences of 1,024 tokens each. Compiled for this machine
    in float32. A fused attention moves no scores, whose bytes grow with the square of the length:
    what is left without them follows from a second program, of twice as many half as long rows. In
    bfloat16 about half of it moves.
    """
    del repeats  # nothing is run
    whole, halved = _microllama_cost(8, 1024), _microllama_cost(16, 512)
    fused_bytes = 2 * halved.num_bytes - whole.num_bytes
    model_flops = _MICROLLAMA_TOKENS * flops_per_token(_microllama(1024)[0])
    compute_s = whole.flops / GPU_FLOPS_PER_S

    def share(num_bytes):
        return round(model_flops / GPU_FLOPS_PER_S / (compute_s + num_bytes / GPU_BYTES_PER_S), 3)

    return {
        "case": "program",
        "teraflops": round(whole.flops / 1e12, 2),
        "over_6_per_weight": round(whole.flops / model_flops, 3),
        "gigabytes": round(whole.num_bytes / 1e9),
        "gigabytes_without_scores": round(fused_bytes / 1e9),
        "compute_s": round(compute_s, 4),
        "share_of_peak_if_nothing_overlaps": {
            "float32, scores in memory": share(whole.num_bytes),
            "float32, fused attention": share(fused_bytes),
            "bfloat16, fused attention": share(fused_bytes / 2),
        },
    }


def _microllama(length: int) -> tuple[PyTree, Callable, Callable]:
    """Shapes of its parameters, its inner steps, and a function that makes four trainers."""
    config = default_config()
    config.model.update(MICROLLAMA | {"max_length": length})
    config.data.sequence_length = length
    config.batching.max_batch_size = 1
    settings = validate(config)
    network = build_network(settings).clone(scan_layers=True)  # as on a GPU
    loss_fn = next_token_loss(network, sequences_per_chunk=settings.model.loss_chunk)
    inner_tx = inner_transform(settings)
    step = functools.partial(inner_steps, loss_fn=loss_fn, inner_tx=inner_tx, worker_parallelism=1)
    make = functools.partial(
        adloco_jax.init, num_trainers=4, num_workers=4, inner_tx=inner_tx, outer_tx=inner_tx
    )
    return jax.eval_shape(build_model(settings)[0], jax.random.key(0)), step, make


def _microllama_cost(batch: int, length: int) -> Cost:
    params, step, make = _microllama(length)
    workers = jax.eval_shape(lambda params: start_round(make(params)), params)
    tokens = jax.ShapeDtypeStruct((1, 4, batch, length + 1), jnp.int32)
    return program_cost(jax.jit(step, donate_argnums=0).lower(workers, tokens).compile().as_text())


_MICROLLAMA_TOKENS = 4 * 8 * 1024
MICROLLAMA = SHAPES["microllama"].model | {"dtype": "float32", "loss_chunk": 0}
# NVIDIA H200 SXM, data sheet: dense bfloat16, and the bandwidth of its memory.
GPU_FLOPS_PER_S, GPU_BYTES_PER_S = 989e12, 4.8e12


def preparation(repeats: int) -> dict:
    """Text to a prepared folder, against the bare tokenizer on as many processes, from memory.

    The text is the standard library's, thrice and each time under another first line, as gzipped
    JSON lines in shards; the tokenizer a byte-level BPE trained on a part of it. Either time has
    the start of its processes in it.
    """
    processes = os.cpu_count() or 1
    texts = [f"# {copy}\n{text}" for copy in range(3) for text in stdlib_documents()]
    result: dict = {"case": "prepare", "processes": processes}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = _train_tokenizer(texts[::60], f"{folder}/tokenizer.json")
        size = sum(len(text.encode()) for text in texts)
        os.mkdir(f"{folder}/shards")
        for number in range(8):
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[number::8])
            Path(f"{folder}/shards/{number}.json.gz").write_bytes(gzip.compress(lines.encode(), 6))
        request = Request("jsonl", f"{folder}/shards", tokenizer=tokenizer, sequence_length=512)
        blocks = list(packing.chunks(texts))
        times: dict[str, list[float]] = {"bare tokenizer": [], "prepare": []}
        for repeat in range(repeats + 1):
            start_s = time.perf_counter()
            with tokenising_pool(tokenizer, processes) as pool:
                list(pool.map(_encode_bare, blocks))
            middle_s = time.perf_counter()
            prepare(request, f"{folder}/out{repeat}", processes=processes)
            end_s = time.perf_counter()
            if repeat:
                times["bare tokenizer"].append(middle_s - start_s)
                times["prepare"].append(end_s - middle_s)
    report(f"{size / 1e6:.1f} MB of text", times)
    bare, whole = (np.median(seconds) for seconds in times.values())
    result |= {"megabytes_per_s": round(size / whole / 1e6, 2)}
    return result | {"of_bare_tokenizer": round(float(bare / whole), 3)}


def row_reading(repeats: int) -> dict:
    """Rows of 512 tokens from a prepared folder's memory map, in the order of training."""
    num_rows, result = 100_000, {"case": "rows"}
    with tempfile.TemporaryDirectory() as folder:
        text = "all work and no play " * 98  # 2058 bytes, of which a number takes the place of some
        count = num_rows * 513 // 2059 + 2000
        lines = (json.dumps({"text": f"{n:06}{text[6:]}"}) + "\n" for n in range(count))
        Path(f"{folder}/text.jsonl").write_text("".join(lines))
        request = Request("jsonl", f"{folder}/text.jsonl", sequence_length=512, heldout_frac=0.01)
        prepare(request, f"{folder}/out")
        config = default_config()
        config.data.update(source="tokens", path=f"{folder}/out", sequence_length=512)
        config.data.num_sequences = num_rows
        config.ensemble.update(num_trainers=1, num_workers=1)
        corpus = load_corpus(validate(config))
        calls = {
            f"batch {size}": functools.partial(_read_rows, corpus, size, num_rows)
            for size in (64, 1024, 8192)
        }
        times = interleave(calls, repeats)
        report(f"{num_rows} rows", times)
        for name, seconds in times.items():
            result[name] = round(num_rows / float(np.median(seconds)))
    return result


def report(title: str, times: dict[str, list[float]]) -> None:
    """A line per alternative: median and quartiles in milliseconds."""
    print(title)
    for name, seconds in times.items():
        low, median, high = 1e3 * np.quantile(seconds, (0.25, 0.5, 0.75))
        print(
            f"  {name:20} {median:10.2f} ms   quartiles {low:.2f} to {high:.2f}, n = {len(seconds)}"
        )


def machine() -> str:
    """What the figures were taken on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(": ")[2] if names else cpu
    kinds = sorted({device.device_kind for device in jax.devices()})
    return (
        f"{os.cpu_count()} x {cpu}; devices {len(jax.devices())} x {', '.join(kinds)};"
        f" Python {platform.python_version()}, jax {jax.__version__}, {time.strftime('%Y-%m-%d')}"
    )


def _train_tokenizer(texts: list[str], path: str) -> str:
    import tokenizers

    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=8000, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    backend.save(path)
    return path


def _encode_bare(texts: list[str]) -> int:
    return sum(len(ids) for ids in worker_tokenizer().encode_batch(texts))


def _read_rows(corpus: Corpus, batch: int, num_rows: int) -> None:
    for start in range(0, num_rows, batch):
        corpus.batch(0, 0, start, batch)


@dataclasses.dataclass(frozen=True)
class _Random:
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


def _rows(settings: Settings) -> _Random:
    return _Random(settings.data.sequence_length)


SMALL = MODEL | {"width": 128, "mlp_width": 352, "num_layers": 2}


def _settings(*, batch: int, rounds: int, steps: int, model: dict = SMALL) -> Settings:
    config = default_config()
    config.num_rounds = rounds
    config.model.update(model)
    config.data.sequence_length = 128
    config.ensemble.num_trainers = config.ensemble.num_workers = 1
    config.inner.steps_per_round = steps
    config.batching.initial_batch_size = config.batching.max_batch_size = batch
    config.batching.batch_cap = batch
    config.batching.buckets = (batch,)
    config.eval.every_rounds = rounds
    return validate(config)


def _stats(loss_fn, params, rows, **how):
    return adloco_jax.gradient_stats(loss_fn, params, rows, **how)


CASES = {
    "statistics": statistics,
    "round": round_overhead,
    "compile": compilation,
    "trainers": trainers,
    "program": program,
    "prepare": preparation,
    "rows": row_reading,
}


def main() -> None:
    """Runs one case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=[*CASES, "pytorch"])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--shapes", nargs="+", default=["small", "large"], help="of pytorch")
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 16], help="of pytorch")
    parser.add_argument("--trainers", nargs="+", type=int, default=[1, 4], help="of pytorch")
    options = parser.parse_args()
    print(machine())
    if options.case == "pytorch":
        result = side_by_side(options.shapes, options.batches, options.trainers, options.repeats)
    else:
        result = CASES[options.case](options.repeats)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
