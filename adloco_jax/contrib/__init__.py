"""Methods of other papers, one file each: a function, and its entry in a table of `core`.

Streaming DiLoCo has no entry, because it changes the steps of a round; `outer.fragments` enables
it.

Each file is a template for your own method: write a function with the table's signature, add it to
the table under a name, and import the file below. `adloco_jax.AGGREGATORS` and the other tables are
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
