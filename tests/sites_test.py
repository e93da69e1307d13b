"""The seconds of a round over slow links, and which method ends first there."""

import json
import statistics
from pathlib import Path

import pytest
from toy import settings_of, spec_of

from adloco_jax.errors import ConfigError
from adloco_jax.settings import bytes_per_s
from adloco_jax.study import sites
from adloco_jax.study.sites import FRONT, site_lines
from studies import tables

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.usefixtures("one_device")


def test_the_table_of_the_front_is_that_of_the_studies():
    lines = [json.loads(line) for line in (ROOT / "studies/front.jsonl").read_text().splitlines()]
    names = {f"DiLoCo, {length}": f"diloco, rounds of {length}" for length in (55, 110, 220, 440)}
    names |= {"pool by test, 220": "growing_pool"}
    found = {}
    for line in lines:
        name, cost = line["variant"].partition(":")[0], tables.cost(line, 1.6)
        found.setdefault(names.get(name), []).append(cost)
    for name in names.values():
        updates, syncs = FRONT[name]
        reached = [cost for cost in found[name] if cost]
        assert updates == round(statistics.median_low(cost.updates for cost in reached))
        assert syncs == round(statistics.median_low(cost.communications for cost in reached), 1)
    results = (ROOT / "studies/RESULTS.md").read_text()
    for name in ("data parallel", "one worker"):
        updates, _ = FRONT[{"data parallel": "data_parallel"}.get(name, "one machine")]
        assert f"| {name} | 5 of 5 | {updates:,} (" in results


def lines_of(link, tokens_per_s=800.0, **outer):
    """Four workers of 36 parameters, each with 2 sequences of 8 tokens an update."""
    settings = settings_of(
        ensemble={"num_trainers": 1},
        merge={"policy": "none"},
        outer=outer,
        inner={"steps_per_round": 10},
    )
    spec = spec_of(settings)
    return site_lines(settings, spec, link=link, sites=2, tokens_per_s=tokens_per_s)


def test_a_round_is_computing_uploads_the_drivers_part_and_a_download():
    update_s = 2 * 8 / 800
    sent_s = 144 / bytes_per_s("10kbit/s")
    parts = 2 * 10 * update_s, 2 * sent_s, 5 * sent_s, sent_s  # two workers at each site
    line, _ = lines_of("10kbit/s")
    computing, upload, driver, download = (f"{part:.3g} s" for part in parts)
    assert f" {sum(parts):.3g} s = computing 10 updates {computing} + upload {upload}" in line
    assert f"+ driver {driver} + download {download} (800 tokens/s, given)" in line


@pytest.mark.parametrize(
    ("link", "first"),
    [
        ("1Gbit/s", "data_parallel"),
        ("10kbit/s", "diloco, rounds of 110"),
        ("1kbit/s", "one machine"),
    ],
)
def test_the_slower_the_link_the_rarer_are_the_synchronisations_of_the_first(link, first):
    assert lines_of(link)[1].startswith(f"to one loss, {first} ends first; ")


def test_of_a_model_ten_times_the_measured_no_method_is_named(monkeypatch):
    line = lines_of("1kbit/s")[1]
    assert "ends first" in line and "(measured with four workers and 75,600 parameters" in line
    monkeypatch.setattr(sites, "MEASURED_PARAMS", 3.5)  # the toy has 36
    assert lines_of("1kbit/s")[1].startswith("which method ends first is not known for 36 param")


def test_speed_is_measured_if_it_is_not_given_and_must_be_a_speed():
    assert "tokens/s, measured here)" in lines_of("1Mbit/s", None)[0]
    for wrong in (0.0, float("nan"), -1.0):
        with pytest.raises(ConfigError, match="--tokens-per-s"):
            lines_of("1Mbit/s", wrong)
