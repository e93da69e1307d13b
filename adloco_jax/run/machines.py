"""The machine that a run is for: this one, or one that is described by name and not there.

XLA compiles for a described device as it does for a real one. Nothing runs on it: what comes out is
compiled, not run.
"""

import os

import jax

from adloco_jax.engine.spec import Machine


def here() -> Machine:
    """The devices of this program, of all its processes."""
    local = jax.local_devices()
    limit = (local[0].memory_stats() or {}).get("bytes_limit")
    if limit is None:  # a CPU, whose emulated devices share the RAM
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(local)
    return Machine(tuple(jax.devices()), limit)
