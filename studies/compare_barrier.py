"""How long can trainers train separately, and still merge without a higher loss?

Two starts are compared: random weights, and a *trunk*, which is a model that one worker has trained
for a while. Four trainers with one worker each make a number of separate updates and then try to
merge. The guard compares losses on held-out rows: it refuses a merge if the average of the trainers
has a higher loss than the trainers have on average.

Command:   make the trunk as in studies/compare_trunk.py, then
           adloco compare studies/compare_barrier.py
             --results studies/barrier.jsonl
Hardware:  two CPU cores, about half an hour
Model:     as in studies/compare_trunk.py
"""

from adloco_jax.study.compare import Comparison
from studies.compare_trunk import AVERAGE, get_base

STEPS = 110  # updates of a round
APART = (1, 2, 4, 8, 16, 32)  # rounds of separate training before the merge


def get_comparison() -> Comparison:
    """Return the comparison: variants, seeds, and the losses for which costs are compared."""
    base = get_base()
    base.ensemble.num_trainers = 4
    base.inner.steps_per_round = STEPS
    base.merge.policy = "worst_with_worst"
    base.merge.width = 4
    base.merge.max_barrier = 0.0
    base.update_from_flattened_dict(AVERAGE)
    starts = {"random weights": {}, "a trunk": {"model.init_from": "runs/trunk/model"}}
    variants = {
        f"{name}, {STEPS * rounds} updates apart": {
            **start,
            "merge.every_rounds": rounds,
            "num_rounds": rounds,
        }
        for name, start in starts.items()
        for rounds in APART
    }
    return Comparison(
        base=base,
        variants=variants,
        baseline=next(iter(variants)),
        target_losses=(1.7,),
        seeds=(1, 2, 3),
    )
