"""How often a run reads its rows: `num_epochs`, and what header and plan say about passes."""

import json
import math

import pytest
from toy import settings_of

from adloco_jax.data.sampling import order_of, with_rows
from adloco_jax.errors import ConfigError, DataError
from adloco_jax.loop.adloco import start
from adloco_jax.loop.control import count_round
from adloco_jax.loop.plans import is_over, round_plans
from adloco_jax.run.before.describe import length_lines, longer_lines
from adloco_jax.run.kept.folder import check_config, write_config


def epochs_of(num_epochs, *, workers=2, batch=4, steps=50, **more):
    """Settings of one trainer with a constant batch that reads rows `num_epochs` times."""
    groups = {
        "num_rounds": None,
        "num_epochs": num_epochs,
        "ensemble": {"num_trainers": 1, "num_workers": workers},
        "inner": {"steps_per_round": steps},
        "batching": {"test": "constant", "initial_batch_size": batch, "batch_cap": batch},
        "merge": {"policy": "none"},
    }
    groups["batching"] |= {"max_batch_size": batch, "buckets": (batch,)}
    return settings_of(**groups | more)


@pytest.mark.parametrize("num_epochs", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("rows", [8, 61, 1000])
def test_a_run_reads_its_rows_num_epochs_times_and_less_than_an_update_a_round_more(
    num_epochs, rows
):
    settings = epochs_of(num_epochs).with_rows(rows)
    control, num_updates = start(settings.ensemble, settings.batching, 4), []
    while not is_over(control, settings):
        plans = round_plans(control, settings)
        num_updates.append(plans[0].num_updates)
        length = settings.data.sequence_length
        control, _ = count_round(control, plans, sequence_length=length, sync_bytes=1, num_syncs=1)
    read = control.tokens_total / settings.data.sequence_length
    # Rounds are equally long, so each may have an update too many.
    assert num_epochs * rows <= read < num_epochs * rows + 2 * 4 * len(num_updates)
    of_pass = math.ceil(min(num_epochs, 1.0) * rows / 8)  # updates
    assert len({*num_updates}) == 1 and num_updates[0] == math.ceil(of_pass / -(-of_pass // 50))
    assert settings.with_rows(rows) == settings


def test_the_first_limit_ends_a_run_and_rounds_that_grow_keep_their_length():
    assert epochs_of(4.0, num_tokens=100).with_rows(1000).last_token == 100
    assert epochs_of(4.0, num_rounds=3).with_rows(1000).last_round == 3
    assert epochs_of(None, num_rounds=3).with_rows(10).inner.steps_per_round == 50
    growing = epochs_of(1.0, inner={"steps_per_round": 50, "max_steps_per_round": 100})
    assert growing.with_rows(10).inner.steps_per_round == 50


def test_a_run_is_resumed_by_the_config_that_began_it(tmp_path):
    given = epochs_of(1.0)
    recorded = given.with_rows(24)
    assert recorded.inner.steps_per_round == 3
    write_config(tmp_path, recorded)
    for resumed in (given, epochs_of(2.0)):  # more passes are harmless
        check_config(tmp_path, resumed, accept=False)


def test_rows_are_counted_and_a_warm_up_must_end_within_them():
    settings = epochs_of(1.0, data={"subset_frac": 0.25})
    assert with_rows(settings, 28).num_rows == 7  # those that the trainer draws
    with pytest.raises(ConfigError, match="num_epochs: the corpus has no `rows`"):
        with_rows(settings, 0)
    longer = epochs_of(1.0, inner={"steps_per_round": 50, "warmup_updates": 4})
    with pytest.raises(ConfigError, match="warmup_updates = 4, num_epochs = 1: .* over 28 rows"):
        with_rows(longer, 28)


def test_workers_that_the_rows_cannot_feed_are_refused():
    settings = epochs_of(None, workers=4, batch=8, num_rounds=2)
    with pytest.raises(DataError, match=r"data\.path=x: have 28 rows .* need 32, a batch of 8 for"):
        order_of(settings, 28, where="data.path=x")
    with pytest.raises(DataError, match=r"ensemble\.num_workers=3"):
        order_of(settings, 28, where="data.path=x")
    with pytest.raises(DataError, match="a smaller batch"):
        order_of(settings, 7, where="data.path=x")
    assert order_of(settings, 32, where="data.path=x").num_rows == 32


def test_header_and_plan_say_passes_and_time():
    """28 rows, 20 rounds of 50 updates of four workers with batches of 8: 1,143 passes."""
    settings = epochs_of(None, workers=4, batch=8, num_rounds=20).with_rows(28)
    rate = 32_000 * settings.data.sequence_length / 86_400  # a day
    line, often, few = length_lines(settings, rate, 1)
    assert "32,000 rows, 1,143 passes over the 28" in line and "1 day, 0:00:00" in line
    assert "1,143 times" in often and "1 row only" in few
    assert length_lines(epochs_of(1.0), math.nan, None) == []  # rows are not known yet
    assert longer_lines(epochs_of(1.0)) == longer_lines(settings) == []
    one_pass = epochs_of(1.0, workers=1, batch=7).with_rows(28)
    assert "warning: 4 updates in all, which" in length_lines(one_pass, rate, 99)[1]
    # a fifth of the rows: 2 rounds of 50 updates of 4 workers with batches of 8
    (line,) = longer_lines(epochs_of(None, workers=4, batch=8, num_rounds=2).with_rows(16_000))
    assert "about 20% of the rows" in line
    assert ": --config.num_rounds=none --config.num_epochs=1 (or" in line


def test_finetune_reads_chats_once():
    from adloco_jax.config import validate
    from adloco_jax.configs import finetune

    config = finetune.get_config()
    config.adapter.rank, config.data.source = 0, "stdlib"
    settings = validate(config).with_rows(2852)
    assert settings.last_round == math.inf and settings.num_epochs == 1
    assert settings.inner.steps_per_round == 45  # two rounds of the 90 updates
    assert json.loads(settings.model_dump_json())["num_rows"] == 2852
