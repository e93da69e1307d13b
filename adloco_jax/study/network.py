"""What a recorded run would have taken on a cluster: a replay of its ledger, round by round.

The model, which the tests check against cases computed by hand and against `closed_form_s`:

- **Replicas.** Each of the R workers that the run began with becomes a replica of as many devices
  as every other. Replicas lie in blocks: the first R / sites of them in the first site, and so on;
  each stays within one site unless there are more sites than workers, when it takes several whole
  sites. What the equal division leaves over is idle. With fewer devices than workers, workers share
  a device and each of its passes takes as many times longer.
- **Computing.** An update's batch (micro-batch x accumulation steps) is divided over the replica's
  devices, whole sequences, as evenly as may be; a device runs its share in passes of at most the
  recorded micro-batch, one after the other. A device without a sequence is idle. Each update ends
  with a ring all-reduce of the gradients among the devices that have one.
- **Communicating.** A ring all-reduce of P bytes among m takes 2 (m - 1) / m * P / bandwidth +
  2 (m - 1) * latency, over the slowest link that its ring crosses (docs/algorithm.md, 6). A trainer
  with several workers does one per round among its replicas, or one per fragment of its parameters,
  in turn and evenly over the round's updates; with one worker, none. Where the ledger has a
  synchronisation of all parameters beside those, the trainer stands still for it. Outer gradients
  travel as
  `Traffic` says, all else in float32. A transfer may begin within the update before it and go on
  during some updates after it, yet no longer than until the next fragment's turn; the rest of it
  the trainer stands still for, and only that rest is its communication. A merge moves what the
  ledger counts for each absorbed trainer to the representative, one after the other, over the link
  between their nearest replicas. Then each worker that joins a trainer receives what the ledger
  counts for it, from the nearest of those that the trainer had: a trainer sends to one after the
  other, trainers at the same time. All is scaled with the model, where it is to be another's.
- **Waiting.** A trainer's round ends when its slowest replica is done and all are synchronised.
  Trainers wait for one another only at a merge: its members, and all whose workers change then. A
  refused merge costs what the merge would have cost, since it has to be tried to be refused. At the
  end of the run, trainers that are done wait for the last.
- **Loss of workers.** A device that has a sequence fails at a constant rate while its replica makes
  updates. The replica restarts and redoes the round from the parameters that the round began with;
  the trainer's others wait.
- **Left out**: evaluation, checkpoints, the batch-size test's own pass (some 4 % of a round), the
  optimizer's update, the (de)coding of compressed outer gradients, traffic of different trainers on
  one link, overlap of a replica's own all-reduce with computing, the wait of a merge or of the
  run's end for fragments still on their way, the way of merged parameters from a representative to
  the workers that were its own, and trainers gathered for a consensus.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from adloco_jax.adloco import StateBytes, merge_cost
from adloco_jax.core.compress import BITS_PER_PARAM
from adloco_jax.core.merge import divide_workers
from adloco_jax.errors import ConfigError, DataError
from adloco_jax.study.cluster import Cluster, Link, StepTime
from adloco_jax.study.curves import state_bytes

BYTES_PER_PARAM = 4  # float32: parameters, and gradients within a replica, travel so
MAX_EXPECTED_FAILURES = 7.0  # of a replica in one round; beyond it a run would never get through


@dataclass(frozen=True)
class Traffic:
    """How a trainer's outer gradients travel; by default at once, in float32, while it waits.

    Source: Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512), sections 2.2 to 2.4.
    """

    bits_per_param: float = BITS_PER_PARAM["float32"]
    num_fragments: int = 1  # synchronised in turn within a round, of equal size
    # Inner updates between the sending of a fragment and its arrival; micro-batches, where several
    # make an update.
    delay_updates: int = 0
    early_frac: float = 0.0  # of an update's time: how long before its end the sending begins

    def __post_init__(self) -> None:
        if not (
            0 < self.bits_per_param < math.inf
            and self.num_fragments >= 1
            and self.delay_updates >= 0 <= self.early_frac <= 1
        ):
            raise ConfigError(
                f"{self}: expected more than 0 bits, 1 or more fragments, a delay of 0 or more"
                " updates and an early fraction from 0 to 1"
            )

    def sync_bytes(self, num_params: int) -> float:
        """Bytes of one synchronisation's outer gradients: the peak, of one fragment."""
        return self.bits_per_param / 8 * num_params / self.num_fragments


BLOCKING = Traffic()


class RoundTime(NamedTuple):
    """One trainer's round on the cluster, with the merge that followed it, if one did.

    The five shares are means over the trainer's devices; together they are `end_s - start_s`.
    """

    round: int
    trainer: int
    workers: int
    replicas: tuple[int, ...]  # which of the R it had, numbered from the first site on
    devices: float  # a fraction where workers share a device
    start_s: float
    compute_s: float
    communication_s: float  # that computing did not hide
    waiting_s: float  # for the slowest replica, for a device with a sequence more, for a merge
    idle_s: float  # without a sequence
    lost_s: float  # to failures: work thrown away, and restarts
    end_s: float


@dataclass(frozen=True)
class Replay:
    """A run's times on a cluster; the five totals are device-seconds.

    compute_s + communication_s + waiting_s + idle_s + lost_s = num_devices * wall_s. The waiting
    here has, beside that of the rounds, what trainers wait for the end of the run.
    """

    rounds: tuple[RoundTime, ...]
    end_s: Mapping[int, float]  # by round: when every trainer was done with it
    num_devices: int
    wall_s: float
    compute_s: float  # of the passes that counted
    communication_s: float
    waiting_s: float
    idle_s: float  # retired and left-over devices too
    lost_s: float

    @property
    def utilisation(self) -> float:
        """Useful computing, as a fraction of all device-time."""
        return self.frac("compute_s")

    def frac(self, name: str) -> float:
        """One of the five totals as a fraction of all device-time."""
        return getattr(self, name) / (self.num_devices * self.wall_s)


def replay(
    events: Iterable[dict],
    cluster: Cluster,
    *,
    traffic: Traffic | None = None,
    num_params: int | None = None,
    seed: int = 0,
) -> Replay:
    """Times a recorded run as it would have gone on a cluster.

    Args:
      events: A ledger's lines, also of a resumed or unfinished run.
      cluster: Where it is to run.
      traffic: How outer gradients travel; by default as the start line's config says.
      num_params: Of the model that is to be trained with the run's schedule; by default its own.
      seed: Of jitter and failures; without them it changes nothing.

    Returns:
      The times.

    Raises:
      ConfigError: If a replica would fail so often that it gets through no round.
      DataError: If the ledger lacks a start or a round, or contradicts itself.
    """
    run = _read(events)
    rng = np.random.default_rng(seed)
    traffic = run.traffic if traffic is None else traffic
    num_params = run.num_params if num_params is None else num_params
    scale = num_params / run.num_params
    counts = [{line.trainer: line.workers for line in lines} for lines in run.rounds.values()]
    replicas = _owners(counts[0])
    num_replicas = sum(map(len, replicas.values()))
    layout = _layout(cluster, num_replicas)
    times: dict[tuple[int, int], RoundTime] = {}
    ready = dict.fromkeys(replicas, 0.0)
    retired: list[tuple[float, int]] = []  # since when, replicas
    end_s: dict[int, float] = {}
    for index, following in zip(run.rounds, [*counts[1:], None], strict=True):
        for line in run.rounds[index]:
            times[index, line.trainer] = _round_time(
                index,
                line,
                ready[line.trainer],
                replicas[line.trainer],
                layout,
                cluster,
                traffic,
                num_params,
                rng,
                is_synchronised=line.trainer in run.synchronised[index],
            )
        merges = run.merges[index]
        at_end = merges[-1].workers if following is None and merges else None
        after, left = _reassign(replicas, merges, following or at_end, index)
        members = {trainer for merge in merges for trainer in merge.members}
        waits = members | {t for t, own in after.items() if set(own) != set(replicas[t])}
        if waits:
            meeting_s = max(times[index, trainer].end_s for trainer in waits)
            moved_s = _merges_s(merges, replicas, layout, cluster, run.state_bytes, scale, rng)
            handed_s = _hand_over_s(replicas, after, layout, cluster, run.state_bytes, scale, rng)
            for trainer in waits:
                times[index, trainer] = _meet(
                    times[index, trainer],
                    meeting_s,
                    moved_s,
                    handed_s,
                    is_member=trainer in members,
                )
        ready = {trainer: times[index, trainer].end_s for trainer in replicas}
        if following is not None:  # at the end all wait for the last
            retired += [(ready[trainer], count) for trainer, count in left.items()]
        replicas = after
        end_s[index] = max([*ready.values(), *end_s.values()])
    wall_s = max(end_s.values())
    totals = {
        name: sum(time.devices * getattr(time, name) for time in times.values())
        for name in ("compute_s", "communication_s", "waiting_s", "idle_s", "lost_s")
    }
    last = max(run.rounds)
    totals["waiting_s"] += sum(
        time.devices * (wall_s - time.end_s) for time in times.values() if time.round == last
    )
    totals["idle_s"] += sum(layout.width * count * (wall_s - since) for since, count in retired)
    totals["idle_s"] += (cluster.num_devices - layout.width * num_replicas) * wall_s
    return Replay(
        rounds=tuple(times.values()),
        end_s=end_s,
        num_devices=cluster.num_devices,
        wall_s=wall_s,
        **totals,
    )


def closed_form_s(
    cluster: Cluster,
    *,
    num_params: int,
    num_trainers: int = 1,
    num_workers: int,
    batch_size: int,
    steps_per_round: int,
    num_rounds: int,
    traffic: Traffic = BLOCKING,
) -> float:
    """Wall-clock seconds of a run with a constant batch: the replay in one line.

    Data parallel is one trainer with `steps_per_round=1`, DiLoCo one trainer with several workers,
    independent instances `num_workers=num_trainers`.

    Args:
      cluster: Jitter and failures are not looked at.
      num_params: Of the model.
      num_trainers: Each with as many workers as the others.
      num_workers: All trainers' together.
      batch_size: Sequences per worker and update, one micro-batch.
      steps_per_round: Updates between synchronisations.
      num_rounds: Synchronisations of all parameters.
      traffic: How outer gradients travel.

    Returns:
      Seconds. No trainer merges; the slowest one counts.

    Raises:
      ConfigError: If the workers cannot be divided evenly among the trainers.
    """
    if num_workers % num_trainers:
        raise ConfigError(f"{num_workers} workers do not divide evenly among {num_trainers}")
    layout, param_bytes = _layout(cluster, num_workers), BYTES_PER_PARAM * num_params
    per_trainer = num_workers // num_trainers
    compute_s = layout.tenants * cluster.step_time(-(-batch_size // layout.num_devices))
    num_used = min(layout.num_devices, batch_size)
    rounds_s = []
    for own in _owners(dict.fromkeys(range(num_trainers), per_trainer)).values():
        inner_s = _ring_s(num_used, param_bytes, _link(cluster, layout, own[:1]))
        round_s = steps_per_round * (compute_s + inner_s)
        link = _link(cluster, layout, own)
        factors = np.ones(traffic.num_fragments)
        sync_s = _sync_s(
            traffic,
            per_trainer,
            num_params,
            link,
            factors,
            round_s,
            num_updates=steps_per_round,
            num_micro_batches=steps_per_round,
        )
        rounds_s.append(round_s + sync_s)
    return num_rounds * max(rounds_s)


def scaling(events: Iterable[dict], clusters: Iterable[Cluster], *, seed: int = 0) -> list[dict]:
    """How a run would do on several clusters, one table row each.

    Args:
      events: A ledger's lines.
      clusters: In the order of the rows.
      seed: As in `replay`.

    Returns:
      Dicts of devices, sites, wall_s (seconds), and as fractions of all device-time utilisation,
      communication_frac, waiting_frac, idle_frac, lost_frac.

    Raises:
      ConfigError: As `replay`.
      DataError: As `replay`.
    """
    events = list(events)
    rows = []
    for cluster in clusters:
        result = replay(events, cluster, seed=seed)
        rows.append(
            {
                "devices": cluster.num_devices,
                "sites": cluster.num_sites,
                "wall_s": result.wall_s,
                "utilisation": result.utilisation,
                "communication_frac": result.frac("communication_s"),
                "waiting_frac": result.frac("waiting_s"),
                "idle_frac": result.frac("idle_s"),
                "lost_frac": result.frac("lost_s"),
            }
        )
    return rows


def measured_step_times(events: Iterable[dict]) -> dict[int, float]:
    """Seconds of one pass by the sequences that a device held, as the run's own rounds show them.

    `step_s` is of a round of all groups, so only rounds count in which every trainer ran with the
    same micro-batch and accumulation, and of these those that waited for no compilation (less than
    1 % of the time). A pass holds all workers of its device, so what several workers of one batch
    took is here one worker's of the sum of their batches. The test's own pass is in it.

    Args:
      events: A ledger's lines.

    Returns:
      The median of each number of sequences; empty if no round qualifies.

    Raises:
      DataError: If the ledger lacks a start or a round.
    """
    run = _read(events)
    passes = defaultdict(list)
    for lines in run.rounds.values():
        line = lines[0]
        plans = {(line.micro_batch_size, line.num_accum_steps) for line in lines}
        if len(plans) > 1 or not line.step_s or line.stall_s > 0.01 * line.step_s:
            continue
        workers, micro_batch_size = sum(line.workers for line in lines), line.micro_batch_size
        # As the runner's mesh divides them: workers first, then a worker's batch.
        over_workers = math.gcd(line.host_devices, workers)
        used = over_workers * math.gcd(line.host_devices // over_workers, micro_batch_size)
        passes[workers * micro_batch_size // used].append(line.step_s / line.num_micro_batches)
    return {size: float(np.median(seconds)) for size, seconds in sorted(passes.items())}


class _Line(NamedTuple):
    """What one trainer did in a round; counts are each worker's."""

    trainer: int
    workers: int
    micro_batch_size: int
    num_accum_steps: int
    num_updates: int
    num_micro_batches: int  # the last update may have fewer than the others
    step_s: float  # of all trainers, on the devices of the host
    stall_s: float
    host_devices: int

    def batches(self) -> list[tuple[int, int]]:
        """Pairs of updates and their batch, in sequences."""
        full = self.num_accum_steps * self.micro_batch_size
        rest = self.num_micro_batches * self.micro_batch_size - (self.num_updates - 1) * full
        return [(self.num_updates - 1, full), (1, rest)]


class _Merge(NamedTuple):
    """A merge after a round, or one that was tried in vain."""

    members: tuple[int, ...]  # by id, the representative first
    is_final: bool  # whether the members after the first left
    is_refused: bool
    workers: Mapping[int, int] | None  # by trainer afterwards, where the ledger tells it


class _Recorded(NamedTuple):
    """What of a ledger the replay needs."""

    num_params: int
    state_bytes: StateBytes  # of the run's own model
    traffic: Traffic
    rounds: dict[int, list[_Line]]  # in order
    merges: Mapping[int, list[_Merge]]  # by the round before
    synchronised: Mapping[int, set[int]]  # trainers, as a whole after a round


def _read(events: Iterable[dict]) -> _Recorded:
    events = list(events)
    start, rounds, merges = None, defaultdict(list), defaultdict(list)
    synchronised = defaultdict(set)
    for event in events:
        kind = event["event"]
        if kind == "start":
            start = event
        elif kind == "round" and start is not None:
            rounds[event["round"]].append(_line(event, start))
        elif kind == "sync":
            synchronised[event["round"]] |= set(event["trainers"])
        elif kind in ("merge", "refusal"):
            is_final = kind == "merge" or event["action"] != "keep"
            workers = {int(trainer): n for trainer, n in event.get("workers", {}).items()} or None
            merges[event["round"]].append(
                _Merge(tuple(event["members"]), is_final, kind == "refusal", workers)
            )
    if start is None or not rounds:
        raise DataError(
            "the ledger has no start, or no round after it, so there is nothing to replay; let the"
            " run reach the end of round 1"
        )
    if list(rounds) != list(range(1, len(rounds) + 1)):
        shown = ", ".join(map(str, list(rounds)[:8]))
        raise DataError(
            f"the ledger's rounds begin {shown}; expected every one from 1 on, in order"
        )
    for index, lines in rounds.items():
        trainers = [line.trainer for line in lines]
        if len(set(trainers)) < len(trainers):
            raise DataError(f"round {index}: more than one line of a trainer among {trainers}")
    return _Recorded(
        start["num_params"],
        state_bytes(events) if merges else StateBytes(0, 0, 0),
        _traffic(start),
        dict(rounds),
        merges,
        synchronised,
    )


def _traffic(start: dict) -> Traffic:
    outer = start["config"].get("outer", {})  # a ledger may be older than each of the three
    precision = outer.get("precision", "float32")
    if precision not in BITS_PER_PARAM:
        raise DataError(
            f"the start line's outer.precision is {precision!r}: expected one of"
            f" {', '.join(BITS_PER_PARAM)}"
        )
    return Traffic(
        BITS_PER_PARAM[precision], outer.get("fragments", 1), outer.get("delay_updates", 0)
    )


def _line(event: dict, start: dict) -> _Line:
    inner, updates, accum = start["config"]["inner"], event["updates"], event["num_accum_steps"]
    in_updates = inner["unit"] == "updates"
    return _Line(
        trainer=event["trainer"],
        workers=event["workers"],
        micro_batch_size=event["micro_batch_size"],
        num_accum_steps=accum,
        num_updates=updates,
        num_micro_batches=updates * accum if in_updates or accum == 1 else inner["steps_per_round"],
        step_s=event["step_s"],
        stall_s=event["stall_s"],
        host_devices=int(start["devices"].split()[0]),
    )


class _Layout(NamedTuple):
    """Where the replicas are."""

    num_devices: int  # of each replica
    tenants: int  # replicas that share a device
    sites: tuple[frozenset[int], ...]  # by replica

    @property
    def width(self) -> float:
        """Devices that a replica has to itself."""
        return self.num_devices / self.tenants


def _layout(cluster: Cluster, num_replicas: int) -> _Layout:
    num_sites, per_site = cluster.num_sites, cluster.num_devices // cluster.num_sites
    if num_replicas < num_sites:
        span = num_sites // num_replicas
        sites = [frozenset(range(r * span, (r + 1) * span)) for r in range(num_replicas)]
        return _Layout(span * per_site, 1, tuple(sites))
    sites = [frozenset({r * num_sites // num_replicas}) for r in range(num_replicas)]
    fullest = -(-num_replicas // num_sites)
    return _Layout(max(1, per_site // fullest), -(-fullest // per_site), tuple(sites))


def _owners(counts: Mapping[int, int]) -> dict[int, list[int]]:
    """Replicas by trainer, as a run deals them out at its start: in blocks."""
    owners, first = {}, 0
    for trainer in sorted(counts):
        owners[trainer] = list(range(first, first + counts[trainer]))
        first += counts[trainer]
    return owners


def _round_time(
    index: int,
    line: _Line,
    start_s: float,
    own: Sequence[int],
    layout: _Layout,
    cluster: Cluster,
    traffic: Traffic,
    num_params: int,
    rng: np.random.Generator,
    *,
    is_synchronised: bool,
) -> RoundTime:
    """A trainer's round, with a synchronisation of all parameters at its end or without."""
    passes = [
        _Passes.of(batch, count, line.micro_batch_size, layout, cluster.step_time)
        for count, batch in line.batches()
    ]
    # By replica: compute, communication, waiting, idle, lost, all of it.
    param_bytes = BYTES_PER_PARAM * num_params
    seconds = np.array(
        [_replica_s(passes, replica, layout, cluster, param_bytes, rng) for replica in own]
    )
    slowest_s = float(seconds[:, -1].max())
    seconds[:, 2] += slowest_s - seconds[:, -1]
    compute_s, communication_s, waiting_s, idle_s, lost_s, _ = seconds.mean(axis=0).tolist()
    link = _link(cluster, layout, own)
    jitter = link.jitter if len(own) > 1 else 0.0
    sync_s = _sync_s(
        traffic,
        len(own),
        num_params,
        link,
        _noise(rng, jitter, traffic.num_fragments),
        slowest_s,
        num_updates=line.num_updates,
        num_micro_batches=line.num_micro_batches,
    )
    if is_synchronised:
        whole_bytes = traffic.sync_bytes(num_params) * traffic.num_fragments
        sync_s += _ring_s(len(own), whole_bytes, link) * float(_noise(rng, jitter, 1)[0])
    return RoundTime(
        round=index,
        trainer=line.trainer,
        workers=len(own),
        replicas=tuple(own),
        devices=layout.width * len(own),
        start_s=start_s,
        compute_s=compute_s,
        communication_s=communication_s + sync_s,
        waiting_s=waiting_s,
        idle_s=idle_s,
        lost_s=lost_s,
        end_s=start_s + slowest_s + sync_s,
    )


class _Passes(NamedTuple):
    """The computing of a replica's equal updates."""

    num_updates: int
    num_used: int  # devices that have a sequence
    busy_s: float  # of one update, until the last of them is done
    mean_s: float  # of one update, in the mean over them

    @staticmethod
    def of(
        batch_size: int, num_updates: int, micro_batch_size: int, layout: _Layout, time: StepTime
    ) -> "_Passes":
        def share_s(num_sequences: int) -> float:
            num_full, rest = divmod(num_sequences, micro_batch_size)
            full_s = num_full * time(micro_batch_size) if num_full else 0.0
            return layout.tenants * (full_s + (time(rest) if rest else 0.0))

        num_used = min(batch_size, layout.num_devices)
        low, more = divmod(batch_size, num_used)
        low_s, high_s = share_s(low), share_s(low + 1) if more else share_s(low)
        mean_s = low_s + (high_s - low_s) * more / num_used
        return _Passes(num_updates, num_used, max(low_s, high_s), mean_s)


def _replica_s(
    passes: Sequence[_Passes],
    replica: int,
    layout: _Layout,
    cluster: Cluster,
    param_bytes: int,
    rng: np.random.Generator,
) -> tuple[float, ...]:
    """A replica's round: seconds of compute, communication, waiting, idle, lost, and their sum."""
    factor = float(_noise(rng, cluster.compute_jitter, 1)[0])
    link = _link(cluster, layout, [replica])
    compute_s = communication_s = waiting_s = idle_s = total_s = device_s = 0.0
    for num_updates, num_used, busy_s, mean_s in passes:
        busy_s, mean_s = factor * num_updates * busy_s, factor * num_updates * mean_s
        ring_s = _ring_s(num_used, param_bytes, link)
        ring_s *= float(_noise(rng, link.jitter, num_updates).sum()) if ring_s else 0.0
        used_frac = num_used / layout.num_devices
        compute_s += used_frac * mean_s
        communication_s += used_frac * ring_s
        waiting_s += used_frac * (busy_s - mean_s)
        idle_s += (1 - used_frac) * (busy_s + ring_s)
        total_s += busy_s + ring_s
        device_s += num_used / layout.tenants * (busy_s + ring_s)
    lost_s = _lost_s(total_s, device_s, cluster, rng)
    return compute_s, communication_s, waiting_s, idle_s, lost_s, total_s + lost_s


def _lost_s(attempt_s: float, device_s: float, cluster: Cluster, rng: np.random.Generator) -> float:
    """Seconds that failures cost a replica until an attempt at its round goes through.

    `device_s` is what the attempt takes, summed over the devices that may fail.
    """
    expected = cluster.failures_per_device_hour / 3600 * device_s
    if expected > MAX_EXPECTED_FAILURES:
        raise ConfigError(
            f"failures_per_device_hour={cluster.failures_per_device_hour}: a replica would fail"
            f" {expected:.3g} times in a round of {attempt_s:.3g} s and get through none; expected"
            f" fewer failures, or shorter rounds"
        )
    lost_s = 0.0
    while expected and (until_s := rng.exponential(attempt_s / expected)) < attempt_s:
        lost_s += until_s + cluster.restart_s
    return lost_s


def _reassign(
    replicas: Mapping[int, list[int]],
    merges: Sequence[_Merge],
    counts: Mapping[int, int] | None,
    index: int,
) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Replicas by trainer after a round, and how many each trainer gave up for good.

    A trainer that is in no merge and has no further line was broken, and retires with its workers.
    """
    members = next((merge.members for merge in merges if merge.is_final), ())
    unknown = {trainer for merge in merges for trainer in merge.members} - set(replicas)
    if unknown:
        raise DataError(f"a merge after round {index} names trainers {sorted(unknown)}, not in it")
    if counts is None:  # nothing follows: nobody gives any up
        counts = {t: len(own) for t, own in replicas.items() if t not in members[1:]}
        if members:
            counts[members[0]] = sum(len(replicas[t]) for t in members)
    stack = [t for t in sorted(replicas) if t in counts or t in members]
    survivors = [t for t in stack if t not in members[1:]]
    owner_of = {replica: place for place, t in enumerate(stack) for replica in replicas[t]}
    if set(survivors) != set(counts) or sum(counts.values()) > len(owner_of):
        raise DataError(
            f"round {index + 1}: workers {dict(counts)} by trainer do not follow from round {index}"
        )
    pool = sorted(owner_of)
    divided = divide_workers(
        [owner_of[replica] for replica in pool],
        [stack.index(t) for t in members or stack[:1]],
        [counts[t] for t in survivors],
    )
    after: dict[int, list[int]] = {t: [] for t in survivors}
    for replica, place in zip(pool, divided, strict=True):
        if place >= 0:
            after[survivors[place]].append(replica)
    kept = {replica for own in after.values() for replica in own}
    return after, {t: n for t, own in replicas.items() if (n := len(set(own) - kept))}


def _merges_s(
    merges: Sequence[_Merge],
    replicas: Mapping[int, Sequence[int]],
    layout: _Layout,
    cluster: Cluster,
    state_bytes: StateBytes,
    scale: float,
    rng: np.random.Generator,
) -> float:
    """Seconds in which what the absorbed trainers send arrives, one after the other."""
    seconds = 0.0
    for merge in merges:
        into, *others = merge.members
        cost = merge_cost(state_bytes, num_absorbed=1, refused=merge.is_refused)
        for other in others:
            link = _nearest(cluster, layout, replicas[into], replicas[other])
            seconds += _transfer_s(scale * cost["bytes"], link, rng)
    return seconds


def _hand_over_s(
    before: Mapping[int, Sequence[int]],
    after: Mapping[int, Sequence[int]],
    layout: _Layout,
    cluster: Cluster,
    state_bytes: StateBytes,
    scale: float,
    rng: np.random.Generator,
) -> float:
    """Seconds until every replica that joins a trainer has what it is given."""
    num_bytes = scale * merge_cost(state_bytes, num_joining=1)["bytes"]
    seconds = [
        sum(
            _transfer_s(num_bytes, _nearest(cluster, layout, before[trainer], [replica]), rng)
            for replica in own
            if replica not in before[trainer]
        )
        for trainer, own in after.items()
    ]
    return max(seconds, default=0.0)


def _nearest(cluster: Cluster, layout: _Layout, some: Sequence[int], others: Sequence[int]) -> Link:
    """The link between the two nearest replicas of some and others."""
    near = frozenset().union(*(layout.sites[r] for r in some))
    return cluster.within if any(layout.sites[r] & near for r in others) else cluster.between


def _transfer_s(num_bytes: float, link: Link, rng: np.random.Generator) -> float:
    """Seconds of a transfer from one replica to another."""
    return (link.latency_s + num_bytes / link.bandwidth) * float(_noise(rng, link.jitter, 1)[0])


def _meet(
    time: RoundTime, meeting_s: float, moved_s: float, handed_s: float, *, is_member: bool
) -> RoundTime:
    """A trainer's round with merge and hand-over after it; who is no member waits for the merge."""
    waited_s, taken_s = meeting_s - time.end_s, moved_s + handed_s
    if not is_member:
        waited_s, taken_s = waited_s + moved_s, handed_s
    return time._replace(
        waiting_s=time.waiting_s + waited_s,
        communication_s=time.communication_s + taken_s,
        end_s=meeting_s + moved_s + handed_s,
    )


def _link(cluster: Cluster, layout: _Layout, replicas: Sequence[int]) -> Link:
    """The link that a ring through these replicas has to cross."""
    num_sites = len(frozenset().union(*(layout.sites[r] for r in replicas)))
    return cluster.within if num_sites == 1 else cluster.between


def _ring_s(num_members: int, num_bytes: float, link: Link) -> float:
    """Seconds of a ring all-reduce: reduce-scatter, then all-gather (docs/algorithm.md, 6)."""
    steps = 2 * (num_members - 1)
    return steps * (num_bytes / num_members / link.bandwidth + link.latency_s)


def _sync_s(
    traffic: Traffic,
    num_members: int,
    num_params: int,
    link: Link,
    factors: np.ndarray,
    round_s: float,
    *,
    num_updates: int,
    num_micro_batches: int,
) -> float:
    """Seconds that a trainer stands still for a round's synchronisations, one per factor."""
    transfer_s = factors * _ring_s(num_members, traffic.sync_bytes(num_params), link)
    # No longer than until the next fragment's turn: the link carries one at a time.
    hidden_frac = traffic.delay_updates / num_micro_batches + traffic.early_frac / num_updates
    hidden_s = round_s * min(hidden_frac, 1 / traffic.num_fragments)
    return float(np.maximum(transfer_s - hidden_s, 0.0).sum())


def _noise(rng: np.random.Generator, variation: float, count: int) -> np.ndarray:
    """Lognormal factors of mean 1 with a coefficient of variation; draws nothing for 0."""
    if not variation:
        return np.ones(count)
    variance = math.log1p(variation**2)
    return rng.lognormal(-variance / 2, math.sqrt(variance), count)
