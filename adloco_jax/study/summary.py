"""The totals of a run as numbers and as text, and the table that is printed at its end.

They are computed from the lines of its ledger, its log: dicts with their kind under `event`. A
trainer is a model in training; its workers train copies of it. A learner is another process that
trains workers; a worker's round counts if its result came in time and was used. `USES` names what a
learner does with its time. The consensus is the model that stands for all trainers. A
synchronisation counts as blocking, as if workers waited for it, also where Streaming DiLoCo lets
them go on.
"""

import itertools
import math
import os
import re
from collections.abc import Sequence
from datetime import timedelta

from adloco_jax.elastic.messages import USES
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

# In words, where the parameters of a consensus model come from: `source` of an `eval` line.
SOURCES = {"only": "the trainer", "best": "the best trainer", "average": "the trainers' average"}


def closing_table(workdir: str | os.PathLike[str]) -> str:
    """Make the table at the end (or present state) of a run: a line per trainer, then the totals.

    `workdir` is the folder of the run.

    Raises:
      DataError: If the folder has no ledger, or a damaged one.
    """
    events = read_run(workdir).events
    absorbed_by = {}  # by trainer that has merged into another: this other one
    for merge in lines(events, "merge"):
        for member in merge["members"]:
            if member != merge["into"]:
                absorbed_by[member] = merge["into"]

    rows: list[tuple[str, ...]] = [_HEADER]  # the cells of each line, as text
    for trainer, rounds in by_trainer(lines(events, "round")).items():
        begin = rounds[0]
        end = rounds[-1]
        tokens = sum(e["tokens"] for e in rounds)
        updates = sum(e["updates"] for e in rounds)
        row = (
            str(trainer),
            f"{begin['round']}-{end['round']}",
            str(absorbed_by.get(trainer, "-")),
            f"{begin['requested_batch_size']} -> {end['requested_batch_size']}",
            str(end["num_accum_steps"]),
            f"{tokens:,}",
            f"{updates:,}",
            number(end["train_loss"]),
        )
        rows.append(row)

    # All cells of a column are as wide as its widest, to the right.
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    printed = ["  ".join(map(str.rjust, row, widths)) for row in rows]
    header = printed[0]
    # The names take 16 characters, a little more than the longest.
    facts = [f"{name:<16}{value}" for name, value in totals_as_text(totals(events))]
    return "\n".join([header, "-" * len(header), *printed[1:], "", *facts])


# What can go wrong with a learner or with its round: `what` of a `learner` line. Lost: its process
# has ended, or is waited for no more. Late: it had not
# answered when the round ended. Clipped: its update was scaled down. Rejected: its update was not
# finite. Refused: it sent something else than was asked for.
_LEARNER_FAULTS = ("lost", "late", "clipped", "rejected", "refused")


def totals(events: Sequence[dict], trainer: int | None = None) -> dict:
    """Compute the totals of a run by name from the lines of its ledger.

    The loss and the other scores are those of the last evaluation of `trainer` (an id), or of the
    consensus model. The names are the keys of the dict that is returned below, in the order of
    `summary.json`. A refused merge (`num_refusals`) is one that was not made, as it would have
    raised the loss. Names such as `learners_lost` count what went wrong with learners, by the words
    of `_LEARNER_FAULTS`.

    A total is None if the ledger lacks it, or if it was not finite:

    - `participation` and `goodput` without learners, and `goodput` if its rate is not known
    - peaks of memory before the first `memory` line; that of devices also if none reports it, and
      `program_bytes` if no program says what it needs
    - `tokens_per_s` before the run's end, or if the last process ran no round
    - `wall_s` before the first evaluation and the end
    - all scores without an evaluation, of which `loss_round` is the round; `loss` also if it was
      not finite
    - `loss_average` unless models are averaged over rounds
    - `chance_loss` if the number of possible answers is not known
    - `perplexity` unless the loss is in nats/token, `accuracy` and `classes` unless the model is a
      classifier
    - scores per byte if the text's number of bytes is not known
    """
    # The lines that are needed, by event.
    rounds = lines(events, "round")
    programs = lines(events, "compile")
    spent = lines(events, *SPENDING)  # those with costs: of rounds, merges and growth
    start = last(events, "start")
    end = last(events, "end")
    who = "consensus" if trainer is None else trainer
    final = last([e for e in events if e.get("trainer") == who], "eval")  # empty: not evaluated
    # What it cost to gather the trainers for this evaluation.
    gathered = gathering(events).get(final.get("round", 0), {})

    # The loss, beside that of a guess, and per byte, by which tokenizers compare. A field that the
    # line lacks, as the model does not have it, is None.
    loss = final.get("loss")
    source = final.get("source")
    if trainer is not None:
        source = f"trainer {trainer}"
    classes = final.get("classes")
    unit = start["loss_unit"]
    tokens_per_byte = None
    num_guesses = None  # answers between which a guess by chance chooses
    if unit == "nats/token" and start.get("tokens_per_byte") is not None:
        tokens_per_byte = start["tokens_per_byte"]
        num_guesses = start["config"]["model"]["vocab_size"]
    if classes and unit == "nats/example":
        num_guesses = len(classes)
    chance_loss = None  # of a model for which all answers are equally likely
    if num_guesses:
        chance_loss = math.log(num_guesses)
    nats_per_byte = None
    bits_per_byte = None
    if loss is not None and tokens_per_byte is not None:
        nats_per_byte = loss * tokens_per_byte
        bits_per_byte = nats_per_byte / math.log(2)

    # The most memory that was used.
    memory = lines(events, "memory")
    device_peaks: list[int] = []
    for event in memory:
        device_peaks += [peak for peak in event["device_peak_bytes"] if peak is not None]
    # The largest program; 0: none says what it needs.
    program_bytes = max((e.get("needed_bytes") or 0 for e in programs), default=0)

    # The learners: how many rounds of their workers counted, what went wrong, and their time.
    in_learners = [e for e in rounds if "workers_counted" in e]  # rounds of a run with learners
    expected = sum(e["workers"] for e in in_learners)
    counted = sum(e["workers_counted"] for e in in_learners)
    participation = None
    if expected:
        participation = counted / expected
    # How often each thing that can go wrong with a learner has happened.
    happened = [e["what"] for e in lines(events, "learner")]
    num_troubles = {f"learners_{what}": happened.count(what) for what in _LEARNER_FAULTS}
    learners_s = {}  # seconds of all learners by use
    for use in (*USES, "lost"):
        learners_s[f"learners_{use}_s"] = sum(e.get(f"{use}_s") or 0.0 for e in in_learners)
    spent_s = seconds_by_use(events)  # seconds of the run by use
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
        **num_troubles,
        # Worker rounds in learners: the expected number, and the number that counted.
        "worker_rounds": expected,
        "worker_rounds_counted": counted,
        "participation": participation,
        "goodput": goodput(events),
        **learners_s,
        "num_programs": len(programs),
        "num_programs_cached": sum(e["cache"] == "hit" for e in programs),
        # Peak memory of the host, of the fullest device, and of the largest program.
        "host_peak_bytes": max((e["host_peak_bytes"] for e in memory), default=None),
        "device_peak_bytes": max(device_peaks, default=None),
        "program_bytes": program_bytes or None,
        "start_s": spent_s["start"],
        "compile_s": spent_s["compile"],
        "rounds_s": spent_s["rounds"],
        "stall_s": spent_s["stall"],
        "eval_s": spent_s["eval"],
        "tokens_per_s": end.get("tokens_per_s"),
        "wall_s": max((e["wall_s"] for e in events if e.get("wall_s") is not None), default=None),
        "loss": loss,
        "loss_unit": unit,
        "loss_round": final.get("round"),
        "loss_source": source,
        "loss_average": final.get("average"),
        "chance_loss": chance_loss,
        "perplexity": final.get("perplexity"),
        "accuracy": final.get("accuracy"),
        "classes": classes,
        "nats_per_byte": nats_per_byte,
        "bits_per_byte": bits_per_byte,
    }


def goodput(events: Sequence[dict]) -> float | None:
    """Return how much of the learners' time gave updates that counted, from 0 to about 1.

    It is the number of tokens that counted, over the number that the learners could have trained on
    while they were up. The latter is the seconds that they were up times the rate of one of them.

    The seconds (`up_s`) are those from a learner's start until its end, summed over all learners.
    The rate is a learner's tokens per second in calm rounds. In these every worker counted, and no
    learner joined, left, was lost, late, clipped, rejected or refused. A trainer's first round,
    which compiles, is not calm. Returns None without learners or without a calm round.
    """
    # Sums over all rounds, and over calm rounds.
    tokens = 0
    up_s = 0.0
    calm_tokens = 0
    calm_up_s = 0.0
    started: set[int] = set()  # trainers that have made a round since the start
    is_learner_line = False  # whether the group of lines is on learners: one has joined, left, ...
    # Groups of successive lines: of trainers that ended a round together, or on learners. A line
    # lacks `up_s` and `workers_counted` if the run had no learners.
    together = itertools.groupby(lines(events, "start", "round", "learner"), _group_key)
    for _, written in together:
        group = [*written]
        follows_learner_line = is_learner_line
        is_learner_line = group[0]["event"] == "learner"
        if group[0]["event"] == "start":  # new processes compile again
            started.clear()
        if group[0]["event"] != "round":
            continue
        group_tokens = sum(e["tokens"] for e in group)
        group_up_s = sum(e.get("up_s") or 0.0 for e in group)
        tokens += group_tokens
        up_s += group_up_s
        trainers = {e["trainer"] for e in group}
        none_compiles = trainers <= started
        all_counted = all(e.get("workers_counted") == e["workers"] for e in group)
        if not follows_learner_line and none_compiles and all_counted:
            calm_tokens += group_tokens
            calm_up_s += group_up_s
        started.update(trainers)
    if not up_s or not calm_tokens:
        return None
    # The tokens, over the seconds times the rate, which is calm_tokens / calm_up_s.
    return tokens / up_s * calm_up_s / calm_tokens


def _group_key(event: dict) -> tuple:
    """Return a key that successive lines share if they were written together.

    Trainers that end a round together state the same seconds (`step_s`). Lines of other kinds have
    none, so that all neighbours of one kind share a key.
    """
    return event["event"], event.get("step_s")


def totals_as_text(t: dict) -> list[tuple[str, str]]:
    """Return what `totals` returned as pairs of a name and a text, in the order of the table.

    An empty name continues the line before. The held-out loss and other scores come last.
    """
    run_s = {
        "start": t["start_s"],
        "compiling": t["compile_s"] + t["stall_s"],  # before the rounds, and while they waited
        "rounds": t["rounds_s"] - t["stall_s"],
        "evaluation": t["eval_s"],
    }
    of_which = [f"{use} {seconds(spent_s)}" for use, spent_s in run_s.items()]
    memory = []
    if t["host_peak_bytes"] is not None:
        memory.append(f"host {in_bytes(t['host_peak_bytes'])} peak")
    if t["device_peak_bytes"] is not None:
        memory.append(f"device {in_bytes(t['device_peak_bytes'])} peak")
    if t["program_bytes"] is not None:
        memory.append(f"largest program {in_bytes(t['program_bytes'])}")
    merges = str(t["num_merges"])
    if t["num_refusals"]:
        merges += f", {t['num_refusals']} refused"
    compiled = t["num_programs"] - t["num_programs_cached"]

    facts = {
        "rounds": f"{t['rounds']:,}",
        "tokens": f"{t['tokens_total']:,}",
        "updates": f"{t['updates_total']:,}",
        "synchronised": f"{t['syncs_total']:,} times, blocking, summed over trainers;"
        f" {in_bytes(t['bytes_total'])} moved",
    }
    if t["consensus_syncs"]:
        gathered = in_bytes(t["consensus_bytes"])
        # Without a name, so that it reads on from the line before.
        facts[""] = f"and {t['consensus_syncs']} with {gathered}, to average the consensus"
    facts["merges"] = merges
    facts["batch growths"] = str(t["num_batch_growths"])
    facts["programs"] = f"{compiled} compiled, {t['num_programs_cached']} from the cache"
    facts["memory"] = ", ".join(memory) or "-"
    facts["wall time"] = seconds(t["wall_s"])
    facts["of which"] = ", ".join(of_which)
    if t["tokens_per_s"] is not None:
        facts["speed"] = f"{t['tokens_per_s']:,.0f} tokens/s"
    if t["participation"] is not None:
        facts["learners"] = ", ".join(f"{t[f'learners_{what}']} {what}" for what in _LEARNER_FAULTS)
        counted = f"{t['worker_rounds_counted']:,} of {t['worker_rounds']:,}"
        facts["participation"] = f"{t['participation']:.1%}: {counted} workers' rounds counted"
    if t["goodput"] is not None:
        facts["goodput"] = f"{t['goodput']:.1%} of the tokens that learners could train on while up"
    # What learners say they did, and of lost ones the seconds since they last said so.
    learners_s = {use: t[f"learners_{use}_s"] for use in (*USES, "lost")}
    if any(learners_s.values()):
        told = [f"{use} {seconds(spent_s)}" for use, spent_s in learners_s.items()]
        facts["learners say"] = ", ".join(told)
    return [*facts.items(), *_scores_as_text(t)]


def _scores_as_text(t: dict) -> list[tuple[str, str]]:
    """Return the held-out loss and other scores as pairs of a name and a text.

    `t` is what `totals` returned, in which a score is None if it was not measured or not finite.
    """
    if t["loss_round"] is None:
        return [("held-out loss", "not evaluated")]
    source = t["loss_source"] or "consensus"
    measured = f"{SOURCES.get(source, source)} after round {t['loss_round']}"
    if t["loss_average"]:
        measured += f", running average over rounds ({t['loss_average']:g} of the old)"
    if t["loss"] is None:
        return [("held-out loss", f"not finite, {measured}")]
    loss = f"{number(t['loss'])} {t['loss_unit']}".rstrip()
    if t["chance_loss"] is not None:
        loss += f" (chance {t['chance_loss']:.2f})"
    facts = [("held-out loss", f"{loss}, {measured}")]
    for name in ("accuracy", "perplexity", "nats_per_byte", "bits_per_byte"):
        if t[name] is not None:  # those that this kind of model has
            facts.append((name.replace("_", " "), number(t[name])))
    for label, row in enumerate(t["classes"] or []):
        scores = []
        for name in ("precision", "recall", "f1"):
            shown = "-" if row[name] is None else f"{row[name]:.3f}"
            scores.append(f"{name} {shown}")
        facts.append((f"class {label}", f"{', '.join(scores)}, of {row['support']}"))
    return facts


def markdown(text: str) -> str:
    """Put text on one line, and escape it for Markdown, HTML and mathematics."""
    return re.sub(r"([\\`*_{}\[\]<>|$#~&])", r"\\\1", " ".join(text.split()))


def number(value: float | None) -> str:
    """Format a loss or a score with four decimals; None becomes "not finite"."""
    if value is None:
        return "not finite"
    if value < 1e5:  # larger ones, such as a perplexity, would be too long
        return f"{value:.4f}"
    return f"{value:.3e}"


def seconds(value: float | None) -> str:
    """Format a duration: 42 becomes "42.0 s", 3723 becomes "1:02:03", and None "-"."""
    if value is None:
        return "-"
    if value < 60:
        return f"{value:.1f} s"
    return str(timedelta(seconds=round(value)))


def short(value: float, unit: str = "") -> str:
    """Format a number with three significant digits: 2500000 becomes "2.5 M".

    `unit` follows the prefix: 2500 bytes with the unit B become "2.5 kB".
    """
    value = float(f"{value:.3g}")  # rounded first, so that 999.9 becomes "1 k"
    prefixes = ("", "k", "M", "G", "T", "P")
    power = 0  # of 1000
    if abs(value) >= 1000:
        power = min(len(prefixes) - 1, int(math.log10(abs(value)) // 3))
    # Without prefix and unit, the space is taken away again.
    return f"{value / 1000**power:g} {prefixes[power]}{unit}".rstrip()
