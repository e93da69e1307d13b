"""The account of one run, from its ledger alone: a closing table and a figure."""

import itertools
import json
import math
import os
import textwrap
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator

from adloco_jax.errors import DataError
from adloco_jax.run import ledger

# Okabe and Ito's colours without black (the consensus) and yellow (too pale for a line). The
# markers tell trainers apart in grey print, and with seven of them to six colours no pair
# repeats before the 43rd trainer.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")

_HEADER = ("trainer", "rounds", "merged into", "batch", "accum", "tokens", "updates", "train loss")


def closing_table(workdir: str | os.PathLike[str]) -> str:
    """Sets the table that ends a run: a line per trainer, then the totals.

    Args:
      workdir: The run's folder. A run that was cut short, or still goes on, gives the table of
        what it has done so far.

    Returns:
      Plain text of several lines, at most 80 columns for the usual magnitudes.

    Raises:
      DataError: If the folder holds no ledger, or a damaged one.
    """
    events = ledger.read(Path(workdir) / "ledger.jsonl")
    absorbed_by = {
        member: merge["into"]
        for merge in _lines(events, "merge")
        for member in merge["members"]
        if member != merge["into"]
    }
    rows = [_HEADER]
    for trainer, rounds in _by_trainer(_lines(events, "round")).items():
        first, last = rounds[0], rounds[-1]
        rows.append(
            (
                str(trainer),
                f"{first['round']}-{last['round']}",
                str(absorbed_by.get(trainer, "-")),
                f"{first['requested_batch_size']} -> {last['requested_batch_size']}",
                str(last["num_accum_steps"]),
                f"{sum(e['tokens'] for e in rounds):,}",
                f"{sum(e['updates'] for e in rounds):,}",
                _number(last["train_loss"]),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    lines.append("")
    lines += [f"{name:<16}{value}" for name, value in _described(_totals(events))]
    return "\n".join(lines)


def draw(workdir: str | os.PathLike[str]) -> Path:
    """Writes `report/summary.png` and, with the table's totals as numbers, `report/summary.json`.

    The figure has loss, batch sizes and trainers alive, over tokens and over communications
    (blocking synchronisations, summed over trainers).

    Args:
      workdir: The run's folder, of a finished run or of one that still goes on.

    Returns:
      The path of the figure.

    Raises:
      DataError: If the folder holds no ledger, a damaged one, or one without a finished round.
    """
    workdir = Path(workdir)
    events = ledger.read(workdir / "ledger.jsonl")
    if not _lines(events, "round"):
        raise DataError(
            f"{workdir / 'ledger.jsonl'}: no round has finished yet, so there is nothing to draw; "
            f"let the run reach the end of round 1"
        )
    folder = workdir / "report"
    folder.mkdir(exist_ok=True)
    totals = json.dumps(_totals(events), indent=2, allow_nan=False)
    (folder / "summary.json").write_text(totals + "\n", encoding="utf-8")
    _figure(events).savefig(folder / "summary.png", dpi=150)
    return folder / "summary.png"


def _lines(events: Sequence[dict], name: str) -> list[dict]:
    return [event for event in events if event["event"] == name]


def _by_trainer(lines: Sequence[dict]) -> dict[int, list[dict]]:
    """Lines by the trainer's id, ids ascending; lines on the consensus are left out."""
    trainers = sorted({e["trainer"] for e in lines if e["trainer"] != "consensus"})
    return {trainer: [e for e in lines if e["trainer"] == trainer] for trainer in trainers}


def _consensus(events: Sequence[dict]) -> list[dict]:
    return [e for e in _lines(events, "eval") if e["trainer"] == "consensus"]


def _totals(events: Sequence[dict]) -> dict[str, int | float | str | None]:
    """The run in numbers; None for what the ledger does not tell (yet), or was not finite."""
    rounds, merges, programs = (_lines(events, name) for name in ("round", "merge", "compile"))
    start = next(iter(_lines(events, "start")), {})
    final = next(reversed(_consensus(events)), {})
    loss = final.get("loss")
    tokens_per_byte = start.get("tokens_per_byte")
    nats_per_byte = None if loss is None or tokens_per_byte is None else loss * tokens_per_byte
    return {
        "rounds": max((e["round"] for e in rounds), default=0),
        "tokens_total": sum(e["tokens"] for e in rounds),
        "updates_total": sum(e["updates"] for e in rounds),
        "syncs_total": sum(e["syncs"] for e in rounds),
        "bytes_total": sum(e["bytes"] for e in [*rounds, *merges]),
        "num_merges": len(merges),
        "num_refusals": len(_lines(events, "refusal")),
        "num_batch_growths": sum(e["next_batch_size"] > e["requested_batch_size"] for e in rounds),
        "first_accumulating_round": min(
            (e["round"] for e in rounds if e["num_accum_steps"] > 1), default=None
        ),
        "num_programs": len(programs),
        "num_programs_cached": sum(e["cache"] == "hit" for e in programs),
        "compile_s": sum(e["seconds"] for e in programs),
        **_memory(events),
        "wall_s": max((e["wall_s"] for e in events if e.get("wall_s") is not None), default=None),
        "loss": loss,
        "loss_round": final.get("round"),
        "loss_source": final.get("source"),
        "perplexity": final.get("perplexity"),
        "accuracy": final.get("accuracy"),
        "classes": final.get("classes"),
        "nats_per_byte": nats_per_byte,
        "bits_per_byte": None if nats_per_byte is None else nats_per_byte / math.log(2),
    }


def _memory(events: Sequence[dict]) -> dict[str, int | None]:
    """Bytes: the most that was held, of a device the fullest one's, and the largest program's."""
    measured = _lines(events, "memory")
    device = [peak for e in measured for peak in e["device_peak_bytes"] if peak is not None]
    needed = [e["needed_bytes"] for e in _lines(events, "compile") if e.get("needed_bytes")]
    return {
        "host_peak_bytes": max((e["host_peak_bytes"] for e in measured), default=None),
        "device_peak_bytes": max(device, default=None),
        "program_bytes": max(needed, default=None),
    }


def _memory_in_words(totals: dict) -> str:
    named = {
        "host {} peak": totals["host_peak_bytes"],
        "device {} peak": totals["device_peak_bytes"],
        "largest program {}": totals["program_bytes"],
    }
    known = [text.format(_bytes(value)) for text, value in named.items() if value is not None]
    return ", ".join(known) or "-"


def _described(totals: dict) -> list[tuple[str, str]]:
    """The totals in words: name and value of each line."""
    refused, accumulating = totals["num_refusals"], totals["first_accumulating_round"]
    described = [
        ("rounds", f"{totals['rounds']:,}"),
        ("tokens", f"{totals['tokens_total']:,}"),
        ("updates", f"{totals['updates_total']:,}"),
        (
            "communications",
            f"{totals['syncs_total']:,} blocking, summed over trainers; "
            f"{_bytes(totals['bytes_total'])} moved",
        ),
        ("merges", f"{totals['num_merges']}" + (f", {refused} refused" if refused else "")),
        (
            "batch growths",
            f"{totals['num_batch_growths']}"
            + (f", accumulating from round {accumulating}" if accumulating else ""),
        ),
        (
            "programs",
            f"{totals['num_programs']} compiled in {_seconds(totals['compile_s'])}, "
            f"{totals['num_programs_cached']} of them from the cache",
        ),
        ("memory", _memory_in_words(totals)),
        ("wall time", _seconds(totals["wall_s"])),
    ]
    if totals["loss_round"] is None:
        return [*described, ("held-out loss", "not evaluated")]
    measured = f"consensus ({totals['loss_source']}) after round {totals['loss_round']}"
    if totals["loss"] is None:
        return [*described, ("held-out loss", f"not finite, {measured}")]
    if totals["classes"] is not None:
        described += [
            ("held-out loss", f"{_number(totals['loss'])} nats/example, {measured}"),
            ("accuracy", _number(totals["accuracy"])),
        ]
        for label, scores in enumerate(totals["classes"]):
            named = {name: scores[name] for name in ("precision", "recall", "f1")}
            shown = [f"{name} {_number_or_dash(value)}" for name, value in named.items()]
            described.append((f"class {label}", f"{', '.join(shown)}, of {scores['support']}"))
        return described
    described += [
        ("held-out loss", f"{_number(totals['loss'])} nats/token, {measured}"),
        ("perplexity", _number(totals["perplexity"])),
    ]
    if totals["nats_per_byte"] is not None:
        described.append(("nats per byte", _number(totals["nats_per_byte"])))
        described.append(("bits per byte", _number(totals["bits_per_byte"])))
    return described


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}" if value < 1e5 else f"{value:.3e}"


def _number_or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f} s" if value < 60 else str(timedelta(seconds=round(value)))


def _bytes(value: float) -> str:
    power = min(4, max(0, int(value).bit_length() - 1) // 10)
    return f"{value / 1024**power:,.4g} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _figure(events: Sequence[dict]) -> Figure:
    """Loss, batch sizes and trainers alive (rows) over tokens and communications (columns)."""
    rounds = _lines(events, "round")
    start = next(iter(_lines(events, "start")), {})
    num_rounds = max(e["round"] for e in events if e["event"] in ("round", "eval", "merge"))
    columns = {"tokens, all trainers": _cumulative(rounds, "tokens", num_rounds)}
    syncs = _cumulative(rounds, "syncs", num_rounds)
    if syncs[-1] > 0:  # over a count that stays zero there is no curve to see
        columns["communications (synchronisations, all trainers)"] = syncs
    width = 1.5 + 4.75 * len(columns)  # inches
    figure = Figure(figsize=(width, 8), layout="constrained")
    grid = figure.subplots(
        3, len(columns), sharex="col", sharey="row", squeeze=False, height_ratios=(5, 5, 2)
    )
    for (label, x), (loss, batch, alive) in zip(columns.items(), grid.T, strict=True):
        _draw_loss(loss, events, x)
        _draw_batches(batch, rounds, x, max_batch_size=start.get("max_batch_size"))
        _draw_alive(alive, rounds, x)
        for ax in (loss, batch, alive):
            for merge in _lines(events, "merge"):
                ax.axvline(x[merge["round"]], color="0.4", lw=1, ls="-.", zorder=1, label="merge")
            ax.grid(color="0.92")
            ax.set_axisbelow(True)
            ax.spines[["top", "right"]].set_visible(False)
            ax.label_outer()
        alive.set_xlabel(label)
        alive.xaxis.set_major_formatter(EngFormatter(sep=" "))
        alive.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        alive.set_xlim(-0.03 * x[-1], 1.03 * x[-1])
    labelled = (ax.get_legend_handles_labels() for ax in grid[:, 0])
    legend = {text: line for pair in labelled for line, text in zip(*pair, strict=True)}
    num_rows = math.ceil(len(legend) / (0.65 * width))
    ncols = math.ceil(len(legend) / num_rows)
    figure.legend(legend.values(), legend, loc="outside upper center", ncols=ncols, frameon=False)
    figure.align_ylabels()
    memory = _memory_in_words(_memory(events))
    caption = _caption(start, memory=memory, width=round(15 * width), has_syncs=len(columns) > 1)
    # A label of the whole figure, because the layout keeps room for it; commands may hold a "$".
    figure.supxlabel(caption, fontsize=8, x=0.01, ha="left", parse_math=False)
    return figure


def _cumulative(rounds: Sequence[dict], name: str, num_rounds: int) -> list[int]:
    """The field summed over trainers and over rounds up to each; entry 0 is before the first."""
    per_round = [0] * (1 + num_rounds)
    for line in rounds:
        per_round[line["round"]] += line[name]
    return list(itertools.accumulate(per_round))


def _draw_loss(ax: Axes, events: Sequence[dict], x: Sequence[int]) -> None:
    """Held-out loss by trainer and of the consensus; before any evaluation, training loss."""
    evals = _lines(events, "eval")
    lines, field = (evals, "loss") if evals else (_lines(events, "round"), "train_loss")
    unit = "example" if any("classes" in e for e in evals) else "token"
    ax.set_ylabel(f"{'held-out' if evals else 'training'} loss (nats/{unit})")
    if all(line[field] is None for line in lines):
        ax.text(
            0.5, 0.5, "no finite loss", ha="center", transform=ax.transAxes, backgroundcolor="white"
        )
        ax.set_yticks([])
    curves = [(own, _style(trainer)) for trainer, own in _by_trainer(lines).items()]
    if evals:  # beneath the thin lines: the consensus is often one of the trainers
        bold = {"color": "black", "lw": 3, "marker": ".", "ms": 10, "zorder": 1.5}
        curves.append((_consensus(events), bold | {"label": "consensus"}))
    for own, style in curves:
        loss = [math.nan if e[field] is None else e[field] for e in own]
        ax.plot([x[e["round"]] for e in own], loss, markevery=_every(own), **style)


def _draw_batches(
    ax: Axes, rounds: Sequence[dict], x: Sequence[int], *, max_batch_size: int | None
) -> None:
    """Requested (solid) and effective (dashed) batch per worker, as steps on a log2 axis."""
    ax.set_ylabel("batch per worker (sequences)")
    sizes = []
    for trainer, own in _by_trainer(rounds).items():
        edges = [x[own[0]["round"] - 1], *(x[e["round"]] for e in own)]
        requested = [e["requested_batch_size"] for e in own]
        effective = [e["micro_batch_size"] * e["num_accum_steps"] for e in own]
        style = _style(trainer) | {"drawstyle": "steps-post"}
        ax.plot(edges, [*effective, effective[-1]], **style | {"marker": "", "ls": "--"})
        ax.plot(edges, [*requested, requested[-1]], markevery=_every(own), **style)
        sizes += requested + effective
    ax.plot([], [], color="0.4", ls="--", lw=1, label="effective batch")
    if max_batch_size is not None:
        ax.axhline(max_batch_size, color="black", ls=":", lw=1, zorder=1, label="max_batch_size")
        sizes.append(max_batch_size)
    ax.set_yscale("log", base=2)
    lowest, highest = math.floor(math.log2(min(sizes))), math.ceil(math.log2(max(sizes)))
    ax.set_ylim(0.8 * 2**lowest, 1.25 * 2**highest)
    ax.yaxis.set_major_locator(LogLocator(base=2))
    ax.yaxis.set_major_formatter("{x:.0f}")
    ax.yaxis.set_minor_locator(NullLocator())


def _draw_alive(ax: Axes, rounds: Sequence[dict], x: Sequence[int]) -> None:
    """Trainers that took part in each round."""
    ax.set_ylabel("trainers alive")
    alive = Counter(e["round"] for e in rounds)
    edges = [x[min(alive) - 1], *(x[number] for number in alive)]
    counts = list(alive.values())
    ax.plot(edges, [*counts, counts[-1]], drawstyle="steps-post", color="black", lw=2)
    ax.set_ylim(0, max(counts) + 0.5)
    ax.yaxis.set_major_locator(MaxNLocator(4, integer=True, min_n_ticks=1))


def _style(trainer: int) -> dict[str, Any]:
    """How a trainer's curves look, the same in every panel; earlier ones show under later ones."""
    return {
        "color": _COLORS[trainer % len(_COLORS)],
        "marker": _MARKERS[trainer % len(_MARKERS)],
        "lw": 1.2,
        "ms": 4,
        "label": f"trainer {trainer}",
    }


def _every(lines: Sequence[dict]) -> int:
    """Lines from one marker to the next, so that a long curve carries about ten."""
    return max(1, len(lines) // 10)


def _caption(start: dict, *, memory: str, width: int, has_syncs: bool) -> str:
    """What the figure shows, and the command it came from where the ledger names one."""
    name = start.get("run", "unnamed")
    shown = (
        f"Run {name}. Top: loss by trainer (thin) and of the consensus (bold). Middle: batch per "
        f"worker that the test requested (solid) and that updates used (dashed). Bottom: trainers "
        f"that took part in the round. "
    )
    if has_syncs:
        shown += (
            "Left: over the tokens of all trainers. Right: over blocking synchronisations, summed "
            "over trainers; a trainer with one worker has none, so where all have one the curves "
            "move straight up or down."
        )
    else:
        shown += "No trainer had more than one worker, so there are no communications to draw over."
    if memory != "-":
        shown += f" Memory: {memory}."
    command = f"Command: {start['command']}" if start.get("command") else ""
    return "\n".join(textwrap.wrap(shown, width) + textwrap.wrap(command, width, max_lines=3))
