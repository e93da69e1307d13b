"""How batch gradients scatter about the full-data gradient at a checkpoint: numbers and a figure.

The n sequences that are looked at stand for the whole: their mean gradient G is exact, and so is
the trace of their gradient covariance, tr(Sigma). A batch of b of them, drawn without replacement,
has a gradient g_b with E|g_b - G|^2 = (1 - b/n) tr(Sigma) / b.
"""

import functools
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import PyTree
from tqdm import tqdm

from adloco_jax.core.gradstats import MIN_EXAMPLES, gradient_stats
from adloco_jax.core.types import LossFn
from adloco_jax.data.streaming import Streaming
from adloco_jax.errors import ConfigError, DataError, DivergedError, ResourceError
from adloco_jax.run import ledger
from adloco_jax.run.build import build_model, class_count, load_data
from adloco_jax.run.export import read_trained
from adloco_jax.run.resume import check_workdir
from adloco_jax.settings import Settings
from adloco_jax.study.gradients_figure import figure

MAX_COORDINATES = 100_000
MAX_DEVIATIONS = 10_000_000  # of all draws of one batch size: 40 MB, and four times that in float64
BIN_EDGES = np.linspace(-10.0, 10.0, 101)  # of the histograms, in standard deviations
ROUNDS_BEFORE, ROUNDS_AFTER = 1, 2  # of the ledger, around the checkpoint

# What a seed is for, so that no two uses share their random numbers.
_SEQUENCES, _COORDINATES, _BATCHES = range(3)


class Moments(NamedTuple):
    """Of a sample, in its own units; the excess kurtosis of a normal distribution is 0."""

    mean: float
    median: float
    std: float
    excess_kurtosis: float


class Scatter(NamedTuple):
    """Deviations g_b - G of random batches of one size.

    Attributes:
      batch_size: b, in sequences.
      norms: |g_b - G| of each draw.
      law: Root of E|g_b - G|^2 for batches drawn without replacement.
      moments: Of the deviations of single coordinates, all draws together.
      own_moments: The same with each coordinate divided by its own root mean square over the
        draws; coordinates that never deviate are left out. Normal coordinates of unequal variance
        give a heavy-tailed whole, but here an excess kurtosis of -6 / (draws + 2).
      counts: Of the deviations over `moments.std` between `BIN_EDGES`.
      own_counts: Of the deviations over each coordinate's root mean square, per coordinate.
      num_deviations: Coordinates times draws, those outside the bins included.
      num_own_deviations: Those of coordinates that deviate.
    """

    batch_size: int
    norms: list[float]
    law: float
    moments: Moments
    own_moments: Moments
    counts: list[int]
    own_counts: list[int]
    num_deviations: int
    num_own_deviations: int


class Measured(NamedTuple):
    """Gradients of n sequences at one point.

    Attributes:
      num_params: Coordinates of the gradient.
      num_coordinates: Those whose deviations were looked at; all, or as many drawn at random.
      mean_norm: |G|^2, of the mean gradient over the n sequences.
      noise: tr(Sigma), unbiased.
      signal: Squared norm of the gradient that n sequences estimate, unbiased; may be negative.
      batches: By batch size, ascending.
    """

    num_params: int
    num_coordinates: int
    mean_norm: float
    noise: float
    signal: float
    batches: list[Scatter]


def moments(values: np.ndarray) -> Moments:
    """Mean, median, standard deviation and excess kurtosis of a sample, in float64.

    Args:
      values: Any shape, at least one entry.

    Returns:
      Plain moments of the sample: divided by its size, without correction for bias. The kurtosis
      of a constant sample is NaN.

    Source: excess kurtosis m_4 / m_2^2 - 3, Joanes and Gill 1998 (their g_2).
    """
    values = np.asarray(values, np.float64).reshape(-1)
    centred = values - values.mean()
    std = math.sqrt(np.mean(np.square(centred)))
    excess = np.mean(np.square(np.square(centred / std))) - 3 if std > 0 else math.nan
    return Moments(float(values.mean()), float(np.median(values)), std, float(excess))


def noise_and_signal(square_sum: float, mean_norm: float, num_examples: int) -> tuple[float, float]:
    """Unbiased tr(Sigma) and |G|^2 from the norms of n gradients and of their mean.

    Args:
      square_sum: Sum of the squared norms of single examples' gradients.
      mean_norm: Squared norm of their mean.
      num_examples: n, at least 2.

    Returns:
      Noise and signal, in the units of a squared gradient.

    Source: McCandlish et al. 2018 (arXiv 1812.06162), appendix A; docs/algorithm.md, 2.
    """
    noise = (square_sum - num_examples * mean_norm) / (num_examples - 1)
    return noise, mean_norm - noise / num_examples


def noise_scale(noise: float | None, signal: float | None) -> float | None:
    """The simple noise scale tr(Sigma) / |G|^2 in sequences; None without a positive signal.

    Source: McCandlish et al. 2018 (arXiv 1812.06162), eq. 2.9.
    """
    if noise is None or signal is None or signal <= 0:
        return None
    return noise / signal


def deviation_law(noise: float, batch_size: int, num_examples: int) -> float:
    """Root mean square of |g_b - G| over batches drawn without replacement from n examples.

    Args:
      noise: tr(Sigma) over the n examples, unbiased (divided by n - 1).
      batch_size: b, at most n.
      num_examples: n, at least 2.

    Returns:
      sqrt(tr(Sigma) / b) times sqrt(1 - b/n). That is the law sqrt(v / b) of independent draws, v
      being the n examples' own variance (n - 1)/n tr(Sigma), times sqrt((n - b)/(n - 1)).

    Source: Cochran 1977, Sampling Techniques, theorem 2.2: the finite population correction.
    """
    return math.sqrt(noise / batch_size * (1 - batch_size / num_examples))


def mean_gradient(
    loss_fn: LossFn,
    params: PyTree,
    rows: np.ndarray,
    *,
    pass_size: int,
    on_sequences: Callable[[int], object] = lambda count: None,
) -> PyTree:
    """The gradient of the mean loss over all rows, summed in float64 on the host.

    Args:
      loss_fn: `loss_fn(params, rows) -> scalar`, the mean over rows.
      params: Any pytree of arrays.
      rows: [n, ...].
      pass_size: Rows in one pass on the device; the last pass may have fewer.
      on_sequences: Called after each pass with the rows it took.

    Returns:
      NumPy float64, shaped as `params`.
    """
    gradient = jax.jit(jax.grad(loss_fn))
    total = jax.tree.map(lambda leaf: np.zeros(leaf.shape), params)
    for start in range(0, len(rows), pass_size):
        part = rows[start : start + pass_size]
        # A term of the mean has float32's relative error; the sum adds none to it.
        grad = jax.device_get(gradient(params, part))
        share = len(part) / len(rows)
        total = jax.tree.map(lambda t, g, s=share: t + s * np.float64(g), total, grad)
        on_sequences(len(part))
    return total


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
) -> Measured:
    """Noise, signal, and the scatter of random batches about the full gradient.

    Memory on the device is a few times the parameters, and for a loss function without gradient
    taps `pass_size` times. Sequences are passed over 2 n + draws * (sum of the batch sizes) times.

    Args:
      loss_fn: `loss_fn(params, rows) -> scalar`, the mean over rows; with gradient taps or without,
        see `core.gradstats`.
      params: Any pytree of arrays.
      rows: [n, ...], the population.
      batch_sizes: Distinct, each at least 1 and below n.
      draws: Batches of each size, at least 2.
      seed: Decides batches and coordinates, at least 0.
      pass_size: Most rows in one pass on the device.
      on_sequences: Called with the rows of each pass, for a progress bar.

    Returns:
      The numbers.

    Raises:
      DivergedError: If a gradient is not finite.
      DataError: If all rows have the same gradient.
    """
    params, rows = jax.device_get(params), np.asarray(rows)
    pass_size = min(pass_size, len(rows))
    mean = mean_gradient(loss_fn, params, rows, pass_size=pass_size, on_sequences=on_sequences)
    mean_norm = sum(float(np.sum(np.square(leaf))) for leaf in jax.tree.leaves(mean))
    params, rows_NL = jax.device_put(params), jax.device_put(rows)
    square_sum = _square_sum(loss_fn, params, rows, pass_size, on_sequences)
    if not math.isfinite(mean_norm + square_sum):
        raise DivergedError("the gradient is not finite here; choose another round or trainer")
    noise, signal = noise_and_signal(square_sum, mean_norm, len(rows))
    if noise <= 0:
        raise DataError(
            f"the {len(rows)} sequences have all the same gradient: there is no noise to look at;"
            " choose more of them"
        )
    mean = jax.device_put(jax.tree.map(np.float32, mean))
    num_params = sum(leaf.size for leaf in jax.tree.leaves(mean))
    coordinates = _draw_coordinates(params, min(MAX_COORDINATES, MAX_DEVIATIONS // draws), seed)
    num_coordinates = sum(map(len, coordinates))
    deviate = jax.jit(functools.partial(_deviation, loss_fn))
    batches = []
    for batch_size in sorted(batch_sizes):
        part = max(p for p in range(1, pass_size + 1) if batch_size % p == 0)
        norms_S, values_SC = np.empty(draws), np.empty((draws, num_coordinates), np.float32)
        for draw, index_B in enumerate(draw_batches(len(rows), batch_size, draws, seed)):
            index_AB = jnp.asarray(index_B.reshape(-1, part), jnp.int32)
            norms_S[draw], values_SC[draw] = deviate(params, mean, rows_NL, index_AB, coordinates)
            on_sequences(batch_size)
        law = deviation_law(noise, batch_size, len(rows))
        batches.append(_scatter(batch_size, norms_S, values_SC, law))
    return Measured(num_params, num_coordinates, mean_norm, noise, signal, batches)


def draw_batches(num_examples: int, batch_size: int, draws: int, seed: int) -> np.ndarray:
    """Positions of random batches, each without repetition: int64 [draws, batch_size]."""
    rng = np.random.default_rng([seed, _BATCHES, batch_size])
    return np.stack([rng.choice(num_examples, batch_size, replace=False) for _ in range(draws)])


def _square_sum(
    loss_fn: LossFn,
    params: PyTree,
    rows: np.ndarray,
    pass_size: int,
    on_sequences: Callable[[int], object],
) -> float:
    """Sum of the squared norms of single rows' gradients, in float64 between passes."""
    stats_fn = jax.jit(
        functools.partial(
            gradient_stats, loss_fn, estimator="auto", chunk_size=pass_size, inner_products=False
        )
    )
    step, total = max(pass_size, MIN_EXAMPLES), 0.0
    for start in range(0, len(rows), step):
        count = min(step, len(rows) - start)
        # The last pass is filled up, so that one program serves all.
        index = np.minimum(np.arange(start, start + step), len(rows) - 1)
        stats = stats_fn(params, rows[index], num_examples=count)
        total += count * float(stats.scale)
        on_sequences(count)
    return total


def _draw_coordinates(params: PyTree, most: int, seed: int) -> list[Array]:
    """Places in each flattened leaf: all, or `most` of them drawn from all leaves alike."""
    sizes = [leaf.size for leaf in jax.tree.leaves(params)]
    ends = np.cumsum(sizes)
    chosen = np.arange(ends[-1])
    if ends[-1] > most:
        rng = np.random.default_rng([seed, _COORDINATES])
        chosen = np.sort(rng.choice(ends[-1], most, replace=False))
    parts = np.split(chosen, np.searchsorted(chosen, ends[:-1]))
    starts = ends - sizes
    return [jnp.asarray(part - start, jnp.int32) for part, start in zip(parts, starts, strict=True)]


def _deviation(
    loss_fn: LossFn,
    params: PyTree,
    mean: PyTree,
    rows_NL: Array,
    index_AB: Array,
    coordinates: list[Array],
) -> tuple[Array, Array]:
    """Norm of g_b - G, and some of its coordinates, for a batch in A parts."""

    def add(total, index_B):
        grad = jax.grad(loss_fn)(params, rows_NL[index_B])
        return jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, grad), None

    total, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, mean), index_AB)
    leaves = jax.tree.leaves(jax.tree.map(lambda t, m: t / len(index_AB) - m, total, mean))
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in leaves))
    chosen = [leaf.reshape(-1)[places] for leaf, places in zip(leaves, coordinates, strict=True)]
    return norm, jnp.concatenate(chosen)


def _scatter(batch_size: int, norms_S: np.ndarray, values_SC: np.ndarray, law: float) -> Scatter:
    whole = moments(values_SC)
    root_C = np.sqrt(np.mean(np.square(values_SC), axis=0, dtype=np.float64)).astype(np.float32)
    own_SC = values_SC[:, root_C > 0] / root_C[root_C > 0]
    return Scatter(
        batch_size=batch_size,
        norms=norms_S.tolist(),
        law=law,
        moments=whole,
        own_moments=moments(own_SC),
        counts=np.histogram(values_SC / whole.std, BIN_EDGES)[0].tolist(),
        own_counts=np.histogram(own_SC, BIN_EDGES)[0].tolist(),
        num_deviations=values_SC.size,
        num_own_deviations=own_SC.size,
    )


def compare(
    events: Sequence[dict],
    settings: Settings,
    *,
    round: int,
    trainer: int | None,
    noise: float,
    signal: float,
) -> list[dict]:
    """What the run's own tests found around a checkpoint, over what was measured.

    The test of round k is taken where round k begins, so that of the round after the checkpoint's
    saw the very parameters of the checkpoint, and sequences of its own.

    Args:
      events: The ledger's lines.
      settings: The run's.
      round: The checkpoint's.
      trainer: Whose lines; None for those of all trainers.
      noise: tr(Sigma), as measured.
      signal: |G|^2, as measured.

    Returns:
      A dict per round and trainer. `noise_scale` is that of the one test; `smoothed_noise_scale`
      the one that `test_value` was computed from, for the unbiased norm test, else None. The ratios
      are the test's over the measured. None stands for what has not been tested or is not positive.
    """
    batching, measured = settings.batching, noise_scale(noise, signal)
    lines = [
        e
        for e in events
        if e["event"] == "round"
        and round - ROUNDS_BEFORE <= e["round"] <= round + ROUNDS_AFTER
        and trainer in (None, e["trainer"])
    ]
    found = []
    for line in lines:
        smoothed = None
        if (batching.test, batching.mode) == ("norm", "unbiased") and line["test_value"]:
            workers = line["workers"] if batching.scope == "trainer" else 1
            smoothed = line["test_value"] * workers * batching.eta**2
        own = noise_scale(line["noise"], line["signal"])
        found.append(
            {name: line[name] for name in ("round", "trainer", "noise", "signal", "test_value")}
            | {
                "at_checkpoint": line["round"] == round + 1,
                "noise_scale": own,
                "smoothed_noise_scale": smoothed,
                "noise_ratio": _ratio(line["noise"], noise),
                "signal_ratio": _ratio(line["signal"], signal),
                "noise_scale_ratio": _ratio(own, measured),
                "smoothed_noise_scale_ratio": _ratio(smoothed, measured),
            }
        )
    return found


def _ratio(value: float | None, measured: float | None) -> float | None:
    return None if value is None or measured is None or measured <= 0 else value / measured


def analyse_run(
    workdir: str | os.PathLike[str],
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
    """Writes `gradient_analysis.json` and `gradient_analysis.png` for a checkpoint of a run.

    Args:
      workdir: The run's folder, which is only read but for `report/` in it.
      round: Whose checkpoint; None is the newest.
      trainer: A trainer's id; None is the consensus.
      num_sequences: n, drawn at random from all the run's training rows.
      batch_sizes: Each at least 1 and below n.
      draws: Batches of each size, at least 2.
      seed: Decides sequences, batches and coordinates, at least 0.
      pass_size: Most sequences in one pass on the device; None takes the run's largest micro-batch.
      out: Folder of the two files; None is `report` in the run's.
      command: Recorded, and shown beneath the figure.

    Returns:
      What the JSON file holds.

    Raises:
      ConfigError: If an argument is out of range, or there is no such checkpoint or trainer.
      CheckpointError: If the folder holds no run, or the checkpoint is damaged.
      DataError: If the data are too few, unusable, or not those of the run.
      DivergedError: If the gradient is not finite.
      ResourceError: If the device's memory or the disk is too small.
    """
    workdir = Path(workdir)
    _check_arguments(num_sequences, batch_sizes, draws, seed, pass_size)
    check_workdir(workdir)
    trained = read_trained(workdir, round=round, trainer=trainer)
    settings, events = trained.settings, ledger.read(workdir / "ledger.jsonl")
    starts = [event for event in events if event["event"] == "start"]
    if not starts:
        raise DataError(f"{workdir / 'ledger.jsonl'}: holds no start of a run; restore it")
    corpus = load_data(settings)
    if isinstance(corpus, Streaming):
        raise ConfigError(
            f"{workdir}: its data are a stream, of which no random rows can be drawn; prepare them"
            " (scripts/prepare_data.py) and train on that"
        )
    if corpus.fingerprint != starts[-1]["data_fingerprint"]:
        raise DataError(
            f"{workdir}: the data are not those that this run was trained on; restore them"
        )
    if num_sequences > len(corpus.rows):
        raise ConfigError(
            f"--num-sequences {num_sequences}: the run has {len(corpus.rows)} to train on; give"
            " fewer"
        )
    folder = workdir / "report" if out is None else Path(out)
    _make(folder)
    chosen = np.random.default_rng([seed, _SEQUENCES]).choice(
        len(corpus.rows), num_sequences, replace=False
    )
    rows = corpus.rows[np.sort(chosen)].astype(np.int32)
    _, loss_fn = build_model(settings)
    sizes = sorted(set(batch_sizes))
    pass_size = pass_size or starts[-1]["max_batch_size"]
    with tqdm(total=2 * num_sequences + draws * sum(sizes), unit=" sequences", disable=None) as bar:
        try:
            measured = measure(
                loss_fn,
                trained.params,
                rows,
                batch_sizes=sizes,
                draws=draws,
                seed=seed,
                pass_size=pass_size,
                on_sequences=bar.update,
            )
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise ResourceError(
                f"out of memory with {pass_size} sequences in one pass; set --pass-size lower"
            ) from error
    lines = compare(
        events,
        settings,
        round=trained.round,
        trainer=trainer,
        noise=measured.noise,
        signal=measured.signal,
    )
    if trained.source in ("best", "average"):  # not a point where one trainer was tested
        lines = [line | {"at_checkpoint": False} for line in lines]
    result = {
        "command": command,
        "run": starts[-1]["run"],
        "checkpoint": f"checkpoints/{trained.round}",
        "round": trained.round,
        "source": trained.source,
        "data_fingerprint": corpus.fingerprint,
        "unit": "nats/token" if class_count(settings) is None else "nats/example",
        "seed": seed,
        "num_sequences": num_sequences,
        "num_training_sequences": len(corpus.rows),
        "draws": draws,
        "pass_size": min(pass_size, num_sequences),
        "num_params": measured.num_params,
        "num_coordinates": measured.num_coordinates,
        "mean_gradient_norm": math.sqrt(measured.mean_norm),
        "noise": measured.noise,
        "signal": measured.signal,
        "noise_scale": noise_scale(measured.noise, measured.signal),
        "batches": [_summary(scatter, measured.noise) for scatter in measured.batches],
        "bin_edges": BIN_EDGES.tolist(),
        "ledger": lines,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }
    try:
        text = json.dumps(_finite(result), indent=2, allow_nan=False)
        (folder / "gradient_analysis.json").write_text(text + "\n", encoding="utf-8")
        figure(result).savefig(folder / "gradient_analysis.png", dpi=150)
    except OSError as error:
        raise ResourceError(f"{folder}: cannot be written ({error.strerror})") from error
    return result


def _check_arguments(
    num_sequences: int, batch_sizes: Sequence[int], draws: int, seed: int, pass_size: int | None
) -> None:
    faults = []
    if num_sequences < MIN_EXAMPLES:
        faults.append(f"--num-sequences {num_sequences}: expected at least {MIN_EXAMPLES}")
    if not batch_sizes:
        faults.append("--batch-sizes: expected at least one")
    if wrong := [size for size in batch_sizes if not 1 <= size < max(num_sequences, MIN_EXAMPLES)]:
        faults.append(
            f"--batch-sizes {','.join(map(str, wrong))}: expected at least 1 and fewer than the"
            f" {num_sequences} sequences (--num-sequences)"
        )
    if draws < 2:
        faults.append(f"--draws {draws}: expected at least 2")
    if seed < 0:
        faults.append(f"--seed {seed}: expected at least 0")
    if pass_size is not None and pass_size < 1:
        faults.append(f"--pass-size {pass_size}: expected at least 1")
    if faults:
        raise ConfigError("\n".join(faults))


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # a file in the way, no access, a name too long
        raise ConfigError(f"--out {str(folder)[:200]!r}: {error}; name another") from error


def _summary(scatter: Scatter, noise: float) -> dict:
    """A batch size's numbers, the norms both one by one and in brief."""
    norms = np.array(scatter.norms)
    rms = float(np.sqrt(np.mean(np.square(norms))))
    return {
        "batch_size": scatter.batch_size,
        "norm_mean": float(norms.mean()),
        "norm_std": float(norms.std(ddof=1)),
        "norm_p10": float(np.quantile(norms, 0.1)),
        "norm_p90": float(np.quantile(norms, 0.9)),
        "norm_rms": rms,
        "law": scatter.law,
        "law_of_independent_draws": math.sqrt(noise / scatter.batch_size),
        "rms_over_law": rms / scatter.law,
        "coordinates": scatter.moments._asdict(),
        "coordinates_over_own_rms": scatter.own_moments._asdict(),
        "counts": scatter.counts,
        "own_counts": scatter.own_counts,
        "num_deviations": scatter.num_deviations,
        "num_own_deviations": scatter.num_own_deviations,
        "norms": scatter.norms,
    }


def _finite(value: object) -> object:
    """JSON has no NaN: null instead."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
