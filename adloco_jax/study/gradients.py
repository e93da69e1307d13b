"""Measure how batch gradients scatter about the full gradient at a checkpoint of a run.

The n measured sequences are the whole population, so the mean gradient G and the trace tr(Sigma) of
the covariance are exact, and for a batch E|g_b - G|^2 = (1 - b/n) tr(Sigma) / b.
"""

import functools
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.flatten_util import ravel_pytree
from jaxtyping import PyTree
from tqdm import tqdm

from adloco_jax.core.gradstats import MIN_EXAMPLES, gradient_stats
from adloco_jax.core.types import LossFn
from adloco_jax.engine.spec import Machine
from adloco_jax.errors import ConfigError, DataError, DivergedError, ResourceError
from adloco_jax.files import write_errors
from adloco_jax.run import ledger
from adloco_jax.run.assemble import build_model, load_data
from adloco_jax.run.export import read_trained
from adloco_jax.run.folder import check_workdir, refuse_fit
from adloco_jax.settings import Settings
from adloco_jax.study.curves import last, lines
from adloco_jax.study.gradients_figure import figure
from adloco_jax.study.page import write_files

MAX_COORDINATES = 100_000
MAX_DEVIATIONS = 10_000_000  # stored coordinates of all draws of a batch size: 40 MB in float32
BIN_EDGES = np.linspace(-6.0, 6.0, 61)  # edges of histograms, in units of the root mean square

# Purposes of a seed, so that no two of them use the same random numbers.
_SEQUENCES, _COORDINATES, _BATCHES = range(3)


def ratio(value: float | None, over: float | None) -> float | None:
    """The quotient `value / over`; None if one of the two is None, or if `over` is not positive."""
    return None if value is None or over is None or over <= 0 else value / over


def deviation_law(noise: float, batch_size: int, num_examples: int) -> float:
    """Expected root mean square of |g_b - G|, of b out of n examples drawn without replacement.

    It is sqrt(tr(Sigma) / b) * sqrt(1 - b/n), with `noise` tr(Sigma) unbiased (divided by n - 1).

    Source: Cochran 1977, Sampling Techniques, theorem 2.2: the finite population correction.
    """
    return math.sqrt(noise / batch_size * (1 - batch_size / num_examples))


def draw_batches(num_examples: int, batch_size: int, draws: int, seed: int) -> np.ndarray:
    """Draw the positions of random batches of distinct examples, int64 [draws, batch_size]."""
    rng = np.random.default_rng([seed, _BATCHES, batch_size])
    return np.stack([rng.choice(num_examples, batch_size, replace=False) for _ in range(draws)])


def measure(
    loss_fn: LossFn,
    params: PyTree,
    rows: np.ndarray,
    *,
    batch_sizes: Sequence[int],
    draws: int,
    seed: int,
    pass_size: int,
    on_sequences: Callable[[int], object] = lambda count: None,
) -> dict:
    """Measure noise and signal of the gradients of rows, and how gradients of batches scatter.

    Needs memory for a few copies of the parameters, or for `pass_size` copies without gradient
    taps. Processes 2 n + draws * (sum of the batch sizes) rows.

    Args:
      loss_fn: `loss_fn(params, rows) -> scalar`, the mean over the rows, with gradient taps or not.
      params: Any pytree of arrays.
      rows: The n rows, [n, ...].
      batch_sizes: Distinct batch sizes, each at least 1 and below n.
      draws: Number of random batches of each size, at least 2.
      seed: Seed of the random batches and of the drawn coordinates, at least 0.
      pass_size: Upper limit of rows in one pass on the device.
      on_sequences: Called with the number of rows of each pass, for a progress bar.

    Returns:
      Plain values, ready for JSON:

      - `num_params`, and `num_coordinates`: how many are examined, all or a random choice;
      - `mean_gradient_norm`: |G|;
      - `noise`: tr(Sigma), and `signal`: |G|^2, both unbiased, so the signal may be negative;
      - `noise_scale`: noise / signal, in sequences (McCandlish et al. 2018, arXiv 1812.06162, eq.
        2.9); None if the signal is not positive;
      - `bin_edges` of the histograms;
      - `batches`: for each batch size the result of `_scatter`.

    Raises:
      DivergedError: If a gradient is not finite.
      DataError: If all rows have the same gradient.
    """
    rows, pass_size = np.asarray(rows), min(pass_size, len(rows))
    params, rows_NL = jax.device_put((params, rows))
    gradient = jax.jit(lambda params, rows: ravel_pytree(jax.grad(loss_fn)(params, rows))[0])
    mean_P = np.zeros(())
    for start in range(0, len(rows), pass_size):
        part = rows_NL[start : start + pass_size]
        # A term of the mean has float32's relative error; the sum on the host adds none to it.
        share = len(part) / len(rows)
        mean_P = mean_P + share * np.asarray(gradient(params, part), np.float64)
        on_sequences(len(part))
    statistics = functools.partial(
        gradient_stats, loss_fn, estimator="auto", chunk_size=pass_size, inner_products=False
    )
    stats = jax.device_get(jax.jit(statistics)(params, rows_NL))
    on_sequences(len(rows))
    noise, signal = float(stats.noise), float(stats.signal)
    if not math.isfinite(noise + float(np.sum(mean_P))):
        raise DivergedError("the gradient is not finite here; choose another round or trainer")
    if noise <= 0:
        raise DataError(
            f"the {len(rows)} sequences all have the same gradient, so there is no noise to"
            " measure; choose more of them"
        )
    num_coordinates = min(mean_P.size, MAX_COORDINATES, MAX_DEVIATIONS // draws)
    rng = np.random.default_rng([seed, _COORDINATES])
    coordinates_C = np.sort(rng.choice(mean_P.size, num_coordinates, replace=False))
    fixed = jax.device_put((params, rows_NL, mean_P.astype(np.float32), coordinates_C))
    deviate = jax.jit(functools.partial(_deviation, loss_fn))
    batches = []
    for batch_size in sorted(batch_sizes):
        part = max(p for p in range(1, pass_size + 1) if batch_size % p == 0)
        norms_S, values_SC = np.empty(draws), np.empty((draws, num_coordinates), np.float32)
        for draw, index_B in enumerate(draw_batches(len(rows), batch_size, draws, seed)):
            norms_S[draw], values_SC[draw] = deviate(*fixed, index_B.reshape(-1, part))
            on_sequences(batch_size)
        law = deviation_law(noise, batch_size, len(rows))
        batches.append(_scatter(batch_size, norms_S, values_SC, law))
    return {
        "num_params": mean_P.size,
        "num_coordinates": num_coordinates,
        "mean_gradient_norm": float(np.linalg.norm(mean_P)),
        "noise": noise,
        "signal": signal,
        "noise_scale": ratio(noise, signal),
        "bin_edges": BIN_EDGES.tolist(),
        "batches": batches,
    }


def _deviation(
    loss_fn: LossFn,
    params: PyTree,
    rows_NL: Array,
    mean_P: Array,
    coordinates_C: Array,
    index_AB: Array,
) -> tuple[Array, Array]:
    """A batch gradient's deviation from the full gradient: its norm, some coordinates."""

    def add(total_P, index_B):
        grad_P, _ = ravel_pytree(jax.grad(loss_fn)(params, rows_NL[index_B]))
        return total_P + grad_P.astype(jnp.float32), None

    total_P, _ = lax.scan(add, jnp.zeros_like(mean_P), index_AB)
    deviation_P = total_P / len(index_AB) - mean_P
    return jnp.linalg.norm(deviation_P), deviation_P[coordinates_C]


def _scatter(batch_size: int, norms_S: np.ndarray, values_SC: np.ndarray, law: float) -> dict:
    """Summarise the deviations of the batches of one size: norms, kurtosis, histogram.

    Coordinates are first divided by their root mean square, or unequal variances would look
    heavy-tailed; normal ones then have the excess kurtosis -6 / (S + 2). Kurtosis: g_2 of Joanes
    and Gill 1998, about zero instead of the mean.
    """
    root_C = np.sqrt(np.mean(np.square(values_SC), axis=0, dtype=np.float64)).astype(np.float32)
    scaled_SC = values_SC[:, root_C > 0] / root_C[root_C > 0]
    rms = math.sqrt(np.mean(np.square(norms_S)))
    return {
        "batch_size": batch_size,
        "norm_mean": float(norms_S.mean()),
        "norm_std": float(norms_S.std(ddof=1)),
        "norm_rms": rms,
        "law": law,
        "rms_over_law": rms / law,
        "excess_kurtosis": float(np.mean(np.square(np.square(scaled_SC)), dtype=np.float64)) - 3,
        "counts": np.histogram(scaled_SC, BIN_EDGES)[0].tolist(),
        "num_deviations": scaled_SC.size,
        "norms": norms_S.tolist(),
    }


def compare(
    events: Sequence[dict], *, round: int, trainer: int | None, noise: float, signal: float
) -> list[dict]:
    """Compare a run's own batch-size tests at `round`, and at the next, with noise and signal.

    The next round's test used exactly the checkpoint's parameters. `trainer` None: all trainers.
    Each entry has the test's noise, signal and noise scale, and their ratios to the measured ones
    (`noise_ratio` and so on); None if not tested, or if a divisor is not positive.
    """
    measured = {"noise": noise, "signal": signal, "noise_scale": ratio(noise, signal)}
    found = []
    for line in lines(events, "round"):
        if line["round"] in (round, round + 1) and trainer in (None, line["trainer"]):
            tested = {"noise": line["noise"], "signal": line["signal"]}
            tested |= {"noise_scale": ratio(line["noise"], line["signal"])}
            ratios = {f"{name}_ratio": ratio(tested[name], measured[name]) for name in tested}
            own = {name: line[name] for name in ("round", "trainer", "test_value")}
            found.append(own | tested | ratios)
    return found


def analyse_run(
    workdir: str | os.PathLike[str],
    machine: Machine,
    *,
    round: int | None = None,
    trainer: int | None = None,
    num_sequences: int = 512,
    batch_sizes: Sequence[int] = (4, 16, 64),
    draws: int = 200,
    seed: int = 0,
    pass_size: int | None = None,
    out: str | os.PathLike[str] | None = None,
    command: str = "",
) -> dict:
    """Measure batch gradients at a checkpoint of a run; write `gradient_analysis.json` and `.svg`.

    Args:
      workdir: The run's folder. Nothing in it is changed, except its subfolder `report/`.
      machine: The devices that may be used. The first of them computes.
      round: The round of the checkpoint; None: the newest checkpoint.
      trainer: A trainer's id; None: the consensus model.
      num_sequences: How many sequences are drawn from the run's training rows.
      batch_sizes: Batch sizes, each at least 1 and below `num_sequences`.
      draws: Number of random batches of each size, at least 2.
      seed: Seed of sequences, batches and coordinates, at least 0.
      pass_size: Upper limit of sequences in one pass; None: the run's largest micro-batch.
      out: Folder of the two files; None: `report` in the run's folder.
      command: The command line, which both files state.

    Returns:
      The content of the JSON file.

    Raises:
      ConfigError: If an argument is out of range, or there is no such checkpoint or trainer.
      CheckpointError: If the folder has no run, or the checkpoint is damaged.
      DataError: If the data are too few or unusable, or have changed since the run.
      DivergedError: If the gradient is not finite.
      ResourceError: If the device's memory or the disk is too small.
    """
    workdir, sizes = Path(workdir), sorted(set(batch_sizes))
    _check_arguments(num_sequences, sizes, draws, seed, pass_size)
    check_workdir(workdir)
    refuse_fit(workdir)
    events = ledger.read(workdir / "ledger.jsonl")
    trained = read_trained(workdir, machine, round=round, trainer=trainer)
    settings = trained.settings
    start = last(events, "start")
    rows_NL, num_rows = _drawn_rows(workdir, settings, start, num_sequences, seed)
    folder = _made(workdir / "report" if out is None else Path(out))
    pass_size = min(pass_size or start["max_batch_size"], num_sequences)
    draw_settings = {"batch_sizes": sizes, "draws": draws, "seed": seed, "pass_size": pass_size}
    num_passed = 2 * num_sequences + draws * sum(sizes)
    try:
        with tqdm(total=num_passed, unit=" sequences", disable=None) as bar:
            inputs = (build_model(settings, machine)[1], trained.params, rows_NL)
            measured = measure(*inputs, on_sequences=bar.update, **draw_settings)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ResourceError(
            f"out of memory with {pass_size} sequences in one pass; set --pass-size lower"
        ) from error
    found = {name: measured[name] for name in ("noise", "signal")}
    result = {
        "command": command,
        "run": start["run"],
        "checkpoint": f"checkpoints/{trained.round}",
        "round": trained.round,
        "source": trained.source,
        "data_fingerprint": start["data_fingerprint"],
        "unit": start.get("loss_unit", "nats/token") or "of the loss",
        "num_sequences": num_sequences,
        "num_training_sequences": num_rows,
        **draw_settings,
        **measured,
        "ledger": compare(events, round=trained.round, trainer=trainer, **found),
        "jax": jax.__version__,
        "device": machine.devices[0].device_kind,
    }
    text = json.dumps(result, indent=2, allow_nan=False)
    with write_errors(folder):
        files = {"gradient_analysis.json": f"{text}\n", "gradient_analysis.svg": figure(result)}
        write_files(folder, files)
    return result


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # a file in the way, no access, a name too long
        raise ConfigError(f"--out {str(folder)[:200]!r}: {error}; name another") from error
    return folder


def _drawn_rows(
    workdir: Path, settings: Settings, start: dict, num_sequences: int, seed: int
) -> tuple[np.ndarray, int]:
    """Draw random training rows of a run; also return how many training rows the run has."""
    corpus = load_data(settings)
    if corpus.fingerprint != start.get("data_fingerprint"):
        raise DataError(
            f"{workdir}: the data have changed since this run was trained, by its ledger's record"
            " them; restore both"
        )
    num_rows = len(corpus.rows)
    if num_sequences > num_rows:
        raise ConfigError(
            f"--num-sequences {num_sequences}: the run has {num_rows} to train on; give fewer"
        )
    rng = np.random.default_rng([seed, _SEQUENCES])
    index_N = np.sort(rng.choice(num_rows, num_sequences, replace=False))
    return corpus.rows[index_N].astype(np.int32), num_rows


def _check_arguments(
    num_sequences: int, batch_sizes: Sequence[int], draws: int, seed: int, pass_size: int | None
) -> None:
    least = {"num-sequences": (num_sequences, MIN_EXAMPLES), "draws": (draws, 2)}
    least |= {"seed": (seed, 0), "pass-size": (1 if pass_size is None else pass_size, 1)}
    faults = [
        f"--{name} {value}: expected at least {lowest}"
        for name, (value, lowest) in least.items()
        if value < lowest
    ]
    wrong = [size for size in batch_sizes if not 1 <= size < max(num_sequences, MIN_EXAMPLES)]
    if wrong or not batch_sizes:
        faults.append(
            f"--batch-sizes {','.join(map(str, wrong))}: expected one or more, each at least 1 and"
            f" below the {num_sequences} sequences (--num-sequences)"
        )
    if faults:
        raise ConfigError("\n".join(faults))
