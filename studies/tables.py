"""Tables of the study in docs/RESULTS.md, from the lines of a comparison's results.

python studies/tables.py choose studies/small_tuning.jsonl --target 1.6
python studies/tables.py claims studies/small.jsonl --target 1.6

Variants have names of the form "method: setting". For each method, `choose` prints its best trial:
the one whose median seed reaches a loss with the fewest sequential steps. Among trials within 5 %
of it, the one with the fewest synchronisations wins, then the one with the fewest tokens. `claims`
prints what each method spends until it reaches the loss, over seeds. It also prints this cost
divided by the cost of DiLoCo, and by the cost of the trunk, for the same seed. A method named "data
parallel" runs as one worker with the batch of all workers, so each of its updates counts as one
communication (studies/methods.py).
"""

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from adloco_jax.errors import UserError
from adloco_jax.study import results
from adloco_jax.study.summary import markdown_table

CHOICE = ("method", "setting", "updates", "synchronisations", "tokens", "trials that did")
SPENT = ("method", "sequential steps", "synchronisations", "tokens", "seeds that did")
RATIOS = ("method", "seed", "sequential steps", "synchronisations", "tokens")
TIE = 1.05


class Cost(NamedTuple):
    """The cost of a run when it first reached a loss."""

    updates: int
    communications: int
    tokens: int


def cost(line: dict, target: float) -> Cost | None:
    """Return what a run had spent when it first reached the loss `target`; None if it never did.

    Args:
      line: The run's line of the results file.
      target: The loss, in nats per token.
    """
    syncs = "updates" if line["variant"].startswith("data parallel:") else "syncs"
    for point in line["curve"]:
        if point["loss"] <= target:
            return Cost(*(int(point[name]) for name in ("updates", syncs, "tokens")))
    return None


def middle(costs: Sequence[Cost | None]) -> Cost | None:
    """Return the cost of the median seed. Seeds are ranked by their sequential steps.

    Runs that never reached the loss rank last.
    """
    ranked = sorted(costs, key=lambda spent: (spent is None, spent or ()))
    return ranked[len(ranked) // 2]


def chosen(lines: Iterable[dict], target: float) -> list[tuple[str, ...]]:
    """Return a row for each method: its best trial, with the columns of `CHOICE`."""
    methods: dict[str, dict[str, list[Cost | None]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        method, _, setting = line["variant"].partition(": ")
        methods[method][setting].append(cost(line, target))
    rows = []
    for method, trials in methods.items():
        middles = {setting: middle(costs) for setting, costs in trials.items()}
        reached = {setting: spent for setting, spent in middles.items() if spent is not None}
        share = f"{len(reached)} of {len(trials)}"
        if not reached:
            rows.append((method, "-", "-", "-", "-", share))
            continue
        fewest = min(spent.updates for spent in reached.values())
        near = {s: spent for s, spent in reached.items() if spent.updates <= TIE * fewest}
        setting = min(near, key=lambda s: (near[s][1:], near[s].updates))
        rows.append((method, setting, *(f"{number:,}" for number in near[setting]), share))
    return rows


def by_method(lines: Iterable[dict], target: float) -> dict[str, dict[int, Cost | None]]:
    """Return the cost of each run, by method and seed. Each method has one setting."""
    found: dict[str, dict[int, Cost | None]] = defaultdict(dict)
    for line in lines:
        found[line["variant"].partition(": ")[0]][line["seed"]] = cost(line, target)
    return found


def spent(costs: dict[str, dict[int, Cost | None]]) -> list[tuple[str, ...]]:
    """Return a row for each method: median (range) of its costs over the seeds that reached it."""
    rows = []
    for method, seeds in costs.items():
        reached = [found for found in seeds.values() if found is not None]
        cells = [
            f"{statistics.median_low(column):,} ({min(column):,} to {max(column):,})"
            for column in zip(*reached, strict=True)
        ]
        rows.append((method, *(cells or "---"), f"{len(reached)} of {len(seeds)}"))
    return rows


def ratios(costs: dict[str, dict[int, Cost | None]], baseline: str) -> list[tuple[str, ...]]:
    """Return a row for each other method and seed: its cost divided by that of the baseline.

    The baseline's cost is that of the same seed.
    """
    rows = []
    for method, seeds in costs.items():
        for seed, found in sorted(seeds.items()) if method != baseline else ():
            other = costs[baseline].get(seed)
            cells = ["-"] * 3
            if found is not None and other is not None:
                pairs = zip(found, other, strict=True)
                cells = [f"{ours / base:.2f}" if base else "-" for ours, base in pairs]
            rows.append((method, str(seed), *cells))
    return rows


def show(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a title and a Markdown table."""
    print(f"{title}\n\n{markdown_table([header, *rows])}\n")


def main() -> int:
    """Print the tables of each target loss; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", choices=("choose", "claims"))
    parser.add_argument("results", type=Path, help="of adloco compare --results")
    parser.add_argument("--target", type=float, nargs="+", required=True, help="nats per token")
    parser.add_argument("--over", nargs="*", default=("DiLoCo", "trunk"), help="whose ratios")
    options = parser.parse_args()
    try:
        lines = list(results.read(options.results).values())
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    for target in options.target:
        if options.table == "choose":
            show(f"to {target:g} nats/token, {len(lines)} trials", CHOICE, chosen(lines, target))
            continue
        costs = by_method(lines, target)
        show(f"to {target:g} nats/token, {len(lines)} runs", SPENT, spent(costs))
        for baseline in (name for name in options.over if name in costs):
            show(f"over {baseline}'s, to {target:g} nats/token", RATIOS, ratios(costs, baseline))
    return 0


if __name__ == "__main__":
    sys.exit(main())
