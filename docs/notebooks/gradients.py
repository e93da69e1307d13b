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
# # How batch gradients scatter at a checkpoint
#
# How noisy are the gradients of a run, and how good are the estimates of its batch-size test? At a
# checkpoint of a small run we take $n$ training sequences as the whole population. Then their mean
# gradient $G$ and the noise $\operatorname{tr}\Sigma$ are exact, and the gradient $g_b$ of a random
# batch of $b$ distinct sequences deviates by
#
# $$\mathrm{E}|g_b - G|^2 = \frac{\operatorname{tr}\Sigma}{b}\left(1 - \frac bn\right)$$
#
# (Cochran 1977, Sampling Techniques, theorem 2.2). Less than a minute on two CPU cores. To look at
# a run of your own, set `workdir`.

# %%
repository = ""  # only for Colab: the address of this notebook's repository, "https://..."

import subprocess
import sys

if "google.colab" in sys.modules:  # Colab's own jax, with its GPU, stays
    assert repository, "set `repository` above to the address of this notebook's repository"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", f"git+{repository}"], check=True)

# %% tags=["parameters"]
workdir = None  # the folder of a finished run; None: train a small one
trainer = None  # id of a trainer in the ledger; None: the consensus model
num_sequences = 256
batch_sizes = (4, 16, 64)
num_draws = 200  # random batches of each size
rows_per_pass = 32  # that the device can hold

# %%
import functools

import jax
import numpy as np
from jax.flatten_util import ravel_pytree

import adloco_jax as al
from adloco_jax.models import hf
from adloco_jax.config import default_config
from adloco_jax.data.corpus import load_corpus
from adloco_jax.engine.spec import this_machine
from adloco_jax.models.llama import next_token_loss
from adloco_jax.run.kept.export import read_trained
from adloco_jax.study import chart, curves
from adloco_jax.study.chart import Curve

# %% [markdown]
# ## A run, and its last checkpoint but one
#
# The test of the last round used exactly the parameters of the checkpoint before it.

# %%
round_index = None  # the newest checkpoint
if workdir is None:
    config = default_config()
    config.num_rounds = 6
    config.checkpoint.every_rounds, config.checkpoint.keep = 1, 2
    config.inner.steps_per_round, config.inner.learning_rate = 40, 3e-3
    config.model.width, config.model.mlp_width, config.model.num_layers = 32, 64, 1
    config.data.sequence_length, config.data.num_sequences = 32, 8_000
    config.ensemble.num_trainers = config.ensemble.num_workers = 1
    config.batching.test = "norm"
    config.batching.initial_batch_size = config.batching.max_batch_size = 16
    config.batching.batch_cap, config.batching.buckets = 16, (16,)
    workdir, round_index = al.train(config).workdir, config.num_rounds - 1
trained = read_trained(workdir, this_machine(), round=round_index, trainer=trainer)
loss_fn = next_token_loss(hf.load(f"{workdir}/export").network)
corpus = load_corpus(trained.settings)
rng = np.random.default_rng(0)
rows_NL = corpus.rows[rng.choice(len(corpus.rows), num_sequences, replace=False)].astype(np.int32)

# %% [markdown]
# ## The full gradient, its noise and signal


# %%
@jax.jit
def gradient(params, rows_BL):
    return ravel_pytree(jax.grad(loss_fn)(params, rows_BL))[0]


passes = np.split(rows_NL, num_sequences // rows_per_pass)
mean_P = np.mean([gradient(trained.params, rows) for rows in passes], axis=0, dtype=np.float64)
measure = functools.partial(
    al.gradient_stats, loss_fn, chunk_size=rows_per_pass, inner_products=False
)
stats = jax.jit(measure)(trained.params, rows_NL)
noise, signal = float(stats.noise), float(stats.signal)
print(f"round {trained.round}: {mean_P.size:,} parameters, {num_sequences} sequences")
print(f"|G|^2 {np.sum(mean_P**2):.4g}, without the noise left in it (the signal) {signal:.4g}")
print(f"noise tr(Sigma) {noise:.4g}, noise scale {noise / signal:.4g} sequences")
np.testing.assert_allclose(np.sum(mean_P**2), signal + noise / num_sequences, rtol=1e-3)

# %% [markdown]
# ## Random batches
#
# Of each batch we keep the norm of its deviation and up to 10,000 coordinates. A coordinate is
# divided by its root mean square over the batches, or unequal variances would look heavy-tailed;
# then normal deviations have the excess kurtosis $-6/(S+2)$ for $S$ batches.

# %%
coordinates_C = rng.choice(mean_P.size, min(mean_P.size, 10_000), replace=False)
norms, scaled = {}, {}
for batch_size in batch_sizes:
    deviations = []
    for _ in range(num_draws):
        index_B = rng.choice(num_sequences, batch_size, replace=False)
        passes = index_B.reshape(-1, min(batch_size, rows_per_pass))
        grads = [gradient(trained.params, rows_NL[index]) for index in passes]
        deviation_P = np.mean(grads, axis=0) - mean_P
        deviations.append((np.linalg.norm(deviation_P), deviation_P[coordinates_C]))
    norms_S, values_SC = map(np.array, zip(*deviations, strict=True))
    root_C = np.sqrt(np.mean(values_SC**2, axis=0))
    norms[batch_size], scaled[batch_size] = norms_S, values_SC[:, root_C > 0] / root_C[root_C > 0]

# %%
print("   b   |g_b - G|, std     rms/law  excess kurtosis")
for b, norms_S in norms.items():
    squares_S = norms_S**2
    over_law = squares_S.mean() / (noise / b * (1 - b / num_sequences))
    kurtosis = np.mean(scaled[b] ** 4) - 3
    shown = f"{norms_S.mean():.4f}, {norms_S.std():.4f}  {np.sqrt(over_law):.3f}  {kurtosis:.2g}"
    print(f"{b:4}   {shown}")
    assert abs(over_law - 1) < 5 * squares_S.std() / squares_S.mean() / np.sqrt(num_draws)

# %% [markdown]
# Left: single coordinates beside the normal density of the same variance. Right: the norm over all
# coordinates beside the law, with and without its factor for a finite population.

# %%
edges = np.linspace(-6, 6, 61)
densities = []
for index, (b, values_SC) in enumerate(scaled.items()):
    density, _ = np.histogram(values_SC, edges, density=True)
    heights = np.where(density > 0, density, np.nan).repeat(2)
    densities.append(Curve(edges.repeat(2)[1:-1], heights, chart.look(index), f"b = {b}"))
lowest = min(np.nanmin(curve.y) for curve in densities) / 2
x = np.linspace(-6, 6, 401)
normal = np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
densities.append(Curve(x, np.where(normal > lowest, normal, np.nan), "c6 thin", "normal"))
across = chart.axis("deviation of a coordinate / its root mean square", edges)
up = chart.axis("density (per unit of the axis below)", [lowest, 1.0], base=10)
histograms = chart.chart(across, up, densities, title="Single coordinates", height=300)

b = np.geomspace(batch_sizes[0] / 1.6, min(batch_sizes[-1] * 1.6, num_sequences - 1), 200)
law = np.sqrt(noise / b)
lines = [
    Curve(b, law, "other d4", "√(tr Σ / b): independent"),
    Curve(b, law * np.sqrt(1 - b / num_sequences), "c6", f"without replacement of {num_sequences}"),
]
dots = [(size,) * 3 for size in batch_sizes]
spread = [(np.quantile(n, 0.1), n.mean(), np.quantile(n, 0.9)) for n in norms.values()]
roots = [(np.sqrt(np.mean(n**2)),) * 3 for n in norms.values()]
lines += chart.points(dots, spread, "c0", "mean, 10 % to 90 %")
lines += chart.points(dots, roots, "c1", "root mean square")
across = chart.axis("batch size b (sequences)", b, base=2)
up = chart.axis("|g_b - G| (nats/token)", [v for c in lines for v in c.y], base=10, margin=0.05)
title = "Norm of a batch gradient's deviation"
deviations = chart.chart(across, up, lines, title=title, height=300)
chart.document(
    [histograms, deviations], title="Batch gradients", columns=2, width=1200, right_px=190
)

# %% [markdown]
# ## Beside the run's own tests
#
# The tests of the checkpoint's round and of the next one, which a few sequences decide. In brackets
# their ratios to the values above.

# %%
print("round  trainer  noise           signal")
for event in curves.lines(curves.read_run(workdir).events, "round"):
    is_near = 0 <= event["round"] - trained.round <= 1
    if is_near and event["noise"] is not None and trainer in (None, event["trainer"]):
        ratios = event["noise"] / noise, event["signal"] / signal
        print(
            f"{event['round']:5}  {event['trainer']:7}  {event['noise']:.4g} ({ratios[0]:.2f})"
            f"  {event['signal']:.4g} ({ratios[1]:.2f})"
        )
