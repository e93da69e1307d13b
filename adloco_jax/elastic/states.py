"""The inner optimizer states of workers that run in learners.

One is in the driver until a round that began with it counts, and then in the learner whose answer
counted; if that process ended, the driver makes a fresh one.
"""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from adloco_jax.core.types import Ensemble
from adloco_jax.elastic.decisions import LearnerRecord
from adloco_jax.elastic.fleet import Event, Fleet
from adloco_jax.elastic.formats import Refused, StateKey
from adloco_jax.engine.spec import Spec
from adloco_jax.loop.adloco import State
from adloco_jax.loop.control import Control


class InnerStates:
    """Knows where each worker's inner state is: in the driver, in a learner process, or lost."""

    def __init__(self, spec: Spec, fleet: Fleet, poll: Callable[[], None]):
        """Store the arguments; `poll` processes answers while a method waits for learners."""
        self._spec, self._fleet, self._poll = spec, fleet, poll
        self._here: dict[int, PyTree] = {}  # states in this process, by the worker's stream
        self._holders: dict[
            int, LearnerRecord
        ] = {}  # process of the last counted answer, by stream
        self._found: dict[StateKey, PyTree | None] = {}  # states that learners have sent

    def take(self, event: Event) -> None:
        """Store the inner states that a learner has sent as its answer to the call `states`."""
        if not isinstance(event.value, Refused):  # else it is fresh
            self._found |= dict(zip(event.about, event.value, strict=True))

    def adopt(self, state: State) -> None:
        """Copy the inner states out of an ensemble that has them, unless `inner.state=reset`."""
        inner_R = state.ensemble.inner_state_R
        if inner_R is None or self._spec.reset_inner_state:
            return
        inner_R = jax.device_get(inner_R)
        self._here = {
            stream: jax.tree.map(lambda leaf, w=worker: leaf[w], inner_R)
            for worker, (_, stream, _) in enumerate(state.control.reads())
        }

    def bring(self, control: Control, targets: Mapping[int, LearnerRecord | None]) -> None:
        """Bring inner states here, except those that the learner in `targets` (by stream) has.

        Over slow links nothing is brought: a state is several times an update, and a fresh one
        serves.
        """
        if self._spec.reset_inner_state or not self._fleet.reach.moves_states:
            return
        self._fetch(
            [
                read
                for read in control.reads()
                if read[1] in targets and self._holders.get(read[1]) is not targets[read[1]]
            ]
        )
        self._here |= {key[1]: state for key, state in self._found.items() if state is not None}

    def to_send(self, stream: int, learner: LearnerRecord) -> PyTree | None:
        """Return the inner state that a learner needs for a worker's round; None if it has it."""
        if self._spec.reset_inner_state:
            return None
        if stream not in self._here and self._holders.get(stream) is not learner:
            self._here[stream] = self._fresh()
        return self._here.get(stream)

    def counted(self, stream: int, learner: LearnerRecord) -> None:
        """Record that a worker's round was counted: only `learner` has the state after it."""
        self._here.pop(stream, None)
        self._holders[stream] = learner

    def whole(self, state: State, *, fetches: bool) -> Ensemble:
        """Return the ensemble with inner states: its own, else those of learners if `fetches`.

        One that is not found is fresh, which on a small model gave a lower loss than the mean of
        the trainer's other workers (docs/LOG.md, 2026-11-25).
        """
        ensemble, control = state
        if ensemble.inner_state_R is not None:
            return ensemble
        keys = control.reads()
        states: list[PyTree | None] = [None] * len(keys)
        if fetches and not self._spec.reset_inner_state:
            self._fetch(keys)
            states = [self._here.get(key[1], self._found.get(key)) for key in keys]
        fresh = self._fresh() if any(each is None for each in states) else None
        whole = [fresh if each is None else each for each in states]
        inner_R = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *whole)
        return ensemble.replace(inner_state_R=inner_R)

    def _fetch(self, keys: Sequence[StateKey]) -> None:
        """Request the inner states that only learners have, and wait for them."""
        self._found.clear()
        asked: dict[int, list[StateKey]] = {}
        for key in keys:
            holder = self._holders.get(key[1])
            is_alive = holder is not None and self._fleet.learners.get(holder.number) is holder
            if holder is not None and is_alive and key[1] not in self._here:
                asked.setdefault(holder.number, []).append(key)
        for number, wanted in asked.items():
            self._fleet.ask(number, "states", wanted, about=wanted)
        while self._fleet.asked("states"):
            self._poll()

    def _fresh(self) -> PyTree:
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), self._spec.params)
        return jax.device_get(self._spec.inner_tx.init(zeros))
