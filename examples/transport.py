"""A transport of your own: the learners are objects of the driver's process.

Run it:  adloco train examples/transport.py --config.num_rounds=2
To reach other machines, let `start`, `submit` and `poll` send what they do here at once.
"""

import contextlib
import itertools

from adloco_jax import TRANSPORTS, TransportEntry
from adloco_jax.config import default_config
from adloco_jax.elastic.learner import Learner, Reply
from adloco_jax.elastic.messages import Refused, array_bytes


class InMemory:
    """A call runs when the driver asks for its reply."""

    launches = moves_states = True

    def __init__(self, given):
        """Store what each learner is made of."""
        self.given, self.number = given, itertools.count()
        self.learners, self.calls = {}, {}  # by handle; by the call's number

    def put(self, params, kind):
        """Return the parameters, as they are passed in calls; so no bytes are sent."""
        return params, 0

    def start(self, number, incarnation):
        """Return the handle of a learner, which is made at its first call."""
        return number, incarnation

    def submit(self, handle, method, **arguments):
        """Keep a call for `poll`; return its number, and the bytes of its arrays."""
        call = next(self.number)
        self.calls[call] = handle, method, arguments
        return call, array_bytes(arguments)

    def poll(self, calls, timeout_s):
        """Run one call, and return its reply."""
        return {call: self.reply(*self.calls.pop(call)) for call in sorted(calls)[:1]}

    def kill(self, handle):
        """Forget a learner."""
        self.learners.pop(handle, None)

    def reply(self, handle, method, arguments):
        """Call a method of a learner. What it refuses is a reply; `error` says why it ended."""
        try:
            value = getattr(self.learner(handle), method)(**arguments)
        except Refused as error:
            value = error
        return Reply(value, error="", num_bytes=array_bytes(value))

    def learner(self, handle):
        """Return a learner; the first time, make it."""
        if handle not in self.learners:
            self.learners[handle] = Learner(self.given)
            self.learners[handle].enlist(*handle, self.given.log)
        return self.learners[handle]


def connect(address, num_learners, given, is_over):
    """Return the transport of a run; there is nothing to close."""
    return contextlib.nullcontext(InMemory(given))


TRANSPORTS["memory"] = TransportEntry(connect)


def get_config():
    """Return a config that uses it."""
    config = default_config()
    config.engine.kind = "memory"
    return config
