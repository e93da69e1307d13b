"""Read the weights that a run starts from, and those that stay frozen beside an adapter."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from adloco_jax.engine.spec import Machine
from adloco_jax.errors import ConfigError
from adloco_jax.models import hf
from adloco_jax.models.configured import build_model, build_network
from adloco_jax.models.layers import split_adapter
from adloco_jax.settings import AdapterSettings, ModelSettings


class Base(NamedTuple):
    """The frozen weights of a model with an adapter, and a hash of all of them; else neither."""

    params: PyTree | None = None
    fingerprint: str = ""


def pretrained_params(
    model: ModelSettings, adapter: AdapterSettings, *, seed: int
) -> tuple[PyTree, list[str]]:
    """Load the weights of `model.init_from`; return lines about random and unused heads too.

    A head that they lack is drawn with `seed`.

    Raises ConfigError if there is no such checkpoint or its sizes differ, DataError if it is
    damaged.
    """
    source = model.init_from
    # Frozen weights are read in the dtype in which they are held.
    dtype = model.base_dtype if adapter.rank else "float32"
    loaded = hf.load(source, head=False, merges=not adapter.rank, dtype=dtype)
    require_same_network(model, adapter, loaded)
    params, lines = loaded.params, []
    if loaded.lacks and adapter.rank:
        raise ConfigError(f"adapter.rank: {source} has no {loaded.lacks}; set adapter.rank=0")
    if head := loaded.lacks:
        init_fn, _ = build_model(model)
        params |= {head: jax.jit(init_fn)(jax.random.key(seed))[head]}
        lines.append(f"model.init_from = {source}: has no {head}; a random one is used")
    if loaded.left_out:
        lines.append(f"model.init_from = {source}: left out: {', '.join(loaded.left_out)}")
    if rates := [f"{key}={x}" for key, x in loaded.config.items() if "dropout" in key and x]:
        lines.append(f"model.init_from = {source}: trained without {', '.join(rates)}")
    return params, lines


def frozen(params: PyTree, dtype: str, machine: Machine) -> tuple[Base, PyTree | None]:
    """Divide weights into those that stay frozen, as `dtype`, and an adapter if they have one."""
    adapter, base = split_adapter(params)
    base = hf.as_held(base, dtype)
    sha256 = hf.fingerprint(base)
    if machine.platform == "cpu":  # where host and device then share the arrays
        base = jax.tree.map(jnp.asarray, base)
    return Base(base, sha256), adapter or None


def read_base(
    model: ModelSettings, adapter: AdapterSettings, machine: Machine, *, seed: int
) -> Base:
    """Read the frozen weights of a model with an adapter; raise as `pretrained_params`."""
    if not adapter.rank:
        return Base()
    params, _ = pretrained_params(model, adapter, seed=seed)
    return frozen(params, model.base_dtype, machine)[0]


def require_same_network(
    model: ModelSettings, adapter: AdapterSettings, found: hf.Description | hf.Loaded
) -> None:
    """Raise ConfigError, with all sizes that differ, unless `found` is the configured network."""
    network = build_network(model, adapter)
    names = hf.weight_map(network)
    if names is None or type(found.network) is not names.model:
        raise ConfigError(
            f"model.arch = {model.arch}: {model.init_from} is a {type(found.network).__name__}"
        )
    free = names.free | (set() if found.has_head else {"num_classes"})
    sizes = {ours for ours, _ in names.sizes.values()}
    faults = [
        f"model.{ours} = {getattr(network, ours)}: {model.init_from} has"
        f" {getattr(found.network, ours)}"
        + (f"; unset it: model.{ours}=none" if ours in sizes else "")
        for ours in names.attributes(found.config)
        if ours not in free and getattr(network, ours) != getattr(found.network, ours)
    ]
    own, other = (getattr(each, "adapter", None) for each in (network, found.network))
    if own and other and own != other:
        faults.append(
            f"adapter: {model.init_from} is one of rank {other.rank}, alpha {other.alpha:g} and"
            f" layers {other.layers}; set these, or adapter.rank=0 to train the merged weights"
        )
    if faults:
        raise ConfigError("\n".join(faults))
