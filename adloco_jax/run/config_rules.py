"""What the knobs of a config must satisfy together.

A rule is a predicate on the config as attributes (`c.inner.unit`), by the end of its message, which
says what to do. It is checked if each value that it reads is allowed by itself; the message begins
with those values.
"""

import math
from collections.abc import Callable
from itertools import pairwise

from adloco_jax.core.batching import BATCH_TESTS
from adloco_jax.data import DATA_SOURCES
from adloco_jax.loop import branching
from adloco_jax.models.architectures import ARCHITECTURES

RULES: dict[str, Callable[..., bool]] = {
    "without a checkpoint every head is random; set model.init_from or leave it off": (
        lambda c: c.model.init_from != "" or not c.model.reinit_head
    ),
    "trainers that start from a checkpoint share it; set ensemble.init=shared": (
        lambda c: c.ensemble.init == "shared" or c.model.init_from == ""
    ),
    "rows must not be longer than the model's context; lower the first or raise the second": (
        lambda c: c.data.sequence_length <= c.model.max_length
    ),
    "it classifies JSON lines of a text and a label; set data.source=jsonl": (
        lambda c: ARCHITECTURES[c.model.arch].data != "labelled" or c.data.source == "jsonl"
    ),
    "a text has a first and a last token of its own; set at least 3": (
        lambda c: ARCHITECTURES[c.model.arch].data != "labelled" or c.data.sequence_length >= 3
    ),
    "no field for the class; name it": (lambda c: c.data.label_column != ""),
    "bytes need 257 ids (256 and end of text); raise model.vocab_size": (
        lambda c: c.data.tokenizer != "bytes" or c.model.vocab_size >= 257
    ),
    "no tokenizer; name bytes, a tokenizer.json, a .model file, a folder, or a hub name": (
        lambda c: c.data.tokenizer != ""
    ),
    "this source needs a file, folder or glob (hf: or a hub name); set data.path": (
        lambda c: "path" not in DATA_SOURCES[c.data.source].needs or c.data.path != ""
    ),
    "this source reads no files; leave both paths empty or change data.source": (
        lambda c: (
            "path" in DATA_SOURCES[c.data.source].needs or c.data.path == c.data.heldout_path == ""
        )
    ),
    "name the field that holds a row's text; set data.text_column": (
        lambda c: "text_column" not in DATA_SOURCES[c.data.source].needs or c.data.text_column != ""
    ),
    "no part of the data set; name one, such as train": (lambda c: c.data.split != ""),
    "each trainer needs a worker; raise the first (the whole pool) or lower the second": (
        lambda c: c.ensemble.num_workers >= c.ensemble.num_trainers
    ),
    "the first is part of the pool, and each trainer needs a worker; change it": (
        lambda c: (
            c.ensemble.initial_workers is None
            or c.ensemble.num_trainers <= c.ensemble.initial_workers <= c.ensemble.num_workers
        )
    ),
    (
        "nothing would let the other workers join; choose a test that measures gradients and name"
        " 'workers' in batching.growth, set ensemble.spawn_frac, or leave initial_workers unset"
    ): (
        lambda c: (
            c.ensemble.initial_workers is None
            or c.ensemble.spawn_frac is not None
            or (
                BATCH_TESTS[c.batching.test].needs not in ("nothing", "branches")
                and "workers" in c.batching.growth
            )
        )
    ),
    "it says when the others join; set ensemble.initial_workers to how many begin": (
        lambda c: c.ensemble.spawn_frac is None or c.ensemble.initial_workers is not None
    ),
    "rounds grow in whole multiples of steps_per_round; change the first": (
        lambda c: (
            c.inner.max_steps_per_round is None
            or c.inner.max_steps_per_round % c.inner.steps_per_round == 0
        )
    ),
    "each at most once, and one at least; correct the order": (
        lambda c: 0 < len(c.batching.growth) == len(set(c.batching.growth))
    ),
    "the warm-up would outlast the run's updates; shorten it": (
        lambda c: c.inner.warmup_updates < c.num_rounds * c.inner.steps_per_round
    ),
    (
        "rounds that grow, or that accumulate within so many micro-batches, make a number of"
        " updates not known in advance; end the run, and its schedule, by num_tokens, or set"
        " inner.schedule=constant"
    ): (
        lambda c: (
            c.inner.schedule == "constant"
            or c.num_tokens
            or (
                (c.inner.max_steps_per_round, c.inner.round_length) == (None, "fixed")
                and (c.inner.unit == "updates" or c.switch.mode == "clip")
            )
        )
    ),
    "a constant rate does not fall; choose an inner.schedule or set inner.final_lr_frac=0.0": (
        lambda c: c.inner.schedule != "constant" or c.inner.final_lr_frac == 0
    ),
    "a ramp needs an end; set inner.max_steps_per_round": (
        lambda c: c.inner.round_length != "linear" or c.inner.max_steps_per_round is not None
    ),
    "it takes whole synchronisations at the ends of rounds; set outer.tx='nesterov'": (
        lambda c: (
            c.outer.tx != "nesterov_by_interval"
            or (c.outer.fragments, c.outer.delay_updates) == (1, 0)
        )
    ),
    "a fragment goes through outer.tx whoever it is from; set outer.skip_single=False": (
        lambda c: not c.outer.skip_single or (c.outer.fragments, c.outer.delay_updates) == (1, 0)
    ),
    "trainers that never merge never begin to decay; choose a merge.policy or schedule='linear'": (
        lambda c: (
            c.inner.schedule != "linear_after_merge"
            or c.merge.policy != "none"
            or c.ensemble.num_trainers == 1
        )
    ),
    "sgd decays no weights; set inner.weight_decay=0.0": (
        lambda c: c.inner.tx != "sgd" or c.inner.weight_decay == 0
    ),
    "neither sgd nor nesterov decays weights; set outer.weight_decay=0.0": (
        lambda c: (
            c.outer.tx not in ("sgd", "nesterov", "nesterov_by_interval")
            or c.outer.weight_decay == 0
        )
    ),
    "a round is cut into as many equal parts; choose a divisor of inner.steps_per_round": (
        lambda c: c.inner.steps_per_round % c.outer.fragments == 0
    ),
    (
        "a fragment must arrive before the next one's turn; lower the first below"
        " steps_per_round / fragments"
    ): (lambda c: c.outer.delay_updates * c.outer.fragments < c.inner.steps_per_round),
    (
        "adamw counts updates of all parameters at once, which a fragment's is not; set"
        " outer.tx='nesterov' or 'sgd', or outer.fragments=1"
    ): (lambda c: c.outer.tx != "adamw" or c.outer.fragments == 1),
    "only what arrives in fragments or late is mixed; set outer.mixing=0.0": (
        lambda c: c.outer.mixing == 0 or c.outer.fragments > 1 or c.outer.delay_updates > 0
    ),
    (
        "other rules than the mean take whole tensors, which fragments cut; set"
        " outer.aggregator='mean' or outer.fragments=1"
    ): (lambda c: c.outer.aggregator == "mean" or c.outer.fragments == 1),
    "a run starts without accumulation; lower the first or raise the second": (
        lambda c: c.batching.initial_batch_size <= (c.batching.max_batch_size or math.inf)
    ),
    "the first request is above the cap; lower the first or raise the second": (
        lambda c: c.batching.initial_batch_size <= c.batching.batch_cap
    ),
    "jvp measures inner products, which this test does not use; set batching.estimator='auto'": (
        lambda c: (
            c.batching.estimator != "jvp" or BATCH_TESTS[c.batching.test].needs == "inner_products"
        )
    ),
    "the largest bucket must be max_batch_size; add it, or remove what is above it": (
        lambda c: (
            not c.batching.buckets or c.batching.max_batch_size in (None, max(c.batching.buckets))
        )
    ),
    "no bucket is from the first batch to the cap; add one": (
        lambda c: (
            not c.batching.buckets
            or c.batching.max_batch_size is not None
            or any(
                c.batching.initial_batch_size <= size <= c.batching.batch_cap
                for size in c.batching.buckets
            )
        )
    ),
    "the two belong together; set test='ramp' and (round, batch) pairs, or neither": (
        lambda c: (c.batching.test == "ramp") == (c.batching.ramp != ())
    ),
    "a ramp begins with (0, initial_batch_size) and its rounds increase; correct the pairs": (
        lambda c: (
            c.batching.ramp[:1] in ((), ((0, c.batching.initial_batch_size),))
            and all(a[0] < b[0] for a, b in pairwise(c.batching.ramp))
        )
    ),
    "the two belong together; set test='replay' and the folder of a run, or neither": (
        lambda c: (c.batching.test == "replay") == (c.batching.replay != "")
    ),
    "the ramp's batches must be from 1 to the cap; change them or raise batching.batch_cap": (
        lambda c: all(1 <= size <= c.batching.batch_cap for _, size in c.batching.ramp)
    ),
    "a monotone batch does not fall; order the batches or set batching.monotone=False": (
        lambda c: not c.batching.monotone or all(a[1] <= b[1] for a, b in pairwise(c.batching.ramp))
    ),
    **branching.RULES,
}
