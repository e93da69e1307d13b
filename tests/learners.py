"""A transport in this process: learners are objects, time is simulated, a test decides on calls."""

import contextlib
import functools
import itertools
import signal
import time

import jax

from adloco_jax.elastic import engine, fleet, learner, rounds
from adloco_jax.elastic.cluster import Reply


class Here:
    """Stands in for a transport of `fleet.TRANSPORTS`.

    `fate` is asked at every look at a call: by learner, life, method and arguments it returns
    "answer", "wait", an error in words, or a function that changes the answer.
    """

    def __init__(self, monkeypatch, fate):
        self.fate, self.number, self.now_s = fate, itertools.count(), 1000.0
        self.calls, self.handles, self.alive = {}, {}, set()
        self.orders = []  # learner, life, order
        self.starts = []  # learner, life, seconds
        monkeypatch.setitem(fleet.TRANSPORTS, "ray", self)
        for module in (engine, fleet, rounds):
            monkeypatch.setattr(module, "time", self)
        monkeypatch.setattr(learner, "_end_with", lambda parent: None)
        monkeypatch.setattr(learner, "use_compilation_cache", lambda: None)
        for module in (fleet, learner):
            monkeypatch.setattr(module, "versions", dict)
        shared = functools.cache(learner.Programs)  # compiled once
        monkeypatch.setattr(learner, "Programs", lambda spec: shared(_Same(spec)))

    def time(self):
        return time.time()

    def monotonic(self):
        return self.now_s

    def check_possible(self):
        pass

    def connected(self, address, num_learners):
        assert not self.alive
        return contextlib.nullcontext()

    def put(self, value):
        return value

    def start(self, kind, num_learners, number, life, given):
        handle = number, life
        self.handles[handle] = functools.partial(kind, number, life, given)
        self.alive.add(handle)
        self.starts.append((*handle, self.now_s))
        return handle

    def submit(self, handle, method, *arguments, aside=False):
        call = next(self.number)
        self.calls[call] = handle, method, arguments
        if method == "play":
            self.orders.append((*handle, arguments[0]))
        return call

    def poll(self, calls, timeout_s):
        ended = {}
        for call in calls:
            handle, method, arguments = self.calls[call]
            assert handle in self.alive, "a call of an earlier life is still waited for"
            self.call = call
            fate = self.fate(*handle, method, arguments)
            if fate == "wait":
                continue
            if fate == "answer" or callable(fate):
                value = getattr(self.learner(handle), method)(*arguments)
                ended[call] = Reply(fate(value) if callable(fate) else value, "")
            else:
                ended[call] = Reply(None, fate)
        self.now_s += 0.01 if ended else timeout_s
        return ended

    def kill(self, handle, process):
        self.alive.discard(handle)

    def learner(self, handle):
        found = self.handles[handle]
        if isinstance(found, functools.partial):
            at_sigterm = signal.getsignal(signal.SIGTERM)
            found = self.handles[handle] = found()
            signal.signal(signal.SIGTERM, at_sigterm)
        return found


class _Same:
    """A spec that equals every other, as those of one run's learners do."""

    def __init__(self, spec):
        self.spec = spec

    def __hash__(self):
        return 0

    def __eq__(self, other):
        return True

    def __getattr__(self, name):
        return getattr(self.spec, name)


def num_updates(inner_state):
    """How many updates an inner state has seen since it was fresh."""
    return int(next(x for x in jax.tree.leaves(inner_state) if x.dtype.kind == "i"))
