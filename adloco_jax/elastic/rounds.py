"""The driver's record of a round that learners run: which answers have come, and which count.

Learners are processes that run the rounds of workers. The driver is the process with the training
loop.
"""

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
    """The driver's record of a trainer's round, from its start until the trainer's outer update."""

    plan: RoundPlan  # sizes of the round
    order: Order  # the request to the learners; its field `work` is empty
    rate_T: np.ndarray  # learning rate of each micro-batch
    start_s: float  # when the round was started, on the clock `time.monotonic`
    wire_bytes: int  # bytes sent to and received from learners in the round so far
    awaited: set[int] = field(default_factory=set)  # learners that have not answered yet
    reported: set[int] = field(default_factory=set)  # learners that have answered
    answers: dict[int, Answer] = field(default_factory=dict)  # the answers, by the worker's stream
    quorum_s: float | None = None  # when the quorum was reached; None: not yet

    def take(self, learner: int, answers: Sequence[Answer]) -> None:
        """Store the answers of a learner, unless the round does not wait for this learner."""
        if learner not in self.awaited:
            return
        self.awaited.discard(learner)
        self.reported.add(learner)
        for answer in answers:
            self.answers[answer.stream] = answer
            self.wire_bytes += sum(leaf.nbytes for leaf in jax.tree.leaves(answer.differences))

    def is_over(self, rule: Engine) -> bool:
        """Whether the round ends now, because all learners have answered, or enough of them.

        `rule` is the config's group `engine`, with the quorum. The time at which the quorum was
        reached is stored.
        """
        now_s, reported, awaited = time.monotonic(), len(self.reported), len(self.awaited)
        if self.quorum_s is None and members.has_quorum(reported, awaited, rule.quorum):
            self.quorum_s = now_s
        since_s = None if self.quorum_s is None else now_s - self.quorum_s
        how = {"quorum": rule.quorum, "since_quorum_s": since_s, "grace_s": rule.grace_s}
        return members.is_over(reported, awaited, **how)

    def counted(self, rule: Engine) -> dict[int, Answer]:
        """Return the answers that count in the outer update, by the worker's stream.

        An answer does not count if the worker's update is rejected (`members.rejected`). If all
        updates are rejected, all answers count.
        """
        norms = {stream: answer.norm for stream, answer in self.answers.items()}
        out = members.rejected(norms, rule.max_norm_ratio)
        kept = {stream: a for stream, a in self.answers.items() if stream not in out}
        return kept or self.answers


def outcome_of(answers: Sequence[Answer | None], plan: RoundPlan, norm: float) -> Outcome:
    """Collect the losses and skipped updates of a trainer's round from its workers' answers.

    Args:
      answers: For each worker of the trainer, the answer that counts. If it is None, the worker's
        losses are NaN, and none of its updates is skipped.
      plan: Sizes of the round.
      norm: Norm of the trainer's outer gradient.
    """
    shape = (plan.num_updates, len(answers))
    loss_SR, skipped_SR = np.full(shape, np.nan), np.zeros(shape, bool)
    for column, answer in enumerate(answers):
        if answer is not None:  # a worker with fewer updates fills the last rows
            loss_SR[-answer.num_updates :, column] = answer.loss_SR[:, 0]
            skipped_SR[-answer.num_updates :, column] = answer.skipped_SR[:, 0]
    return Outcome(loss_SR, skipped_SR, norm)
