"""The gradient analysis: against closed forms, brute force, and the run's own test."""

import itertools
import json
import math
import runpy
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adloco_jax.errors import CheckpointError, ConfigError, DataError, DivergedError
from adloco_jax.models.bert import Bert, classification_loss
from adloco_jax.run.build import build_model, load_data
from adloco_jax.run.config import default_config, validate
from adloco_jax.run.export import read_trained
from adloco_jax.run.ledger import read
from adloco_jax.study import gradients
from adloco_jax.study.gradients_figure import describe, figure
from adloco_jax.training import train

ROOT = Path(__file__).resolve().parents[1]


# --- Pure parts -------------------------------------------------------------------------------


def test_moments_of_a_sample_done_by_hand():
    # Centred: four times -2 and once 8; m2 = 80/5 = 16, m4 = (4 * 16 + 4096)/5 = 832.
    found = gradients.moments(np.array([[0, 0, 10, 0, 0]], np.float32))
    assert found == (2.0, 0.0, 4.0, 832 / 16**2 - 3)
    assert gradients.moments(np.array([-1.0, 1.0])).excess_kurtosis == -2
    assert math.isnan(gradients.moments(np.ones(3)).excess_kurtosis)


def test_moments_hold_beside_a_large_mean_in_float32():
    values = 1000 + np.random.default_rng(0).standard_normal(10**5).astype(np.float32)
    found = gradients.moments(values)
    assert found.std == pytest.approx(np.std(np.float64(values)), rel=1e-9)
    assert abs(found.excess_kurtosis) < 5 * math.sqrt(24 / 10**5)  # standard error sqrt(24 / n)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6])
def test_the_law_is_exact_over_all_batches(size):
    examples = np.random.default_rng(1).standard_normal((6, 3)) + 2
    mean = examples.mean(axis=0)
    squares = [
        np.sum((examples[list(batch)].mean(axis=0) - mean) ** 2)
        for batch in itertools.combinations(range(6), size)
    ]
    noise = examples.var(axis=0, ddof=1).sum()
    law = gradients.deviation_law(noise, size, 6)
    np.testing.assert_allclose(law**2, np.mean(squares), rtol=1e-12, atol=1e-30)
    independent = math.sqrt(examples.var(axis=0).sum() / size)
    assert law == pytest.approx(independent * math.sqrt((6 - size) / 5), rel=1e-12)


def test_noise_and_signal_are_unbiased():
    """Over all samples of three, drawn with replacement from four gradients."""
    population = np.random.default_rng(2).standard_normal((4, 2)) + 0.3
    found = []
    for index in itertools.product(range(4), repeat=3):
        sample = population[list(index)]
        square_sum, mean_norm = np.sum(sample**2), np.sum(sample.mean(axis=0) ** 2)
        found.append(gradients.noise_and_signal(square_sum, mean_norm, 3))
    noise, signal = np.mean(found, axis=0)
    assert noise == pytest.approx(population.var(axis=0).sum(), rel=1e-12)
    assert signal == pytest.approx(np.sum(population.mean(axis=0) ** 2), rel=1e-12)


def test_the_noise_scale_needs_a_signal():
    assert gradients.noise_scale(6.0, 2.0) == 3.0
    assert gradients.noise_scale(6.0, -1e-9) is gradients.noise_scale(None, 1.0) is None


def test_batches_do_not_repeat_a_sequence():
    batches = gradients.draw_batches(10, 7, 500, seed=3)
    assert batches.shape == (500, 7)
    assert all(len(set(batch)) == 7 for batch in batches.tolist())
    counts = np.bincount(batches.reshape(-1), minlength=10)
    assert np.all(abs(counts - 350) < 5 * math.sqrt(500 * 0.7 * 0.3))
    assert np.any(batches != gradients.draw_batches(10, 7, 500, seed=4))


# --- A loss whose gradients are known ---------------------------------------------------------


def quadratic(params, rows):
    """The gradient of a row x is params - x."""
    x = jnp.concatenate([params["a"].reshape(-1), params["b"]])
    return 0.5 * jnp.mean(jnp.sum(jnp.square(x[None] - rows), axis=1))


def start(width=12):
    return {"a": jnp.zeros((2, 3)), "b": jnp.zeros(width - 6)}


def rows_of(num_rows=40, width=12):
    """Gradient -x of mean -1/2, its coordinates of unequal spread."""
    noise = np.random.default_rng(5).standard_normal((num_rows, width)) * np.arange(1, width + 1)
    return (0.5 + noise).astype(np.float32)


def measure(rows, loss_fn=quadratic, params=None, **changed):
    arguments = dict(batch_sizes=[1, 5, 20, 39], draws=300, seed=0, pass_size=8) | changed
    params = start(rows.shape[1]) if params is None else params
    return gradients.measure(loss_fn, params, rows, **arguments)


@pytest.fixture(scope="module")
def measured():
    return measure(rows_of())


def test_the_mean_gradient_is_the_mean_in_float64():
    rows = (1 + 1e-3 * np.random.default_rng(6).standard_normal((1500, 12))).astype(np.float32)
    expected = -np.mean(np.float64(rows), axis=0)
    for pass_size, tolerance in ((1, 1e-14), (700, 3e-7)):
        seen = []
        found = gradients.mean_gradient(
            quadratic, start(), rows, pass_size=pass_size, on_sequences=seen.append
        )
        assert found["a"].dtype == np.float64 and sum(seen) == 1500
        flat = np.concatenate([found["a"].reshape(-1), found["b"]])
        np.testing.assert_allclose(flat, expected, rtol=tolerance)


def test_noise_and_signal_of_known_gradients(measured):
    rows = np.float64(rows_of())
    noise = rows.var(axis=0, ddof=1).sum()
    mean_norm = np.sum(rows.mean(axis=0) ** 2)
    assert measured.noise == pytest.approx(noise, rel=1e-5)
    assert measured.mean_norm == pytest.approx(mean_norm, rel=1e-5)
    assert measured.signal == pytest.approx(mean_norm - noise / 40, rel=1e-4)
    assert (measured.num_params, measured.num_coordinates) == (12, 12)


def test_each_deviation_is_that_of_its_batch(measured):
    rows = np.float64(rows_of())
    assert [scatter.batch_size for scatter in measured.batches] == [1, 5, 20, 39]
    for scatter in measured.batches:
        batches = gradients.draw_batches(40, scatter.batch_size, 300, seed=0)
        deviations = rows.mean(axis=0) - rows[batches].mean(axis=1)
        np.testing.assert_allclose(scatter.norms, np.linalg.norm(deviations, axis=1), rtol=1e-5)
        expected = gradients.moments(deviations)
        np.testing.assert_allclose(scatter.moments, expected, rtol=1e-4, atol=1e-5)
        own = deviations / np.sqrt(np.mean(deviations**2, axis=0))
        np.testing.assert_allclose(
            scatter.own_moments, gradients.moments(own), rtol=1e-4, atol=1e-5
        )
        bins = gradients.BIN_EDGES
        counts = np.histogram(deviations / expected.std, bins)[0]
        assert np.abs(counts - scatter.counts).sum() <= 4  # rounding at an edge
        assert np.abs(np.histogram(own, bins)[0] - scatter.own_counts).sum() <= 4


def test_the_scatter_keeps_the_law_within_sampling_error(measured):
    for scatter in measured.batches:
        squares = np.square(scatter.norms)
        error = squares.std() / math.sqrt(len(squares))
        assert abs(squares.mean() - scatter.law**2) < 4 * error
        assert error < 0.1 * scatter.law**2


def test_unequal_spread_is_heavy_tailed_only_on_one_scale(measured):
    scatter = measured.batches[2]
    assert scatter.moments.excess_kurtosis > 0.5
    assert abs(scatter.own_moments.excess_kurtosis) < 0.3


def test_passes_of_any_size_measure_the_same(measured):
    for pass_size in (1, 7, 999):
        other = measure(rows_of(), pass_size=pass_size, draws=5)
        assert other.noise == pytest.approx(measured.noise, rel=1e-5)
        for one, two in zip(measured.batches, other.batches, strict=True):
            np.testing.assert_allclose(one.norms[:5], two.norms, rtol=1e-5)


def test_progress_counts_every_sequence():
    seen = []
    measure(rows_of(), batch_sizes=[3, 7], draws=4, on_sequences=seen.append)
    assert sum(seen) == 2 * 40 + 4 * (3 + 7)


def test_many_coordinates_are_sampled_from_every_leaf(monkeypatch):
    monkeypatch.setattr(gradients, "MAX_COORDINATES", 500)
    rows = rows_of(width=2006)
    params = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(1000), "c": jnp.zeros(1000)}
    a, b, c = (np.asarray(leaf) for leaf in gradients._draw_coordinates(params, 500, seed=0))
    assert len(a) + len(b) + len(c) == 500 and 150 < len(b) < 350
    for places, size in ((a, 6), (b, 1000), (c, 1000)):
        assert np.all(np.diff(places) > 0) and np.all((places >= 0) & (places < size))
    everything = gradients._draw_coordinates(params, 2006, seed=0)
    assert [leaf.tolist() for leaf in everything] == [[*range(6)], [*range(1000)], [*range(1000)]]
    found = measure(rows, batch_sizes=[5], draws=3)
    assert (found.num_params, found.num_coordinates) == (2006, 500)
    assert found.batches[0].num_deviations == 1500


def test_coordinates_that_never_deviate_are_left_out_of_their_own_scale():
    rows = rows_of()
    rows[:, 3] = 7
    (scatter,) = measure(rows, batch_sizes=[5], draws=50).batches
    assert (scatter.num_deviations, scatter.num_own_deviations) == (50 * 12, 50 * 11)


def test_what_cannot_be_measured_is_said():
    broken = rows_of()
    broken[7, 2] = np.nan
    with pytest.raises(DivergedError, match="not finite"):
        measure(broken)
    with pytest.raises(DataError, match="no noise"):
        measure(np.zeros((40, 12), np.float32))


def test_a_classifier_is_measured_as_by_brute_force():
    network = Bert(13, 8, 1, 2, 12, max_length=8, num_classes=3)
    rng = np.random.default_rng(8)
    rows = rng.integers(0, 13, (12, 10), np.int32)
    rows[:, 0], rows[:, 1] = rng.integers(0, 3, 12), rng.integers(2, 9, 12)
    tokens_BL, lengths_B = jnp.asarray(rows[:, 2:]), jnp.asarray(rows[:, 1])
    params = jax.jit(network.init)(jax.random.key(0), tokens_BL, lengths_B)["params"]
    loss_fn = classification_loss(network)
    grads_B = jax.jit(jax.vmap(jax.grad(loss_fn), in_axes=(None, 0)))(params, rows[:, None])
    leaves = [np.float64(leaf).reshape(12, -1) for leaf in jax.tree.leaves(grads_B)]
    grads = np.concatenate(leaves, axis=1)
    found = measure(rows, loss_fn, params, batch_sizes=[3], draws=5, pass_size=4)
    assert found.noise == pytest.approx(grads.var(axis=0, ddof=1).sum(), rel=1e-4)
    batches = gradients.draw_batches(12, 3, 5, seed=0)
    norms = np.linalg.norm(grads[batches].mean(axis=1) - grads.mean(axis=0), axis=1)
    np.testing.assert_allclose(found.batches[0].norms, norms, rtol=1e-4)


# --- Beside the run's own estimates -----------------------------------------------------------


def line(number, trainer=0, **fields):
    common = dict(event="round", round=number, trainer=trainer, workers=2)
    return common | dict(noise=8.0, signal=4.0, test_value=10.0) | fields


def test_the_ledger_is_compared_by_ratios():
    config = default_config()
    config.batching.eta = 0.5
    events = [
        {"event": "start"},
        line(3),
        line(4, signal=-1.0),
        line(5),
        line(5, trainer=1, noise=None, signal=None, test_value=None),
        line(8),
    ]
    where = dict(round=4, noise=2.0, signal=1.0)
    found = gradients.compare(events, validate(config), trainer=None, **where)
    assert [(one["round"], one["trainer"]) for one in found] == [(3, 0), (4, 0), (5, 0), (5, 1)]
    assert [one["at_checkpoint"] for one in found] == [False, False, True, True]
    assert found[0]["noise_ratio"] == found[0]["signal_ratio"] == 4.0
    assert (found[0]["noise_scale"], found[0]["noise_scale_ratio"]) == (2.0, 1.0)
    # noise scale = test value * workers * eta^2
    assert found[0]["smoothed_noise_scale"] == 5.0
    assert found[0]["smoothed_noise_scale_ratio"] == 2.5
    assert found[1]["noise_scale"] is found[1]["noise_scale_ratio"] is None
    assert all(found[3][name] is None for name in found[3] if name.endswith(("_ratio", "scale")))
    (one,) = gradients.compare(events, validate(config), trainer=1, **where)
    assert one["trainer"] == 1
    config.batching.scope = "worker"
    assert gradients.compare(events, validate(config), trainer=0, **where)[0][
        "smoothed_noise_scale"
    ] == pytest.approx(2.5)


# --- Runs -------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llama", pytest.param("bert", marks=pytest.mark.slow)])
def run(request, tmp_path_factory):
    """A run of two rounds with a checkpoint of each, one trainer with one worker."""
    folder = tmp_path_factory.mktemp(request.param)
    config = default_config()
    config.num_rounds = 2
    config.model.update(
        dict(width=16, num_layers=1, num_heads=2, num_kv_heads=2, mlp_width=24, max_length=32)
    )
    config.data.sequence_length = 16
    config.data.num_sequences = 60
    config.ensemble.num_trainers = config.ensemble.num_workers = 1
    config.merge.policy = "none"
    config.inner.steps_per_round = 2
    config.inner.learning_rate = 1e-2
    config.batching.update(
        dict(initial_batch_size=4, max_batch_size=4, batch_cap=4, buckets=(4,), test_batch_size=8)
    )
    config.eval.num_sequences = 8
    config.checkpoint.every_rounds = 1
    config.checkpoint.keep = 2
    is_bert = request.param == "bert"
    rng, most = np.random.default_rng(0), 14 if is_bert else 140
    texts = ["".join(rng.choice(list("abcdefgh "), rng.integers(3, most))) for _ in range(80)]
    lines = [json.dumps({"text": t, "label": int("a" in t)}) + "\n" for t in texts]
    (folder / "texts.jsonl").write_text("".join(lines))
    config.data.heldout_frac = 0.2
    config.data.source, config.data.path = "jsonl", str(folder / "texts.jsonl")
    if is_bert:
        config.model.arch = "bert"
    one = jax.devices()[:1]
    with pytest.MonkeyPatch.context() as patch:  # several devices would share the only worker
        patch.setattr(jax, "devices", lambda: one)
        patch.setattr(jax, "local_devices", lambda: one)
        return train(config, folder / "r").workdir


def analyse(run, out, **changed):
    arguments = dict(num_sequences=60, batch_sizes=[2, 8], draws=4, seed=1, round=1)
    return gradients.analyse_run(run, out=out, **arguments | changed)


@pytest.fixture(scope="module")
def measured_once():
    """Of the same parameters, rows and settings, `gradients.measure` tells what it has told."""
    measure, known = gradients.measure, {}

    def remember(loss_fn, params, rows, *, on_sequences, **settings):
        content = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((params, rows))]
        key = (*content, repr(sorted(settings.items())))
        if key not in known:
            known[key] = measure(loss_fn, params, rows, on_sequences=on_sequences, **settings)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "measure", remember)
        yield


@pytest.fixture(scope="module")
def analysed(run, measured_once):
    return analyse(run, run / "analysis", command="python x")


@pytest.fixture(scope="module")
def per_example(run):
    """Gradients at the checkpoint, float64 [60 + 8, P]: of all rows, and of the next test's."""
    trained = read_trained(run, round=1)
    data, (_, loss_fn) = load_data(trained.settings), build_model(trained.settings)
    assert len(data.rows) == 60
    used = 2 * 4  # rows of the first round: two updates of batch 4
    rows = np.concatenate([data.rows, data.batch(0, 0, used, 8)]).astype(np.int32)
    grads_B = jax.jit(jax.vmap(jax.grad(loss_fn), in_axes=(None, 0)))(trained.params, rows[:, None])
    leaves = [np.float64(leaf).reshape(68, -1) for leaf in jax.tree.leaves(grads_B)]
    return np.concatenate(leaves, axis=1)


def test_a_run_is_measured_as_by_brute_force(analysed, per_example):
    grads = per_example[:60]
    noise, mean_norm = grads.var(axis=0, ddof=1).sum(), np.sum(grads.mean(axis=0) ** 2)
    assert analysed["num_params"] == grads.shape[1]
    assert analysed["noise"] == pytest.approx(noise, rel=1e-4)
    assert analysed["mean_gradient_norm"] == pytest.approx(math.sqrt(mean_norm), rel=1e-4)
    signal = mean_norm - noise / 60
    assert analysed["signal"] == pytest.approx(signal, rel=1e-3, abs=1e-4 * noise / 60)
    scale = pytest.approx(noise / signal, rel=1e-2) if signal > 0 else None
    assert analysed["noise_scale"] == scale
    for batch in analysed["batches"]:
        batches = gradients.draw_batches(60, batch["batch_size"], 4, seed=1)
        norms = np.linalg.norm(grads[batches].mean(axis=1) - grads.mean(axis=0), axis=1)
        np.testing.assert_allclose(batch["norms"], norms, rtol=1e-4)
        assert batch["norm_mean"] == pytest.approx(norms.mean(), rel=1e-4)
        assert batch["norm_std"] == pytest.approx(norms.std(ddof=1), rel=1e-3)


def test_the_test_after_the_checkpoint_saw_its_parameters(analysed, per_example):
    noise = per_example[60:].var(axis=0, ddof=1).sum()
    before, after = analysed["ledger"]
    assert (before["at_checkpoint"], after["at_checkpoint"]) == (False, True)
    assert after["noise"] == pytest.approx(noise, rel=1e-4)
    assert after["noise_ratio"] == pytest.approx(noise / analysed["noise"], rel=1e-4)
    assert abs(before["noise"] / noise - 1) > 1e-3


def test_the_script_prints_and_writes_the_same(run, analysed, monkeypatch, capsys):
    def script(*arguments):
        path = ROOT / "scripts" / "gradient_analysis.py"
        monkeypatch.setattr(sys, "argv", [str(path), "--workdir", str(run), *arguments])
        return runpy.run_path(str(path))["main"](), *capsys.readouterr()

    code, out, err = script("--batch-sizes", "4,x")
    assert code == 2 and out == "" and err.startswith("--batch-sizes 4,x: expected integers")
    numbers = ["--num-sequences", "60", "--batch-sizes", "8,2,8", "--draws", "4", "--seed", "1"]
    code, out, err = script(*numbers, "--trainer", "0", "--round", "1")
    assert (code, err) == (0, "")  # and no progress bar where no one watches
    assert "noise scale tr(Sigma)/|G|^2" in out and "\n   2*        0  " in out
    assert out.splitlines()[-1] == f"report: {run}/report/gradient_analysis.png"
    assert (run / "report" / "gradient_analysis.png").read_bytes().startswith(b"\x89PNG")
    first, second = (
        json.loads((run / folder / "gradient_analysis.json").read_text())
        for folder in ("analysis", "report")
    )
    assert first == json.loads(json.dumps(analysed))
    assert second.pop("command").endswith("--seed 1 --trainer 0 --round 1")
    assert (first.pop("source"), second.pop("source")) == ("only", "trainer 0")
    assert first.pop("command") == "python x"
    assert first == second
    assert first["unit"] == ("nats/example" if "bert" in str(run) else "nats/token")


@pytest.mark.parametrize(
    "changed, error, expected",
    [
        (dict(round=9), ConfigError, "round 9, have 2, 1|round 9, have 1, 2"),
        (dict(trainer=3), ConfigError, "no trainer 3, have 0"),
        (dict(batch_sizes=[2, 60]), ConfigError, "--batch-sizes 60: .* 60 sequences"),
        (dict(batch_sizes=[0]), ConfigError, "--batch-sizes 0: expected at least 1"),
        (dict(batch_sizes=[]), ConfigError, "--batch-sizes: expected at least one"),
        (dict(num_sequences=61), ConfigError, "--num-sequences 61: the run has 60"),
        (dict(num_sequences=1, batch_sizes=[1]), ConfigError, "--num-sequences 1: .* at least 2"),
        (dict(draws=1), ConfigError, "--draws 1"),
        (dict(seed=-1), ConfigError, "--seed -1"),
        (dict(pass_size=0), ConfigError, "--pass-size 0"),
        (dict(out="/dev/null/x"), ConfigError, "--out '/dev/null/x'"),
    ],
)
def test_what_is_out_of_range_is_named(run, tmp_path, changed, error, expected):
    with pytest.raises(error, match=expected) as caught:
        analyse(run, **{"out": tmp_path / "out"} | changed)
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "out" / "gradient_analysis.json").exists()


def test_a_folder_without_a_run_and_other_data_are_refused(run, tmp_path):
    with pytest.raises(CheckpointError, match="name the folder of a run"):
        analyse(tmp_path, None)
    shutil.copytree(run, tmp_path / "copy")
    ledger = tmp_path / "copy" / "ledger.jsonl"
    (fingerprint,) = {e["data_fingerprint"] for e in read(ledger) if e["event"] == "start"}
    ledger.write_text(ledger.read_text().replace(fingerprint, "0" * 64))
    with pytest.raises(DataError, match="not those that this run was trained on"):
        analyse(tmp_path / "copy", None)


# --- The figure -------------------------------------------------------------------------------


def result_of(measured, **changed):
    found = dict(
        command="python scripts/gradient_analysis.py --x='$a_$'",
        run="toy",
        round=3,
        source="trainer 1",
        unit="nats/token",
        seed=0,
        num_sequences=40,
        num_training_sequences=1000,
        draws=300,
        num_params=measured.num_params,
        num_coordinates=measured.num_coordinates,
        mean_gradient_norm=math.sqrt(measured.mean_norm),
        noise=measured.noise,
        signal=measured.signal,
        noise_scale=gradients.noise_scale(measured.noise, measured.signal),
        batches=[gradients._summary(scatter, measured.noise) for scatter in measured.batches],
        bin_edges=gradients.BIN_EDGES.tolist(),
        ledger=[],
    )
    return found | changed


def test_the_figure_shows_numbers_law_and_histograms(measured):
    result = result_of(measured)
    shown = figure(result)
    pooled, own, norms, text = shown.axes
    for ax in (pooled, own):
        assert ax.get_yscale() == "log" and "dimensionless" in ax.get_xlabel()
        assert ax.get_ylabel().startswith("density")
        labels = [label.get_text() for label in ax.get_legend().get_texts()]
        assert labels == ["b = 1", "b = 5", "b = 20", "b = 39", "normal, same variance"]
    assert "sequences" in norms.get_xlabel() and "nats/token" in norms.get_ylabel()
    law = norms.lines[1].get_xydata()
    size, height = law[100]
    assert height == pytest.approx(gradients.deviation_law(measured.noise, size, 40))
    assert f"{measured.noise:.4g}" in text.texts[0].get_text()
    assert result["command"] in shown.get_supxlabel().replace("\n", " ")


def test_densities_integrate_to_the_share_inside(measured):
    pooled = figure(result_of(measured)).axes[0]
    values, edges, _ = pooled.patches[0].get_data()
    assert np.nansum(values * np.diff(edges)) == pytest.approx(1.0)


def test_a_figure_without_signal_or_tests_is_drawn(measured, tmp_path):
    batches = [
        gradients._summary(measured.batches[0], 1.0) | {"batch_size": b} for b in range(1, 9)
    ]
    result = result_of(measured, signal=-1.0, noise_scale=None, batches=batches, command="")
    figure(result).savefig(tmp_path / "x.png")
    lines = describe(result)
    assert "noise scale tr(Sigma)/|G|^2 - sequences" in lines
    assert lines[-1] == "the run tested no batch around this round"
    assert max(map(len, lines)) <= 80
