"""Runs through an S3 server whose requests fail at random, with fixed seeds, then an audit."""

import datetime
import random

import pytest
from learners import InBucket
from toy import settings_of
from toy_runs import events, run

pytest.importorskip("obstore")
pytest.importorskip("moto")

from adloco_jax.elastic import store  # noqa: E402
from probes import faulty_store, runs  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_device")
REPAIRED = ("503", "reset", "lost", "cut", "slow")  # what a repeated request repairs
CALM = 40  # requests at the start, where a bucket that never worked is refused soon


@pytest.fixture(scope="module")
def server():
    with faulty_store.s3_server("bkt") as url:
        yield url


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, *range(2, 20)))]
)
def test_a_run_ends_and_counts_each_sequence_once(monkeypatch, tmp_path, server, seed):
    """With even seeds, repeated requests repair everything, so no learner may be lost."""
    rng, is_repaired = random.Random(seed), seed % 2 == 0
    long = {begin: rng.choice(["reset", "503", "expired"]) for begin in rng.sample(range(40), 2)}
    kinds = REPAIRED if is_repaired else (*REPAIRED, "wrong")

    def fault(method, path, number):
        if number > CALM and number // 20 in long:
            return long[number // 20]  # 20 requests in a row
        return rng.choice(kinds) if number > CALM and rng.random() < 0.08 else ""

    def fate(n, life, method, arguments):
        dies = method == "play" and not is_repaired and rng.random() < 0.05
        return "its process or its node has ended" if dies else "answer"

    monkeypatch.setattr(faulty_store, "SLOW_S", 0.05)
    monkeypatch.setattr(store, "_SECOND", datetime.timedelta(milliseconds=50))
    with faulty_store.faulty(server, fault) as url:
        for name, value in faulty_store.environment(url).items():
            monkeypatch.setenv(name, value)
        InBucket(monkeypatch, f"s3://bkt/run{seed}", fate)
        settings = settings_of(
            num_rounds=6,
            ensemble={"num_trainers": 2, "num_workers": 4, "model_shards": 1},
            inner={"steps_per_round": 2},
            merge={"every_rounds": 3},
            engine={"kind": "bucket", "address": f"s3://bkt/run{seed}", "heartbeat_s": 4.0},
        )
        ended = run(tmp_path, settings)
    assert ended.controller.round == 6 and runs.audit(tmp_path) == []
    lines = events(tmp_path, "round")
    assert ended.controller.tokens_total == sum(line["tokens"] for line in lines)
    if is_repaired:
        assert [e for e in events(tmp_path, "learner") if e["what"] != "joined"] == []
        assert all(line["workers_counted"] == line["workers"] for line in lines)
