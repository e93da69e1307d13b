"""Objects of a bucket, drivers and learners that share one, and what is refused; on a folder."""

import concurrent.futures
import importlib.util
import itertools
import math
import os
import re
import shutil
import signal
import threading
import time
import types

import jax
import numpy as np
import pytest
from learners import KEY, InBucket, opened
from learners import described as description
from toy import Table, bigram_loss, corpus, init_fn, settings_of
from toy_runs import events, run

from adloco_jax import __version__, join
from adloco_jax.config import validate
from adloco_jax.data.formats import Format
from adloco_jax.elastic import bucket, bucket_learner, learner, objects, store
from adloco_jax.elastic.messages import (
    DriverHeartbeat,
    LearnerHeartbeat,
    LearnerRequests,
    RequestId,
    RunDescription,
    array_bytes,
    check_form,
)
from adloco_jax.engine.model import spec_of
from adloco_jax.engine.spec import this_machine
from adloco_jax.errors import ConfigError, ResourceError
from adloco_jax.run import join as run_join
from adloco_jax.run.kept.folder import recorded_settings

pytestmark = pytest.mark.usefixtures("one_device")

QUICKSTART = "adloco_jax.configs.quickstart"
TREE = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(3)}
FORM = {"a": jax.ShapeDtypeStruct((2, 3), np.dtype("f4"))}


class About(Format):
    about: str


FORM |= {"b": jax.ShapeDtypeStruct((3,), np.dtype("f8"))}


def settings_at(url, num_workers=2, **engine):
    return settings_of(
        num_rounds=3,
        ensemble={"num_trainers": 1, "num_workers": num_workers},
        outer={"skip_single": True},
        merge={"policy": "none"},
        batching={"test": "constant"},
        engine={"kind": "bucket", "address": url, "heartbeat_s": 4.0, "steps": "equal"} | engine,
    )


@pytest.fixture(scope="module")
def ended(tmp_path_factory, one_device):
    """The folder of a bucket in which a run has ended."""
    folder = tmp_path_factory.mktemp("ended")
    with pytest.MonkeyPatch.context() as patch:
        run(folder / "one", settings_at(InBucket(patch, folder / "bucket").url))
    return folder / "bucket"


@pytest.fixture
def described(monkeypatch, ended, tmp_path):
    """A function that changes the run's description in a copy of that bucket; its address."""
    folder = shutil.copytree(ended, tmp_path / "bucket")

    monkeypatch.setenv("ADLOCO_KEY", KEY)

    def write(*, data=(), **changed):
        settings = description(folder).settings
        settings["data"] |= dict(data)
        description(folder, settings=settings, **changed)
        return f"file://{folder}"

    return write


@pytest.fixture
def there(monkeypatch, tmp_path):
    """A bucket, its driver and its learners, after a run in the folder `one`."""
    made = InBucket(monkeypatch, tmp_path / "bucket")
    run(tmp_path / "one", settings_at(made.url))
    return made


def request(generation, learner, number):
    return RequestId(generation=generation, learner=learner, incarnation=0, request=number)


def test_an_object_holds_what_was_packed_and_zeros_take_no_space():
    data = store.pack(About(about="it"), TREE)
    message, tree = store.unpack(data, "name", About, lambda _: FORM)
    assert message == About(about="it")
    jax.tree.map(np.testing.assert_array_equal, tree, TREE)
    large = store.pack(Format(), {"zeros": np.zeros(10**6)})
    assert len(large) < 500


@pytest.mark.parametrize("at", ["header", "last", "cut", "form"])
def test_an_altered_object_is_refused_by_name(at):
    data = bytearray(store.pack(Format(), TREE))
    form = dict(FORM)
    if at == "form":
        form["a"] = jax.ShapeDtypeStruct((3, 2), np.dtype("f4"))
    elif at == "cut":
        data = data[:-4]
    else:
        data[{"header": 30, "last": -1}[at]] ^= 1
    with pytest.raises(store.Refused, match="^requests/1: ") as error:
        store.unpack(bytes(data), "requests/1", Format, lambda _: form)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("link", ["file", "folder"])
def test_a_link_inside_a_folder_is_not_followed(tmp_path, link):
    outside, there = tmp_path / "outside", opened(tmp_path / "bucket")
    (outside / "own").mkdir(parents=True)
    (outside / "own" / "1").write_bytes(b"secret")
    if link == "folder":
        (tmp_path / "bucket" / "own").symlink_to(outside / "own")
    else:
        (tmp_path / "bucket" / "own").mkdir()
        (tmp_path / "bucket" / "own" / "1").symlink_to(outside / "own" / "1")
    with pytest.raises(store.Refused, match="own/1: not followed"):
        there.get("own/1")
    for write, what in ((there.put, b"other"), (there.create, Format())):
        with pytest.raises(ConfigError, match="own/1: not followed"):
            write("own/1", what)
    assert (outside / "own" / "1").read_bytes() == b"secret"


def test_what_was_damaged_on_its_way_is_read_again(monkeypatch, tmp_path):
    monkeypatch.setattr(store, "READ_PAUSES_S", (0.0, 0.0))
    there = opened(tmp_path / "bucket")
    there.put("requests/1", store.pack(Format(), TREE))
    get, damaged = there.get, [1, 2]

    def getting(name, *, limit):
        data = bytearray(get(name, limit=limit))
        data[-1] ^= bool(damaged and damaged.pop())
        return bytes(data)

    monkeypatch.setattr(there, "get", getting)
    _, tree, _ = there.read_with_arrays("requests/1", 2**20, Format, lambda _: FORM)
    assert tree["a"][1, 2] == 5 and damaged == []
    damaged[:] = [1, 2, 3]
    with pytest.raises(store.Refused, match="^requests/1: damaged"):
        there.read_with_arrays("requests/1", 2**20, Format, lambda _: FORM)


def test_a_link_carries_its_rate_in_each_direction_and_small_objects_beside_large_ones(tmp_path):
    there = opened(tmp_path / "bucket")
    there.limit_rate("8Mbit/s")
    start_s = time.monotonic()
    large = threading.Thread(target=there.put, args=("large", bytes(1_000_000)))
    large.start()
    time.sleep(0.1)
    there.put("heartbeat", bytes(300))
    assert time.monotonic() - start_s < 0.5 and large.is_alive()
    assert there.get("heartbeat") == bytes(300)
    large.join()
    up_s = time.monotonic() - start_s
    assert len(there.get("large", limit=2_000_000)) == 1_000_000
    down_s = time.monotonic() - start_s - up_s
    for seconds in (up_s, down_s):  # of which headers of packets take a twentieth
        assert 0.95 < seconds < 1.5


def test_a_drivers_first_round_is_saved_at_once(there, tmp_path):
    assert [e["round"] for e in events(tmp_path / "one", "checkpoint")] == [1, 3]


def test_driver_and_learners_of_a_run_have_its_link(monkeypatch, tmp_path):
    held, hold = [], store.Store.limit_rate
    monkeypatch.setattr(
        store.Store, "limit_rate", lambda s, link: held.append(link) or hold(s, link)
    )
    check, there = bucket.check_possible, InBucket(monkeypatch, tmp_path / "bucket")
    run(tmp_path / "run", settings_at(there.url, link="9Gbit/s"))
    assert held.count("9Gbit/s") == 3  # a driver and two learners
    with pytest.raises(ConfigError, match="engine.link = '9Gbit/s', now ''"):
        check(settings_at(there.url), tmp_path / "run")


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int4"])
def test_states_travel_in_the_outer_precision_and_no_second_moment_becomes_zero(precision):
    outer = settings_at("file:///bucket").outer.model_copy(update={"precision": precision})
    settings = settings_at("file:///bucket").model_copy(update={"outer": outer})
    spec, rng = spec_of(settings, this_machine()), np.random.default_rng(0)
    form = jax.eval_shape(spec.inner_tx.init, spec.params)
    state = jax.tree.map(lambda x: (10 ** rng.uniform(-9, 0, x.shape)).astype(x.dtype), form)
    sent = jax.device_get(learner.pack_state(state, precision))
    check_form(sent, learner.state_form(spec), "state")
    found, whole = learner.unpack_state(sent, spec), array_bytes(state)
    assert jax.tree.map(np.shape, found) == jax.tree.map(np.shape, state)
    relative = {"float32": 0.0, "bfloat16": 2**-8, "int4": 2**-8}[precision]
    for (path, have), want in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(state), strict=True
    ):
        is_first = ".mu" in jax.tree_util.keystr(path)
        atol = want.max() / 13 if is_first and precision == "int4" else 0.0
        np.testing.assert_allclose(have, want, rtol=relative, atol=atol)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(sent))
    assert size <= whole * {"float32": 1.0, "bfloat16": 0.51, "int4": 0.35}[precision]


def test_a_second_driver_is_refused_while_the_first_works_and_takes_over_when_it_does_not(
    monkeypatch, tmp_path
):
    there = opened(tmp_path / "bucket")
    there.put("driver/1.json", store.to_json(DriverHeartbeat(count=1)))
    clock = types.SimpleNamespace(now_s=0.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(bucket, "time", clock)

    def writes_until(end_s):
        def sleep(seconds):
            clock.now_s += seconds
            if clock.now_s < end_s:  # of a dead driver older heartbeats are seen for a while
                heartbeat = DriverHeartbeat(count=int(clock.now_s) + 2)
                there.put("driver/1.json", store.to_json(heartbeat))

        return sleep

    clock.sleep = writes_until(math.inf)
    with pytest.raises(ConfigError, match="another driver runs there") as error:
        bucket.become_next_driver(there, 0, 4.0)
    assert "\n" not in str(error.value) and 4 < clock.now_s < 10
    for writes_s, next_generation in ((3.5, 2), (0.0, 3)):
        clock.now_s, clock.sleep = 0.0, writes_until(writes_s)
        assert bucket.become_next_driver(there, 1, 4.0) == next_generation and 4 <= clock.now_s <= 8


def test_an_old_list_of_drivers_is_looked_at_again(monkeypatch, tmp_path):
    there = opened(tmp_path / "bucket")
    for generation in (1, 2):
        heartbeat = DriverHeartbeat(count=9, has_ended=True)
        there.put(f"driver/{generation}.json", store.to_json(heartbeat))
    clock = types.SimpleNamespace(now_s=0.0, monotonic=lambda: clock.now_s)
    clock.sleep = lambda seconds: setattr(clock, "now_s", clock.now_s + seconds)
    monkeypatch.setattr(bucket, "time", clock)
    get = there.get

    def old(name, **how):
        return get(name, **how) if name != "driver/2.json" or clock.now_s > 2 else None

    monkeypatch.setattr(there, "get", old)
    assert bucket.become_next_driver(there, 1, 4.0) == 3 and clock.now_s < 4


def test_a_prefix_with_another_run_is_refused_and_a_copy_of_the_folder_goes_on(
    monkeypatch, tmp_path
):
    check, there = bucket.check_possible, InBucket(monkeypatch, tmp_path / "bucket")
    run(tmp_path / "one", settings_at(there.url))
    with pytest.raises(
        ConfigError, match="holds another run; name another, such as .*-2$"
    ) as error:
        run(tmp_path / "two", settings_at(there.url))
    assert error.value.exit_code == 2 and "\n" not in str(error.value)
    inner = settings_at(there.url).inner.model_copy(update={"weight_decay": 0.25})
    other = settings_at(there.url).model_copy(update={"inner": inner, "num_rounds": 4})
    with pytest.raises(ConfigError, match=r"have inner.weight_decay = 0.1, now 0.25; change it"):
        check(other, tmp_path / "one")
    longer = settings_at(there.url).model_copy(update={"num_rounds": 5})
    ended = run(tmp_path / "one", longer)
    assert ended.state.control.round == 5
    assert {e["what"] for e in events(tmp_path / "one", "learner")} == {"joined"}


def test_rounds_that_epochs_have_shortened_are_those_of_the_bucket(monkeypatch, tmp_path):
    check, there = bucket.check_possible, InBucket(monkeypatch, tmp_path / "bucket")
    settings = settings_at(there.url).model_copy(update={"num_rounds": 1, "num_epochs": 0.02})
    steps = settings.inner.model_copy(update={"steps_per_round": 7})
    settings = settings.model_copy(update={"inner": steps})
    run(tmp_path / "one", settings)
    assert recorded_settings(tmp_path / "one").inner.steps_per_round < 7
    check(settings, tmp_path / "one")


def test_an_old_driver_that_comes_back_ends(monkeypatch, tmp_path):
    def fate(n, incarnation, method, arguments):
        if method == "run_round" and arguments[0].round == 2:
            description(tmp_path / "bucket", driver=2)
        return "response"

    there = InBucket(monkeypatch, tmp_path / "bucket", fate)
    with pytest.raises(ResourceError, match="another driver has taken over"):
        run(tmp_path / "run", settings_at(there.url).model_copy(update={"num_rounds": 9}))


@pytest.mark.parametrize("how", ["deleted", "noise", "another"])
def test_what_the_driver_still_has_is_put_again_and_a_new_learner_finds_it(
    monkeypatch, tmp_path, how
):
    """A lifecycle rule deletes what is old; somebody writes into the bucket."""
    folder, spoilt = tmp_path / "bucket", []

    def fate(n, incarnation, method, arguments):
        if method == "run_round" and arguments[0].round == 2 and not spoilt:
            spoilt.append(description(folder))
            if how == "another":
                description(folder, id="another")
                return "response"
            for name in ("run.json", "driver/1.json"):
                (folder / name).write_bytes(b"{}")
                if how == "deleted":
                    (folder / name).unlink()
        dies = method == "run_round" and (n, incarnation, arguments[0].round) == (1, 0, 3)
        return "its process has ended" if dies else "response"

    there = InBucket(monkeypatch, folder, fate)
    ended = run(tmp_path / "run", settings_at(there.url).model_copy(update={"num_rounds": 5}))
    assert ended.state.control.round == 5 and (1, 1) in there.learners
    assert description(folder) == spoilt[0]


def test_what_cannot_be_a_bucket_is_refused_in_one_line(monkeypatch, tmp_path):
    for url in (f"file://{tmp_path}/no/run", "ftp://host/run", "s3://", f"{tmp_path}/run", "run"):
        with pytest.raises(ConfigError) as error:
            store.open_bucket(url, KEY)
        assert str(error.value).startswith(url) and "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="is no folder here; make it"):
        bucket.check_possible(settings_at(f"file://{tmp_path}/no/run"), tmp_path / "r")
    opened(tmp_path / "other").put("run.json", store.to_json(About(about="another")))
    with pytest.raises(ConfigError, match="run.json: .*; delete it if no other run is there"):
        bucket.check_possible(settings_at(f"file://{tmp_path}/other"), tmp_path / "r")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install obstore"):
        run(tmp_path / "r", settings_at(f"file://{tmp_path}/bucket"))
    assert not (tmp_path / "r").exists() and not (tmp_path / "bucket").exists()


FAR = {"data": {"source": "text", "path": "s3://x/text"}, "by_fit": False, "fingerprint": "other"}


@pytest.mark.parametrize(
    ("changed", "given", "words"),
    [
        ({"adloco_jax": "other", "by_fit": False}, {}, "the driver has "),
        ({"fingerprint": "other", "by_fit": False}, {}, "the driver has "),
        ({}, {}, "of fit: call adloco_jax.join there, "),
        ({"by_fit": False}, {"fingerprint": "table"}, "of train: write adloco join, "),
        ({}, {"fingerprint": "other"}, "the driver has other data"),
        (FAR, {}, "data.path = 's3://x/text'; .*--accept-data"),  # only the driver names it
        (FAR, {"own": {"data.path": "s3://x/text"}}, "other d"),
        (FAR, {"accepts_data": True}, "other d"),
    ],
)
def test_a_machine_that_does_not_fit_does_not_join(monkeypatch, described, changed, given, words):
    url = described(**changed)
    data, base = (types.SimpleNamespace(fingerprint=name) for name in ("table", ""))
    here_too = types.SimpleNamespace(corpus=data, model=types.SimpleNamespace(base=base))
    with pytest.raises(ConfigError, match=words) as error:
        if "fingerprint" in given:  # rows of `fit`
            rows = Table(corpus().rows, given["fingerprint"])
            join(url, corpus=rows, init_fn=init_fn, loss_fn=bigram_loss)
        else:
            monkeypatch.setattr(run_join, "assemble", lambda *_, **__: here_too)
            run_join.join(url, **{"own": {}} | given)
    assert error.value.exit_code == 2 and "\n" not in str(error.value)


def test_a_learner_prints_a_line_for_each_answer(monkeypatch, tmp_path, capfd, shared_programs):
    shared_programs.clear()  # other tests have compiled them
    there = InBucket(monkeypatch, tmp_path / "bucket")
    run(tmp_path / "one", settings_at(there.url, num_workers=1))
    said = capfd.readouterr().out
    assert re.search(
        r"^compiling program 1 of \d\n(compiled|read it from .*) in \d+\.\d s", said, re.M
    )
    assert "round 1 of trainer 0: loss 1." in said and "; waited 0.0 s, prepared " in said
    assert "round 3 of trainer 0: loss 1." in said  # its parameters are not sent


def test_a_store_that_overwrites_what_it_should_keep_is_refused(monkeypatch, tmp_path):
    def create(self, name, message):
        return self.put(name, store.to_json(message)) is None

    monkeypatch.setattr(store.Store, "create", create)
    with pytest.raises(ConfigError, match="If-None-Match"):
        bucket.check_possible(settings_at(f"file://{tmp_path}/bucket"), tmp_path / "r")


def test_a_learner_goes_to_the_newest_driver_and_ignores_older_heartbeats(there, tmp_path, capfd):
    one, *_ = there.learners.values()
    one.handle, one.generation, one.driver, shared = None, 0, DriverHeartbeat(count=0), one._store
    capfd.readouterr()

    def write(generation, count, **heartbeat):
        start = {"adloco_jax": __version__, "start": f"start {generation}"}
        heartbeat = DriverHeartbeat(count=count, **start | heartbeat)
        shared.put(f"driver/{generation}.json", store.to_json(heartbeat))

    own_id = description(there.url).id
    for generation in (2, 3):
        write(generation, 7)
    for changed, found in [
        ({"driver": 2}, 2),
        ({"driver": 9}, 2),  # it has no heartbeat
        ({"driver": 3, "id": "another"}, 2),
        ({"id": own_id}, 3),
    ]:
        description(there.url, **changed)
        assert one.step() == "nothing" and one.generation == found
    free = LearnerRequests(id=request(3, 0, 0), is_free=True)
    for count, version, joins in [
        (6, __version__, False),
        (8, "9.9", None),
        (9, __version__, True),
    ]:
        write(3, count, learners=[free], adloco_jax=version)
        if joins is None:
            with pytest.raises(ConfigError, match="the driver has adloco_jax '9.9'"):
                one.step()
            continue
        one.step()
        assert (one.handle is not None) == joins
    write(3, 10, has_ended=True)
    one.step()
    assert "the driver has ended; waiting" in capfd.readouterr().out


def test_a_resumed_driver_writes_its_own_version(there, monkeypatch, tmp_path):
    monkeypatch.setattr(bucket, "__version__", "9.9")
    monkeypatch.setattr(bucket_learner, "__version__", "9.9")
    run(tmp_path / "one", settings_at(there.url).model_copy(update={"num_rounds": 4}))
    assert description(there.url).adloco_jax == "9.9"


def test_a_learner_asked_to_leave_waits_until_its_answer_can_have_been_read(there):
    (one, *_), num_read = there.learners.values(), iter([4, 4, 5])
    shared, start = one._store, one.driver.start
    one.handle, one.num_responses, one.learner.leaving = request(1, 0, 0), 5, True
    counts = itertools.count(1000)

    def write(seconds=0):
        own = LearnerRequests(id=one.handle.of(5), num_read=next(num_read), is_free=False)
        heartbeat = DriverHeartbeat(start=start, count=next(counts), learners=[own])
        shared.put("driver/1.json", store.to_json(heartbeat))

    write()
    there.sleep = write
    one.serve()
    assert [*num_read] == []  # at once when the fifth response has been read
    left = store.from_json(shared.get(one.handle.heartbeat_name()), "", LearnerHeartbeat)
    assert left.sign.has_left


def test_a_learner_without_a_driver_ends_after_its_patience(there, tmp_path):
    (one, *_), start_s = there.learners.values(), there.now_s
    run_id = description(there.url).id
    ended = DriverHeartbeat(count=10**9, has_ended=True, adloco_jax=__version__)
    one._store.put("driver/1.json", store.to_json(ended))
    patient = opened(there.url, patience_s=600.0)
    late = bucket_learner.BucketLearner(patient, one.learner, there.given, None, run_id)
    with pytest.raises(ResourceError, match="left, as for 10 minutes there was no driver"):
        late.serve()
    empty = opened(tmp_path / "empty", patience_s=600.0)
    with pytest.raises(ResourceError, match="for 10 minutes there was no driver"):
        bucket_learner.read_run(empty)
    assert 1200 < there.now_s - start_s < 1300


def test_learners_that_have_left_are_not_waited_for(monkeypatch, tmp_path, capfd):
    def fate(n, incarnation, method, arguments):
        has_left = (incarnation, method) == (0, "ping") and len(there.requests) > 2
        gone = {"leaving": True, "has_left": True}
        return (lambda found: found.model_copy(update=gone)) if has_left else "response"

    there = InBucket(monkeypatch, tmp_path / "bucket", fate)
    run(tmp_path / "one", settings_at(there.url).model_copy(update={"num_rounds": 20}))
    left = events(tmp_path / "one", "learner", what="left")
    assert sorted((e["learner"], e["why"]) for e in left) == [(n, "asked to end") for n in (0, 1)]
    assert "no learner: waiting for one" in capfd.readouterr().out.splitlines()
    assert not events(tmp_path / "one", "learner", what="lost")


def test_a_learner_that_is_lost_deletes_its_last_answer(there):
    one, *_ = there.learners.values()
    one.handle, one.num_responses, shared = request(1, 0, 0), 5, one._store
    again = LearnerRequests(id=RequestId(generation=1, learner=0, incarnation=1), is_free=True)
    heartbeat = DriverHeartbeat(start=one.driver.start, count=1000, learners=[again])
    shared.put("driver/1.json", store.to_json(heartbeat))
    last = one.handle.of(5)
    for name in (last.heartbeat_name(), last.name("responses")):
        shared.put(name, b"late")
    assert one.step() == "done" and one.handle is None
    assert shared.names() == ["driver/1.json", "run.json"]


@pytest.mark.parametrize("what", ["noise", "of an earlier start"])
def test_what_is_in_a_free_place_is_named_and_keeps_nobody_out(there, tmp_path, capfd, what):
    """An earlier start's heartbeat has its count of responses, which are none of this start."""
    one, *_ = there.learners.values()
    one.handle, one.num_responses, one.learner.leaving = request(1, 0, 0), 11, False
    if what == "noise":
        (tmp_path / "bucket" / one.handle.heartbeat_name()).write_bytes(b"{}")
    else:
        one.give_sign()
    about = description(there.url, driver=1)
    shared = opened(there.url, run=about.id, start="new")
    driver = bucket.BucketTransport(shared, about, there.given)
    call, _ = driver.submit(driver.start(0, 0), "ping")
    assert driver.poll([call], 3.0) == {}
    assert one.handle.heartbeat_name() not in shared.names()
    (line,) = [line for line in capfd.readouterr().out.splitlines() if "deleted" in line]
    assert line.startswith(f"{there.url}: learners/1/0-0.json: damaged, or not signed with this")
    there.now_s += 10  # so that the learner no longer waits for the driver before
    for _ in range(5):
        one.step()
        driver.give_sign()
    assert one.num_responses == 0
    assert driver.poll([call], 3.0)[call].value == one.learner.ping()


def test_a_learner_says_what_it_waits_for_and_goes_to_the_run_that_is_there(there, capfd):
    (one, *_), about = there.learners.values(), description(there.url, id="another", driver=7)
    late = bucket_learner.BucketLearner(opened(there.url), one.learner, there.given, None, "first")
    before_s = there.now_s
    assert not late.serve()
    assert 4 <= there.now_s - before_s < 6  # engine.heartbeat_s, 20 by default
    said = capfd.readouterr().out.splitlines()
    assert said[-2:] == [
        "the driver gives no sign; waiting for it",
        "the driver gives no sign, and another run is there; joining it",
    ]
    assert bucket_learner.read_run(opened(there.url)) == about


def test_a_driver_without_a_link_judges_nobody(monkeypatch, tmp_path):
    """For a hundred seconds no look at a heartbeat returns."""
    there = InBucket(monkeypatch, tmp_path / "bucket")
    inline, begin_s, looks = store.in_thread, there.now_s + 1, []

    def aside(function, *arguments):
        if not (
            str(*arguments[:1]).startswith("learners/") and begin_s < there.now_s < begin_s + 99
        ):
            return inline(function, *arguments)
        looks.append(there.now_s)
        return types.SimpleNamespace(
            done=lambda: there.now_s > begin_s + 100, result=lambda: function(*arguments)
        )

    monkeypatch.setattr(store, "in_thread", aside)
    settings = settings_at(there.url).model_copy(update={"num_rounds": 20})
    run(tmp_path / "one", settings)
    assert len(looks) == 2 and there.now_s > begin_s + 100
    assert {e["what"] for e in events(tmp_path / "one", "learner")} == {"joined"}


def test_requests_that_fail_are_repeated_until_they_succeed(monkeypatch, tmp_path, capsys):
    waits = []
    clock = types.SimpleNamespace(sleep=waits.append, monotonic=lambda: sum(waits))
    monkeypatch.setattr(store, "time", clock)
    there = opened(tmp_path / "bucket")
    there.put("a", b"1")
    fails = iter([True] * 12 + [False])

    def write(failures):
        if next(fails):
            raise RuntimeError("503\nRust")
        return 7

    assert there.retry("write", write) == 7
    assert len(waits) == 12 and waits == sorted(waits) and max(waits) <= 3
    said = capsys.readouterr().out.splitlines()
    assert [line.removeprefix(f"{there.url}: ") for line in said] == [
        "cannot write (503); waiting for the bucket, 1 s",
        "cannot write (503); waiting for the bucket, 21 s",
        "can write again, after 27 s",
    ]
    fails, there.patience_s = iter([True] * 99), 30.0
    with pytest.raises(ResourceError, match="cannot write"):
        there.retry("write", write)
    assert threading.active_count() < 50


def test_a_server_that_asks_for_patience_at_the_start_is_waited_for(monkeypatch, tmp_path):
    waits = []
    clock = types.SimpleNamespace(sleep=waits.append, monotonic=lambda: sum(waits))
    monkeypatch.setattr(store, "time", clock)
    fails = iter(["503 Service Unavailable", "429 Too Many Requests"] * 10 + [""])

    def read(failures):
        if status := next(fails):
            with objects.explained():
                raise RuntimeError(f"GET in 1.403s - Server returned non-2xx status code: {status}")
        return 7

    assert opened(tmp_path / "bucket").retry("read", read) == 7


def test_one_learner_whose_request_cannot_be_written_does_not_hold_up_another(
    monkeypatch, tmp_path
):
    spec = spec_of(validate(importlib.import_module(QUICKSTART).get_config()), this_machine())
    settings = types.SimpleNamespace(engine=types.SimpleNamespace(heartbeat_s=1000.0))
    given = types.SimpleNamespace(spec=spec, settings=settings)
    there, is_open = opened(tmp_path / "bucket"), threading.Event()
    about = {"id": "a", "adloco_jax": "1", "fingerprint": "", "commit": "", "settings": {}}
    driver = bucket.BucketTransport(there, RunDescription(**about, driver=1), given)
    put, written = there.put, concurrent.futures.Future()

    def putting(name, data):
        if name.startswith("requests/1/1-0"):
            is_open.wait()
        put(name, data)
        heartbeat = name == "driver/1.json" and store.from_json(data, "", DriverHeartbeat)
        if heartbeat and heartbeat.learners[0].id.request == 1 and not written.done():
            written.set_result(heartbeat.learners[1].id.request)

    monkeypatch.setattr(there, "put", putting)
    handles = [driver.start(number, 0) for number in (0, 1)]
    for handle in reversed(handles):
        driver.submit(handle, "states", wanted=[])
    assert written.result(10) == 0
    is_open.set()
    driver.close(is_over=True)


@pytest.mark.parametrize("data", [b"", b"1" * (2**20 + 1), b"[]"])
def test_a_description_that_is_none_ends_a_learner_in_one_line(monkeypatch, tmp_path, data):
    monkeypatch.setattr(store, "READ_PAUSES_S", ())
    monkeypatch.setenv("ADLOCO_KEY", KEY)
    opened(tmp_path / "bucket").put("run.json", data)
    with pytest.raises(ConfigError, match="run.json: .*; copy the whole command") as error:
        run_join.join(f"file://{tmp_path}/bucket", own={})
    assert "\n" not in str(error.value)


def test_a_learner_that_waits_for_a_driver_ends_well_after_a_signal(monkeypatch, tmp_path, capfd):
    def sleep(seconds):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)

    clock = types.SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
    monkeypatch.setattr(bucket_learner, "time", clock)
    monkeypatch.setenv("ADLOCO_KEY", KEY)
    assert run_join.join(f"file://{tmp_path}/bucket", own={}) is None
    assert "SIGTERM: leaving; send it again" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("write", "The operation lacked privileges: 403 Forbidden", "cannot write.*sites.md"),
        ("read", "Error performing PUT http://169.254.169.254/latest", "cannot read.*credentials"),
        ("read", "error sending request for url", "cannot read objects"),
        ("read", "GET http://host:4030/bkt/20260401/run.json in 1.403s", "cannot read obj"),
        ("write", "FileNotFoundError", "make the bucket"),
    ],
)
def test_a_bucket_that_was_never_usable_is_refused_soon(monkeypatch, tmp_path, kind, error, words):
    waits = []
    clock = types.SimpleNamespace(sleep=waits.append, monotonic=lambda: sum(waits))
    monkeypatch.setattr(store, "time", clock)
    there = opened(tmp_path / "bucket")

    def fails(failures):
        with objects.explained():
            raise FileNotFoundError(error) if error == "FileNotFoundError" else RuntimeError(error)

    with pytest.raises((ConfigError, ResourceError), match=words) as refusal:
        there.retry(kind, fails)
    assert refusal.value.exit_code in (2, 5) and "\n" not in str(refusal.value)
    assert sum(waits) < 30


def test_a_bucket_that_may_not_be_written_is_refused_before_anything_is_left(monkeypatch, tmp_path):
    import obstore

    def refuse(*_, **__):
        raise RuntimeError("The operation lacked privileges: 403 Forbidden")

    monkeypatch.setattr(obstore, "put", refuse)
    with pytest.raises(ConfigError, match="cannot write .*sites.md"):
        bucket.check_possible(settings_at(f"file://{tmp_path}/bucket"), tmp_path / "r")
    assert not (tmp_path / "r").exists()
