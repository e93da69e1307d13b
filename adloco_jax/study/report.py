"""The report on one or more runs: a self-contained web page, and the runs' totals as JSON.

A variant is a group of runs whose configs differ only in the seed. A run here (`RunRecord`) is its
folder and the lines of its ledger, its log: dicts with their kind under `event`. A trainer is a
model in training. The consensus is the model that stands for all trainers: the only one, the best,
or their average. A learner is another process that trains for the run.
"""

import json
import os
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from adloco_jax.errors import DataError, counted, in_bytes
from adloco_jax.run.before.describe import ALMOST_ALL, share_read
from adloco_jax.run.kept.folder import kind_of_change_now, recorded
from adloco_jax.settings import CHATS
from adloco_jax.study import card, chart, curves, loss, page, run_figures, summary
from adloco_jax.study.chart import Panel
from adloco_jax.study.curves import RunRecord, Variant

__all__ = ["conclude", "write"]

# Columns of the table of totals, by heading: the total's name in what `_totals_with_gathering`
# returns, and the function that makes a text of it.
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
      labels: A label for each run, of which the first of a variant counts. None: the folders'
        paths.

    Returns:
      The path of `index.html`, which needs no other file.

    Raises:
      ConfigError: If there are no runs, a run is named twice, or the labels do not fit the runs.
      DataError: If a folder has no ledger, a damaged one, or one without a finished round.
      OSError: If a file cannot be written.
    """
    variants = _read(runs, labels)
    folder = Path(folder)
    # The command that makes the same report, which the page shows.
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
            columns=2,  # two charts beside each other, 650 pixels each
            width=1300,
            right_px=180,  # for the labels of variants
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
    """Return lines on what to do next: generate text, and train on if only some rows were read.

    A run of `fit` gets no command to train on, because a command does not have its model.
    """
    run = shlex.quote(str(workdir))
    commands = []
    record = curves.read_run(workdir)
    if card.task_of(workdir / "export") == "text-generation":
        # `CHATS` are the names of columns of chats.
        is_chat = record.start["config"]["data"]["text_column"] in CHATS
        option = "--chat" if is_chat else '--prompt "The"'
        commands.append(f"next: adloco generate {run} {option}")

    before = recorded(workdir)
    if before is None or before.made_by == "fit":
        return commands
    settings = before.config
    tokens = summary.totals(record.events)["tokens_total"]
    # Whether the run may be resumed with more tokens: a declared schedule would be stretched.
    may_go_on = kind_of_change_now("num_tokens", settings) == "harmless"
    if share_read(settings, tokens) < ALMOST_ALL and may_go_on:
        whole = settings.num_rows * settings.data.sequence_length
        longer = f"adloco train {run} --config.num_rounds=none --config.num_tokens={whole}"
        commands.append(f"to train on until each row was read once: {longer}")
    return commands


def _read(runs: Sequence[str | os.PathLike[str]], labels: Sequence[str] | None) -> list[Variant]:
    """Read the ledgers of runs, each with a round that has ended, and group them.

    Raises ConfigError if there are no runs, one is named twice, or the labels do not fit; DataError
    if a ledger is missing or damaged, or has no round that has ended.
    """
    records = [curves.read_run(run) for run in runs]
    for run in records:
        if not curves.lines(run.events, "round"):
            raise DataError(
                f"{run.folder / 'ledger.jsonl'}: no round has finished yet, so there is nothing to"
                " draw; let the run reach the end of round 1"
            )
    return curves.variants(records, labels=labels)


def _page(variants: Sequence[Variant], panels: Mapping[str, Panel], command: str) -> str:
    """Return the HTML of the report; `panels` are the charts of `loss.charts`.

    A single run has its figures over rounds, and tables that open on a click. Several runs have
    only the charts and the table of totals. `command` is what makes the same report.
    """
    runs = [run for variant in variants for run in variant.runs]
    screen = page.figure(page.tabs("loss", panels), loss.caption(variants))
    screen += _totals_table(variants)
    if len(runs) == 1:
        run = runs[0]
        title = f"Run {run.start['run']}"
        text = dict(summary.totals_as_text(summary.totals(run.events)))
        rounds = counted(_num_rounds(run), "round")
        lead = f"{rounds}, {_state_in_words(run)}. Held-out loss: {text['held-out loss']}."
        screen += run_figures.life(run)  # the figure of its trainers over rounds
        parts = _parts_of(run)
        num_curves = 0  # no row of a table belongs to a curve
    else:
        title = f"{counted(len(variants), 'variant')}, {counted(len(runs), 'run')}"
        lead = "Point at a row of the table to see its curve alone."
        parts = {}
        num_curves = len(variants)
    parts["How to read this page, and the commands that made it"] = _runs_table(variants, command)
    details = [page.folded(heading, html) for heading, html in parts.items()]
    return page.page(
        title,
        lead,
        screen_html=screen,
        details_html="\n".join(details),
        num_curves=num_curves,
    )


def _totals_table(variants: Sequence[Variant]) -> str:
    """Return the HTML of the table of totals, a row for each variant.

    The totals are those of `_TOTALS`. To gather is to bring all trainers' parameters to one place,
    for a consensus that is their average; that counts here. A total that no run has is left out.
    With several variants, the rows are the charts' legend too.
    """
    caption = "Synchronisations are blocking and summed over trainers."
    if any(len(variant.runs) > 1 for variant in variants):
        caption += " With several seeds: the median (minimum – maximum)."
    measured = [[_totals_with_gathering(run) for run in variant.runs] for variant in variants]
    rows: list[dict[str, str]] = [{"run": variant.label} for variant in variants]
    for title, (name, shown) in _TOTALS.items():  # `shown` makes a text of the total
        by_variant = [[found[name] for found in runs] for runs in measured]
        is_known = any(value is not None for values in by_variant for value in values)
        if not is_known:
            continue
        for row, values in zip(rows, by_variant, strict=True):
            row[title] = _median_and_range(values, shown)  # a cell more in the variant's row
    return page.table(caption, rows, is_legend=len(variants) > 1)


def _summary(variants: Sequence[Variant]) -> dict:
    """Return the content of `summary.json`.

    It is the totals of a single run, or by each variant's label a list with those of its runs.
    """
    if len(variants) == 1 and len(variants[0].runs) == 1:
        return summary.totals(variants[0].runs[0].events)
    by_label = {}
    for variant in variants:
        by_label[variant.label] = [
            {"folder": str(run.folder), "seed": run.seed, **summary.totals(run.events)}
            for run in variant.runs
        ]
    return by_label


def _num_rounds(run: RunRecord) -> int:
    """Return the number of a run's newest completed round."""
    return summary.totals(run.events)["rounds"]


def _state_in_words(run: RunRecord) -> str:
    """Say why a run ended, or that it is unfinished, and how often it was resumed."""
    newest = curves.lines(run.events, "start", "end")[-1]
    # An `end` line says why; a `start` line, which has no reason, is the last of an unfinished run.
    state = newest.get("reason", "unfinished")
    starts = len(curves.lines(run.events, "start"))
    if starts > 1:
        return f"{state}, resumed {starts - 1} ×"
    return state


def _totals_with_gathering(run: RunRecord) -> dict:
    """Return the totals of a run, in which averaging trainers for the consensus is counted.

    They are those of `summary.totals`, by name; None stands for one that is not known. A consensus
    that is an average needs all trainers' parameters in one place. The last evaluation did that, so
    its cost is added.
    """
    found = summary.totals(run.events)
    found["syncs_total"] += found["consensus_syncs"]
    found["bytes_total"] += found["consensus_bytes"]
    return found


def _median_and_range(values: Sequence, shown: Callable[[float], str]) -> str:
    """Return the median of values as text, and in parentheses their range.

    `shown` formats a value. Without the range, if lowest and highest are formatted alike. Returns
    "-" if a run lacks the value (None).
    """
    if any(value is None for value in values):
        return "-"
    low = shown(min(values))
    middle = shown(statistics.median(values))
    high = shown(max(values))
    if low == high:
        return middle
    return f"{middle} ({low} – {high})"


def _runs_table(variants: Sequence[Variant], command: str) -> str:
    """Return the HTML of a table of all runs and the commands that trained them.

    Below it are `command`, which makes the report, and how to read the charts.
    """
    rows = []
    for variant in variants:
        for run in variant.runs:
            row = {
                "variant": variant.label,
                "folder": str(run.folder),
                "trained by": run.start["command"] or "-",
                "seed": str(run.seed),
                "rounds": f"{_num_rounds(run):,}",
                "state": _state_in_words(run),
            }
            rows.append(row)
    made_by = page.paragraph("This page was made by") + page.verbatim(command)
    reading = page.paragraph(loss.reading())
    return "\n".join([page.table("From these ledgers:", rows, texts=3), made_by, reading])


def _parts_of(run: RunRecord) -> dict[str, str]:
    """Return the parts of a single run's report that open on a click: their HTML by heading.

    What the run has not done, such as merges, has no part.
    """
    parts = {"Batches, their test, and training": run_figures.rounds(run)}

    # Only a line of the consensus may have a sample.
    samples = [e for e in curves.lines(run.events, "eval") if e.get("sample")]
    if samples:
        # A sample has the beginning of a text, and what the model wrote after it.
        beginning, _ = samples[-1]["sample"]
        # They continue the same text, so that its beginning is shown once, as the caption.
        rows = [{"round": str(e["round"]), "continued": e["sample"][1]} for e in samples]
        caption = f"How the consensus continues this held-out text: {beginning}"
        parts["Samples"] = page.table(caption, rows, texts=2)

    merges = [_merge_row(e) for e in curves.lines(run.events, "merge", "refusal")]
    if merges:
        caption = "Merges, in order. Losses (nats) are on the guard rows, fixed held-out rows."
        parts["Merges"] = page.table(caption, merges)

    learners = []
    for e in curves.lines(run.events, "learner"):
        row = {
            "round": str(e["round"]),
            "learner": str(e["learner"]),
            "what": e["what"],
            "why": e["why"],
        }
        learners.append(row)
    if learners:
        caption = "Learners that came, left or were lost, and rounds of theirs that did not count."
        parts["Learners"] = page.table(caption, learners, texts=4)

    facts = summary.totals_as_text(summary.totals(run.events))
    rows = [{"quantity": name, "value": value} for name, value in facts]
    parts["All totals"] = page.table(caption="", rows=rows, texts=2)
    return parts


def _merge_row(e: dict) -> dict[str, str]:
    """Return the cells of a merge or of a refused one, from its line of the ledger.

    A merge is refused if it would raise the loss too much; "barrier" is by how much the loss of the
    merged model is above its members' losses, averaged by their weights. A loss or a barrier is
    None if it was not finite.
    """
    into = str(e["into"])
    if e["event"] == "refusal":
        into = "refused"
    total = sum(e["weights"]) or 1  # never divided by zero
    barrier = "not finite"
    if e["barrier"] is not None:
        barrier = f"{e['barrier']:+.4f}"
    return {
        "round": str(e["round"]),
        "members": " + ".join(map(str, e["members"])),
        "into": into,
        "weights": ", ".join(f"{weight / total:.3f}" for weight in e["weights"]),
        "before": ", ".join(map(summary.number, e["loss_before"])),
        "after": summary.number(e["loss_after"]),
        "barrier": barrier,
    }
