"""A transport in this process: learners are objects, time is simulated, a test decides on calls."""

import contextlib
import functools
import math
import os
import runpy
import signal
import threading
import time
import types
from pathlib import Path
from typing import Any

import jax
import pytest
from toy import bigram_loss, corpus, init_fn
from toy_runs import events

from adloco_jax import training
from adloco_jax.elastic import (
    bucket,
    bucket_learner,
    engine,
    learner,
    pool,
    round_record,
    store,
    transport,
)
from adloco_jax.elastic.learner import Learner, Reply
from adloco_jax.elastic.messages import USES, RunDescription, Sign, array_bytes
from adloco_jax.elastic.transport import TransportEntry
from adloco_jax.errors import ResourceError
from adloco_jax.host import processes

ROOT = Path(__file__).resolve().parents[1]
InMemory: Any = runpy.run_path(str(ROOT / "examples" / "transport.py"))["InMemory"]


class Here(InMemory):
    """The transport of examples/transport.py, with simulated time and a fate for each call.

    `fate` is asked at every look at a call: by learner, incarnation, method and arguments it
    returns "response", "wait", an error in words, or a function that changes the response.
    """

    def __init__(self, monkeypatch, fate):
        super().__init__(None)
        self.fate, self.now_s, self.alive, self.met = fate, 1000.0, set(), set()
        self.requests = []  # learner, incarnation, request, arrays
        self.starts = []  # learner, incarnation, seconds
        monkeypatch.setitem(transport.TRANSPORTS, "ray", TransportEntry(self.connect))
        _simulate(monkeypatch, self)

    def time(self):
        return time.time()

    def monotonic(self):
        return self.now_s

    def connect(self, address, num_learners, given, is_over):
        assert not self.alive
        self.given = given
        return contextlib.nullcontext(self)

    def start(self, number, incarnation):
        handle = super().start(number, incarnation)
        self.learners.pop(handle, None)  # of an earlier run
        self.alive.add(handle)
        self.starts.append((*handle, self.now_s))
        return handle

    def submit(self, handle, method, **arguments):
        if handle not in self.met:
            method = "hello"  # for fates: the first sign of a learner
            self.met.add(handle)
        if method == "run_round":
            self.requests.append((*handle, *[*arguments.values()][:2]))
        return super().submit(handle, method, **arguments)

    def poll(self, calls, timeout_s):
        ended = {}
        for call in calls:
            handle, method, arguments = self.calls[call]
            assert handle in self.alive, "a call of an earlier incarnation is still waited for"
            self.call = call
            fate = self.fate(*handle, method, (*arguments.values(),))
            if fate != "wait":
                is_run = fate == "response" or callable(fate)
                reply = self.reply(handle, method, arguments) if is_run else Reply(None, fate)
                value = fate(reply.value) if callable(fate) else reply.value
                if method == "hello" and is_run:
                    value = Sign(leaving=False, compiling=False, hello=value)
                ended[call] = reply._replace(value=value, num_bytes=array_bytes(value))
        self.now_s += 0.01 if ended else timeout_s
        return ended

    def kill(self, handle):
        self.alive.discard(handle)


CALLS = ("hello", "ping", "run_round", "states")
KEY = "k" * 32


def opened(url, *, key=KEY, run="", start="", patience_s=math.inf):
    """The bucket at an address, whose objects are signed for a run and its driver's start."""
    url = str(url) if "://" in str(url) else f"file://{url}"
    there = store.open_bucket(url, key, patience_s=patience_s)
    there.signatures.run, there.signatures.start = run, start
    return there


def described(url, **changed):
    """The description of the run in a bucket, there with some fields changed."""
    there = opened(url)
    found = there.read_message("run.json", RunDescription).model_copy(update=changed)
    there.put("run.json", store.to_json(found))
    return found


class InBucket:
    """The transport `bucket` with learners in this process, on a folder; otherwise like `Here`.

    Learners act whenever the driver polls.
    """

    def __init__(self, monkeypatch, folder, fate=lambda *_: "response"):
        self.fate, self.now_s = fate, 1000.0
        self.url = folder if "://" in str(folder) else f"file://{folder}"
        self.alive = set()  # of learners that hold something of this process
        self.learners, self.dead, self.requests, self.starts, self.acts = {}, set(), [], [], []
        self.places = {}  # incarnations that the driver has asked for, by number
        self.joining = None  # number and incarnation
        monkeypatch.setenv("ADLOCO_KEY", KEY)
        _simulate(monkeypatch, self, bucket, bucket_learner, store)
        monkeypatch.setattr(store, "in_thread", _inline)
        entry = TransportEntry(functools.partial(self.connected, bucket.connected))
        monkeypatch.setitem(transport.TRANSPORTS, "bucket", entry)  # without checks, for `fit`
        monkeypatch.setattr(processes, "every", self.every)
        monkeypatch.setattr(bucket_learner, "random", self)

    def time(self):
        return time.time()

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds

    @contextlib.contextmanager
    def every(self, seconds, act):
        self.acts.append(act)
        yield
        self.acts.remove(act)

    @contextlib.contextmanager
    def connected(self, connected, address, num_learners, given, is_over):
        self.given, self.log = given, Path(given.log).parent
        self.learners, self.dead, self.places = {}, set(), {}
        with connected(address, num_learners, given, is_over) as made:
            poll, start = made.poll, made.start

            def stepping(calls, timeout_s):
                self.step()
                return poll(calls, timeout_s)

            def starting(number, incarnation):
                self.places[number] = incarnation
                return start(number, incarnation)

            made.poll, made.start = stepping, starting
            yield made

    def step(self):
        """Let the driver and all living learners act once."""
        for act in self.acts:
            act()
        for handle in [*self.places.items()]:
            if handle not in self.learners and handle not in self.dead:
                self.open(handle)
        for handle, there in [*self.learners.items()]:
            if handle in self.dead:
                continue
            try:
                there.give_sign()
                there.step()
                held = there.handle  # `open` lets another machine take the number
                if held is None or (held.learner, held.incarnation) != handle:
                    self.dead.add(handle)
            except (_Waits, ResourceError):  # here a signal ends their patience, too
                pass
            except (_Dies, OSError):
                self.dead.add(handle)

    def open(self, handle):
        """Let a new learner join under a number, unless its fate is another."""
        made = Learner(self.given)
        made.calls = dict.fromkeys(CALLS, 0)  # that have ended
        self.starts.append((*handle, self.now_s))
        for method in CALLS:
            setattr(made, method, self.fated(made, handle, method))
        run_id = (self.log / "id").read_text("utf-8")
        there = bucket_learner.BucketLearner(opened(self.url), made, self.given, self.log, run_id)
        self.joining = handle
        with contextlib.suppress(_Waits):
            while there.handle is None:
                there.step()
            self.learners[handle] = there

    def shuffle(self, free):
        """Leave a learner that joins the place that is meant for it."""
        if self.joining in (places := [(each.learner, each.incarnation) for each in free]):
            free.insert(0, free.pop(places.index(self.joining)))

    def fated(self, made, handle, method):
        """A method of a learner whose call may wait, fail or return something else."""
        own, first, told = getattr(made, method), [], []

        def call(*arguments):
            if method == "hello" and first:
                return first[0]
            if method == "ping" and handle not in self.learners:
                return own()
            if method == "run_round" and arguments[0].round not in told:
                self.requests.append((*handle, *arguments[:2]))
                told.append(arguments[0].round)
            self.call = (*handle, method, made.calls[method])
            fate = self.fate(*handle, method, arguments)
            if fate == "wait":
                raise _Waits
            made.calls[method] += 1
            if fate != "response" and not callable(fate):
                raised = OSError(fate.removeprefix("OSError: "))
                raise raised if fate.startswith("OSError") else _Dies
            value = own(*arguments)
            first.append(fate(value) if callable(fate) else value)
            return first[-1]

        return call

    def learner(self, handle):
        return self.learners[handle].learner


class _Waits(BaseException):
    """A learner does nothing now."""


class _Dies(BaseException):
    """A learner's process ends."""


def _inline(function, *arguments):
    """Call a function at once, in place of in a thread."""
    value = function(*arguments)
    return types.SimpleNamespace(done=lambda: True, result=lambda timeout=None: value)


def _simulate(monkeypatch, clock, *modules):
    """Give modules of `elastic` a simulated clock, and let learners share their programs."""
    for module in (engine, pool, round_record, *modules):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(learner, "use_compilation_cache", lambda: None)
    for module in (pool, learner):
        monkeypatch.setattr(module, "versions", dict)
    made, shared = learner.Programs, []

    def programs(spec, on_compile):
        """The first learner's: the specs of one run's learners are equal."""
        shared[:] = shared or [made(spec, on_compile)]
        return shared[0]

    monkeypatch.setattr(learner, "Programs", programs)


def num_updates(inner_state):
    """How many updates an inner state has seen since it was fresh."""
    return int(next(x for x in jax.tree.leaves(inner_state) if x.dtype.kind == "i"))


def assert_same_rounds(elastic, local, error=None):
    """Checks that learners decided, read and counted as one process did."""
    measured = {"train_loss", "train_losses", "pseudo_grad_norm", "noise", "signal", "test_value"}
    measured |= {"step_s", "stall_s", "workers_counted", "wire_bytes", "up_s", "lost_s"}
    measured |= {f"{use}_s" for use in USES}
    lines, expected = (
        {(e["round"], e["trainer"]): e for e in events(result.workdir, "round")}
        for result in (elastic, local)
    )
    assert lines.keys() == expected.keys()
    for (number, trainer), line in lines.items():
        other = expected[number, trainer]
        same = line.keys() - measured
        assert {key: line[key] for key in same} == {key: other[key] for key in same}
        near = error or (1e-5 if number <= 4 else 1e-3)
        assert line["train_loss"] == pytest.approx(other["train_loss"], abs=near)
    for m, trainer in elastic.state.control.trainers.items():
        other = local.state.control.trainers[m]
        # Means of measured gradients: their float32 sums are in another order in a learner.
        assert trainer.smoothing == pytest.approx(other.smoothing, rel=1e-2)
        trainer.smoothing = other.smoothing
    for result in (elastic, local):  # a process compares no norms, and learners' are measured
        result.state.control.norms = {}
    assert elastic.state.control == local.state.control


@contextlib.contextmanager
def threads_that_join(count, address):
    """Learners of the toy in threads; `address()` is an address, or the file of a ticket."""

    def act():
        where = address()
        while isinstance(where, Path):
            time.sleep(0.05)
            if where.exists() and where.read_text():
                where = where.read_text()
        try:
            training.join(where, corpus=corpus(), init_fn=init_fn, loss_fn=bigram_loss)
        except BaseException:
            os.kill(os.getpid(), signal.SIGINT)  # or the driver would wait for ever
            raise

    threads = [threading.Thread(target=act, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
