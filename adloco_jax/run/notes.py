"""What the terminal says of growth, workers that join, and merges."""

from adloco_jax.loop.growth import Decision
from adloco_jax.settings import Settings


def decided(decision: Decision, settings: Settings) -> dict:
    """A decision's fields of the ledger."""
    fields = decision._asdict()
    del fields["next_round_length"]
    return fields | {"next_steps_per_round": _next_steps(decision, settings)}


def _next_steps(decision: Decision, settings: Settings) -> int | None:
    """Steps of the trainer's next round; None if a rule for them decides when it begins."""
    inner = settings.inner
    is_known = inner.round_length == "fixed"
    return decision.next_round_length * inner.steps_per_round if is_known else None


def of_round(line: dict, decision: Decision, settings: Settings) -> list[str]:
    """Lines on a trainer's round: skipped updates, growth and its reason."""
    where = f"round {line['round']}: trainer {line['trainer']}"
    skipped, grown = line["skipped_updates"], _growth(line, decision, settings)
    lines = [f"{where} {grown}"] if grown else []
    if skipped:
        lines.append(f"{where} skipped {skipped} updates whose loss or gradient was not finite")
    return lines


def of_change(change: dict, settings: Settings) -> str:
    """The line on a change at a round's boundary; empty if the terminal shows none."""
    note = _OF_CHANGES.get(change["event"])
    return note(change, settings) if note else ""


def _growth(line: dict, decision: Decision, settings: Settings) -> str:
    requested = f"the test requests {decision.test_value or 0.0:.1f}"
    why = {
        "capped": f"{requested}, held by a cap or by max_growth",
        "signal": "no signal above the noise yet, one step of growth",
        "held": "no signal above the noise, held by batching.max_blind_growth",
        "schedule": "as declared",
    }.get(decision.reason, requested)
    changes = {
        "batch per worker": (line["requested_batch_size"], decision.next_batch_size),
        "steps per round": (line["steps_per_round"], _next_steps(decision, settings)),
    }
    shown = [f"{name} {a} -> {b}" for name, (a, b) in changes.items() if b not in (a, None)]
    if decision.reason == "held":
        shown = ["its size stays"]
    return f"{', '.join(shown)} ({why})" if shown else ""


def _spawn(event: dict, settings: Settings) -> str:
    reason = "the test requests a larger batch than the present workers have"
    if event["reason"] == "spawn_frac":
        reason = f"{settings.ensemble.spawn_frac:g} of the run is done"
    return (
        f"round {event['round']}: trainer {event['trainer']} has {event['workers_after']} workers"
        f" from here on (was {event['workers_before']}): {reason}"
    )


def _merge(event: dict, settings: Settings) -> str:
    if "action" in event:
        return (
            f"round {event['round']}: merging trainers {event['members']} would raise the loss by"
            f" {event['barrier']:.4f} nats/token over their mean, more than"
            f" merge.max_barrier={settings.merge.max_barrier} allows: {event['action']}"
        )
    losses = ", ".join(f"{loss:.4f}" for loss in event["loss_before"])
    return (
        f"round {event['round']}: trainers {event['members']} merge into {event['into']}, held-out"
        f" loss {losses} -> {event['loss_after']:.4f}; workers {event['workers']}"
    )


def _quarantine(event: dict, settings: Settings) -> str:
    return (
        f"round {event['round']}: trainer {event['trainer']} leaves the run with its workers: its"
        f" last {event['skipped_in_a_row']} updates were not finite"
    )


_OF_CHANGES = dict(spawn=_spawn, merge=_merge, refusal=_merge, fault=_quarantine)
