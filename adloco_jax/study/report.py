"""The report on one or more runs: a self-contained web page, and the runs' totals as JSON."""

import json
import os
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from adloco_jax.errors import DataError, counted, in_bytes
from adloco_jax.run.before.describe import ALMOST_ALL, share_read
from adloco_jax.run.kept.folder import change_of, recorded
from adloco_jax.settings import CHATS
from adloco_jax.study import card, chart, curves, loss, page, run_figures, summary
from adloco_jax.study.chart import Panel
from adloco_jax.study.curves import RunRecord, Variant

__all__ = ["conclude", "write"]

# Columns of the table of totals: the name in `_measures`, and the format.
_TOTALS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "loss (nats)": ("loss", summary.number),
    "accuracy": ("accuracy", "{:.3f}".format),
    "tokens": ("tokens_total", summary.short),
    "updates": ("updates_total", summary.short),
    "synchronisations": ("syncs_total", "{:,.0f}".format),
    "moved": ("bytes_total", in_bytes),
    "merges": ("num_merges", "{:.0f}".format),
    "wall time": ("wall_s", summary.seconds),
    "waiting to compile": ("stall_s", summary.seconds),
}


def write(
    runs: Sequence[str | os.PathLike[str]],
    folder: str | os.PathLike[str],
    *,
    labels: Sequence[str] | None = None,
) -> Path:
    """Write the report on runs, finished or not: `index.html`, `loss.svg` and `summary.json`.

    Args:
      runs: The runs' folders.
      folder: Output folder, created if it does not exist. Each file is replaced atomically.
      labels: See `curves.variants`.

    Returns:
      The path of `index.html`, which needs no other file.

    Raises:
      ConfigError: If there are no runs, a run is named twice, or the labels do not fit the runs.
      DataError: If a folder has no ledger, a damaged one, or one without a finished round.
    """
    variants = _read(runs, labels)
    folder = Path(folder)
    words = ["adloco", "report", *map(str, runs), "--out", str(folder)]
    if labels:
        words += ["--labels", *labels]
    panels = loss.charts(variants)
    files = {
        "index.html": _page(variants, panels, shlex.join(words)),
        "loss.svg": chart.document(
            [*panels.values()],
            title=loss.caption(variants),
            caption=f"{loss.caption(variants)} {loss.reading()}",
            columns=2,
            width=1300,
            right_px=180,
        ),
        "summary.json": json.dumps(_summary(variants), indent=2, allow_nan=False) + "\n",
    }
    page.write_files(folder, files)
    return folder / "index.html"


def conclude(workdir: str | os.PathLike[str]) -> None:
    """Print the final table of a finished run; write its report, and the card of its export.

    What cannot be written has a line on stderr; the run is saved already. A card that is there
    already is kept.

    Raises:
      DataError: If the folder has no ledger, or a damaged one.
    """
    print(summary.closing_table(workdir))
    try:
        print(f"report: {write([workdir], Path(workdir) / 'report')}")
        export = Path(workdir) / "export"
        if export.exists() and not (export / card.FILE).exists():
            card.write(export, Path(workdir))
        print(*_next_commands(Path(workdir)), sep="\n")
    except (DataError, OSError) as error:
        print(f"the report or the card was not written: {error}", file=sys.stderr)


def _next_commands(workdir: Path) -> list[str]:
    """Lines on what to do next: generate text, and train on if only some rows were read."""
    run = shlex.quote(str(workdir))
    commands = []
    record = curves.read_run(workdir)
    if card.task_of(workdir / "export") == "text-generation":
        is_chat = record.start["config"]["data"]["text_column"] in CHATS
        option = "--chat" if is_chat else '--prompt "The"'
        commands.append(f"next: adloco generate {run} {option}")

    before = recorded(workdir)
    if before is None or before.made_by == "fit":
        return commands
    settings = before.config
    tokens = summary.totals(record.events)["tokens_total"]
    may_go_on = change_of("num_tokens", settings) == "harmless"
    if share_read(settings, tokens) < ALMOST_ALL and may_go_on:
        whole = settings.num_rows * settings.data.sequence_length
        longer = f"adloco train {run} --config.num_rounds=none --config.num_tokens={whole}"
        commands.append(f"to train on until each row was read once: {longer}")
    return commands


def _read(runs: Sequence[str | os.PathLike[str]], labels: Sequence[str] | None) -> list[Variant]:
    """Read the ledgers of runs, each with a round that has ended, and group them."""
    records = [curves.read_run(run) for run in runs]
    for run in records:
        if not curves.lines(run.events, "round"):
            raise DataError(
                f"{run.folder / 'ledger.jsonl'}: no round has finished yet, so there is nothing to"
                " draw; let the run reach the end of round 1"
            )
    return curves.variants(records, labels=labels)


def _page(variants: Sequence[Variant], panels: Mapping[str, Panel], command: str) -> str:
    runs = [run for variant in variants for run in variant.runs]
    screen = page.figure(page.tabs("loss", panels), loss.caption(variants))
    screen += _totals_table(variants)
    if len(runs) == 1:
        title, parts = f"Run {runs[0].start['run']}", _parts_of(runs[0])
        screen += run_figures.life(runs[0])
    else:
        title = f"{counted(len(variants), 'variant')}, {counted(len(runs), 'run')}"
        parts = {}
    parts["How to read this page, and the commands that made it"] = _runs_table(variants, command)
    return page.page(
        title,
        _lead(variants),
        screen_html=screen,
        details_html="\n".join(page.folded(*part) for part in parts.items()),
        num_curves=0 if len(runs) == 1 else len(variants),
    )


def _lead(variants: Sequence[Variant]) -> str:
    runs = [run for variant in variants for run in variant.runs]
    if len(runs) == 1:
        found = summary.totals(runs[0].events)
        result = dict(summary.totals_as_text(found))["held-out loss"]
        return f"{counted(found['rounds'], 'round')}, {_state(runs[0])}. Held-out loss: {result}."
    return "Point at a row of the table to see its curve alone."


def _totals_table(variants: Sequence[Variant]) -> str:
    """The HTML of the table of totals, a row for each variant; unknown totals have no column."""
    caption = "Synchronisations are blocking and summed over trainers."
    if any(len(variant.runs) > 1 for variant in variants):
        caption += " With several seeds: the median (minimum – maximum)."
    measured = [[_measures(run) for run in variant.runs] for variant in variants]
    rows: list[dict[str, str]] = [{"run": variant.label} for variant in variants]
    for title, (name, shown) in _TOTALS.items():
        values = [[found[name] for found in runs] for runs in measured]
        if any(value is not None for seeds in values for value in seeds):
            for row, seeds in zip(rows, values, strict=True):
                row[title] = _spread(seeds, shown)
    return page.table(caption, rows, is_legend=len(variants) > 1)


def _summary(variants: Sequence[Variant]) -> dict:
    """The content of `summary.json`: the totals of a single run, or of each variant's runs."""
    if len(variants) == 1 and len(variants[0].runs) == 1:
        return summary.totals(variants[0].runs[0].events)
    return {
        variant.label: [
            {"folder": str(run.folder), "seed": run.seed, **summary.totals(run.events)}
            for run in variant.runs
        ]
        for variant in variants
    }


def _state(run: RunRecord) -> str:
    """Say why a run ended, or that it is unfinished, and how often it was resumed."""
    newest = curves.lines(run.events, "start", "end")[-1]
    state = newest.get("reason", "unfinished")
    starts = len(curves.lines(run.events, "start"))
    if starts > 1:
        return f"{state}, resumed {starts - 1} ×"
    return state


def _measures(run: RunRecord) -> dict:
    """The totals of a run, in which averaging trainers for the consensus model is counted."""
    found = summary.totals(run.events)
    return found | {
        "syncs_total": found["syncs_total"] + found["consensus_syncs"],
        "bytes_total": found["bytes_total"] + found["consensus_bytes"],
    }


def _spread(values: Sequence, shown: Callable[[float], str]) -> str:
    """Show the median of values, and their range unless it is shown alike."""
    if any(value is None for value in values):
        return "-"
    low, middle, high = map(shown, (min(values), statistics.median(values), max(values)))
    return middle if low == high else f"{middle} ({low} – {high})"


def _runs_table(variants: Sequence[Variant], command: str) -> str:
    rows = [
        {
            "variant": variant.label,
            "folder": str(run.folder),
            "trained by": run.start["command"] or "-",
            "seed": str(run.seed),
            "rounds": f"{summary.totals(run.events)['rounds']:,}",
            "state": _state(run),
        }
        for variant in variants
        for run in variant.runs
    ]
    made_by = page.paragraph("This page was made by") + page.verbatim(command)
    reading = page.paragraph(loss.reading())
    return "\n".join([page.table("From these ledgers:", rows, texts=3), made_by, reading])


def _parts_of(run: RunRecord) -> dict[str, str]:
    parts = {"Batches, their test, and training": run_figures.rounds(run)}
    if samples := [e for e in curves.lines(run.events, "eval") if e.get("sample")]:
        rows = [{"round": str(e["round"]), "continued": e["sample"][1]} for e in samples]
        caption = f"How the consensus continues this held-out text: {samples[-1]['sample'][0]}"
        parts["Samples"] = page.table(caption, rows, texts=2)
    merges = [
        {
            "round": str(e["round"]),
            "members": " + ".join(map(str, e["members"])),
            "into": "refused" if e["event"] == "refusal" else str(e["into"]),
            "weights": ", ".join(f"{w / (sum(e['weights']) or 1):.3f}" for w in e["weights"]),
            "before": ", ".join(map(summary.number, e["loss_before"])),
            "after": summary.number(e["loss_after"]),
            "barrier": "not finite" if e["barrier"] is None else f"{e['barrier']:+.4f}",
        }
        for e in curves.lines(run.events, "merge", "refusal")
    ]
    if merges:
        caption = "Merges, in order. Losses (nats) are on the guard rows, fixed held-out rows."
        parts["Merges"] = page.table(caption, merges)
    learners = [
        {"round": str(e["round"]), "learner": str(e["learner"])}
        | {"what": e["what"], "why": e["why"]}
        for e in curves.lines(run.events, "learner")
    ]
    if learners:
        caption = "Learners that came, left or were lost, and rounds of theirs that did not count."
        parts["Learners"] = page.table(caption, learners, texts=4)
    facts = summary.totals_as_text(summary.totals(run.events))
    rows = [{"quantity": name, "value": value} for name, value in facts]
    parts["All totals"] = page.table("", rows, texts=2)
    return parts
