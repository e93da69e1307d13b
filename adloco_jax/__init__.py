"""AdLoCo in JAX: several trainers side by side, adaptive batches, few communications.

The names below are pure functions on arrays and know no model, config, clock or file; `train` runs
a whole experiment and is imported on first use. Source: "AdLoCo", arXiv 2508.18182.
"""

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
)
from adloco_jax.core.optimizers import INNER_OPTIMIZERS, OUTER_OPTIMIZERS
from adloco_jax.core.outer import inner_steps, outer_step, outer_update, start_round
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
    "start_round",
    "switch_mode",
    "take",
    "take_fragment",
    "train",
]


def __getattr__(name: str):
    if name in ("ARCHITECTURES", "Architecture"):
        from adloco_jax.models import architectures

        return getattr(architectures, name)
    if name == "State":
        from adloco_jax import adloco

        return adloco.State
    if name in ("DATA_SOURCES", "DataSource"):
        from adloco_jax import data

        return getattr(data, name)
    if name in ("train", "fit", "Result"):
        from adloco_jax import training

        return getattr(training, name)
    raise AttributeError(f"module 'adloco_jax' has no attribute {name!r}")
