"""Runs as variants, curves and bands, against numbers computed by hand."""

import math

import numpy as np
import pytest
from ledgers import round_line, write_run

from adloco_jax.errors import ConfigError
from adloco_jax.run.kept.ledger import Ledger
from adloco_jax.study import curves, summary


def test_two_curves_make_a_band_on_the_interval_that_both_cover():
    # On [2, 6]: the first falls from 8 to 4 (and stays), the second from 10 at x = 1 to 0 at 11.
    band = curves.band([([2, 6, 8], [8.0, 4.0, 4.0]), ([1, 6, 11], [10.0, 5.0, 0.0])])
    np.testing.assert_allclose(band, [[2, 6, 8], [8, 4, 3], [8.5, 4.5, 3.5], [9, 5, 4]])


def test_where_a_cost_stays_or_decreases_the_last_value_counts_in_order_of_cost():
    x, _, median, _ = curves.band([([0, 0, 3, 2, 4], [9.0, 8.0, 6.0, 7.0, 5.0])])
    assert x.tolist() == [0, 2, 3, 4] and median.tolist() == [8, 7, 6, 5]


def test_from_five_curves_on_the_band_is_of_quartiles():
    flat = [([0, 1], [float(y)] * 2) for y in (10, 0, 3, 1, 2)]
    assert [edge[0] for edge in curves.band(flat)] == [0, 1, 2, 3]
    assert curves.band(flat[:4])[3][0] == 10
    assert curves.band([flat[0], ([2, 3], [1.0, 1.0])])[0].size == 0  # no common range


def test_a_value_that_is_not_finite_breaks_the_band_only_next_to_it():
    _, _, median, _ = curves.band(
        [([0, 1, 2, 3, 4], [4.0, 3.0, math.nan, 1.0, 0.0]), ([0, 4], [5.0, 5.0])]
    )
    assert np.isnan(median).tolist() == [False, False, True, False, False]


def runs(folder, **settings):
    """Runs by the name of their folder, each with other settings."""
    return [curves.read_run(write_run(folder / name, **own)) for name, own in settings.items()]


def grouped(variants):
    return {variant.label: [run.folder.name for run in variant.runs] for variant in variants}


def test_runs_that_differ_in_their_seed_alone_are_one_variant(tmp_path):
    settings = {"a": dict(seed=0), "b": dict(learning_rate=1e-2), "c": dict(seed=7)}
    mixed = runs(tmp_path, **settings)
    assert grouped(curves.variants(mixed)) == {"a": ["a", "c"], "b": ["b"]}
    labels = list(grouped(curves.variants(mixed, labels=["A", "B", "A"])))
    assert labels == ["A", "B"]
    with Ledger(tmp_path / "a" / "ledger.jsonl") as ledger:  # a resumed run, with b's config
        ledger.write(**mixed[1].start)
    again = curves.read_run(tmp_path / "a")
    assert grouped(curves.variants([again, mixed[1]])) == {"a": ["a", "b"]}


def test_labels_are_folders_below_the_deepest_that_holds_all(tmp_path):
    rates = {"x/0": 1e-3, "x/1": 1e-3, "y/0": 1e-2}
    own = {n: dict(learning_rate=rate, seed=i) for i, (n, rate) in enumerate(rates.items())}
    read = runs(tmp_path, **own)
    assert list(grouped(curves.variants(read))) == ["x/0", "y/0"]
    assert list(grouped(curves.variants(read[:1]))) == ["0"]


def test_runs_and_labels_that_do_not_fit_are_the_users_mistake(tmp_path):
    a, b = runs(tmp_path, a={}, b=dict(learning_rate=1e-2))
    for wrong in (
        dict(runs=[]),
        dict(runs=[a, a]),
        dict(runs=[a, b], labels=["one"]),
        dict(runs=[a, b], labels=["same", "same"]),
    ):
        with pytest.raises(ConfigError) as raised:
            curves.variants(**wrong)
        assert "\n" not in str(raised.value)


def test_training_points_are_means_over_trainers_and_know_the_same_costs(tmp_path):
    events = curves.read_run(write_run(tmp_path)).events
    points = curves.training_points(events)
    assert points[3]["value"] == pytest.approx((2.90 + 3.51) / 2)
    heldout = curves.heldout_points(events)
    for cost in curves.COSTS:
        assert [p[cost] for p in points] == [p[cost] for p in heldout]
    alone = curves.training_points(events, trainer=1)
    assert [(p["round"], p["value"]) for p in alone] == [(1, 5.52), (2, 4.72), (3, 4.12)]
    assert alone[2]["tokens"] == 2816  # all trainers together


def test_seconds_are_divided_by_use():
    start, evaluation = {"event": "start"}, {"event": "eval", "eval_s": 2.5}
    events = [start | {"start_s": 7.0, "stall_s": 5.0}, round_line(1, step_s=20.0, stall_s=9.0)]
    events += [evaluation, evaluation, start | {"start_s": 1.0, "stall_s": 0.5}]  # resumed
    events += [start, round_line(2, step_s=20.0), {"event": "eval"}]  # by an earlier version
    used = {"start": 2.0 + 0.5, "compile": 5.0 + 0.5, "rounds": 40.0, "stall": 9.0, "eval": 5.0}
    assert curves.seconds_by_use(events) == used


def test_the_closing_table_counts_waits_for_programs_as_compiling(tmp_path):
    events = curves.read_run(write_run(tmp_path)).events
    events = [e | {"step_s": 20.0, "stall_s": 9.0} if e["event"] == "round" else e for e in events]
    total = len({e["round"] for e in events if e["event"] == "round"})
    said = dict(summary.totals_as_text(summary.totals(events)))["of which"]
    compiling, rounds = summary.seconds(9.0 * total), summary.seconds(11.0 * total)
    assert f"compiling {compiling}, rounds {rounds}, " in said
