"""Make the optimizers and the aggregator that settings name."""

import functools
import math
from collections.abc import Callable

import jax
import optax
from jaxtyping import PyTree

from adloco_jax.contrib import AGGREGATORS, INNER_OPTIMIZERS, OUTER_OPTIMIZERS
from adloco_jax.core.arguments import takes
from adloco_jax.core.outer import Aggregator
from adloco_jax.core.types import label_by_name
from adloco_jax.errors import ConfigError, own_code
from adloco_jax.models.architectures import ARCHITECTURES
from adloco_jax.settings import InnerSettings, OuterSettings

Labeller = Callable[[PyTree], PyTree]
"""`label_params(params)` labels each parameter (`models.architectures.Architecture`)."""


def labeller(arch: str, label_params: Labeller | None = None) -> Labeller:
    """Return what labels parameters: what the caller gives, else the architecture's, or by name."""
    return label_params or ARCHITECTURES[arch].label_params or label_by_name


def parameter_labels(
    params: PyTree, label_params: Labeller, *, inner: InnerSettings, outer: OuterSettings
) -> dict[str, str]:
    """Label each parameter, by its path, if the optimizer or the aggregator uses labels.

    Raises ConfigError if labels are not known, or not possible.
    """
    used = takes(INNER_OPTIMIZERS[inner.tx], "label_params")
    used = used and (inner.tx != "adamw" or inner.decay == "matrices")
    if not (used or takes(AGGREGATORS[outer.aggregator], "label_params")):
        return {}
    with own_code("label_params"):
        labels = label_params(params)
    if jax.tree.structure(labels) != jax.tree.structure(params):
        raise ConfigError(
            "label_params: its tree differs from the parameters'; return one label each"
        )
    named = {}
    for (path, leaf), label in zip(
        jax.tree.leaves_with_path(params), jax.tree.leaves(labels), strict=True
    ):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        kind = str(label).removeprefix("stacked_")
        least = {"matrix": 2, "embedding": 0, "head": 0, "other": 0}.get(kind, math.inf)
        if leaf.ndim < least + (kind != label):
            raise ConfigError(
                f"label_params: {name} {list(leaf.shape)}: has {label!r}; need matrix (two axes),"
                " embedding, head or other, with stacked_ before it if one more axis counts layers"
            )
        named[name] = str(label)
    return named


def inner_transform(
    inner: InnerSettings, label_params: Labeller, tx: optax.GradientTransformation | None = None
) -> optax.GradientTransformation:
    """Make the workers' optimizer (`tx` or `inner.tx`) with learning rate 1 and gradient clipping.

    A round multiplies each update by the learning rate, which may change with every update.
    """
    # The state has one structure with and without clipping, so a resumed run may switch it.
    norm = inner.clip_norm
    clip = optax.identity() if norm is None else optax.clip_by_global_norm(norm)
    if tx is None:
        with own_code(f"inner.tx = {inner.tx}"):
            tx = INNER_OPTIMIZERS[inner.tx](
                beta1=inner.beta1,
                beta2=inner.beta2,
                weight_decay=inner.weight_decay,
                decay=inner.decay,
                label_params=label_params,
            )
    return optax.chain(clip, tx)


def aggregator(outer: OuterSettings, label_params: Labeller) -> Aggregator:
    """Return the configured aggregator, with the labels of the parameters if it takes them."""
    rule = AGGREGATORS[outer.aggregator]
    if not takes(rule, "label_params"):
        return rule
    return functools.partial(rule, label_params=label_params)


def outer_transform(
    outer: OuterSettings, tx: optax.GradientTransformation | None = None
) -> optax.GradientTransformation:
    """Make the trainers' optimizer (`tx` or `outer.tx`)."""
    with own_code(f"outer.tx = {outer.tx}"):
        chosen = tx or OUTER_OPTIMIZERS[outer.tx](momentum=outer.momentum)
    return optax.chain(chosen, optax.scale(outer.learning_rate))
