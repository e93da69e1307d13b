"""The devices for which a run is compiled: those of this machine, or described by name.

XLA compiles for a described device as for a real one. Programs for a described device cannot be
run.
"""

import os
import re
from collections.abc import Collection

import jax

from adloco_jax.data.files import cache_folder
from adloco_jax.engine.spec import Machine
from adloco_jax.errors import ConfigError


def use_compilation_cache() -> None:
    """Cache compiled programs between runs, in the user's cache folder.

    Nothing is changed if JAX already has a cache folder (`JAX_COMPILATION_CACHE_DIR`). Compiled
    programs are code, so the folder must not be writable by others.
    """
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_folder("programs")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


# Of a GPU's memory, which the commands let JAX take. XLA plans programs for what JAX takes, and for
# a described GPU with four fifths of the memory in the description.
TAKEN, _PLANNED = 0.95, 0.8


def here() -> Machine:
    """The devices of this run, in all processes of the run."""
    local = jax.local_devices()
    limit = (local[0].memory_stats() or {}).get("bytes_limit")
    if limit is None:  # a CPU, whose emulated devices share the RAM
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(local)
    elif local[0].platform == "gpu":  # less than the GPU's where a user lets JAX take less
        limit = int(limit / TAKEN)
    return Machine(tuple(jax.devices()), limit)


# What XLA compiles for. Figures as in openxla/xla, xla/backends/gpu/target_config/specs.
_GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  shared_memory_per_block: 49152
  shared_memory_per_core: {per_core}  threads_per_core_limit: 2048  core_count: {cores}
  fpus_per_core: {fpus}  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535
  block_dim_limit_z: 65535  memory_bandwidth: {bandwidth}  l2_cache_size: {cache}
  clock_rate_ghz: {clock}  device_memory_size: {memory}  shared_memory_per_block_optin: {optin}
  cuda_compute_capability {{ major: {major} }}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{name}"
"""
_AMPERE = {"major": 8, "cores": 108, "fpus": 64, "clock": 1.41, "cache": 41943040}
_AMPERE |= {"per_core": 167936, "optin": 166912}
_HOPPER = {"major": 9, "cores": 132, "fpus": 128, "clock": 1.98, "cache": 52428800}
_HOPPER |= {"per_core": 233472, "optin": 232448}
_BLACKWELL = _HOPPER | {"major": 10, "cores": 148, "clock": 1.965, "cache": 132644864}
# Of each kind: bytes of memory that programs may use, its name, and what else describes it.
_GPUS = {
    "a100-40": (42331013120, "NVIDIA A100-SXM4-40GB", _AMPERE | {"bandwidth": 1555200000000}),
    "a100-80": (85100068864, "NVIDIA A100-SXM4-80GB", _AMPERE | {"bandwidth": 2039040000000}),
    "h100": (84942979072, "NVIDIA H100 80GB HBM3", _HOPPER | {"bandwidth": 3352320000000}),
    "h200": (151397597184, "NVIDIA H200 141GB HBM3e", _HOPPER | {"bandwidth": 4800000000000}),
    "b200": (191514411008, "NVIDIA B200", _BLACKWELL | {"bandwidth": 7672320000000}),
}
_GPU_COUNTS = range(1, 9)  # numbers of GPUs of one host
_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4"}  # chips of a slice by their number
_CUBE = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4"}
# Of each kind: bytes of memory that programs may use, and its slices.
_TPUS = {
    "v5e": (16911433728, _FLAT),
    "v5p": (102738427904, _CUBE),
    "v6e": (33550237696, _FLAT),
}


def kinds() -> list[str]:
    """List the kinds of devices that can be described, with memory and numbers of chips."""
    return [
        f"{kind:8} {memory / 1e9:6.1f} GB, x {', '.join(map(str, _counts(kind)))}"
        for kind, (memory, *_) in (_GPUS | _TPUS).items()
    ]


def more_chips(name: str) -> list[str]:
    """Names of devices of the same kind with more chips than the named one, the fewest first."""
    kind, count = _parts(name)
    return [f"{kind}x{n}" for n in _counts(kind) if n > count]


def _parts(name: str) -> tuple[str, int]:
    """The kind and the number of chips in a device name such as `h100x8`."""
    found = re.fullmatch(r"(.+?)(?:x(\d+))?", name)
    return (found[1], int(found[2] or 1)) if found else ("", 1)


def _counts(kind: str) -> Collection[int]:
    """The numbers of chips with which a kind of device can be described.

    There are none for an unknown kind.
    """
    return _GPU_COUNTS if kind in _GPUS else _TPUS.get(kind, (0, {}))[1]


def described(name: str) -> Machine:
    """Make devices to compile for, from a name such as `h100x8` or `v5px4`.

    Compiled programs cannot be run on such devices. A name without a number means one chip.

    JAX must have been imported with JAX_PLATFORMS=cpu.

    Raises:
      ConfigError: If there is no such kind or number of chips, or the compiler is not installed.
    """
    from jax.experimental import topologies

    kind, count = _parts(name)
    memory, *_ = _GPUS.get(kind) or _TPUS.get(kind) or (0,)
    if count not in _counts(kind):
        known = "\n".join(f"  {line}" for line in kinds())
        raise ConfigError(f"--device {name}: no such kind and number of chips; there are\n{known}")
    try:
        if kind in _GPUS:
            _, title, figures = _GPUS[kind]
            figures = figures | {"name": title, "memory": int(memory * TAKEN / _PLANNED)}
            text = _GPU.format(**figures)
            topology = {"target_config": text, "topology": f"1x1x{count}"}
            devices = topologies.get_topology_desc(platform="cuda", **topology).devices
        else:
            _, slices = _TPUS[kind]
            os.environ.update(TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost")
            os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # other processes may compile, too
            one = {"chips_per_host_bounds": (1, 1, 1)} if count == 1 else {}
            topology = f"{kind}:{slices[count]}"
            devices = topologies.get_topology_desc(topology, platform="tpu", **one).devices
    except (NotImplementedError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"--device {name}: what compiles for it is missing ({reason}); install"
            " 'adloco_jax[plan]'"
        ) from error
    jax.config.update("jax_enable_compilation_cache", False)  # which cannot be read without devices
    return Machine(tuple(devices), memory)
