"""The rounds of a ledger, as the cluster simulator and the theory read them."""

from collections import defaultdict
from collections.abc import Iterable

from adloco_jax.errors import DataError


def read_rounds(events: Iterable[dict]) -> dict[int, list[dict]]:
    """Group a ledger's `round` lines by round.

    Args:
      events: A ledger's lines, also of a resumed or unfinished run.

    Returns:
      Copies of the lines by round, in order, each with the `start` line before it in field `start`.

    Raises:
      DataError: If the ledger has no start or no round, or if its rounds are not 1, 2, 3, ...
    """
    start, rounds = None, defaultdict(list)
    for event in events:
        if event["event"] == "start":
            start = event
        elif event["event"] == "round" and start is not None:
            rounds[event["round"]].append(event | {"start": start})
    if not rounds:
        raise DataError(
            "the ledger has no start line, or no round after it; let the run reach the end of"
            " round 1"
        )
    if list(rounds) != list(range(1, len(rounds) + 1)):
        shown = ", ".join(map(str, list(rounds)[:8]))
        raise DataError(
            f"the ledger's rounds begin {shown}; expected every one from 1 on, in order"
        )
    return dict(rounds)
