"""Does a model that DiLoCo has trained learn worse to answer, as arXiv 2511.13761 says?

    python -m studies.chat                  print the record's tables, and what is not made yet
    python -m studies.chat --run            make what is missing, first
    python -m studies.chat --run --sizes half --arms "DiLoCo: Muon" --seeds 51

The text is the prose of studies/track.py. The questions are the files chats/wordnet_train.jsonl and
chats/wordnet_heldout.jsonl of the folder ADLOCO_DATA_DIR: "What does the noun "trombone" mean?",
with its definition in WordNet 3.0. Each chat is one row of at most 128 bytes; longer ones are left
out.

Declared before any run on the seeds of `SEEDS`:

1. Each arm trains from random weights until the held-out loss of the prose is `TARGETS`. All arms
   report a running average over rounds. The model that is kept lies on the line between the last
   two averages, where the loss is the target's to 0.001: as if the last round counted less. So all
   arms start fine-tuning at one loss.
2. All are fine-tuned alike: `FINETUNING.updates` updates of 16 chats in the order of the seed, by
   AdamW at a constant rate, clipped at 1, the loss that of the answer's bytes and its end; once all
   weights, once an adapter of rank 8.
3. Compared: the loss of answers to held-out questions, before and after; answers that greedy
   decoding gives exactly; how far weights moved from their start, over the norm of the start; and
   the rank of the change: the share of a matrix's singular values that hold 0.9 of the change's
   square, the mean over the matrices of the layers.

`--rates` fine-tunes at other rates, on the first seed alone (studies/chat_rates.jsonl). This was
added when six lines of the record had been seen, so it is no part of what was declared.

The settings of the arms are those of older records (studies/methods.py; with AdamW those of
studies/average.jsonl, half the rate at 0.61 M parameters). Of three rates for all weights
the one with the lowest loss of held-out answers was chosen, on seed 0 with a model of data
parallelism with Muon at 1.80, after 200 updates (0.0003: 1.674; 0.001: 1.634; 0.003: 1.664); the
adapter has three times that rate, not tuned. The targets are such that data parallelism needs less
than a thousand steps. `p` is the exact p-value against data parallelism with the same optimizer;
with three seeds it cannot be below 0.1.
"""

import argparse
import functools
import itertools
import json
import os
import pickle
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import PyTree
from ml_collections import ConfigDict

from adloco_jax.config import validate
from adloco_jax.data import load_corpus
from adloco_jax.engine.inputs import Rows
from adloco_jax.loop.adloco import State
from adloco_jax.models.configured import build_model, build_network
from adloco_jax.models.layers import split_adapter, with_adapter
from adloco_jax.settings import AdapterSettings, Settings
from adloco_jax.training import fit
from studies import methods, results, tables, track
from studies.methods import Changes

RECORD = Path(__file__).with_name("chat.jsonl")
SEEDS = (51, 52, 53)
TARGETS = {"small": 1.90, "half": 1.60}  # nats per byte of held-out prose
# Added when lines of the record had been seen: does the rate of fine-tuning decide?
OF_RATES = Path(__file__).with_name("chat_rates.jsonl")
RATES, RATED = (5e-4, 2e-3, 4e-3), ("data parallel: Muon", "DiLoCo: Muon")
MOST = 6600  # sequential steps of an arm that never reaches the target
LENGTH = 128  # bytes of a row
HELDOUT_ROWS = 512
END = 256  # the tokenizer's id that ends a text
ADAPTER = AdapterSettings(rank=8, alpha=16)


class Finetuning(NamedTuple):
    """The settings of fine-tuning that all models share."""

    updates: int = 100
    chats: int = 16  # of an update
    rate: float = 1e-3
    adapter_rate: float = 3e-3


FINETUNING = Finetuning()


def arms(size: str) -> dict[str, Changes]:
    """Return the settings with which each arm trains on the prose."""
    adamw = 1.0 if size == "small" else 0.5  # of the rates with AdamW
    many = {"num_tokens": MOST * methods.WORKERS * methods.BATCH * LENGTH}
    alone = {**methods.ALONE, **many}
    parallel = {**alone, **methods.batch(methods.WORKERS * methods.BATCH)}
    shared = {**methods.steps(methods.STEPS), **many}
    return {
        "data parallel: Muon": {**parallel, **methods.rate(1e-2)},
        "DiLoCo: Muon": {**shared, **methods.STRONG},
        "one worker: Muon": {**alone, **methods.rate(4e-3)},
        "DiLoCo: AdamW": {
            **shared,
            **methods.MILD,
            **methods.rate(2e-3 * adamw),
            "outer.average": 0.7,
        },
        "data parallel: AdamW": {**parallel, **methods.rate(4e-3 * adamw), "inner.tx": "adamw"},
    }


def config_of(size: str, changes: Changes, seed: int) -> ConfigDict:
    """Return the config of an arm's run on the prose."""
    config = track.get_base(size)
    config.data.source, config.data.path = "jsonl", track.TEXTS["prose"]
    config.model.max_length = config.data.sequence_length = LENGTH
    config.eval.num_sequences = 16  # the study evaluates by itself
    config.update_from_flattened_dict({**changes, "seed": seed})
    return config


# -- Training until a loss -------------------------------------------------------------------


class Reached(Exception):
    """Ends a run whose loss has reached the target."""


class Trained(NamedTuple):
    """A model at the target's loss: its start, its weights, and what it took."""

    start: PyTree
    params: PyTree
    loss: float
    updates: float
    curve: list[tuple[int, float]]


def pretrain(
    settings: Settings, corpus: Rows, heldout: np.ndarray, target: float, folder: Path
) -> Trained | None:
    """Train until the held-out loss of the running average is the target; None if it never is.

    The weights lie on the line between the averages before and after, where the loss is the target.

    Args:
      settings: The run's settings.
      corpus: The rows to train on.
      heldout: Rows [N, L + 1], a multiple of 64.
      target: The loss wanted, nats per byte.
      folder: The run's folder.
    """
    init_fn, loss_fn = build_model(settings.model, layer_form="call")
    start = jax.jit(init_fn)(jax.random.key(settings.seed))
    batches = heldout.astype(np.int32).reshape(-1, 64, heldout.shape[1])
    loss_of = jax.jit(lambda params: jnp.mean(jax.lax.map(lambda b: loss_fn(params, b), batches)))
    length = settings.inner.steps_per_round
    averages, curve = [start], [(0, float(loss_of(start)))]

    def on_round(state: State, lines: list[dict]) -> None:
        average = jax.tree.map(lambda leaf_M: jnp.array(leaf_M[0]), state.ensemble.average_M)
        averages[:] = averages[-1], average
        curve.append((state.control.round * length, float(loss_of(average))))
        if curve[-1][1] <= target:
            raise Reached

    try:
        fit(
            settings,
            corpus=corpus,
            loss_fn=loss_fn,
            params=start,
            workdir=folder,
            on_round=on_round,
        )
        return None
    except Reached:
        params, loss = between(*averages, loss_of, target)
    (before, high), (after, low) = curve[-2:]
    updates = before + (high - target) / (high - low) * (after - before)
    return Trained(start, params, loss, updates, curve)


def between(
    high: PyTree, low: PyTree, loss_of: Callable[[PyTree], Array], target: float
) -> tuple[PyTree, float]:
    """Return the point between two models at which the loss is the target, by bisection.

    Args:
      high: The model whose loss is above the target.
      low: The one whose loss is not.
      loss_of: The loss of a model.
      target: The loss wanted.
    """
    near, far = 0.0, 1.0  # shares of `low`
    for _ in range(8):
        share = (near + far) / 2
        params = jax.tree.map(lambda a, b, share=share: a + share * (b - a), high, low)
        if loss_of(params) > target:
            near = share
        else:
            far = share
    params = jax.tree.map(lambda a, b: a + far * (b - a), high, low)
    return params, float(loss_of(params))


# -- The change of the weights ---------------------------------------------------------------


def change(start: PyTree, end: PyTree) -> dict[str, float]:
    """Return how far weights moved, over the norm of their start, and the rank of the change."""
    moved = jax.tree.map(lambda a, b: np.asarray(b) - np.asarray(a), start, end)
    ranks = [
        rank(matrix)
        for stack in jax.tree.leaves(moved["layers"])
        if stack.ndim == 3
        for matrix in stack
    ]
    norms = float(optax.global_norm(moved)), float(optax.global_norm(start))
    return {"distance": norms[0] / norms[1], "rank": statistics.fmean(ranks)}


def rank(matrix: np.ndarray) -> float:
    """Return the share of a matrix's singular values, largest first, with 0.9 of its square."""
    squares = np.linalg.svd(matrix, compute_uv=False) ** 2
    if not squares.any():
        return 0.0
    held = np.cumsum(squares) / squares.sum()
    return float((np.searchsorted(held, 0.9) + 1) / len(squares))


# -- Questions and answers -------------------------------------------------------------------


class Chats(NamedTuple):
    """Rows of a question, its answer and the end of text, and which targets count."""

    rows: np.ndarray  # int32 [N, LENGTH + 1]
    answers: np.ndarray  # float32 [N, LENGTH]: 1 for the bytes of the answer and its end
    questions: np.ndarray  # float32 [N, LENGTH]


def read_chats(path: Path) -> Chats:
    """Read chats of one question and one answer; those that are too long are left out."""
    rows, answers, questions = [], [], []
    for line in path.read_text(encoding="utf-8").splitlines():
        question, answer = (turn["content"].encode() for turn in json.loads(line)["messages"])
        row = [*question, ord("\n"), *answer, END]
        if len(row) > LENGTH + 1:
            continue
        at = np.arange(1, LENGTH + 1)  # the position of a target in its row
        rows.append(np.pad(row, (0, LENGTH + 1 - len(row)), constant_values=END))
        answers.append((at > len(question)) & (at < len(row)))
        questions.append(at <= len(question))
    return Chats(
        np.array(rows, np.int32), np.array(answers, np.float32), np.array(questions, np.float32)
    )


@functools.cache
def forward(network: nn.Module) -> Callable[[PyTree, Array], Array]:
    """Return the compiled function that computes a model's logits."""
    return jax.jit(lambda params, tokens: network.apply({"params": params}, tokens))


def judge(network: nn.Module, params: PyTree, chats: Chats) -> dict[str, float]:
    """Return the losses of answers and questions, nats per byte, and the exact greedy answers.

    Greedy decoding gives an answer exactly if each of its bytes is the most likely one after those
    before it.
    """
    sums = np.zeros(2)
    exact = 0
    for first in range(0, len(chats.rows), 64):
        rows, answers, questions = (part[first : first + 64] for part in chats)
        logits = forward(network)(params, rows[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:])
        sums += (losses * answers).sum(), (losses * questions).sum()
        is_right = np.asarray(logits.argmax(-1)) == rows[:, 1:]
        exact += int((is_right | (answers == 0)).all(axis=1).sum())
    return {
        "answers": float(sums[0] / chats.answers.sum()),
        "questions": float(sums[1] / chats.questions.sum()),
        "exact": exact,
        "of": len(chats.rows),
    }


@functools.cache
def tuner(network: nn.Module, rate: float, updates: int, is_adapter: bool) -> Callable[..., PyTree]:
    """Return the compiled function that fine-tunes: all weights, or the adapter beside them."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.0))

    def loss_fn(trained: PyTree, frozen: PyTree, rows: Array, answers: Array) -> Array:
        params = with_adapter(frozen, trained) if is_adapter else trained
        logits = network.apply({"params": params}, rows[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:])
        return (losses * answers).sum() / answers.sum()

    @jax.jit
    def run(trained: PyTree, frozen: PyTree, batches: tuple[Array, Array]) -> PyTree:
        def step(carry: tuple[PyTree, Any], batch: tuple[Array, Array]) -> tuple[Any, None]:
            trained, state = carry
            grads = jax.grad(loss_fn)(trained, frozen, *batch)
            updates, state = tx.update(grads, state, trained)
            return (optax.apply_updates(trained, updates), state), None

        return jax.lax.scan(step, (trained, tx.init(trained)), batches)[0][0]

    return run


def finetune(
    settings: Settings, params: PyTree, chats: Chats, *, is_adapter: bool, how: Finetuning
) -> tuple[nn.Module, PyTree]:
    """Fine-tune all weights, or an adapter; return the network and all its parameters then."""
    adapter = ADAPTER if is_adapter else AdapterSettings()
    network = build_network(settings.model, adapter, layer_form="call")
    order = np.random.default_rng(settings.seed).permutation(len(chats.rows))
    order = order[: how.updates * how.chats].reshape(how.updates, how.chats)
    batches = chats.rows[order], chats.answers[order]
    trained, frozen = params, {}
    if is_adapter:
        drawn = network.init(jax.random.key(settings.seed), jnp.zeros((1, 1), jnp.int32))["params"]
        trained, frozen = split_adapter(drawn)[0], params
    rate = how.adapter_rate if is_adapter else how.rate
    trained = tuner(network, rate, how.updates, is_adapter)(trained, frozen, batches)
    return network, with_adapter(frozen, trained) if is_adapter else trained


# -- The record ------------------------------------------------------------------------------


def model_of(size: str, arm: str, seed: int) -> tuple[Settings, Trained | None]:
    """Return an arm's settings and its model, which is kept in runs/ for other fine-tuning."""
    config = config_of(size, arms(size)[arm], seed)
    settings, folder = validate(config), Path("runs/chat")
    kept = Path("runs/chat-models") / f"{results.digest(config)}-{TARGETS[size]:g}.pickle"
    if kept.exists():
        return settings, pickle.loads(kept.read_bytes())
    shutil.rmtree(folder, ignore_errors=True)
    corpus = load_corpus(settings, note=lambda line: None)
    heldout = corpus.heldout_rows[:HELDOUT_ROWS]
    trained = pretrain(settings, corpus, heldout, TARGETS[size], folder)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(pickle.dumps(jax.device_get(trained)))
    return settings, trained


def questions() -> tuple[Chats, Chats]:
    """Return the chats to train on and those that are held out."""
    data = Path(os.environ["ADLOCO_DATA_DIR"]) / "chats"
    return read_chats(data / "wordnet_train.jsonl"), read_chats(data / "wordnet_heldout.jsonl")


def try_rate(size: str, arm: str, seed: int, rate: float) -> dict:
    """Fine-tune all weights at another rate; return the record's line."""
    settings, trained = model_of(size, arm, seed)
    line = {"size": size, "arm": arm, "seed": seed, "rate": rate, "reached": trained is not None}
    if trained is None:
        return line
    train, heldout = questions()
    how = FINETUNING._replace(rate=rate)
    after = finetune(settings, trained.params, train, is_adapter=False, how=how)
    return line | {"all": judge(*after, heldout)}


def run(size: str, arm: str, seed: int, how: Finetuning) -> dict:
    """Train, fine-tune and judge one model; return the record's line."""
    began_s = time.monotonic()
    settings, trained = model_of(size, arm, seed)
    digest = results.digest(config_of(size, arms(size)[arm], seed))
    line = {"size": size, "arm": arm, "seed": seed, "config": digest}
    line |= {"target": TARGETS[size], "finetuning": how._asdict(), "reached": trained is not None}
    if trained is not None:
        train, heldout = questions()
        network = build_network(settings.model, layer_form="call")
        line |= {"loss": trained.loss, "updates": trained.updates, "curve": trained.curve}
        line |= change(trained.start, trained.params) | {
            "before": judge(network, trained.params, heldout)
        }
        for name, is_adapter in (("all", False), ("adapter", True)):
            after = finetune(settings, trained.params, train, is_adapter=is_adapter, how=how)
            line[name] = judge(*after, heldout)
    line["wall_s"] = time.monotonic() - began_s
    return line


def append(record: Path, line: dict) -> None:
    """Append a line to a record, and say which."""
    with open(record, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(*list(line.values())[:4], flush=True)


def read(record: Path) -> list[dict]:
    """Read the lines of a record, if there is one."""
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


MEASURES: dict[str, tuple[str, Callable[[dict], float]]] = {
    "sequential steps": ("{:,.0f}", lambda line: line["updates"]),
    "distance": ("{:.2f}", lambda line: line["distance"]),
    "rank": ("{:.2f}", lambda line: line["rank"]),
    "answers before": ("{:.3f}", lambda line: line["before"]["answers"]),
    "after all weights": ("{:.4f}", lambda line: line["all"]["answers"]),
    "after an adapter": ("{:.4f}", lambda line: line["adapter"]["answers"]),
    "exact": ("{:.0f}", lambda line: line["all"]["exact"]),
}
TESTED = ("answers before", "after all weights", "after an adapter")  # have a p


def table(lines: list[dict]) -> str:
    """Return the table of one size: medians and ranges over seeds, and p against data parallel."""
    rows = [("method", "seeds", *MEASURES, *(f"p, {name}" for name in TESTED))]
    by_arm: dict[str, list[dict]] = {}
    for line in lines:
        by_arm.setdefault(line["arm"], []).append(line)
    for arm, all_of in by_arm.items():
        reached = [line for line in all_of if line["reached"]]
        cells = []
        for shown, measure in MEASURES.values() if reached else ():
            values = sorted(map(measure, reached))
            middle = statistics.median_low(values)
            cells.append(
                "{} ({} to {})".format(*map(shown.format, (middle, values[0], values[-1])))
            )
        baseline = by_arm.get(f"data parallel: {arm.partition(': ')[2]}", [])
        for name in TESTED if reached else ():
            measure = MEASURES[name][1]
            theirs = [measure(line) for line in baseline if line["reached"]]
            is_other = theirs and not arm.startswith("data parallel")
            p = tables.permutation_p([*map(measure, reached)], theirs) if is_other else None
            cells.append("-" if p is None else f"{p:.2f}")
        rows.append((arm, f"{len(reached)} of {len(all_of)}", *cells))
    return tables.markdown_table(rows)


def main() -> None:
    """Print the record's tables and its missing runs; with `--run`, make them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", action="store_true", help="make the runs that are missing, first")
    parser.add_argument("--rates", action="store_true", help="those at other rates of fine-tuning")
    parser.add_argument("--sizes", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--arms", nargs="+", choices=arms("small"), default=list(arms("small")))
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    given = parser.parse_args()
    if given.rates:
        show_rates(is_run=given.run)
        return
    for size, arm, seed in itertools.product(given.sizes, given.arms, given.seeds):
        made = {(line["size"], line["seed"], line["arm"]) for line in read(RECORD)}
        if (size, seed, arm) in made:
            continue
        if given.run:
            append(RECORD, run(size, arm, seed, FINETUNING))
        else:
            print(f"not made yet: {size}, {arm}, seed {seed}")
    for size in given.sizes:
        if lines := [line for line in read(RECORD) if line["size"] == size]:
            print(f"\n{size}, prose to {lines[0]['target']:g}\n\n{table(lines)}")


def show_rates(*, is_run: bool) -> None:
    """Print the losses of answers after fine-tuning at other rates; make the missing ones."""
    size, seed = "small", SEEDS[0]
    for arm, rate in itertools.product(RATED, RATES):
        lines = [line for line in read(OF_RATES) if (line["arm"], line["rate"]) == (arm, rate)]
        if lines:
            print(f"{arm}, rate {rate:g}: {lines[0]['all']['answers']:.4f}")
        elif is_run:
            append(OF_RATES, try_rate(size, arm, seed, rate))
        else:
            print(f"not made yet: {size}, {arm}, seed {seed}, rate {rate:g}")


if __name__ == "__main__":
    main()
