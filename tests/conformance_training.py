"""The lines of docs/conformance.md on training results, from runs whose figures are committed."""

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

from published import NANOGPT_CHAR_LOSS, SCALING_ORDER, Row

from adloco_jax.study import results
from adloco_jax.study.compare import Comparison, runs_of
from studies import compare_order_seeds, compare_shakespeare

STUDY = Path(__file__).parents[1] / "studies"
SHAKESPEARE, ORDER = STUDY / "shakespeare.jsonl", STUDY / "order.jsonl"


def shakespeare(recorded: Path = SHAKESPEARE) -> list[Row]:
    """A line per variant."""
    comparison = compare_shakespeare.get_comparison()
    num_runs = len(comparison.seeds)
    return [
        Row(
            "nanoGPT, README: Shakespeare by characters on a CPU",
            f"4 layers of width 128, 1.54 M characters; {name}",
            f"loss {NANOGPT_CHAR_LOSS}",
            *_loss(lines, num_runs=num_runs),
        )
        for name, lines in _recorded(comparison, recorded).items()
    ]


def order(recorded: Path = ORDER) -> list[Row]:
    """A line per pair of neighbours in the paper's order, of which the first has the lower loss."""
    comparison = compare_order_seeds.get_comparison()
    found, num_runs = _recorded(comparison, recorded), len(comparison.seeds)
    return [
        Row(
            "Scaling Laws, table of losses: 35 M parameters",
            f"0.39 M parameters, 7.9 M tokens, {num_runs} seeds; {low} below {high}",
            f"{SCALING_ORDER[low]} < {SCALING_ORDER[high]}",
            *_pair(found[low], found[high], num_runs=num_runs),
        )
        for low, high in itertools.pairwise(SCALING_ORDER)
    ]


def _recorded(comparison: Comparison, path: Path) -> dict[str, list[dict]]:
    """Finished runs by variant; those of another config than today's do not count."""
    found, lines = results.read(path), {name: [] for name in comparison.variants}
    for run in runs_of(comparison, ""):
        if (key := results.key(run)) in found:
            lines[run.variant].append(found[key])
    return lines


def _pair(low: Sequence[dict], high: Sequence[dict], *, num_runs: int) -> tuple[str, str]:
    """Both held-out losses, and whether the first one's are the lower ones."""
    if min(len(low), len(high)) < num_runs:
        return "not run yet", "not run yet"
    losses = [_heldout(lines) for lines in (low, high)]
    ours = " against ".join(
        f"{statistics.median(x):.3f} ({x[0]:.3f} to {x[-1]:.3f})" for x in losses
    )
    if losses[0][-1] < losses[1][0]:
        return ours, "the same order"
    is_reversed = losses[1][-1] < losses[0][0]
    return ours, "the reverse order" if is_reversed else "not resolved: the ranges overlap"


def _loss(lines: Sequence[dict], *, num_runs: int) -> tuple[str, str]:
    """Losses at the runs' ends, and how far the held-out ones are from the published one."""
    if not lines:
        return "not run yet", "not run yet"
    heldout = _heldout(lines)
    middle = statistics.median(heldout)
    train = statistics.median(line["train_loss"] for line in lines)
    spread = f"{heldout[0]:.3f} to {heldout[-1]:.3f}, {len(lines)} of {num_runs} seeds"
    return (
        f"held out {middle:.3f} ({spread}), last training round {train:.3f}",
        f"{middle - NANOGPT_CHAR_LOSS:+.3f}",
    )


def _heldout(lines: Sequence[dict]) -> list[float]:
    return sorted(line["curve"][-1]["loss"] for line in lines)
