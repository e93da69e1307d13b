"""Comparisons of variants: configs that differ in some keys, with several seeds, and their tables.

All numbers come from the runs' ledgers, at the evaluations of the consensus model. Synchronisations
and bytes are counted as in the report (`curves.heldout_points`).
"""

import copy
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from adloco_jax.config import unknown_key_fault, validate
from adloco_jax.errors import ConfigError, DataError, counted
from adloco_jax.run.ledger import finish, read
from adloco_jax.settings import OPTIONS
from adloco_jax.study.cluster import Cluster, run_seconds
from adloco_jax.study.curves import COSTS, heldout_points, last, serial_updates
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
        made = []
        try:
            for seed in seeds:
                config = copy.deepcopy(comparison.base)
                config.update_from_flattened_dict({**changes, "seed": seed})
                made.append(Trial(name, seed, config, _workdir(folder, name, seed)))
            for run in made[-1:]:
                validate(run.config)
        except (ConfigError, TypeError) as error:  # TypeError: a value of another type
            faults += [f"{name}: {line}" for line in str(error).splitlines()]
        runs += made
    if faults:
        raise ConfigError("\n".join(faults))
    return runs


def curve(events: Sequence[dict], simulated: Cluster) -> list[dict[str, float]]:
    """Loss (nats/token) and costs (`MEASURES`) at each evaluation of a run's consensus model.

    Evaluations whose loss is not finite are left out.

    Raises:
      DataError: If no evaluation is left.
    """
    end_s = run_seconds(events, simulated)
    updates = serial_updates(events)
    points = [
        {cost: found[cost] for cost in COSTS}
        | {
            "loss": found["value"],
            "updates": updates.get(found["round"], 0),
            "time_s": end_s.get(found["round"], 0.0),
            "rounds": found["round"],
        }
        for found in heldout_points(events)
        if math.isfinite(found["value"])
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


def tabulate(comparison: Comparison, folder: str | Path) -> dict:
    """Compute the comparison's table from the runs' ledgers, as plain values, ready for JSON.

    Args:
      comparison: The comparison.
      folder: The folder of the comparison's runs, all of which have finished.

    Returns:
      - `name`, `baseline`, `seeds` and `target_losses` of the comparison;
      - `ran`, `simulated`, `charged`: sentences on runs, cluster and counted synchronisations;
      - `rows`: for each variant its `final` loss and costs, and the costs (`to_reach`)
        `to_target`, a list by target loss, and `to_baseline`, the final loss of the baseline with
        the same seed. Each value is summarised over seeds: `median`, `low`, `high`, and `reached`,
        the number of `seeds` that have it.

    Raises:
      DataError: If a run is missing or not finished.
    """
    curves: dict[str, dict[int, list[dict[str, float]]]] = {}
    starts = []
    for run in runs_of(comparison, folder):
        path = run.workdir / "ledger.jsonl"
        events = read(path) if path.exists() else []
        if finish(events) is None:
            raise DataError(f"{run.workdir}: not finished; run the comparison again")
        curves.setdefault(run.variant, {})[run.seed] = curve(events, comparison.simulated)
        starts.append(last(events, "start"))
    baseline = {seed: points[-1]["loss"] for seed, points in curves[comparison.baseline].items()}
    rows = {
        name: {
            "final": _over_seeds([points[-1] for points in seeds.values()], "loss"),
            "to_target": [
                _costs(seeds, dict.fromkeys(seeds, loss)) for loss in comparison.target_losses
            ],
            "to_baseline": _costs(seeds, baseline),
        }
        for name, seeds in ((name, curves[name]) for name in comparison.variants)
    }
    return {
        "name": Path(folder).resolve().name,
        "ran": _ran(comparison, starts),
        "baseline": comparison.baseline,
        "target_losses": list(comparison.target_losses),
        "seeds": list(comparison.seeds),
        "simulated": str(comparison.simulated),
        "charged": CHARGED,
        "rows": rows,
    }


def markdown(table: dict) -> str:
    """Format the result of `tabulate` in Markdown: medians over seeds, with ranges in brackets."""
    rows, shown = table["rows"], f"median of {counted(len(table['seeds']), 'seed')} (range)"
    losses = [
        [name, _described(row["final"]["loss"], "{:.3f}".format)]
        + [_described(row["final"][m], short) for m in MEASURES]
        for name, row in rows.items()
    ]
    parts = [
        f"# Comparison {plain(table['name'])}",
        plain(table["ran"]),
        f"{table['charged']} Seconds are simulated {table['simulated']}.",
        f"Held-out loss (nats/token) and costs of the whole runs: {shown}.",
        markdown_table([["variant", "loss", *MEASURES.values()], *losses]),
        f"What it took to reach the final loss of {plain(table['baseline'])}, seed by seed; a dash"
        " where fewer than half of the seeds did.",
        *_cost_tables({name: row["to_baseline"] for name, row in rows.items()}),
    ]
    for index, loss in enumerate(table["target_losses"]):
        parts.append(f"What it took to reach {loss:g} nats/token.")
        parts += _cost_tables({name: row["to_target"][index] for name, row in rows.items()})
    return "\n\n".join(parts) + "\n"


def write(comparison: Comparison, folder: str | Path) -> dict:
    """Write `tabulate`'s table to the folder, as `comparison.json` and `comparison.md`; return it.

    Raises:
      DataError: If a run is missing or not finished.
    """
    table = tabulate(comparison, folder)
    text = json.dumps(table, indent=2, allow_nan=False)
    (Path(folder) / "comparison.json").write_text(text + "\n", encoding="utf-8")
    (Path(folder) / "comparison.md").write_text(markdown(table), encoding="utf-8")
    return table


def _ran(comparison: Comparison, starts: Sequence[dict]) -> str:
    base = comparison.base

    def recorded(key: str) -> str:
        return ", ".join(sorted({str(start[key]) for start in starts if start.get(key)})) or "-"

    days = sorted(start["time"][:10] for start in starts if start.get("time"))
    when = " to ".join(dict.fromkeys([days[0], days[-1]])) if days else "-"
    return (
        f"{counted(len(starts), 'run')}: {counted(len(comparison.variants), 'variant')} with seeds"
        f" {', '.join(map(str, comparison.seeds))}. Trained: {when}, on {recorded('devices')}, jax"
        f" {recorded('jax')}. Model: {base.model.arch} of {recorded('num_params')} parameters."
        f" Data: {base.data.path or base.data.source or 'stdlib'}, rows of"
        f" {base.data.sequence_length} tokens."
    )


def _workdir(folder: str | Path, variant: str, seed: int) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", variant.lower()).strip("-")
    return Path(folder) / name / f"seed-{seed}"


def _costs(seeds: Mapping[int, Sequence[dict]], losses: Mapping[int, float]) -> dict[str, dict]:
    never = dict.fromkeys(MEASURES)
    return _over_seeds([to_reach(seeds[s], losses[s]) or never for s in seeds])


def _over_seeds(found: Sequence[Mapping[str, float | None]], *others: str) -> dict[str, dict]:
    return {key: _spread([costs[key] for costs in found]) for key in (*others, *MEASURES)}


def _spread(values: Sequence[float | None]) -> dict:
    """Median and range of a value over the seeds; None (a loss that was not reached) ranks last."""
    reached = sorted(value for value in values if value is not None)
    ranked = [*reached, *[None] * (len(values) - len(reached))]
    return {
        "median": ranked[len(ranked) // 2],  # the higher one of the two middle values
        "low": ranked[0],
        "high": ranked[-1],
        "reached": len(reached),
        "seeds": len(values),
    }


def _cost_tables(costs: Mapping[str, dict]) -> Iterator[str]:
    reached = {name: cost for name, cost in costs.items() if cost["tokens"]["reached"]}
    rows = [
        [name, *(_described(cost[m], short) for m in MEASURES)]
        + [f"{cost['tokens']['reached']} of {cost['tokens']['seeds']}"]
        for name, cost in reached.items()
    ]
    if rows:
        yield markdown_table([["variant", *MEASURES.values(), "seeds that did"], *rows])
    if others := [name for name in costs if name not in reached]:
        yield f"No seed did: {plain('; '.join(others))}."


def _described(spread: dict, shown: Callable[[float], str]) -> str:
    low, middle, high = (
        "-" if spread[name] is None else shown(spread[name]) for name in ("low", "median", "high")
    )
    return low if low == high else f"{middle} ({low} to {high})"
