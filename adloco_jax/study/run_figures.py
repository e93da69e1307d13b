"""Figures of one run over its rounds: its trainers, batches, tests and training."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from adloco_jax.errors import counted
from adloco_jax.study import chart, curves, loss
from adloco_jax.study.chart import Axis, Curve, escaped, steps
from adloco_jax.study.curves import RunRecord
from adloco_jax.study.page import figure

_MAX_PARTS = 100  # parts of all lanes, so that a page of forty variants stays small


_TEXT_PX = 13  # height of a line of text


def life(run: RunRecord) -> str:
    """Draw trainers as bars over rounds, with batches and merges."""
    rounds = curves.lines(run.events, "round")
    merged = curves.lines(run.events, "merge")
    by_trainer = curves.by_trainer(rounds)
    order = _lanes([*by_trainer], merged)
    lanes = {trainer: (lane + 0.5) / len(order) for lane, trainer in enumerate(order)}
    lane_px = max(9, min(32, 320 // len(lanes)))
    x = _across(e["round"] - past for e in rounds for past in (0, 1))
    looks = loss.trainer_looks(run)
    most = max(1, *map(_batch, rounds))
    body = []
    for trainer, lines in by_trainer.items():
        color, _ = looks[trainer]
        bars = _lane(lines, x, lanes[trainer], lane_px, len(lanes), most)
        body.append(f'<g class="{color}">{bars}</g>')
    body += [_merge(event, x, lanes) for event in merged]
    every = math.ceil(_TEXT_PX / lane_px)  # ids that would overlap are left out
    drawn = chart.frame(
        x,
        "".join(body),
        title="The trainers, round by round",
        height=lane_px * len(lanes),
        left=[(lanes[trainer], str(trainer)) for trainer in order[::every]],
        y_label="trainer",
        classes=" life",
    )
    text = "The trainers. Number and thickness: sequences of an update, of workers that counted."
    if merged:
        text += " Lines are merges: the trainer with the filled dot absorbs those with hollow ones."
    return figure(drawn.html(), text)


def _across(rounds: Iterable[float]) -> Axis:
    return chart.axis("round", rounds, whole=True, max_ticks=8)


def _sequences(e: dict) -> int:
    """Number of sequences that each worker uses for an update, from a trainer's `round` line."""
    return e["micro_batch_size"] * e["num_accum_steps"]


def _batch(e: dict) -> int:
    return _workers(e) * _sequences(e)


def _workers(e: dict) -> int:
    """Number of workers whose round counted; without learners, of all."""
    return e.get("workers_counted", e["workers"])


def _lanes(trainers: Sequence[int], merged: Sequence[dict]) -> list[int]:
    """Order the trainers from top to bottom, so that lines of merges cross no active trainer."""
    order = list(trainers)
    for event in reversed(merged):  # earlier merges are moved later, and are closer
        for member in reversed(event["members"]):
            if member != event["into"]:
                order.remove(member)
                order.insert(order.index(event["into"]) + 1, member)
    return order


def _lane(
    lines: Sequence[dict], x: Axis, middle: float, lane_px: int, num_lanes: int, most: int
) -> str:
    """Draw a trainer's lane: a bar for each stretch of rounds with the same batch.

    `middle` is the lane's position from the top, 0 to 1; `most` the largest batch of all trainers.
    """
    changed = itertools.groupby(
        lines, lambda e: (_workers(e), e["micro_batch_size"], e["num_accum_steps"])
    )
    starts = [next(group) for _, group in changed]
    starts = starts[:: math.ceil(len(starts) / max(8, _MAX_PARTS // num_lanes))]
    ends = [e["round"] - 1 for e in starts[1:]] + [lines[-1]["round"]]
    parts = []
    free = 0.0  # from here on a text overlaps no other
    for e, end in zip(starts, ends, strict=True):
        left, right = x.at(e["round"] - 1), x.at(end)
        size = (0.15 + 0.7 * math.log2(1 + _batch(e)) / math.log2(1 + most)) / num_lanes
        title = (
            f"trainer {lines[0]['trainer']}, rounds {e['round']} to {end}:"
            f" {counted(_workers(e), 'worker')} × {counted(e['micro_batch_size'], 'sequence')}"
            f" × {e['num_accum_steps']} accumulated"
        )
        parts.append(
            f'<rect x="{left:.2%}" y="{middle - size / 2:.2%}" width="{right - left:.2%}"'
            f' height="{size:.2%}"><title>{escaped(title)}</title></rect>'
        )
        text = str(_batch(e))
        if lane_px >= 18 and left >= free:
            parts.append(
                f'<text class="size" x="{left:.2%}" dx=".7em" y="{middle:.2%}">{text}</text>'
            )
            free = left + 0.02 + 0.024 * len(text)  # in fractions of a phone's width
    return "".join(parts)


def _merge(event: dict, x: Axis, lanes: Mapping[int, float]) -> str:
    """Draw a merge: a line over the lanes of its trainers, with a dot on each."""
    across = f"{x.at(event['round']):.2%}"
    into = event["into"]
    from_top = sorted({into, *event["members"]}, key=lambda trainer: lanes[trainer])
    rows = {trainer: f"{lanes[trainer]:.2%}" for trainer in from_top}
    top = rows[from_top[0]]
    bottom = rows[from_top[-1]]
    marks = f'<line x1="{across}" x2="{across}" y1="{top}" y2="{bottom}"/>'
    for trainer, row in rows.items():
        kind = ' class="into"' if trainer == into else ""
        marks += f'<circle{kind} cx="{across}" cy="{row}" r="4"/>'
    title = f"round {event['round']}: {' + '.join(map(str, event['members']))} into {into}"
    return f'<g class="event"><title>{title}</title>{marks}</g>'


# The panels over rounds: base of the axis (0: linear), and classes by field.
_PANELS: Mapping[str, tuple[int, Mapping[str, str]]] = {
    "batch per worker (sequences)": (2, {"requested_batch_size": "", "effective": "d4"}),
    "accumulated micro-batches": (2, {"num_accum_steps": ""}),
    "noise tr Σ": (10, {"noise": ""}),
    "signal |G|²": (10, {"signal": ""}),
    "test value (sequences per worker)": (10, {"test_value": ""}),
    "training loss": (0, {"train_loss": ""}),
    "learning rate": (0, {"learning_rate": ""}),
}


def rounds(run: RunRecord) -> str:
    """Draw the batch of each round, what the batch-size test measured, and the training."""
    looks = loss.trainer_looks(run)
    drawn = ""
    by_trainer = curves.by_trainer(curves.lines(run.events, "round"))
    for label, (base, fields) in _PANELS.items():
        lines = []
        for name, classes in fields.items():
            for trainer, events in by_trainer.items():
                values = []
                for e in events:
                    value = _sequences(e) if name == "effective" else e.get(name)
                    values.append(value if value is not None and value > 0 else math.nan)
                x, y = steps([e["round"] for e in events], values)
                color, trainer_label = looks[trainer]
                # A second field of a panel, drawn with its own class, has no label.
                shown = "" if classes else trainer_label
                lines.append(Curve(x, y, f"{color} {classes}", shown, f"trainer {trainer}"))
        up = chart.axis(label, [v for line in lines for v in line.y], base=base)
        if any(math.isfinite(v) for line in lines for v in line.y):
            across = _across(v for line in lines for v in line.x)
            drawn += chart.chart(across, up, lines, title=label).html()
    test = run.start["config"]["batching"]["test"]
    text = (
        "The batch that a trainer requested (solid) and that its updates used (dashed); a device"
        f" holds {run.start['max_batch_size']}. At the start of each round the {test} test measures"
        " noise (variance of single sequences' gradients) and signal (squared norm of the mean"
        " gradient); its value is the batch that it asks for. The training loss is the mean of a"
        " round, the learning rate that of its last update. A gap is a value that was skipped, not"
        " finite, or not positive."
    )
    return figure(drawn, text)
