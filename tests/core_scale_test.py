"""Cost by the number of trainers and workers."""

import functools

import jax
import numpy as np
import pytest
from ensembles import ADAMW, NESTEROV, ensemble_of

from adloco_jax import AGGREGATORS, outer_update, reassign, start_round

# 20 trainers of 10 workers each, and of 1 to 181.
EQUAL, UNEQUAL = np.repeat(np.arange(20), 10), np.repeat(np.arange(20), [181, *[1] * 19])


def end_round(ensemble, aggregate):
    return outer_update(ensemble, start_round(ensemble), outer_tx=NESTEROV, aggregate=aggregate)


def move(ensemble):
    return reassign(ensemble, (*ensemble.owners, 0))


REDUCTIONS = {"reassign": move} | {
    name: functools.partial(end_round, aggregate=aggregate)
    for name, aggregate in AGGREGATORS.items()
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_reduction_by_owner_needs_as_much_memory_for_unequal_trainers_as_for_equal_ones(name):
    def needed(owner_R):
        ensemble = jax.eval_shape(
            lambda: ensemble_of(owner_R, np.zeros((20, 30), np.float32), inner_tx=ADAMW)
        )
        program = jax.jit(REDUCTIONS[name]).lower(ensemble).compile()
        return program.memory_analysis().temp_size_in_bytes

    pool = len(EQUAL) * 20 * 30 * 4  # bytes of a parameter-sized array of each worker
    assert needed(UNEQUAL) < needed(EQUAL) + 1.5 * pool
