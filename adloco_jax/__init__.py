"""AdLoCo in JAX: several trainers side by side, adaptive batches, few communications.

The names below are pure functions on arrays and know no model, config, clock or file; `train` runs
a whole experiment and is imported on first use. Source: "AdLoCo", arXiv 2508.18182.
"""

import importlib

from adloco_jax.core.aggregate import AGGREGATORS
from adloco_jax.core.batching import (
    BATCH_TESTS,
    BatchTest,
    augmented_inner_product_test,
    constant,
    inner_product_test,
    next_batch_size,
    norm_test,
    ramp,
    replay,
    switch_mode,
)
from adloco_jax.core.gradstats import gradient_stats, pool
from adloco_jax.core.merge import (
    MERGE_POLICIES,
    Candidate,
    allocate_workers,
    choose_merge,
    merge,
    reassign,
    spawn,
)
from adloco_jax.core.optimizers import INNER_OPTIMIZERS, OUTER_OPTIMIZERS
from adloco_jax.core.outer import inner_steps, outer_step, outer_update, start_round
from adloco_jax.core.round_lengths import ROUND_LENGTHS
from adloco_jax.core.streaming import (
    outer_update_fragment,
    put_fragment,
    receive_fragment,
    take_fragment,
)
from adloco_jax.core.types import BatchPlan, Ensemble, GradientStats, RoundMetrics, init, put, take

__version__ = "0.1.0"

__all__ = [
    "AGGREGATORS",
    "ARCHITECTURES",
    "Architecture",
    "BATCH_TESTS",
    "BatchTest",
    "Candidate",
    "DATA_SOURCES",
    "DataSource",
    "INNER_OPTIMIZERS",
    "MERGE_POLICIES",
    "OUTER_OPTIMIZERS",
    "ROUND_LENGTHS",
    "State",
    "fit",
    "BatchPlan",
    "Ensemble",
    "GradientStats",
    "Result",
    "RoundMetrics",
    "allocate_workers",
    "augmented_inner_product_test",
    "choose_merge",
    "constant",
    "gradient_stats",
    "init",
    "inner_product_test",
    "inner_steps",
    "merge",
    "next_batch_size",
    "norm_test",
    "outer_step",
    "outer_update",
    "outer_update_fragment",
    "pool",
    "put",
    "put_fragment",
    "ramp",
    "reassign",
    "receive_fragment",
    "replay",
    "spawn",
    "start_round",
    "switch_mode",
    "take",
    "take_fragment",
    "train",
]


_ON_FIRST_USE = {
    "ARCHITECTURES": "models.architectures",
    "Architecture": "models.architectures",
    "DATA_SOURCES": "data",
    "DataSource": "data",
    "State": "adloco",
    "Result": "training",
    "fit": "training",
    "train": "training",
}


def __getattr__(name: str):
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module 'adloco_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"adloco_jax.{_ON_FIRST_USE[name]}"), name)
