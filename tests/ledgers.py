"""A small run's ledger, written line by line, whose sums can be added by hand."""

import itertools
import math

from adloco_jax.run.ledger import Ledger

LENGTH = 16  # tokens per sequence; every trainer makes 4 updates per round
# Six rounds, max_batch_size 8, switch multiplier 2, four workers; trainer 1 goes into 2 after
# round 3. Columns: round, trainer, workers, requested, micro, accum, train loss, next, reason.
ROUNDS = [
    (1, 0, 2, 2, 2, 1, 5.50, 4, "grew"),
    (1, 1, 1, 2, 2, 1, 5.52, 2, "kept"),
    (1, 2, 1, 2, 2, 1, 5.51, 4, "grew"),
    (2, 0, 2, 4, 4, 1, 4.40, 12, "capped"),
    (2, 1, 1, 2, 2, 1, 4.72, 2, "kept"),
    (2, 2, 1, 4, 4, 1, 4.61, 4, "signal"),
    (3, 0, 2, 12, 8, 1, 3.60, 20, "grew"),
    (3, 1, 1, 2, 2, 1, 4.12, 4, "grew"),
    (3, 2, 1, 4, 4, 1, 4.01, 4, "kept"),
    (4, 0, 3, 20, 8, 3, 2.90, 20, "kept"),
    (4, 2, 1, 4, 4, 1, 3.51, 9, "grew"),
    (5, 0, 3, 20, 8, 3, 2.50, 20, "kept"),
    (5, 2, 1, 9, 8, 1, 3.11, 9, "kept"),
    (6, 0, 3, 20, 8, 3, 2.25, 20, "degenerate"),
    (6, 2, 1, 9, 8, 1, 2.81, 9, "skipped"),
]


def write_run(
    workdir,
    *,
    rounds=ROUNDS,
    merge=True,
    refusal=False,
    evals=True,
    start=True,
    end=True,
    no_loss=(),
    memory=True,
    command="python -m adloco_jax.main --config configs/quickstart.py --set x='$a_$'",
    seed=0,
    learning_rate=1e-3,
    loss_shift=0.0,
    accuracy=None,
):
    """Writes the lines of a run; `no_loss` are the rounds whose losses are not finite.

    Evaluations follow the merge, as in a run. Held-out losses lie 0.2 below the training losses,
    the consensus' 0.25 below the best.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    last = max(row[0] for row in rounds)
    with Ledger(workdir / "ledger.jsonl") as ledger:
        if start:
            ledger.write(
                "start",
                time="2025-01-01T00:00:00",
                run="quickstart",
                command=command,
                config={
                    "seed": seed,
                    "data": {"sequence_length": LENGTH},
                    "inner": {
                        "unit": "updates",
                        "steps_per_round": 4,
                        "learning_rate": learning_rate,
                    },
                    "batching": {"test": "norm", "eta": 0.8, "nu": 1.0},
                },
                num_params=250_000,
                state_bytes={"params": 125_000, "outer_state": 0, "inner_state": 0},
                devices="1 x cpu",
                jax="0.10.2",
                versions={},
                data_fingerprint="0",
                tokens_per_byte=0.25,
                max_batch_size=8,
                buckets=[2, 4, 8],
            )
        for cache, seconds in (("miss", 1.5), ("miss", 2.25), ("hit", 0.25)):
            ledger.write(
                "compile",
                key="k",
                seconds=seconds,
                cache=cache,
                where="foreground",
                needed_bytes=int(seconds * 2**30) if memory else None,
            )
        tokens_total = syncs_total = bytes_total = updates_total = 0
        for number, lines in itertools.groupby(rounds, key=lambda row: row[0]):
            losses = {}
            for _, trainer, workers, requested, micro, accum, loss, following, reason in lines:
                tokens = workers * micro * accum * 4 * LENGTH
                syncs = int(workers > 1)
                moved = 500_000 * (workers if workers > 1 else 0)
                losses[trainer] = math.nan if number in no_loss else loss + loss_shift
                ledger.write(
                    "round",
                    round=number,
                    trainer=trainer,
                    workers=workers,
                    requested_batch_size=requested,
                    micro_batch_size=micro,
                    num_accum_steps=accum,
                    updates=4,
                    tokens=tokens,
                    learning_rate=1e-3,
                    train_loss=losses[trainer],
                    noise=1.0,
                    signal=0.1,
                    test_value=math.inf,
                    next_batch_size=following,
                    reason=reason,
                    syncs=syncs,
                    bytes=moved,
                    pseudo_grad_norm=0.5,
                    step_s=0.2,
                    stall_s=0.0,
                )
                tokens_total += tokens
                syncs_total += syncs
                bytes_total += moved
                updates_total += 4
            if merge and number == 3:
                ledger.write(
                    "merge",
                    round=3,
                    members=[2, 1],
                    into=2,
                    weights=[0.5, 0.5],
                    loss_before=[4.0, 4.1],
                    loss_after=4.05,
                    barrier=0.0,
                    syncs=1,
                    bytes=250_000,
                    requested_batch_size=4,
                    workers={0: 3, 2: 1},
                )
                syncs_total += 1
                bytes_total += 250_000
            if refusal and number == 2:
                ledger.write(
                    "refusal",
                    round=2,
                    members=[2, 1],
                    into=2,
                    weights=[4, 2],
                    loss_before=[4.0, 4.1],
                    loss_after=5.0,
                    barrier=0.95,
                    syncs=1,
                    bytes=125_000,
                    action="keep",
                )
                syncs_total += 1
                bytes_total += 125_000
            if evals:
                alive = {t: x for t, x in losses.items() if not (merge and (number, t) == (3, 1))}
                best = min(losses.values()) - 0.25  # of all that took part
                for who, loss in [(t, x - 0.2) for t, x in alive.items()] + [("consensus", best)]:
                    ledger.write(
                        "eval",
                        round=number,
                        trainer=who,
                        loss=loss,
                        perplexity=math.exp(loss),
                        tokens_total=tokens_total,
                        bytes_total=bytes_total,
                        updates_total=updates_total,
                        syncs_total=syncs_total,
                        wall_s=1.5 * number,
                        **({"source": "best"} if who == "consensus" else {}),
                        **({"accuracy": accuracy, "classes": []} if accuracy is not None else {}),
                    )
        for peak in (2, 3) if memory else ():
            ledger.write(
                "memory",
                round=last,
                host_peak_bytes=peak * 2**29,
                device_peak_bytes=[None, peak * 2**30, 2**30],
            )
        if end:
            ledger.write(
                "end",
                reason="done",
                rounds=last,
                tokens_total=tokens_total,
                bytes_total=bytes_total,
                syncs_total=syncs_total,
                updates_total=updates_total,
                wall_s=75.0,
            )
    return workdir
