"""The rows of studies/conformance.md on training results, from committed figures of runs."""

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

from studies import results
from studies.published import NANOGPT_CHAR_LOSS, SCALING_ORDER, Row

STUDIES = Path(__file__).parent


def shakespeare() -> list[Row]:
    """A row for each variant."""
    rows = []
    for name, lines in _recorded("shakespeare").items():
        heldout = _heldout(lines)
        middle = statistics.median(heldout)
        train = statistics.median(line["train_loss"] for line in lines)
        rows.append(
            Row(
                name,
                f"{NANOGPT_CHAR_LOSS}",
                f"{middle:.3f} ({heldout[0]:.3f} to {heldout[-1]:.3f}), training {train:.3f}",
                f"{middle - NANOGPT_CHAR_LOSS:+.3f}",
            )
        )
    return rows


def order() -> list[Row]:
    """A row for each pair of neighbours in the paper's order, the lower loss first."""
    rows = []
    found = {name: _heldout(lines) for name, lines in _recorded("order").items()}
    for low, high in itertools.pairwise(SCALING_ORDER):
        first, second = found[low], found[high]
        verdict = "same order" if first[-1] < second[0] else "not resolved: the ranges overlap"
        shown = (f"{statistics.median(x):.3f} ({x[0]:.3f} to {x[-1]:.3f})" for x in (first, second))
        rows.append(
            Row(
                f"{low} below {high}",
                f"{SCALING_ORDER[low]} < {SCALING_ORDER[high]}",
                ", ".join(shown),
                "reverse order" if second[-1] < first[0] else verdict,
            )
        )
    return rows


def _recorded(name: str) -> dict[str, list[dict]]:
    """The runs of a record by variant."""
    found: dict[str, list[dict]] = {}
    for line in results.read(STUDIES / f"{name}.jsonl").values():
        found.setdefault(line["variant"], []).append(line)
    return found


def _heldout(lines: Sequence[dict]) -> list[float]:
    return sorted(line["curve"][-1]["loss"] for line in lines)
