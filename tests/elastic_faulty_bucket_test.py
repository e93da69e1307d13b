"""Runs through an S3 server whose requests fail at random, with fixed seeds, then an audit."""

import datetime
import random
import time

import pytest
from learners import InBucket, opened
from toy import settings_of
from toy_runs import events, run

pytest.importorskip("obstore")
pytest.importorskip("moto")

from adloco_jax.data.formats import Format  # noqa: E402
from adloco_jax.elastic import objects, store  # noqa: E402
from adloco_jax.errors import ResourceError  # noqa: E402
from adloco_jax.host import processes  # noqa: E402
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

    def fate(n, incarnation, method, arguments):
        dies = method == "run_round" and not is_repaired and rng.random() < 0.05
        return "its process or its node has ended" if dies else "response"

    monkeypatch.setattr(faulty_store, "SLOW_S", 0.05)
    monkeypatch.setattr(objects, "SECOND", datetime.timedelta(milliseconds=50))
    with faulty_store.faulty(server, fault) as url:
        for name, value in faulty_store.environment(url).items():
            monkeypatch.setenv(name, value)
        InBucket(monkeypatch, f"s3://bkt/run{seed}", fate)
        settings = settings_of(
            num_rounds=4,
            ensemble={"num_trainers": 2, "num_workers": 2, "model_shards": 1},
            inner={"steps_per_round": 2},
            merge={"every_rounds": 2},
            engine={"kind": "bucket", "address": f"s3://bkt/run{seed}", "heartbeat_s": 4.0},
        )
        ended = run(tmp_path, settings)
    assert ended.state.control.round == 4 and runs.audit(tmp_path) == []
    lines = events(tmp_path, "round")
    assert ended.state.control.tokens_total == sum(line["tokens"] for line in lines)
    if is_repaired:
        assert [e for e in events(tmp_path, "learner") if e["what"] != "joined"] == []
        assert all(line["workers_counted"] == line["workers"] for line in lines)


@pytest.fixture
def short_deadlines(monkeypatch):
    monkeypatch.setattr(store, "LIMIT_S", 0.5)


@pytest.mark.usefixtures("short_deadlines")
def test_a_request_that_is_never_answered_is_asked_again(monkeypatch, server):
    seen, start_s = set(), time.monotonic()

    def fate(method, path, number):
        is_new = (method, path) not in seen
        seen.add((method, path))
        return "silent" if is_new else ""

    with faulty_store.faulty(server, fate) as url:
        for name, value in faulty_store.environment(url).items():
            monkeypatch.setenv(name, value)
        there = opened("s3://bkt/silent")
        there.put("a", b"1" * 100)
        assert there.create("b", Format())
        assert there.get("a") == b"1" * 100
        assert there.valid_message("b", Format) == Format()
        there.delete("a")
        assert there.names() == []  # one try: what is left costs space only
        assert time.monotonic() - start_s < 10  # six times 0.5 s, and a pause


@pytest.mark.usefixtures("short_deadlines")
def test_after_a_signal_nobody_waits_for_a_server_that_is_silent(monkeypatch, server):
    monkeypatch.setattr(processes, "is_asked_to_stop", lambda: True)
    with faulty_store.faulty(server, lambda *_: "silent") as url:
        for name, value in faulty_store.environment(url).items():
            monkeypatch.setenv(name, value)
        start_s, there = time.monotonic(), opened("s3://bkt/silent")
        with pytest.raises(ResourceError, match=r"cannot read \(no response in 0 s\)|no response"):
            there.get("a")
        assert time.monotonic() - start_s < 3


@pytest.mark.parametrize("where", ["s3", "file"])
def test_an_empty_object_is_damaged(monkeypatch, tmp_path, server, where):
    for name, value in faulty_store.environment(server).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(store, "READ_PAUSES_S", ())
    there = opened("s3://bkt/empty" if where == "s3" else tmp_path / "bucket")
    there._objects.put("1", b"")
    with pytest.raises(store.Refused, match="^1: 0 bytes"):
        there.read_with_arrays("1", 2**30, Format, lambda _: {})
    with pytest.raises(store.Refused, match="^1: 0 bytes"):
        there.read_message("1", Format)
    assert there.valid_message("1", Format) is None
