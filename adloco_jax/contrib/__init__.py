"""Methods of other papers, one file each, which add entries to the tables of functions in `core`.

Streaming DiLoCo is in no table, because it changes the steps of a round. The knob `outer.fragments`
enables it.

A file here is a template for a method of your own. Write a function with the signature of the
table's entries, add the function to the table under a name, and import your file in this module.
`adloco_jax.AGGREGATORS` and the other public tables are imported from this module, so they have the
entries of all files.
"""

from adloco_jax.contrib import linear as linear
from adloco_jax.contrib import muon as muon
from adloco_jax.contrib import nesterov_by_interval as nesterov_by_interval
from adloco_jax.contrib import qsr as qsr
from adloco_jax.contrib import radial as radial
from adloco_jax.contrib import streaming as streaming
from adloco_jax.core.batching import ROUND_LENGTHS as ROUND_LENGTHS
from adloco_jax.core.inner import INNER_OPTIMIZERS as INNER_OPTIMIZERS
from adloco_jax.core.outer import AGGREGATORS as AGGREGATORS
from adloco_jax.core.outer import OUTER_OPTIMIZERS as OUTER_OPTIMIZERS
