"""AdLoCo in JAX: train several model instances with adaptive batches and little communication.

Most of the names below are pure functions on arrays, without models, configs, clocks or files.
`train` runs a whole experiment. Each name is imported on first use, so a command that needs no
arrays does not wait for JAX. Source: "AdLoCo", arXiv 2508.18182.
"""

import ast
import functools
import importlib
import inspect
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adloco_jax.contrib import (
        AGGREGATORS,
        INNER_OPTIMIZERS,
        OUTER_OPTIMIZERS,
        ROUND_LENGTHS,
    )
    from adloco_jax.contrib.streaming import (
        outer_update_fragment,
        put_fragment,
        receive_fragment,
        take_fragment,
    )
    from adloco_jax.core.batching import (
        BATCH_TESTS,
        BatchTest,
        augmented_inner_product_test,
        constant,
        inner_product_test,
        next_batch_size,
        norm_test,
        ramp,
        switch_mode,
    )
    from adloco_jax.core.gradstats import gradient_stats, gradient_stats_of_means, pool
    from adloco_jax.core.merge import (
        MERGE_POLICIES,
        Candidate,
        allocate_workers,
        choose_merge,
        merge,
        reassign,
        spawn,
    )
    from adloco_jax.core.outer import (
        apply_differences,
        inner_steps,
        outer_step,
        outer_update,
        pack_differences,
        start_round,
    )
    from adloco_jax.core.types import (
        BatchPlan,
        Ensemble,
        GradientStats,
        RoundMetrics,
        init,
        put,
        take,
    )
    from adloco_jax.data import DATA_SOURCES, ArrayRows, DataSource
    from adloco_jax.loop.adloco import State
    from adloco_jax.models.architectures import ARCHITECTURES, Architecture
    from adloco_jax.training import Result, fit, train

__version__ = "0.2.0"

__all__ = [
    "AGGREGATORS",
    "ARCHITECTURES",
    "Architecture",
    "ArrayRows",
    "BATCH_TESTS",
    "BatchPlan",
    "BatchTest",
    "Candidate",
    "DATA_SOURCES",
    "DataSource",
    "Ensemble",
    "GradientStats",
    "INNER_OPTIMIZERS",
    "MERGE_POLICIES",
    "OUTER_OPTIMIZERS",
    "ROUND_LENGTHS",
    "Result",
    "RoundMetrics",
    "State",
    "allocate_workers",
    "apply_differences",
    "augmented_inner_product_test",
    "choose_merge",
    "constant",
    "fit",
    "gradient_stats",
    "gradient_stats_of_means",
    "init",
    "inner_product_test",
    "inner_steps",
    "merge",
    "next_batch_size",
    "norm_test",
    "outer_step",
    "outer_update",
    "outer_update_fragment",
    "pack_differences",
    "pool",
    "put",
    "put_fragment",
    "ramp",
    "reassign",
    "receive_fragment",
    "spawn",
    "start_round",
    "switch_mode",
    "take",
    "take_fragment",
    "train",
]


@functools.cache
def _homes() -> dict[str, str]:
    """For each name in `__all__` the module that defines it, from the imports above."""
    source = ast.parse(inspect.getsource(sys.modules[__name__]))
    (block,) = (node for node in source.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {name.name: str(node.module) for node in imports for name in node.names}


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module 'adloco_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_homes()[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
