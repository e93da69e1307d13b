"""Track a round in learner processes: which answers have come, which count, when it ends."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from adloco_jax.elastic import members
from adloco_jax.elastic.learner import Answer, Order
from adloco_jax.engine.local import Outcome
from adloco_jax.loop.control import RoundPlan
from adloco_jax.settings import Engine


@dataclass
class Round:
    """The driver's record of a trainer's round that has started and has not been applied yet."""

    plan: RoundPlan
    order: Order  # the request to learners, without the field `work`
    rate_T: np.ndarray
    start_s: float
    wire_bytes: int
    awaited: set[int] = field(default_factory=set)  # learners that have not answered
    reported: set[int] = field(default_factory=set)
    answers: dict[int, Answer] = field(default_factory=dict)  # by stream
    quorum_s: float | None = None  # when the quorum was reached

    def take(self, learner: int, answers: Sequence[Answer]) -> None:
        """Store the answers of a learner; they are ignored if the round no longer waits for it."""
        if learner not in self.awaited:
            return
        self.awaited.discard(learner)
        self.reported.add(learner)
        for answer in answers:
            self.answers[answer.stream] = answer
            self.wire_bytes += sum(leaf.nbytes for leaf in jax.tree.leaves(answer.differences))

    def is_over(self, rule: Engine) -> bool:
        """Whether the round ends now: all learners have answered, or enough of them have."""
        now_s, reported, awaited = time.monotonic(), len(self.reported), len(self.awaited)
        if self.quorum_s is None and members.has_quorum(reported, awaited, rule.quorum):
            self.quorum_s = now_s
        since_s = None if self.quorum_s is None else now_s - self.quorum_s
        how = {"quorum": rule.quorum, "since_quorum_s": since_s, "grace_s": rule.grace_s}
        return members.is_over(reported, awaited, **how)

    def counted(self, rule: Engine) -> dict[int, Answer]:
        """The answers of workers that count in the outer update, by stream.

        Answers with a rejected update do not count; if all are rejected, all answers count.
        """
        norms = {stream: answer.norm for stream, answer in self.answers.items()}
        out = members.rejected(norms, rule.max_norm_ratio)
        kept = {stream: a for stream, a in self.answers.items() if stream not in out}
        return kept or self.answers


def outcome_of(answers: Sequence[Answer | None], plan: RoundPlan, norm: float) -> Outcome:
    """Losses and skipped updates of a trainer's workers in a round.

    For a worker without a counted answer, losses are NaN and no update is skipped.
    """
    shape = (plan.num_updates, len(answers))
    loss_SR, skipped_SR = np.full(shape, np.nan), np.zeros(shape, bool)
    for column, answer in enumerate(answers):
        if answer is not None:  # a slower worker's updates are the last ones of the round
            loss_SR[-answer.num_updates :, column] = answer.loss_SR[:, 0]
            skipped_SR[-answer.num_updates :, column] = answer.skipped_SR[:, 0]
    return Outcome(loss_SR, skipped_SR, norm)
