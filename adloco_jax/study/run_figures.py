"""Figures of one run over its rounds: its trainers, batches, tests and training.

They are drawn from `round` and `merge` lines of the ledger, dicts: a `round` line tells of one
trainer's round, a `merge` line which trainers became one. Positions in a figure are fractions of
its width and height, so that it stretches with the page.

A trainer is a model in training; its workers train copies of it. A batch is what an update uses: of
each worker some micro-batches, which are accumulated. A worker's round counts if its result was
used. A lane is the horizontal strip of a trainer in a figure over rounds.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from adloco_jax.errors import counted
from adloco_jax.study import chart, curves, loss
from adloco_jax.study.chart import Axis, Curve, escaped, step_curve
from adloco_jax.study.curves import RunRecord
from adloco_jax.study.page import figure

_MAX_BARS = 100  # bars of all lanes together, so that a page stays small
_LEAST_BARS = 8  # bars that each lane has nevertheless, if its batch changes so often
_TEXT_LANE_PX = 18  # least height of a lane whose bars have their batches as text
_TEXT_PX = 13  # height of a line of text


def life(run: RunRecord) -> str:
    """Draw the trainers of a run over its rounds, each as bars in a lane, and its merges.

    The run has completed a round at least. Returns the HTML of the figure.
    """
    rounds = curves.lines(run.events, "round")
    merged = curves.lines(run.events, "merge")
    by_trainer = curves.by_trainer(rounds)
    order = _order_of_lanes([*by_trainer], merged)
    # By trainer, how far the middle of its lane is from the top, 0 to 1.
    middles = {trainer: (lane + 0.5) / len(order) for lane, trainer in enumerate(order)}
    # A lane is at most 32 pixels high; less if all would not fit 320, but at least 9 to be seen.
    lane_px = max(9, min(32, 320 // len(order)))
    numbers = [e["round"] for e in rounds]
    x = _round_axis([min(numbers) - 1, *numbers])  # a round is drawn from the end of the one before
    looks = loss.trainer_looks(run)  # by trainer: the CSS class of its colour, and its label
    most = max(1, *map(_batch, rounds))  # the largest batch; 1 if no worker ever counted
    body = ""
    for trainer, lines in by_trainer.items():
        color, _ = looks[trainer]
        bars = _lane_svg(lines, x, middles[trainer], lane_px, len(order), most)
        body += f'<g class="{color}">{bars}</g>'
    for event in merged:
        body += _merge_svg(event, x, middles)
    every = math.ceil(_TEXT_PX / lane_px)  # ids that would overlap are left out
    drawn = chart.frame(
        x,
        body,
        title="The trainers, round by round",
        height=lane_px * len(order),
        left=[(middles[trainer], str(trainer)) for trainer in order[::every]],
        y_label="trainer",
        classes=" life",  # with a space, because it is appended to other classes
    )
    text = "The trainers. Number and thickness: sequences of an update, of workers that counted."
    if merged:
        text += " Lines are merges: the trainer with the filled dot absorbs those with hollow ones."
    return figure(drawn.html(), text)


def _round_axis(rounds: Iterable[float]) -> Axis:
    """Make the horizontal axis of a figure over rounds."""
    return chart.axis("round", rounds, whole=True, max_ticks=8)


def _sequences(e: dict) -> int:
    """Return how many sequences each worker uses for an update, from a `round` line."""
    return e["micro_batch_size"] * e["num_accum_steps"]


def _batch(e: dict) -> int:
    """Return how many sequences all counted workers use for an update, from a `round` line."""
    return _workers(e) * _sequences(e)


def _workers(e: dict) -> int:
    """Return the number of workers whose round counted; without learners, of all.

    `e` is a `round` line, which has `workers_counted` only in a run with learners.
    """
    return e.get("workers_counted", e["workers"])


def _order_of_lanes(trainers: Sequence[int], merged: Sequence[dict]) -> list[int]:
    """Order the trainers from top to bottom, so that lines of merges cross no active trainer.

    `merged` are the `merge` lines of the ledger. The members of a merge are placed just below the
    trainer that absorbs them, those of an earlier merge nearer to it than those of a later one.
    """
    order = list(trainers)
    # From the last merge to the first, because what is placed last stands nearest.
    for event in reversed(merged):
        for member in reversed(event["members"]):
            if member != event["into"]:
                order.remove(member)
                order.insert(order.index(event["into"]) + 1, member)
    return order


def _lane_svg(
    lines: Sequence[dict], x: Axis, middle: float, lane_px: int, num_lanes: int, most: int
) -> str:
    """Draw a trainer's lane: a bar for each stretch of rounds in which the batch stays the same.

    The thicker a bar, the larger the batch. The batch is written at the bar's beginning, unless the
    lane is too low or the text would overlap the one before.

    Args:
      lines: The trainer's `round` lines of the ledger, in order.
      x: The axis of rounds.
      middle: Distance of the lane's middle from the top, 0 to 1.
      lane_px: Height of the lane, in pixels.
      num_lanes: Number of lanes in the figure.
      most: The largest batch of all trainers, in sequences, whose bar is the thickest.

    Returns:
      The bars as SVG.
    """
    # The `round` lines at which a stretch begins: workers, micro-batch or accumulation differ from
    # the line before.
    starts = []
    batch_before = None
    for e in lines:
        batch = (_workers(e), e["micro_batch_size"], e["num_accum_steps"])
        if batch != batch_before:
            starts.append(e)
        batch_before = batch
    # Of too many stretches only some are drawn, each until the next one that is drawn begins.
    max_bars = max(_LEAST_BARS, _MAX_BARS // num_lanes)
    starts = starts[:: math.ceil(len(starts) / max_bars)]
    ends = [e["round"] - 1 for e in starts[1:]]  # the last round of each bar
    ends.append(lines[-1]["round"])

    parts = []
    free = 0.0  # a text that begins here or later overlaps no other
    for e, end in zip(starts, ends, strict=True):
        left = x.at(e["round"] - 1)  # a round is drawn from the end of the one before
        right = x.at(end)
        # The thickness: from 0.15 of the lane on to 0.85, with the logarithm of the batch.
        share_of_lane = 0.15 + 0.7 * math.log2(1 + _batch(e)) / math.log2(1 + most)
        size = share_of_lane / num_lanes  # as a fraction of the figure's height
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
        if lane_px >= _TEXT_LANE_PX and left >= free:
            parts.append(
                f'<text class="size" x="{left:.2%}" dx=".7em" y="{middle:.2%}">{text}</text>'
            )
            # A margin, and the width of each character, as fractions of a phone's width.
            free = left + 0.02 + 0.024 * len(text)
    return "".join(parts)


def _merge_svg(event: dict, x: Axis, middles: Mapping[int, float]) -> str:
    """Draw a merge as SVG: a line over the lanes of its trainers, with a dot on each.

    `event` is the line of the ledger, `x` the axis of rounds, and `middles` are, by trainer, the
    distances of the lanes' middles from the top, 0 to 1.
    """
    across = f"{x.at(event['round']):.2%}"  # where the round ends
    into = event["into"]
    from_top = sorted({into, *event["members"]}, key=lambda trainer: middles[trainer])
    rows = {trainer: f"{middles[trainer]:.2%}" for trainer in from_top}
    top = rows[from_top[0]]
    bottom = rows[from_top[-1]]
    marks = f'<line x1="{across}" x2="{across}" y1="{top}" y2="{bottom}"/>'
    for trainer, row in rows.items():
        css_class = ""
        if trainer == into:
            css_class = ' class="into"'
        marks += f'<circle{css_class} cx="{across}" cy="{row}" r="4"/>'
    title = f"round {event['round']}: {' + '.join(map(str, event['members']))} into {into}"
    return f'<g class="event"><title>{title}</title>{marks}</g>'


# The charts over rounds, by the label of their axis: the base of a logarithmic axis (0: linear),
# and by field of a `round` line the CSS class of its dashes; empty: its curves are solid.
# "effective" is no field: it is computed as the batch that the updates used.
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
    """Draw the batch of each round, what the batch-size test measured, and the training.

    Returns the HTML of the figure: a chart for each of `_PANELS` of which the run has a value, with
    a curve for each trainer and field.
    """
    looks = loss.trainer_looks(run)
    drawn = ""
    by_trainer = curves.by_trainer(curves.lines(run.events, "round"))
    for label, (base, fields) in _PANELS.items():
        lines = []  # a curve for each field and trainer
        all_x = []
        all_y = []
        for name, dashes in fields.items():
            for trainer, events in by_trainer.items():
                values = []  # of the field, a value for each round
                for e in events:
                    value = e.get(name)  # None: not measured, not finite, or not in the line
                    if name == "effective":  # no field: the batch that the updates used
                        value = _sequences(e)
                    if value is None or value <= 0:  # what a logarithmic axis cannot show
                        value = math.nan  # drawn as a gap
                    values.append(value)
                # The curve is level within a round.
                x, y = step_curve([e["round"] for e in events], values)
                color, trainer_label = looks[trainer]
                if dashes:
                    trainer_label = ""  # the curve of the panel's first field has it
                curve = Curve(x, y, f"{color} {dashes}", trainer_label, f"trainer {trainer}")
                lines.append(curve)
                all_x += x
                all_y += y
        if any(map(math.isfinite, all_y)):  # else the run has no such value
            y_axis = chart.axis(label, all_y, base=base)
            drawn += chart.chart(_round_axis(all_x), y_axis, lines, title=label).html()
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
