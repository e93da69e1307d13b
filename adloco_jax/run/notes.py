"""What the terminal says of growth, workers that join, and merges."""

from adloco_jax.loop.growth import Decision
from adloco_jax.settings import Settings


def decided(decision: Decision, settings: Settings) -> dict:
    """A decision's fields of the ledger."""
    fields = decision._asdict()
    size = fields.pop("size")
    return fields | {
        "next_workers": size.num_workers,
        "next_steps_per_round": _next_steps(decision, settings),
        "next_batch_size": size.batch_size,
    }


def _next_steps(decision: Decision, settings: Settings) -> int | None:
    """Steps of the trainer's next round; None if a rule for them decides when it begins."""
    inner = settings.inner
    is_known = inner.round_length == "fixed"
    return decision.size.round_length * inner.steps_per_round if is_known else None


def of_round(line: dict, decision: Decision, settings: Settings) -> list[str]:
    """Lines on a trainer's round: skipped updates, growth and its reason."""
    where = f"round {line['round']}: trainer {line['trainer']}:"
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
    batching, requested = settings.batching, f"the test asks for {decision.test_value or 0.0:.1f}"
    limit = "batching.max_growth"
    if "batch" not in batching.growth:
        limit = "batching.growth, which has no 'batch'"
    elif decision.size.batch_size >= batching.batch_cap:
        limit = "batching.batch_cap"
    why = {
        "capped": f"{requested}, limited by {limit}",
        "signal": "no signal above the noise yet, so one step of growth",
        "held": "no signal above the noise, limited by batching.max_blind_growth",
        "schedule": "as declared",
    }.get(decision.reason, requested)
    changes = {
        "batch per worker": (line["requested_batch_size"], decision.size.batch_size),
        "updates per round": (line["steps_per_round"], _next_steps(decision, settings)),
    }
    shown = [f"{name} {a} -> {b}" for name, (a, b) in changes.items() if b not in (a, None)]
    if decision.reason == "held":
        shown = ["batch per worker stays"]
    return f"{', '.join(shown)} ({why})" if shown else ""


def _spawn(event: dict, settings: Settings) -> str:
    reason = "the test asks for a larger batch than the workers of now have"
    if event["reason"] == "spawn_frac":
        reason = f"{settings.ensemble.spawn_frac:g} of the run is done (ensemble.spawn_frac)"
    return (
        f"round {event['round']}: trainer {event['trainer']}: workers {event['workers_before']} ->"
        f" {event['workers_after']} ({reason})"
    )


def _merge(event: dict, settings: Settings) -> str:
    members = ", ".join(map(str, event["members"]))
    if "action" in event:
        becomes = {"keep": "they go on", "retire": "the weaker one ends"}[event["action"]]
        return (
            f"round {event['round']}: trainers {members} do not merge: the loss would rise by"
            f" {event['barrier']:.4f} over their mean, more than"
            f" merge.max_barrier={settings.merge.max_barrier}; {becomes}"
        )
    losses = ", ".join(f"{loss:.4f}" for loss in event["loss_before"])
    return (
        f"round {event['round']}: trainers {members} merge into trainer {event['into']}: held-out"
        f" loss {losses} -> {event['loss_after']:.4f}"
    )


def _quarantine(event: dict, settings: Settings) -> str:
    return (
        f"round {event['round']}: trainer {event['trainer']} leaves the run with its workers: its"
        f" last {event['skipped_in_a_row']} updates were not finite"
    )


_OF_CHANGES = dict(spawn=_spawn, merge=_merge, refusal=_merge, fault=_quarantine)
