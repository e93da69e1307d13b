"""Which trial of each method reaches a loss first, from the lines of a comparison's results.

python scripts/choose_trials.py docs/study/small_tuning.jsonl --target 1.6

Trials are variants named "method: setting". The fewest serial updates win; of those within 5 % the
fewest communications, then the fewest tokens. A method named "data parallel" is one worker with the
pool's batch, which communicates once per update (configs/compare_study.py).
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

from adloco_jax.errors import UserError
from adloco_jax.study import results

COLUMNS = ("method", "setting", "updates", "communications", "tokens", "trials that did")
TIE = 1.05


def cost(line: dict, target: float) -> tuple[int, int, int] | None:
    """Serial updates, communications and tokens of a run when it first had the loss; or None."""
    for point in line["curve"]:
        if point["loss"] <= target:
            updates = int(point["updates"])
            is_parallel = line["variant"].startswith("data parallel:")
            return updates, updates if is_parallel else int(point["syncs"]), int(point["tokens"])
    return None


def chosen(lines: list[dict], target: float) -> list[tuple[str, ...]]:
    """A row for each method, as `COLUMNS` has it."""
    methods: dict[str, dict[str, tuple[int, int, int] | None]] = defaultdict(dict)
    for line in lines:
        method, _, setting = line["variant"].partition(": ")
        methods[method][setting] = cost(line, target)
    rows = []
    for method, trials in methods.items():
        reached = {setting: spent for setting, spent in trials.items() if spent is not None}
        share = f"{len(reached)} of {len(trials)}"
        if not reached:
            rows.append((method, "-", "-", "-", "-", share))
            continue
        fewest = min(spent[0] for spent in reached.values())
        near = {s: spent for s, spent in reached.items() if spent[0] <= TIE * fewest}
        setting = min(near, key=lambda s: (near[s][1:], near[s][0]))
        rows.append((method, setting, *(f"{number:,}" for number in near[setting]), share))
    return rows


def main() -> int:
    """Prints the table of each target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, help="of adloco compare --results")
    parser.add_argument("--target", type=float, nargs="+", required=True, help="nats per token")
    options = parser.parse_args()
    try:
        lines = list(results.read(options.results).values())
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    for target in options.target:
        print(f"to {target:g} nats/token, {len(lines)} trials\n")
        for row in (COLUMNS, ("---",) * len(COLUMNS), *chosen(lines, target)):
            print(f"| {' | '.join(row)} |")
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
