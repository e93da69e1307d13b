# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # AdLoCo around your own network
#
# The algorithm is a few pure functions on pytrees. Here they train a small classifier with its own
# loss function, without the package's models, configs and runner: four trainers with eight workers,
# batches that grow with the measured noise, and a merge. Data-parallel training on as many samples
# is the comparison. Less than a minute on two CPU cores.

# %%
repository = ""  # only for Colab: the address of this notebook's repository, "https://..."

import subprocess
import sys

if "google.colab" in sys.modules:  # Colab's own jax, with its GPU, stays
    assert repository, "set `repository` above to the address of this notebook's repository"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", f"git+{repository}"], check=True)

# %% tags=["parameters"]
num_rounds = 8
steps_per_round = 20

# %%
import functools
import tempfile
from pathlib import Path

import jax

jax.config.update("jax_num_cpu_devices", 2)  # before first use: a CPU poses as two devices

import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import adloco_jax as al
from adloco_jax.study import chart
from adloco_jax.study.chart import Curve

# %% [markdown]
# ## Your data, network and loss
#
# A *teacher*, two matrices with a `tanh` between them, gives the probabilities of ten classes for
# each input; labels are drawn from them. Their entropy is the lowest possible loss, which we can
# compute.
#
# The network is in Flax NNX; `nnx.split` returns its parameters as a pytree. A dict of arrays works
# as well. The only requirement: `loss_fn(params, batch)` returns the mean loss over the examples of
# `batch`, any pytree of arrays.

# %%
random = np.random.default_rng(0)
teacher_in = random.normal(size=(32, 24)) / np.sqrt(32)
teacher_out = 2 * random.normal(size=(24, 10)) / np.sqrt(24)


def draw(shape):
    """Inputs and labels of a shape, such as [updates, workers, batch]."""
    inputs = random.normal(size=(*shape, 32))
    logits = 3 * np.tanh(inputs @ teacher_in) @ teacher_out
    labels = np.argmax(logits + random.gumbel(size=logits.shape), axis=-1)
    return inputs.astype(np.float32), labels.astype(np.int32), logits


class Network(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(32, 128, rngs=rngs)
        self.second = nnx.Linear(128, 128, rngs=rngs)
        self.head = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.gelu(self.second(nnx.gelu(self.first(x)))))


graph, params = nnx.split(Network(nnx.Rngs(0)))


def loss_fn(params, batch):
    inputs, labels = batch
    logits = nnx.merge(graph, params)(inputs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


*heldout, teacher_logits = draw((4096,))
entropies = optax.softmax_cross_entropy(teacher_logits, jax.nn.softmax(teacher_logits))
floor = float(entropies.mean())
heldout_loss = jax.jit(lambda params: loss_fn(params, tuple(heldout)))
print(f"before training {heldout_loss(params):.3f}, the teacher's entropy {floor:.3f} nats")

# %% [markdown]
# ## A round, and the next batch
#
# `al.init` returns the *ensemble*, a pytree of all trainers' and workers' arrays, stacked.
# `al.outer_step` computes a round: `steps_per_round` updates on every worker, then one outer update
# of each trainer. It is pure, so apply `jit` once, with fixed optimizers. Within a call all
# workers' batches are equal; here trainers differ, so each has its own call: `al.take` returns an
# ensemble of one trainer, `al.put` puts it back.
#
# A batch-size test measures the gradients of single examples at the trainer's parameters, on the
# first examples of the round. One test is noisy, so `pool` combines the last five.

# %%
inner_tx = optax.adamw(1e-3)
outer_tx = optax.sgd(0.7, momentum=0.9, nesterov=True)
ensemble = al.init(params, num_trainers=4, num_workers=8, inner_tx=inner_tx, outer_tx=outer_tx)


@functools.partial(jax.jit, static_argnames="num_accum_steps")
def step(ensemble, batch, num_accum_steps):
    return al.outer_step(
        ensemble,
        batch,
        loss_fn,
        inner_tx=inner_tx,
        outer_tx=outer_tx,
        num_accum_steps=num_accum_steps,
    )


@jax.jit
def measure(params, batch):
    return al.gradient_stats(loss_fn, params, batch, inner_products=False)


def trainer_params(ensemble, m):
    return jax.tree.map(lambda leaf: leaf[m], ensemble.params_M)


def bucket(size):
    """Round a batch up to 8, 32 or 64, so that few shapes are compiled; added examples are real."""
    return 8 if size <= 8 else 32 if size <= 32 else 64


def one_round(ensemble, m, batch_size, tests):
    """Train trainer m for a round; return ensemble, next batch size, number of samples."""
    plan = al.switch_mode(bucket(batch_size), max_batch_size=32)
    sub = al.take(ensemble, [m])
    per_update = plan.micro_batch_size * plan.num_accum_steps
    *batch, _ = draw((steps_per_round, sub.num_workers, per_update))
    first = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[3:])[:64], tuple(batch))
    tests.append(jax.device_get(measure(trainer_params(ensemble, m), first)))
    stats = al.pool(jax.tree.map(lambda *fields: np.stack(fields), *tests[-5:]))
    requested = al.norm_test(stats, eta=0.8, num_workers=sub.num_workers)
    sub, _ = step(sub, tuple(batch), plan.num_accum_steps)
    batch_size = al.next_batch_size(
        float(requested), batch_size=batch_size, max_growth=2, batch_cap=64
    )
    return al.put(ensemble, [m], sub), batch_size, batch[1].size


# %% [markdown]
# ## The run
#
# After four rounds the trainers merge into one (`choose_merge`, `merge`), and the workers are
# divided again in proportion to the batch sizes of the trainers left (`allocate_workers`,
# `reassign`). After each round we measure the loss of a merge of all trainers. A round of a trainer
# with several workers is one synchronisation, and so is a merge.

# %%
batch_sizes = [8] * 4
tests = [[] for _ in batch_sizes]
samples = synchronisations = 0
adloco = [(0, 0, float(heldout_loss(params)))]
for round_index in range(num_rounds):
    for m in range(ensemble.num_trainers):
        ensemble, batch_sizes[m], used = one_round(ensemble, m, batch_sizes[m], tests[m])
        samples += used
    synchronisations += sum(size > 1 for size in ensemble.sizes)
    if (round_index + 1) % 4 == 0 and ensemble.num_trainers > 1:
        members = al.choose_merge(batch_sizes, policy="worst_with_worst", width=4)
        ensemble = al.merge(ensemble, members, weights=[batch_sizes[m] for m in members])
        synchronisations += 1
        for gone in sorted(members[1:], reverse=True):
            del batch_sizes[gone], tests[gone]
        counts = al.allocate_workers(batch_sizes, ensemble.num_workers)
        ensemble = al.reassign(ensemble, counts)
        print(f"round {round_index + 1}: {members} merge; batches {batch_sizes}, workers {counts}")
    everyone = range(ensemble.num_trainers)
    merged = al.merge(ensemble, everyone, weights=batch_sizes) if len(everyone) > 1 else ensemble
    adloco.append((samples, synchronisations, float(heldout_loss(trainer_params(merged, 0)))))
print(
    f"{samples:,} samples, {synchronisations} synchronisations, held out {adloco[-1][2]:.3f} nats"
)

# %% [markdown]
# ## The same samples, data-parallel
#
# Plain AdamW trains one model on as many samples at the same learning rate, 64 per update, each one
# synchronisation.


# %%
@jax.jit
def many_updates(params, state, batches):
    def update(carry, batch):
        params, state = carry
        updates, state = inner_tx.update(jax.grad(loss_fn)(params, batch), state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(update, (params, state), batches)[0]


state = inner_tx.init(params)
parallel_params = params
parallel = [(0, 0, float(heldout_loss(params)))]
while parallel[-1][0] < samples:
    *batches, _ = draw((100, 8 * 8))
    parallel_params, state = many_updates(parallel_params, state, tuple(batches))
    before = parallel[-1]
    loss = float(heldout_loss(parallel_params))
    parallel.append((before[0] + batches[1].size, before[1] + 100, loss))
print(
    f"{parallel[-1][0]:,} samples, {parallel[-1][1]} synchronisations, {parallel[-1][2]:.3f} nats"
)

# %%
by_samples, by_synchronisations = [], []
for history, color, name in (
    (adloco, "c0", "AdLoCo"),
    (parallel, "c1 d1", "data parallel"),
):
    num_samples, num_synchronisations, losses = np.array(history).T
    by_samples.append(Curve(num_samples, losses, color, name))
    by_synchronisations.append(Curve(num_synchronisations[1:], losses[1:], color, name))
panels = []
for label, base, curves in (
    ("samples", 0, by_samples),
    ("synchronisations (blocking, all trainers)", 10, by_synchronisations),
):
    across = [v for curve in curves for v in curve.x]
    lowest = Curve(
        [min(across), max(across)], [floor, floor], "c6 d2 thin", "the teacher's entropy"
    )
    up = chart.axis(
        "held-out loss (nats)", [v for c in (lowest, *curves) for v in c.y], margin=0.03
    )
    x = chart.axis(label, across, base=base)
    panels.append(chart.chart(x, up, [lowest, *curves], title=f"Loss over {label}", height=260))
chart.document(panels, title="AdLoCo and data parallel", columns=2, width=1120, right_px=170)

# %% [markdown]
# With equally many samples data parallel, which makes more updates from all eight workers'
# gradients, has the lower loss, one that AdLoCo has not reached. To the same loss AdLoCo needs
# fewer synchronisations by a factor of tens. Which is better depends on the links. One seed and an
# untuned learning rate show how the functions are called; they do not decide between the methods.
#
# ## Saving, and several devices
#
# The ensemble is one pytree, so Orbax can save it directly:

# %%
folder = Path(tempfile.mkdtemp()) / "ensemble"
with ocp.StandardCheckpointer() as saver:
    saver.save(folder, ensemble)
    saver.wait_until_finished()
    restored = saver.restore(folder, ensemble)
assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), ensemble, restored))

# %% [markdown]
# To run the workers on several devices, shard the worker axis over a mesh: axis 1 of the batch,
# axis 0 of the workers' optimizer states (`inner_state_R`). `jit` compiles the round for these
# devices.

# %%
mesh = Mesh(np.array(jax.devices()), ("worker",))


def place(tree, *axes):
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec(*axes)))


start = al.init(params, num_trainers=1, num_workers=8, inner_tx=inner_tx, outer_tx=outer_tx)
spread = place(start).replace(inner_state_R=place(start.inner_state_R, "worker"))
*batch, _ = draw((steps_per_round, 8, 64))
there, _ = step(spread, place(tuple(batch), None, "worker"), 2)
here, _ = step(start, tuple(batch), 2)
difference = jax.tree.map(
    lambda a, b: np.abs(a - np.asarray(b)).max(), here.params_M, there.params_M
)
print(f"{mesh.size} devices against one: largest difference {max(jax.tree.leaves(difference)):.1e}")
