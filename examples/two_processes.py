"""A loop of your own in two processes, one worker in each.

Run it twice:  python examples/two_processes.py 0, and with 1. On two machines: the first's address.

Nothing is sent during twenty steps, one all-reduce after them.
"""

import sys

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import adloco_jax as al

steps = np.random.default_rng(0).integers(1, 4, 33 * 4000)
tokens = steps.cumsum() % 16  # each is 1 to 3 above the last one, modulo 16
rows = tokens.reshape(-1, 33).astype(np.int32)  # the last token of a row is a target only
jax.distributed.initialize("127.0.0.1:9911", num_processes=2, process_id=int(sys.argv[1]))
rng = np.random.default_rng([1, jax.process_index()])  # each worker draws its own rows


def draw(*shape):
    """Return random rows, [*shape, tokens]."""
    return rows[rng.integers(0, 3900, shape)]  # the last 100 rows are held out


def init_fn(key):
    """Return a bigram model: logits of the next token, for each token."""
    return {"next": {"logits": 0.1 * jax.random.normal(key, (16, 16))}}


def loss_fn(params, rows_BL):
    """Return the mean loss of B rows of L tokens."""
    logits_BLV = params["next"]["logits"][rows_BL[:, :-1]]
    log_p_BLV = jax.nn.log_softmax(logits_BLV)
    return -jax.numpy.take_along_axis(log_p_BLV, rows_BL[:, 1:, None], axis=-1).mean()


tx = optax.adamw(0.05)
params = init_fn(jax.random.key(0))
how = {"inner_tx": tx, "outer_tx": optax.sgd(0.7, momentum=0.9, nesterov=True)}
ensemble = al.init(params, num_trainers=1, num_workers=2, **how)
mesh = jax.make_mesh((2,), ("worker",), axis_types=(jax.sharding.AxisType.Auto,))
everywhere, by_worker, by_worker_SR = (
    NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("worker",), (None, "worker"))
)
inner_state_R = jax.device_put(ensemble.inner_state_R, by_worker)
ensemble = jax.device_put(ensemble, everywhere).replace(inner_state_R=inner_state_R)
size = 4


@jax.jit
def step(ensemble, rows_SRBL):
    """Run a round: twenty steps of each worker, then the outer step."""
    return al.outer_step(ensemble, rows_SRBL, loss_fn, **how)


for _ in range(5):  # rounds of 20 steps
    rows_SRBL = jax.make_array_from_process_local_data(by_worker_SR, draw(20, 1, size))
    ensemble, metrics = step(ensemble, rows_SRBL)
params = jax.tree.map(lambda leaf_M: leaf_M.addressable_data(0)[0], ensemble.params_M)
print("held-out loss", loss_fn(params, rows[3900:]), "batch", size)
