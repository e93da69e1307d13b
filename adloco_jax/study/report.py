"""The report on one run or many: a page that opens offline, its figures, and their numbers."""

import io
import json
import os
import re
import shlex
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from adloco_jax.errors import DataError
from adloco_jax.study import curves, figures, page, predictions, run_figures, theory
from adloco_jax.study.curves import Run, Variant
from adloco_jax.study.figures import Clock, Drawing
from adloco_jax.study.page import Cell, Section
from adloco_jax.study.summary import closing_table, described, in_bytes, number, seconds, totals

__all__ = ["closing_table", "write"]

_DPI = 150
_GATHERED = (
    " Where the consensus is an average of trainers, bringing them together is counted with them."
)


def write(
    runs: Sequence[str | os.PathLike[str]],
    folder: str | os.PathLike[str],
    *,
    labels: Sequence[str] | None = None,
) -> Path:
    """Writes `index.html`, a PNG per figure, and `summary.json` with the runs' totals.

    Runs whose configs differ in the seed alone are one variant, drawn as a median with a band.

    Args:
      runs: The runs' folders, also of unfinished runs.
      folder: Where to write; made if need be. Files of the same names are replaced.
      labels: One per run, a variant takes its first run's; by default the folders' names.

    Returns:
      The path of `index.html`, which needs no other file.

    Raises:
      ConfigError: If there are no runs, one is named twice, or the labels do not fit.
      DataError: If a folder holds no ledger, a damaged one, or one without a finished round.
    """
    read = [curves.read_run(run) for run in runs]
    for run in read:
        if not curves.lines(run.events, "round"):
            raise DataError(
                f"{run.folder / 'ledger.jsonl'}: no round has finished yet, so there is nothing to"
                " draw; let the run reach the end of round 1"
            )
    variants = curves.variants(read, labels=labels)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    words = ["python", "scripts/report.py", *map(str, runs), "--out", str(folder)]
    words += ["--labels", *labels] if labels else []
    book = _Book(folder, shlex.join(words))
    clock, not_simulated = predictions.simulate(read)

    sections = [_runs_section(variants, book.command), _totals_section(variants)]
    sections.append(_loss_section(variants, clock, not_simulated, book))
    if len(read) == 1:
        sections += _sections_of(read[0], book, stem="")
        sections.append(Section("assumptions", "What the theory assumes", _assumptions()))
        title, lead = f"Run {_name(read[0])}", "One AdLoCo run, from its ledger."
    else:
        sections += _compared_sections(variants, book)
        title = f"{len(variants)} variants, {len(read)} runs"
        lead = "AdLoCo runs beside one another, from their ledgers."
    (folder / "summary.json").write_text(_summary(variants), encoding="utf-8", errors="replace")
    path = folder / "index.html"
    html = page.page(title, page.paragraph(lead), sections)
    path.write_text(html, encoding="utf-8", errors="replace")
    return path


class _Book:
    """Puts figures into the folder, and hands them back for the page."""

    def __init__(self, folder: Path, command: str):
        self.command = command
        self._folder = folder

    def figure(self, drawing: Drawing, stem: str = "") -> str:
        file_name = f"{stem}{drawing.name}.png"
        buffer = io.BytesIO()
        words = f"{drawing.caption} Made by {self.command}"  # a path need not be text
        about = {"Title": drawing.title, "Description": words.encode(errors="replace").decode()}
        drawing.figure.savefig(buffer, dpi=_DPI, metadata=about)
        (self._folder / file_name).write_bytes(buffer.getvalue())
        return page.figure(drawing, buffer.getvalue(), file_name=file_name, command=self.command)


def _name(run: Run) -> str:
    return str(run.start.get("run", run.folder.resolve().name))


def _summary(variants: Sequence[Variant]) -> str:
    """Of one run its totals; of several a list of them by variant."""
    by_variant = {
        variant.label: [
            {"folder": str(run.folder), "seed": run.seed, **totals(run.events)}
            for run in variant.runs
        ]
        for variant in variants
    }
    if len(variants) == 1 and len(variants[0].runs) == 1:
        return json.dumps(totals(variants[0].runs[0].events), indent=2, allow_nan=False) + "\n"
    return json.dumps(by_variant, indent=2, allow_nan=False) + "\n"


def _runs_section(variants: Sequence[Variant], command: str) -> Section:
    rows = [
        (
            variant.label,
            str(run.folder),
            str(run.start.get("command") or "-"),
            "-" if run.seed is None else str(run.seed),
            f"{max(e['round'] for e in curves.lines(run.events, 'round')):,}",
            _state(run),
        )
        for variant in variants
        for run in variant.runs
    ]
    header = ("variant", "folder", "trained by", "seed", "rounds", "state")
    table = page.table("The runs and the commands that made them.", header, rows, texts=3)
    return Section("runs", "Runs", f"{page.verbatim(command)}\n{table}")


def _state(run: Run) -> str:
    """Why the run ended, or that it has not."""
    marks = [e for e in run.events if e["event"] in ("start", "end")]
    is_over = bool(marks) and marks[-1]["event"] == "end"
    starts = len(curves.lines(run.events, "start"))
    resumed = f", resumed {starts - 1} ×" if starts > 1 else ""
    return (str(marks[-1].get("reason", "ended")) if is_over else "unfinished") + resumed


def _totals_section(variants: Sequence[Variant]) -> Section:
    runs = [run for variant in variants for run in variant.runs]
    if len(runs) == 1:
        rows = described(totals(runs[0].events))
        table = page.table("What the run came to.", ("quantity", "value"), rows, texts=2)
        return Section("totals", "Totals", table)
    sums = {id(run): _with_gathering(totals(run.events)) for run in runs}
    columns: dict[str, tuple[str, Callable[[float], str]]] = {
        "held-out loss (nats)": ("loss", number),
        "accuracy": ("accuracy", lambda x: f"{x:.3f}"),
        "tokens": ("tokens_total", lambda x: f"{x:,.0f}"),
        "updates": ("updates_total", lambda x: f"{x:,.0f}"),
        "communications": ("syncs_total", lambda x: f"{x:,.0f}"),
        "moved": ("bytes_total", in_bytes),
        "merges": ("num_merges", lambda x: f"{x:,.0f}"),
    }
    known = {name for own in sums.values() for name, value in own.items() if value is not None}
    shown = {title: column for title, column in columns.items() if column[0] in known}
    rows = [
        (
            variant.label,
            str(len(variant.runs)),
            *(
                _spread([sums[id(run)][name] for run in variant.runs], in_words)
                for name, in_words in shown.values()
            ),
        )
        for variant in variants
    ]
    caption = (
        "What each variant came to: of several runs the median, and below it minimum to maximum."
        " Held-out values are of the consensus at the last evaluation. Communications are blocking"
        " and summed over trainers: synchronisations of workers, merges and refused attempts, each"
        f" with the hand-over to workers that join a trainer.{_GATHERED}"
    )
    table = page.table(caption, ("variant", "runs", *shown), rows)
    return Section("totals", "Totals", table)


def _with_gathering(totals: dict) -> dict:
    """The totals, with what brings trainers together for a consensus that is their average."""
    return totals | {
        f"{cost}_total": totals[f"{cost}_total"] + totals[f"consensus_{cost}"]
        for cost in ("syncs", "bytes")
    }


def _spread(values: Sequence, in_words: Callable[[float], str]) -> str | Cell:
    """Median, and the range below it; a dash where a run lacks the value."""
    if any(value is None for value in values):
        return "-"
    low, middle, high = map(in_words, (min(values), statistics.median(values), max(values)))
    return middle if low == high else Cell(middle, f"{low} – {high}")


def _short(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _loss_section(
    variants: Sequence[Variant], clock: Clock | None, not_simulated: list[str], book: _Book
) -> Section:
    parts = [book.figure(figures.loss(variants, clock))]
    if any(curves.is_classifier(run) for variant in variants for run in variant.runs):
        parts.append(book.figure(figures.loss(variants, clock, field="accuracy")))
    if clock:
        parts.append(
            page.paragraph(
                f"The cluster “{clock.cluster}” is {predictions.PRESET_IN_WORDS}, with a device for"
                " each worker of the largest run, computing at the pace of its data sheet, and"
                " trains the run's own model."
            )
        )
    if not_simulated:
        parts.append(page.paragraph("Without simulated time: " + "; ".join(not_simulated)))
    return Section("loss", "Loss", "\n".join(parts))


def _sections_of(run: Run, book: _Book, *, stem: str) -> list[Section]:
    """The figures and tables of a single run, a section each."""
    sections = []
    for drawing in run_figures.draw(run):
        html = book.figure(drawing, stem)
        if drawing.name == "merges":
            html += _merge_table(run)
        if drawing.name == "time":
            html += _time_table([Variant(_name(run), [run])])
        sections.append(Section(f"{stem}{drawing.name}", drawing.title, html))
    sections.append(Section(f"{stem}network", "On other clusters", _cluster_table(run)))
    sections.append(Section(f"{stem}theory", "Theory", _theory(run, book, stem)))
    return sections


def _compared_sections(variants: Sequence[Variant], book: _Book) -> list[Section]:
    """What compares variants beyond their losses, then each variant's first seed, folded."""
    details = []
    for place, variant in enumerate(variants, start=1):
        run = variant.runs[0]
        stem = f"{place:02d}-{re.sub(r'[^A-Za-z0-9_-]+', '-', variant.label)[:40]}-"
        parts = [page.verbatim(closing_table(run.folder))]
        for section in _sections_of(run, book, stem=stem):
            parts.append(f"{page.heading(section.heading)}\n{section.html}")
        seed = "" if run.seed is None else f", seed {run.seed}"
        details.append(page.folded(f"{variant.label}{seed}", "\n".join(parts)))
    return [
        Section("time", "Time and compilation", _time_table(variants)),
        Section("network", "On other clusters", _clusters_table(variants)),
        Section("variants", "Each variant's first seed", "\n".join(details)),
        Section("assumptions", "What the theory assumes", _assumptions()),
    ]


def _merge_table(run: Run) -> str:
    events = [e for e in run.events if e["event"] in ("merge", "refusal")]
    if not events:
        return ""
    rows = [
        (
            str(e["round"]),
            " + ".join(map(str, e["members"])),
            "refused" if e["event"] == "refusal" else str(e["into"]),
            ", ".join(f"{weight / (sum(e['weights']) or 1):.3f}" for weight in e["weights"]),
            ", ".join(map(number, e["loss_before"])),
            number(e["loss_after"]),
            "not finite" if e["barrier"] is None else f"{e['barrier']:+.4f}",
        )
        for e in events
    ]
    caption = "Merges, in order. Losses are on a fixed batch, held out and not reported on (nats)."
    header = ("round", "members", "into", "weights", "before", "after", "barrier")
    return page.table(caption, header, rows)


def _time_table(variants: Sequence[Variant]) -> str:
    rows = []
    for variant in variants:
        per_run = [curves.stalls(run.events).values() for run in variant.runs]
        sums = [totals(run.events) for run in variant.runs]
        step = [sum(step for step, _ in rounds) for rounds in per_run]
        stall = [sum(stall for _, stall in rounds) for rounds in per_run]
        share = [
            100 * part / whole if whole else 0.0 for part, whole in zip(stall, step, strict=True)
        ]
        rows.append(
            (
                variant.label,
                _spread([s["num_programs"] for s in sums], lambda x: f"{x:.0f}"),
                _spread([s["num_programs_cached"] for s in sums], lambda x: f"{x:.0f}"),
                _spread([s["compile_s"] for s in sums], seconds),
                _spread(step, seconds),
                _spread(stall, seconds),
                _spread(share, lambda x: f"{x:.1f} %"),
                _spread([s["wall_s"] for s in sums], seconds),
            )
        )
    caption = (
        "Measured time on the machine of the run. Programs are compiled, or read from the cache,"
        " in the background where that can be foreseen; what rounds waited for it is the stall."
    )
    header = (
        *("variant", "programs", "from cache", "compiling", "rounds", "of it stalled"),
        *("stalled", "wall time"),
    )
    return page.table(caption, header, rows)


def _cluster_table(run: Run) -> str:
    table = predictions.cluster_table(run)
    if isinstance(table, str):
        return page.paragraph(f"Not simulated: {table}")
    shares = ("utilisation", "waiting_frac", "communication_frac", "idle_frac", "lost_frac")
    rows = [
        (
            row["preset"],
            f"{row['devices']:,}",
            f"{row['sites']:,}",
            _short(row["wall_s"]),
            *(f"{100 * row[name]:.3g}" for name in shares),
        )
        for row in table
    ]
    caption = (
        f"A simulation of this run on {predictions.DEVICE} devices at the pace of"
        " their data sheet: wall-clock time, and shares of all device-time. A worker of the run is"
        " as many devices as there are to share out; adloco_jax/study/replay.py states the model."
    )
    header = (
        *("cluster", "devices", "sites", "time (s)", "useful (%)", "waiting (%)"),
        *("communication (%)", "idle (%)", "lost (%)"),
    )
    return page.table(caption, header, rows)


def _clusters_table(variants: Sequence[Variant]) -> str:
    """Times of each variant's first seed, a column per cluster."""
    rows = []
    for variant in variants:
        table = predictions.cluster_table(variant.runs[0])
        if isinstance(table, str):
            rows.append((variant.label, *["-"] * len(predictions.SIZES)))
        else:
            rows.append((variant.label, *(_short(row["wall_s"]) for row in table)))
    header = [f"{preset} {devices:,}" for preset, devices in predictions.SIZES]
    caption = (
        "Wall-clock seconds of each variant's first seed in a simulation, by cluster"
        f" and its number of {predictions.DEVICE} devices at the pace of their data sheet. More"
        " about each is in the variant's own part below."
    )
    return page.table(caption, ("variant", *header), rows)


def _theory(run: Run, book: _Book, stem: str) -> str:
    found = predictions.theory_of(run)
    if isinstance(found, str):
        return page.paragraph(f"Nothing to hold against the theory: {found}")
    parts = [book.figure(found.drawing, stem)]
    if found.constants is None:
        parts.append(page.paragraph(f"No constants: {found.reason}"))
    else:
        rows = [
            ("L, smoothness", f"{found.constants.smoothness:.4g}"),
            ("Δ0, gap to the lowest loss (nats)", f"{found.constants.gap:.4g}"),
            ("σ², gradient noise", f"{found.constants.noise:.4g}"),
            ("η of the norm test", f"{found.constants.eta:.4g}"),
        ]
        caption = "Constants fitted on this run; adloco_jax/study/theory.py says how."
        parts.append(page.table(caption, ("constant", "value"), rows))
    return "\n".join(parts)


def _assumptions() -> str:
    return page.bullets(theory.ASSUMPTIONS)
