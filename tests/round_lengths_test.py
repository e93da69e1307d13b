"""Rules for the length of a round, and the outer step that depends on the length."""

import functools
import runpy
from pathlib import Path
from unittest import mock

import pytest
from toy import settings_of

from adloco_jax import ROUND_LENGTHS
from adloco_jax.loop import plans
from adloco_jax.loop.control import Control, Trainer

pytestmark = pytest.mark.usefixtures("one_device")

EXAMPLE = Path(__file__).parents[1] / "examples" / "round_length.py"
with mock.patch.dict(ROUND_LENGTHS):
    EXAMPLES = runpy.run_path(str(EXAMPLE))


def a_control(*, updates=0, tokens=0, rounds=0, round_length=1):
    """One trainer with two workers and batches of 4."""
    trainer = Trainer(4, [0, 1], round_length=round_length, updates=updates)
    return Control({0: trainer}, 4, 4, round=rounds, tokens_total=tokens)


def steps(settings, **how):
    return plans.round_plans(a_control(**how), settings)[0].num_updates


@pytest.mark.parametrize(
    ("rate", "updates", "length"), [(0.02, 9, 4), (0.01, 9, 9), (0.004, 9, 56.25), (0.004, 8, 4)]
)
def test_the_quadratic_rule_by_hand(rate, updates, length):
    rule, how = EXAMPLES["quadratic"], {"steps_per_round": 4, "warmup_updates": 9}
    assert rule(alpha=0.03, next_rate=rate, updates=updates, **how) == pytest.approx(length)


def test_rounds_lengthen_as_the_rate_falls_in_whole_base_rounds_up_to_the_caps(monkeypatch):
    rule = functools.partial(EXAMPLES["quadratic"], alpha=0.2)
    monkeypatch.setitem(ROUND_LENGTHS, "qsr", rule)
    inner = {"steps_per_round": 4, "learning_rate": 0.1, "schedule": "linear"}
    rule = {"round_length": "qsr", "warmup_updates": 9}
    ending = {"num_tokens": 64_000, "num_rounds": None}  # an update has 64 tokens
    settings = settings_of(inner=inner | rule, **ending)
    # (0.2 / (0.1 left))^2 is 4, 11.1, 25, and 1600, but 50 updates are left.
    for done, length in ((0, 4), (0.4, 8), (0.6, 24), (0.95, 52)):
        assert steps(settings, updates=9, tokens=int(64_000 * done)) == length
    assert steps(settings, updates=8, tokens=int(64_000 * 0.6)) == 4
    assert steps(settings, updates=9, tokens=int(64_000 * 0.4), round_length=3) == 24
    assert steps(settings, updates=9, tokens=int(64_000 * 0.95), round_length=3) == 52
    capped = settings_of(inner=inner | rule | {"max_steps_per_round": 12}, **ending)
    assert steps(capped, updates=9, tokens=int(64_000 * 0.6)) == 12


def test_the_rule_sees_the_rate_of_the_next_update(monkeypatch):
    """The rate includes warm-up and schedule."""
    inner = {"learning_rate": 0.1, "schedule": "cosine"}
    settings = settings_of(inner=inner | {"warmup_updates": 5}, num_tokens=10_000)
    seen = []

    def rule(*, next_rate, steps_per_round, **_):
        seen.append(next_rate)
        return steps_per_round

    monkeypatch.setitem(ROUND_LENGTHS, "fixed", rule)
    for updates in (2, 7):
        control = a_control(updates=updates, tokens=3000)
        (plan,) = plans.round_plans(control, settings).values()
        rate_T = plans.learning_rates(control, 0, plan, settings, round_tokens=192)
        assert seen[-1] == pytest.approx(rate_T[0])
    assert seen[0] == pytest.approx(0.6 * seen[1])


def test_a_linear_ramp_follows_the_share_of_the_run(monkeypatch):
    monkeypatch.setitem(ROUND_LENGTHS, "linear", EXAMPLES["linear"])
    ramp = {"steps_per_round": 4, "max_steps_per_round": 24, "round_length": "linear"}
    lengths = [steps(settings_of(inner=ramp, num_rounds=10), rounds=r) for r in range(10)]
    assert lengths == [4, 4, 8, 8, 12, 12, 16, 16, 20, 20]  # the rule gives 4, 6, 8 to 22
