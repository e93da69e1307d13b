"""The versions of what a run computes with."""

import functools
import platform
from importlib import metadata

from adloco_jax import __version__


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python and the packages that may change the results of a run."""
    version_of = {"adloco_jax": __version__, "python": platform.python_version()}
    for name in ("jax", "jaxlib", "flax", "optax", "orbax.checkpoint", "numpy"):
        distribution = name.replace(".", "-")  # orbax-checkpoint
        version_of[name] = metadata.version(distribution)
    return version_of
