"""The lines of docs/conformance.md on simulated clusters: tables, formulas, and measured times."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pytest
from ledgers import round_line, start_line
from published import MEASURED_PARAMS, MEASURED_STEP_S, MEASURED_SYNC_S, SCALING_LAWS, Row

from adloco_jax.study import bandwidth
from adloco_jax.study.cluster import Cluster, Link
from adloco_jax.study.replay import RoundTime, Traffic, replay

AT_95 = bandwidth.UTILISATIONS.index(0.95)


def _agreement(needed: Callable, tables: Mapping[str, tuple[float, ...]]) -> str:
    """How far ours, `needed(row, utilisation)`, and theirs are apart, in points of their grid."""
    printed = [float(f"{gbits:.1f}") for gbits in bandwidth.GRID] + [math.inf]
    cells = {
        f"{row} at {100 * utilisation:g} %": (needed(row, utilisation), figure)
        for row, figures in tables.items()
        for utilisation, figure in zip(bandwidth.UTILISATIONS, figures, strict=True)
    }

    def apart(ours, theirs):
        place = np.searchsorted(bandwidth.GRID, ours)
        return min(abs(place - index) for index, tried in enumerate(printed) if tried == theirs)

    steps = {name: apart(*cell) for name, cell in cells.items()}
    counts = Counter(min(far, 2) for far in steps.values())
    beyond = "; ".join(name for name, far in steps.items() if far > 1)
    text = f"{counts[0]} of {len(cells)} exact, {counts[1]} one point of the grid away"
    return f"{text}, {counts[2]} further: {beyond}"


def _gbits(figures: Iterable[float]) -> str:
    return ", ".join(f"{figure:.1f}" for figure in figures) + " Gbit/s for 95 %"


def streaming_table() -> list[Row]:
    needed = functools.partial(bandwidth.needed_by, step_s=bandwidth.GRID_STEP_S)
    return [
        Row(
            "Streaming DiLoCo (arXiv 2501.18512), Table 4, 1 B parameters",
            "bandwidth for 5 utilisations of 5 methods; 16 bits, a step of 0.12 s",
            _gbits(figures[AT_95] for figures in bandwidth.PAPER.values()),
            _gbits(bandwidth.on_grid(needed(name, 0.95)) for name in bandwidth.METHODS),
            _agreement(needed, bandwidth.PAPER),
        )
    ]


def scaling_table() -> list[Row]:
    seconds = bandwidth.GRID_STEP_S / bandwidth.PRINTED_STEP_S
    whole = bandwidth.METHODS["DiLoCo"][1]
    as_before = dataclasses.replace(whole, bits_per_param=whole.bits_per_param / seconds)
    fitted = Traffic(11.9, early_frac=0.59)
    return [
        _scaling_row("as for Streaming DiLoCo, nothing fitted", as_before),
        _scaling_row("two numbers fitted to the table", fitted),
    ]


def _scaling_row(how: str, traffic: Traffic) -> Row:
    def needed(row, utilisation):
        model, _, num_steps = row.partition(", H = ")
        (num_params, step_s), _ = SCALING_LAWS[model]
        how = {"num_params": num_params, "num_steps": int(num_steps), "step_s": step_s}
        return bandwidth.needed_gbits(traffic, utilisation, **how)

    tables = {
        f"{model}, H = {num_steps}": figures
        for model, (_, table) in SCALING_LAWS.items()
        for num_steps, figures in table.items()
    }
    shown = {row: figures for row, figures in tables.items() if row.startswith("405B")}
    bits, early = traffic.bits_per_param, traffic.early_frac
    return Row(
        "Scaling Laws (arXiv 2503.09799), Table 6",
        f"bandwidth, 3 models; {how}: {bits:.3g} bits, sending begins {early:.2f} step early",
        "405B: " + _gbits(figures[AT_95] for figures in shown.values()),
        "405B: " + _gbits(bandwidth.on_grid(needed(row, 0.95)) for row in shown),
        _agreement(needed, tables),
    )


def measured() -> list[Row]:
    return [_measured_row(link) for link in MEASURED_SYNC_S]


def _measured_row(name: str) -> Row:
    """A ring of four over links of the bandwidth that was achieved, in float32, blocking."""
    mbits, sync_s = MEASURED_SYNC_S[name]
    link, step_s = Link(mbits * 1e6 / 8, 0.0), MEASURED_STEP_S
    place = Cluster(4, 4, lambda num_sequences: step_s * num_sequences, link, link)
    theirs, ours = [], []
    for num_steps in (1, 8, 32, 128):
        line = round_line(1, workers=4, batch=1, updates=num_steps)
        result = replay([start_line(num_params=MEASURED_PARAMS), line], place)
        theirs.append(num_steps * step_s / (num_steps * step_s + sync_s))
        ours.append(result.frac("compute_s"))
    our_sync_s = result.rounds[0].communication_s
    gap = our_sync_s / sync_s - 1
    gaps = [mine / one - 1 for mine, one in zip(ours, theirs, strict=True)]
    is_modelled = mbits > 100
    assert (max(map(abs, (gap, *gaps))) <= 0.15) == is_modelled

    def shown(sync_s, fracs):
        return f"{sync_s:.3g} s; " + ", ".join(f"{100 * frac:.3g}" for frac in fracs) + " %"

    return Row(
        "diloco-measured, 4 L40S over TCP, 30.8 M parameters",
        f"synchronisation and utilisation at H = 1, 8, 32, 128; {name}, {mbits:g} achieved",
        shown(sync_s, theirs),
        shown(our_sync_s, ours),
        f"{100 * gap:+.1f} %; {100 * min(gaps):+.1f} to {100 * max(gaps):+.1f} %"
        + ("" if is_modelled else ": TCP's losses are not modelled"),
    )


# Bit/s and seconds of Scaling Laws, appendix A: its links within a site and between sites.
NEAR, FAR = (400e9, 1e-4), (10e9, 1e-2)
DEVICES, FLOPS, STEPS_A, TOKENS_A, PARAMS_A = 64, 300e12, 30, 4096, 10**9


def _appendix_a_s(num_models: int) -> float:
    """Seconds of communication in a round as appendix A counts them; 0 models: data parallel."""
    num_bits = 32 * PARAMS_A

    def all_reduce_s(link, share):
        return 2 * num_bits / link[0] * (1 - share) + link[1]

    if num_models < 2:
        return all_reduce_s(FAR, 1 / DEVICES) * (STEPS_A + num_models)
    inner_s = all_reduce_s(NEAR, num_models / DEVICES) * STEPS_A
    return inner_s + all_reduce_s(FAR, 1 / DEVICES)


def _simulated(num_models: int) -> RoundTime:
    """The same round in the simulator, whose latency is that of each of a ring's transfers."""

    def link(figures, num_members):
        return Link(figures[0] / 8, figures[1] / (2 * (num_members - 1)))

    workers = max(1, num_models)
    each = DEVICES // workers
    place = Cluster(
        DEVICES,
        workers,
        lambda num_sequences: num_sequences * 6 * PARAMS_A * TOKENS_A / FLOPS,
        within=link(NEAR if workers > 1 else FAR, each),
        between=link(FAR, max(2, workers)),
    )
    line = round_line(1, workers=workers, batch=each, updates=STEPS_A)
    return replay([start_line(num_params=PARAMS_A), line], place).rounds[0]


def wall_clock() -> list[Row]:
    rows = []
    for num_models in (0, 1, 2, 8):
        name = f"M = {num_models}, H = {STEPS_A}" if num_models else "data parallel"
        theirs_s, ours = _appendix_a_s(num_models), _simulated(num_models)
        num_tokens = STEPS_A * DEVICES * TOKENS_A
        compute_s = 6 * PARAMS_A * num_tokens / (DEVICES * FLOPS)
        assert ours.compute_s == pytest.approx(compute_s)
        expected_s, reason = theirs_s, "none"
        if num_models == 1:
            expected_s, reason = theirs_s * STEPS_A / (STEPS_A + 1), "one worker sends nothing"
        if num_models > 1:
            apart = 2 * 32 * PARAMS_A / FAR[0] * (1 / num_models - 1 / DEVICES)
            expected_s, reason = theirs_s - apart, "a ring of M replicas, not of all devices"
        assert ours.communication_s == pytest.approx(expected_s)
        gap = ours.communication_s / theirs_s - 1
        rows.append(
            Row(
                "Scaling Laws, appendix A, wall-clock",
                f"{name}: compute and communication of 30 steps on 64 devices, 1 B parameters",
                f"{compute_s:.4g} + {theirs_s:.4g} s",
                f"{ours.compute_s:.4g} + {ours.communication_s:.4g} s",
                reason if num_models == 0 else f"{100 * gap:+.1f} %: {reason}",
            )
        )
    return rows
