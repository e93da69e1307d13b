"""A run in numbers and in words: its totals, and the table that ends it."""

import math
import os
from collections.abc import Sequence
from datetime import timedelta

from adloco_jax.study.curves import by_trainer, gathering, lines, read_run, spending

_HEADER = ("trainer", "rounds", "merged into", "batch", "accum", "tokens", "updates", "train loss")


def closing_table(workdir: str | os.PathLike[str]) -> str:
    """Sets the table that ends a run: a line per trainer, then the totals.

    Args:
      workdir: The run's folder. A run that was cut short, or still goes on, gives the table of
        what it has done so far.

    Returns:
      Plain text of several lines, at most 80 columns for the usual magnitudes.

    Raises:
      DataError: If the folder holds no ledger, or a damaged one.
    """
    events = read_run(workdir).events
    absorbed_by = {
        member: merge["into"]
        for merge in lines(events, "merge")
        for member in merge["members"]
        if member != merge["into"]
    }
    rows = [_HEADER]
    for trainer, rounds in by_trainer(lines(events, "round")).items():
        first, last = rounds[0], rounds[-1]
        rows.append(
            (
                str(trainer),
                f"{first['round']}-{last['round']}",
                str(absorbed_by.get(trainer, "-")),
                f"{first['requested_batch_size']} -> {last['requested_batch_size']}",
                str(last["num_accum_steps"]),
                f"{sum(e['tokens'] for e in rounds):,}",
                f"{sum(e['updates'] for e in rounds):,}",
                number(last["train_loss"]),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    text.insert(1, "-" * len(text[0]))
    text.append("")
    text += [f"{name:<16}{value}" for name, value in described(totals(events))]
    return "\n".join(text)


def totals(events: Sequence[dict]) -> dict[str, int | float | str | list | None]:
    """The run in numbers; None for what the ledger does not tell (yet), or was not finite."""
    rounds, merges, programs = (lines(events, name) for name in ("round", "merge", "compile"))
    start = next(reversed(lines(events, "start")), {})
    end = next(reversed(lines(events, "end")), {})
    evals = [e for e in lines(events, "eval") if e["trainer"] == "consensus"]
    final = evals[-1] if evals else {}
    gathered = gathering(events).get(final.get("round", 0), {})
    loss = final.get("loss")
    tokens_per_byte = start.get("tokens_per_byte")
    nats_per_byte = None if loss is None or tokens_per_byte is None else loss * tokens_per_byte
    return {
        "rounds": max((e["round"] for e in rounds), default=0),
        "tokens_total": sum(e["tokens"] for e in rounds),
        "updates_total": sum(e["updates"] for e in rounds),
        "syncs_total": sum(e["syncs"] for e in spending(events)),
        "bytes_total": sum(e["bytes"] for e in spending(events)),
        "consensus_syncs": gathered.get("syncs", 0),
        "consensus_bytes": gathered.get("bytes", 0),
        "num_merges": len(merges),
        "num_refusals": len(lines(events, "refusal")),
        "num_batch_growths": sum(e["next_batch_size"] > e["requested_batch_size"] for e in rounds),
        "first_accumulating_round": min(
            (e["round"] for e in rounds if e["num_accum_steps"] > 1), default=None
        ),
        "num_programs": len(programs),
        "num_programs_cached": sum(e["cache"] == "hit" for e in programs),
        "compile_s": sum(e["seconds"] for e in programs),
        **peaks(events),
        **{name: end.get(name) for name in ("tokens_per_s", "share_of_matmul")},
        "wall_s": max((e["wall_s"] for e in events if e.get("wall_s") is not None), default=None),
        "loss": loss,
        "loss_round": final.get("round"),
        "loss_source": final.get("source"),
        "perplexity": final.get("perplexity"),
        "accuracy": final.get("accuracy"),
        "classes": final.get("classes"),
        "nats_per_byte": nats_per_byte,
        "bits_per_byte": None if nats_per_byte is None else nats_per_byte / math.log(2),
    }


def peaks(events: Sequence[dict]) -> dict[str, int | None]:
    """Bytes: the most that was held, of a device the fullest one's, and the largest program's."""
    measured = lines(events, "memory")
    device = [peak for e in measured for peak in e["device_peak_bytes"] if peak is not None]
    needed = [e["needed_bytes"] for e in lines(events, "compile") if e.get("needed_bytes")]
    return {
        "host_peak_bytes": max((e["host_peak_bytes"] for e in measured), default=None),
        "device_peak_bytes": max(device, default=None),
        "program_bytes": max(needed, default=None),
    }


def _memory_in_words(totals: dict) -> str:
    named = {
        "host {} peak": totals["host_peak_bytes"],
        "device {} peak": totals["device_peak_bytes"],
        "largest program {}": totals["program_bytes"],
    }
    known = [text.format(in_bytes(value)) for text, value in named.items() if value is not None]
    return ", ".join(known) or "-"


def _gathering_in_words(totals: dict) -> list[tuple[str, str]]:
    if not totals["consensus_syncs"]:
        return []
    moved = in_bytes(totals["consensus_bytes"])
    return [("", f"and {totals['consensus_syncs']} with {moved}, to average the consensus")]


def described(totals: dict) -> list[tuple[str, str]]:
    """The totals, as `totals` gives them, in words: name and value of each line."""
    refused, accumulating = totals["num_refusals"], totals["first_accumulating_round"]
    facts = [
        ("rounds", f"{totals['rounds']:,}"),
        ("tokens", f"{totals['tokens_total']:,}"),
        ("updates", f"{totals['updates_total']:,}"),
        (
            "communications",
            f"{totals['syncs_total']:,} blocking, summed over trainers; "
            f"{in_bytes(totals['bytes_total'])} moved",
        ),
        *_gathering_in_words(totals),
        ("merges", f"{totals['num_merges']}" + (f", {refused} refused" if refused else "")),
        (
            "batch growths",
            f"{totals['num_batch_growths']}"
            + (f", accumulating from round {accumulating}" if accumulating else ""),
        ),
        (
            "programs",
            f"{totals['num_programs']} compiled in {seconds(totals['compile_s'])}, "
            f"{totals['num_programs_cached']} of them from the cache",
        ),
        ("memory", _memory_in_words(totals)),
        ("wall time", seconds(totals["wall_s"])),
    ]
    if totals["tokens_per_s"] is not None:
        share = f"{totals['share_of_matmul']:.1%} of a matrix product's rate"
        facts.append(("speed", f"{totals['tokens_per_s']:,.0f} tokens/s, {share}"))
    if totals["loss_round"] is None:
        return [*facts, ("held-out loss", "not evaluated")]
    measured = f"consensus ({totals['loss_source']}) after round {totals['loss_round']}"
    if totals["loss"] is None:
        return [*facts, ("held-out loss", f"not finite, {measured}")]
    if totals["classes"] is not None:
        facts += [
            ("held-out loss", f"{number(totals['loss'])} nats/example, {measured}"),
            ("accuracy", number(totals["accuracy"])),
        ]
        for label, scores in enumerate(totals["classes"]):
            named = {name: scores[name] for name in ("precision", "recall", "f1")}
            shown = [f"{name} {_number_or_dash(value)}" for name, value in named.items()]
            facts.append((f"class {label}", f"{', '.join(shown)}, of {scores['support']}"))
        return facts
    facts += [
        ("held-out loss", f"{number(totals['loss'])} nats/token, {measured}"),
        ("perplexity", number(totals["perplexity"])),
    ]
    if totals["nats_per_byte"] is not None:
        facts.append(("nats per byte", number(totals["nats_per_byte"])))
        facts.append(("bits per byte", number(totals["bits_per_byte"])))
    return facts


def number(value: float | None) -> str:
    """A loss, or the like, to four decimals."""
    return "not finite" if value is None else f"{value:.4f}" if value < 1e5 else f"{value:.3e}"


def _number_or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def seconds(value: float | None) -> str:
    """A duration: seconds, from a minute on hours, minutes and seconds."""
    if value is None:
        return "-"
    return f"{value:.1f} s" if value < 60 else str(timedelta(seconds=round(value)))


def in_bytes(value: float) -> str:
    """A number of bytes in the binary unit that a person would take."""
    power = min(4, max(0, int(value).bit_length() - 1) // 10)
    return f"{value / 1024**power:,.4g} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
