"""Comparisons of variants: configs that differ in some keys, with several seeds, and their tables.

All numbers come from the runs' ledgers, at the evaluations of the consensus model. Synchronisations
and bytes are counted as in the report (`curves.heldout_points`).
"""

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from adloco_jax.config import unknown_key_fault, validate
from adloco_jax.errors import ConfigError, DataError, counted
from adloco_jax.run.ledger import finish, read
from adloco_jax.settings import OPTIONS
from adloco_jax.study.cluster import Cluster, timed
from adloco_jax.study.curves import heldout_points
from adloco_jax.study.summary import markdown as plain
from adloco_jax.study.summary import markdown_table, short

MEASURES = {
    "tokens": "tokens",
    "syncs": "synchronisations",
    "bytes": "bytes moved",
    "updates": "sequential steps",
    "time_s": "simulated seconds",
    "rounds": "rounds",
}
CHARGED = (
    "Synchronisations are blocking and summed over trainers: ends of rounds, merges and refused"
    " attempts, each with the state transfer to workers that join a trainer; where the consensus"
    " is an average of trainers, gathering them is counted too (its time is not)."
)


@dataclass(frozen=True)
class Comparison:
    """A comparison: its variants and seeds, and the losses for which it compares costs."""

    base: ConfigDict
    variants: Mapping[str, Mapping[str, object]]
    """The keys that differ from `base`, by the variant's name."""
    baseline: str
    """The variant whose final loss the others are to reach."""
    target_losses: Sequence[float]
    """Nats per token."""
    seeds: Sequence[int] = (0, 1, 2)
    simulated: Cluster = Cluster(num_params=300_000_000, sequence_length=1024)


class Trial(NamedTuple):
    """One run of a comparison: a variant with a seed, its config and its folder."""

    variant: str
    seed: int
    config: ConfigDict
    workdir: Path


def runs_of(comparison: Comparison, folder: str | Path) -> list[Trial]:
    """Check a comparison; list its runs, in `<folder>/<variant>/seed-<seed>`, in order.

    Raises:
      ConfigError: If the comparison or a variant is invalid; the message lists all faults.
    """
    variants, seeds = comparison.variants, comparison.seeds
    faults, runs = [], []
    if not seeds or len(set(seeds)) != len(seeds):
        faults.append(f"seeds = {tuple(seeds)}: need one seed at least, each once")
    if not comparison.target_losses:
        faults.append("target_losses = (): need one at least")
    if comparison.baseline not in variants:
        faults.append(f"baseline = {comparison.baseline!r}: none of {', '.join(variants)}")
    if len({_workdir(folder, name, 0) for name in variants}) < len(variants):
        faults.append(f"variants = {tuple(variants)}: two would share a folder; name them apart")
    for name, changes in variants.items():
        if unknown := [key for key in changes if key not in OPTIONS]:
            faults += [f"{name}: {unknown_key_fault(key)}" for key in unknown]
            continue
        try:
            for seed in seeds:
                config = copy.deepcopy(comparison.base)
                config.update_from_flattened_dict({**changes, "seed": seed})
                runs.append(Trial(name, seed, config, _workdir(folder, name, seed)))
            if seeds:
                validate(runs[-1].config)
        except (ConfigError, TypeError) as error:  # TypeError: a value of another type
            faults += [f"{name}: {line}" for line in str(error).splitlines()]
    if faults:
        raise ConfigError("\n".join(faults))
    return runs


def curve(events: Sequence[dict], simulated: Cluster) -> list[dict[str, float]]:
    """Loss (nats/token) and costs (`MEASURES`) at each evaluation of a run's consensus model.

    Evaluations whose loss is not finite are left out.

    Raises:
      DataError: If no evaluation is left.
    """
    points = [
        {"loss": point["value"], "rounds": point["round"]}
        | {cost: point[cost] for cost in MEASURES if cost != "rounds"}
        for point in timed(heldout_points(events), events, simulated)
        if math.isfinite(point["value"])
    ]
    if not points:
        raise DataError("the ledger has no evaluation with a finite loss")
    return points


def to_reach(points: Sequence[dict], loss: float) -> dict[str, float] | None:
    """Return the point at which a curve first reaches a loss; None if it never does.

    Its costs lie between those of the evaluations before and after, linearly in the loss. So they
    are no whole rounds. A curve that begins below the loss has its first point.
    """
    after = next((i for i, point in enumerate(points) if point["loss"] <= loss), None)
    if not after:
        return None if after is None else points[0]
    high, low = points[after - 1], points[after]
    share = (high["loss"] - loss) / (high["loss"] - low["loss"])
    return {name: high[name] + share * (low[name] - high[name]) for name in low}


def markdown(comparison: Comparison, folder: str | Path) -> str:
    """Compute the comparison's tables from the ledgers of its runs in a folder, in Markdown.

    For each variant they have the final loss and costs, and the costs (`to_reach`) to the final
    loss of the baseline with the same seed, and to each target loss: medians and ranges over seeds.

    Raises:
      DataError: If a run is missing or not finished.
    """
    curves: dict[str, dict[int, list[dict[str, float]]]] = {}
    for run in runs_of(comparison, folder):
        path = run.workdir / "ledger.jsonl"
        events = read(path) if path.exists() else []
        if finish(events) is None:
            raise DataError(f"{run.workdir}: not finished; run the comparison again")
        curves.setdefault(run.variant, {})[run.seed] = curve(events, comparison.simulated)
    rows = [["variant", "loss", *MEASURES.values()]]
    for name, seeds in curves.items():
        ends = [points[-1] for points in seeds.values()]
        rows.append([name, _spread(ends, "loss", "{:.3f}".format), *_costs(ends)])
    baseline = comparison.baseline
    final = {seed: points[-1]["loss"] for seed, points in curves[baseline].items()}
    parts = [
        f"# Comparison {plain(Path(folder).resolve().name)}",
        f"{counted(len(curves), 'variant')} with seeds {', '.join(map(str, comparison.seeds))}.",
        f"{CHARGED} Seconds are simulated {comparison.simulated}.",
        "Held-out loss (nats/token) and costs of the whole runs: median of"
        f" {counted(len(comparison.seeds), 'seed')} (range).",
        markdown_table(rows),
        f"What it took to reach the final loss of {plain(baseline)}, seed by seed; a dash where"
        " fewer than half of the seeds did.",
        _cost_table(curves, final),
    ]
    for loss in comparison.target_losses:
        parts.append(f"What it took to reach {loss:g} nats/token.")
        parts.append(_cost_table(curves, dict.fromkeys(comparison.seeds, loss)))
    return "\n\n".join(parts) + "\n"


def _workdir(folder: str | Path, variant: str, seed: int) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", variant.lower()).strip("-")
    return Path(folder) / name / f"seed-{seed}"


def _cost_table(
    curves: Mapping[str, Mapping[int, Sequence[dict]]], losses: Mapping[int, float]
) -> str:
    """What each variant had spent when it reached a loss, by seed."""
    rows = [["variant", *MEASURES.values(), "seeds that did"]]
    for name, seeds in curves.items():
        points = [to_reach(seeds[seed], loss) for seed, loss in losses.items()]
        num_reached = sum(point is not None for point in points)
        rows.append([name, *_costs(points), f"{num_reached} of {len(points)}"])
    return markdown_table(rows)


def _costs(points: Sequence[dict | None]) -> list[str]:
    return [_spread(points, measure, short) for measure in MEASURES]


def _spread(points: Sequence[dict | None], name: str, shown: Callable[[float], str]) -> str:
    """Median and range over the seeds; None (a loss that was not reached) ranks last."""
    reached = sorted(point[name] for point in points if point is not None)
    ranked = [*map(shown, reached), *["-"] * (len(points) - len(reached))]
    middle = ranked[len(ranked) // 2]  # the higher one of the two middle values
    return middle if ranked[0] == ranked[-1] else f"{middle} ({ranked[0]} to {ranked[-1]})"
