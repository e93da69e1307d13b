"""Cost for many trainers and workers; values and weights of any magnitude."""

import functools

import jax
import numpy as np
import pytest
from ensembles import ADAMW, NESTEROV, PLAIN, draw, ensemble_of, pseudo_gradients
from hypothesis import given
from hypothesis import strategies as st
from trees import assert_close

from adloco_jax import AGGREGATORS, merge, outer_update, reassign, start_round

MAGNITUDES = st.floats(-30, 30).map(lambda exponent: np.float32(10.0**exponent))

# 20 trainers with 10 workers each, and 20 with 1 to 181 workers.
EQUAL, UNEQUAL = [10] * 20, [181, *[1] * 19]


def end_round(ensemble, aggregate):
    return outer_update(ensemble, start_round(ensemble), outer_tx=NESTEROV, aggregate=aggregate)


def move(ensemble):
    return reassign(ensemble, (ensemble.sizes[0] + 1, *ensemble.sizes[1:]))


REDUCTIONS = {"reassign": move} | {
    name: functools.partial(end_round, aggregate=aggregate)
    for name, aggregate in AGGREGATORS.items()
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_reduction_by_trainer_needs_as_much_memory_for_unequal_trainers_as_for_equal_ones(name):
    def needed(sizes):
        ensemble = jax.eval_shape(
            lambda: ensemble_of(sizes, np.zeros((20, 30), np.float32), inner_tx=ADAMW)
        )
        program = jax.jit(REDUCTIONS[name]).lower(ensemble).compile()
        return program.memory_analysis().temp_size_in_bytes

    pool = sum(EQUAL) * 20 * 30 * 4  # bytes of a parameter-sized array of each worker
    assert needed(UNEQUAL) < needed(EQUAL) + 1.5 * pool


# --- Magnitudes: a factor on all differences multiplies the result; only ratios of weights count

SHAPES = {"embed": (8, 3), "layers": {"w": (2, 3, 4)}, "head": (3, 8), "b": ()}
DIFFERENCE_R, WEIGHTS_R = draw(SHAPES, 5), np.float32([0.3, 0.5, 0.1, 0.4, 0.8])


@functools.cache
def update_of(rule):
    """Pseudo-gradients and their norms, from the workers' differences and weights."""
    how = {"sizes": (3, 2), "aggregate": AGGREGATORS[rule]}
    return jax.jit(functools.partial(pseudo_gradients, **how))


@pytest.mark.parametrize("rule", AGGREGATORS)
def test_an_outer_update_scales_with_the_differences_and_not_with_the_weights(rule):
    update = update_of(rule)
    expected = update(DIFFERENCE_R, WEIGHTS_R)

    @given(MAGNITUDES, MAGNITUDES)
    def scales(size, weight):
        actual = update(jax.tree.map(lambda leaf: size * leaf, DIFFERENCE_R), weight * WEIGHTS_R)
        actual = jax.tree.map(lambda leaf: np.asarray(leaf) / size, actual)
        assert_close(actual, jax.device_get(expected), rtol=1e-5, atol=1e-5)

    scales()
    largest = np.float32([3e38, 3e38, 3e38, 0, 3e38])
    assert_close(update(DIFFERENCE_R, largest), update(DIFFERENCE_R, np.sign(largest)))


def test_a_merge_scales_with_the_parameters_and_not_with_the_weights():
    ensemble = ensemble_of((1, 1, 1), {"w": np.zeros(4, np.float32)}, outer_tx=PLAIN)
    params_M = draw({"w": (4,)}, 3)
    weights, merged = np.float32([3, 1, 2]), jax.jit(merge, static_argnames="members")

    @given(MAGNITUDES, MAGNITUDES)
    def scales(size, weight):
        large = ensemble.replace(params_M={"w": size * params_M["w"]})
        after = merged(large, (0, 1, 2), weights=np.minimum(weight * weights, 3e38))
        mean = np.average(np.float64(params_M["w"]), axis=0, weights=weights)
        np.testing.assert_allclose(after.params_M["w"][0] / size, mean, rtol=1e-5)

    scales()
    after = merged(ensemble.replace(params_M=params_M), (0, 1, 2), weights=np.float32([3e38] * 3))
    np.testing.assert_allclose(after.params_M["w"][0], params_M["w"].mean(axis=0), rtol=1e-5)
