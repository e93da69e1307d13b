"""From settings to functions: the network, its loss, the optimizers, what programs are made of."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import PyTree

from adloco_jax.core.base import LossFn
from adloco_jax.core.gradstats import resolve_estimator
from adloco_jax.models.llama import Llama, next_token_loss
from adloco_jax.run import controller as control
from adloco_jax.run.config import Settings
from adloco_jax.run.programs import Spec

InitFn = Callable[[Array], PyTree]
"""`init_fn(key) -> params`, from a typed PRNG key."""


def build_model(settings: Settings) -> tuple[InitFn, LossFn]:
    """The configured network as two plain functions."""
    model = settings.model
    network = Llama(
        vocab_size=model.vocab_size,
        width=model.width,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        mlp_width=model.mlp_width,
        max_length=model.max_length,
        norm_eps=model.norm_eps,
        rope_theta=model.rope_theta,
        dtype=model.dtype,
        remat=model.remat,
    )

    def init_fn(key):
        return network.init(key, jnp.zeros((1, 1), jnp.int32))["params"]

    return init_fn, next_token_loss(network, sequences_per_chunk=model.loss_chunk)


def inner_transform(settings: Settings) -> optax.GradientTransformation:
    """The workers' optimizer at learning rate 1: the rate is an input of each update."""
    inner = settings.inner
    # A state of one structure with and without clipping, so that a run may change it.
    clip = optax.identity()
    if inner.clip_norm is not None:
        clip = optax.clip_by_global_norm(inner.clip_norm)
    if inner.tx == "sgd":
        return optax.chain(clip, optax.sgd(1.0))
    adamw = optax.adamw(1.0, b1=inner.beta1, b2=inner.beta2, weight_decay=inner.weight_decay)
    return optax.chain(clip, adamw)


def outer_transform(settings: Settings) -> optax.GradientTransformation:
    """The trainers' optimizer on the pseudo-gradient."""
    outer = settings.outer
    if outer.tx == "adamw":
        return optax.adamw(outer.learning_rate, weight_decay=outer.weight_decay)
    if outer.tx == "sgd":
        return optax.sgd(outer.learning_rate)
    return optax.sgd(outer.learning_rate, momentum=outer.momentum, nesterov=True)


def program_spec(settings: Settings, init_fn: InitFn, loss_fn: LossFn, row_length: int) -> Spec:
    """What every program of the run shares, from the settings and the model's functions."""
    batching = settings.batching
    uses_inner_products = batching.test in ("inner_product", "augmented")
    return Spec(
        loss_fn=loss_fn,
        params=jax.eval_shape(init_fn, jax.random.key(0)),
        inner_tx=inner_transform(settings),
        outer_tx=outer_transform(settings),
        num_micro_batches=settings.inner.steps_per_round,
        row_length=row_length,
        max_test_sequences=batching.test_batch_size or control.AUTO_TEST_MAX,
        estimator=resolve_estimator(
            batching.estimator, loss_fn, inner_products=uses_inner_products
        ),
        inner_products=uses_inner_products,
        reset_inner_state=settings.inner.state == "reset",
    )
