"""Answers, orders and boards that somebody has changed: nothing fails, and nothing else counts."""

import math
import random

import chaos
import jax
import numpy as np
import pytest
from learners import Here
from toy import settings_of
from toy_runs import events, lines, run

pytestmark = pytest.mark.usefixtures("one_device")

NUM_SEEDS = 100
# What takes a field's place; a function is given the value, and that of another worker.
VALUES = [
    None,
    "\x1b[2J\nround 99/99: done",
    [],
    10**400,
    2**62,
    -8,
    1e308,
    math.nan,
    math.inf,
    lambda own, other: other,
    lambda own, other: [own],
]


def settings_with(num_rounds, **engine):
    engine = {"grace_s": 0.0, "heartbeat_s": 30.0, "restart_s": 60.0} | engine
    return settings_of(
        num_rounds=num_rounds,
        ensemble={"num_trainers": 1, "num_workers": 2},
        inner={"steps_per_round": 2},
        merge={"policy": "none"},
        batching={"test": "norm", "eta": 9.0},
        eval={"every_rounds": num_rounds, "num_sequences": 8},
        checkpoint={"every_rounds": num_rounds},
        engine=engine,
    )


def changed(rng, answer, other):
    """An answer with one field that is not what was asked for."""
    while True:
        name, new = rng.choice(answer._fields), rng.choice(VALUES)
        own = getattr(answer, name)
        if name in ("stats_R", "seconds") and callable(new) and new(own, other) is other:
            continue  # another's measurement cannot be told from one's own
        found = new(own, getattr(other, name)) if callable(new) else new
        if isinstance(own, np.ndarray | tuple) and rng.random() < 0.5:  # in the arrays
            with np.errstate(all="ignore"):
                found = jax.tree.map(lambda x: spoiled(rng, x), own)
        if name == "seconds" and isinstance(found, float) and 0 <= found < 1e12:
            continue
        if not same(found, own):
            return answer._replace(**{name: found})


def spoiled(rng, array):
    wrong = [array[:0], np.stack([array, array]), array.astype("f8"), array.astype("i1")]
    return rng.choice([a for a in wrong if (a.dtype, a.size) != (array.dtype, array.size)])


def same(one, two):
    if jax.tree.structure(one) != jax.tree.structure(two):
        return False
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    return all(type(a) is type(b) and repr(a) == repr(b) for a, b in pairs)


def test_no_field_of_an_answer_ends_the_driver_or_changes_what_counts(monkeypatch, tmp_path):
    def attacked(seed, answers):
        rng, (answer,) = random.Random(seed), answers
        other = answer._replace(stream=0, num_updates=1, num_sequences=2, num_tested=1)
        one = [changed(rng, answer, other)]
        return rng.choice([None, 7, [], [answer, answer], *[one] * 9])

    def ended(name, attack):
        def fate(n, life, method, arguments):
            number = arguments[0].round if method == "play" else 0
            is_hit = n == 1 and 1 < number <= 1 + NUM_SEEDS
            return (lambda answers: attack(number, answers)) if is_hit else "answer"

        with monkeypatch.context() as patch:
            Here(patch, fate)
            return run(tmp_path / name, settings_with(NUM_SEEDS + 2, kind="ray"))

    calm, hit = ended("refused", lambda seed, answers: None), ended("attacked", attacked)
    assert hit.loss == calm.loss and hit.controller == calm.controller
    assert lines(tmp_path / "attacked") == lines(tmp_path / "refused")
    refused = events(tmp_path / "attacked", "learner", what="refused")
    assert len(refused) == NUM_SEEDS and {e["learner"] for e in refused} == {1}
    assert all(e["why"].isprintable() and len(e["why"]) < 400 for e in refused)
    assert chaos.audit(tmp_path / "attacked") == []
