"""`outer_step` and its parts take parameters, losses and meshes of other libraries."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ensembles import ADAMW, TXS, batch_of, ensemble_of
from toy import bigram_loss, corpus, init_fn, settings_of, spec_of
from toy_runs import events, run

from adloco_jax import gradient_stats, inner_steps, outer_step, start_round
from adloco_jax.engine.inputs import Group, calls_of
from adloco_jax.engine.programs import add_keys
from adloco_jax.errors import ConfigError
from adloco_jax.loop.adloco import start
from adloco_jax.loop.control import RoundPlan
from adloco_jax.training import fit

pytestmark = pytest.mark.usefixtures("one_device")

W = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)
B = np.float32([0.3, -0.2])
PARAMS = {"w": W, "b": B}


def residual(w, b, batch):
    return jnp.mean(jnp.square(jnp.tanh(batch["x"] @ w + b[None]) - batch["y"]))


def of_dict(params, batch):
    return residual(params["w"], params["b"], batch)


def stats_of(loss_fn, *arguments, **how):
    return jax.jit(functools.partial(gradient_stats, loss_fn, **how))(*arguments)


# --- Losses with a key, and with auxiliary output


def bits_loss(params, batch, key):
    """A loss that reports its key and the number of examples."""
    aux = {"bits": jax.random.key_data(key)[1] % 2**20, "size": jnp.int32(len(batch["x"]))}
    return of_dict(params, batch), aux


def folded(key, *numbers):
    return functools.reduce(jax.random.fold_in, numbers, key)


@pytest.mark.parametrize("num_accum_steps", [1, 2])
def test_each_micro_batch_has_a_key_of_its_own_and_auxiliary_output_is_its_updates_mean(
    num_accum_steps,
):
    key, size = jax.random.key(5), 4 // num_accum_steps
    ensemble = ensemble_of([2, 1], PARAMS)
    step = functools.partial(
        outer_step, loss_fn=bits_loss, has_aux=True, num_accum_steps=num_accum_steps, **TXS
    )
    _, metrics = jax.jit(step)(ensemble, batch_of(2, 3, 4), key=key)
    aux = metrics.aux
    assert aux["size"].tolist() == [[size] * 3] * 2 and aux["bits"].dtype == jnp.float32
    for s in range(2):
        for worker, trainer in enumerate((0, 0, 1)):
            positions = [4 * s + size * a for a in range(num_accum_steps)]
            keys = [folded(key, trainer, worker, position) for position in positions]
            mean = np.mean([int(jax.random.key_data(one)[1]) % 2**20 for one in keys])
            assert aux["bits"][s, worker] == mean


def test_a_pass_has_the_key_of_its_first_example():
    ensemble = ensemble_of([1], PARAMS)
    key_TRB = jax.random.split(jax.random.key(0), (1, 1, 4))
    how = {"inner_tx": ADAMW, "has_aux": True, "examples_per_pass": 2}
    steps = jax.jit(functools.partial(inner_steps, loss_fn=bits_loss, **how))
    *_, aux_TR = steps(start_round(ensemble), batch_of(1, 1, 4), key_TRB=key_TRB)
    bits = np.asarray(jax.random.key_data(key_TRB))[0, 0, ::2, 1] % 2**20
    assert aux_TR["bits"].tolist() == [[bits.mean()]]


@pytest.mark.parametrize(
    "loss_fn",
    [lambda params, batch, key: of_dict(params, batch), lambda p, b, key=None: of_dict(p, b)],
    ids=["needs", "takes"],
)
def test_a_loss_with_dropout_is_refused_without_a_key_unless_it_has_one(loss_fn):
    arguments = ensemble_of([1], PARAMS), batch_of(1, 1, 4)
    with pytest.raises(ValueError, match=r"^key: none is given, .* dropout is off; pass key="):
        jax.eval_shape(functools.partial(outer_step, loss_fn=loss_fn, **TXS), *arguments)
    with pytest.raises(ValueError, match="^key_TRB: none is given"):
        workers = start_round(arguments[0])
        jax.eval_shape(
            functools.partial(inner_steps, loss_fn=loss_fn, inner_tx=ADAMW), workers, arguments[1]
        )
    bound = functools.partial(loss_fn, key=jax.random.key(0))
    jax.eval_shape(functools.partial(outer_step, loss_fn=bound, **TXS), *arguments)


def test_statistics_use_one_key_and_leave_auxiliary_output_out():
    def noisy(params, batch, key):
        loss, aux = bits_loss(params, batch, key)
        return loss * jax.random.uniform(key, minval=0.5), aux

    factor = float(jax.random.uniform(jax.random.key(0), minval=0.5))
    params = PARAMS
    actual = stats_of(noisy, params, batch_of(5), has_aux=True)
    expected = stats_of(of_dict, params, batch_of(5))
    np.testing.assert_allclose(actual.noise, factor**2 * expected.noise, rtol=1e-5)


def test_a_repeated_round_with_smaller_micro_batches_has_the_same_keys():
    """A sequence's key depends only on its trainer, its stream and its position there."""
    settings = settings_of()
    control = start(settings.ensemble, settings.batching, 4)
    control.trainers[2].cursors["3"] = 50
    keyed = lambda params, rows, key=None: bigram_loss(params, rows)  # noqa: E731
    spec = spec_of(settings, init_fn, keyed)
    spec = dataclasses.replace(spec, num_micro_batches=1, sequential=False)
    group = Group((0, 1, 2), (2, 1, 1), plan=RoundPlan(4, 1, 3))
    reads_R3 = np.array(control.reads())
    rows_TRBL, rate_TR = np.zeros((3, 4, 4, 9), np.int32), np.zeros((3, 4), np.float32)
    stream_R3 = calls_of(group, rows_TRBL, rate_TR, reads_R3, spec)[2].stream_R3
    assert stream_R3.tolist() == [[0, 0, 8], [0, 1, 8], [1, 2, 8], [2, 3, 58]]
    for shape in ((3, 4, 4, 9), (6, 4, 2, 9)):
        _, key_TRB = add_keys(spec, jnp.zeros(shape), jnp.asarray(stream_R3))
        expected = folded(jax.random.key(settings.seed), 2, 3, 58 + 6)
        assert key_TRB[6 // shape[2], 3, 6 % shape[2]] == expected
    assert spec_of(settings).key_seed is None


@pytest.mark.parametrize(("outer", "test"), [({}, "norm"), ({"fragments": 3}, "constant")])
def test_a_run_gives_its_loss_keys_and_evaluations_none(tmp_path, outer, test):
    def loss(params, rows, key=None):
        factor = 1.0 if key is None else jax.random.uniform(key, minval=1.5, maxval=2.5)
        return bigram_loss(params, rows) * factor

    one = {"ensemble": {"num_trainers": 1, "num_workers": 2}, "num_rounds": 1}
    settings = settings_of(**one, outer=outer, batching={"test_batch_size": 8, "test": test})
    how = {"corpus": corpus(), "init_fn": init_fn, "workdir": tmp_path / "r"}
    result = fit(settings, loss_fn=loss, **how)
    assert result.loss < np.log(6)  # that of the first parameters, which a key would multiply
    assert events(tmp_path / "r", "round")[0]["train_loss"] > np.log(6)


def test_a_loss_that_needs_a_key_is_given_another_for_evaluations(tmp_path):
    def loss(params, rows, key):
        return bigram_loss(params, rows)

    one = {"ensemble": {"num_trainers": 1, "num_workers": 1}, "num_rounds": 1}
    how = {"settings": settings_of(**one, batching={"test": "constant"}), "loss_fn": loss}
    with pytest.raises(ConfigError, match="^loss_fn: needs a `key`, .* eval_loss_fn$"):
        run(tmp_path / "r", **how)
    assert not (tmp_path / "r").exists()
    assert run(tmp_path / "r", **how, eval_loss_fn=lambda *_: jnp.float32(5.0)).loss == 5.0


# --- Refused arguments, with the remedy


@pytest.mark.parametrize(
    ("loss_fn", "how", "words"),
    [
        (lambda p, b: b["y"][:, 0], {}, r"returned shape \(4,\), expected one number, .* jnp.mean"),
        (lambda p, b: (of_dict(p, b), {}), {}, r"returned shape \(\(\), \{\}\).* set has_aux=True"),
        (of_dict, {"has_aux": True}, r"returned shape \(\), expected a pair \(loss, aux\)"),
        (lambda p, b: (b["y"], {}), {"has_aux": True}, r"returned shape \(4, 2\), expected a pair"),
    ],
)
def test_a_loss_that_does_not_fit_is_refused_while_tracing(loss_fn, how, words):
    ensemble = ensemble_of([1], PARAMS)
    with pytest.raises(ValueError, match=f"^loss_fn: .*{words}"):
        jax.eval_shape(
            lambda e, b: outer_step(e, b, loss_fn, **TXS, **how), ensemble, batch_of(1, 1, 4)
        )
