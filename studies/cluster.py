"""Simulated time: the seconds that a recorded run would take on a cluster.

Every worker has its own device. A round's 6 * parameters * tokens FLOPs (Kaplan et al. 2020, 2.1)
are divided among a trainer's workers, who then wait for a ring all-reduce (`sites.ring_s`,
`blocked_s`). A ledger line of a merge or of joining workers costs its bytes over one link, and a
latency for each of its `syncs`; the members of a merge wait for it, other trainers do not. Left
out: evaluation, checkpoints, the batch-size test (about 4 % of a round), the optimizer's update,
quantisation, failures, and transfers that share a link.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from adloco_jax.study.curves import SPENDING, last, lines


@dataclass(frozen=True)
class Cluster:
    """A simulated cluster, with one device for each worker and equal links between all devices."""

    bandwidth: float = 10e9 / 8  # bandwidth of a link, bytes/s
    latency_s: float = 0.03
    flops: float = 0.4 * 312e12  # FLOP/s that a device reaches: 40 % of an A100's bfloat16 peak
    # The model that is timed with the run's schedule. None: the run's own model.
    num_params: int | None = None
    sequence_length: int | None = None  # tokens


def run_seconds(events: Sequence[dict], cluster: Cluster) -> dict[int, float]:
    """By round, simulated seconds from the start of a run until its last trainer has ended it."""
    start = last(events, "start")
    model, outer = start["num_params"], start["config"]["outer"]
    length = start["config"]["data"]["sequence_length"]
    num_params = cluster.num_params or model
    token_s = 6 * num_params / cluster.flops * (cluster.sequence_length or length) / length
    ready_s: dict[int, float] = defaultdict(float)  # by trainer
    workers: dict[int, int] = {}
    ended_s: dict[int, float] = {}
    for event in lines(events, *SPENDING):
        # The bytes of a ring are 2 (m - 1) times the parameters', and m links carry them.
        link_s = num_params / model * event["bytes"] / cluster.bandwidth
        latency_s = cluster.latency_s * event["syncs"]
        if event["event"] == "round":
            trainer, count = event["trainer"], event["workers"]
            workers[trainer] = count
            compute_s = token_s * event["tokens"] / count
            wait_s = blocked_s(
                link_s / count + 2 * (count - 1) * latency_s,
                compute_s,
                num_fragments=outer["fragments"],
                hidden_frac=outer["delay_updates"]
                / (max(event["updates"], 1) * event["num_accum_steps"]),
            )
            ready_s[trainer] += compute_s + wait_s
        elif event["event"] == "sync":
            several = [trainer for trainer in event["trainers"] if workers[trainer] > 1]
            for trainer in several:
                sum_s = link_s / sum(workers[t] for t in several)
                ready_s[trainer] += sum_s + 2 * (workers[trainer] - 1) * cluster.latency_s
        else:
            waiting = event["members"] if "members" in event else [event["trainer"]]
            met_s = max(ready_s[trainer] for trainer in waiting)
            ready_s |= dict.fromkeys(waiting, met_s + link_s + latency_s)
        ended_s[event["round"]] = max(ready_s.values())
    return ended_s


def blocked_s(
    transfer_s: float, round_s: float, *, num_fragments: int = 1, hidden_frac: float = 0.0
) -> float:
    """Seconds for which the workers of a trainer wait for the synchronisations of a round.

    Args:
      transfer_s: Seconds that the transfers of all fragments take together.
      round_s: Seconds in which the workers compute.
      num_fragments: Number of fragments, of equal size, one after another.
      hidden_frac: Fraction of the round between sending a fragment and using the result. At most
        1 / num_fragments counts: a fragment has arrived before the next is sent.

    Source: Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512), sections 2.2 to 2.4.
    """
    hidden_s = round_s * min(hidden_frac, 1 / num_fragments)
    return max(0.0, transfer_s - num_fragments * hidden_s)
