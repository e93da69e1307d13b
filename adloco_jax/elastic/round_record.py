"""The driver's record of a round in learners: which responses have come, and which count.

A response is of one worker; a learner sends one for each worker that it runs. `S` is the axis of
updates, `R` that of workers, which has length one in a response. A response counts if it is part of
the outer update. A worker's difference is its trainer's parameters minus its own. It is clipped if
it is scaled down because it is much larger than usual. An update is skipped if its loss or gradient
is not finite. The quorum (`engine.quorum`) is how many learners must have answered before a round
may end without the others; it waits for these for a grace of `engine.grace_s` seconds.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from adloco_jax.elastic.decisions import LearnerRecord, usual_norm
from adloco_jax.elastic.learner import Response, response_form
from adloco_jax.elastic.messages import Refused, Request, check_form
from adloco_jax.engine.round import Outcome
from adloco_jax.engine.spec import ProgramSpec
from adloco_jax.loop.control import RoundPlan, Work
from adloco_jax.settings import EngineSettings

_MOST_S = 1e12  # seconds that a learner may say it took


@dataclass
class RoundRecord:
    """What the driver knows of a trainer's round, from its start until the outer update."""

    plan: RoundPlan  # sizes of the round
    rate_T: np.ndarray  # learning rate of each micro-batch
    request: Request  # the request to the learners; its field `work` is empty
    start_s: float  # when the round was started, on the clock `time.monotonic`
    awaited: set[int] = field(default_factory=set)  # learners that have not answered yet
    reported: set[int] = field(default_factory=set)  # learners that have answered
    # By worker id: the responses, the norms of their differences (NaN if one of the numbers
    # is not finite), and who has sent them.
    responses: dict[int, Response] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    senders: dict[int, LearnerRecord] = field(default_factory=dict)
    counted: dict[int, Response] = field(default_factory=dict)  # what counts, set by `judge`
    # By worker id, the factor of a counted difference that is clipped, set by `judge`.
    factors: dict[int, float] = field(default_factory=dict)
    quorum_s: float = math.inf  # when the quorum was reached; infinity: not yet

    def add_responses(
        self,
        learner: LearnerRecord,
        responses: Mapping[int, Response],
        norms: Mapping[int, float],
    ) -> None:
        """Store a learner's responses, and the norms of their differences, both by worker id.

        They are ignored if the round does not wait for this learner, as when it was lost meanwhile.
        """
        if learner.number not in self.awaited:
            return
        self.awaited.discard(learner.number)
        self.reported.add(learner.number)
        for worker_id, response in responses.items():
            norm = norms[worker_id]
            self.responses[worker_id] = response
            self.senders[worker_id] = learner
            is_finite = response.differences.usable_R.all() and math.isfinite(norm)
            self.norms[worker_id] = norm if is_finite else math.nan

    def is_over(self, rule: EngineSettings) -> bool:
        """Whether the round ends now: all learners have answered, or the grace is over.

        The grace of `rule.grace_s` seconds begins when `rule.quorum` learners have answered; this
        method stores that time. A round never ends without a response.
        """
        now_s = time.monotonic()
        num_reported = len(self.reported)
        num_all = num_reported + len(self.awaited)
        quorum = num_all
        if rule.quorum is not None:
            quorum = min(rule.quorum, num_all)  # fewer may take part
        if num_reported >= quorum:
            self.quorum_s = min(self.quorum_s, now_s)  # only the first time is stored
        if num_reported == 0:
            return False
        return not self.awaited or now_s - self.quorum_s >= rule.grace_s

    def judge(self, past: Sequence[float], params_norm: float, clip: float) -> list[float]:
        """Decide which responses count, and by which factor: set `counted` and `factors`.

        Responses whose numbers are finite count. A difference is scaled down if its norm, divided
        by the worker's updates, is more than `clip` times the usual one: the larger of the medians
        of `past` and of this round's learners. As long as that is not known, the norm of the
        parameters, divided by the round's updates, stands for it.

        Args:
          past: Accepted norms per update of the trainer's last rounds.
          params_norm: Norm of the parameters with which the round began.
          clip: `outer.clip_workers`.

        Returns:
          The accepted norms per update of this round, after scaling; none for zero differences.
        """
        self.counted = {
            worker_id: self.responses[worker_id]
            for worker_id, norm in self.norms.items()
            if not math.isnan(norm)
        }
        per_update: dict[int, float] = {}  # of each worker whose difference is not zero
        for worker_id, response in self.counted.items():
            norm = self.norms[worker_id]
            if norm > 0:
                per_update[worker_id] = norm / len(response.skipped_SR)  # by its updates

        # One norm for each learner, the largest of its workers', so that a learner with many
        # workers does not decide what is usual.
        of_learner: dict[int, float] = {}
        for worker_id, norm in per_update.items():
            number = self.senders[worker_id].number
            of_learner[number] = max(norm, of_learner.get(number, 0.0))
        usual = usual_norm(past, [*of_learner.values()])
        if usual == 0:  # not known yet
            usual = params_norm / self.plan.num_updates
        largest = math.inf  # that is accepted; there is no limit if all parameters are zero
        if usual > 0:
            largest = clip * usual

        self.factors = {}
        for worker_id, norm in per_update.items():
            if norm > largest:
                self.factors[worker_id] = largest / norm
        return [min(norm, largest) for norm in per_update.values()]

    def spent(self, worker_id: int) -> Work:
        """Return how many updates and sequences a worker whose response counts has done."""
        skipped_SR = self.counted[worker_id].skipped_SR
        num_updates = len(skipped_SR)  # with those that were skipped
        num_made = num_updates - int(skipped_SR.sum())
        return Work(
            num_updates=num_updates,
            num_sequences=self.request.sequences(num_updates),
            num_learned=self.request.sequences(num_made),
        )

    @property
    def useful(self) -> set[int]:
        """Ids of the workers whose responses count, and that have not skipped all updates."""
        return {worker_id for worker_id in self.counted if self.spent(worker_id).num_learned}

    def outcome(self, worker_ids: Sequence[int], norm: float) -> Outcome:
        """Collect the losses and skipped updates of the round's workers.

        Args:
          worker_ids: All workers of the trainer; each gets a column, in this order.
          norm: Norm of the outer update.

        Returns:
          The `norm`; losses `(S, R)`, NaN where a worker made no update or its response does not
          count; and `(S, R)` whether an update was skipped, true for all updates of a response that
          is not finite. A worker that made fewer than S updates has the last rows, so that the last
          row has all workers.
        """
        shape = (self.plan.num_updates, len(worker_ids))
        loss_SR = np.full(shape, np.nan)
        skipped_SR = np.zeros(shape, bool)
        for column, worker_id in enumerate(worker_ids):
            response = self.responses.get(worker_id)
            if response is None:  # its learner has not answered
                continue
            first_row = -len(response.loss_SR)  # counted from the end
            if math.isnan(self.norms[worker_id]):  # the response is not finite
                skipped_SR[first_row:, column] = True
            elif worker_id in self.counted:
                loss_SR[first_row:, column] = response.loss_SR[:, 0]
                skipped_SR[first_row:, column] = response.skipped_SR[:, 0]
        return Outcome(loss_SR, skipped_SR, norm)


def check_responses(responses: Sequence[Response], request: Request, spec: ProgramSpec) -> None:
    """Raise Refused unless a learner's responses are what a request asks for.

    There must be one for each entry of `request.work`, with arrays of the shapes and types that
    follow from `spec`. Losses must be finite for updates that were made, and NaN for those that
    were skipped; the counts of gradient statistics those of the tested sequences; seconds neither
    negative nor huge. The values of differences are not checked here.
    """
    forms = [response_form(spec, request, work) for work in request.work]
    check_form(responses, forms, "response")
    for response, work in zip(responses, request.work, strict=True):
        loss_SR = np.where(response.skipped_SR, 0.0, response.loss_SR)  # 0 for skipped updates
        is_finite_SR = np.abs(loss_SR) < np.finfo(np.float32).max  # false for NaN
        if not is_finite_SR.all():
            raise Refused(f"response.loss_SR: {loss_SR.ravel()} of updates that were made")
        if not np.isnan(response.loss_SR[response.skipped_SR]).all():
            raise Refused("response.loss_SR: losses of updates that were skipped")

        stats_R = response.stats_R
        if stats_R is not None:
            # Its counts and weights follow from the number of tested sequences (`core.types`): the
            # number, its degrees of freedom, and the ordered pairs of different sequences.
            tested = np.float32(work.num_tested)
            have = [stats_R.num_examples, stats_R.noise_weight, stats_R.signal_weight]
            want = [tested, tested - 1, tested * (tested - 1)]
            if not np.array_equal(np.concatenate(have), want):
                raise Refused(f"response.stats_R: {have}, of {tested:.0f} examples")

        spent_s = np.array([response.seconds, *response.between_s])
        if not ((spent_s >= 0) & (spent_s < _MOST_S)).all():
            raise Refused(f"response.seconds: {spent_s}")
