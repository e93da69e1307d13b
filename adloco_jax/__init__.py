"""AdLoCo in JAX: train several model instances with adaptive batches and little communication.

Most public names are pure functions on arrays; `train` runs a whole experiment. A name is imported
at its first use, so commands without arrays do not wait for JAX. Source: "AdLoCo", arXiv
2508.18182.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the public names, for type checkers
    from adloco_jax.contrib import AGGREGATORS as AGGREGATORS
    from adloco_jax.contrib import INNER_OPTIMIZERS as INNER_OPTIMIZERS
    from adloco_jax.contrib import OUTER_OPTIMIZERS as OUTER_OPTIMIZERS
    from adloco_jax.contrib import ROUND_LENGTHS as ROUND_LENGTHS
    from adloco_jax.contrib.streaming import outer_update_fragment as outer_update_fragment
    from adloco_jax.contrib.streaming import put_fragment as put_fragment
    from adloco_jax.contrib.streaming import receive_fragment as receive_fragment
    from adloco_jax.contrib.streaming import take_fragment as take_fragment
    from adloco_jax.core.batching import BATCH_TESTS as BATCH_TESTS
    from adloco_jax.core.batching import BatchTest as BatchTest
    from adloco_jax.core.batching import (
        augmented_inner_product_test as augmented_inner_product_test,
    )
    from adloco_jax.core.batching import constant as constant
    from adloco_jax.core.batching import inner_product_test as inner_product_test
    from adloco_jax.core.batching import next_batch_size as next_batch_size
    from adloco_jax.core.batching import norm_test as norm_test
    from adloco_jax.core.batching import ramp as ramp
    from adloco_jax.core.batching import switch_mode as switch_mode
    from adloco_jax.core.gradstats import gradient_stats as gradient_stats
    from adloco_jax.core.gradstats import gradient_stats_of_means as gradient_stats_of_means
    from adloco_jax.core.gradstats import pool as pool
    from adloco_jax.core.merge import MERGE_POLICIES as MERGE_POLICIES
    from adloco_jax.core.merge import Candidate as Candidate
    from adloco_jax.core.merge import allocate_workers as allocate_workers
    from adloco_jax.core.merge import choose_merge as choose_merge
    from adloco_jax.core.merge import merge as merge
    from adloco_jax.core.merge import reassign as reassign
    from adloco_jax.core.merge import spawn as spawn
    from adloco_jax.core.outer import apply_differences as apply_differences
    from adloco_jax.core.outer import inner_steps as inner_steps
    from adloco_jax.core.outer import outer_step as outer_step
    from adloco_jax.core.outer import outer_update as outer_update
    from adloco_jax.core.outer import pack_differences as pack_differences
    from adloco_jax.core.outer import start_round as start_round
    from adloco_jax.core.types import BatchPlan as BatchPlan
    from adloco_jax.core.types import Ensemble as Ensemble
    from adloco_jax.core.types import GradientStats as GradientStats
    from adloco_jax.core.types import RoundMetrics as RoundMetrics
    from adloco_jax.core.types import init as init
    from adloco_jax.core.types import put as put
    from adloco_jax.core.types import take as take
    from adloco_jax.data import DATA_SOURCES as DATA_SOURCES
    from adloco_jax.data import ArrayRows as ArrayRows
    from adloco_jax.data import DataSource as DataSource
    from adloco_jax.elastic.transport import TRANSPORTS as TRANSPORTS
    from adloco_jax.elastic.transport import Transport as Transport
    from adloco_jax.elastic.transport import TransportEntry as TransportEntry
    from adloco_jax.loop.adloco import State as State
    from adloco_jax.models.architectures import ARCHITECTURES as ARCHITECTURES
    from adloco_jax.models.architectures import Architecture as Architecture
    from adloco_jax.run.watching.loggers import LOGGERS as LOGGERS
    from adloco_jax.training import Result as Result
    from adloco_jax.training import fit as fit
    from adloco_jax.training import join as join
    from adloco_jax.training import train as train

__version__ = "0.3.0"

# The modules of the public names. A test compares it with the imports above.
_HOMES = {
    "contrib": "AGGREGATORS INNER_OPTIMIZERS OUTER_OPTIMIZERS ROUND_LENGTHS",
    "contrib.streaming": "outer_update_fragment put_fragment receive_fragment take_fragment",
    "core.batching": "BATCH_TESTS BatchTest augmented_inner_product_test constant"
    " inner_product_test next_batch_size norm_test ramp switch_mode",
    "core.gradstats": "gradient_stats gradient_stats_of_means pool",
    "core.merge": "MERGE_POLICIES Candidate allocate_workers choose_merge merge reassign spawn",
    "core.outer": "apply_differences inner_steps outer_step outer_update pack_differences"
    " start_round",
    "core.types": "BatchPlan Ensemble GradientStats RoundMetrics init put take",
    "data": "DATA_SOURCES ArrayRows DataSource",
    "elastic.transport": "TRANSPORTS Transport TransportEntry",
    "loop.adloco": "State",
    "models.architectures": "ARCHITECTURES Architecture",
    "run.watching.loggers": "LOGGERS",
    "training": "Result fit join train",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    """Import a public name from its module at its first use."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'adloco_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"adloco_jax.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*(name for name in globals() if name.startswith("__")), *__all__]
