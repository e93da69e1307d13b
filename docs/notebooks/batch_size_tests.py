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
# # What the batch-size tests measure
#
# A *batch-size test* computes the next batch from the gradients of a few single examples. On a
# problem with answers in closed form we see which estimates are unbiased, how much they scatter,
# and why the plug-in estimate of the paper's mode stops batches from growing. Less than a minute on
# two CPU cores.
#
# Sources: Byrd et al. 2012 (norm test, eq. 3.9); Bollapragada et al. 2017 (inner-product tests, eq.
# 2.6 and 3.3); McCandlish et al. 2018 (arXiv 1812.06162: noise scale and its unbiased estimates);
# AdLoCo (arXiv 2508.18182, eq. 10, 12, 13).

# %%
repository = ""  # only for Colab: the address of this notebook's repository, "https://..."

import subprocess
import sys

if "google.colab" in sys.modules:  # Colab's own jax, with its GPU, stays
    assert repository, "set `repository` above to the address of this notebook's repository"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", f"git+{repository}"], check=True)

# %% tags=["parameters"]
num_repeats = 400  # independent test batches behind every point

# %%
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

import adloco_jax as al
from adloco_jax.study import chart
from adloco_jax.study.chart import Curve

BLUE, RED, GREEN, VIOLET, BLACK = "c0", "c1", "c2", "c4", "c6"  # classes of the charts

# %% [markdown]
# ## A problem with known noise and signal
#
# The loss of an example $z$ is $\frac12|x-z|^2$ with $z\sim N(0,\Sigma)$. Its gradient $g = x-z$
# has the mean $G = x$ and the covariance $\Sigma$, with eigenvalues $k^{-3/4}$ in 500 dimensions.
# $G$ is larger where the noise is larger ($G_k^2\propto\Sigma_{kk}$). Known are
#
# $$\operatorname{tr}\Sigma\ \text{(the noise)},\qquad |G|^2\ \text{(the signal)},\qquad
# B_\text{simple} = \operatorname{tr}\Sigma/|G|^2,\qquad V = G^\top\Sigma G.$$
#
# At a batch of $B_\text{simple}$ examples (McCandlish et al.) the noise of the mean gradient equals
# the signal. It grows during training, as $G$ shrinks. The effective dimension
# $(\operatorname{tr}\Sigma)^2/\operatorname{tr}\Sigma^2$ counts the directions of the noise; a
# network's is far higher.

# %%
eigenvalues = np.arange(1, 501) ** -0.75
noise = eigenvalues.sum()  # tr Sigma
noise_square = np.sum(eigenvalues**2)  # tr Sigma^2
direction = np.sqrt(eigenvalues / noise)
scales = jnp.asarray(np.sqrt(eigenvalues), jnp.float32)


def loss_fn(x, z_B):
    return jnp.mean(0.5 * jnp.sum((x - z_B) ** 2, axis=-1))


def point(noise_scale):
    """The point at which B_simple has this value, and |G|^2 and V there."""
    signal = noise / noise_scale
    x = np.sqrt(signal) * direction
    return jnp.asarray(x, jnp.float32), signal, x @ (eigenvalues * x)


@functools.partial(jax.jit, static_argnames=("num_repeats", "inner_products"))
def repeated_stats(key, x, *, batch_size, num_repeats, inner_products=False):
    """Statistics of independent test batches: fields of shape [num_repeats].

    The number of examples that count is data, so that one program serves every test batch.
    """

    def once(key):
        z_B = jax.random.normal(key, (128, 500)) * scales
        return al.gradient_stats(
            loss_fn, x, z_B, num_examples=batch_size, inner_products=inner_products
        )

    return jax.lax.map(once, jax.random.split(key, num_repeats), batch_size=50)


effective_dimension = noise**2 / noise_square
print(f"noise {noise:.2f}, effective dimension {effective_dimension:.0f}")

# %% [markdown]
# ## (a) Bias
#
# From $b$ per-example gradients with mean $\bar g$,
#
# $$\hat S = \frac{\sum_j |g_j|^2 - b|\bar g|^2}{b-1},\qquad
# \hat G_2 = \frac{b^2|\bar g|^2 - \sum_j |g_j|^2}{b(b-1)}$$
#
# estimate noise and signal without bias. The *plug-in* estimate $|\bar g|^2$ of the signal counts
# the noise left in the mean gradient as signal: its expected value is
# $|G|^2 + \operatorname{tr}\Sigma/b$, twice the signal at $b = B_\text{simple}$. The chart has
# $B_\text{simple} = 32$.

# %%
batch_sizes = np.array([4, 8, 16, 32, 64, 128])
x, signal, _ = point(32)
stats = [
    repeated_stats(jax.random.key(i), x, batch_size=int(b), num_repeats=num_repeats)
    for i, b in enumerate(batch_sizes)
]
noises = np.array([s.noise for s in stats]) / noise  # [batch size, repeat]
signals = np.array([s.signal for s in stats]) / signal
plugins = signals + np.array([s.noise for s in stats]) / batch_sizes[:, None] / signal  # |mean|^2


def mean_with_error(batch_sizes, values, color, label):
    """The mean over repeats, and its 95 % interval."""
    mean, error = values.mean(axis=1), 1.96 * values.std(axis=1) / np.sqrt(values.shape[1])
    across = [(b, b, b) for b in batch_sizes]
    return chart.points(across, zip(mean - error, mean, mean + error, strict=True), color, label)


def panel(title, x_label, y_label, curves, *, x_base=10, y_base=10):
    """A chart around its curves."""
    x = chart.axis(x_label, [v for c in curves for v in c.x], base=x_base)
    y = chart.axis(y_label, [v for c in curves for v in c.y], base=y_base, margin=0.05)
    return chart.chart(x, y, curves, title=title, height=280, label_px=20)


def shown(title, *panels):
    """The panels beside one another."""
    how = {"columns": len(panels), "width": 560 * len(panels), "right_px": 190}
    return chart.document(panels, title=title, **how)


TEST_BATCH = "test batch (examples)"
curves = [
    Curve(batch_sizes, np.ones(len(batch_sizes)), BLACK),
    Curve(batch_sizes, 1 + 32 / batch_sizes, f"{RED} thin"),
    *mean_with_error(batch_sizes, plugins, RED, "plug-in: |mean g|² / |G|²"),
    *mean_with_error(batch_sizes, signals, BLUE, "Ĝ₂ / |G|²"),
    *mean_with_error(batch_sizes, noises, GREEN, "Ŝ / tr Σ"),
]
title = "Mean estimates over the truth; line: 1 + B_simple / b"
shown(title, panel(title, TEST_BATCH, "mean estimate / truth", curves, x_base=2, y_base=2))

# %% [markdown]
# ## (b) Spread
#
# For Gaussian gradients these variances are exact (the second for any, as $\hat G_2$ is a
# U-statistic):
#
# $$\operatorname{Var}\hat S = \frac{2\operatorname{tr}\Sigma^2}{b-1},\qquad
# \operatorname{Var}\hat G_2 = \frac{4V}{b} + \frac{2\operatorname{tr}\Sigma^2}{b(b-1)}$$
#
# A few examples suffice for the noise. The signal takes more, the larger $B_\text{simple}$ is; from
# small test batches $\hat G_2$ is often negative. `pool` adds the sums of several tests: the
# estimate stays unbiased and its spread falls with the square root of their number. So a run
# averages over rounds.

# %%
pooled = [jax.vmap(al.pool)(jax.tree.map(lambda f: f.reshape(-1, 10), s)) for s in stats]
pooled_signals = np.array([s.signal for s in pooled]) / signal
v = point(32)[2]
theory_noise = np.sqrt(2 * noise_square / (batch_sizes - 1)) / noise
theory_signal = (
    np.sqrt(4 * v / batch_sizes + 2 * noise_square / (batch_sizes * (batch_sizes - 1))) / signal
)

negative = ", ".join(
    f"{b}: {np.mean(g < 0):.0%}" for b, g in zip(batch_sizes, signals, strict=True)
)
print(f"tests whose signal estimate is negative, by test batch: {negative}")
curves = []
for values, theory, color, label in (
    (signals, theory_signal, BLUE, "Ĝ₂, one test"),
    (pooled_signals, theory_signal / np.sqrt(10), VIOLET, "Ĝ₂, ten tests pooled"),
    (noises, theory_noise, GREEN, "Ŝ, one test"),
):
    dots = [(std, std, std) for std in values.std(axis=1)]
    curves += chart.points([(b, b, b) for b in batch_sizes], dots, color, label)
    curves.append(Curve(batch_sizes, theory, color))
title = "Standard deviation over the truth; lines: theory"
shown(title, panel(title, TEST_BATCH, "standard deviation / truth", curves, x_base=2))

# %% [markdown]
# ## (c) The batch that is requested, and why the paper's mode stalls
#
# The norm test (Byrd et al., eq. 3.9) requires that the noise of the mean gradient,
# $\operatorname{tr}\Sigma/b$, is at most $\eta^2|G|^2$:
#
# $$b \ge T = \frac{\operatorname{tr}\Sigma}{\eta^2|G|^2} = \frac{B_\text{simple}}{\eta^2}.$$
#
# The paper's mode puts the plug-in $|\bar g|^2$ of the present batch $b$ into the denominator. By
# expected values the request is then
#
# $$T_\text{paper} = \frac{\operatorname{tr}\Sigma}{\eta^2(|G|^2 + \operatorname{tr}\Sigma/b)}
# \le \frac{b}{\eta^2},$$
#
# for every signal. It exceeds $b$ only while $b < B_\text{simple}(1/\eta^2 - 1)$. At $\eta = 0.8$
# this limit is $0.56\,B_\text{simple}$, where the true signal requests $1.56\,B_\text{simple}$: a
# batch of 8 does not grow while $B_\text{simple}$ stays below 14.2. With $\eta \ge 1$ no batch
# grows, except by chance. (If workers' gradients are averaged, $b$ is the sum of their batches.)
#
# The curves are the library's `norm_test` of the true noise and signal.

# %%
eta = 0.8


def true_stats(noise_scale):
    """The statistics that `gradient_stats` would measure on an infinite test batch."""
    zero, one = np.zeros(()), np.ones(())
    return al.GradientStats(
        scale=one,
        num_examples=one,
        noise_sum=np.float64(noise),
        noise_weight=one,
        signal_sum=np.float64(noise / noise_scale),
        signal_weight=one,
        ip_sum=zero,
        ip_weight=zero,
        plugin_ip_sum=zero,
        plugin_orth_sum=zero,
    )


def settles(noise_scale, batch_size, mode):
    """The batch at which repeated tests at a fixed point stop growing."""
    for _ in range(100):
        wanted = al.norm_test(true_stats(noise_scale), eta=eta, mode=mode, batch_size=batch_size)
        before = batch_size
        batch_size = al.next_batch_size(wanted, batch_size=before, max_growth=4, batch_cap=100_000)
        if batch_size == before:
            break
    return batch_size


noise_scales = np.geomspace(2, 900, 60)  # at 1,000 the floor under the signal would show
requests = []
for batch_size, dashes in ((8, "d2"), (32, "d1"), (128, "d3")):
    wanted = [
        al.norm_test(true_stats(n), eta=eta, mode="paper", batch_size=batch_size)
        for n in noise_scales
    ]
    requests.append(Curve(noise_scales, wanted, f"{RED} {dashes}", f"paper, batch {batch_size}"))
wanted = [al.norm_test(true_stats(n), eta=eta) for n in noise_scales]
requests.append(Curve(noise_scales, wanted, BLUE, "unbiased"))
stops = [
    Curve(noise_scales, [settles(n, 8, mode) for n in noise_scales], color, f"{mode}, from 8")
    for mode, color in (("unbiased", BLUE), ("paper", RED))
]
stops.append(Curve(noise_scales[4:], noise_scales[4:] * (1 / eta**2 - 1), f"{BLACK} d2", "theory"))
for n in (12, 14, 15, 100):
    print(
        f"B_simple {n}: right batch {n / eta**2:.1f}; from 8, unbiased mode stops at"
        f" {settles(n, 8, 'unbiased')}, paper mode at {settles(n, 8, 'paper')}"
    )
NOISE_SCALE = "B_simple = noise / signal (examples)"
shown(
    "What the norm test requests, and where growth stops",
    panel("Requested", NOISE_SCALE, "batch (examples)", requests),
    panel("Where growth stops", NOISE_SCALE, "batch (examples)", stops),
)

# %% [markdown]
# Now runs with noisy tests. $B_\text{simple}$ rises from 2 to 900 over 200 tests, each on as many
# examples as the run's batch has. The unbiased mode averages its sums with decay 0.9, as a run
# does; the paper's mode uses each test alone. (For Gaussian examples $\bar g$ and $\hat S$ are
# drawn directly.)
#
# The unbiased mode follows the right batch with the delay of averaging. The paper's mode stays
# above $B_\text{simple}(1/\eta^2 - 1)$ by chance: a batch that grew too large never shrinks again.
# In a higher effective dimension it is closer to the line.

# %%
path = np.geomspace(2, 900, 200)


def simulate(mode, decay, num_runs=100):
    """Simulate runs; returns their batches, [test, run]."""
    random = np.random.default_rng(0)
    batch_R, history = np.full(num_runs, 8), []
    sums = np.zeros((4, num_runs))
    for n in path:
        b = batch_R[:, None]
        mean = point(n)[0] + random.standard_normal((num_runs, 500)) * np.sqrt(eigenvalues / b)
        noise_R = (random.chisquare(b - 1, (num_runs, 500)) @ eigenvalues) / (batch_R - 1)
        signal_R = np.sum(mean**2, axis=1) - noise_R / batch_R
        weights = batch_R - 1, batch_R * (batch_R - 1)
        new = noise_R * weights[0], weights[0], signal_R * weights[1], weights[1]
        sums = decay * sums + np.array(new)
        stats = true_stats(n).replace(
            noise_sum=sums[0], noise_weight=sums[1], signal_sum=sums[2], signal_weight=sums[3]
        )
        wanted_R = al.norm_test(stats, eta=eta, mode=mode, batch_size=batch_R)
        batch_R = np.array(
            [
                al.next_batch_size(wanted, batch_size=int(now), max_growth=4, batch_cap=4096)
                for wanted, now in zip(wanted_R, batch_R, strict=True)
            ]
        )
        history.append(batch_R)
    return np.array(history)


curves = []
for mode, decay, color in (("unbiased", 0.9, BLUE), ("paper", 0.0, RED)):
    low, middle, high = np.quantile(simulate(mode, decay), [0.1, 0.5, 0.9], axis=1)
    curves.append(Curve(path, middle, color, f"{mode}: median", band=(low, high)))
curves.append(Curve(path, path / eta**2, f"{BLACK} thin", "right: B_simple / η²"))
rest = path * (1 / eta**2 - 1)
curves.append(Curve(path, rest, f"{BLACK} thin d2", "B_simple (1/η² - 1)"))
title = "Batches of 100 runs: median, 10 to 90 %"
shown(title, panel(title, "B_simple (examples), rising as in training", "batch (examples)", curves))

# %% [markdown]
# ## (d) The inner-product test
#
# The inner-product test (Bollapragada et al., eq. 2.6) only requires that the mean gradient points
# in the direction of $G$: the variance $V = G^\top\Sigma G$ of $\langle g_j, G\rangle$ must be at
# most $b\,\vartheta^2|G|^4$, so it requests $T = V/(\vartheta^2|G|^4)$. The plug-in estimate of $V$
# replaces $G$ by $\bar g$, which contains each $g_j$ itself:
#
# $$\mathrm{E}\,\hat V_\text{plug-in} = V + \operatorname{tr}\Sigma^2/b .$$
#
# The unbiased estimate divides the test batch into thirds: it is the covariance, over the last
# third, of each gradient's products with the mean gradients of the first and the second. In the
# left chart $B_\text{simple} = 32$.

# %%
v = point(32)[2]
ip_sizes = batch_sizes[1::2]
ip_stats = [
    repeated_stats(
        jax.random.key(500 + i), x, batch_size=int(b), num_repeats=num_repeats, inner_products=True
    )
    for i, b in enumerate(ip_sizes)
]
unbiased_v = np.array([s.scale**2 * s.ip_sum / s.ip_weight for s in ip_stats]) / v
plugin_v = np.array([s.scale**2 * s.plugin_ip_sum / s.noise_weight for s in ip_stats]) / v

biases = [
    Curve(batch_sizes, np.ones(len(batch_sizes)), BLACK),
    Curve(batch_sizes, 1 + noise_square / batch_sizes / v, f"{RED} thin", "1 + tr Σ² / (b V)"),
    *mean_with_error(ip_sizes, plugin_v, RED, "plug-in V̂ / V"),
    *mean_with_error(ip_sizes, unbiased_v, BLUE, "unbiased V̂ / V"),
]
vartheta = 0.9
truth = [point(n)[2] / point(n)[1] ** 2 / vartheta**2 for n in noise_scales]
requests = [Curve(noise_scales, truth, BLUE, "true V and |G|²")]
for batch_size, dashes in ((8, "d2"), (32, "d1"), (128, "d3")):
    request = [
        (point(n)[2] + noise_square / batch_size)
        / (vartheta * (point(n)[1] + noise / batch_size)) ** 2
        for n in noise_scales
    ]
    requests.append(Curve(noise_scales, request, f"{RED} {dashes}", f"plug-in, batch {batch_size}"))
shown(
    "The inner-product test: bias, and what it requests",
    panel("Bias", TEST_BATCH, "mean estimate / truth", biases, x_base=2, y_base=2),
    panel("Requested", NOISE_SCALE, "batch (examples)", requests),
)

# %% [markdown]
# On the left, the plug-in estimate of $V$ from a small batch is several times too large (by the
# factor of (a), because $G^2_k\propto\Sigma_{kk}$ here). On the right, the request is not too
# large, because $|\bar g|^4$ in the denominator is too large by even more. As $|G|\to 0$ it tends
# to
#
# $$\frac{b}{\vartheta^2}\cdot\frac{\operatorname{tr}\Sigma^2}{(\operatorname{tr}\Sigma)^2},$$
#
# the present batch over $\vartheta^2$ and the effective dimension, less than $b$. So with plug-in
# estimates no batch ever grows, however weak the signal. The request with the true values exceeds a
# batch of 8 from $B_\text{simple}\approx 600$ on.
#
# The augmented test (eq. 3.3) also bounds the noise orthogonal to $G$, by $\nu$. In high dimension
# that is nearly all noise, so it acts like a norm test with $\eta = \nu$.
#
# ## (e) The same numbers from one backward pass
#
# By `vmap` each example needs memory for a whole gradient. The layers of this package's models
# compute each example's squared gradient norm inside one ordinary backward pass ("taps").

# %%
from adloco_jax.models.llama import Llama, next_token_loss

model = Llama(
    vocab_size=257,
    width=64,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    mlp_width=128,
    max_length=64,
)
tokens_BL = jax.random.randint(jax.random.key(0), (32, 65), 0, 64)  # a quarter of the ids
params = model.init(jax.random.key(1), tokens_BL[:, :-1])["params"]
llama_loss = next_token_loss(model)

by_estimator = {}
for estimator in ("vmap", "taps"):
    measure = jax.jit(
        functools.partial(
            al.gradient_stats,
            llama_loss,
            estimator=estimator,
            inner_products=False,
        )
    )
    measured_stats = jax.block_until_ready(measure(params, tokens_BL))  # compiles
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(measure(params, tokens_BL))
        seconds.append(time.perf_counter() - start)
    print(
        f"{estimator:7} noise {measured_stats.noise:.6f}  signal {measured_stats.signal:.6f}"
        f"  {1e3 * np.median(seconds):.0f} ms"
    )
    by_estimator[estimator] = measured_stats

difference = abs(by_estimator["taps"].noise / by_estimator["vmap"].noise - 1)
print(f"relative difference of the noise, taps against vmap: {difference:.1e}")
assert difference < 1e-5
