"""The time a recorded run would have taken on a cluster: a replay of its ledger, round by round.

The model, which the tests check against cases computed by hand and against a closed form:

- **Replicas.** Each of the R workers, as many as the run ever had at once, becomes a replica, which
  is idle until its worker joins; all replicas have the same number of devices. Replicas are
  assigned in blocks: the first R / sites of them to the first site, and so on. A replica stays
  within one site unless there are more sites than workers; then it spans several whole sites.
  Devices left over by the equal division are idle. With fewer devices than workers, several workers
  share a device, and each of its passes takes as many times longer.
- **Compute.** The batch of an update (micro-batch x accumulation steps) is divided over the
  replica's devices, in whole sequences and as evenly as possible. A device computes its share in
  consecutive passes of at most the recorded micro-batch; a device without a sequence is idle. Each
  update ends with a ring all-reduce of the gradients among the devices that have a sequence.
- **Communication.** A ring all-reduce of P bytes among m takes 2 (m - 1) / m * P / bandwidth +
  2 (m - 1) * latency, over the slowest link that the ring crosses (docs/algorithm.md, 6). A trainer
  with several workers does one per round among its replicas; with fragments, one per fragment, in
  turn and evenly spaced over the round's updates. A trainer with a single worker does none. Where
  the ledger also records a synchronisation of all parameters, the trainer blocks for it. Outer
  gradients travel as `Traffic` says, everything else in float32. A transfer may begin during the
  update before it and overlap some updates after it, but must end before the next fragment's turn;
  the trainer blocks for the rest, and only the rest counts as its communication. At a merge, the
  bytes that the ledger counts for each absorbed trainer are sent to the representative, one trainer
  after the other, over the link between their nearest replicas. Then each worker that joins a
  trainer, then or from the pool without a merge, receives the bytes that the ledger counts for it,
  from the nearest of the replicas that the trainer had: one worker after the other, all trainers at
  the same time. All these bytes are scaled with the number of parameters if another model is
  simulated.
- **Waiting.** A trainer's round ends when its slowest replica has finished and all are
  synchronised. Trainers wait for one another only at a merge: its members, and all trainers whose
  workers change. A refused merge costs what the merge would have cost, since it is refused only
  after it was tried. At the end of the run, trainers that have finished wait for the last.
- **Branches.** The branches of a round run one after the other on the trainer's replicas, each with
  its synchronisation.
- **Failures.** A device that has a sequence fails at a constant rate while its replica makes
  updates. The replica restarts and repeats the round from the round's initial parameters; the
  trainer's other replicas wait.
- **Left out**: evaluation, checkpoints, the pass of the batch-size test (some 4 % of a round), the
  optimizer's update, encoding and decoding of quantised outer gradients, contention of several
  trainers for one link, overlap of a replica's own all-reduce with compute, the wait for fragments
  still in transit at a merge or at the end of the run, the transfer of merged parameters from a
  representative to its own workers, and gathering trainers for a consensus.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from adloco_jax.core.compress import BITS_PER_PARAM
from adloco_jax.core.merge import divide_workers
from adloco_jax.errors import ConfigError, DataError
from adloco_jax.loop.adloco import StateBytes, merge_cost
from adloco_jax.study.cluster import Cluster, Link
from adloco_jax.study.curves import lines, read_rounds, state_bytes

BYTES_PER_PARAM = 4  # float32: parameters, and gradients within a replica
MAX_EXPECTED_FAILURES = 7.0  # of a replica in one round; beyond it a run would never finish
PARTS = ("compute_s", "communication_s", "waiting_s", "idle_s", "lost_s")  # of all device-time


@dataclass(frozen=True)
class Traffic:
    """How outer gradients travel; by default in float32, all at once, while the trainer blocks.

    Source: Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512), sections 2.2 to 2.4.
    """

    bits_per_param: float = BITS_PER_PARAM["float32"]
    num_fragments: int = 1  # of equal size, synchronised in turn within a round
    # Inner updates between sending and receiving a fragment; micro-batches if updates accumulate.
    delay_updates: int = 0
    early_frac: float = 0.0  # of an update's time: how long before its end sending begins

    def sync_bytes(self, num_params: int) -> float:
        """Bytes of one synchronisation's outer gradients: the peak, of one fragment."""
        return self.bits_per_param / 8 * num_params / self.num_fragments

    def hidden_s(self, round_s: float, *, num_updates: int, num_micro_batches: int) -> float:
        """Seconds of each transfer that overlap compute, in a round of this duration."""
        hidden_frac = self.delay_updates / num_micro_batches + self.early_frac / num_updates
        # At most until the next fragment's turn: the link carries one at a time.
        return round_s * min(hidden_frac, 1 / self.num_fragments)


class RoundTime(NamedTuple):
    """One trainer's round on the cluster, including the merge after it, if any.

    The five parts are means over the trainer's devices; their sum is `end_s - start_s`.
    """

    round: int
    trainer: int
    replicas: tuple[int, ...]  # indices of the R, numbered from the first site on
    devices: float  # a fraction where workers share a device
    start_s: float
    end_s: float
    compute_s: float
    communication_s: float  # not hidden behind compute
    waiting_s: float  # for the slowest replica, for devices with one sequence more, for a merge
    idle_s: float  # without a sequence
    lost_s: float  # to failures: discarded work and restarts


@dataclass(frozen=True)
class Replay:
    """A run's times on a cluster; the five parts are device-seconds.

    compute_s + communication_s + waiting_s + idle_s + lost_s = num_devices * wall_s. Waiting also
    includes the wait of finished trainers for the end of the run.
    """

    rounds: tuple[RoundTime, ...]
    end_s: Mapping[int, float]  # by round: when every trainer had finished it
    num_devices: int
    wall_s: float
    compute_s: float  # of the passes that counted
    communication_s: float
    waiting_s: float
    idle_s: float  # retired and left-over devices too
    lost_s: float

    def frac(self, name: str) -> float:
        """One of the five parts as a fraction of all device-time; `compute_s` is utilisation."""
        return getattr(self, name) / (self.num_devices * self.wall_s)


def replay(
    events: Iterable[dict],
    cluster: Cluster,
    *,
    traffic: Traffic | None = None,
    num_params: int | None = None,
    seed: int = 0,
) -> Replay:
    """Simulate a recorded run on a cluster.

    Args:
      events: A ledger's lines, also of a resumed or unfinished run.
      cluster: Where to run.
      traffic: How outer gradients travel; by default as in the config of the last start line.
      num_params: Parameters of the model trained with the run's schedule; by default the run's own.
      seed: Seed of jitter and failures; without them it has no effect.

    Returns:
      The times.

    Raises:
      ConfigError: If a replica would fail so often that it never finishes a round.
      DataError: If the ledger lacks a start or a round, or contradicts itself.
    """
    events = list(events)
    rounds = read_rounds(events)
    merges = {e["round"]: e for e in lines(events, "merge", "refusal")}
    branches = {e["round"]: e for e in lines(events, "branch")}
    flushed = {(e["round"], t) for e in lines(events, "sync") for t in e["trainers"]}
    start = rounds[len(rounds)][0]["start"]
    workers = {index: {e["trainer"]: e["workers"] for e in own} for index, own in rounds.items()}
    num_params = start["num_params"] if num_params is None else num_params
    outer = start["config"]["outer"]
    bits, *how = BITS_PER_PARAM[outer["precision"]], outer["fragments"], outer["delay_updates"]
    joined: dict[int, dict[int, int]] = defaultdict(dict)  # workers of the pool, by round
    for e in lines(events, "spawn"):
        joined[e["round"]][e["trainer"]] = e["workers_after"] - e["workers_before"]
    simulation = _Simulation(
        cluster,
        max(sum(own.values()) for own in workers.values()),
        traffic or Traffic(bits, *how),
        num_params,
        StateBytes(*(round(num_params / start["num_params"] * n) for n in state_bytes(events))),
        np.random.default_rng(seed),
    )
    free = iter(range(simulation.num_replicas))  # in blocks, as the run assigned its workers
    replicas = {t: list(itertools.islice(free, n)) for t, n in sorted(workers[1].items())}
    times: list[RoundTime] = []
    ready_s = dict.fromkeys(replicas, 0.0)
    end_s: dict[int, float] = {}
    for index, own_lines in rounds.items():
        ended = {}
        for line in own_lines:
            each = _branch_lines(line, branches.get(index))
            own = [simulation.round(one, replicas, ready_s, flushed) for one in each]
            ended[line["trainer"]] = _in_turn(own)
        merge = merges.get(index)
        counts = workers.get(index + 1, {})  # none after the last round
        counts = {t: n - joined[index].get(t, 0) for t, n in counts.items()}
        after = _replicas_after(replicas, merge, counts, index)
        free = iter(sorted(set(range(simulation.num_replicas)).difference(*after.values())))
        for trainer, count in joined[index].items():
            after[trainer] += itertools.islice(free, count)
        ended = simulation.merge(ended, merge, replicas, after)
        times += ended.values()
        ready_s = {t: time.end_s for t, time in ended.items()}
        end_s[index] = max([*ready_s.values(), *end_s.values()])
        replicas = after
    wall_s = max(end_s.values())
    parts = {p: sum(time.devices * getattr(time, p) for time in times) for p in PARTS}
    tail_s = simulation.width * sum(len(own) * (wall_s - ready_s[t]) for t, own in replicas.items())
    parts["waiting_s"] += tail_s
    busy_s = sum(time.devices * (time.end_s - time.start_s) for time in times)
    parts["idle_s"] += cluster.num_devices * wall_s - busy_s - tail_s
    return Replay(tuple(times), end_s, cluster.num_devices, wall_s, **parts)


def _branch_lines(line: dict, branch: dict | None) -> list[dict]:
    """The line of each branch of a round; of a plain round its own."""
    if branch is None:
        return [line]
    each = []
    for size in branch["batch_sizes"]:
        micro = math.gcd(size, line["micro_batch_size"])
        plan = {"micro_batch_size": micro, "num_accum_steps": size // micro}
        each.append(line | plan | {"updates": line["updates"] * branch["chosen"] // size})
    return each


def _in_turn(times: Sequence[RoundTime]) -> RoundTime:
    """Rounds of the same replicas, one after the other, as one."""
    if len(times) == 1:
        return times[0]
    end_s = times[0].start_s + sum(time.end_s - time.start_s for time in times)
    parts = [sum(getattr(time, part) for time in times) for part in PARTS]
    return RoundTime(*times[0][:5], end_s, *parts)


def _num_micro_batches(line: dict) -> int:
    """Micro-batches of each worker in a round; the last update may have fewer than the others."""
    inner, num_accum_steps = line["start"]["config"]["inner"], line["num_accum_steps"]
    if inner["unit"] == "updates" or num_accum_steps == 1:
        return line["updates"] * num_accum_steps
    return line.get("steps_per_round", inner["steps_per_round"])


def _replicas_after(
    replicas: Mapping[int, list[int]],
    merge: dict | None,
    counts: Mapping[int, int],
    index: int,
) -> dict[int, list[int]]:
    """Replicas by trainer after a round: each has as many as its next line's workers.

    A trainer in no merge and without a further line was quarantined, and leaves with its workers.
    """
    merge = merge or {"members": [], "action": "keep"}
    members = merge["members"]
    absorbed = members[1:] if merge.get("action") != "keep" else []
    # Of the last round, what its merge records.
    counts = counts or {int(t): n for t, n in merge.get("workers", {}).items()}
    counts = counts or {t: len(own) for t, own in replicas.items() if t not in absorbed}
    stack = [t for t in sorted(replicas) if t in counts or t in absorbed]
    survivors = [t for t in stack if t not in absorbed]
    pool = sorted((replica, place) for place, t in enumerate(stack) for replica in replicas[t])
    is_known = set(members) <= set(replicas) and set(survivors) == set(counts)
    if not is_known or sum(counts.values()) > len(pool):
        raise DataError(
            f"round {index + 1}: workers {dict(counts)} by trainer do not follow from round {index}"
            f" with trainers {list(replicas)} and a merge of {members}"
        )
    divided = divide_workers(
        [place for _, place in pool],
        [stack.index(t) for t in (members if absorbed else stack[:1])],
        [counts[t] for t in survivors],
    )
    after: dict[int, list[int]] = {t: [] for t in survivors}
    for (replica, _), place in zip(pool, divided, strict=True):
        if place >= 0:
            after[survivors[place]].append(replica)
    return after


@dataclass
class _Simulation:
    """A cluster, divided among the replicas of a run."""

    cluster: Cluster
    num_replicas: int
    traffic: Traffic
    num_params: int
    state_bytes: StateBytes
    rng: np.random.Generator

    def __post_init__(self) -> None:
        cluster, num_replicas = self.cluster, self.num_replicas
        per_site = cluster.num_devices // cluster.num_sites
        num_sites = max(1, cluster.num_sites // num_replicas)  # of each replica
        replicas_per_site = -(-num_replicas // cluster.num_sites)
        self.replica_devices = max(1, num_sites * per_site // replicas_per_site)
        self.tenants = -(-replicas_per_site // per_site)  # replicas that share a device
        self.width = self.replica_devices / self.tenants  # devices that a replica has to itself
        first = [r * cluster.num_sites // num_replicas for r in range(num_replicas)]
        self.sites = [frozenset(range(site, site + num_sites)) for site in first]

    def round(
        self,
        line: dict,
        replicas: Mapping[int, Sequence[int]],
        ready_s: Mapping[int, float],
        flushed: set[tuple[int, int]],
    ) -> RoundTime:
        """A trainer's round; `flushed` says after which all parameters are synchronised."""
        place = (line["round"], line["trainer"])
        own, start_s = replicas[line["trainer"]], ready_s[line["trainer"]]
        parts_RP = np.array([self._replica_s(line, replica) for replica in own])
        total_R = parts_RP.sum(axis=1)
        slowest_s = float(total_R.max())
        sync_s = self._sync_s(line, own, slowest_s, is_flushed=place in flushed)
        parts_P = parts_RP.mean(axis=0)
        parts_P += [0.0, sync_s, slowest_s - float(total_R.mean()), 0.0, 0.0]
        end_s = start_s + slowest_s + sync_s
        return RoundTime(
            *place, tuple(own), self.width * len(own), start_s, end_s, *parts_P.tolist()
        )

    def _replica_s(self, line: dict, replica: int) -> np.ndarray:
        """A replica's seconds in a round, by `PARTS`."""
        micro_batch_size, num_updates = line["micro_batch_size"], line["updates"]
        full = line["num_accum_steps"] * micro_batch_size
        last = _num_micro_batches(line) * micro_batch_size - (num_updates - 1) * full
        factor = float(self._noise(self.cluster.compute_jitter, 1)[0])
        link = self._ring_link([replica])
        parts_P, at_risk_s = np.zeros(len(PARTS)), 0.0
        for count, batch_size in ((num_updates - 1, full), (1, last)):
            num_used = min(batch_size, self.replica_devices)
            low, num_high = divmod(batch_size, num_used)
            low_s = self._share_s(low, micro_batch_size)
            high_s = self._share_s(low + 1, micro_batch_size) if num_high else low_s
            mean_s = factor * count * (low_s + (high_s - low_s) * num_high / num_used)
            busy_s = factor * count * max(low_s, high_s)
            ring_s = _ring_s(num_used, BYTES_PER_PARAM * self.num_params, link)
            if ring_s:
                ring_s *= float(self._noise(link.jitter, count).sum())
            used = num_used / self.replica_devices
            idle_s = (1 - used) * (busy_s + ring_s)
            parts_P += [used * mean_s, used * ring_s, used * (busy_s - mean_s), idle_s, 0.0]
            at_risk_s += num_used / self.tenants * (busy_s + ring_s)
        parts_P[-1] = self._lost_s(float(parts_P.sum()), at_risk_s)
        return parts_P

    def _share_s(self, num_sequences: int, micro_batch_size: int) -> float:
        """Seconds in which a device computes its share of an update."""
        num_full, rest = divmod(num_sequences, micro_batch_size)
        full_s = num_full * self.cluster.step_time(micro_batch_size) if num_full else 0.0
        return self.tenants * (full_s + (self.cluster.step_time(rest) if rest else 0.0))

    def _lost_s(self, attempt_s: float, at_risk_s: float) -> float:
        """Seconds lost to failures until an attempt at a round succeeds.

        `at_risk_s` is the attempt's duration summed over the devices that may fail.
        """
        expected = self.cluster.failures_per_device_hour / 3600 * at_risk_s
        if expected > MAX_EXPECTED_FAILURES:
            raise ConfigError(
                f"failures_per_device_hour={self.cluster.failures_per_device_hour}: a replica would"
                f" fail {expected:.3g} times in a round of {attempt_s:.3g} s and never finish it;"
                " expected fewer failures, or shorter rounds"
            )
        lost_s = 0.0
        while expected and (until_s := self.rng.exponential(attempt_s / expected)) < attempt_s:
            lost_s += until_s + self.cluster.restart_s
        return lost_s

    def _sync_s(self, line: dict, own: Sequence[int], round_s: float, *, is_flushed: bool) -> float:
        """Seconds for which a trainer blocks in a round's synchronisations."""
        link, num_fragments = self._ring_link(own), self.traffic.num_fragments
        jitter = link.jitter if len(own) > 1 else 0.0
        num_bytes = self.traffic.sync_bytes(self.num_params)
        transfer_s = _ring_s(len(own), num_bytes, link) * self._noise(jitter, num_fragments)
        hidden_s = self.traffic.hidden_s(
            round_s, num_updates=line["updates"], num_micro_batches=_num_micro_batches(line)
        )
        sync_s = float(np.maximum(transfer_s - hidden_s, 0.0).sum())
        if is_flushed:
            flush_s = _ring_s(len(own), num_fragments * num_bytes, link)
            sync_s += flush_s * float(self._noise(jitter, 1)[0])
        return sync_s

    def merge(
        self,
        ended: dict[int, RoundTime],
        merge: dict | None,
        before: Mapping[int, Sequence[int]],
        after: Mapping[int, Sequence[int]],
    ) -> dict[int, RoundTime]:
        """The trainers' rounds, with the merge and the hand-over of workers after them."""
        merge = merge or {"members": [], "event": "none"}
        members = merge["members"]
        waits = {*members, *(t for t, own in after.items() if set(own) != set(before[t]))}
        if not waits:
            return ended
        is_refused = merge["event"] == "refusal"
        absorbed_bytes = merge_cost(self.state_bytes, num_absorbed=1, refused=is_refused)["bytes"]
        joining_bytes = merge_cost(self.state_bytes, num_joining=1)["bytes"]
        merged_s = sum(
            self._transfer_s(absorbed_bytes, before[members[0]], before[t]) for t in members[1:]
        )
        joining = [
            [self._transfer_s(joining_bytes, before[t], [r]) for r in own if r not in before[t]]
            for t, own in after.items()
        ]
        handed_s = max(map(sum, joining))
        end_s = max(ended[t].end_s for t in waits) + merged_s + handed_s
        merged = dict(ended)
        for t in waits:
            time, busy_s = ended[t], handed_s + (merged_s if t in members else 0.0)
            merged[t] = time._replace(
                communication_s=time.communication_s + busy_s,
                waiting_s=time.waiting_s + end_s - time.end_s - busy_s,
                end_s=end_s,
            )
        return merged

    def _transfer_s(self, num_bytes: int, some: Sequence[int], others: Sequence[int]) -> float:
        """Seconds of a transfer between the two nearest replicas of some and others."""
        near = frozenset().union(*(self.sites[r] for r in some))
        is_near = any(self.sites[r] & near for r in others)
        link = self.cluster.within if is_near else self.cluster.between
        factor = float(self._noise(link.jitter, 1)[0])
        return (link.latency_s + num_bytes / link.bandwidth) * factor

    def _ring_link(self, replicas: Sequence[int]) -> Link:
        """The slowest link that a ring through these replicas crosses."""
        num_sites = len(frozenset().union(*(self.sites[r] for r in replicas)))
        return self.cluster.within if num_sites == 1 else self.cluster.between

    def _noise(self, variation: float, count: int) -> np.ndarray:
        """Lognormal factors of mean 1 with this coefficient of variation; draws nothing for 0."""
        if not variation:
            return np.ones(count)
        variance = math.log1p(variation**2)
        return self.rng.lognormal(-variance / 2, math.sqrt(variance), count)


def _ring_s(num_members: int, num_bytes: float, link: Link) -> float:
    """Seconds of a ring all-reduce: reduce-scatter, then all-gather (docs/algorithm.md, 6)."""
    steps = 2 * (num_members - 1)
    return steps * (num_bytes / num_members / link.bandwidth + link.latency_s)
