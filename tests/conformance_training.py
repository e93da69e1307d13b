"""The lines of docs/conformance.md on training results, from runs whose figures are committed."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from published import NANOGPT_CHAR_LOSS, Row

from adloco_jax.configs import compare_shakespeare
from adloco_jax.study import results
from adloco_jax.study.compare import runs_of

SHAKESPEARE = Path(__file__).parents[1] / "docs" / "study" / "shakespeare.jsonl"


def shakespeare(recorded: Path = SHAKESPEARE) -> list[Row]:
    """A line per variant; runs of another config than today's do not count."""
    found, comparison = results.read(recorded), compare_shakespeare.get_comparison()
    runs = runs_of(comparison, "")
    return [
        Row(
            "nanoGPT, README: Shakespeare by characters on a CPU",
            f"4 layers of width 128, 1.54 M characters; {name}",
            f"loss {NANOGPT_CHAR_LOSS}",
            *_ours(
                [
                    found[key]
                    for run in runs
                    if run.variant == name and (key := results.key(run)) in found
                ],
                num_runs=len(comparison.seeds),
            ),
        )
        for name in comparison.variants
    ]


def _ours(lines: Sequence[dict], *, num_runs: int) -> tuple[str, str]:
    """Losses at the runs' ends, and how far the held-out ones are from the published one."""
    if not lines:
        return "not run yet", "not run yet"
    heldout = sorted(line["curve"][-1]["loss"] for line in lines)
    middle = statistics.median(heldout)
    train = statistics.median(line["train_loss"] for line in lines)
    spread = f"{heldout[0]:.3f} to {heldout[-1]:.3f}, {len(lines)} of {num_runs} seeds"
    return (
        f"held out {middle:.3f} ({spread}), last training round {train:.3f}",
        f"{middle - NANOGPT_CHAR_LOSS:+.3f}",
    )
