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
# # Batch size from noise, in your own loop
#
# Two training loops that do not use this package's runner measure their gradient noise with a few
# of its functions, and choose batch size and accumulation from it. The first, in `flax.nnx` and
# optax, is data parallel over eight devices and uses the mean gradients that it computes anyway.
# The second, in plain JAX on one device, measures the gradients of single examples. Less than a
# minute on two CPU cores.

# %%
repository = ""  # only for Colab: the address of this notebook's repository, "https://..."

import subprocess
import sys

if "google.colab" in sys.modules:  # Colab's own jax, with its GPU, stays
    assert repository, "set `repository` above to the address of this notebook's repository"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", f"git+{repository}"], check=True)

# %% tags=["parameters"]
num_steps = 150
test_every = 10

# %%
import functools

import jax

jax.config.update("jax_num_cpu_devices", 8)  # before first use: a CPU poses as eight devices

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import adloco_jax as al

# %% [markdown]
# ## A model, a loss and data
#
# A small network learns a noisy function. `loss_fn(params, batch)` is the mean loss over a batch.

# %%
teacher = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)


def examples(step, *shape):
    """Fresh examples for a step: inputs, and noisy outputs of the teacher."""
    rng = np.random.default_rng([1, step])
    x = rng.normal(size=(*shape, 16)).astype(np.float32)
    return x, np.tanh(x @ teacher) + rng.normal(size=(*shape, 4)).astype(np.float32)


class Network(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(16, 32, rngs=rngs)
        self.out = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.tanh(self.hidden(x)))


graph, start = nnx.split(Network(nnx.Rngs(0)), nnx.Param)
tx = optax.adam(3e-3)


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean(jnp.square(nnx.merge(graph, params)(x) - y))


# %% [markdown]
# ## `flax.nnx`, data parallel: statistics at no extra cost
#
# Each device computes the mean gradient of its share of each micro-batch. `gradient_stats_of_means`
# needs only the norms of these means, one more number to send per micro-batch, and the gradient
# averaged over all of them: nothing is computed twice.
#
# From statistics averaged over steps `norm_test` requests the examples per device of an update,
# `next_batch_size` rounds and limits the request, and `switch_mode` divides it into micro-batches
# that a device can hold.

# %%
mesh = jax.make_mesh((jax.device_count(),), ("device",), axis_types=(AxisType.Auto,))
per_device = NamedSharding(mesh, PartitionSpec(None, "device"))
max_batch_size = 8  # that a device can hold


@jax.jit
def step_of(params, opt_state, batch_ANB):
    """One update from [A, N, B] examples: A micro-batches, N devices, B examples each."""

    def micro_batch(total, batch_NB):
        grads_N = jax.vmap(jax.grad(loss_fn), in_axes=(None, 0))(params, batch_NB)
        total = jax.tree.map(lambda leaf, leaf_N: leaf + leaf_N.mean(axis=0), total, grads_N)
        return total, jax.vmap(optax.global_norm)(grads_N)

    zeros = jax.tree.map(jnp.zeros_like, params)
    total, norms_AN = jax.lax.scan(micro_batch, zeros, batch_ANB)
    num_accum, _, size = batch_ANB[0].shape[:3]
    mean = jax.tree.map(lambda leaf: leaf / num_accum, total)
    stats = al.gradient_stats_of_means(mean, norms_AN.reshape(-1), batch_size=size)
    updates, opt_state = tx.update(mean, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, stats.in_units_of(1.0)


params, opt_state, batch_size, smoothed = start, tx.init(start), 1, None
history = []
for step in range(num_steps):
    size, num_accum = al.switch_mode(batch_size, max_batch_size=max_batch_size)
    batch = jax.device_put(examples(step, num_accum, mesh.size, size), per_device)
    params, opt_state, stats = step_of(params, opt_state, batch)
    if smoothed is None:
        smoothed = stats
    smoothed = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, smoothed, stats)
    if (step + 1) % test_every == 0:
        request = al.norm_test(smoothed, eta=1.0, num_workers=mesh.size)
        history.append((step + 1, size, num_accum, float(request)))
        batch_size = al.next_batch_size(
            float(request), batch_size=batch_size, max_growth=2, batch_cap=32
        )
for row in history:
    print(
        "step {:4}: {} examples x {} accumulated per device, the test asks for {:.1f}".format(*row)
    )

# %% [markdown]
# Is the noise estimated from mean gradients right? At the final parameters the mean of eight
# estimates must agree with the noise of single examples, within the estimates' spread.

# %%
held_out = examples(num_steps, 1, mesh.size, 32)
flat = jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), held_out)
exact = jax.jit(functools.partial(al.gradient_stats, loss_fn, inner_products=False))(params, flat)
estimates = [
    step_of(params, opt_state, jax.device_put(examples(num_steps + i, 4, mesh.size, 4), per_device))
    for i in range(8)
]
noise = np.array([stats.noise for _, _, stats in estimates])
print(
    f"noise of single examples {exact.noise:.3f}; of means {noise.mean():.3f} +- {noise.std():.3f}"
)
assert abs(noise.mean() - exact.noise) < 4 * noise.std() / np.sqrt(8) + 0.1 * exact.noise
assert history[-1][1] * history[-1][2] > 1, "the noise has asked for a larger batch"

# %% [markdown]
# ## Plain JAX, one device: exact statistics
#
# `gradient_stats` computes the gradients of single examples for any loss function, by `vmap` on a
# few at a time: here of 32 examples after every `test_every` steps.

# %%
measure = jax.jit(
    functools.partial(al.gradient_stats, loss_fn, chunk_size=16, inner_products=False)
)


@jax.jit
def update(params, opt_state, batch_AB):
    def micro_batch(total, batch_B):
        return jax.tree.map(jnp.add, total, jax.grad(loss_fn)(params, batch_B)), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    total, _ = jax.lax.scan(micro_batch, zeros, batch_AB)
    mean = jax.tree.map(lambda leaf: leaf / len(batch_AB[0]), total)
    updates, opt_state = tx.update(mean, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


params, opt_state, batch_size, smoothed = start, tx.init(start), 2, None
for step in range(num_steps):
    size, num_accum = al.switch_mode(batch_size, max_batch_size=max_batch_size)
    params, opt_state = update(params, opt_state, examples(step, num_accum, size))
    if (step + 1) % test_every == 0:
        stats = measure(params, examples(num_steps + step, 32)).in_units_of(1.0)
        smoothed = smoothed or stats
        smoothed = jax.tree.map(lambda old, new: 0.7 * old + 0.3 * new, smoothed, stats)
        batch_size = al.next_batch_size(
            float(al.norm_test(smoothed, eta=1.0)),
            batch_size=batch_size,
            max_growth=2,
            batch_cap=64,
        )
        print(f"step {step + 1:4}: {size} examples x {num_accum}; next {batch_size}")
assert batch_size > 2

# %% [markdown]
# ## How good the estimates are
#
# - **Bias**: noise and signal are unbiased (McCandlish et al. 2018, appendix A), their ratio is
#   not; smoothing reduces its bias. `in_units_of(1.0)` brings statistics to one scale first.
# - **Spread**: N mean gradients (or examples, for `gradient_stats`) give the noise a relative
#   standard error of sqrt(2 / ((N - 1) d)), with the effective number d of dimensions of the noise.
# - **One mean gradient** shows no noise: `norm_test` returns NaN, `next_batch_size` keeps the
#   batch. Begin with two micro-batches of one example.
# - **One pass** is enough for `norm_test` with `inner_products=False`. With `estimator="taps"` it
#   is a plain backward pass, if the loss has a keyword `tap_B` through which layers return
#   per-example norms, as those of this package do.
