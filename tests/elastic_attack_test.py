"""Responses and objects that somebody has changed: nothing fails, and nothing else counts."""

import math
import random

import jax
import numpy as np
import pytest
from learners import Here, InBucket, opened
from toy import settings_of
from toy_runs import events, lines, run

from adloco_jax.elastic import store
from adloco_jax.elastic.messages import DriverHeartbeat, Refused, RunDescription
from adloco_jax.elastic.signatures import find_key, keep_key
from adloco_jax.errors import ConfigError
from adloco_jax.run.join import join
from probes import runs

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
SECONDS = [np.array(seconds) for seconds in (-8.0, 1e308, math.nan, math.inf)]


def settings_with(num_rounds, **engine):
    engine = {"grace_s": 0.0, "heartbeat_s": 30.0, "restart_s": 60.0, "steps": "equal"} | engine
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


def changed(rng, response, other):
    """A response with one field that is not what was asked for."""
    while True:
        name = rng.choice(response._fields)
        more = {"seconds": SECONDS, "between_s": [np.full(3, s) for s in SECONDS]}.get(name, [])
        new, own = rng.choice(VALUES + more), getattr(response, name)
        if (
            name in ("stats_R", "seconds", "between_s")
            and callable(new)
            and new(own, other) is other
        ):
            continue  # another's measurement cannot be told from one's own
        found = new(own, getattr(other, name)) if callable(new) else new
        if not isinstance(new, np.ndarray) and rng.random() < 0.5:  # in the arrays
            with np.errstate(all="ignore"):
                found = jax.tree.map(lambda x: spoiled(rng, x), own)
        if not same(found, own):
            return response._replace(**{name: found})


def spoiled(rng, array):
    wrong = [array.ravel()[:0], np.stack([array, array]), array.astype("f8"), array.astype("i1")]
    return rng.choice([a for a in wrong if (a.dtype, a.size) != (array.dtype, array.size)])


def same(one, two):
    if jax.tree.structure(one) != jax.tree.structure(two):
        return False
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    return all(type(a) is type(b) and repr(a) == repr(b) for a, b in pairs)


def test_no_field_of_a_response_ends_the_driver_or_changes_what_counts(monkeypatch, tmp_path):
    def attacked(seed, responses):
        rng, (response,) = random.Random(seed), responses
        other = response._replace(loss_SR=response.loss_SR[:1], skipped_SR=response.skipped_SR[:1])
        one = [changed(rng, response, other)]
        return rng.choice([None, 7, [], [response, response], *[one] * 9])

    def ended(name, attack):
        def fate(n, incarnation, method, arguments):
            number = arguments[0].round if method == "run_round" else 0
            is_hit = n == 1 and 1 < number <= 1 + NUM_SEEDS
            return (lambda responses: attack(number, responses)) if is_hit else "response"

        with monkeypatch.context() as patch:
            Here(patch, fate)
            return run(tmp_path / name, settings_with(NUM_SEEDS + 2, kind="ray"))

    calm, hit = ended("refused", lambda seed, responses: None), ended("attacked", attacked)
    assert hit.loss == calm.loss and hit.state.control == calm.state.control
    kept = [[e | {"wire_bytes": 0} for e in lines(tmp_path / n)] for n in ("attacked", "refused")]
    assert kept[0] == kept[1]
    refused = events(tmp_path / "attacked", "learner", what="refused")
    assert len(refused) == NUM_SEEDS and {e["learner"] for e in refused} == {1}
    assert all(e["why"].isprintable() and len(e["why"]) < 400 for e in refused)
    assert runs.audit(tmp_path / "attacked") == []


# -- Objects of a bucket ---------------------------------------------------------------------

NAME, OWN = "learners/2/0-0.json", {"run": "a", "start": "s"}
HOSTILE = {
    "noise": lambda folder: (folder / NAME).write_bytes(b"{}"),
    "empty": lambda folder: (folder / NAME).write_bytes(b""),
    "large": lambda folder: (folder / NAME).write_bytes(bytes(2**20 + 200)),
    "another key": lambda folder: put(folder, NAME, key="l" * 32, **OWN),
    "another run": lambda folder: put(folder, NAME, run="b", start="s"),
    "an earlier start": lambda folder: put(folder, NAME, run="a", start="r"),
    "another name": lambda folder: put(folder, "learners/1/0-0.json", **OWN),
    "changed": lambda folder: change(put(folder, NAME, **OWN)),
}


def put(folder, name, **signed):
    opened(folder, **signed).put(name, store.to_json(DriverHeartbeat(count=7)))
    (folder / name).rename(folder / NAME)
    return folder / NAME


def change(path):
    path.write_bytes(path.read_bytes().replace(b'"count": 7', b'"count": 8'))


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_not_signed_for_its_place_and_start_does_not_exist(tmp_path, what):
    (tmp_path / NAME).parent.mkdir(parents=True)
    HOSTILE[what](tmp_path)
    there = opened(tmp_path, **OWN)
    with pytest.raises(Refused, match=f"^{NAME}: ") as error:
        there.get(NAME)
    assert "\n" not in str(error.value)
    assert there.valid_message(NAME, DriverHeartbeat) is None
    put(tmp_path, NAME, **OWN)
    assert there.valid_message(NAME, DriverHeartbeat) == DriverHeartbeat(count=7)


@pytest.mark.parametrize("kind", ["unsigned", "of an earlier start"])
def test_foreign_requests_and_responses_are_a_refusal_each_and_cost_a_round(
    monkeypatch, tmp_path, kind
):
    """The bucket has lost the driver's number, as somebody or a rule deletes what is old."""
    there, putting, folder = InBucket(monkeypatch, tmp_path / "bucket"), store.Store.put, {}
    there_is = lambda name: (tmp_path / "bucket" / name).read_bytes()  # noqa: E731

    def first(self, name, data):
        putting(self, name, data)
        folder[name] = there_is(name)

    def second(self, name, data):
        putting(self, name, data)
        if name in ("requests/1/1-0/2.safetensors", "responses/1/1-0/4.safetensors"):
            old = data if kind == "unsigned" else folder[name]
            assert old != there_is(name)
            (tmp_path / "bucket" / name).write_bytes(old)

    monkeypatch.setattr(store.Store, "put", first)
    run(tmp_path / "run", settings_with(5, kind="bucket", address=there.url))
    for name in ("run.json", "driver/1.json"):
        (tmp_path / "bucket" / name).unlink()
    monkeypatch.setattr(store.Store, "put", second)
    run(tmp_path / "run", settings_with(10, kind="bucket", address=there.url))
    counted = [e["workers_counted"] for e in events(tmp_path / "run", "round")]
    assert counted == [2] * 5 + [2, 1, 2, 1, 2]
    found = [e for e in events(tmp_path / "run", "learner") if e["what"] != "joined"]
    assert [(e["what"], e["learner"]) for e in found] == [("refused", 1)] * 2
    assert all("not signed with this run's ADLOCO_KEY" in e["why"] for e in found)
    assert runs.audit(tmp_path / "run") == []


def test_the_driver_makes_a_key_that_only_its_user_reads_and_prints_the_command(
    monkeypatch, tmp_path, capfd
):
    there, command = InBucket(monkeypatch, tmp_path / "bucket"), "to join, on up to 2 machines: "
    run(tmp_path / "one", settings_with(1, kind="bucket", address=there.url))
    assert (
        f'{command}adloco_jax.join({there.url!r}, ...) with ADLOCO_KEY="$A'
        in capfd.readouterr().out
    )
    assert not (tmp_path / "one/learners/key").exists()
    monkeypatch.delenv("ADLOCO_KEY")
    path = tmp_path / "two/learners/key"
    key = find_key(path)
    keep_key(path, key)
    assert find_key(path) == key == path.read_text() and len(bytes.fromhex(key)) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert find_key(tmp_path / "other") != key


def test_who_has_no_key_or_another_one_is_told_so(monkeypatch, tmp_path):
    monkeypatch.setattr(store, "READ_PAUSES_S", ())
    url = f"file://{tmp_path}/bucket"
    about = RunDescription(id="a", adloco_jax="1", fingerprint="a", commit="", settings={})
    opened(url).put("run.json", store.to_json(about))
    for key, why in [
        ("", "ADLOCO_KEY is not set; copy the whole command from the driver"),
        ("l" * 32, "run.json: damaged, or not signed with this run's ADLOCO_KEY; copy the whole"),
        ("short", "ADLOCO_KEY: has 5 characters, expected at least 32"),
    ]:
        monkeypatch.setenv("ADLOCO_KEY", key)
        with pytest.raises(ConfigError, match=why):
            join(url, own={})
    monkeypatch.delenv("ADLOCO_KEY")
    with pytest.raises(ConfigError, match="run.json: .*; delete it if no other run is there, else"):
        run(tmp_path / "run", settings_with(1, kind="bucket", address=url))
