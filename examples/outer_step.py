"""A loop of your own that takes only the synchronisation of two workers.

Run it:  python examples/outer_step.py
"""

import jax
import jax.numpy as jnp
import optax

import adloco_jax as al

outer_tx = optax.sgd(0.7, momentum=0.9, nesterov=True)
params = {"w": jnp.zeros(8)}  # any tree of arrays
ensemble = al.init(
    params, num_trainers=1, num_workers=2, inner_tx=optax.identity(), outer_tx=outer_tx
)
for _ in range(5):
    # in place of these two lines: the parameters of two workers after a round of your own steps
    ends = [{"w": params["w"] + 0.1 * worker} for worker in (1, 2)]
    params_R = jax.tree.map(lambda *leaves: jnp.stack(leaves), *ends)
    workers = al.start_round(ensemble).replace(params_R=params_R)
    ensemble, norm_M = al.outer_update(ensemble, workers, outer_tx=outer_tx, precision="int4")
    params = jax.tree.map(lambda leaf_M: leaf_M[0], ensemble.params_M)
print(params, norm_M)
