"""Figures of one run over its rounds: its trainers, batches, tests, seconds and learners."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from adloco_jax.errors import counted
from adloco_jax.study import chart, curves, loss, summary
from adloco_jax.study.chart import Axis, Curve, escaped, steps
from adloco_jax.study.curves import RunRecord
from adloco_jax.study.page import figure

_MAX_PARTS = 100  # parts of all lanes, so that a page of forty variants stays small

# The meaning of marks in the trainers' lanes; a caption explains the marks that are used.
_MARKS = {
    "merge": "the trainer with the filled dot absorbs those with hollow dots",
    "refusal": "dashed, a merge that the guard refused",
    "spawn": "+, workers were added",
    "fault": "✕, the trainer left, because its updates were not finite",
}


def life(run: RunRecord) -> str:
    """Draw trainers as bars over rounds, with batches, merges, refusals, joins and departures."""
    rounds = curves.lines(run.events, "round")
    by_trainer = curves.by_trainer(rounds)
    happened = [e for e in curves.lines(run.events, *_MARKS) if _concerned(e)]
    named = (t for event in happened for t in _concerned(event))
    order = _lanes(list(dict.fromkeys([*by_trainer, *named])), curves.lines(run.events, "merge"))
    lanes = {trainer: (lane + 0.5) / len(order) for lane, trainer in enumerate(order)}
    lane_px = max(9, min(32, 320 // len(lanes)))
    x = _across(e["round"] - past for e in rounds for past in (0, 1))
    looks, most = loss.trainer_looks(run), max(1, *map(_batch, rounds))
    body = [
        f'<g class="{looks[t][0]}">{_lane(lines, x, lanes[t], lane_px, len(lanes), most)}</g>'
        for t, lines in by_trainer.items()
    ]
    body += [_event(event, x, lanes) for event in happened]
    every = math.ceil(13 / lane_px)  # ids that would overlap are left out
    drawn = chart.frame(
        x,
        "".join(body),
        title="The trainers, round by round",
        height=lane_px * len(lanes),
        left=[(lanes[trainer], str(trainer)) for trainer in order[::every]],
        y_label="trainer",
        classes=" life",
    )
    marks = "; ".join(text for name, text in _MARKS.items() if curves.lines(happened, name))
    text = "The trainers. Number and thickness: sequences of an update, of workers that counted."
    return figure(drawn.html(), text + (f" Marks: {marks}." if marks else ""))


def _across(rounds: Iterable[float]) -> Axis:
    return chart.axis("round", rounds, whole=True, max_ticks=8)


def _concerned(event: dict) -> list[int]:
    """The ids of the trainers that an event of the ledger is about; empty if it is not drawn."""
    if event["event"] == "fault":
        return [event["trainer"]] if event.get("kind") == "quarantine" else []
    if event["event"] == "spawn":
        return [event["trainer"]] if "trainer" in event else []
    return [event["into"], *event["members"]]


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
    changed = itertools.groupby(
        lines, lambda e: (_workers(e), e["micro_batch_size"], e["num_accum_steps"])
    )
    starts = [next(group) for _, group in changed]
    starts = starts[:: math.ceil(len(starts) / max(8, _MAX_PARTS // num_lanes))]
    ends = [e["round"] - 1 for e in starts[1:]] + [lines[-1]["round"]]
    parts, free = [], 0.0
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


def _event(event: dict, x: Axis, lanes: Mapping[int, float]) -> str:
    number, name = event["round"], event["event"]
    across = f"{x.at(number):.2%}"
    rows = {t: f"{lanes[t]:.2%}" for t in sorted(_concerned(event), key=lambda t: lanes[t])}
    if name in ("merge", "refusal"):
        members = " + ".join(map(str, event["members"]))
        barrier = "not finite" if event["barrier"] is None else f"{event['barrier']:+.4f}"
        verb = "into" if name == "merge" else "not merged into"
        title = f"{members} {verb} {event['into']}, barrier {barrier} nats"
        top, *_, bottom = rows.values()
        marks = f'<line x1="{across}" x2="{across}" y1="{top}" y2="{bottom}"/>'
        for trainer in dict.fromkeys(_concerned(event)):
            into = ' class="into"' if trainer == event["into"] else ""
            marks += f'<circle{into} cx="{across}" cy="{rows[trainer]}" r="4"/>'
    else:
        [(trainer, row)] = rows.items()
        title, sign = f"trainer {trainer} left", "✕"
        if name == "spawn":
            before, after = event.get("workers_before"), event.get("workers_after")
            title, sign = f"trainer {trainer} from {before} to {after} workers", "+"
            title += f" ({event['reason']})" if event.get("reason") else ""
        marks = (
            f'<circle cx="{across}" cy="{row}" r="7"/><text x="{across}" y="{row}">{sign}</text>'
        )
    kind = "event refused" if name == "refusal" else "event"
    return f'<g class="{kind}"><title>round {number}: {escaped(title)}</title>{marks}</g>'


# The panels of batches and their test: base of the axis, and classes by field.
_BATCHES: Mapping[str, tuple[int, Mapping[str, str]]] = {
    "batch per worker (sequences)": (2, {"requested_batch_size": "", "effective": "d4"}),
    "accumulated micro-batches": (2, {"num_accum_steps": ""}),
    "noise tr Σ": (10, {"noise": ""}),
    "signal |G|²": (10, {"signal": ""}),
    "test value (sequences per worker)": (10, {"test_value": ""}),
}


def batches(run: RunRecord) -> str:
    """Draw the batches of each round, and what the batch-size test measured."""
    looks, drawn = loss.trainer_looks(run), ""
    for label, (base, fields) in _BATCHES.items():
        lines = []
        for name, classes in fields.items():
            for trainer, found in curves.by_trainer(curves.lines(run.events, "round")).items():
                values = [(e | {"effective": _sequences(e)})[name] for e in found]
                values = [v if v is not None and v > 0 else math.nan for v in values]
                x, y = steps([e["round"] for e in found], values)
                look, end = looks[trainer]
                shown = "" if classes else end
                lines.append(Curve(x, y, f"{look} {classes}", shown, f"trainer {trainer}"))
        up = chart.axis(label, [v for line in lines for v in line.y], base=base)
        if any(math.isfinite(v) for line in lines for v in line.y):
            across = _across(v for line in lines for v in line.x)
            drawn += chart.chart(across, up, lines, title=label).html()
    test = run.start["config"]["batching"]["test"]
    text = (
        "The batch that a trainer requested (solid) and that its updates used (dashed); a device"
        f" holds {run.start['max_batch_size']}. At the start of each round the {test} test measures"
        " noise (variance of single sequences' gradients) and signal (squared norm of the mean"
        " gradient); its value is the batch that it asks for. Vertical axes are logarithmic. A gap"
        " is a value that was skipped, not finite, or not positive."
    )
    return figure(drawn, text)


def training(run: RunRecord) -> str:
    """Draw each trainer's training loss within and after its rounds, and its learning rate."""
    looks, rounds = loss.trainer_looks(run), curves.lines(run.events, "round")
    unit = curves.loss_unit(run)
    panels: dict[str, list[Curve]] = {f"training loss ({unit})" if unit else "training loss": []}
    panels["learning rate × 1000"] = []
    for trainer, found in curves.by_trainer(rounds).items():
        ends = list(itertools.accumulate(e["updates"] for e in found))
        losses, rates = [], []
        for end, e in zip(ends, found, strict=True):
            losses += e.get("train_losses", [(end, e["train_loss"])])
            rate = e.get("learning_rate")
            rates.append((end, None if rate is None else 1000 * rate))
        for drawn, values in zip(panels.values(), (losses, rates), strict=True):
            x, y = zip(*values, strict=True)
            y = [math.nan if value is None else value for value in y]
            drawn.append(Curve(x, y, looks[trainer][0], looks[trainer][1], f"trainer {trainer}"))
    html = ""
    for label, drawn in panels.items():
        values = [value for curve in drawn for value in curve.y]
        across = chart.axis("updates of a worker", [0, *(n for curve in drawn for n in curve.x)])
        up = chart.axis(label, values + [0.0] * ("rate" in label))
        if any(map(math.isfinite, values)):
            html += chart.chart(across, up, drawn, title=label).html()
    text = (
        "Each point of the loss is the mean over the updates since the last point, of all workers"
        " of a trainer; a point of the learning rate is the last update of a round."
    )
    return figure(html, text)


def times(run: RunRecord) -> str:
    """Draw how many seconds each round took, and how many of them it waited for compilation."""
    rounds = curves.stalls(run.events)
    drawn = []
    for index, look in enumerate([("c0", "round", "all"), ("c5 solid", "compiling", "comp.")]):
        x, y = steps([*rounds], [min(seconds[0], seconds[index]) for seconds in rounds.values()])
        drawn.append(Curve(x, y, *look, ([0.0] * len(x), y)))
    across = _across(drawn[0].x)
    up = chart.axis("wall-clock time (s)", [0.0, *drawn[0].y])
    total_s, stall_s = map(sum, zip(*rounds.values(), strict=True))
    found = summary.totals(run.events)
    text = (
        f"Measured seconds of each round, {total_s:.4g} s in all, of which {stall_s:.4g} s were"
        f" spent waiting for compilation. The whole run: {summary.seconds(found['wall_s'])};"
        f" {summary.time_used(found)}; the rest is saving."
    )
    panel = chart.chart(across, up, drawn, title="Seconds of each round")
    return figure(panel.html(), text)


_SIGNS = {"lost": "✕", "late": "!", "rejected": "?", "refused": "?"}  # signs of a learner's events


def learners(run: RunRecord) -> str:
    """Draw the rounds in which each learner was present, its events, and the workers counted."""
    rounds = curves.lines(run.events, "round")
    found = {e["learner"]: [] for e in curves.lines(run.events, "learner")}
    for event in curves.lines(run.events, "learner"):
        found[event["learner"]].append(event)
    order, last = sorted(found), max(e["round"] for e in rounds)
    x = _across(e["round"] - past for e in rounds for past in (0, 1))
    lanes = {learner: (lane + 0.5) / len(order) for lane, learner in enumerate(order)}
    body = []
    for index, learner in enumerate(order):
        top, height = f"{lanes[learner] - 0.2 / len(order):.2%}", f"{0.4 / len(order):.2%}"
        bars = "".join(
            f'<rect x="{x.at(joined):.2%}" y="{top}" width="{x.at(until) - x.at(joined):.2%}"'
            f' height="{height}"><title>learner {learner}, rounds {joined} to {until}</title>'
            "</rect>"
            for joined, until in _present(found[learner], last)
        )
        body.append(f'<g class="{chart.look(index)}">{bars}</g>')
        body += [
            _mark(event, f"{x.at(event['round']):.2%}", f"{lanes[learner]:.2%}")
            for event in found[learner]
            if event["what"] in _SIGNS
        ]
    present = chart.frame(
        x,
        "".join(body),
        title="The learners, round by round",
        height=24 * len(order),
        left=[(lanes[learner], str(learner)) for learner in order],
        y_label="learner",
        classes=" life",
    )
    shares = {}
    for number, group in itertools.groupby(sorted(rounds, key=_round), key=_round):
        counted, expected = zip(*((e["workers_counted"], e["workers"]) for e in group), strict=True)
        shares[number] = sum(counted) / sum(expected)
    share = Curve(*steps([*shares], [*shares.values()]), "c0", "counted")
    up = chart.axis("share of workers counted", [0.0, *shares.values()])
    panel = chart.chart(_across(share.x), up, [share], title="Workers whose round counted")
    text = (
        "Learners while they were present. Marks: ✕, lost; !, too late for its round; ?, an update"
        " that was rejected, or a refused request or response. The other chart shows the share of"
        " the trainers' workers whose round counted."
    )
    if (share_of_time := summary.goodput(run.events)) is not None:
        text += (
            f" Goodput: {share_of_time:.1%}, the tokens that counted, as a share of what the"
            " learners' processes could have trained on while they were up."
        )
    return figure(present.html() + panel.html(), text)


def _round(event: dict) -> int:
    return event["round"]


def _present(events: Iterable[dict], last: int) -> Iterator[tuple[int, int]]:
    joined = None
    for event in events:
        if event["what"] not in ("joined", "lost", "left"):
            continue
        if joined is not None:  # a driver that has died leaves no line about its learners
            yield joined, event["round"]
        joined = event["round"] if event["what"] == "joined" else None
    if joined is not None:
        yield joined, last


def _mark(event: dict, across: str, row: str) -> str:
    title = f"round {event['round']}: learner {event['learner']} {event['what']}: {event['why']}"
    return (
        f'<g class="event"><title>{escaped(title)}</title><circle cx="{across}" cy="{row}" r="7"/>'
        f'<text x="{across}" y="{row}">{_SIGNS[event["what"]]}</text></g>'
    )
