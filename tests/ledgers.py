"""Ledger lines, and the ledger of a small run whose sums are easy to compute by hand."""

import itertools
import math
from collections import Counter

from adloco_jax.config import default_config, validate
from adloco_jax.run.kept.ledger import Ledger

LENGTH = 16  # tokens per sequence; every trainer makes 4 updates per round
# Six rounds, max_batch_size 8, switch multiplier 2, four workers; trainer 1 merges into 2 after
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
COLUMNS = ("round", "trainer", "workers", "requested_batch_size", "micro_batch_size")
COLUMNS += ("num_accum_steps", "train_loss", "next_batch_size", "reason")
COMMAND = "python -m adloco_jax.main --config configs/quickstart.py --set x='$a_$'"
JOINED = {"members": [2, 1], "into": 2, "loss_before": [4.0, 4.1], "syncs": 1}
REFUSAL = JOINED | {
    "event": "refusal",
    "round": 2,
    "weights": [4, 2],
    "loss_after": 5.0,
    "barrier": 0.95,
}
REFUSAL |= {"bytes": 125_000, "action": "keep"}
MERGE = JOINED | {
    "event": "merge",
    "round": 3,
    "weights": [0.5, 0.5],
    "loss_after": 4.05,
    "barrier": 0.0,
}
MERGE |= {"bytes": 250_000}


def start_line(*, num_params=250, seed=0, learning_rate=1e-3, **changes):
    """The start of a run in float32, without momentum or moments; `config` adds to its config."""
    config = validate(default_config()).model_dump() | {"seed": seed}
    changed = {
        "data": {"sequence_length": LENGTH},
        "model": {"vocab_size": 257},
        "inner": {"steps_per_round": 4, "learning_rate": learning_rate},
        "outer": {"precision": "float32", "fragments": 1, "delay_updates": 0},
        "batching": {"test": "norm", "eta": 0.8, "nu": 1.0},
    } | changes.pop("config", {})
    for key, value in changed.items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    line = {"event": "start", "run": "quickstart", "command": COMMAND, "num_params": num_params}
    line |= {"devices": "1 x cpu", "max_batch_size": 8, "config": config, "data_fingerprint": "d"}
    line["loss_unit"] = "nats/token"
    state_bytes = {"params": 4 * num_params, "outer_state": 0, "inner_state": 0}
    return line | {"state_bytes": state_bytes} | changes


def round_line(round, trainer=0, workers=2, batch=4, *, accum=1, **changes):
    """A trainer's `round` line; `batch` is the micro-batch."""
    line = {"event": "round", "round": round, "trainer": trainer, "workers": workers}
    line |= {"requested_batch_size": batch, "micro_batch_size": batch, "num_accum_steps": accum}
    line |= {"updates": 4, "noise": 1.0, "signal": 0.1, "test_value": math.inf}
    line |= {"next_batch_size": batch, "train_loss": 0.0, "tokens": 0, "syncs": 0, "bytes": 0}
    return line | {"step_s": 0.2, "stall_s": 0.0} | changes


def write_run(
    workdir,
    *,
    rounds=ROUNDS,
    merge=True,
    refusal=False,
    evals=True,
    end=True,
    no_loss=(),
    memory=True,
    command=COMMAND,
    seed=0,
    learning_rate=1e-3,
    loss_shift=0.0,
):
    """Writes the ledger of a run; losses of the rounds `no_loss` are not finite.

    Evaluations follow the merge, as in a run. Held-out losses are 0.2 below the training losses;
    the consensus loss is 0.25 below the best.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    total = Counter()
    with Ledger(workdir / "ledger.jsonl") as ledger:

        def write(fields):
            ledger.write(**fields)
            costs = ("tokens", "syncs", "bytes", "updates")
            total.update({f"{cost}_total": fields.get(cost, 0) for cost in costs})

        where = {"seed": seed, "learning_rate": learning_rate, "command": command}
        state_bytes = {"params": 125_000, "outer_state": 0, "inner_state": 0}
        start = start_line(num_params=250_000, state_bytes=state_bytes, **where)
        write(start | {"tokens_per_byte": 0.25})
        for cache, seconds in (("miss", 1.5), ("miss", 2.25), ("hit", 0.25)):
            needed = {"needed_bytes": int(seconds * 2**30) if memory else None}
            timed = {"cache": cache, "seconds": seconds, "where": "foreground"}
            ledger.write("compile", key="k", **timed, **needed)
        for number, rows in itertools.groupby(rounds, key=lambda row: row[0]):
            losses = {}
            for row in rows:
                line = round_line(number, **dict(zip(COLUMNS[1:], row[1:], strict=True)))
                workers = line["workers"]
                per_update = workers * line["micro_batch_size"] * line["num_accum_steps"]
                line["train_loss"] += math.nan if number in no_loss else loss_shift
                line |= {"tokens": per_update * 4 * LENGTH, "syncs": int(workers > 1)}
                write(line | {"bytes": 500_000 * (workers if workers > 1 else 0)})
                losses[line["trainer"]] = line["train_loss"]
            consensus = min(losses.values()) - 0.25  # the best of all trainers
            if merge and number == 3:
                write(MERGE)
                del losses[1]
            if refusal and number == 2:
                write(REFUSAL)
            if evals:
                held_out = {trainer: loss - 0.2 for trainer, loss in losses.items()}
                for trainer, loss in (held_out | {"consensus": consensus}).items():
                    line = {"round": number, "trainer": trainer, "loss": loss, "source": "best"}
                    line |= {"perplexity": math.exp(loss), "wall_s": 1.5 * number}
                    ledger.write("eval", **line, **total)
        last = rounds[-1][0]
        for peak in (2, 3) if memory else ():
            device = [None, peak * 2**30, 2**30]
            ledger.write(
                "memory", round=last, host_peak_bytes=peak * 2**29, device_peak_bytes=device
            )
        if end:
            ledger.write("end", reason="finished", rounds=last, wall_s=75.0, tokens_total=0)
    return workdir
