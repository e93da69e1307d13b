"""The inner optimizer states of workers that run in other processes, called learners.

The driver (the process with the training loop) keeps states until it sends them to learners. It
fetches them from learners when it needs them, and replaces lost ones.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from adloco_jax.core.types import Ensemble
from adloco_jax.elastic.fleet import Event, Fleet
from adloco_jax.engine.spec import Spec
from adloco_jax.loop.adloco import State
from adloco_jax.loop.control import Control


class InnerStates:
    """Tracks where each worker's inner state is: in the driver, in a learner process, or lost."""

    def __init__(self, spec: Spec, fleet: Fleet, poll: Callable[[], None]):
        """Store the arguments; `poll` processes the learners' answers while a call here waits."""
        self._spec, self._fleet, self._poll = spec, fleet, poll
        self.seeds: dict[int, PyTree] = {}  # states to send to learners, by stream
        self.lost: set[int] = set()  # streams whose inner state was lost with a learner
        self._found: dict[tuple[int, int, int], PyTree | None] = {}  # answers of `states`

    def take(self, event: Event) -> None:
        """Store the inner states in a learner's answer to the call `states`."""
        self._found |= dict(zip(event.about, event.value, strict=True))

    def adopt(self, state: State) -> None:
        """Copy the workers' inner states from an ensemble, to send them to learner processes later.

        Nothing happens if the ensemble has no inner states, or if `inner.state=reset` gives workers
        a fresh state in each round.
        """
        inner_R = state.ensemble.inner_state_R
        if inner_R is None or self._spec.reset_inner_state:
            return
        inner_R = jax.device_get(inner_R)
        for worker, stream in enumerate(state.control.streams):
            self.seeds[stream] = jax.tree.map(lambda leaf, w=worker: leaf[w], inner_R)
        self.lost.clear()

    def of(self, control: Control, workers: Sequence[int]) -> list[PyTree]:
        """Collect the inner states of some workers, from this process or from learner processes.

        A lost state is replaced by a fresh one. On a small model this gave a lower loss than the
        mean of the trainer's other workers (docs/LOG.md, 2026-11-25).
        """
        if self._spec.reset_inner_state:
            return [None for _ in workers]
        self._fetch([control.reads(worker) for worker in workers])
        found = [self._state_here(control, worker) for worker in workers]
        return [self._fresh() if state is None else state for state in found]

    def _state_here(self, control: Control, worker: int) -> PyTree | None:
        key = control.reads(worker)
        return self.seeds.get(key[1], self._found.get(key))

    def _fetch(self, keys: Sequence[tuple[int, int, int]]) -> None:
        """Fetch inner states from learners, and wait for them.

        A key is the id of the trainer, the stream of the worker, and the position in the stream.
        """
        self._found.clear()
        asked = {}
        for key in keys:
            number = self._fleet.host(key[1])
            if key[1] not in self.seeds and key[1] not in self.lost and number is not None:
                asked.setdefault(number, []).append(key)
        for number, wanted in asked.items():
            self._fleet.ask(number, "states", wanted, about=wanted)
        while self._fleet.asked("states"):
            self._poll()

    def _fresh(self) -> PyTree:
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), self._spec.params)
        return jax.device_get(self._spec.inner_tx.init(zeros))

    def with_fresh(self, ensemble: Ensemble) -> Ensemble:
        """Give an ensemble without inner states fresh inner states for all workers."""
        if ensemble.inner_state_R is not None:
            return ensemble
        fresh = self._fresh()  # with inner.state=reset every round starts with a fresh state
        inner_R = jax.tree.map(lambda leaf: np.stack([leaf] * ensemble.num_workers), fresh)
        return ensemble.replace(inner_state_R=jax.tree.map(jnp.asarray, inner_R))
