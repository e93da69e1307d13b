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
# # A run beside the paper's theory
#
# The AdLoCo paper (arXiv 2508.18182) bounds the gradient and the batch of plain SGD. Here its
# bounds are drawn beside a small run, with the constants fitted to the run, after a check on a
# problem on which they are tight. Less than a minute on two CPU cores. To look at a run of your
# own, set `workdir`. What the theory assumes and a run does differently is in *Every choice*,
# section 5.

# %%
repository = ""  # only for Colab: the address of this notebook's repository, "https://..."

import subprocess
import sys

if "google.colab" in sys.modules:  # Colab's own jax, with its GPU, stays
    assert repository, "set `repository` above to the address of this notebook's repository"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", f"git+{repository}"], check=True)

# %% tags=["parameters"]
workdir = None  # the folder of a finished run with a norm test; None: train a small one

# %%
from typing import NamedTuple

import numpy as np

import adloco_jax as al
from adloco_jax.config import default_config
from adloco_jax.study import chart, curves
from adloco_jax.study.chart import Curve

# %% [markdown]
# ## The bounds
#
# They hold for SGD with step size $1/(L(1+\eta^2))$, if the loss $F$ is $L$-smooth and every batch
# is the exact request $b_k = \sigma^2/(\eta^2|G_k|^2)$. With $\Delta_0 = F(x_0) - F^*$, after $N$
# updates of each of $M$ workers with $S$ updates between synchronisations,
#
# $$\frac1N\sum_k \mathrm{E}|G_k|^2 \le \frac{2L(SM + \eta^2)\Delta_0}{MN}$$
#
# bounds the signal: Lemma 2 for $M = S = 1$, else Lemma 1, which the paper has only up to a factor
# (2 makes it Lemma 2). As $1/b_k$ is proportional to $|G_k|^2$, Jensen's inequality turns it into a
# lower bound on the mean batch (Theorem 1), linear in $N$, and the sum into an upper bound on the
# paper's count of communications, $C(N) = \sum_k b_\text{max}/b_k$.


# %%
class Constants(NamedTuple):
    """The bounds use only the product of the first two."""

    smoothness: float  # L
    gap: float  # Delta_0, nats/token
    noise: float  # sigma^2, of single sequences
    eta: float  # threshold of the norm test


def signal_bound(c, num_steps, steps_per_round=1, num_workers=1):
    spread = steps_per_round * num_workers + c.eta**2
    return 2 * c.smoothness * spread * c.gap / (num_workers * num_steps)


def batch_bound(c, num_steps, steps_per_round=1, num_workers=1):
    signal = signal_bound(c, num_steps, steps_per_round, num_workers)
    return c.noise / (num_workers * c.eta**2 * signal)


# %% [markdown]
# ## A run's own numbers
#
# `measured` reads them from the ledger: after each round, means over the trainers and over all
# updates so far. `fit_constants` takes $\eta$ from the config ($\nu$ for the augmented test, a norm
# test with $\nu$ in high dimension), as $\sigma^2$ the mean noise that the tests measured, and as
# $\Delta_0$ the first training loss minus the lowest of all losses. $L$ is the smallest for which
# Lemma 2 holds after every round. Negative estimates of $|G|^2$ count, or noise would look like
# signal.


# %%
def over_trainers(events, value_of):
    """For each round the mean over its trainers, NaN where nothing was measured."""
    rounds = [map(value_of, lines) for lines in curves.by_round(events).values()]
    known = [[value for value in values if value is not None] for values in rounds]
    return np.array([np.mean(values) if values else np.nan for values in known])


def measured(events):
    steps = over_trainers(events, lambda line: line["updates"])
    max_batch_size = curves.last(events, "start")["max_batch_size"]

    def total(line):
        return line["requested_batch_size"] * line["workers"]

    def mean_so_far(value_of):
        values = over_trainers(events, value_of)
        with np.errstate(invalid="ignore"):  # until the first test there is none
            return np.nancumsum(steps * values) / np.cumsum(steps * np.isfinite(values))

    communications = over_trainers(events, lambda line: max_batch_size / total(line))
    return {
        "N": np.cumsum(steps),
        "steps": steps,
        "workers": over_trainers(events, lambda line: line["workers"]),
        "signal": mean_so_far(lambda line: line["signal"]),
        "batch": mean_so_far(lambda line: line["requested_batch_size"]),
        "total_batch": mean_so_far(total),
        "communications": np.cumsum(steps * communications),
    }


def fit_constants(events):
    batching, run = curves.last(events, "start")["config"]["batching"], measured(events)
    assert batching["test"] in ("norm", "augmented"), "the theory is of the norm test"
    eta = batching["eta" if batching["test"] == "norm" else "nu"]
    noises = [line["noise"] for line in curves.lines(events, "round")]
    losses = over_trainers(events, lambda line: line["train_loss"])
    evaluated = [e["loss"] for e in curves.lines(events, "eval") if e["loss"] is not None]
    gap = losses[np.isfinite(losses)][0] - np.nanmin([*losses, *evaluated])
    largest = np.nanmax(run["signal"] * run["N"])
    assert gap > 0, "no loss is below the first one"
    assert largest > 0, "no test sees a gradient above its noise: raise batching.test_batch_size"
    noise = np.mean([noise for noise in noises if noise is not None])
    smoothness = largest / (2 * (1 + eta**2) * gap)
    return Constants(float(smoothness), float(gap), float(noise), eta)


def bounds(run, c):
    return {
        "signal": signal_bound(c, run["N"]),
        "batch": batch_bound(c, run["N"], run["steps"], run["workers"]),
        "total_batch": batch_bound(c, run["N"]),
    }


# %% [markdown]
# ## A quadratic on which the bounds are tight
#
# SGD with the exact test on $\frac L2|x|^2$. $\mathrm{E}|G|^2$ shrinks by $\eta^2/(1+\eta^2)$ an
# update, so its sum over all updates is $(1+\eta^2)|G_0|^2 = 2L(1+\eta^2)\Delta_0$: Lemma 2 with
# equality. 200 trainers stand for the expected value. The constants are found again, and the
# measured means obey the bounds and come close to them.

# %%
true = Constants(smoothness=2.0, gap=4.0, noise=3000.0, eta=2.0)
max_batch_size = 16
start = {"config": {"batching": {"test": "norm", "eta": true.eta}}}
events = [{"event": "start", "max_batch_size": max_batch_size} | start]
rng = np.random.default_rng(5)
x_MW = np.zeros((200, 8))
x_MW[:, 0] = np.sqrt(2 * true.gap / true.smoothness)
for step in range(25):
    gradient_MW = true.smoothness * x_MW
    signal_M = np.sum(gradient_MW**2, axis=1)
    batch_M = np.ceil(true.noise / (true.eta**2 * signal_M))
    loss_M = true.smoothness / 2 * np.sum(x_MW**2, axis=1)
    line = {"event": "round", "round": step + 1, "workers": 1, "updates": 1, "noise": true.noise}
    for loss, signal, batch in zip(loss_M, signal_M, batch_M, strict=True):
        events.append(line | dict(train_loss=loss, signal=signal, requested_batch_size=batch))
    deviation_MW = rng.standard_normal(x_MW.shape) * np.sqrt(true.noise / 8 / batch_M)[:, None]
    x_MW = x_MW - (gradient_MW + deviation_MW) / (true.smoothness * (1 + true.eta**2))

events.append({"event": "eval", "loss": 0.0})
found, run = fit_constants(events), measured(events)
print("true:  ", true)
print("fitted:", found)
np.testing.assert_allclose(found, true, rtol=0.05)
limit = bounds(run, found)
communications = max_batch_size / batch_bound(found, 1)
assert np.all(run["signal"] <= limit["signal"] * (1 + 1e-9))
assert np.all(run["batch"] >= limit["batch"])
assert np.all(run["total_batch"] >= limit["total_batch"])
assert run["signal"][-1] > 0.85 * limit["signal"][-1]
assert 0.8 * communications < run["communications"][-1] < communications

# %% [markdown]
# ## A run

# %%
if workdir is None:
    config = default_config()
    config.num_rounds = 10
    config.inner.steps_per_round, config.inner.learning_rate = 20, 3e-3
    config.model.width, config.model.mlp_width, config.model.num_layers = 32, 64, 1
    config.data.sequence_length, config.data.num_sequences = 32, 16_000
    config.ensemble.num_trainers, config.ensemble.num_workers = 1, 2
    config.batching.test, config.batching.eta, config.batching.max_growth = "norm", 0.4, 2
    config.batching.initial_batch_size, config.batching.max_batch_size = 4, 16
    config.batching.batch_cap, config.batching.buckets = 64, (4, 16)
    workdir = al.train(config).workdir
events = curves.read_run(workdir).events
run, found = measured(events), fit_constants(events)
limit = bounds(run, found)
print(found)

PANELS = {
    "signal |G|², mean so far": [("signal", "measured", "at most (Lemma 2)", "c0", "c1")],
    "batch (sequences), mean so far": [
        ("total_batch", "measured, all workers", "at least (Theorem 1)", "c0", "c1"),
        ("batch", "measured, per worker", "at least (Lemma 1)", "c5", "c2"),
    ],
}
panels = []
for label, rows in PANELS.items():
    drawn = []
    for name, own, bound, color, of_bound in rows:
        values = np.where(run[name] > 0, run[name], np.nan)
        drawn.append(Curve(run["N"], values, color, own))
        drawn.append(Curve(run["N"], limit[name], f"{of_bound} d4", bound))
    across = chart.axis("updates of a worker, N", run["N"])
    up = chart.axis(label, [value for curve in drawn for value in curve.y], base=10)
    panels.append(chart.chart(across, up, drawn, title=label, height=260))
chart.document(panels, title="A run beside the theory", columns=2, width=1120, right_px=170)

# %% [markdown]
# Measured values are means over the trainers. Where the run departs from the theory (AdamW,
# momentum, one test a round, caps), a measured curve may cross its bound.
