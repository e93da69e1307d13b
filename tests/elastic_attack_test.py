"""Objects and responses that somebody has changed: nothing fails, and nothing else counts."""

import hashlib
import json
import math
import random

import jax
import numpy as np
import pytest
from learners import Here, InBucket
from safetensors.numpy import load, save
from toy import settings_of
from toy_runs import events, lines, run

from adloco_jax.elastic import store
from adloco_jax.elastic.formats import Request, WorkerRequest
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
    assert hit.loss == calm.loss and hit.controller == calm.controller
    kept = [[e | {"wire_bytes": 0} for e in lines(tmp_path / n)] for n in ("attacked", "refused")]
    assert kept[0] == kept[1]
    refused = events(tmp_path / "attacked", "learner", what="refused")
    assert len(refused) == NUM_SEEDS and {e["learner"] for e in refused} == {1}
    assert all(e["why"].isprintable() and len(e["why"]) < 400 for e in refused)
    assert runs.audit(tmp_path / "attacked") == []


def forged(rng, name, data):
    """An object with its own SHA-256, in which one field is not what it was."""
    if name.endswith(".json"):
        message = json.loads(data)["message"]
        spoil(rng, message)
        digest = hashlib.sha256(json.dumps(message).encode()).hexdigest()
        return json.dumps({"sha256": digest, "message": message}).encode()
    arrays = load(data[64:])
    content = json.loads(arrays["message"].tobytes())
    spoil(rng, rng.choice([content, content["message"] or content]))
    arrays["message"] = np.frombuffer(json.dumps(content).encode(), np.uint8)
    return hashlib.sha256(save(arrays)).hexdigest().encode() + save(arrays)


def spoil(rng, message):
    places = [(message, key) for key in message]
    for inner, key in places:  # grows
        if isinstance(inner[key], dict | list) and inner[key]:
            inside = inner[key]
            keys = range(len(inside)) if isinstance(inside, list) else inside
            places += [(inside, each) for each in keys]
    inner, key = rng.choice(places)
    new = rng.choice([*VALUES, "missing"])
    if new == "missing" and isinstance(inner, dict):
        del inner[key]
    else:
        inner[key] = new(inner[key], 1) if callable(new) else new


@pytest.mark.parametrize("what", ["responses params requests", "requests", "learners", "driver"])
def test_no_field_of_an_object_in_the_bucket_ends_the_driver(monkeypatch, tmp_path, what):
    def ended(name, seed):
        rng, get, spoilt, lasting = random.Random(seed), store.Store.get, [], set()

        def getting(self, name, **how):
            data = get(self, name, **how)
            if seed is None or data is None or name.split("/")[0] not in what.split():
                return data
            if what == "requests" and rng.random() < 0.1:
                lasting.add(name)
            is_good = spoilt[-1:] == [name] or rng.random() < 0.5  # not bad twice in a row
            is_good &= name not in lasting
            spoilt.append("" if is_good else name)
            return data if is_good else forged(rng, name, data)

        with monkeypatch.context() as patch:
            url = f"file://{tmp_path}/{name}-bucket"
            InBucket(patch, url)
            patch.setattr(store.Store, "get", getting)
            ended = run(tmp_path / name, settings_with(8, kind="bucket", address=url))
            return ended, len([*filter(None, spoilt)])

    hit, count = ended("hit", 1)
    assert hit.controller.round == 8 and count > 4
    assert runs.audit(tmp_path / "hit") == []
    if "responses" in what:  # what is read again only delays
        calm, _ = ended("calm", None)
        assert hit.loss == calm.loss and hit.controller == calm.controller
        jax.tree.map(np.testing.assert_array_equal, hit.ensemble, calm.ensemble)


FORGED = [
    *({name: 0} for name in ("micro_batch_size", "num_accum_steps", "num_updates", "round")),
    *({name: 10**6} for name in ("micro_batch_size", "num_accum_steps", "num_updates")),
    *({name: 2**62} for name in ("micro_batch_size", "num_updates", "work.start")),
    *({f"work.{name}": value} for name in ("start", "num_updates") for value in (-1, 1000)),
    *({"trainer": m} for m in (-1, 1)),
    *({"work.worker_id": worker_id} for worker_id in (-1, 0, 77)),
    {"work.num_updates": 0},
    {"work.num_tested": 10**6},
    {"work": []},
    {"work": [[1, 4, 2, 0]] * 2},
    {"request": None},
    {"states": [0]},
    *({"rates": rate} for rate in (-1.0, 1e9, math.nan)),
    {"params_sha256": "0" * 64},
    {"is_update": True},
]


def with_request(data, change):
    """A request with its own SHA-256, of which a field is another."""
    arrays = load(data[64:])
    content = json.loads(arrays["message"].tobytes())
    message = content["message"]
    request = dict(zip(Request._fields, message["request"], strict=True))
    work = dict(zip(WorkerRequest._fields, request["work"][0], strict=True))
    request["work"] = [work]
    for name, value in change.items():
        place = work if name.startswith("work.") else request if name in request else message
        place[name.removeprefix("work.")] = value
    request["work"] = [[*each.values()] if each is work else each for each in request["work"]]
    if "request" not in change:
        message["request"] = [*request.values()]
    arrays[".rate_T"] = np.full_like(arrays[".rate_T"], change.get("rates", 1e-3))
    arrays["message"] = np.frombuffer(json.dumps(content).encode(), np.uint8)
    return hashlib.sha256(save(arrays)).hexdigest().encode() + save(arrays)


def test_a_request_that_a_learner_cannot_run_is_refused_and_costs_one_round(monkeypatch, tmp_path):
    requests, get = {}, store.Store.get
    there = InBucket(monkeypatch, tmp_path / "bucket")

    def getting(self, name, **how):
        data, place = get(self, name, **how), len(events(tmp_path / "run", "round")) + 1
        if data is None or not name.startswith("requests/1/1-0/") or place % 2:
            return data
        return requests.setdefault(name, with_request(data, FORGED[place // 2 - 1]))

    monkeypatch.setattr(store.Store, "get", getting)
    settings = settings_with(2 * len(FORGED) + 1, kind="bucket", address=there.url)
    run(tmp_path / "run", settings)
    counted = [e["workers_counted"] for e in events(tmp_path / "run", "round")]
    assert counted == [2, *[1, 2] * len(FORGED)]
    faults = [e for e in events(tmp_path / "run", "learner") if e["what"] != "joined"]
    assert [(e["what"], e["learner"]) for e in faults] == [("refused", 1)] * len(FORGED)
    assert all("Error" not in e["why"] and e["why"].isprintable() for e in faults)
    assert runs.audit(tmp_path / "run") == []
