"""Rules about combinations of knobs, the settings of a config.

`RULES` is a dict with one item for each rule. The value of an item is a pair: the names of the
knobs that the rule reads, and a function that says whether the values of these knobs may be
combined. If they may not, a message is shown. It begins with the values of the knobs, and ends with
the key of the item, which says what to do. A rule is checked only if the value of each of its knobs
is allowed on its own.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from adloco_jax.settings import KNOBS


def _entry(key: str, name: str) -> Any:
    return KNOBS[key].entries()[name]


def _needs(source: str) -> Any:
    """Return which keys of the config's group `data` a source needs, from `DATA_SOURCES`."""
    return _entry("data.source", source).needs


def _is_labelled(arch: str) -> bool:
    return _entry("model.arch", arch).data == "labelled"


RULES: dict[str, tuple[str, Callable[..., bool]]] = {
    "rows must not be longer than the model's context; lower the first or raise the second": (
        "data.sequence_length model.max_length",
        lambda length, longest: length <= longest,
    ),
    "the model classifies rows of a text and a label; set data.source=jsonl, parquet or hf": (
        "model.arch data.source",
        lambda arch, source: not _is_labelled(arch) or "text_column" in _needs(source),
    ),
    "a labelled row has a first and a last token of its own; set at least 3": (
        "model.arch data.sequence_length",
        lambda arch, length: not _is_labelled(arch) or length >= 3,
    ),
    "this source needs a file, folder or glob (hf: or a hub name); set data.path": (
        "data.source data.path",
        lambda source, path: "path" not in _needs(source) or path != "",
    ),
    "this source reads no files; set data.source=text, jsonl, parquet or hf, or no path": (
        "data.source data.path data.heldout_path",
        lambda source, path, heldout: "path" in _needs(source) or path == heldout == "",
    ),
    "each trainer needs a worker; raise the first (the whole pool) or lower the second": (
        "ensemble.num_workers ensemble.num_trainers",
        lambda workers, trainers: workers >= trainers,
    ),
    "the first is part of the pool, and each trainer needs a worker; change the first": (
        "ensemble.initial_workers ensemble.num_trainers ensemble.num_workers",
        lambda initial, trainers, pool: initial is None or trainers <= initial <= pool,
    ),
    "the others never join; set ensemble.spawn_frac, or a measuring test and growth of workers": (
        "ensemble.initial_workers ensemble.spawn_frac batching.test batching.growth",
        lambda initial, spawn_frac, test, growth: (
            initial is None
            or spawn_frac is not None
            or (_entry("batching.test", test).needs != "nothing" and "workers" in growth)
        ),
    ),
    "spawn_frac needs initial_workers; set ensemble.initial_workers": (
        "ensemble.spawn_frac ensemble.initial_workers",
        lambda spawn_frac, initial: spawn_frac is None or initial is not None,
    ),
    "rounds grow in whole multiples of steps_per_round; change the first": (
        "inner.max_steps_per_round inner.steps_per_round",
        lambda longest, steps: longest is None or longest % steps == 0,
    ),
    "each at most once, and one at least; correct the order": (
        "batching.growth",
        lambda growth: 0 < len(growth) == len(set(growth)),
    ),
    "the warm-up would outlast the run's updates; shorten it": (
        "inner.warmup_updates num_rounds inner.steps_per_round",
        lambda warmup, rounds, steps: warmup < rounds * steps,
    ),
    "rounds that grow have no planned number of updates; set num_tokens or schedule='constant'": (
        "inner.schedule num_tokens inner.max_steps_per_round inner.round_length",
        lambda schedule, tokens, longest, length: (
            schedule == "constant" or tokens or (longest, length) == (None, "fixed")
        ),
    ),
    "a constant rate does not fall; choose an inner.schedule or set inner.final_lr_frac=0.0": (
        "inner.schedule inner.final_lr_frac",
        lambda schedule, fraction: schedule != "constant" or fraction == 0,
    ),
    "linear rounds need an upper limit; set inner.max_steps_per_round": (
        "inner.round_length inner.max_steps_per_round",
        lambda length, longest: length != "linear" or longest is not None,
    ),
    "skip_single, learners, nesterov_by_interval need whole rounds; set one fragment, no delay": (
        "outer.fragments outer.delay_updates outer.tx outer.skip_single engine.kind",
        lambda fragments, delay, tx, skips, kind: (
            (fragments, delay) == (1, 0)
            or (tx != "nesterov_by_interval" and not skips and kind == "local")
        ),
    ),
    "sgd decays no weights; set inner.weight_decay=0.0": (
        "inner.tx inner.weight_decay",
        lambda tx, decay: tx != "sgd" or decay == 0,
    ),
    "a round is cut into as many equal parts; choose a divisor of inner.steps_per_round": (
        "outer.fragments inner.steps_per_round",
        lambda fragments, steps: steps % fragments == 0,
    ),
    "a fragment must arrive before the next leaves; keep delay * fragments below the steps": (
        "outer.delay_updates outer.fragments inner.steps_per_round",
        lambda delay, fragments, steps: delay * fragments < steps,
    ),
    "adamw and rules for whole tensors need whole parameters; set outer.fragments=1": (
        "outer.fragments outer.tx outer.aggregator",
        lambda fragments, tx, rule: fragments == 1 or (tx != "adamw" and rule == "mean"),
    ),
    "mixing needs fragments or a delay; set outer.mixing=0.0": (
        "outer.mixing outer.fragments outer.delay_updates",
        lambda mixing, fragments, delay: mixing == 0 or fragments > 1 or delay > 0,
    ),
    "a quorum is of learners that there are; lower the first or raise the second": (
        "engine.quorum engine.max_learners",
        lambda quorum, learners: quorum is None or learners is None or quorum <= learners,
    ),
    "a run starts without accumulation and below the cap; lower the first or raise the others": (
        "batching.initial_batch_size batching.max_batch_size batching.batch_cap",
        lambda first, largest, cap: first <= min(largest or math.inf, cap),
    ),
    "the largest bucket must be max_batch_size; add it, or remove what is above it": (
        "batching.buckets batching.max_batch_size",
        lambda buckets, largest: not buckets or largest in (None, max(buckets)),
    ),
    "no bucket is from the first batch to the cap; add one": (
        "batching.buckets batching.max_batch_size batching.initial_batch_size batching.batch_cap",
        lambda buckets, largest, first, cap: (
            not buckets or largest is not None or any(first <= size <= cap for size in buckets)
        ),
    ),
    "the two belong together; set test='ramp' and (round, batch) pairs, or neither": (
        "batching.test batching.ramp",
        lambda test, ramp: (test == "ramp") == (ramp != ()),
    ),
    "a ramp starts at (0, first batch); its rounds increase, its batches never fall, to the cap": (
        "batching.ramp batching.initial_batch_size batching.batch_cap",
        lambda ramp, first, cap: (
            ramp[:1] in ((), ((0, first),))
            and all(size <= cap for _, size in ramp)
            and all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(ramp))
        ),
    ),
}
