"""The driver's record of a round in learners: which answers have come, and which count."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from adloco_jax.elastic.decisions import LearnerRecord, jitter_s, too_large
from adloco_jax.elastic.formats import Order, Refused, check_form
from adloco_jax.elastic.learner import Answer, answer_form
from adloco_jax.engine.round import Outcome
from adloco_jax.engine.spec import Spec
from adloco_jax.loop.control import RoundPlan
from adloco_jax.settings import EngineSettings


@dataclass
class Round:
    """The driver's record of a trainer's round, from its start until the trainer's outer update."""

    plan: RoundPlan  # sizes of the round
    rate_T: np.ndarray  # learning rate of each micro-batch
    order: Order  # the request to the learners; its field `work` is empty
    start_s: float  # when the round was started, on the clock `time.monotonic`
    awaited: set[int] = field(default_factory=set)  # learners that have not answered yet
    reported: set[int] = field(default_factory=set)  # learners that have answered
    # By the worker's stream: the answers, the norms of their differences (NaN if one of the numbers
    # is not finite), and who has sent them.
    answers: dict[int, Answer] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    senders: dict[int, LearnerRecord] = field(default_factory=dict)
    counted: dict[int, Answer] = field(default_factory=dict)  # what counts, set by `judge`
    quorum_s: float = math.inf  # when the quorum was reached; infinity: not yet

    def take(self, learner: LearnerRecord, found: Mapping[int, tuple[Answer, float]]) -> None:
        """Store a learner's answers and norms by stream, unless the round does not wait for it."""
        if learner.number not in self.awaited:
            return
        self.awaited.discard(learner.number)
        self.reported.add(learner.number)
        for stream, (answer, norm) in found.items():
            self.answers[stream], self.senders[stream] = answer, learner
            is_finite = answer.differences.usable_R.all() and math.isfinite(norm)
            self.norms[stream] = norm if is_finite else math.nan

    def is_over(self, rule: EngineSettings, learners: Mapping[int, LearnerRecord]) -> bool:
        """Whether the round ends now; store the time of the quorum, or of all, if fewer take part.

        It ends when all have answered, or some time after the quorum: the grace, or as long as the
        answers of `learners` usually vary. It never ends without an answer.
        """
        now_s, reported = time.monotonic(), len(self.reported)
        num_all = reported + len(self.awaited)
        if reported >= min(rule.quorum or num_all, num_all):
            self.quorum_s = min(self.quorum_s, now_s)
        varies_s = [jitter_s(learners[number].transfer_s) for number in self.awaited]
        grace_s = max([rule.grace_s, *varies_s])
        return reported > 0 and (not self.awaited or now_s - self.quorum_s >= grace_s)

    def judge(self, usual: float) -> None:
        """Decide which answers count: finite, and not too large beside the `usual` norm."""
        finite = {stream: norm for stream, norm in self.norms.items() if not math.isnan(norm)}
        out = too_large(finite, usual)
        self.counted = {stream: self.answers[stream] for stream in finite if stream not in out}

    def spent(self, stream: int) -> tuple[int, int, int]:
        """Return the updates of an answer that counts, its sequences, and those of made updates."""
        skipped_SR, sequences = self.counted[stream].skipped_SR, self.order.sequences
        num_updates, num_skipped = len(skipped_SR), int(skipped_SR.sum())
        return num_updates, sequences(num_updates), sequences(num_updates - num_skipped)

    @property
    def useful(self) -> set[int]:
        """The streams whose answers count, and have not skipped all their updates."""
        return {stream for stream in self.counted if self.spent(stream)[2]}

    def outcome(self, streams: Sequence[int], norm: float) -> Outcome:
        """Collect losses (NaN if an answer does not count) and skips (all, if it is not finite)."""
        shape = (self.plan.num_updates, len(streams))
        loss_SR, skipped_SR = np.full(shape, np.nan), np.zeros(shape, bool)
        for column, stream in enumerate(streams):
            if math.isnan(self.norms.get(stream, 0.0)):
                skipped_SR[-len(self.answers[stream].loss_SR) :, column] = True
            elif answer := self.counted.get(stream):  # one with fewer updates fills the last rows
                loss_SR[-len(answer.loss_SR) :, column] = answer.loss_SR[:, 0]
                skipped_SR[-len(answer.loss_SR) :, column] = answer.skipped_SR[:, 0]
        return Outcome(loss_SR, skipped_SR, norm)


def check_answers(answers: Sequence[Answer], order: Order, spec: Spec) -> None:
    """Raise Refused unless answers are what an order asks for, with losses that are numbers."""
    check_form(answers, [answer_form(spec, order, work) for work in order.work], "answer")
    for answer, work in zip(answers, order.work, strict=True):
        loss_SR = np.where(answer.skipped_SR, 0.0, answer.loss_SR)
        if not (np.abs(loss_SR) < np.finfo(np.float32).max).all():
            raise Refused(f"answer.loss_SR: {loss_SR.ravel()} of updates that were made")
        if not np.isnan(answer.loss_SR[answer.skipped_SR]).all():
            raise Refused("answer.loss_SR: losses of updates that were skipped")
        if (stats_R := answer.stats_R) is not None:
            t = np.float32(work.num_tested)
            have = stats_R.num_examples, stats_R.noise_weight, stats_R.signal_weight
            if not np.array_equal(np.concatenate(have), [t, t - 1, t * (t - 1)]):
                raise Refused(f"answer.stats_R: {have}, of {t:.0f} examples")
        if not 0 <= answer.seconds < 1e12:
            raise Refused(f"answer.seconds: {answer.seconds}")
