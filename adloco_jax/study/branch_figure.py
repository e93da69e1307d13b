"""The critical batch over a run: as branches measured it, and as the noise scale estimates it."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from adloco_jax.errors import DataError
from adloco_jax.study.curves import SPENDING, lines
from adloco_jax.study.figures import finish, plain_decades


def measured(events: Sequence[dict]) -> list[dict]:
    """What each branch round says of the critical batch, in sequences of all workers together.

    Args:
      events: A ledger's lines.

    Returns:
      In order: `tokens` of the run by the round's end; `passed`, the largest batch that lost
      nothing; `failed`, the next larger one that was tried, None if none was.

    Raises:
      DataError: If the ledger has no branch round.
    """
    spent, workers, found = 0, 1, []
    for event in lines(events, *SPENDING):
        spent += event.get("tokens", 0)
        if event["event"] == "round":
            workers = event["workers"]
        elif event["event"] == "branch":
            larger = [size for size in event["batch_sizes"] if size > event["chosen"]]
            failed = workers * min(larger) if larger else None
            found.append({"tokens": spent, "passed": workers * event["chosen"], "failed": failed})
    if not found:
        raise DataError("the ledger has no branch round; give a run with batching.test=branch")
    return found


def figure(events: Sequence[dict]) -> Figure:
    """Draw the batch in use, the branches' answers and the noise scale over tokens.

    Args:
      events: A ledger's lines.

    Returns:
      The figure, for print at 150 dots per inch.

    Raises:
      DataError: If the ledger has no branch round.
    """
    found = measured(events)
    spent, x, batch, scale, raw = 0, [0], [], [], []
    for event in lines(events, *SPENDING):
        spent += event.get("tokens", 0)
        if event["event"] != "round":
            x[-1] = spent
            continue
        workers = event["workers"]
        x.append(spent)
        batch.append(workers * event["requested_batch_size"])
        scale.append(workers * (event["test_value"] or np.nan))
        noise, signal = event["noise"], event["signal"]
        raw.append(noise / signal if noise is not None and (signal or 0) > 0 else np.nan)
    shown = Figure(figsize=(7.0, 3.8), layout="constrained")
    ax = shown.subplots()
    ax.stairs(batch, x, baseline=None, color="black", lw=1.3, label="batch in use")
    ax.plot(x[:-1], raw, ".", color="#E69F00", alpha=0.5, label="noise scale, single rounds")
    ax.plot(x[:-1], scale, color="#D55E00", label="noise scale, averaged")
    passed = [(e["tokens"], e["passed"]) for e in found]
    failed = [(e["tokens"], e["failed"]) for e in found if e["failed"] is not None]
    ax.plot(*zip(*passed, strict=True), "^", color="#0072B2", label="branch: loses nothing")
    if failed:
        mark = {"color": "#0072B2", "mfc": "none", "label": "branch: the next larger, loses"}
        ax.plot(*zip(*failed, strict=True), "v", **mark)
    values = [v for v in (*batch, *scale, *raw, *(y for _, y in passed + failed)) if v > 0]
    ax.set_yscale("log")
    plain_decades(ax, min(values), max(values))
    ax.xaxis.set_major_formatter(EngFormatter())
    ax.set(xlabel="tokens, all branches", ylabel="sequences per update, all workers")
    finish(ax)
    ax.legend(fontsize=8, frameon=False)
    return shown
