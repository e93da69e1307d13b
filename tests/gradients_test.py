"""The gradient analysis against closed forms, brute force, and the run's own test."""

import itertools
import json
import math
import re
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ledgers import round_line, start_line
from toy import Table, tiny_config

from adloco_jax import main as cli
from adloco_jax.config import default_config, validate
from adloco_jax.engine.spec import here
from adloco_jax.errors import ConfigError, DataError, DivergedError
from adloco_jax.run.assemble import build_model, load_data
from adloco_jax.run.export import Trained, read_trained
from adloco_jax.run.ledger import Ledger
from adloco_jax.study import gradients
from adloco_jax.study.gradients_figure import describe, figure
from adloco_jax.training import train

# --- Pure parts -------------------------------------------------------------------------------


def test_the_law_is_exact_over_all_batches():
    examples = np.random.default_rng(1).standard_normal((6, 3)) + 2
    mean = examples.mean(axis=0)
    for size in (1, 3, 6):
        squares = [
            np.sum((examples[list(batch)].mean(axis=0) - mean) ** 2)
            for batch in itertools.combinations(range(6), size)
        ]
        law = gradients.deviation_law(examples.var(axis=0, ddof=1).sum(), size, 6)
        np.testing.assert_allclose(law**2, np.mean(squares), rtol=1e-12, atol=1e-30)


def test_batches_do_not_repeat_a_sequence():
    batches = gradients.draw_batches(10, 7, 500, seed=3)
    assert all(len(set(batch)) == 7 for batch in batches.tolist())
    counts = np.bincount(batches.reshape(-1), minlength=10)
    assert np.all(abs(counts - 350) < 5 * math.sqrt(500 * 0.7 * 0.3))


# --- A loss whose gradients are known ---------------------------------------------------------


def quadratic(params, rows):
    """A loss whose gradient for a row x is params - x."""
    x = jnp.concatenate([params["a"].reshape(-1), params["b"]])
    return 0.5 * jnp.mean(jnp.sum(jnp.square(x[None] - rows), axis=1))


def rows_of(num_rows=40, width=12):
    """Rows whose gradients -x have mean -1/2 and coordinates of unequal spread."""
    noise = np.random.default_rng(5).standard_normal((num_rows, width)) * np.arange(1, width + 1)
    return (0.5 + noise).astype(np.float32)


def measure(rows, **changed):
    params = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(rows.shape[1] - 6)}
    arguments = dict(batch_sizes=[5, 20], draws=300, seed=0, pass_size=8) | changed
    return gradients.measure(quadratic, params, rows, **arguments)


@pytest.fixture(scope="module")
def measured():
    return measure(rows_of())


def test_noise_and_signal_of_known_gradients(measured):
    rows = np.float64(rows_of())
    noise = rows.var(axis=0, ddof=1).sum()
    mean_norm = np.sum(rows.mean(axis=0) ** 2)
    assert measured["noise"] == pytest.approx(noise, rel=1e-5)
    assert measured["mean_gradient_norm"] == pytest.approx(math.sqrt(mean_norm), rel=1e-6)
    assert measured["signal"] == pytest.approx(mean_norm - noise / 40, rel=1e-4)
    assert (measured["num_params"], measured["num_coordinates"]) == (12, 12)


def test_each_deviation_is_that_of_its_batch(measured):
    rows = np.float64(rows_of())
    assert [scatter["batch_size"] for scatter in measured["batches"]] == [5, 20]
    for scatter in measured["batches"]:
        batches = gradients.draw_batches(40, scatter["batch_size"], 300, seed=0)
        deviations = rows.mean(axis=0) - rows[batches].mean(axis=1)
        norms = np.linalg.norm(deviations, axis=1)
        np.testing.assert_allclose(scatter["norms"], norms, rtol=1e-5)
        assert scatter["norm_mean"] == pytest.approx(norms.mean(), rel=1e-5)
        assert scatter["norm_std"] == pytest.approx(norms.std(ddof=1), rel=1e-4)
        scaled = deviations / np.sqrt(np.mean(deviations**2, axis=0))
        kurtosis = np.mean(scaled**4) / np.mean(scaled**2) ** 2 - 3
        assert scatter["excess_kurtosis"] == pytest.approx(kurtosis, rel=1e-4, abs=1e-4)
        counts = np.histogram(scaled, gradients.BIN_EDGES)[0]
        assert np.abs(counts - scatter["counts"]).sum() <= 4  # rounding at the edge of a bin


@pytest.mark.parametrize("pass_size, tolerance", [(1, 1e-13), (7, 1e-6)])
def test_passes_of_any_size_measure_the_same(measured, pass_size, tolerance):
    seen, exact = [], np.linalg.norm(np.mean(np.float64(rows_of()), axis=0))
    other = measure(rows_of(), pass_size=pass_size, draws=5, on_sequences=seen.append)
    assert other["noise"] == pytest.approx(measured["noise"], rel=1e-5)
    assert other["mean_gradient_norm"] == pytest.approx(exact, rel=tolerance)  # summed in float64
    for one, two in zip(measured["batches"], other["batches"], strict=True):
        np.testing.assert_allclose(one["norms"][:5], two["norms"], rtol=1e-5)
    assert sum(seen) == 2 * 40 + 5 * (5 + 20)  # the progress bar reaches its end


def test_many_coordinates_are_sampled_and_constant_ones_are_left_out(monkeypatch):
    monkeypatch.setattr(gradients, "MAX_COORDINATES", 500)
    rows = rows_of(width=2006)
    rows[:, ::2] = 7
    found = measure(rows, batch_sizes=[5], draws=3)
    assert (found["num_params"], found["num_coordinates"]) == (2006, 500)
    (scatter,) = found["batches"]
    assert 600 < scatter["num_deviations"] < 900 and scatter["num_deviations"] % 3 == 0


def test_gradients_without_noise_or_not_finite_are_refused():
    broken = rows_of()
    broken[7, 2] = np.nan
    with pytest.raises(DivergedError, match="not finite"):
        measure(broken)
    with pytest.raises(DataError, match="no noise"):
        measure(np.zeros((40, 12), np.float32))


# --- Beside the run's own estimates -----------------------------------------------------------


def line(number, trainer=0, **fields):
    measured = dict(noise=8.0, signal=4.0, test_value=10.0)
    return round_line(number, trainer, **measured | fields)


def test_the_ledger_is_compared_by_ratios():
    events = [
        {"event": "start"},
        line(3),
        line(4, signal=-1.0),
        line(5),
        line(5, trainer=1, noise=None, signal=None, test_value=None),
        line(8),
    ]
    where = dict(round=4, noise=2.0, signal=1.0)
    found = gradients.compare(events, trainer=None, **where)
    assert [(one["round"], one["trainer"]) for one in found] == [(4, 0), (5, 0), (5, 1)]
    assert found[0]["noise_scale"] is found[0]["noise_scale_ratio"] is None
    assert found[1]["noise_ratio"] == found[1]["signal_ratio"] == 4.0
    assert (found[1]["noise_scale"], found[1]["noise_scale_ratio"]) == (2.0, 1.0)
    assert all(found[2][name] is None for name in found[2] if name.endswith(("_ratio", "scale")))
    (one,) = gradients.compare(events, trainer=1, **where)
    assert one["trainer"] == 1


# --- Runs -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_is_measured_as_by_brute_force(one_device, tmp_path):
    """One trainer with a single worker makes two rounds, with a checkpoint after each."""
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abcdefgh "), rng.integers(3, 140))) for _ in range(80)]
    lines = [json.dumps({"text": t}) + "\n" for t in texts]
    (tmp_path / "texts.jsonl").write_text("".join(lines))
    source = dict(source="jsonl", path=str(tmp_path / "texts.jsonl"), heldout_frac=0.2)
    one_size = dict(initial_batch_size=4, max_batch_size=4, batch_cap=4, buckets=(4,))
    config = tiny_config(
        num_rounds=2,
        data=source | {"num_sequences": 60},
        batching=one_size | {"test": "norm", "test_batch_size": 8},
        checkpoint={"every_rounds": 1, "keep": 2},
    )
    workdir = train(config, tmp_path / "r").workdir
    found = analyse(workdir, tmp_path / "analysis")

    # Gradients at the checkpoint, float64 [60 + 8, P], of all rows and of the next test's rows.
    trained = read_trained(workdir, here(), round=1)
    data, (_, loss_fn) = load_data(trained.settings), build_model(trained.settings)
    used = 2 * 4  # rows of the first round, two updates of batch 4
    rows = np.concatenate([data.rows, data.batch(0, 0, used, 8)]).astype(np.int32)
    grads_B = jax.jit(jax.vmap(jax.grad(loss_fn), in_axes=(None, 0)))(trained.params, rows[:, None])
    leaves = [np.float64(leaf).reshape(68, -1) for leaf in jax.tree.leaves(grads_B)]
    grads = np.concatenate(leaves, axis=1)
    noise = grads[:60].var(axis=0, ddof=1).sum()
    mean_norm = np.linalg.norm(grads[:60].mean(axis=0))
    assert found["num_params"] == grads.shape[1]
    assert found["noise"] == pytest.approx(noise, rel=1e-4)
    assert found["mean_gradient_norm"] == pytest.approx(mean_norm, rel=1e-4)
    # The test after the checkpoint used the checkpoint's parameters.
    noise = grads[60:].var(axis=0, ddof=1).sum()
    before, after = found["ledger"]
    assert (before["round"], after["round"]) == (1, 2)
    assert after["noise"] == pytest.approx(noise, rel=1e-4)
    assert abs(before["noise"] / noise - 1) > 1e-3


def analyse(workdir, out, **changed):
    arguments = dict(num_sequences=60, batch_sizes=[8], draws=4, seed=1, round=1)
    return gradients.analyse_run(workdir, here(), out=out, **arguments | changed)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run's folder with a ledger; the model is the quadratic, the data are 60 rows."""
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.write(**start_line(run="r", max_batch_size=4, data_fingerprint="table"))
        for event in (line(1), line(2)):
            ledger.write(**event)
    rows = np.random.default_rng(0).integers(-9, 9, (60, 12))
    params = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(6)}
    trained = Trained(validate(default_config()), params, None, 1, "trainer 0")
    monkeypatch.setattr(gradients, "check_workdir", lambda workdir: None)
    monkeypatch.setattr(gradients, "read_trained", lambda *_, **__: trained)
    monkeypatch.setattr(gradients, "load_data", lambda settings: Table(rows))
    monkeypatch.setattr(gradients, "build_model", lambda *_: (None, quadratic))
    return tmp_path


def test_the_command_prints_and_writes_the_same(run, capsys):
    def script(*arguments):
        return cli.main(["gradients", "--workdir", str(run), *arguments]), *capsys.readouterr()

    code, out, err = script("--batch-sizes", "4,x")
    assert code == 2 and out == "" and "--batch-sizes: 4,x: expected integers" in err
    numbers = ["--num-sequences", "60", "--batch-sizes", "8,8", "--draws", "4", "--seed", "1"]
    code, out, err = script(*numbers, "--round", "1")
    assert (code, err) == (0, "")  # no progress bar without a terminal
    assert "noise scale tr(Sigma)/|G|^2" in out and "\n    2        0  " in out
    assert len(ET.parse(run / "report" / "gradient_analysis.svg").findall("{*}svg")) == 2
    written = json.loads((run / "report" / "gradient_analysis.json").read_text())
    assert written.pop("command").endswith("--seed 1 --round 1")
    expected = json.loads(json.dumps(analyse(run, run / "analysis")))
    del expected["command"]
    assert written == expected and written["unit"] == "nats/token"
    assert [tested["round"] for tested in written["ledger"]] == [1, 2]


@pytest.mark.parametrize(
    "changed, expected",
    [
        (dict(batch_sizes=[2, 60]), "--batch-sizes 60: .* 60 sequences"),
        (dict(batch_sizes=[]), "--batch-sizes : expected one or more"),
        (dict(num_sequences=61), "--num-sequences 61: the run has 60"),
        (dict(draws=1, seed=-1, pass_size=0), "--draws 1.*\n--seed -1.*\n--pass-size 0"),
        (dict(out="/dev/null/x"), "--out '/dev/null/x'"),
    ],
)
def test_arguments_out_of_range_are_named(run, changed, expected):
    with pytest.raises(ConfigError, match=expected):
        analyse(run, **{"out": run / "out"} | changed)
    assert not (run / "out" / "gradient_analysis.json").exists()


def test_other_data_than_the_runs_are_refused(run):
    ledger = run / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace('"table"', '"another"'))
    with pytest.raises(DataError, match="have changed since this run was trained"):
        analyse(run, None)


# --- The figure -------------------------------------------------------------------------------


def result_of(measured, **changed):
    where = dict(run="toy", round=3, source="trainer 1", unit="nats/token", seed=0, draws=300)
    command = "adloco gradients --x='$a_$'"
    counts = dict(num_sequences=40, num_training_sequences=1000)
    return measured | where | counts | {"command": command, "ledger": []} | changed


def curves_of(panel):
    """The points of each curve by label, as fractions of the box from the left and from below."""
    found = {}
    for curve in panel.findall(".//{*}g"):
        pairs = re.findall(r"(\d+),(\d+)", curve.find("{*}svg/{*}path").get("d"))
        label = "".join(text.text for text in curve.findall(".//{*}tspan"))
        found[label] = np.array(pairs, float) / 4000 * [1, -1] + [0, 1]
    return found


def test_the_figure_shows_law_and_histograms(measured):
    result = result_of(measured)
    root = ET.fromstring(figure(result))
    coordinates, norms = map(curves_of, root.findall("{*}svg"))
    assert list(coordinates) == ["b = 5", "b = 20", "normal"]
    law, mean = norms["√(tr Σ / b): independent"], norms["mean, 10 % to 90 %"]
    assert law[0, 0] == 0 and law[-1, 0] == 1 and np.all(np.diff(law[:, 1]) <= 0)
    exact = norms["without replacement of 40"]
    nearest = exact[np.argmin(abs(exact[:, 0] - mean[0, 0]))]
    assert nearest[1] == pytest.approx(mean[0, 1], abs=0.05)
    assert result["command"] in " ".join(text.text or "" for text in root.findall(".//{*}text"))


def test_a_figure_without_signal_or_tests_is_drawn(measured):
    batches = [measured["batches"][0] | {"batch_size": b} for b in range(1, 9)]
    result = result_of(measured, signal=-1.0, noise_scale=None, batches=batches, command="")
    assert len(ET.fromstring(figure(result)).findall("{*}svg")) == 2
    lines = describe(result)
    assert "noise scale tr(Sigma)/|G|^2 - sequences" in lines
    assert lines[-1] == "the run tested no batch around this round"
    assert max(map(len, lines)) <= 80
