"""Methods of other papers, one file each, which add entries to the tables of functions in `core`.

Streaming DiLoCo is in no table: it changes the steps of a round (`outer.fragments`). The folder
`examples` has methods that a config file adds to the tables.
"""

from adloco_jax.contrib import muon as muon
from adloco_jax.contrib import streaming as streaming
from adloco_jax.core.batching import ROUND_LENGTHS as ROUND_LENGTHS
from adloco_jax.core.inner import INNER_OPTIMIZERS as INNER_OPTIMIZERS
from adloco_jax.core.outer import AGGREGATORS as AGGREGATORS
from adloco_jax.core.outer import OUTER_OPTIMIZERS as OUTER_OPTIMIZERS
