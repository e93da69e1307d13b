"""The report on one run or many: a self-contained page, its figures, and their numbers."""

import io
import json
import os
import re
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from adloco_jax.errors import DataError
from adloco_jax.study import curves, figures, page, predictions, run_figures, theory
from adloco_jax.study.curves import Run, Variant
from adloco_jax.study.figures import Drawing, short
from adloco_jax.study.page import Cell, Section
from adloco_jax.study.replay import PARTS, Replay
from adloco_jax.study.summary import closing_table, described, in_bytes, number, seconds, totals

__all__ = ["closing_table", "write"]

_DPI = 150

# Columns of the tables that compare variants: what `_measures` has, and how it is shown.
_Columns = Mapping[str, tuple[str, Callable[[float], str]]]
_count, _whole = "{:,.0f}".format, "{:.0f}".format
_TOTALS: _Columns = {
    "held-out loss (nats)": ("loss", number),
    "accuracy": ("accuracy", "{:.3f}".format),
    "tokens": ("tokens_total", _count),
    "updates": ("updates_total", _count),
    "communications": ("syncs_total", _count),
    "moved": ("bytes_total", in_bytes),
    "merges": ("num_merges", _count),
}
_TIMES: _Columns = {
    "programs": ("num_programs", _whole),
    "from cache": ("num_programs_cached", _whole),
    "compiling": ("compile_s", seconds),
    "rounds": ("step_s", seconds),
    "of it stalled": ("stall_s", seconds),
    "wall time": ("wall_s", seconds),
}
_TIMES_CAPTION = (
    "Measured time on the machine of the run. Programs are compiled, or read from the cache, in"
    " the background where they can be foreseen; the time that rounds waited for them is the stall."
)
_MERGES: Mapping[str, Callable[[dict], str]] = {
    "round": lambda e: str(e["round"]),
    "members": lambda e: " + ".join(map(str, e["members"])),
    "into": lambda e: "refused" if e["event"] == "refusal" else str(e["into"]),
    "weights": lambda e: ", ".join(f"{w / (sum(e['weights']) or 1):.3f}" for w in e["weights"]),
    "before": lambda e: ", ".join(map(number, e["loss_before"])),
    "after": lambda e: number(e["loss_after"]),
    "barrier": lambda e: "not finite" if e["barrier"] is None else f"{e['barrier']:+.4f}",
}
_CLUSTERS: Mapping[str, Callable[[tuple[tuple[str, int], Replay]], str]] = {
    "cluster": lambda row: row[0][0],
    "devices": lambda row: _count(row[0][1]),
    "time (s)": lambda row: short(row[1].wall_s),
} | {
    f"{part.removesuffix('_s')} (%)": lambda row, part=part: f"{100 * row[1].frac(part):.3g}"
    for part in PARTS
}
_FACTS: Mapping[str, Callable[[tuple[str, str]], str]] = {
    "quantity": lambda fact: fact[0],
    "value": lambda fact: fact[1],
}


def write(
    runs: Sequence[str | os.PathLike[str]],
    folder: str | os.PathLike[str],
    *,
    labels: Sequence[str] | None = None,
) -> Path:
    """Write `index.html`, a PNG per figure, and `summary.json` with the runs' totals.

    Runs whose configs differ in the seed alone are one variant, drawn as a median with a band.

    Args:
      runs: The runs' folders, also of unfinished runs.
      folder: Where to write; created if it does not exist. Files of the same names are replaced.
      labels: One per run, a variant takes its first run's; by default the folders' names.

    Returns:
      The path of `index.html`, which needs no other file.

    Raises:
      ConfigError: If there are no runs, one is named twice, or the labels do not fit.
      DataError: If a folder holds no ledger, a damaged one, or one without a finished round.
    """
    read = [curves.read_run(run) for run in runs]
    for run in read:
        if not run.start or not curves.lines(run.events, "round"):
            raise DataError(
                f"{run.folder / 'ledger.jsonl'}: no start line, or no round has finished yet, so"
                " there is nothing to draw; let the run reach the end of round 1"
            )
    variants = curves.variants(read, labels=labels)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    words = ["adloco", "report", *map(str, runs), "--out", str(folder)]
    words += ["--labels", *labels] if labels else []
    book = _Book(folder, shlex.join(words))

    sections = [_runs_section(variants, book.command), _totals_section(variants)]
    sections.append(_loss_section(variants, book))
    title, lead = f"Run {read[0].start['run']}", "One AdLoCo run, from its ledger."
    if len(read) == 1:
        sections += _sections_of(read[0], book, stem="")
    else:
        sections += _compared_sections(variants, book)
        title = f"{len(variants)} variants, {len(read)} runs"
        lead = "AdLoCo runs beside one another, from their ledgers."
    assumptions = page.bullets(theory.ASSUMPTIONS)
    sections.append(Section("assumptions", "What the theory assumes", assumptions))
    path = folder / "index.html"
    path.write_text(page.page(title, lead, sections), encoding="utf-8", errors="replace")
    summary = json.dumps(_summary(variants), indent=2, allow_nan=False) + "\n"
    (folder / "summary.json").write_text(summary, encoding="utf-8", errors="replace")
    return path


@dataclass(frozen=True)
class _Book:
    """Write figures into the folder, and returns them as HTML for the page."""

    folder: Path
    command: str

    def figure(self, drawing: Drawing, stem: str = "") -> str:
        buffer, file_name = io.BytesIO(), f"{stem}{drawing.name}.png"
        words = f"{drawing.caption} Made by {self.command}"  # a path need not be text
        about = {"Title": drawing.title, "Description": words.encode(errors="replace").decode()}
        drawing.figure.savefig(buffer, dpi=_DPI, metadata=about)
        (self.folder / file_name).write_bytes(png := buffer.getvalue())
        return page.figure(
            drawing.title, drawing.caption, png, file_name=file_name, command=self.command
        )


def _summary(variants: Sequence[Variant]) -> dict:
    """Of one run its totals; of several a list of them by variant."""
    if len(variants) == len(variants[0].runs) == 1:
        return totals(variants[0].runs[0].events)
    return {
        variant.label: [
            {"folder": str(run.folder), "seed": run.seed, **totals(run.events)}
            for run in variant.runs
        ]
        for variant in variants
    }


def _runs_section(variants: Sequence[Variant], command: str) -> Section:
    columns: Mapping[str, Callable[[tuple[Variant, Run]], str]] = {
        "variant": lambda item: item[0].label,
        "folder": lambda item: str(item[1].folder),
        "trained by": lambda item: item[1].start["command"] or "-",
        "seed": lambda item: str(item[1].seed),
        "rounds": lambda item: f"{totals(item[1].events)['rounds']:,}",
        "state": lambda item: _state(item[1]),
    }
    items = [(variant, run) for variant in variants for run in variant.runs]
    table = page.table("The runs and the commands that made them.", columns, items, texts=3)
    return Section("runs", "Runs", f"{page.verbatim(command)}\n{table}")


def _state(run: Run) -> str:
    """Why the run ended, or that it has not."""
    starts = len(curves.lines(run.events, "start"))
    state = curves.lines(run.events, "start", "end")[-1].get("reason", "unfinished")
    return f"{state}, resumed {starts - 1} ×" if starts > 1 else str(state)


def _totals_section(variants: Sequence[Variant]) -> Section:
    if len(variants) == len(variants[0].runs) == 1:
        facts = described(totals(variants[0].runs[0].events))
        table = page.table("Totals of the run.", _FACTS, facts, texts=2)
        return Section("totals", "Totals", table)
    caption = (
        "Totals of each variant: of several runs the median, and below it minimum to maximum."
        " Held-out values are of the consensus at the last evaluation. Communications are blocking"
        " and summed over trainers; where the consensus is an average of trainers, gathering them"
        " is counted too."
    )
    return Section("totals", "Totals", _variants_table(caption, _TOTALS, variants, runs=True))


def _measures(run: Run) -> dict:
    """A run's totals, which include averaging trainers for the consensus, and its times."""
    own = totals(run.events)
    step_s, stall_s = map(sum, zip(*curves.stalls(run.events).values(), strict=True))
    return own | {
        "syncs_total": own["syncs_total"] + own["consensus_syncs"],
        "bytes_total": own["bytes_total"] + own["consensus_bytes"],
        "step_s": step_s,
        "stall_s": stall_s,
    }


def _variants_table(
    caption: str, columns: _Columns, variants: Sequence[Variant], *, runs: bool = False
) -> str:
    """A row per variant; a column that no run has a value for is left out."""
    rows = [(variant.label, [_measures(run) for run in variant.runs]) for variant in variants]
    cells: dict[str, Callable[[tuple[str, list[dict]]], Cell]] = {"variant": lambda row: row[0]}
    if runs:
        cells["runs"] = lambda row: str(len(row[1]))
    for title, (name, shown) in columns.items():
        if any(own[name] is not None for _, measured in rows for own in measured):
            cells[title] = lambda row, name=name, shown=shown: _spread(
                [own[name] for own in row[1]], shown
            )
    return page.table(caption, cells, rows)


def _spread(values: Sequence, shown: Callable[[float], str]) -> Cell:
    """Median, and the range below it; a dash where a run lacks the value."""
    if any(value is None for value in values):
        return "-"
    low, middle, high = map(shown, (min(values), statistics.median(values), max(values)))
    return middle if low == high else (middle, f"{low} – {high}")


def _loss_section(variants: Sequence[Variant], book: _Book) -> Section:
    runs = [run for variant in variants for run in variant.runs]
    clock, not_simulated = predictions.simulate(runs)
    fields = ["loss", "accuracy"] if any(map(curves.is_classifier, runs)) else ["loss"]
    parts = [book.figure(figures.loss(variants, clock, field=field)) for field in fields]
    if clock:
        cluster = (
            f"The cluster “{clock.cluster}” is {predictions.PRESET_IN_WORDS}, with a device for"
            " each worker of the largest run, computing at the pace of its data sheet, and trains"
            " the run's own model."
        )
        parts.append(page.paragraph(cluster))
    if not_simulated:
        parts.append(page.paragraph("Without simulated time: " + "; ".join(not_simulated)))
    return Section("loss", "Loss", "\n".join(parts))


def _sections_of(run: Run, book: _Book, *, stem: str) -> list[Section]:
    """The figures and tables of a single run, a section each."""
    sections = []
    for drawing in run_figures.draw(run):
        html = book.figure(drawing, stem)
        if drawing.name == "merges" and (events := curves.lines(run.events, "merge", "refusal")):
            caption = "Merges, in order. Losses (nats) are on a fixed held-out batch of their own."
            html += page.table(caption, _MERGES, events)
        if drawing.name == "time":
            html += _variants_table(_TIMES_CAPTION, _TIMES, [Variant(run.start["run"], [run])])
        sections.append(Section(f"{stem}{drawing.name}", drawing.title, html))
    sections.append(Section(f"{stem}cluster", "On other clusters", _cluster_table(run)))
    sections.append(Section(f"{stem}theory", "Theory", _theory(run, book, stem)))
    return sections


def _compared_sections(variants: Sequence[Variant], book: _Book) -> list[Section]:
    """Tables that compare variants, then each variant's first seed, folded."""
    details = []
    for place, (label, (run, *_)) in enumerate(((v.label, v.runs) for v in variants), start=1):
        stem = f"{place:02d}-{re.sub(r'[^A-Za-z0-9_-]+', '-', label)[:40]}-"
        parts = [page.verbatim(closing_table(run.folder))]
        for section in _sections_of(run, book, stem=stem):
            parts.append(f"{page.heading(section.heading)}\n{section.html}")
        details.append(page.folded(f"{label}, seed {run.seed}", "\n".join(parts)))
    times = _variants_table(_TIMES_CAPTION, _TIMES, variants)
    return [
        Section("time", "Time and compilation", times),
        Section("variants", "Each variant's first seed", "\n".join(details)),
    ]


def _cluster_table(run: Run) -> str:
    try:
        times = predictions.on_clusters(run)
    except DataError as error:
        return page.paragraph(f"Not simulated: {error}")
    caption = (
        f"The simulator's replay of this run on {predictions.DEVICE} devices at the pace of their"
        " data sheet: wall-clock time, and shares of all device-time. The devices are divided"
        " among the run's workers; adloco_jax/study/replay.py states the model."
    )
    return page.table(caption, _CLUSTERS, times.items())


def _theory(run: Run, book: _Book, stem: str) -> str:
    try:
        found, reason = theory.fit(run.events), ""
    except DataError as error:
        found, reason = None, str(error)
    try:
        html = f"{book.figure(predictions.theory_beside(run, found), stem)}\n"
    except DataError as error:
        return page.paragraph(f"Nothing to compare with the theory: {error}")
    if found is None:
        return html + page.paragraph(f"No constants: {reason}")
    constants = {
        "L, smoothness": found.smoothness,
        "Δ0, gap to the lowest loss (nats)": found.gap,
        "σ², gradient noise": found.noise,
        "η of the norm test": found.eta,
    }
    facts = [(name, f"{value:.4g}") for name, value in constants.items()]
    caption = "Constants fitted on this run; adloco_jax/study/theory.py says how."
    return html + page.table(caption, _FACTS, facts)
