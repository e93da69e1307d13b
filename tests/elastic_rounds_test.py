"""Runs in learners of this process, without Ray: late, lost and broken responses."""

import contextlib
import itertools
import math
import re
import signal
import sys
import time

import jax
import numpy as np
import obstore
import pytest
from learners import Here, InBucket, assert_same_rounds, num_updates
from toy import settings_of
from toy_runs import GROWING, events, run

from adloco_jax.elastic import decisions, engine, learner, store
from adloco_jax.elastic.messages import USES
from adloco_jax.engine.memory import Peak
from adloco_jax.errors import ConfigError, Preempted, ResourceError
from adloco_jax.host import processes
from adloco_jax.run.kept.checkpoint import list_rounds
from adloco_jax.run.watching.observers import Evaluator
from adloco_jax.study import summary
from probes import runs

pytestmark = pytest.mark.usefixtures("one_device")

ENGINE = {"kind": "ray", "grace_s": 0.0, "heartbeat_s": 30.0, "restart_s": 60.0, "steps": "equal"}
DIED = "its process or its node has ended"


@pytest.fixture
def transport(request, monkeypatch, tmp_path):
    """Replaces `Here` by `InBucket` for a test over the transport `bucket`."""
    if request.param == "bucket":
        folder = tmp_path.with_name(f"{tmp_path.name}-bucket")
        change = {"kind": "bucket", "address": f"file://{folder}"}
        for name, value in change.items():
            monkeypatch.setitem(ENGINE, name, value)
        module = sys.modules[__name__]
        monkeypatch.setattr(module, "Here", lambda patch, fate: InBucket(patch, folder, fate))
    return request.param


def over(*transports):
    """Lets a test run over these transports."""
    by_kind = pytest.mark.parametrize("transport", transports, indirect=True)
    return lambda test: pytest.mark.usefixtures("transport")(by_kind(test))


def over_each(name, *cases):
    """Lets a test run with pairs of a transport and an argument of this name."""
    by_case = pytest.mark.parametrize(("transport", name), cases, indirect=["transport"])
    return lambda test: pytest.mark.usefixtures("transport")(by_case(test))


def by_speed(steps="by_speed", **groups):
    """Settings of two workers, in three rounds."""
    return settings_with(2, 3, groups=groups, steps=steps)


def settings_with(num_workers=3, num_rounds=5, precision="float32", groups=None, **engine):
    common = {"batching": {"test": "constant"}} | (groups or {})
    return settings_of(
        **common,
        num_rounds=num_rounds,
        outer={"precision": precision},
        ensemble={"num_trainers": 1, "num_workers": num_workers},
        merge={"policy": "none"},
        engine=ENGINE | engine,
    )


def two_trainers(**groups):
    """Settings of two trainers of a worker each, which merge after the third of four rounds."""
    return settings_of(
        num_rounds=4,
        ensemble={"num_trainers": 2, "num_workers": 2},
        batching={"test": "constant"},
        merge={"every_rounds": 3},
        **groups,
    )


def scaled(responses, factor):
    """Responses whose updates are multiplied."""
    return [
        a._replace(
            differences=a.differences._replace(
                packed_R=jax.tree.map(
                    lambda x: x * np.float32(factor) if x.dtype.kind == "f" else x,
                    a.differences.packed_R,
                )
            )
        )
        for a in responses
    ]


def at(number, rounds, what):
    """A fate: something happens to a learner's first incarnation in some rounds."""

    def fate(n, incarnation, method, arguments):
        if (
            method == "run_round"
            and n == number
            and incarnation == 0
            and arguments[0].round in rounds
        ):
            return what
        return "response"

    return fate


def counted(workdir):
    return [e["workers_counted"] for e in events(workdir, "round")]


def work_of(here, worker_id):
    """What a worker was asked for: learner, incarnation, round, first sequence, inner state."""
    return [
        (number, incarnation, request.round, work.start, inputs.inner_states.get(worker_id))
        for number, incarnation, request, inputs in here.requests
        for work in request.work
        if work.worker_id == worker_id
    ]


@over("ray", "bucket")
def test_a_response_after_the_quorum_does_not_count_and_its_sequences_are_read_again(
    monkeypatch, tmp_path
):
    def fate(n, incarnation, method, arguments):
        is_late = method == "run_round" and n == 2 and arguments[0].round == 2
        return "wait" if is_late and len(counted(tmp_path)) < 2 else "response"

    here = Here(monkeypatch, fate)
    ended = run(tmp_path, settings_with(quorum=2))
    assert counted(tmp_path)[:3] == [3, 2, 2]  # busy in round 3
    assert counted(tmp_path)[-1] == 3
    tokens = [e["tokens"] for e in events(tmp_path, "round")]
    assert tokens[1] * 3 == tokens[0] * 2
    assert ended.state.control.tokens_total == sum(tokens)
    late = events(tmp_path, "learner", what="late")
    assert [(e["learner"], e["trainer"]) for e in late] == [(2, 0)]
    asked = work_of(here, 2)
    assert [a[2] for a in asked[:2]] == [1, 2] and 3 not in [a[2] for a in asked]
    assert asked[1][3] == asked[2][3]  # from the same sequence, with the state that it had there
    assert [a[4] is None for a in asked[:3]] == [False, True, True]
    assert runs.audit(tmp_path) == []


def test_a_lost_worker_runs_again_with_a_fresh_inner_state(monkeypatch, tmp_path):
    here = Here(monkeypatch, at(1, [2], DIED))
    run(tmp_path, settings_with())
    assert counted(tmp_path)[:2] == [3, 2] and counted(tmp_path)[-1] == 3
    asked = work_of(here, 1)
    assert asked[1][3] == asked[2][3] and [a[1] for a in asked[:3]] == [0, 0, 1]
    at_first, after = asked[0][4], asked[2][4]
    jax.tree.map(np.testing.assert_array_equal, after, at_first)
    lost = events(tmp_path, "learner", what="lost")
    assert [e["learner"] for e in lost] == [1]
    assert lost[0]["why"] == DIED or "no sign" in lost[0]["why"]
    assert runs.audit(tmp_path) == []


def test_a_learner_asked_to_leave_hands_over_its_inner_state_after_its_round(
    monkeypatch, tmp_path, capfd
):
    def fate(n, incarnation, method, arguments):
        if n == 0 and method == "run_round" and arguments[0].round <= 2:
            is_done = here.now_s > 1000 + 40 * arguments[0].round
            return (
                (lambda found: [a._replace(seconds=np.array(40.0)) for a in found])
                if is_done
                else "wait"
            )
        if n == 0 and method == "ping" and not counted(tmp_path):
            return lambda found: found.model_copy(update={"compiling": here.now_s < 1030})
        is_asked = n == 1 and incarnation == 0 and method == "ping" and len(counted(tmp_path)) == 1
        return (
            (lambda found: found.model_copy(update={"leaving": True})) if is_asked else "response"
        )

    here = Here(monkeypatch, fate)
    run(tmp_path, settings_with())
    assert [e["learner"] for e in events(tmp_path, "learner", what="left")] == [1]
    asked = {a[1]: a for a in reversed(work_of(here, 1))}  # the first of each incarnation
    assert num_updates(asked[1][4]) == 3 * (asked[1][2] - 1) and counted(tmp_path)[1] == 3
    said = capfd.readouterr().out.splitlines()
    at_first, later = (line for line in said if line.startswith("round 1: 2 of 3 responses"))
    assert re.fullmatch("round 1: .* have come; learner 0 compiles, (19|20) s", at_first)
    assert re.fullmatch("round 1: .* have come; learner 0 works, 40 s", later)
    assert "round 2: 2 of 3 responses have come, the last in about 20 s" in said
    assert "learner 1 left (2 responses): asked to end" in said
    assert runs.audit(tmp_path) == []


def test_a_spare_takes_the_workers_of_a_lost_learner_at_once(monkeypatch, tmp_path):
    def fate(n, incarnation, method, arguments):
        if n == 1 and incarnation == 0 and method == "run_round" and arguments[0].round == 2:
            return DIED
        return "wait" if n == 1 and incarnation else "response"  # it does not come back

    here = Here(monkeypatch, fate)
    run(tmp_path, settings_with(max_learners=4))
    assert counted(tmp_path) == [3, 2, 3, 3, 3]
    assert [a[0] for a in work_of(here, 1)] == [1, 1, 3, 3, 3]
    assert runs.audit(tmp_path) == []


def test_an_update_that_is_not_finite_has_weight_zero(monkeypatch, tmp_path):
    Here(monkeypatch, at(2, [2], lambda responses: scaled(responses, math.nan)))
    run(tmp_path, settings_with())
    assert counted(tmp_path) == [3, 2, 3, 3, 3]
    rejected = events(tmp_path, "learner", what="rejected")
    assert [(e["learner"], e["trainer"]) for e in rejected] == [(2, 0)]
    assert rejected[0]["why"].endswith("norm nan")
    assert runs.audit(tmp_path) == []


@pytest.mark.parametrize("factor", [10.0, 1e30])
def test_an_update_beyond_its_peers_counts_as_three_usual_ones(monkeypatch, tmp_path, factor):
    sent = []

    def fate(n, incarnation, method, arguments):
        def send(responses):
            found = scaled(responses, factor) if (n, arguments[0].round) == (2, 2) else responses
            sent.append((arguments[0].round, np.asarray(found[0].differences.packed_R["w"])))
            return found

        return send if method == "run_round" else "response"

    Here(monkeypatch, fate)
    run(tmp_path, settings_with())
    assert counted(tmp_path) == [3] * 5
    (clipped,) = events(tmp_path, "learner", what="clipped")
    assert (clipped["learner"], clipped["trainer"], clipped["round"]) == (2, 0, 1)
    for line in events(tmp_path, "round"):
        found = [difference for number, difference in sent if number == line["round"]]
        norms = [float(np.linalg.norm(each.astype(np.float64))) for each in found]
        most = 3 * sorted(norms)[1]
        mean = sum(each * min(1, most / norm) for each, norm in zip(found, norms, strict=True)) / 3
        assert line["pseudo_grad_norm"] == pytest.approx(np.linalg.norm(mean), rel=1e-5)
    assert runs.audit(tmp_path) == []


def test_a_resumed_run_compares_with_the_norms_before(monkeypatch, tmp_path):
    Here(monkeypatch, lambda *_: "response")
    whole, first = settings_with(num_rounds=3), settings_with(num_rounds=2)
    ended = run(tmp_path / "whole", whole)
    assert len(ended.state.control.norms["0"]) == 9  # of three workers in three rounds
    run(tmp_path / "resumed", first)
    assert run(tmp_path / "resumed", whole).state.control.norms == ended.state.control.norms


def timed(there, seconds, sent=None):
    """A fate: learners say that a sequence has taken them some seconds, by their number."""

    def fate(n, incarnation, method, arguments):
        def say(responses):
            there[0].now_s += 30.0  # more than is claimed
            if sent is not None:
                sent.append((arguments[0], responses[0]))
            spent_s = seconds[n] * arguments[0].num_sequences
            return [responses[0]._replace(seconds=np.array(spent_s))]

        return say if method == "run_round" else "response"

    return fate


def test_slower_learners_make_fewer_updates_and_weigh_by_their_sequences(monkeypatch, tmp_path):
    monkeypatch.setattr(decisions, "FEWEST_ROUNDS", 1)
    sent, there = [], []
    there += [Here(monkeypatch, timed(there, {0: 1.0, 1: 3.0}, sent))]
    batching = {"test": "norm", "test_batch_size": 32, "batch_cap": 2}
    run(tmp_path, by_speed(batching=batching))
    assert [len(response.loss_SR) for _, response in sent] == [3, 3, 3, 1, 3, 1]
    first, second, _ = events(tmp_path, "round")
    assert second["updates"] == 3 and second["tokens"] * 3 == first["tokens"] * 2
    fast, slow = (response for _, response in sent[2:4])
    mean = (3 * fast.differences.packed_R["w"] + slow.differences.packed_R["w"]) / 4
    assert second["pseudo_grad_norm"] == pytest.approx(float(np.linalg.norm(mean)), rel=1e-5)
    tested = [request.work[0].num_tested for request, _ in sent[2:4]]
    assert tested == [6, 2]
    noise = (5 * fast.stats_R.noise[0] + 1 * slow.stats_R.noise[0]) / 6
    assert second["noise"] == pytest.approx(noise, rel=1e-5)


def test_a_forged_speed_changes_no_weight(monkeypatch, tmp_path):
    monkeypatch.setattr(decisions, "FEWEST_ROUNDS", 1)
    sent, there = [], []
    told = timed(there, {0: 1.0, 1: 1e-300}, sent)

    def fate(n, incarnation, method, arguments):
        if n == 1 and method == "run_round" and arguments[0].round == 2:
            return lambda responses: [responses[0]._replace(seconds=np.array(-1.0))]
        return told(n, incarnation, method, arguments)

    there += [Here(monkeypatch, fate)]
    run(tmp_path, by_speed())
    first, second, third = events(tmp_path, "round")
    assert [len(response.loss_SR) for _, response in sent[:3]] == [3, 3, 1]
    parts = [response.differences.packed_R["w"] for _, response in sent[:3]]
    norm = pytest.approx(float(np.linalg.norm(parts[0] + parts[1])) / 2, rel=1e-5)
    assert first["pseudo_grad_norm"] == norm  # what is claimed counts from the next round on
    # What it did not send has no weight, however fast it is said to be.
    assert second["pseudo_grad_norm"] == pytest.approx(float(np.linalg.norm(parts[2])), rel=1e-5)
    assert second["workers_counted"] == 1 and second["tokens"] * 6 == first["tokens"]
    assert third["workers_counted"] == 2
    assert [e["learner"] for e in events(tmp_path, "learner", what="refused")] == [1]
    assert runs.audit(tmp_path) == []


@over("ray", "bucket")
def test_a_learner_that_gives_no_sign_is_lost_and_its_late_responses_are_dropped(
    monkeypatch, tmp_path
):
    def fate(n, incarnation, method, arguments):
        is_stopped = n == 1 and incarnation == 0 and len(counted(tmp_path)) >= 1
        return "wait" if is_stopped else "response"

    Here(monkeypatch, fate)
    run(tmp_path, settings_with(heartbeat_s=0.5))
    lost = events(tmp_path, "learner", what="lost")
    assert [e["learner"] for e in lost] == [1] and lost[0]["why"].startswith("gave no sign for")
    assert counted(tmp_path)[:2] == [3, 2] and counted(tmp_path)[-1] == 3
    lost_s = [e["lost_s"] for e in events(tmp_path, "round")]
    assert lost_s[1] >= 0.5 and sum(lost_s) == lost_s[1]  # as long as it gave no sign, or longer
    assert f", lost {lost_s[1]:.1f} s" in summary.closing_table(tmp_path)
    assert runs.audit(tmp_path) == []


def test_after_a_rejected_update_parameters_and_inner_state_are_sent_again(monkeypatch, tmp_path):
    here = Here(monkeypatch, at(0, [2], lambda responses: scaled(responses, math.nan)))
    with the_drivers_parameters(monkeypatch) as sent:
        run(tmp_path, settings_with(num_workers=2, num_rounds=4, precision="int4"))
    assert counted(tmp_path) == [2, 1, 2, 2]
    assert sent == [["whole"] * 2, ["update"] * 2, ["whole", "update"], ["update"] * 2]
    states = [a[4] for a in work_of(here, 0)]
    assert [each is None for each in states] == [False, True, False, True]
    assert num_updates(states[2]) == 0


def test_a_round_that_cannot_begin_ends_the_run_after_the_last_one_is_recorded(
    monkeypatch, tmp_path
):
    here = Here(monkeypatch, lambda *_: "response")
    submit = here.submit

    def failing(handle, method, **arguments):
        if method == "run_round" and arguments["request"].round == 3:
            raise ResourceError("the cluster is gone")
        return submit(handle, method, **arguments)

    here.submit = failing
    with pytest.raises(ResourceError, match="the cluster is gone"):
        run(tmp_path, settings_with())
    assert counted(tmp_path) == [3, 3]


@over("ray", "bucket")
def test_a_driver_that_evaluates_for_long_loses_no_learner(monkeypatch, tmp_path):
    here, evaluate = Here(monkeypatch, lambda *_: "response"), Evaluator.__call__

    def slowly(self, state, boundary):
        here.now_s += 1e4
        evaluate(self, state, boundary)

    monkeypatch.setattr(Evaluator, "__call__", slowly)
    run(tmp_path, settings_with())
    assert counted(tmp_path) == [3] * 5
    assert {e["what"] for e in events(tmp_path, "learner")} == {"joined"}


@over("ray", "bucket")
def test_a_round_that_fails_again_and_again_names_learner_trainer_and_cause(monkeypatch, tmp_path):
    def fate(n, incarnation, method, arguments):
        return "OSError: a disk" if method == "run_round" else "response"

    monkeypatch.setattr(engine, "PATIENCE_S", 5.0)
    there = Here(monkeypatch, fate)
    with pytest.raises(Exception, match=r"failed for \d+ s; learner 0: .*OSError: a disk"):
        run(tmp_path, settings_with(num_workers=1))
    assert there.now_s > 1005 and len(there.requests) < 7  # with growing pauses


@pytest.mark.parametrize(
    ("differing", "words"),
    [("versions", "other versions of packages"), ("fingerprint", "other data")],
)
def test_a_learner_that_differs_from_the_driver_is_refused_at_the_start(
    monkeypatch, tmp_path, differing, words
):
    def fate(n, incarnation, method, arguments):
        if method == "hello" and n == 1:
            return lambda found: found.model_copy(update={differing: {"jax": "0"}})
        return "response"

    here = Here(monkeypatch, fate)
    with pytest.raises(ConfigError, match=f"learner 1 .*: has {words} than the driver") as error:
        run(tmp_path, settings_with())
    assert error.value.exit_code == 2 and "\n" not in str(error.value)
    assert not here.alive


def test_a_later_learner_that_differs_is_lost_and_the_run_goes_on(monkeypatch, tmp_path):
    def fate(n, incarnation, method, arguments):
        if method == "hello" and n == 1 and incarnation:
            return lambda found: found.model_copy(update={"versions": {"jax": "0"}})
        return at(1, [2], DIED)(n, incarnation, method, arguments)

    here = Here(monkeypatch, fate)
    run(tmp_path, settings_with())
    lost = [e["why"] for e in events(tmp_path, "learner", what="lost")]
    others = "has other versions of packages than the driver; not started again"
    assert lost == [DIED, others]
    assert [incarnation for number, incarnation, _ in here.starts if number == 1] == [0, 1]
    assert counted(tmp_path)[-1] == 3  # its worker runs in another learner
    assert runs.audit(tmp_path) == []


def test_a_learner_that_cannot_start_is_tried_after_growing_pauses_and_its_time_counts(
    monkeypatch, tmp_path
):
    def fate(n, incarnation, method, arguments):
        if n == 1 and incarnation:
            return "OSError: no disk"
        if method == "run_round" and n == 0 and arguments[0].round == 5:
            return "response" if here.now_s > 1050 else "wait"
        return at(1, [2], DIED)(n, incarnation, method, arguments)

    here = Here(monkeypatch, fate)
    run(tmp_path, settings_with())
    starts = [
        start_s for number, incarnation, start_s in here.starts if number == 1 and incarnation
    ]
    pauses = np.diff(starts)
    assert len(starts) >= 6 and (pauses[1:] > 1.8 * pauses[:-1] - 0.5).all()
    lost = events(tmp_path, "learner", what="lost", why="OSError: no disk")
    assert len(lost) >= len(starts) - 1


@pytest.mark.parametrize(
    ("quorum", "words"),
    [
        (None, "^0 of 3 learners have started within .*; start nodes, or raise engine.restart_s"),
        (2, "^engine.quorum = 2: 0 of 3 .*; start more nodes, or lower engine.quorum"),
    ],
)
def test_too_few_learners_end_a_run_with_what_helps(monkeypatch, tmp_path, quorum, words):
    Here(monkeypatch, lambda *_: "wait")
    with pytest.raises(ResourceError, match=words):
        run(tmp_path, settings_with(quorum=quorum, restart_s=5.0))


def test_when_no_learner_can_be_started_again_the_run_ends(monkeypatch, tmp_path):
    def fate(n, incarnation, method, arguments):
        if method == "hello" and incarnation:
            return lambda found: found.model_copy(update={"fingerprint": "others"})
        return at(0, [2], DIED)(n, incarnation, method, arguments)

    Here(monkeypatch, fate)
    with pytest.raises(ResourceError, match="no learner is left; learner 0: has other data"):
        run(tmp_path, settings_with(num_workers=1))


def test_what_learners_say_of_their_time_is_in_the_ledger_up_to_the_time_there_was(
    monkeypatch, tmp_path
):
    def fate(n, incarnation, method, arguments):
        def timed(responses):
            there.now_s += 20.0
            between_s = (1e9 if arguments[0].round == 2 else 1.0) * np.array([1.0, 2.0, 3.0])
            return [responses[0]._replace(seconds=np.array(4.0), between_s=between_s)]

        return timed if method == "run_round" else "response"

    there = Here(monkeypatch, fate)
    run(tmp_path, settings_with(num_workers=1, num_rounds=3))
    told = [[e[f"{use}_s"] for use in USES] for e in events(tmp_path, "round")]
    assert told[0] == told[2] == [4.0, 1.0, 2.0, 3.0]
    assert 20.0 <= sum(told[1]) < 25.0
    assert "learners say    computing " in summary.closing_table(tmp_path)


def test_a_single_worker_sends_its_differences_once_and_unquantised(monkeypatch, tmp_path):
    sent = []

    def fate(n, incarnation, method, arguments):
        return (
            (lambda responses: sent.extend(responses) or responses)
            if method == "run_round"
            else "response"
        )

    Here(monkeypatch, fate)
    run(tmp_path, settings_with(num_workers=1, num_rounds=2, precision="bfloat16"))
    leaves = jax.tree.leaves(sent[0].differences._replace(usable_R=None))
    assert {leaf.dtype for leaf in leaves} == {np.dtype(np.float32)}
    (first, _) = events(tmp_path, "round")
    arrays = 4 + 3 * 4, 1 + 3 * (8 + 1) + 32  # a count, rates; usable, losses, skips, seconds
    assert first["wire_bytes"] == (1 + 2 + 1) * 144 + sum(arrays)


@contextlib.contextmanager
def the_drivers_parameters(monkeypatch):
    """Checks the parameters that learners begin with; yields, by round, how they got them."""
    begun, ended, last, sent = {}, {}, [], []
    run_round, inner_round = learner.Learner.run_round, learner.inner_round
    evaluate = Evaluator.__call__

    def playing(self, request, inputs, params):
        kind = "update" if request.is_update else "whole"
        begun.setdefault(request.round, []).append(["nothing" if params is None else kind])
        last[:] = [request.round]
        return run_round(self, request, inputs, params)

    def running(programs, alone, group, calls):
        begun[last[0]][-1].append(alone.params_M)
        return inner_round(programs, alone, group, calls)

    def noting(self, state, boundary):
        ended[state.control.round] = jax.device_get(state.ensemble.params_M)
        evaluate(self, state, boundary)

    with monkeypatch.context() as patch:
        patch.setattr(learner.Learner, "run_round", playing)
        patch.setattr(learner, "inner_round", running)
        patch.setattr(Evaluator, "__call__", noting)
        yield sent
    for number, requests in sorted(begun.items()):
        sent.append([kind for kind, *_ in requests])
        for params_M in [each for _, *found in requests for each in found] if number > 1 else ():
            jax.tree.map(np.testing.assert_array_equal, params_M, ended[number - 1])


@over_each("precision", ("ray", "bfloat16"), ("bucket", "int4"))
def test_learners_make_the_parameters_of_the_driver_from_packed_updates(
    monkeypatch, tmp_path, precision
):
    Here(monkeypatch, lambda *_: "response")
    with the_drivers_parameters(monkeypatch) as sent:
        run(tmp_path, settings_with(num_workers=2, precision=precision))
    assert sent == [[kind] * 2 for kind in ["whole", *["update"] * 4]]
    first, *_, last = (e["wire_bytes"] for e in events(tmp_path, "round"))
    assert last < first


@over("bucket")
def test_what_the_only_worker_ends_with_is_not_sent_back(monkeypatch, tmp_path):
    Here(monkeypatch, at(0, [2], lambda responses: scaled(responses, 1e6)))
    pool = {"num_trainers": 1, "num_workers": 2, "initial_workers": 1, "spawn_frac": 0.6}
    groups = {"ensemble": pool, "batching": {"test": "constant"}, "outer": {"skip_single": True}}
    engine = ENGINE | {"max_learners": 2}
    with the_drivers_parameters(monkeypatch) as sent:
        run(tmp_path, settings_of(num_rounds=7, engine=engine, **groups))
    assert counted(tmp_path) == [1, 1, 1, 1, 1, 2, 2]
    # After a clipped response the trainer's are others than the learner's.
    kinds = ["whole"], ["nothing"], ["whole"], ["nothing"], ["nothing"], ["nothing", "whole"]
    assert sent == [*kinds, ["whole", "whole"]]
    nothing = events(tmp_path, "round")[3]["wire_bytes"]
    assert nothing < events(tmp_path, "round")[0]["wire_bytes"] - 144


@over_each("how", ("ray", "died"), ("bucket", "late"))
def test_a_learner_without_the_last_parameters_gets_them_whole(monkeypatch, tmp_path, how):
    def fate(n, incarnation, method, arguments):
        if (n, incarnation, method) != (1, 0, "run_round") or arguments[0].round != 2:
            return "response"
        is_late = how == "late" and len(counted(tmp_path)) < 2
        return DIED if how == "died" else "wait" if is_late else "response"

    here = Here(monkeypatch, fate)
    run(
        tmp_path,
        settings_with(num_rounds=12, precision="int4", quorum=2 if how == "late" else None),
    )
    assert counted(tmp_path)[:2] == [3, 2] and counted(tmp_path)[-1] == 3
    sent = {0: [], 1: []}
    for number, _, request, _ in here.requests:
        sent.setdefault(number, []).append((request.round, request.is_update))
    assert sent[0] == [(n, n > 1) for n in range(1, 13)]
    again = sent[1][2:]
    assert sent[1][:2] == [(1, False), (2, True)]
    assert [is_update for _, is_update in again] == [False] + [True] * (len(again) - 1)
    assert runs.audit(tmp_path) == []


def test_an_update_of_parameters_that_arrives_as_another_costs_one_round(monkeypatch, tmp_path):
    run_round = learner.Learner.run_round

    def playing(self, request, inputs, params):
        if (request.round, request.work[0].worker_id) == (3, 1):
            assert request.is_update
            params = jax.tree.map(
                lambda x: x * np.float32(-1) if x.dtype.kind == "f" else x, params
            )
        return run_round(self, request, inputs, params)

    monkeypatch.setattr(learner.Learner, "run_round", playing)
    here = Here(monkeypatch, lambda *_: "response")
    run(tmp_path, settings_with(num_workers=2, precision="int4"))
    assert counted(tmp_path) == [2, 2, 1, 2, 2]
    (refused,) = events(tmp_path, "learner", what="refused")
    assert refused["learner"] == 1 and "other parameters of trainer 0" in refused["why"]
    requests = [request for number, _, request, _ in here.requests if number == 1]
    assert [request.is_update for request in requests] == [False, True, True, False, True]
    assert runs.audit(tmp_path) == []


def test_skipped_updates_give_no_tokens_and_their_worker_begins_afresh(monkeypatch, tmp_path):
    def skipping(responses):
        (a,) = responses
        nothing = a.differences._replace(packed_R=jax.tree.map(np.zeros_like, a.differences[0]))
        loss_SR = np.full_like(a.loss_SR, np.nan)
        return [a._replace(differences=nothing, loss_SR=loss_SR, skipped_SR=np.isnan(loss_SR))]

    here = Here(monkeypatch, at(1, [2], skipping))
    ended = run(tmp_path, settings_with(num_workers=2))
    assert counted(tmp_path) == [2, 1, 2, 2, 2]
    tokens = [e["tokens"] for e in events(tmp_path, "round")]
    assert tokens[1] * 2 == tokens[0] and ended.state.control.tokens_total == sum(tokens)
    starts = [a[3] for a in work_of(here, 1)]
    assert len({*np.diff(starts)}) == 1  # its sequences are not read again
    assert num_updates(work_of(here, 1)[2][4]) == 0
    assert runs.audit(tmp_path) == []


def test_a_learners_event_is_in_the_ledger_when_it_happens(monkeypatch, tmp_path, capfd):
    def fate(n, incarnation, method, arguments):
        if method == "run_round" and n == 0 and arguments[0].round == 2:
            return "response" if events(tmp_path, "learner", what="lost") else "wait"
        return at(1, [2], DIED)(n, incarnation, method, arguments)

    Here(monkeypatch, fate)
    run(tmp_path, settings_with(num_workers=2))
    assert counted(tmp_path)[:2] == [2, 1]
    said = capfd.readouterr().out
    assert "workers 1/2 (1 missing)" in said and "workers 2/2, " in said


KINDS = ("params", "requests", "responses", "learners", "driver")


@pytest.mark.parametrize(
    "lost", [("params", "run.json"), ("requests", "learners"), ("responses", "driver")]
)
def test_objects_that_are_lost_cost_at_most_a_round(monkeypatch, tmp_path, lost):
    """All objects of two kinds are deleted once just after each kind has been written."""
    here, put = InBucket(monkeypatch, tmp_path / "bucket"), store.Store.put
    phases = dict(zip(range(2, 12, 2), KINDS, strict=True))  # by round

    def putting(self, name, data):
        put(self, name, data)
        number = len(events(tmp_path / "run", "round")) + 1
        if phases.get(number) == name.split("/")[0]:
            del phases[number]
            self.delete(*(each for each in self.names() if each.startswith(lost)))

    monkeypatch.setattr(store.Store, "put", putting)
    run(
        tmp_path / "run",
        settings_with(num_workers=2, num_rounds=12, kind="bucket", address=here.url),
    )
    counts = counted(tmp_path / "run")
    assert phases == {} and counts[-1] == 2
    assert sum(counts) >= 2 * 12 - 2 * 5
    assert {e["what"] for e in events(tmp_path / "run", "learner")} <= {"joined", "refused"}
    assert runs.audit(tmp_path / "run") == []


def test_a_learner_out_of_memory_halves_its_micro_batches_and_says_so(monkeypatch, tmp_path):
    inner_round, ran = learner.inner_round, []

    def peak(programs, key, sizes):
        return Peak(2**62 if key.micro_batch_size > 2 else 0, 0)

    def running(programs, sub, group, calls):
        ran.append(group.plan.micro_batch_size)
        if ran[-1] > 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating")
        return inner_round(programs, sub, group, calls)

    here = Here(monkeypatch, lambda *_: "response")
    sizes = {"test": "constant", "initial_batch_size": 4, "max_batch_size": 4, "buckets": (4,)}
    settings = settings_with(2, 3, groups={"batching": sizes}, heartbeat_s=0.04)
    whole = run(tmp_path / "whole", settings)
    monkeypatch.setattr(learner, "inner_round", running)
    for known in ("while it runs", "from the compiler"):
        if known == "from the compiler":
            monkeypatch.setattr(learner, "peak", peak)
        ran.clear()
        divided = run(tmp_path / known, settings)
        assert here.learner((0, 0)).ping().max_batch_size == 2
        assert ran.count(4) == (2 if known == "while it runs" else 0)
        limited = events(divided.workdir, "learner", what="limited")
        assert sorted(e["learner"] for e in limited) == [0, 1]
        assert all(e["why"].endswith("micro-batches of at most 2") for e in limited)
        assert events(divided.workdir, "learner", what="lost") == []
        assert_same_rounds(divided, whole)
        assert divided.loss == pytest.approx(whole.loss, abs=1e-5)


def test_learners_begin_the_next_round_while_the_driver_evaluates(monkeypatch, tmp_path):
    here, begun = Here(monkeypatch, lambda *_: "response"), {}
    evaluate = Evaluator.__call__

    def counting(self, state, boundary):
        begun[state.control.round] = max(request.round for _, _, request, _ in here.requests)
        evaluate(self, state, boundary)

    monkeypatch.setattr(Evaluator, "__call__", counting)
    run(tmp_path / "one", settings_with())
    assert begun == {1: 2, 2: 3, 3: 4, 4: 5, 5: 5}
    begun.clear(), here.requests.clear()
    merging = run(tmp_path / "merging", two_trainers(engine=ENGINE))
    (merge, *_) = events(merging.workdir, "merge")
    assert merge["round"] == 3  # a merge waits for all rounds, and rounds wait for a merge
    assert [begun[number] for number in (1, 2, 3)] == [2, 3, 3]


@over("bucket")
def test_when_workers_join_only_their_inner_states_are_sent(monkeypatch, tmp_path):
    here = Here(monkeypatch, lambda *_: "response")
    pool = {"num_trainers": 1, "num_workers": 3, "initial_workers": 2, "spawn_frac": 0.5}
    constant = {"test": "constant"}
    engine = ENGINE | {"max_learners": 3}
    run(tmp_path, settings_of(num_rounds=6, ensemble=pool, batching=constant, engine=engine))
    assert counted(tmp_path) == [2, 2, 2, 3, 3, 3]
    for worker_id, sent in [(0, [1]), (1, [1]), (2, [4])]:
        assert [a[2] for a in work_of(here, worker_id) if a[4] is not None] == sent
    assert num_updates(work_of(here, 2)[0][4]) == 9  # the mean of the others
    assert runs.audit(tmp_path) == []


def wire_bytes(monkeypatch):
    """The bytes of parameters, requests and responses that are put, by round of one trainer."""
    put, written = store.Store.put, [0]

    def putting(self, name, data):
        is_sent = name.startswith(("params/", "requests/", "responses/"))
        if name.startswith("params/") and name.split("/")[-1] != "0.safetensors":
            written.append(0)
        written[-1] += is_sent * len(data)
        put(self, name, data)

    monkeypatch.setattr(store.Store, "put", putting)
    return written


def test_wire_bytes_are_those_of_the_objects_that_a_round_writes(monkeypatch, tmp_path):
    here, written = InBucket(monkeypatch, tmp_path / "bucket"), wire_bytes(monkeypatch)
    engine = {"kind": "bucket", "address": here.url, "steps": "equal"}
    run(tmp_path / "far", settings_with(num_workers=2, precision="int4", **engine))
    assert [e["wire_bytes"] for e in events(tmp_path / "far", "round")] == written


def test_a_driver_averages_over_the_rounds_of_each_trainer(monkeypatch, tmp_path):
    settings = two_trainers(outer={"average": 0.5})
    local = run(tmp_path / "local", settings)
    # Trainers run at their own pace: the last learner responds later.
    Here(monkeypatch, lambda n, *_: "wait" if n == 1 and next(turns) % 3 else "response")
    turns = itertools.count()
    far = run(tmp_path / "far", settings.model_copy(update={"engine": settings_with().engine}))
    assert far.loss == pytest.approx(local.loss, abs=1e-5)
    np.testing.assert_allclose(far.params["w"], local.params["w"], atol=1e-5)
    moved = far.ensemble.params_M["w"] - far.ensemble.average_M["w"]
    assert np.abs(moved).max() > 1e-3


def test_a_run_through_a_bucket_decides_reads_and_counts_as_a_local_one(monkeypatch, tmp_path):
    local = run(tmp_path / "local", settings_of(**GROWING))
    here, written = InBucket(monkeypatch, tmp_path / "bucket"), wire_bytes(monkeypatch)
    engine = {"kind": "bucket", "address": here.url, "steps": "equal"}
    far = run(tmp_path / "far", settings_of(**GROWING | {"engine": engine}))
    assert sum(e["wire_bytes"] for e in events(far.workdir, "round")) == sum(written)
    assert_same_rounds(far, local)
    assert far.loss == pytest.approx(local.loss, abs=1e-5)
    assert runs.audit(far.workdir) == []
    left = sorted(path.name for path in (tmp_path / "bucket").rglob("*") if path.is_file())
    assert left == ["1.json", "run.json"]


@over_each("what", ("ray", "hangs"), ("bucket", "none"), ("bucket", "away"))
def test_a_signal_ends_a_driver_soon_whatever_its_learners_and_its_bucket_do(
    monkeypatch, tmp_path, what
):
    def fate(n, incarnation, method, arguments):
        if method != "run_round" or arguments[0].round < 3:
            return DIED if ended else "response"
        if not ended:
            ended.append(there.now_s)
            signal.raise_signal(signal.SIGTERM)
            while not processes.is_asked_to_stop():
                time.sleep(0.01)
            if what == "away":
                for name in ("get", "put", "list", "delete"):
                    monkeypatch.setattr(obstore, name, lambda *_, **__: 1 / 0)
        return DIED if what == "none" else "wait"

    ended = []
    there = Here(monkeypatch, fate)
    with pytest.raises(Preempted, match=r"stopped by a signal after round 2; .*to resume") as stop:
        run(tmp_path, settings_with(num_workers=2))
    assert stop.value.exit_code == 75 and there.now_s < ended[0] + 10
    assert list_rounds(tmp_path / "checkpoints") == [2, 1]
