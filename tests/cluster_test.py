"""Step times by hand, and impossible clusters."""

import math

import pytest

from adloco_jax.errors import ConfigError
from adloco_jax.study.cluster import Cluster, Link, roofline

FREE = Link(math.inf, 0.0)


def cluster(num_devices, num_sites=1, **changes):
    return Cluster(num_devices, num_sites, lambda num_sequences: 0.1, FREE, FREE, **changes)


def test_roofline_by_hand():
    # 6 x 1e9 x 1000 FLOPs per sequence at 0.4 of 989e12; 16e9 bytes at 3.35e12.
    time = roofline("h100", num_params=10**9, sequence_length=1000)
    assert time(1) == pytest.approx(6e12 / 395.6e12)
    assert time(8) == pytest.approx(48e12 / 395.6e12)
    short = roofline("h100", num_params=10**9, sequence_length=10)
    assert short(1) == pytest.approx(16 / 3350)


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: roofline("tpu", num_params=1, sequence_length=1),
            "device 'tpu': expected one of a100_80gb, h100",
        ),
        (lambda: roofline("l4", num_params=1, sequence_length=0), "sequence_length=0"),
        (lambda: Link(0.0, 0.0), "bandwidth > 0"),
        (lambda: Link(1.0, -1.0), "latency_s >= 0"),
        (lambda: Link(math.nan, 0.0), "bandwidth > 0"),
        (lambda: cluster(1, 2), "1 devices in 2 sites"),
        (lambda: cluster(4, compute_jitter=-0.1), "compute_jitter=-0.1"),
        (lambda: cluster(4, restart_s=math.inf), "restart_s=inf"),
    ],
)
def test_impossible_clusters_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
