"""Published numbers of others, and rows of studies/conformance.md that compare them."""

import math
from typing import NamedTuple


class Row(NamedTuple):
    """A row of the table, without its name."""

    case: str
    theirs: str
    ours: str
    difference: str


# nanoGPT (github.com/karpathy/nanoGPT, commit 0110f3c), README, "I only have a macbook": nats per
# character, by 20 batches of 12 x 64 characters.
NANOGPT_CHAR_LOSS = 1.88

# Scaling Laws for DiLoCo (arXiv 2503.09799), table of losses: 35 M parameters, nats per token.
SCALING_ORDER = {
    "M = 1": 3.482,
    "data parallel": 3.485,
    "M = 2": 3.508,
    "M = 4": 3.554,
    "M = 8": 3.621,
}

# Streaming DiLoCo in meta-pytorch/torchft at commit 73dafea (BSD-3-Clause): test_fixtures of
# DiLoCoMockedUpdateTest.test_diloco_mocked_updates 0 to 5. Two weights start at 1, a fragment each;
# the gradient is 2, the inner optimizer SGD at rate 1, the outer one SGD at rate 2; a fragment's
# turn comes every 3 steps. By (delay in steps, alpha): each fragment's weight before every step.
TORCHFT = {
    (0, 0.0): (
        (1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59),
        (1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53),
    ),
    (0, 0.5): (
        (1, -1, -3, -8, -10, -12, -14, -16, -18, -24.5, -26.5, -28.5, -30.5, -32.5, -34.5, -40.25),
        (1, -1, -3, -5, -7, -9, -17, -19, -21, -23, -25, -27, -32, -34, -36, -38),
    ),
    (0, 1.0): (
        (1, -1, -3, -5, -7, -9, -11, -13, -15, -17, -19, -21, -23, -25, -27, -29),
        (1, -1, -3, -5, -7, -9, -11, -13, -15, -17, -19, -21, -23, -25, -27, -29),
    ),
    (1, 0.0): (
        (1, -1, -3, -7, -9, -11, -13, -15, -17, -27, -29, -31, -33, -35, -37, -47),
        (1, -1, -3, -5, -7, -9, -19, -21, -23, -25, -27, -29, -39, -41, -43, -45),
    ),
    (1, 0.5): (
        (1, -1, -3, -6, -8, -10, -12, -14, -16, -21.5, -23.5, -25.5, -27.5, -29.5, -31.5, -35.75),
        (1, -1, -3, -5, -7, -9, -15, -17, -19, -21, -23, -25, -29, -31, -33, -35),
    ),
    (1, 1.0): (
        (1, -1, -3, -5, -7, -9, -11, -13, -15, -17, -19, -21, -23, -25, -27, -29),
        (1, -1, -3, -5, -7, -9, -11, -13, -15, -17, -19, -21, -23, -25, -27, -29),
    ),
}

# Streaming DiLoCo (arXiv 2501.18512v1), Table 4, the 1 B model: the Gbit/s between sites at which
# devices compute for so much of the time.
UTILISATIONS = (0.5, 0.8, 0.9, 0.95, 0.99)
STREAMING_GBITS = {
    "data parallel": (86.8, 152.6, 184.2, 222.3, 569.0),
    "DiLoCo": (1.4, 6.2, 13.3, 23.3, 86.8),
    "Streaming DiLoCo": (1.4, 5.2, 9.1, 16.0, 28.1),
    "with overlapped communication": (1.4, 4.3, 6.2, 9.1, 11.0),
    "and in 4 bits": (0.4, 0.9, 1.7, 2.0, 3.0),
}

# Scaling Laws for DiLoCo (Charles et al. 2025, arXiv 2503.09799), Table 6: parameters, seconds of a
# step as printed, and by the inner steps of a round (1: data parallel) the Gbit/s between sites at
# which devices compute for 50, 80, 90, 95 and 99 % of the time; infinite where it says 1000.0+.
SCALING_LAWS = {
    "10B": (
        (10 * 10**9, 0.8),
        {
            1: (104.8, 184.2, 222.3, 222.3, 390.7),
            10: (16.0, 49.4, 86.8, 152.6, 222.3),
            50: (3.0, 11.0, 23.3, 41.0, 126.5),
            100: (1.4, 6.2, 13.3, 23.3, 86.8),
            300: (0.5, 2.0, 4.3, 9.1, 41.0),
        },
    ),
    "405B": (
        (405 * 10**9, 26.0),
        {
            1: (126.5, 222.3, 268.3, 323.8, 323.8),
            10: (19.3, 72.0, 126.5, 184.2, 268.3),
            50: (3.6, 13.3, 28.1, 59.6, 184.2),
            100: (2.0, 7.5, 16.0, 33.9, 126.5),
            300: (0.7, 3.0, 6.2, 13.3, 59.6),
        },
    ),
    "671B": (
        (671 * 10**9, 20.0),
        {
            1: (323.8, 569.0, 686.6, 686.6, math.inf),
            10: (49.4, 152.6, 268.3, 390.7, 686.6),
            50: (7.5, 33.9, 72.0, 126.5, 390.7),
            100: (4.3, 16.0, 41.0, 72.0, 268.3),
            300: (1.7, 6.2, 13.3, 28.1, 126.5),
        },
    ),
}

# DiLoCo on four L40S machines over TCP (Adnan082/diloco-measured at commit bf5aa9a,
# experiments/01_cu_grid/raw_step_telemetry_shaped): by the nominal bandwidth of a machine's link
# the Mbit/s that it achieved, and the seconds of a synchronisation, the first, cold one left out.
MEASURED_PARAMS = 30_846_720  # float32
MEASURED_STEP_S = 0.0261
MEASURED_SYNC_S = {
    "50 Mbit/s": (49.63, 37.85),
    "200 Mbit/s": (198.5, 8.26),
    "1 Gbit/s": (992.7, 1.505),
    "5 Gbit/s": (4963.6, 0.317),
}
