"""The closing table and the page, on a small written ledger whose numbers are added by hand."""

import base64
import contextlib
import io
import json
import math
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path

import pytest
from ledgers import ROUNDS, write_run
from matplotlib.figure import Figure

from adloco_jax import main as cli
from adloco_jax.errors import ConfigError, DataError
from adloco_jax.run.ledger import Ledger
from adloco_jax.study import curves, report


@pytest.fixture(autouse=True, scope="module")
def coarse():
    """Figures of a ninth of the pixels: what they show is figures_test's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "_DPI", 50)
        yield


def sketch(runs, folder, **options):
    """A report's path; all figures but the loss, which has a user's words in it, are left empty."""
    savefig = Figure.savefig

    def save(figure, file, *, metadata, **settings):
        is_drawn = metadata["Title"].startswith("Loss")
        savefig(figure if is_drawn else Figure((1, 1)), file, metadata=metadata, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", save)
        return report.write(runs, folder, **options)


def test_the_table_has_the_hand_added_numbers(tmp_path):
    lines = report.closing_table(write_run(tmp_path, refusal=True)).splitlines()
    assert set(lines[1]) == {"-"}
    assert len({len(line) for line in lines[:5]}) == 1  # columns are flush
    assert [line.split() for line in lines[2:5]] == [
        # 16 tokens x 4 updates = 64 per sequence of the batch: 64 x (2x2 + 2x4 + 2x8 + 3x3x24)
        ["0", "1-6", "-", "2", "->", "20", "3", "15,616", "24", "2.2500"],
        ["1", "1-3", "2", "2", "->", "2", "1", "384", "12", "4.1200"],
        ["2", "1-6", "-", "2", "->", "9", "1", "1,920", "24", "2.8100"],
    ]
    assert lines[6:] == [
        "rounds          6",
        "tokens          17,920",
        "updates         60",
        # 500,000 bytes x (3 rounds x 2 workers + 3 rounds x 3 workers) + the merge's 250,000
        # + 125,000 of the refused one
        "communications  8 blocking, summed over trainers; 7.51 MiB moved",
        "merges          1, 1 refused",
        "batch growths   6, accumulating from round 4",
        "programs        3 compiled in 4.0 s, 1 of them from the cache",
        "memory          host 1.5 GiB peak, device 3 GiB peak, largest program 2.25 GiB",
        "wall time       0:01:15",
        "held-out loss   2.0000 nats/token, consensus (best) after round 6",
        "perplexity      7.3891",  # e squared
        "nats per byte   0.5000",  # a quarter of a token per byte
        "bits per byte   0.7213",  # over ln 2
    ]
    assert max(map(len, lines)) <= 80


def test_the_table_of_a_run_that_was_cut_short_says_what_is_missing(tmp_path):
    broken = report.closing_table(write_run(tmp_path / "broken", no_loss=(6,)))
    assert broken.splitlines()[2].endswith("not finite")
    assert "held-out loss   not finite, consensus (best) after round 6" in broken
    table = report.closing_table(write_run(tmp_path, evals=False, end=False, memory=False))
    assert "held-out loss   not evaluated" in table
    assert "wall time       -" in table and "memory          -\n" in table
    assert "per byte" not in table
    (tmp_path / "new").mkdir()
    start = (tmp_path / "ledger.jsonl").read_text().splitlines()[0]
    (tmp_path / "new" / "ledger.jsonl").write_text(f"{start}\n")
    table = report.closing_table(tmp_path / "new")
    assert "communications  0 blocking, summed over trainers; 0 bytes moved\n" in table


class Page(HTMLParser):
    """What a browser would see, and whether every element is closed where it should be."""

    VOID = {"meta", "img", "br", "hr", "link"}

    def __init__(self, path):
        super().__init__()
        self.source = Path(path).read_text(encoding="utf-8")
        self.tags, self.attributes, self.text, self.open, self.figures = [], [], "", [], []
        self.feed(self.source)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "figure":
            self.figures.append({"caption": ""})
        if tag == "img":
            self.figures[-1] |= dict(attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data
        if "figcaption" in self.open:
            self.figures[-1]["caption"] += data


SINGLE = {"loss", "batches", "merges", "noise", "time", "memory", "theory"}
HOSTILE = "</title><script>alert(1)</script><img src=x onerror=y> & $a_$ \"'"


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The report on one run, by its command: the run's folder, and the page's path."""
    folder = tmp_path_factory.mktemp("single")
    run = write_run(folder / "a run", refusal=True)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert cli.main(["report", str(run), "--out", str(folder / "report")]) == 0
    path = folder / "report" / "index.html"
    assert out.getvalue() == f"report: {path}\n"
    return run, path


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """The report on three seeds of one variant, and on another that was never evaluated."""
    folder = tmp_path_factory.mktemp("many" * 20)
    runs = [write_run(folder / f"a{i}", seed=i, loss_shift=0.1 * i) for i in range(3)]
    runs.append(write_run(folder / "b", learning_rate=1.0, evals=False))
    return runs, sketch(runs, folder / "report")


def test_one_run_leaves_a_page_its_figures_and_the_totals(single):
    _, path = single
    assert path.name == "index.html"
    assert {file.name for file in path.parent.iterdir()} == {
        "index.html",
        "summary.json",
        *(f"{name}.png" for name in SINGLE),
    }
    page = Page(path)
    assert page.source.startswith("<!DOCTYPE html>")
    sources = [figure["src"].removeprefix("data:image/png;base64,") for figure in page.figures]
    embedded = [base64.b64decode(source) for source in sources]
    files = {file.read_bytes() for file in path.parent.glob("*.png")}
    assert len(embedded) == len(SINGLE) and set(embedded) == files
    assert all(png.startswith(b"\x89PNG\r\n") for png in files)

    summary = json.loads((path.parent / "summary.json").read_text())
    assert summary["tokens_total"] == 17_920
    assert summary["bytes_total"] == 7_875_000
    assert summary["num_batch_growths"] == 6
    assert summary["nats_per_byte"] == pytest.approx(0.5)
    assert summary["bits_per_byte"] == pytest.approx(0.5 / math.log(2))


def test_every_figure_says_what_it_shows_and_the_command_that_made_it(single, many):
    run, path = single
    command = shlex.join(["adloco", "report", str(run), "--out", str(path.parent)])
    for figure in Page(path).figures:
        assert figure["alt"] and figure["caption"].startswith(f"{figure['alt']}. ")
        assert figure["caption"].endswith(f"made by {command}")
        assert len(figure["caption"]) > len(command) + 100
    page = Page(many[1])  # a long command is on the page once
    assert page.text.count(f"{many[0][-1]} --out") == 1
    assert all("the command at the top of Runs" in figure["caption"] for figure in page.figures)


def test_nothing_on_the_page_is_fetched_or_run_and_links_lead_to_its_parts(many):
    page = Page(many[1])
    for name, value in page.attributes:
        assert not name.startswith("on") and name not in ("srcset", "action", "style", "data")
        assert name not in ("src", "href") or re.match(r"#[\w-]+$|data:image/png;base64,", value)
    assert not {"script", "link", "iframe", "object", "base", "form", "svg"} & set(page.tags)
    assert "url(" not in page.source and "@import" not in page.source
    anchors = [value for name, value in page.attributes if name == "id"]
    assert len(anchors) == len(set(anchors))
    links = [value for name, value in page.attributes if name == "href"]
    assert links and {link.removeprefix("#") for link in links} <= set(anchors)


def test_text_from_ledgers_and_paths_is_escaped(tmp_path):
    settings = {"rounds": ROUNDS[:3], "merge": False}
    command = f"python {HOSTILE}"
    # Not evaluated, so its label is in a caption too.
    run = write_run(tmp_path / HOSTILE.replace("/", "|"), command=command, evals=False, **settings)
    strange = "_日本 𝔛 $a_$"
    plain = write_run(tmp_path / f"{strange}\udcff", learning_rate=1.0, **settings)
    page = Page(sketch([run, plain], tmp_path / "report", labels=[HOSTILE, strange]))
    assert "script" not in page.tags and page.tags.count("title") == 1
    assert page.tags.count("img") == len(page.figures)
    assert command in page.text and HOSTILE in page.text.replace(command, "")
    assert f"{strange}?" in page.text  # a folder's name that is no text
    assert f"not drawn: {HOSTILE}." in page.text


def test_many_runs_are_tables_by_variant_and_a_folded_part_for_each(many):
    _, path = many
    page = Page(path)
    assert page.tags.count("details") == 2
    assert "2.1000" in page.text and "2.0000 – 2.2000" in page.text  # losses at the end
    assert "Never evaluated, so not drawn: b." in page.text
    assert "gathering them is counted too" in page.text
    assert len(page.figures) == 1 + 2 * (len(SINGLE) - 1)
    summary = json.loads((path.parent / "summary.json").read_text())
    assert [run["loss"] for run in summary["a0"]] == pytest.approx([2.0, 2.1, 2.2])
    assert [(run["seed"], run["loss"]) for run in summary["b"]] == [(0, None)]


def test_an_unfinished_classifier_has_its_accuracy_drawn(tmp_path):
    run = write_run(tmp_path / "run", accuracy=0.75, memory=False, end=False)
    page = Page(sketch([run], tmp_path / "report"))
    drawn = [figure["alt"] for figure in page.figures]
    assert drawn[:2] == ["Loss against what it cost", "Accuracy against what it cost"]
    assert "Memory" not in drawn and "unfinished" in page.text


def test_a_mistake_is_one_line_and_leaves_no_folder(tmp_path, monkeypatch, capsys):
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.write("round", **dict.fromkeys(curves._FIELDS["round"].split(), 1))
    for wrong in ([tmp_path], []):
        with pytest.raises((DataError, ConfigError)) as raised:
            report.write(wrong, tmp_path / "report")
        assert "\n" not in str(raised.value)
    arguments = [str(tmp_path / "absent"), "--out", str(tmp_path / "report")]
    assert cli.main(["report", *arguments]) == 3
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert not (tmp_path / "report").exists()
