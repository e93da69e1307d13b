"""Rules of other papers, one file each: a rule and its entry in the table of `core`.

Streaming DiLoCo changes the form of a round, so it has no entry: `outer.fragments` chooses it.

Each file is a template for your own rule: write a function with the table's signature, give it a
name in the table, and import the file below. `adloco_jax.AGGREGATORS` and the other tables are
imported from here, so they have the entries of all files.
"""

from adloco_jax.contrib import (
    isotropic,
    linear,
    muon,
    nesterov_by_interval,
    qsr,
    radial,
    streaming,
)
from adloco_jax.core.batching import ROUND_LENGTHS
from adloco_jax.core.inner import INNER_OPTIMIZERS
from adloco_jax.core.outer import AGGREGATORS, OUTER_OPTIMIZERS

__all__ = [
    "AGGREGATORS",
    "INNER_OPTIMIZERS",
    "OUTER_OPTIMIZERS",
    "ROUND_LENGTHS",
    "isotropic",
    "linear",
    "muon",
    "nesterov_by_interval",
    "qsr",
    "radial",
    "streaming",
]
