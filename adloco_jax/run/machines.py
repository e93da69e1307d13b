"""The devices for which a run is compiled: the ones that are here, or ones that a name describes.

A name such as `h100x8` describes devices that this machine does not have. XLA compiles programs for
described devices as it does for real ones. These programs cannot be run here.
"""

import contextlib
import os
import re
from collections.abc import Collection
from pathlib import Path

import jax

from adloco_jax.data.files import cache_folder
from adloco_jax.engine.spec import Machine
from adloco_jax.engine.work import Rates
from adloco_jax.errors import ConfigError


def use_compilation_cache() -> None:
    """Let JAX save compiled programs in the user's cache folder, so that later runs can load them.

    If JAX already has a cache folder (`JAX_COMPILATION_CACHE_DIR`), this function changes nothing.
    Compiled programs are code that runs execute, so other users must not be able to write to the
    folder.
    """
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_folder("programs")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


# TAKEN is the share of a GPU's memory that the commands let JAX reserve; on a real GPU, XLA plans
# programs for the reserved memory. For a described GPU, XLA plans programs for the share _PLANNED
# of the memory that the description states.
TAKEN, _PLANNED = 0.95, 0.8


def here() -> Machine:
    """Return the devices of all processes of this run, and the memory of one device in bytes."""
    local = jax.local_devices()
    limit = (local[0].memory_stats() or {}).get("bytes_limit")
    if limit is None:  # a CPU, whose emulated devices share the RAM
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(local)
    elif local[0].platform == "gpu":
        # The limit is the memory that JAX has reserved: the share TAKEN of the GPU's memory, unless
        # the user lets JAX reserve another share.
        limit = int(limit / TAKEN)
    return Machine(tuple(jax.devices()), limit)


# The description of a GPU that XLA needs to compile for it. The figures are those of openxla/xla,
# xla/backends/gpu/target_config/specs.
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
# For each kind of GPU: the bytes of memory that programs may use, its rates, the name of the GPU,
# and the other figures of the description. The operations are those of dense bfloat16 products by
# the data sheets. XLA's model of a GPU also takes 1 us to start a kernel.
_GPUS = {
    kind: (memory, Rates(operations, bandwidth, 1e-6), name, figures | {"bandwidth": bandwidth})
    for kind, memory, operations, bandwidth, name, figures in (
        ("a100-40", 42331013120, 312e12, 1555200000000, "NVIDIA A100-SXM4-40GB", _AMPERE),
        ("a100-80", 85100068864, 312e12, 2039040000000, "NVIDIA A100-SXM4-80GB", _AMPERE),
        ("h100", 84942979072, 989e12, 3352320000000, "NVIDIA H100 80GB HBM3", _HOPPER),
        ("h200", 151397597184, 989e12, 4800000000000, "NVIDIA H200 141GB HBM3e", _HOPPER),
        ("b200", 191514411008, 2250e12, 7672320000000, "NVIDIA B200", _BLACKWELL),
    )
}
_GPU_COUNTS = range(1, 9)  # numbers of GPUs of one host
# How the chips of a TPU slice are arranged; the key is the number of chips.
_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4"}
_CUBE = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4"}
# For each kind of TPU: the bytes of memory that programs may use, its rates by Google's
# documentation, and the possible slices. No time is known to start a part of a TPU's program.
_TPUS = {
    "v5e": (16911433728, Rates(197e12, 819e9, 0), _FLAT),
    "v5p": (102738427904, Rates(459e12, 2765e9, 0), _CUBE),
    "v6e": (33550237696, Rates(918e12, 1640e9, 0), _FLAT),
}


def machine_id() -> str:
    """Return an id of this machine since its last boot.

    A process can be ended by a signal only on the machine with the same id.
    """
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.uname().nodename
    return os.uname().nodename


def kinds() -> list[str]:
    """List the kinds of devices that can be described: one line for each kind.

    A line has the name of the kind, the memory of a device, and the possible numbers of chips.
    """
    return [
        f"{kind:8} {memory / 1e9:6.1f} GB, x {', '.join(map(str, _counts(kind)))}"
        for kind, (memory, *_) in (_GPUS | _TPUS).items()
    ]


def more_chips(name: str) -> list[str]:
    """Return the names for more chips of the same kind, in ascending order.

    For `h100x6` the result is `["h100x7", "h100x8"]`.
    """
    kind, count = _parts(name)
    return [f"{kind}x{n}" for n in _counts(kind) if n > count]


def _parts(name: str) -> tuple[str, int]:
    """Split a name such as `h100x8` into the kind of device and the number of chips."""
    found = re.fullmatch(r"(.+?)(?:x(\d+))?", name)
    return (found[1], int(found[2] or 1)) if found else ("", 1)


def _counts(kind: str) -> Collection[int]:
    """Return the possible numbers of chips of a kind of device; none if the kind is unknown."""
    return _GPU_COUNTS if kind in _GPUS else _TPUS[kind][2] if kind in _TPUS else ()


def rates(name: str) -> Rates:
    """Return how fast a device is at most that a name such as `h100x8` describes."""
    return (_GPUS | _TPUS)[_parts(name)[0]][1]


def described(name: str) -> Machine:
    """Make devices that a name describes, so that programs can be compiled for them.

    The name `h100x8` means eight chips of the kind `h100`; the name `h100` means one chip. The
    devices do not exist on this machine, so the compiled programs cannot be run.

    The environment variable JAX_PLATFORMS must have been `cpu` when JAX was imported.

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
            *_, title, figures = _GPUS[kind]
            figures = figures | {"name": title, "memory": int(memory * TAKEN / _PLANNED)}
            text = _GPU.format(**figures)
            topology = {"target_config": text, "topology": f"1x1x{count}"}
            devices = topologies.get_topology_desc(platform="cuda", **topology).devices
        else:
            *_, slices = _TPUS[kind]
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
    # JAX cannot load a cached program of a device that does not exist.
    jax.config.update("jax_enable_compilation_cache", False)
    return Machine(tuple(devices), memory)
