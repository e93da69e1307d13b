"""The closing table and the page, on a small ledger with numbers computed by hand."""

import contextlib
import io
import json
import shlex
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from ledgers import ROUNDS, round_line, write_run

from adloco_jax import main as cli
from adloco_jax.errors import ConfigError, DataError
from adloco_jax.run.kept.ledger import Ledger
from adloco_jax.study import curves, report, summary


def test_the_table_has_the_hand_added_numbers(tmp_path):
    lines = summary.closing_table(write_run(tmp_path, refusal=True)).splitlines()
    assert set(lines[1]) == {"-"}
    assert len({len(line) for line in lines[:5]}) == 1  # columns are aligned
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
        # + 125,000 of the refused merge
        "synchronised    8 times, blocking, summed over trainers; 7.51 MiB moved",
        "merges          1, 1 refused",
        "batch growths   6",
        "programs        2 compiled, 1 from the cache",
        "memory          host 1.5 GiB peak, device 3 GiB peak, largest program 2.25 GiB",
        "wall time       0:01:15",
        "of which        start 0.0 s, compiling 0.0 s, rounds 1.2 s, evaluation 0.0 s",
        "held-out loss   2.0000 nats/token (chance 5.55), the best trainer after round 6",
        "perplexity      7.3891",  # e squared
        "nats per byte   0.5000",  # a quarter of a token per byte
        "bits per byte   0.7213",  # over ln 2
    ]
    assert max(map(len, lines)) <= 80


def test_the_table_says_what_was_lost_with_learners(tmp_path):
    write_run(tmp_path)
    path, lines = tmp_path / "ledger.jsonl", []
    for text in (tmp_path / "ledger.jsonl").read_text().splitlines():
        event = json.loads(text)
        if event["event"] == "round":
            event["workers_counted"] = event["workers"] - (event["round"] == 2)
        lines.append(event)
    missed = sum(e["event"] == "round" and e["round"] == 2 for e in lines)
    expected = sum(e["workers"] for e in lines if e["event"] == "round")
    share = f"{1 - missed / expected:.1%}: {expected - missed} of {expected}"
    gone = {"event": "learner", "round": 2, "learner": 1, "trainer": 0, "why": "its process"}
    lines[-1:-1] = [gone | {"what": what} for what in ("lost", "joined", "late", "refused")]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = summary.closing_table(tmp_path)
    assert "learners        1 lost, 1 late, 0 clipped, 0 rejected, 1 refused\n" in table
    assert f"participation   {share} workers' rounds counted\n" in table
    assert "goodput" not in table  # seconds of the learners' processes were not written
    page = Page(report.write([tmp_path], tmp_path / "report").read_text(encoding="utf-8"))
    assert "2" + "1" + "lost" + "its process" in "".join(page.text.split("\n"))


def a_round(trainer, up_s, step_s, *, tokens=100, counted=2):
    work = {"trainer": trainer, "tokens": tokens, "workers": 2, "workers_counted": counted}
    return {"event": "round", "up_s": up_s, "step_s": step_s} | work


def test_goodput_is_counted_tokens_over_the_time_up_at_the_rate_without_a_fault():
    start, lost = {"event": "start"}, {"event": "learner", "what": "lost"}
    calm = [a_round(0, 4.0, 2.0), a_round(1, 4.0, 2.0)]  # written together: 25 tokens a second
    first = [start, a_round(0, 10.0, 9.0), a_round(1, 10.0, 9.0)]  # starts and compiles
    assert summary.goodput(first) is None
    assert summary.goodput([*first, *calm]) == pytest.approx(400 / (28 * 25))
    struck = [a_round(0, 6.0, 3.0, tokens=50, counted=1), a_round(1, 6.0, 3.0)]
    hit = [*first, *calm, *struck]  # a worker did not count
    assert summary.goodput(hit) == pytest.approx(550 / (40 * 25))
    late = [lost, a_round(0, 7.0, 4.0), a_round(1, 7.0, 4.0)]  # its time was lost, nothing else
    assert summary.goodput([*hit, *late]) == pytest.approx(750 / (54 * 25))
    again = [*hit, *late, *first]  # resumed: the first rounds compile again
    assert summary.goodput(again) == pytest.approx(950 / (74 * 25))


def test_the_table_of_a_run_that_was_cut_short_says_what_is_missing(tmp_path):
    broken = summary.closing_table(write_run(tmp_path / "broken", no_loss=(6,)))
    assert broken.splitlines()[2].endswith("not finite")
    assert "held-out loss   not finite, the best trainer after round 6" in broken
    table = summary.closing_table(write_run(tmp_path, evals=False, end=False, memory=False))
    assert "held-out loss   not evaluated" in table
    assert "wall time       -" in table and "memory          -\n" in table
    assert "per byte" not in table
    (tmp_path / "new").mkdir()
    start = (tmp_path / "ledger.jsonl").read_text().splitlines()[0]
    (tmp_path / "new" / "ledger.jsonl").write_text(f"{start}\n")
    table = summary.closing_table(tmp_path / "new")
    assert "synchronised    0 times, blocking, summed over trainers; 0 bytes moved\n" in table


def test_a_finished_run_names_the_next_command(tmp_path, capsys):
    run = write_run(tmp_path / "runs of mine")
    (run / "export").mkdir()
    (run / "export" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    report.conclude(run)
    commands = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next: ")]
    assert commands == [f"next: adloco generate '{run}' --prompt \"The\""]


class Page(HTMLParser):
    """Parses the page like a browser and checks that every element is closed correctly."""

    VOID = {"meta", "img", "br", "hr", "link", "input"}

    def __init__(self, source):
        super().__init__()
        self.source = source
        self.tags, self.attributes, self.text, self.open = [], [], "", []
        self.num_charts = 0
        self.feed(source)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.num_charts += ("role", "img") in attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data


HOSTILE = "</title><script>alert(1)</script><img src=x onerror=y> & $a_$ \"'"


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The report of one run, made by the command: the run's folder and the page's path."""
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
    """The report of three seeds of a variant, and of a variant that was never evaluated."""
    folder = tmp_path_factory.mktemp("many")
    runs = [write_run(folder / f"a{i}", seed=i, loss_shift=0.1 * i) for i in range(3)]
    runs.append(write_run(folder / "b", learning_rate=1.0, evals=False))
    return report.write(runs, folder / "report")


def test_one_run_leaves_a_page_and_the_totals(single):
    run, path = single
    files = {file.name for file in path.parent.iterdir()}
    assert files == {"index.html", "loss.svg", "summary.json"}
    assert len(ET.parse(path.parent / "loss.svg").getroot().findall("{*}svg")) == 4
    page = Page(path.read_text(encoding="utf-8"))
    assert page.source.startswith("<!DOCTYPE html>")
    num_charts = {"costs": 4, "trainers": 1, "training": 1, "batches": 2, "test": 2}
    assert page.num_charts == sum(num_charts.values())
    command = shlex.join(["adloco", "report", str(run), "--out", str(path.parent)])
    assert page.text.count(command) == 1
    written = json.loads((path.parent / "summary.json").read_text())
    assert summary.totals(curves.read_run(run).events).items() <= written.items()


def test_nothing_on_the_page_is_fetched_or_run(single, many):
    for source in (single[1].read_text(), many.read_text()):
        page = Page(source)
        for name, _ in page.attributes:
            assert not name.startswith("on") and name not in ("src", "srcset", "href", "action")
        assert not {"script", "link", "iframe", "object", "base", "form", "img"} & set(page.tags)
        assert "url(" not in page.source and "@import" not in page.source
        anchors = [value for name, value in page.attributes if name == "id"]
        assert len(anchors) == len(set(anchors))
        assert "prefers-color-scheme: dark" in page.source


def test_text_from_ledgers_and_paths_is_escaped(tmp_path):
    settings = {"rounds": ROUNDS[:3], "merge": False}
    command = f"python {HOSTILE}"
    # The variant was not evaluated, so a caption names it too.
    run = write_run(tmp_path / HOSTILE.replace("/", "|"), command=command, evals=False, **settings)
    strange = "_日本 𝔛 $a_$"
    plain = write_run(tmp_path / f"{strange}\udcff", learning_rate=1.0, **settings)
    path = report.write([run, plain], tmp_path / "report", labels=[HOSTILE, strange])
    page = Page(path.read_text(encoding="utf-8"))
    assert (
        not {"script", "img"} & set(page.tags)
        and page.source.split("<body")[0].count("<title>") == 1
    )
    assert command in page.text and HOSTILE in page.text.replace(command, "")
    assert f"{strange}?" in page.text  # the folder's name is not valid text
    assert f"not drawn: {HOSTILE}." in page.text


def test_many_runs_are_a_table_that_is_the_legend(many):
    page = Page(many.read_text(encoding="utf-8"))
    assert "17.9 k" in page.text
    assert "2.1000" in page.text and "2.0000 – 2.2000" in page.text  # the final losses
    assert "Never evaluated, so not drawn: b." in page.text
    assert "gathering them is counted too" in page.text
    assert page.num_charts == 4
    keys = {value for name, value in page.attributes if name == "data-k"}
    assert keys == {"1", "2"} and page.source.count('<tr data-k="') == 2
    summary = json.loads((many.parent / "summary.json").read_text())
    assert [run["loss"] for run in summary["a0"]] == pytest.approx([2.0, 2.1, 2.2])
    assert [(run["seed"], run["loss"]) for run in summary["b"]] == [(0, None)]


def test_a_mistake_is_one_line_and_leaves_no_folder(tmp_path, monkeypatch, capsys):
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.write(**round_line(1))
    for wrong in ([tmp_path], []):
        with pytest.raises((DataError, ConfigError)) as raised:
            report.write(wrong, tmp_path / "report")
        assert "\n" not in str(raised.value)
    arguments = [str(tmp_path / "absent"), "--out", str(tmp_path / "report")]
    assert cli.main(["report", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert not (tmp_path / "report").exists()


def test_a_variants_name_is_plain_text_in_a_table():
    named = summary.markdown("a|b *c* <d> `e` $f$ ~g~ [h](i)\n# j")
    assert named == r"a\|b \*c\* \<d\> \`e\` \$f\$ \~g\~ \[h\](i) \# j"
