"""The totals of a run as numbers and as text, and the table that is printed at its end."""

import itertools
import math
import os
import re
from collections.abc import Sequence
from datetime import timedelta

import numpy as np

from adloco_jax.elastic.formats import USES
from adloco_jax.errors import in_bytes
from adloco_jax.study.curves import (
    SPENDING,
    by_trainer,
    gathering,
    last,
    lines,
    read_run,
    seconds_by_use,
)

_HEADER = ("trainer", "rounds", "merged into", "batch", "accum", "tokens", "updates", "train loss")

SOURCES = {"only": "the trainer", "best": "the best trainer", "average": "the trainers' average"}


def closing_table(workdir: str | os.PathLike[str]) -> str:
    """Make the table at the end (or present state) of a run: a line per trainer, then the totals.

    Raises:
      DataError: If the folder has no ledger, or a damaged one.
    """
    events = read_run(workdir).events
    absorbed_by = {
        member: merge["into"]
        for merge in lines(events, "merge")
        for member in merge["members"]
        if member != merge["into"]
    }
    rows: list[tuple[str, ...]] = [_HEADER]
    for trainer, rounds in by_trainer(lines(events, "round")).items():
        first, last = rounds[0], rounds[-1]
        rows.append(
            (
                str(trainer),
                f"{first['round']}-{last['round']}",
                str(absorbed_by.get(trainer, "-")),
                f"{first['requested_batch_size']} -> {last['requested_batch_size']}",
                str(last["num_accum_steps"]),
                *(f"{sum(e[name] for e in rounds):,}" for name in ("tokens", "updates")),
                number(last["train_loss"]),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    header, *table = ["  ".join(map(str.rjust, row, widths)) for row in rows]
    facts = [f"{name:<16}{value}" for name, value in described(totals(events))]
    return "\n".join([header, "-" * len(header), *table, "", *facts])


_STRUCK = (
    "lost",
    "late",
    "clipped",
    "rejected",
    "refused",
)  # what became of learners and their rounds


def totals(events: Sequence[dict], trainer: int | None = None) -> dict:
    """The totals of a run by name, with the loss of the consensus or of a trainer.

    A total is None if the ledger lacks it, or if it was not finite.
    """
    rounds, programs, spent = (lines(events, *n) for n in (["round"], ["compile"], SPENDING))
    start, end = last(events, "start"), last(events, "end")
    who = "consensus" if trainer is None else trainer
    final = last([e for e in events if e.get("trainer") == who], "eval")
    gathered = gathering(events).get(final.get("round", 0), {})
    loss, classes = final.get("loss"), final.get("classes")
    unit = start["loss_unit"]
    tokens_per_byte = start.get("tokens_per_byte") if unit == "nats/token" else None
    nats_per_byte = None if loss is None or tokens_per_byte is None else loss * tokens_per_byte
    guesses = start["config"]["model"]["vocab_size"] if tokens_per_byte is not None else 0
    if classes and unit == "nats/example":
        guesses = len(classes)
    memory = lines(events, "memory")
    device = [peak for e in memory for peak in e["device_peak_bytes"] if peak is not None]
    in_learners = [e for e in rounds if "workers_counted" in e]
    happened = [e["what"] for e in lines(events, "learner")]
    expected, counted = (sum(e[n] for e in in_learners) for n in ("workers", "workers_counted"))
    return {
        "rounds": max((e["round"] for e in rounds), default=0),
        "tokens_total": sum(e.get("tokens", 0) for e in spent),
        "updates_total": sum(e.get("updates", 0) for e in spent),
        "syncs_total": sum(e.get("syncs", 0) for e in spent),
        "bytes_total": sum(e.get("bytes", 0) for e in spent),
        "consensus_syncs": gathered.get("syncs", 0),
        "consensus_bytes": gathered.get("bytes", 0),
        "num_merges": len(lines(events, "merge")),
        "num_refusals": len(lines(events, "refusal")),
        "num_batch_growths": sum(e["next_batch_size"] > e["requested_batch_size"] for e in rounds),
        **{f"learners_{what}": happened.count(what) for what in _STRUCK},
        # Worker rounds in learners: the expected number, and the number that counted.
        "worker_rounds": expected,
        "worker_rounds_counted": counted,
        "participation": counted / expected if expected else None,
        "goodput": goodput(events),
        **{
            f"learners_{use}_s": sum(e.get(f"{use}_s") or 0.0 for e in in_learners)
            for use in (*USES, "lost")
        },
        "num_programs": len(programs),
        "num_programs_cached": sum(e["cache"] == "hit" for e in programs),
        # Peak memory of the host, of the fullest device, and of the largest program.
        "host_peak_bytes": max((e["host_peak_bytes"] for e in memory), default=None),
        "device_peak_bytes": max(device, default=None),
        "program_bytes": max((e.get("needed_bytes") or 0 for e in programs), default=0) or None,
        **{f"{name}_s": value for name, value in seconds_by_use(events).items()},
        "tokens_per_s": end.get("tokens_per_s"),
        "wall_s": max((e["wall_s"] for e in events if e.get("wall_s") is not None), default=None),
        "loss": loss,
        "loss_unit": unit,
        "loss_round": final.get("round"),
        "loss_source": final.get("source"),
        "loss_average": final.get("average"),
        "chance_loss": math.log(guesses) if guesses else None,  # loss of a uniform guess
        **{name: final.get(name) for name in ("perplexity", "accuracy", "classes")},
        "nats_per_byte": nats_per_byte,
        "bits_per_byte": None if nats_per_byte is None else nats_per_byte / math.log(2),
    }


def goodput(events: Sequence[dict]) -> float | None:
    """Goodput of a run: counted tokens / (seconds up × rate), from 0 to about 1.

    Seconds up are summed over all processes, from their start until their end (`up_s`).
    The rate is a process's tokens per second in rounds without a fault: every worker counted, and
    no learner joined, left, was lost, late, clipped, rejected or refused. A trainer's first round,
    which compiles, is not used. None: without learners or such a round.
    """
    done = np.zeros((2, 2))  # tokens and seconds: of all rounds, of those without a fault
    started: set[int] = set()  # trainers that have made a round since the start
    together = itertools.groupby(lines(events, "start", "round", "learner"), _written_with)
    is_struck = False
    for group in ([*each] for _, each in together):
        is_calm, is_struck = not is_struck, group[0]["event"] == "learner"
        if group[0]["event"] == "start":
            started.clear()
        if group[0]["event"] != "round":
            continue
        spent = [sum(e["tokens"] for e in group), sum(e.get("up_s") or 0.0 for e in group)]
        trainers = {e["trainer"] for e in group}
        is_calm &= trainers <= started
        is_calm &= all(e.get("workers_counted") == e["workers"] for e in group)
        done += np.array([spent, spent if is_calm else [0.0, 0.0]])
        started.update(trainers)
    (tokens, up_s), (calm_tokens, calm_up_s) = done.tolist()
    return tokens / up_s * calm_up_s / calm_tokens if up_s and calm_tokens else None


def _written_with(event: dict) -> tuple:
    """Key of lines of a ledger that were written together."""
    return event["event"], event.get("step_s")


def described(t: dict) -> list[tuple[str, str]]:
    """The `totals` of a run as text, in pairs of a name and a value."""
    uses = {
        "start": t["start_s"],
        "compiling": t["compile_s"] + t["stall_s"],  # before the rounds, and while they waited
        "rounds": t["rounds_s"] - t["stall_s"],
        "evaluation": t["eval_s"],
    }
    compiled = t["num_programs"] - t["num_programs_cached"]
    peaks = {"host {} peak": "host_peak_bytes", "device {} peak": "device_peak_bytes"}
    peaks |= {"largest program {}": "program_bytes"}
    known = [s.format(in_bytes(t[name])) for s, name in peaks.items() if t[name] is not None]
    facts = {
        "rounds": f"{t['rounds']:,}",
        "tokens": f"{t['tokens_total']:,}",
        "updates": f"{t['updates_total']:,}",
        "synchronised": f"{t['syncs_total']:,} times, blocking, summed over trainers;"
        f" {in_bytes(t['bytes_total'])} moved",
    }
    if t["consensus_syncs"]:
        gathered = in_bytes(t["consensus_bytes"])
        facts[""] = f"and {t['consensus_syncs']} with {gathered}, to average the consensus"
    refused = f", {t['num_refusals']} refused" if t["num_refusals"] else ""
    facts |= {
        "merges": f"{t['num_merges']}{refused}",
        "batch growths": str(t["num_batch_growths"]),
        "programs": f"{compiled} compiled, {t['num_programs_cached']} from the cache",
        "memory": ", ".join(known) or "-",
        "wall time": seconds(t["wall_s"]),
        "of which": ", ".join(f"{use} {seconds(spent_s)}" for use, spent_s in uses.items()),
    }
    if t["tokens_per_s"] is not None:
        facts["speed"] = f"{t['tokens_per_s']:,.0f} tokens/s"
    if t["participation"] is not None:
        facts["learners"] = ", ".join(f"{t[f'learners_{what}']} {what}" for what in _STRUCK)
        counted = f"{t['worker_rounds_counted']:,} of {t['worker_rounds']:,}"
        facts["participation"] = f"{t['participation']:.1%}: {counted} workers' rounds counted"
    if t["goodput"] is not None:
        facts["goodput"] = f"{t['goodput']:.1%} of the tokens that learners could train on while up"
    spent = {use: t[f"learners_{use}_s"] for use in (*USES, "lost")}
    if any(spent.values()):
        facts["learners say"] = ", ".join(f"{use} {seconds(s)}" for use, s in spent.items())
    return [*facts.items(), *_heldout(t)]


def _heldout(t: dict) -> list[tuple[str, str]]:
    if t["loss_round"] is None:
        return [("held-out loss", "not evaluated")]
    source = SOURCES.get(t["loss_source"], "consensus")
    measured = f"{source} after round {t['loss_round']}"
    if t["loss_average"]:
        measured += f", running average over rounds ({t['loss_average']:g} of the old)"
    if t["loss"] is None:
        return [("held-out loss", f"not finite, {measured}")]
    names = ("accuracy", "perplexity", "nats_per_byte", "bits_per_byte")
    scores = [name for name in names if t[name] is not None]
    chance = "" if t["chance_loss"] is None else f" (chance {t['chance_loss']:.2f})"
    shown = f"{number(t['loss'])} {t['loss_unit']}".rstrip()
    facts = [("held-out loss", f"{shown}{chance}, {measured}")]
    facts += [(name.replace("_", " "), number(t[name])) for name in scores]
    for label, row in enumerate(t["classes"] or []):
        named = {name: row[name] for name in ("precision", "recall", "f1")}
        shown = [f"{k} -" if v is None else f"{k} {v:.3f}" for k, v in named.items()]
        facts.append((f"class {label}", f"{', '.join(shown)}, of {row['support']}"))
    return facts


def markdown(text: str) -> str:
    """Put text on one line, and escape it for Markdown, HTML and mathematics."""
    return re.sub(r"([\\`*_{}\[\]<>|$#~&])", r"\\\1", " ".join(text.split()))


def number(value: float | None) -> str:
    """Format a loss or a score with four decimals; None becomes "not finite"."""
    return "not finite" if value is None else f"{value:.4f}" if value < 1e5 else f"{value:.3e}"


def seconds(value: float | None) -> str:
    """Format a duration: 42 becomes "42.0 s", and 3723 becomes "1:02:03"."""
    if value is None:
        return "-"
    return f"{value:.1f} s" if value < 60 else str(timedelta(seconds=round(value)))


def short(value: float, unit: str = "") -> str:
    """Format a number with three significant digits: 2500000 becomes "2.5 M"."""
    value = float(f"{value:.3g}")
    power = min(5, int(math.log10(abs(value)) // 3)) if abs(value) >= 1000 else 0
    return f"{value / 1000**power:g} {'kMGTP'[power - 1] if power else ''}{unit}".rstrip()
