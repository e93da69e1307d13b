"""What a run needs before it starts: `adloco plan CONFIG`, `--memory`, and `--device h100x8`.

Every program is compiled, for devices here or those that a name describes; none is run. A mode says
how programs spare memory. A micro-batch is the part of a worker's batch that a device takes at
once. The record of a run is `config.json` in its folder.
"""

import contextlib
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree
from ml_collections import ConfigDict
from tqdm import tqdm

from adloco_jax.config import completed, validate
from adloco_jax.data import load_corpus
from adloco_jax.data.sampling import with_rows
from adloco_jax.engine.fitting import base_dtype_is_open, base_dtype_line, fitting_choice
from adloco_jax.engine.memory import (
    Choice,
    Mode,
    NothingFits,
    Peak,
    largest_peak,
    program_peaks,
)
from adloco_jax.engine.model import spec_of
from adloco_jax.engine.spec import (
    TAKEN,
    Compiled,
    Compiling,
    Machine,
    OnCompile,
    ProgramSpec,
    num_values,
    this_machine,
)
from adloco_jax.errors import ConfigError, UserError, counted, in_bytes
from adloco_jax.host import processes
from adloco_jax.loop.adloco import start
from adloco_jax.models.configured import class_count
from adloco_jax.run.before.checks import check_inputs
from adloco_jax.run.before.describe import length_lines, plan_lines, run_header
from adloco_jax.run.kept.folder import recorded
from adloco_jax.settings import Config


def plan(
    config: ConfigDict | Config,
    workdir: str | Path | None = None,
    *,
    accept_config_change: bool = False,
    memory: bool = False,
) -> str:
    """Describe the memory, communication and tokens of a run, without training it.

    Its rows are made, or found in the user's cache, as by the run. The last lines name what only
    the run can check.

    Args:
      config: A config, checked or not.
      workdir: The run's folder, whose record completes the config; None: the run has none yet.
      accept_config_change: Whether the run in the folder may go on with changed settings.
      memory: Whether programs are compiled, to find the largest micro-batch and each one's memory.

    Returns:
      Lines of text.

    Raises:
      ConfigError: If config, folder, checkpoint or text cannot be used.
      DataError: If the text, the tokenizer or the checkpoint is missing or damaged.
      CheckpointError: If the record of the run in `workdir` cannot be read.
      ResourceError: If the hub does not answer, or with `memory` nothing fits.
    """
    folder = None
    if workdir is not None:
        folder = Path(workdir)
    notes: list[str] = []  # lines on what was found in files, and how the rows were made
    # `run_on_all`: an error in one process is raised in all, so that none waits for it.
    settings = processes.run_on_all(lambda: completed(validate(config), folder, note=notes.append))
    unchecked = processes.run_on_all(
        lambda: check_inputs(settings, folder, accept_config_change=accept_config_change)
    )
    commit = ""  # of the hub's data set: the one with which the run began, else the newest
    if folder is not None:
        before = recorded(folder)
        if before is not None:
            commit = before.data_commit
    corpus = processes.run_on_all(
        lambda: load_corpus(
            settings,
            num_classes=class_count(settings.model),
            commit=commit,
            run=folder,
            note=notes.append,
        )
    )
    settings = with_rows(settings, len(corpus.rows))
    spec = spec_of(settings, this_machine())
    lines = [*corpus.describe().splitlines(), *plan_lines(settings, spec)]
    # None: how many held-out rows the run will use is not known here.
    lines += length_lines(settings, most_tokens_per_s(spec), None)
    if memory:  # compile, and tabulate the memory of each program
        is_open = base_dtype_is_open(settings)  # whether `model.base_dtype` is found by what fits
        settings, choice = fitting_choice(settings, this_machine())
        if is_open:
            lines.append(base_dtype_line(settings))
        # Trainers with the workers that join later too, when most memory is needed.
        pool = start(settings.ensemble, settings.batching, choice.max_batch_size, whole_pool=True)
        peaks = program_peaks(pool, choice.programs, settings.batching, settings.switch)
        machine = choice.programs.spec.machine
        budget = machine.budget(settings.batching.memory_frac)
        lines += [_fits_line(choice), "", *_table(peaks, machine.device_bytes, budget)]
    else:
        lines.append("not compiled: --memory does")
    return "\n".join([*notes, *lines, *(f"not checked: {line}" for line in unchecked)])


def device_plan(config: ConfigDict | Config, device: str) -> tuple[list[str], dict]:
    """Compile a run's programs for devices that need not be here, and report their memory.

    `device` names the devices, such as "h100x8". Returns lines of Markdown, and the same as JSON,
    in which `fits` says whether the run fits. Data and weights are not read.

    Raises ConfigError if the config is invalid, there is no such checkpoint or kind of device, or
    the compiler for it is not installed; DataError if the checkpoint is damaged; ResourceError if
    the hub that has it does not answer.
    """
    start_s = time.perf_counter()
    settings = validate(config)
    machine = machine_named(device)
    try:
        settings = completed(settings)
    except UserError:  # the checkpoint, or the text, cannot be read here
        if settings.model.init_from:
            raise
        settings = completed(settings, reads=False)  # without the text, the config suffices
    budget = machine.budget(settings.batching.memory_frac)
    record: dict = {"device": device, "device_bytes": machine.device_bytes, "budget_bytes": budget}
    is_open = base_dtype_is_open(settings)  # whether `model.base_dtype` is found by what fits
    with _progress_bar(device) as on_compile:  # which is called for each program
        try:
            # Compiles for one way after another to spare memory, until the run fits.
            settings, choice = fitting_choice(settings, machine, on_compile)
        except NothingFits as error:
            peaks = error.peaks  # of the last mode that was tried
            found = [f"Nothing fits: {error}."]
            record["fits"] = False
            record["fault"] = str(error)
        else:
            peaks = choice.peaks
            spec = choice.programs.spec
            found = [*run_header(settings, spec, choice.max_batch_size), _fits_line(choice)]
            if is_open:
                found.append(base_dtype_line(settings))
            record["fits"] = True
            record["mode"] = str(Mode(spec.sequential, spec.remat))
            record["base_dtype"] = settings.model.base_dtype
            record["max_batch_size"] = choice.max_batch_size
            record["model_shards"] = spec.model_shards
    record["programs"] = {name: peak._asdict() for name, peak in peaks.items()}
    record["largest_bytes"] = largest_peak(peaks)
    record["compile_s"] = time.perf_counter() - start_s

    lines = [f"Compiled for {device}, not run.", ""]
    lines += [f"- {line}" for line in found]
    lines += [f"- Compiled in {record['compile_s']:.0f} s.", ""]
    lines += _table(peaks, machine.device_bytes, budget)
    return lines, record


def _fits_line(choice: Choice) -> str:
    """Return a line that says which mode, micro-batch and number of devices per model fit."""
    spec = choice.programs.spec
    mode = Mode(spec.sequential, spec.remat)
    shards = counted(spec.model_shards, "device")
    return f"Fits: {mode}; micro-batch {choice.max_batch_size}; {shards} per model."


def _table(peaks: Mapping[str, Peak], device_bytes: int, budget: int) -> list[str]:
    """Return the lines of a Markdown table of the memory of programs, by the compiler's analysis.

    `peaks` has the memory of each program by its name. The rest of the run's state lies beside it.
    A device has `device_bytes`, of which a run may use `budget`.
    """
    lines = ["| program | its memory | state beside it | sum |", "|---|---|---|---|"]
    for name, peak in peaks.items():
        lines.append(
            f"| {name} | {in_bytes(peak.program)} | {in_bytes(peak.beside)}"
            f" | {in_bytes(peak.total)} |"
        )
    largest = largest_peak(peaks)
    lines.append(
        f"| **largest**, {largest / device_bytes:.0%} of {in_bytes(device_bytes)}; a run may use"
        f" {in_bytes(budget)} | | | **{in_bytes(largest)}** |"
    )
    return lines


@contextlib.contextmanager
def _progress_bar(device: str) -> Iterator[OnCompile]:
    """Show a progress bar; yield what moves it when a program is compiled."""
    with tqdm(desc=f"compiling for {device}", unit=" programs", leave=False, disable=None) as bar:

        def on_compile(event: Compiling | Compiled) -> None:
            """Name and count a program that has been compiled; ignore one that begins."""
            if isinstance(event, Compiled):
                bar.set_postfix_str(str(event.key))
                bar.update()

        yield on_compile


# For a described GPU, XLA plans programs for this share of the memory that the description states.
_PLANNED = 0.8
# What XLA needs to compile for a GPU: openxla/xla, xla/backends/gpu/target_config/specs.
_GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  shared_memory_per_block: 49152
  shared_memory_per_core: {per_core}  threads_per_core_limit: {threads}  core_count: {cores}
  fpus_per_core: {fpus}  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535
  block_dim_limit_z: 65535  memory_bandwidth: {bandwidth}  l2_cache_size: {cache}
  clock_rate_ghz: {clock}  device_memory_size: {memory}  shared_memory_per_block_optin: {optin}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{name}"
"""
# Figures for `_GPU`: those of an architecture, to which those of a kind of GPU are added.
_AMPERE = {
    "major": 8,
    "minor": 0,
    "threads": 2048,
    "cores": 108,
    "fpus": 64,
    "clock": 1.41,
    "cache": 41943040,
    "per_core": 167936,
    "optin": 166912,
}
_HOPPER = {
    "major": 9,
    "minor": 0,
    "threads": 2048,
    "cores": 132,
    "fpus": 128,
    "clock": 1.98,
    "cache": 52428800,
    "per_core": 233472,
    "optin": 232448,
}
_BLACKWELL = _HOPPER | {"major": 10, "cores": 148, "clock": 1.965, "cache": 132644864}
_RTX_30 = {
    "major": 8,
    "minor": 6,
    "threads": 1536,
    "fpus": 128,
    "clock": 1.7,
    "per_core": 102400,
    "optin": 101376,
}
_RTX_40 = _RTX_30 | {"minor": 9, "clock": 2.5}
# How chips are arranged: the GPUs of one host, and slices of TPUs; the key is the number of chips.
_HOST = {n: f"1x1x{n}" for n in range(1, 9)}
_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4"}
_CUBE = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4"}


class _Kind(NamedTuple):
    """A kind of device."""

    num_bytes: int  # usable memory
    flops_per_s: float  # dense bfloat16 operations, by the data sheet
    arrangements: dict[int, str]  # by possible number of chips
    gpu: dict[str, Any]  # figures of a GPU's description (`_GPU`); empty: a TPU


def _gpu_kind(
    name: str, num_bytes: float, flops_per_s: float, bandwidth: float, figures: dict[str, Any]
) -> _Kind:
    """Describe a kind of GPU, whose `name` is that in JAX.

    `bandwidth` of its memory is in bytes per second; `figures` are for its description (`_GPU`).
    """
    gpu = figures | {"name": name, "bandwidth": int(bandwidth)}
    return _Kind(int(num_bytes), flops_per_s, _HOST, gpu)


_GIB = 2**30
# By the name that `--device` takes before the number of chips.
_KINDS = {
    "a100-40": _gpu_kind("NVIDIA A100-SXM4-40GB", 42331013120, 312e12, 1555200000000, _AMPERE),
    "a100-80": _gpu_kind("NVIDIA A100-SXM4-80GB", 85100068864, 312e12, 2039040000000, _AMPERE),
    "h100": _gpu_kind("NVIDIA H100 80GB HBM3", 84942979072, 989e12, 3352320000000, _HOPPER),
    "h200": _gpu_kind("NVIDIA H200 141GB HBM3e", 151397597184, 989e12, 4800000000000, _HOPPER),
    "b200": _gpu_kind("NVIDIA B200", 191514411008, 2250e12, 7672320000000, _BLACKWELL),
    # Memory is what the driver leaves of 8, 12, 16, 16, 24 and 24 GiB.
    "rtx4060": _gpu_kind(
        "NVIDIA GeForce RTX 4060",
        7.75 * _GIB,
        30.2e12,
        272e9,
        _RTX_40 | {"cores": 24, "cache": 25165824},
    ),
    "rtx3060": _gpu_kind(
        "NVIDIA GeForce RTX 3060",
        11.75 * _GIB,
        25.5e12,
        360e9,
        _RTX_30 | {"cores": 28, "cache": 2359296},
    ),
    "rtx4060ti": _gpu_kind(
        "NVIDIA GeForce RTX 4060 Ti",
        15.7 * _GIB,
        44.1e12,
        288e9,
        _RTX_40 | {"cores": 34, "cache": 33554432},
    ),
    "rtx4080": _gpu_kind(
        "NVIDIA GeForce RTX 4080",
        15.7 * _GIB,
        97.5e12,
        716.8e9,
        _RTX_40 | {"cores": 76, "cache": 67108864},
    ),
    "rtx3090": _gpu_kind(
        "NVIDIA GeForce RTX 3090",
        23.69 * _GIB,
        71e12,
        936.2e9,
        _RTX_30 | {"cores": 82, "cache": 6291456},
    ),
    "rtx4090": _gpu_kind(
        "NVIDIA GeForce RTX 4090",
        23.65 * _GIB,
        165.2e12,
        1008e9,
        _RTX_40 | {"cores": 128, "cache": 75497472},
    ),
    "v5e": _Kind(16911433728, 197e12, _FLAT, {}),
    "v5p": _Kind(102738427904, 459e12, _CUBE, {}),
    "v6e": _Kind(33550237696, 918e12, _FLAT, {}),
}


def kinds() -> list[str]:
    """Return a line on each kind of device that `--device` can name: memory, numbers of chips."""
    lines = []
    for name, kind in _KINDS.items():
        counts = ", ".join(map(str, kind.arrangements))
        lines.append(f"{name:8} {kind.num_bytes / 1e9:6.1f} GB, x {counts}")
    return lines


def check_kind(name: str) -> None:
    """Raise ConfigError, with all kinds, unless a name such as `h100x8` describes devices."""
    kind, count = _kind_and_count(name)
    if kind not in _KINDS or count not in _KINDS[kind].arrangements:  # by number of chips
        known = "\n".join(f"  {line}" for line in kinds())
        raise ConfigError(f"--device {name}: no such kind and number of chips; there are\n{known}")


def _kind_and_count(name: str) -> tuple[str, int]:
    """Split a name such as h100x8 into the kind, which may not exist, and the number of chips.

    Without a number there is one chip.
    """
    found = re.fullmatch(r"(.+?)(?:x(\d{1,2}))?", name)
    if found is None:  # an empty name
        return "", 1
    kind, count = found.groups()
    return kind, int(count or 1)


def most_tokens_per_s(spec: ProgramSpec) -> float:
    """Return a model's tokens per second at the peak of the devices; NaN if that is not known.

    A token takes six operations for each parameter (Kaplan et al. 2020, arXiv 2001.08361): two
    forward, two backward, and two for its own gradient, which a frozen one does not have. A table
    of embeddings beside a head takes none.
    """
    # Operations per second by the name that JAX gives a GPU; other devices are not known.
    peaks = {kind.gpu["name"]: kind.flops_per_s for kind in _KINDS.values() if kind.gpu}
    devices = spec.machine.devices
    flops_per_s = len(devices) * peaks.get(devices[0].device_kind, math.nan)
    trained = _num_multiplied(spec.params)
    frozen = _num_multiplied(spec.base or {})
    flops_per_token = 6 * trained + 4 * frozen
    return flops_per_s / flops_per_token


def _num_multiplied(params: PyTree) -> int:
    """Count the parameters that are multiplied with activations.

    Those of the embeddings are, if they serve as the head too; beside a head they are looked up.
    """
    if "head" in params:
        return num_values(params) - num_values(params.get("embed"))
    return num_values(params)


def machine_named(name: str) -> Machine:
    """Make devices that a name describes, such as `h100x8` (eight chips) or `h100`, to compile for.

    JAX_PLATFORMS must have been `cpu` when JAX was imported. Raises ConfigError if there is no such
    kind or number of chips, or the compiler is not installed.
    """
    from jax.experimental import topologies

    check_kind(name)
    kind, count = _kind_and_count(name)
    num_bytes = _KINDS[kind].num_bytes
    gpu = _KINDS[kind].gpu  # empty: a TPU
    arrangement = _KINDS[kind].arrangements[count]  # such as "2x2"
    try:
        if gpu:
            # The compiler plans for the share `_PLANNED` of the stated memory, a run for the share
            # `TAKEN` of the device's. So the memory is stated with which both plan for the same.
            config = _GPU.format(**gpu, memory=int(num_bytes * TAKEN / _PLANNED))
            topology = topologies.get_topology_desc(
                platform="cuda", target_config=config, topology=arrangement
            )
        else:
            os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # the library asks no metadata server
            os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
            os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # other processes may compile, too
            options = {}
            if count == 1:  # a host has more
                options["chips_per_host_bounds"] = (1, 1, 1)
            slices = f"{kind}:{arrangement}"
            topology = topologies.get_topology_desc(slices, platform="tpu", **options)
        devices = tuple(topology.devices)
    except (NotImplementedError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"--device {name}: what compiles for it is missing ({reason}); install"
            " 'adloco_jax[plan]'"
        ) from error
    # JAX cannot load a cached program of a device that does not exist.
    jax.config.update("jax_enable_compilation_cache", False)
    return Machine(devices, num_bytes)
