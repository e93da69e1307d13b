"""How long trainers can train separately before they merge, from random weights and from a trunk.

Command:   make the trunk as in studies/compare_trunk.py, then
           adloco compare studies/compare_barrier.py
             --results studies/barrier.jsonl
Hardware:  two CPU cores, about half an hour
Model:     as in studies/compare_trunk.py. Four trainers with one worker each make a number of
           separate updates and then try to merge. The guard refuses merges that raise the loss.
"""

from adloco_jax.study.compare import Comparison
from studies.compare_trunk import AVERAGE, get_base

STEPS = 110  # updates of a round
APART = (1, 2, 4, 8, 16, 32)  # rounds before the merge


def get_comparison() -> Comparison:
    """The variants, their seeds and the target losses."""
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
