"""What learners are sent: trainers' parameters, and the inner optimizer states of workers.

A state is in the driver until a round that began with it counts, and then in the learner whose
response counted; if that process ended, the driver makes a fresh one.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from adloco_jax.core.types import Ensemble
from adloco_jax.elastic.decisions import LearnerRecord
from adloco_jax.elastic.messages import Refused, Request, StateKey, tree_sha256
from adloco_jax.elastic.pool import Event, LearnerPool
from adloco_jax.engine.spec import ProgramSpec
from adloco_jax.loop.adloco import State
from adloco_jax.loop.control import Control


@dataclass
class _Present:
    """A trainer's present parameters."""

    id: int = 1  # counts them
    update: PyTree | None = None  # packed: what made them from those before, if only this did
    sha256: str = ""  # `tree_sha256`; empty until they are sent
    stored: dict[bool, Any] = field(default_factory=dict)  # references by `Request.is_update`


class SentParams:
    """Trainers' parameters in the form in which learners get them: whole, or their last update.

    The update is that of `core.outer.outer_update`, so learners have the driver's bits.
    """

    def __init__(self, pool: LearnerPool):
        """Store the argument."""
        self._pool, self._present = pool, defaultdict[int, _Present](_Present)

    def change(
        self, trainer: int, update: PyTree | None, learner: LearnerRecord | None = None
    ) -> None:
        """Record that a trainer has other parameters: by a packed update, or those of a learner."""
        self._present[trainer] = _Present(self._present[trainer].id + 1, update)
        if learner is not None:
            learner.params_ids[trainer] = self._present[trainer].id

    def to_send(
        self, request: Request, learner: LearnerRecord, whole: Callable[[], PyTree]
    ) -> tuple[Request, Any]:
        """Complete a learner's request; return it, and a reference to what must be sent with it."""
        present = self._present[request.trainer]
        if not present.sha256:
            present.sha256 = tree_sha256(whole())
        had_id = learner.params_ids.get(request.trainer, 0)  # of what the learner has; 0: nothing
        is_update = present.update is not None and had_id == present.id - 1
        request = request._replace(params_sha256=present.sha256, is_update=is_update)
        learner.params_ids[request.trainer] = present.id
        if had_id == present.id:
            return request, None
        if is_update not in present.stored:
            if is_update:
                reference = self._pool.put(present.update, (request.trainer, "update"))
            else:
                reference = self._pool.put(whole(), (request.trainer, "whole"))
            present.stored[is_update] = reference
        return request, present.stored[is_update]

    def forget(self, learner: LearnerRecord, trainer: int) -> None:
        """Assume that a learner has no parameters, and that none of a trainer's are stored."""
        learner.params_ids.clear()
        self._present[trainer].stored.clear()


class InnerStates:
    """Knows where each worker's inner state is: in the driver, in a learner process, or lost."""

    def __init__(self, spec: ProgramSpec, pool: LearnerPool, poll: Callable[[], None]):
        """Store the arguments; `poll` processes responses while a method waits for learners."""
        self._spec, self._pool, self._poll = spec, pool, poll
        self._here: dict[int, PyTree] = {}  # states in this process, by worker id
        self._holders: dict[int, LearnerRecord] = {}  # of the last counted response, by worker id
        self._found: dict[StateKey, PyTree] = {}  # states that learners have sent

    def take(self, event: Event) -> None:
        """Store the inner states that a learner has sent as its response to the call `states`."""
        if not isinstance(event.value, Refused):  # else it is fresh
            self._found |= dict(zip(event.about, event.value, strict=True))

    def adopt(self, state: State) -> None:
        """Copy the inner states out of an ensemble that has them, unless `inner.state=reset`.

        What the learner that sent it still has stays there.
        """
        inner_R = state.ensemble.inner_state_R
        if inner_R is None or self._spec.reset_inner_state:
            return
        inner_R = jax.device_get(inner_R)
        self._here = {}
        for position, key in enumerate(state.control.reads()):
            _, worker_id, _ = key
            own = jax.tree.map(lambda leaf, at=position: leaf[at], inner_R)
            found = self._found.get(key) if self._holder(worker_id) else None
            if found is None or not jax.tree.all(jax.tree.map(np.array_equal, own, found)):
                self._here[worker_id] = own
        self._found.clear()

    def bring(self, control: Control, targets: Mapping[int, LearnerRecord | None]) -> None:
        """Bring inner states here, except those that the learner in `targets` (by worker id) has.

        Over slow links nothing is brought: a state is several times an update, and a fresh one
        serves.
        """
        if self._spec.reset_inner_state or not self._pool.transport.moves_states:
            return
        keys = []
        for key in control.reads():
            _, worker_id, _ = key
            if worker_id in targets and self._holders.get(worker_id) is not targets[worker_id]:
                keys.append(key)
        self._fetch(keys)
        for (_, worker_id, _), state in self._found.items():
            self._here[worker_id] = state

    def to_send(self, worker_id: int, learner: LearnerRecord) -> PyTree | None:
        """Return the inner state that a learner needs for a worker's round; None if it has it."""
        if self._spec.reset_inner_state:
            return None
        if worker_id not in self._here and self._holders.get(worker_id) is not learner:
            self._here[worker_id] = self._fresh()
        return self._here.get(worker_id)

    def counted(self, worker_id: int, learner: LearnerRecord) -> None:
        """Record that a worker's round was counted: only `learner` has the state after it."""
        self._here.pop(worker_id, None)
        self._holders[worker_id] = learner

    def forget(self, learner: LearnerRecord) -> None:
        """Assume that a learner has no inner states."""
        self._holders = {s: e for s, e in self._holders.items() if e is not learner}

    def whole(self, state: State, *, fetches: bool) -> Ensemble:
        """Return the ensemble with inner states: its own, else those of learners if `fetches`.

        One that is not found is fresh, which on a small model gave a lower loss than the mean of
        the trainer's other workers (studies/LOG.md, 2026-11-25).
        """
        ensemble, control = state
        if ensemble.inner_state_R is not None:
            return ensemble
        keys = control.reads()
        finds = fetches and not self._spec.reset_inner_state
        if finds:
            self._fetch(keys)
        states, fresh = [], None
        for key in keys:
            _, worker_id, _ = key
            found = self._here.get(worker_id, self._found.get(key)) if finds else None
            if found is None:
                if fresh is None:
                    fresh = self._fresh()
                found = fresh
            states.append(found)
        inner_R = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *states)
        return ensemble.replace(inner_state_R=inner_R)

    def _fetch(self, keys: Sequence[StateKey]) -> None:
        """Request the inner states that only learners have, and wait for them."""
        self._found.clear()
        asked: dict[int, list[StateKey]] = {}
        for key in keys:
            _, worker_id, _ = key
            holder = self._holder(worker_id)
            if holder is not None and worker_id not in self._here:
                asked.setdefault(holder.number, []).append(key)
        for number, wanted in asked.items():
            self._pool.ask(number, "states", wanted, wanted=wanted)
        while self._pool.asked("states"):
            self._poll()

    def _holder(self, worker_id: int) -> LearnerRecord | None:
        """Return who has the state after a worker's last counted round, unless it has ended."""
        holder = self._holders.get(worker_id)
        if holder is None or self._pool.learners.get(holder.number) is not holder:
            return None
        return holder

    def _fresh(self) -> PyTree:
        """Make the inner state of a worker that has made no update."""
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), self._spec.params)
        return jax.device_get(self._spec.inner_tx.init(zeros))
