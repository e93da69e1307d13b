"""Tables of the study in studies/RESULTS.md, from the lines of a comparison's results.

python -m studies.tables choose studies/small_tuning.jsonl --target 1.6
python -m studies.tables claims studies/small.jsonl --target 1.6

Variants have names of the form "method: setting". For each method, `choose` prints its best trial:
the one whose median seed reaches a loss with the fewest sequential steps. Among trials within 5 %
of it, the one with the fewest synchronisations wins, then the one with the fewest tokens. `claims`
prints what each method spends until it reaches the loss, over seeds. `front` prints the costs of
methods with rounds of several lengths, and compares them at equal cost.

Costs are interpolated between the two evaluations around the loss (`compare.to_reach`). A method
named "data parallel" runs as one worker with the batch of all workers, so each of its updates
counts as one synchronisation of four workers (studies/methods.py).
"""

import argparse
import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from adloco_jax.study.summary import markdown
from studies import results
from studies.compare import to_reach

CHOICE = ("method", "setting", "updates", "synchronisations", "tokens", "trials that did")
SPENT = ("method", "sequential steps", "synchronisations", "tokens", "MB", "seeds that did", "p")
FRONT = (
    *SPENT,
    *("steps at equal synchronisations", "synchronisations at equal steps"),
    *("steps at equal bytes", "bytes at equal steps"),
)
TIE = 1.05


class Cost(NamedTuple):
    """The cost of a run when it first reached a loss."""

    updates: float
    communications: float
    tokens: float
    bytes: float


def cost(line: dict, target: float) -> Cost | None:
    """Return what a run had spent when it first reached the loss `target`; None if it never did.

    Args:
      line: The run's line of the results file.
      target: The loss, in nats per token.
    """
    point = to_reach(line["curve"], target)
    if point is None:
        return None
    syncs, moved = point["syncs"], point["bytes"]
    if line["variant"].startswith("data parallel"):
        syncs = point["updates"]
        moved = syncs * 2 * (4 - 1) * 4 * line["start"]["num_params"]  # float32, four workers
    return Cost(point["updates"], syncs, point["tokens"], moved)


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
        updates, syncs, tokens, _ = near[setting]
        rows.append((method, setting, f"{updates:,.0f}", f"{syncs:,.1f}", f"{tokens:,.0f}", share))
    return rows


def by_method(lines: Iterable[dict], target: float) -> dict[str, dict[int, Cost | None]]:
    """Return the cost of each run, by method and seed. Each method has one setting."""
    found: dict[str, dict[int, Cost | None]] = defaultdict(dict)
    for line in lines:
        found[line["variant"].partition(": ")[0]][line["seed"]] = cost(line, target)
    return found


def spent(
    costs: Mapping[str, dict[int, Cost | None]], baseline: str = "DiLoCo"
) -> list[tuple[str, ...]]:
    """Return a row for each method: median (range) of its costs over the seeds that reached it.

    `p` is that of the difference in steps to the baseline (`permutation_p`), or to the baseline's
    row with rounds of the same length, such as "DiLoCo, 110" for "pool, 110".
    """
    rows, names = [], ("updates", "communications", "tokens", "bytes")
    for method, seeds in costs.items():
        _, separator, length = method.partition(", ")
        reached, others = (_reached(costs.get(name, {})) for name in (method, baseline))
        if separator and length.isdigit():
            others = _reached(costs.get(f"{baseline}, {length}", {}))
        cells = []
        for name in names if reached else ():
            column = [getattr(found, name) / (1e6 if name == "bytes" else 1) for found in reached]
            shown = "{:,.1f}" if name in ("communications", "bytes") else "{:,.0f}"
            values = statistics.median_low(column), min(column), max(column)
            cells.append("{} ({} to {})".format(*map(shown.format, values)))
        share = f"{len(reached)} of {len(seeds)}"
        steps = [[found.updates for found in each] for each in (reached, others)]
        p = f"{permutation_p(*steps):.3f}" if all(steps) and steps[0] != steps[1] else "-"
        rows.append((method, *(cells or "----"), share, p))
    return rows


def permutation_p(these: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the exact p-value of a difference of two means, two-sided, by permuting the values.

    With n seeds each it is at least 2 / C(2n, n): 0.1 for three, 0.008 for five.
    """
    pooled, total = [*these, *theirs], sum(these) + sum(theirs)

    def difference(some: Sequence[float]) -> float:
        return abs(sum(some) / len(these) - (total - sum(some)) / len(theirs))

    found = [difference(some) for some in itertools.combinations(pooled, len(these))]
    return sum(value >= difference(these) - 1e-9 for value in found) / len(found)


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The Pareto front of points, where low is good, sorted by the first coordinate."""
    best: list[tuple[float, float]] = []
    for point in sorted(set(points)):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def fronts(
    costs: Mapping[str, dict[int, Cost | None]], baseline: str = "DiLoCo"
) -> list[tuple[str, ...]]:
    """Return `spent`'s rows with ratios to the baseline's front, at equal cost.

    The front has the medians of the baseline's rows, one for each length of rounds, without those
    that another beats in both costs. Between its points steps are linear in the logarithm of the
    other cost; beyond its ends there is no ratio.
    """
    medians = {method: middle([*seeds.values()]) for method, seeds in costs.items()}
    rows = []
    for row in spent(costs, baseline):
        at, cells = medians[row[0]], ["-"] * 4
        for index, name in enumerate(("communications", "bytes")):
            points = [
                (getattr(found, name), found.updates)
                for method, found in medians.items()
                if found is not None and method.partition(", ")[0] == baseline
            ]
            edge = [(np.log(x), y) for x, y in front(points)]
            if at is None or not edge or not getattr(at, name):
                continue
            x, y = (np.array(values) for values in zip(*edge, strict=True))
            own = np.log(getattr(at, name))
            steps = np.interp(own, x, y, left=np.nan, right=np.nan)
            other = np.interp(at.updates, y[::-1], x[::-1], left=np.nan, right=np.nan)
            found = at.updates / steps, np.exp(own - other)
            cells[2 * index : 2 * index + 2] = [
                "-" if np.isnan(value) else f"{value:.2f}" for value in found
            ]
        rows.append((*row, *cells))
    return rows


def _reached(seeds: Mapping[int, Cost | None]) -> list[Cost]:
    return [found for found in seeds.values() if found is not None]


TABLES = {
    "choose": (CHOICE, chosen),
    "claims": (SPENT, lambda lines, target: spent(by_method(lines, target))),
    "front": (FRONT, lambda lines, target: fronts(by_method(lines, target))),
}


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of plain text as a table in Markdown; the first row is its header."""
    header, *body = [f"| {' | '.join(map(markdown, row))} |" for row in rows]
    return "\n".join([header, "|" + "---|" * len(rows[0]), *body])


def show(title: str, kind: str, lines: Sequence[dict], target: float) -> None:
    """Print a title and a table of `TABLES` in Markdown."""
    header, rows_of = TABLES[kind]
    print(f"{title}\n\n{markdown_table([header, *rows_of(lines, target)])}\n")


def main() -> None:
    """Print the tables of each target loss."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("results", type=Path, help="a record")
    parser.add_argument("--target", type=float, nargs="+", required=True, help="nats per token")
    options = parser.parse_args()
    lines = list(results.read(options.results).values())
    for target in options.target:
        show(f"to {target:g} nats/token, {len(lines)} runs", options.table, lines, target)


if __name__ == "__main__":
    main()
