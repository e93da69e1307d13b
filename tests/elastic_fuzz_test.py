"""Random faults of learners and of the driver, with fixed seeds and without Ray, then an audit."""

import contextlib
import itertools
import math
import random

import jax
import numpy as np
import pytest
from learners import Here, InBucket, num_updates
from toy import settings_of
from toy_runs import events, run

from adloco_jax.elastic import pool
from adloco_jax.elastic.messages import Refused
from adloco_jax.errors import DivergedError, ResourceError
from probes import runs

pytestmark = pytest.mark.usefixtures("one_device")

DIED = "its process or its node has ended"
# Chances of a call's fate, by method.
FATES = {
    "hello": {"dies": 0.1, "never": 0.05},
    "ping": {"leaves": 0.05, "dies": 0.01},
    "states": {"dies": 0.15, "hangs": 0.05},
    "run_round": dict.fromkeys(("dies", "responses and dies", "nan", "hidden nan", "huge"), 0.05)
    | dict.fromkeys(("hangs", "is stuck"), 0.02),
}


class Crash(BaseException):
    """The driver's process ends."""


class Fates:
    """Draws the fate of every call once, and keeps a record of what learners did."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.here: Here
        self.record = []  # handle, request, work, updates before and after; or a loss

    def start(self, crash_s):
        self.dead, self.hung, self.leaving, self.crash_s = set(), set(), set(), crash_s
        self.drawn = {}  # in a bucket the calls of each driver have the same names
        self.record.append(("starts", None))

    def __call__(self, n, incarnation, method, arguments):
        handle, now_s = (n, incarnation), self.here.now_s
        if now_s > self.crash_s:
            raise Crash
        assert now_s < 2e4, "the run does not end"
        if handle in self.dead:
            return DIED
        call = self.here.call
        if call not in self.drawn:
            # In a bucket a machine that cannot join leaves its place to others.
            joins = method == "hello" and isinstance(self.here, InBucket)
            chances = {} if joins else FATES[method]
            others = 1 - sum(chances.values())
            (what,) = self.rng.choices([*chances, "responses"], [*chances.values(), others])
            seconds = self.rng.uniform(0.0, 1.0)
            if method == "hello":
                seconds *= 8
            elif method == "run_round":
                seconds += sum(w.num_updates for w in arguments[0].work) * (3 if n == 1 else 1)
            self.drawn[call] = what, now_s, seconds
        what, start_s, seconds = self.drawn[call]
        if handle in self.hung or what in ("never", "is stuck") or now_s < start_s + seconds:
            return "wait"
        if what == "hangs":
            self.hung.add(handle)
            return "wait"
        if "dies" in what:
            self.dead.add(handle)
            if what == "dies":
                return DIED
        if what == "leaves":
            self.leaving.add(handle)
        if method == "ping":
            return lambda found: found.model_copy(update={"leaving": handle in self.leaving})
        if method == "run_round":
            return lambda responses: self.played(handle, arguments[0], responses, what, seconds)
        return "response"

    def played(self, handle, request, responses, what, seconds):
        if isinstance(responses, Refused):
            return responses
        held = self.here.learner(handle).held
        for work in request.work:
            key = request.trainer, work.worker_id
            before = num_updates(held[*key, work.start])
            after = num_updates(held[*key, work.start + request.sequences(work.num_updates)])
            self.record.append((handle, request, work, before, after))
        factor = {"nan": math.nan, "hidden nan": math.nan, "huge": 1e4}.get(what, 1.0)
        if math.isnan(factor):
            self.record.append(("rejected", handle))
        return [
            response._replace(
                seconds=np.array(seconds / len(responses)),
                differences=response.differences._replace(
                    packed_R=jax.tree.map(
                        lambda leaf: leaf * np.float32(factor) if leaf.dtype.kind == "f" else leaf,
                        response.differences.packed_R,
                    )
                ),
            )
            for response in responses
        ]


def misplaced(record, merged, *, moves_fresh):
    """Rounds that began with an inner state other than that of the round before in the stream.

    A fresh state is right only if the process that had the last one was lost or has sent an update
    that is rejected, or if a worker that moves to another learner starts with one (`moves_fresh`).
    """
    faults, last, lost, rejected = [], {}, set(), set()
    for entry in record:
        if entry[0] == "lost":
            lost.add(entry[1])
        if entry[0] == "starts":
            last, lost, rejected = {}, set(), set()
        if entry[0] == "rejected":
            rejected |= {(entry[1], *place[:2]) for place, known in last.items()}
        if entry[0] in ("lost", "starts", "rejected"):
            continue
        handle, request, work, before, after = entry
        place = request.trainer, work.worker_id, work.start
        known = last.get(place, {})
        has_moved = moves_fresh and [*known][-1:] != [handle]
        holder = [*known][-1] if known else None
        is_forgotten = holder in lost or (holder, *place[:2]) in rejected
        fresh = before == 0 and (not known or has_moved or is_forgotten)
        rejected.discard((handle, *place[:2]))
        if known and before not in known.values() and not fresh and request.round - 1 not in merged:
            faults.append((handle, request.trainer, request.round, work.worker_id, before, known))
        size = work.num_updates * request.micro_batch_size * request.num_accum_steps
        last.setdefault((*place[:2], work.start + size), {})[handle] = after
    return faults


def settings_for(seed, **address):
    rng = random.Random(f"settings {seed}")
    trainers = rng.choice([1, 1, 2, 3])
    engine = {"kind": "ray", "heartbeat_s": 4.0, "restart_s": 10.0, "grace_s": rng.choice([0, 2])}
    engine |= {"quorum": rng.choice([None, 1, 2, 3]), "max_learners": rng.choice([None, 3, 5])}
    engine |= {"steps": rng.choice(["equal", "by_speed"])}
    return settings_of(
        num_rounds=8,
        ensemble={"num_trainers": trainers, "num_workers": 4, "model_shards": 1},
        inner={"steps_per_round": 2},
        merge={"every_rounds": 3, "policy": rng.choice(["none", "worst_with_worst"])},
        batching={"test": rng.choice(["constant", "norm"])},
        checkpoint={"every_rounds": 2},
        outer={"precision": rng.choice(["float32", "int4"]), "skip_single": rng.random() < 0.5},
        engine=engine | address,
    )


FAST = [(1, "ray"), (3, "ray"), (33, "bucket")]
SLOW = [each for each in itertools.product(range(40), ("ray", "bucket")) if each not in FAST]


@pytest.mark.parametrize(
    ("seed", "kind"), [*FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_random_faults_cost_no_inner_state_and_no_sequence(monkeypatch, tmp_path, seed, kind):
    fates, settings = Fates(seed), settings_for(seed)
    if kind == "bucket":
        folder = tmp_path.with_name(f"{tmp_path.name}-bucket")
        here = fates.here = InBucket(monkeypatch, folder, fates)
        settings = settings_for(seed, kind="bucket", address=here.url)
    else:
        here = fates.here = Here(monkeypatch, fates)
    note = pool.LearnerPool.note

    def noted(self, number, what, *words):
        if what == "lost":
            fates.record.append(("lost", (number, self.learners[number].incarnation)))
        return note(self, number, what, *words)

    monkeypatch.setattr(pool.LearnerPool, "note", noted)
    ended = None
    for attempt in range(20):
        fates.start(here.now_s + fates.rng.uniform(5, 60) if attempt < 2 else math.inf)
        with contextlib.suppress(Crash, ResourceError):
            try:
                ended = run(tmp_path, settings)
            except DivergedError:
                ended = True
            break
        here.alive.clear()
    assert ended is not None
    assert not here.alive
    assert runs.audit(tmp_path) == []
    merged = {e["round"] for e in [*events(tmp_path, "merge"), *events(tmp_path, "refusal")]}
    assert misplaced(fates.record, merged, moves_fresh=kind == "bucket") == []
    lines = events(tmp_path, "round")
    for line in lines:
        assert (line["workers_counted"] == 0) == (line["updates"] == 0) == (line["tokens"] == 0)
        assert (line["workers_counted"] == 0) == (line["pseudo_grad_norm"] is None)
    if ended is not True:
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(ended.ensemble))
        assert ended.state.control.tokens_total == sum(line["tokens"] for line in lines)
