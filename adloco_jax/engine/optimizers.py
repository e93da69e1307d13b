"""Make the optimizers and the aggregator that settings name.

The aggregator makes a trainer's outer gradient from its workers' differences. A label names the
kind of a parameter, such as "matrix" or "embedding"; some optimizers treat kinds differently. An
error in a user's own function becomes ConfigError (`own_code`).
"""

import functools
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
    """Choose the function that labels parameters.

    It is the caller's `label_params`, else the one of the architecture `arch`, else
    `label_by_name`.
    """
    return label_params or ARCHITECTURES[arch].label_params or label_by_name


def parameter_labels(
    params: PyTree, label_params: Labeller, *, inner: InnerSettings, outer: OuterSettings
) -> dict[str, str]:
    """Return each parameter's label, by its path; an empty dict if no function uses labels.

    The inner optimizer may use them (AdamW only with `inner.decay = "matrices"`), or the
    aggregator. `params` may be shapes.

    Raises ConfigError if `label_params` raises an error or returns another tree than that of
    `params`, if a label is none of those known, or if the parameter has too few axes for it.
    """
    # A function that uses labels has a parameter of this name.
    used_inside = takes(INNER_OPTIMIZERS[inner.tx], "label_params")
    if inner.tx == "adamw" and inner.decay != "matrices":
        used_inside = False
    used_outside = takes(AGGREGATORS[outer.aggregator], "label_params")
    if not used_inside and not used_outside:
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
        is_known = kind in ("matrix", "embedding", "head", "other")
        fewest_axes = 2 if kind == "matrix" else 0
        if kind != str(label):
            fewest_axes += 1  # which counts layers
        if not is_known or leaf.ndim < fewest_axes:
            raise ConfigError(
                f"label_params: {name} {list(leaf.shape)}: has {label!r}; need matrix (two axes),"
                " embedding, head or other, with stacked_ before it if one more axis counts layers"
            )
        named[name] = str(label)
    return named


def inner_transform(
    inner: InnerSettings, label_params: Labeller, tx: optax.GradientTransformation | None = None
) -> optax.GradientTransformation:
    """Make the workers' optimizer with learning rate 1, after the clipping of gradients.

    It is `tx`, or if that is None the one that the settings name, which is given `label_params`. A
    round multiplies each update by the learning rate, which may change with every update. Raises
    ConfigError if the function that the settings name raises an error.
    """
    # The state has one structure with and without clipping, so a resumed run may switch it.
    if inner.clip_norm is None:
        clip = optax.identity()
    else:
        clip = optax.clip_by_global_norm(inner.clip_norm)
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
    """Return the configured aggregator; `label_params` is bound to it if it has this parameter."""
    rule = AGGREGATORS[outer.aggregator]
    if not takes(rule, "label_params"):
        return rule
    return functools.partial(rule, label_params=label_params)


def outer_transform(
    outer: OuterSettings, tx: optax.GradientTransformation | None = None
) -> optax.GradientTransformation:
    """Make the trainers' optimizer, whose updates are multiplied by `outer.learning_rate`.

    It is `tx`, or if that is None the one that the settings name. Raises ConfigError if the
    function that the settings name raises an error.
    """
    if tx is None:
        with own_code(f"outer.tx = {outer.tx}"):
            tx = OUTER_OPTIMIZERS[outer.tx](momentum=outer.momentum)
    return optax.chain(tx, optax.scale(outer.learning_rate))
