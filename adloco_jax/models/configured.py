"""Build the network that settings describe, and the functions that draw and train it."""

from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax.numpy as jnp
from jax import Array
from jaxtyping import PyTree

from adloco_jax.core.types import LossFn
from adloco_jax.errors import own_code
from adloco_jax.models.architectures import ARCHITECTURES
from adloco_jax.models.layers import Adapter
from adloco_jax.settings import SIZES, AdapterSettings, ModelSettings

InitFn = Callable[[Array], PyTree]
"""`init_fn(key) -> params`: draws a model's parameters with a typed PRNG key."""

NO_ADAPTER = AdapterSettings()


def class_count(model: ModelSettings) -> int | None:
    """Return the number of classes of the configured model; None if it is no classifier."""
    if ARCHITECTURES[model.arch].data == "labelled":
        return model.num_classes
    return None


def build_network(
    model: ModelSettings,
    adapter: AdapterSettings = NO_ADAPTER,
    *,
    remat: bool | None = None,
    attention: Literal["xla", "cudnn"] = "xla",
    layer_form: str = "scan",
) -> nn.Module:
    """Build the Flax module of the configured model. With the defaults it runs on any device.

    Args:
      model: Architecture, sizes and types.
      adapter: Low-rank matrices beside the weights; those of rank 0 are none.
      remat: Whether layers are rematerialised: the backward pass computes their activations again.
        None: if `model.remat` is true.
      attention: The kernel of attention: "xla", or "cudnn" for an NVIDIA GPU and bfloat16.
      layer_form: How the program applies the layers: "scan", "call" or "inline"
        (`models.kernels.run_layers`).

    Raises:
      ConfigError: If the architecture's function `build` raises an error.
    """
    # `SIZES` names the settings that are sizes. The keyword `adapter` is given only with an
    # adapter, because some architectures have no such keyword.
    keywords: dict[str, Any] = {name: getattr(model, name) for name in SIZES}
    if adapter.rank:
        keywords["adapter"] = Adapter(adapter.rank, adapter.alpha, adapter.layers)
    # `own_code` turns an error inside `build` into a ConfigError: the architecture may be a user's.
    build = own_code(f"model.arch = {model.arch}")(ARCHITECTURES[model.arch].build)
    return build(
        **keywords,
        dtype=model.dtype,
        checkpoint=model.checkpoint,  # the text of its config.json, or empty
        remat=bool(model.remat) if remat is None else remat,
        attention=attention,
        layer_form=layer_form,
    )


def build_model(
    model: ModelSettings,
    adapter: AdapterSettings = NO_ADAPTER,
    *,
    remat: bool | None = None,
    attention: Literal["xla", "cudnn"] = "xla",
    layer_form: str = "scan",
) -> tuple[InitFn, LossFn]:
    """Return the functions that initialise the model and compute its loss.

    Args:
      model: Architecture, sizes and types.
      adapter: Low-rank matrices beside the weights; those of rank 0 are none.
      remat: Whether layers are rematerialised: the backward pass computes their activations again.
        None: if `model.remat` is true.
      attention: The kernel of attention: "xla", or "cudnn" for an NVIDIA GPU and bfloat16.
      layer_form: How the program applies the layers: "scan", "call" or "inline"
        (`models.kernels.run_layers`).

    Raises:
      ConfigError: If the architecture's functions `build` or `loss` raise an error.
    """
    network = build_network(model, adapter, remat=remat, attention=attention, layer_form=layer_form)
    loss = ARCHITECTURES[model.arch].loss
    with own_code(f"model.arch = {model.arch}"):
        return initialiser(network), loss(network, loss_chunk=model.loss_chunk)


def initialiser(network: nn.Module) -> InitFn:
    """Return the function that draws a network's parameters with a typed PRNG key."""

    def init_fn(key: Array) -> PyTree:
        """Return a tree of parameters, drawn with the key."""
        # Parameters do not depend on the tokens: a single token of any id suffices.
        return network.init(key, jnp.zeros((1, 1), jnp.int32))["params"]

    return init_fn
