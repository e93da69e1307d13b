"""nanoGPT's Shakespeare recipe with one worker, DiLoCo and AdLoCo, at equal tokens.

Nothing was tuned here: learning rate, warm-up, schedule, weight decay and clipping are nanoGPT's,
as in configs/shakespeare_char.py. DiLoCo runs in two variants with four workers. In one variant the
workers share the recipe's batch of 12, and make as many serial updates as the recipe. In the other
variant each worker has a batch of 12, and makes a quarter of the recipe's serial updates. AdLoCo
begins with one worker. Its norm test first adds workers, up to four, and then lengthens rounds. The
schedules of DiLoCo and AdLoCo fall over tokens; the recipe's schedule falls over the updates after
the warm-up.

Command:   adloco compare studies/compare_shakespeare.py
             --results studies/shakespeare.jsonl
Hardware:  two CPU cores, a few minutes for each of 12 runs; the same command continues
Text:      as for configs/shakespeare_char.py
Results:   docs/conformance.md
"""

from adloco_jax.configs import shakespeare_char
from adloco_jax.study.compare import Comparison
from studies.compare_study import NESTEROV, batch, growing, steps

BY_TOKENS = {"num_tokens": 2000 * 12 * 64, "num_rounds": None}
POOL = {**NESTEROV, **BY_TOKENS, "ensemble.num_workers": 4}


def get_comparison() -> Comparison:
    """Return the comparison: variants, seeds, and the losses for which costs are compared."""
    return Comparison(
        base=shakespeare_char.get_config(),
        variants={
            "one worker": {},
            "DiLoCo, 4 workers of batch 3": {**POOL, **batch(3), **steps(200)},
            "DiLoCo, 4 workers of batch 12": {**POOL, **steps(50)},
            "AdLoCo, 1 to 4 workers of batch 12": {
                **POOL,
                **growing(eta=0.8, first=50, longest=150),
                "batching.smoothing": 0.5,  # a run of a few rounds has few tests to average
            },
        },
        baseline="one worker",
        target_losses=(2.2, 2.0, 1.9),
        seeds=(1, 2, 3),
    )
