"""What learners are sent: trainers' parameters, and the inner optimizer states of workers.

A worker's inner state is in the driver until a round that began with it counts. After that it is in
the learner process whose response counted. If that process has ended, the state is lost, and the
driver makes a fresh one: that of a worker which has made no update.

`update` is an outer update that is packed to be sent, as `core.compress.pack` returns it. A state
is the tree that `spec.inner_tx.init` returns for one worker, in NumPy, without an axis of workers.
Its key is its trainer's id, its worker's id, and the position in the worker's rows where the next
round begins (`StateKey`). `R` is the axis of all workers of an ensemble. The driver's control says
which trainers and workers there are; `control.reads()` lists the key of each worker's state, in the
order of `R`. `LearnerRecord` is what the driver knows of one learner process. The transport reaches
learners; a `Reference` is its name of parameters that it has stored for them.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from adloco_jax.core.types import Ensemble
from adloco_jax.elastic.decisions import LearnerRecord
from adloco_jax.elastic.messages import Refused, Request, StateKey, tree_sha256
from adloco_jax.elastic.pool import LearnerPool
from adloco_jax.elastic.transport import Reference
from adloco_jax.engine.spec import ProgramSpec
from adloco_jax.loop.adloco import State
from adloco_jax.loop.control import Control


@dataclass
class _Version:
    """One version of a trainer's parameters: those between two of its outer updates or merges."""

    id: int = 1  # counts the trainer's versions
    # The packed update that turns the version before into this one. None if nothing packed does, as
    # after a merge or with float32 differences; then only whole parameters can be sent.
    update: PyTree | None = None
    sha256: str = ""  # `tree_sha256` of the whole parameters; empty until they are first sent
    # What the transport has stored for learners: at True the update, at False whole parameters.
    stored: dict[bool, Reference] = field(default_factory=dict)


class CompletedRequest(NamedTuple):
    """A request whose fields about parameters are set, and the parameters to send with it."""

    request: Request
    params: Reference | None  # None: the learner has the trainer's present parameters


class SentParams:
    """Trainers' parameters in the form in which learners get them: whole, or their last update.

    A learner that adds the update to the version before has the same bits as the driver.
    """

    def __init__(self, pool: LearnerPool):
        """Store the pool, through which parameters are sent; nothing is sent yet."""
        self._pool = pool
        # By trainer id; a trainer that is looked up for the first time gets its first version.
        self._newest = defaultdict[int, _Version](_Version)

    def record_change(
        self, trainer: int, update: PyTree | None, learner: LearnerRecord | None = None
    ) -> None:
        """Record that a trainer's parameters have changed, and so have a new version.

        Args:
          trainer: Id of the trainer.
          update: The packed update that changed them. None if there is none to send: the next
            request brings whole parameters.
          learner: The learner that has the new parameters already, because the trainer has taken
            those of its only worker; None: no learner has them.
        """
        before = self._newest[trainer]
        newest = _Version(id=before.id + 1, update=update)
        self._newest[trainer] = newest
        if learner is not None:
            learner.params_ids[trainer] = newest.id

    def complete_request(
        self, request: Request, learner: LearnerRecord, whole_params: Callable[[], PyTree]
    ) -> CompletedRequest:
        """Complete a learner's request by the trainer's parameters, if the learner lacks them.

        A learner that has the version before is sent the update, if there is one; another is sent
        whole parameters. They are stored in the transport once, for all learners. The learner is
        recorded as having them from now on, as the caller sends the request.

        Args:
          request: Its fields `params_sha256` and `is_update` are set in the result.
          learner: Who runs the request. `params_ids`, which version it has of each trainer's
            parameters, is read and changed.
          whole_params: Returns the trainer's whole parameters, in NumPy and without an axis of
            trainers. It is called only if they are needed.
        """
        trainer = request.trainer
        newest = self._newest[trainer]
        if not newest.sha256:  # the version has not been sent yet
            newest.sha256 = tree_sha256(whole_params())  # by which the learner checks its own

        had_id = learner.params_ids.get(trainer, 0)  # 0: the learner has no version
        learner.params_ids[trainer] = newest.id
        is_update = newest.update is not None and had_id == newest.id - 1
        request = request._replace(params_sha256=newest.sha256, is_update=is_update)
        if had_id == newest.id:  # the learner has them
            return CompletedRequest(request, params=None)

        if is_update not in newest.stored:
            # The second argument is the kind: newer parameters replace older ones of one kind.
            if is_update:
                reference = self._pool.put(newest.update, (trainer, "update"))
            else:
                reference = self._pool.put(whole_params(), (trainer, "whole"))
            newest.stored[is_update] = reference
        return CompletedRequest(request, params=newest.stored[is_update])

    def forget(self, learner: LearnerRecord, trainer: int) -> None:
        """Assume that a learner has no parameters at all, and that none of `trainer` are stored.

        So the learner's next request brings whole parameters; those of `trainer` are stored again.
        """
        learner.params_ids.clear()
        self._newest[trainer].stored.clear()


class InnerStates:
    """Knows where each worker's inner state is: in the driver, in a learner process, or lost.

    With `inner.state=reset` every round begins with a fresh state, which the learner makes itself;
    then the methods do nothing.
    """

    def __init__(self, spec: ProgramSpec, pool: LearnerPool, poll: Callable[[], None]):
        """Begin without any state.

        Args:
          spec: Has the optimizer that makes a fresh state, and the shapes of the parameters.
          pool: The learners, to ask them for states.
          poll: Processes what learners have sent since its last call, and passes states to
            `receive`. Methods here that wait for learners call it again and again; they raise its
            errors, such as ResourceError if no learner is left.
        """
        self._spec = spec
        self._pool = pool
        self._poll = poll
        self._here: dict[int, PyTree] = {}  # states in this process, by worker id
        # By worker id, the learner whose response for it counted last: it has the state after that.
        self._holders: dict[int, LearnerRecord] = {}
        self._received: dict[StateKey, PyTree] = {}  # what learners have sent since the last fetch

    def receive(self, keys: Sequence[StateKey], states: Sequence[PyTree] | Refused) -> None:
        """Store the inner states that a learner has sent, one for each of the keys.

        A learner that lacks one of them refuses to send any. Then nothing is stored, and fresh
        states are used in their place.
        """
        if isinstance(states, Refused):
            return
        for key, state in zip(keys, states, strict=True):
            self._received[key] = state

    def keep_states_of(self, state: State) -> None:
        """Keep in this process the inner states of an ensemble, to send them to learners.

        An ensemble has them only after a resume, a merge or a spawn; otherwise nothing is done.
        They replace all that were kept here.

        A state is not kept if a learner has the same one, so that it is not sent there again. The
        states that learners have are known from before the merge or spawn, for which they were
        fetched.
        """
        inner_R = state.ensemble.inner_state_R
        if inner_R is None or self._spec.reset_inner_state:
            return
        inner_R = jax.device_get(inner_R)
        self._here = {}
        for position, key in enumerate(state.control.reads()):
            _, worker_id, _ = key
            own = jax.tree.map(lambda leaf, at=position: leaf[at], inner_R)
            in_learner = None
            if self._holder(worker_id) is not None:  # the learner that had it still runs
                in_learner = self._received.get(key)
            if in_learner is None or not _equal(own, in_learner):
                self._here[worker_id] = own
        self._received.clear()

    def bring_here(self, control: Control, targets: Mapping[int, LearnerRecord | None]) -> None:
        """Move workers' inner states to this process, and wait for those that learners send.

        A worker that moves to another learner is sent its state from here. Over slow links nothing
        is brought: a state is several times as large as an update, and a fresh one serves.

        Args:
          control: Says where each worker reads next, which is part of the key of its state.
          targets: The workers that move: by worker id, the learner that will run it next, or None
            if that is not known yet. A state stays where it is if that learner has it.
        """
        if self._spec.reset_inner_state or not self._pool.transport.moves_states:
            return
        keys = []  # of the states to bring
        for key in control.reads():
            _, worker_id, _ = key
            if worker_id in targets and self._holders.get(worker_id) is not targets[worker_id]:
                keys.append(key)
        self._fetch(keys)  # to `_received`
        for (_, worker_id, _), state in self._received.items():
            self._here[worker_id] = state

    def state_to_send(self, worker_id: int, learner: LearnerRecord) -> PyTree | None:
        """Return the inner state to send with a worker's round; None if the learner needs none.

        It needs none if it has the state, or makes fresh ones itself. A state that is neither here
        nor in this learner is made fresh. It is kept here until the round counts, as the round may
        have to be sent again.
        """
        if self._spec.reset_inner_state:
            return None  # the learner makes a fresh one
        if worker_id not in self._here and self._holders.get(worker_id) is not learner:
            self._here[worker_id] = self._fresh()
        return self._here.get(worker_id)

    def record_counted(self, worker_id: int, learner: LearnerRecord) -> None:
        """Record that a worker's response counts: only its sender, `learner`, has the new state."""
        self._here.pop(worker_id, None)
        self._holders[worker_id] = learner

    def forget(self, learner: LearnerRecord) -> None:
        """Assume that a learner has no inner states, so that its next requests bring them."""
        self._holders = {
            worker_id: holder
            for worker_id, holder in self._holders.items()
            if holder is not learner
        }

    def ensemble_with_states(self, state: State, *, fetches: bool) -> Ensemble:
        """Return the ensemble with an inner state for each worker, stacked along axis R.

        An ensemble that has inner states is returned as it is. Otherwise the states are those that
        are kept here, and those that learners send, for which this waits. In place of a lost state
        there is a fresh one, which on a small model gave a lower loss than the mean of the
        trainer's other workers (studies/LOG.md, 2026-11-25).

        Args:
          state: Ensemble and control; the ensemble is not changed.
          fetches: False: all states are fresh, and no learner is asked.
        """
        ensemble, control = state
        if ensemble.inner_state_R is not None:
            return ensemble
        keys = control.reads()
        known: dict[int, PyTree] = {}  # by worker id
        if fetches and not self._spec.reset_inner_state:
            self._fetch(keys)
            for (_, worker_id, _), inner_state in self._received.items():
                known[worker_id] = inner_state
            known.update(self._here)
        fresh = None  # made once, if it is needed
        states = []
        for _, worker_id, _ in keys:
            if worker_id in known:
                states.append(known[worker_id])
                continue
            if fresh is None:
                fresh = self._fresh()
            states.append(fresh)
        inner_R = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *states)
        return ensemble.replace(inner_state_R=inner_R)

    def _fetch(self, keys: Sequence[StateKey]) -> None:
        """Request the inner states that only learners have, and wait until each has answered.

        `keys` are those of the wanted states, of which those that are kept here are not requested.
        Afterwards `_received` has what learners have sent, and nothing else: it lacks a state whose
        learner was lost or has refused.
        """
        self._received.clear()
        asked: dict[int, list[StateKey]] = {}  # by the number of the learner
        for key in keys:
            _, worker_id, _ = key
            holder = self._holder(worker_id)
            if holder is not None and worker_id not in self._here:
                asked.setdefault(holder.number, []).append(key)
        for number, wanted in asked.items():
            self._pool.ask_for_states(number, wanted)
        while self._pool.pending("states"):  # calls without an answer; none of a lost learner
            self._poll()

    def _holder(self, worker_id: int) -> LearnerRecord | None:
        """Return the learner that has a worker's state; None if it has ended, or none has it."""
        holder = self._holders.get(worker_id)
        # The pool has a new record for the next process of a learner's number.
        if holder is None or self._pool.learners.get(holder.number) is not holder:
            return None
        return holder

    def _fresh(self) -> PyTree:
        """Make the inner state of a worker that has made no update."""
        # `spec.params` has only shapes and types; zeros stand for the values.
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), self._spec.params)
        return jax.device_get(self._spec.inner_tx.init(zeros))


def _equal(one: PyTree, other: PyTree) -> bool:
    """Whether two trees of one structure have the same arrays."""
    return jax.tree.all(jax.tree.map(np.array_equal, one, other))
