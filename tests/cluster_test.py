"""Step times by hand and through measurements, and clusters that cannot be."""

import math

import pytest

from adloco_jax.errors import ConfigError
from adloco_jax.study.cluster import DEVICES, Cluster, Device, Link, measured, roofline

FREE = Link(math.inf, 0.0)


def cluster(num_devices, num_sites=1, **changes):
    return Cluster(num_devices, num_sites, lambda num_sequences: 0.1, FREE, FREE, **changes)


def test_roofline_by_hand():
    # 6 x 1e9 x 1000 FLOPs per sequence at half of 989e12; 16e9 bytes at 3.35e12.
    time = roofline("h100", num_params=10**9, sequence_length=1000, efficiency=0.5, overhead_s=0.1)
    assert time(1) == pytest.approx(0.1 + 6e12 / 494.5e12)
    assert time(8) == pytest.approx(0.1 + 48e12 / 494.5e12)
    short = roofline(DEVICES["h100"], num_params=10**9, sequence_length=10, efficiency=0.5)
    assert short(1) == pytest.approx(16 / 3350)
    own = roofline(Device(6e12, 1e12), num_params=10**6, sequence_length=1000, efficiency=1.0)
    assert own(1) == pytest.approx(1e-3)
    with pytest.raises(ConfigError, match="device 'tpu': expected one of a100_80gb, h100"):
        roofline("tpu", num_params=1, sequence_length=1)
    with pytest.raises(ConfigError, match="efficiency=0"):
        roofline("l4", num_params=1, sequence_length=1, efficiency=0)


def test_measured_times_are_met_and_carried_on():
    time = measured({8: 0.5, 4: 0.3, 16: 0.9})
    assert [time(size) for size in (4, 6, 8, 16)] == pytest.approx([0.3, 0.4, 0.5, 0.9])
    assert time(2) == pytest.approx(0.2)  # the line through 4 and 8 has 0.1 left at no sequence
    assert time(32) == pytest.approx(1.8)
    assert measured({4: 0.4})(1) == pytest.approx(0.1)
    assert measured({4: 0.4, 8: 0.3})(1) == pytest.approx(0.4)  # no faster than what was seen
    for wrong in ({}, {0: 1.0}, {4: 0.0}, {4: math.nan}):
        with pytest.raises(ConfigError, match="step times"):
            measured(wrong)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Link(0.0, 0.0), "bandwidth above 0"),
        (lambda: Link(1.0, -1.0), "a latency"),
        (lambda: Link(math.nan, 0.0), "bandwidth above 0"),
        (lambda: cluster(1, 2), "1 devices in 2 sites"),
        (lambda: cluster(4, compute_jitter=-0.1), "compute_jitter=-0.1"),
        (lambda: cluster(4, restart_s=math.inf), "restart_s=inf"),
    ],
)
def test_a_cluster_that_cannot_be_says_why(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
