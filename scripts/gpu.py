"""Measure training on one GPU, and write the table of docs/GPU.md.

    python scripts/gpu.py [--minutes 20] [--peak FLOP/S] [--results runs/gpu/results.jsonl]
    python scripts/gpu.py --size toy    all parts on a CPU; the figures mean nothing

Each part runs in a separate process, for at most PART_LIMIT_S, and ends with a line in the results
file. The same command continues with the parts that have no line. Nothing is downloaded.
"""

import argparse
import dataclasses
import gc
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from benchmark import fit_random, round_times, statistics_times
from faults import differences, state_of
from side_by_side import (
    SHAPES,
    InnerSteps,
    Shape,
    config_of,
    measure,
    random_tokens,
    settings_of,
    torch_lacks,
)
from timing import interleave, machine, ratio, report

from adloco_jax.config import validate
from adloco_jax.engine.programs import Programs, needed_bytes
from adloco_jax.engine.spec import here
from adloco_jax.engine.work import Rates, count
from adloco_jax.errors import ConfigError, UserError
from adloco_jax.loop.adloco import start
from adloco_jax.run.assemble import spec_of
from adloco_jax.run.choose import reachable_keys
from adloco_jax.run.observers import measured_peaks
from adloco_jax.run.plan import configured_choice, plan

ROOT = Path(__file__).resolve().parents[1]
PART_LIMIT_S = 450
TABLE = re.compile(r"(?<=<!-- table -->\n).*(?=<!-- end of the table -->)", re.DOTALL)

# Dense bfloat16 FLOP/s and the memory's bytes/s by the vendor's data sheets ("NVIDIA H100", "H200",
# "A100", "L40S Tensor Core GPU"), which print twice as many FLOP/s, with sparsity. XLA's model of a
# GPU takes 1 us to start a kernel. The first whose words are in the kind.
RATES = {
    "H100 PCIe": Rates(756e12, 2.0e12, 1e-6),
    "H100 NVL": Rates(835e12, 3.9e12, 1e-6),
    "H200 NVL": Rates(835e12, 4.8e12, 1e-6),
    "H100": Rates(989e12, 3.35e12, 1e-6),
    "H200": Rates(989e12, 4.8e12, 1e-6),
    "A100": Rates(312e12, 2.04e12, 1e-6),
    "L40S": Rates(362e12, 0.864e12, 1e-6),
}
# A published share of the peak, to compare with.
PUBLISHED = (
    "published: 0.398, 50 M parameters on one H100,"
    " [autoresearch](https://github.com/karpathy/autoresearch/blob/228791f/program.md)"
)


@dataclasses.dataclass(frozen=True)
class Size:
    """The measured model, its batch in sequences, and the numbers of repeats."""

    shape: Shape
    batch: int
    repeats: int
    round_steps: int
    batch_cap: int  # of the search for the largest batch
    config: str  # of the run that is resumed, with what is changed in it
    changes: dict[str, object]


# MicroLlama's run with every mechanism, on Python's standard library, with 2 layers, so that the
# saved and compared states are small.
_SHORT_RUN = {"num_rounds": 4, "model.num_layers": 2, "data.source": "stdlib"}
_SHORT_RUN |= {"model.init_from": ""}
_SHORT_RUN |= dict.fromkeys(("data.path", "data.name", "data.heldout_split", "model.init_from"), "")
_SHORT_RUN |= {"data.tokenizer": "bytes", "data.num_sequences": 500, "eval.num_sequences": 8}
_SHORT_RUN |= {f"ensemble.num_{name}": 2 for name in ("trainers", "workers")}
_SHORT_RUN |= {"inner.steps_per_round": 4, "batching.initial_batch_size": 2}
_SHORT_RUN |= {"batching.max_batch_size": 4, "batching.batch_cap": 8, "merge.every_rounds": 3}
_TOY = {"vocab_size": 257, "width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
_TOY |= {"mlp_width": 32, "loss_chunk": 1}
SIZES = {
    "microllama": Size(SHAPES["microllama"], 8, 10, 50, 1024, "microllama", _SHORT_RUN),
    "toy": Size(Shape(_TOY, 16, 4), 2, 2, 2, 2, "faults", {"num_rounds": 4}),
}


def speed(size: Size) -> dict:
    """Time the inner steps and PyTorch's steps (compiled, with fused AdamW) alternately."""
    lacks = torch_lacks()
    figures = measure(size.shape, size.batch, 1, size.repeats, with_torch=not lacks)
    ours, compiled = figures["adloco_jax"], figures.get("compile")
    low, median, high = ours["tokens_per_s"]
    result: dict[str, Any] = {"flops_per_s": ours["flops_per_s"]}
    result["tokens"] = {"low": low, "median": median, "high": high}
    if compiled is None:
        result["torch"] = lacks or "torch.compile does not work here"
    else:
        tokens = float(compiled["tokens_per_s"][1])
        eager = float(figures["eager"]["tokens_per_s"][1])
        result["torch"] = {"ratio": median / tokens, "tokens": tokens, "eager": eager}
    return result


def statistics(size: Size) -> dict:
    """Ratio of the time of per-example statistics to the time of the same batch's gradient."""
    times, extra_mib = statistics_times(size.shape, size.batch, ["taps"], size.repeats)
    report("statistics", times)
    figures = {"time": ratio(times, "taps", "plain"), "extra_mib": extra_mib["taps"]}
    return {"statistics": figures}


def whole_round(size: Size) -> dict:
    """Ratio of the time of a round, with batch-size test and host work, to its inner steps."""
    shape = dataclasses.replace(size.shape, num_steps=size.round_steps)
    times = round_times(shape, size.batch, rounds=size.repeats, blocks=1)
    report("round", times)
    return {"round": {"ratio": ratio(times, "round", "bare inner steps")}}


def trainers(size: Size) -> dict:
    """Ratio of the time of four stacked trainers to that of one trainer with as many updates."""
    runs = {}
    for name, number in (("four", 4), ("one", 1)):
        shape = dataclasses.replace(size.shape, num_steps=size.shape.num_steps // number)
        runs[name] = InnerSteps(settings_of(shape), random_tokens(shape, size.batch, number))
    times = interleave(runs, size.repeats)
    report("trainers", times)
    memory = runs["four"].needed_bytes / runs["one"].needed_bytes / 4
    return {"trainers": {"time": ratio(times, "four", "one"), "memory": memory}}


def memory(size: Size) -> dict:
    """The largest planned micro-batch, its peak memory, and the largest that runs."""
    clip = {"num_rounds": 1, "inner.steps_per_round": 2, "switch.mode": "clip"}
    free = clip | {"batching.max_batch_size": "auto", "batching.batch_cap": size.batch_cap}
    settings = settings_of(size.shape, **free)
    hardware = here()
    found = configured_choice(settings, hardware).max_batch_size
    sizes = settings.batching.buckets

    def config_at(batch: int):
        names = ("initial_batch_size", "max_batch_size", "batch_cap")
        fixed = {f"batching.{name}": batch for name in names} | {"batching.buckets": (batch,)}
        return config_of(size.shape, **clip | fixed)

    def works(batch: int) -> bool:
        gc.collect()  # a run that failed may be held by its error
        with tempfile.TemporaryDirectory() as folder:
            events = fit_random(validate(config_at(batch)), f"{folder}/run")
        return not any(event["event"] == "fault" for event in events)

    fits = works(found)
    peaks = measured_peaks(hardware.devices)
    measured = peaks["device_peak_bytes"][0] or peaks["host_peak_bytes"]
    planned = int(
        re.search(r"^peak: (\d+) bytes", plan(config_at(found), memory=True), re.MULTILINE)[1]
    )
    if fits:
        largest = max([found, *itertools.takewhile(works, (n for n in sizes if n > found))])
    else:
        largest = next(filter(works, (n for n in reversed(sizes) if n < found)), 0)
    gib = {"planned": planned / 2**30, "measured": measured / 2**30}
    return {
        "peak": gib | {"ratio": planned / measured, "batch": found},
        "batch": {"found": found, "largest": largest},
    }


def programs(size: Size) -> dict:
    """Compare each program's bytes and bound by the compiler with its measured peak and seconds."""
    clip = {"num_rounds": 1, "inner.steps_per_round": 2, "switch.mode": "clip"}
    settings = settings_of(size.shape, **clip | {"batching.max_batch_size": size.batch})
    spec = spec_of(settings, here())
    compiled = Programs(spec)
    keys = reachable_keys(settings, spec, start(settings, size.batch, whole_pool=True))
    peaks, rates = {}, rates_of(spec.machine.devices[0].device_kind)
    # A device's peak never falls: from the smallest on, it is that of the program that has run.
    for key in sorted(keys, key=lambda key: needed_bytes(compiled[key])):
        arguments, _ = compiled[key].in_avals
        for _ in range(2):  # the first call loads the program
            zeros = jax.tree.map(lambda aval: jnp.zeros(aval.shape, aval.dtype), arguments)
            start_s = time.perf_counter()
            jax.block_until_ready(compiled.call(key, *jax.block_until_ready(zeros)))
            seconds = time.perf_counter() - start_s
            del zeros
        found = measured_peaks(spec.machine.devices)
        peak = found["device_peak_bytes"][0] or found["host_peak_bytes"]
        least = rates and rates.least_seconds(count(compiled[key].as_text()))
        peaks[str(key)] = {"planned": needed_bytes(compiled[key]), "measured": peak}
        peaks[str(key)] |= {"seconds": seconds, "least_seconds": least}
        print(f"{key}: compiled {peaks[str(key)]['planned']}, measured {peak} bytes", flush=True)
    return {"programs": peaks}


def resume(size: Size) -> dict:
    """Compare a run that is stopped and resumed in another process with an uninterrupted run."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{folder}/programs"

        def run(name: str, **more: object) -> Path:
            workdir, changes = Path(folder) / name, size.changes | more
            command = [sys.executable, "-m", "adloco_jax.main", f"--workdir={workdir}"]
            command += [f"--config={ROOT}/configs/{size.config}.py"]
            command += [f"--config.{key}={value}" for key, value in changes.items()]
            if code := subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
                # the last line of what the run said is the reason
                sys.exit(1 if code > 0 else f"killed by signal {-code}")
            return workdir

        run("resumed", num_rounds=2)
        resumed, whole = run("resumed"), run("whole")
        differ = differences(state_of(resumed), state_of(whole))
    return {"resume": {"verdict": f"no: differs in {differ}" if differ else "yes, every bit"}}


# Settings of the compiler, each with environment variables that may make the inner steps faster.
COMPILER = {
    "JAX_OPTIMIZATION_LEVEL=O1": {"JAX_OPTIMIZATION_LEVEL": "O1"},
    "JAX_OPTIMIZATION_LEVEL=O3": {"JAX_OPTIMIZATION_LEVEL": "O3"},
}
COMPILER |= {
    flag: {"XLA_FLAGS": flag}
    for flag in (
        "--xla_gpu_enable_command_buffer=",
        "--xla_gpu_enable_triton_gemm=false",
        "--xla_disable_hlo_passes=rematerialization",
    )
}
_LEAST_GAIN = 1.01  # a setting that gains less is not combined with others


def environment_of(settings: Sequence[str]) -> dict[str, str]:
    """The environment of a process that compiles with these settings, entries of `COMPILER`."""
    found = dict(os.environ)
    for name, value in (item for each in settings for item in COMPILER[each].items()):
        is_list = name == "XLA_FLAGS"
        found[name] = f"{found.get(name, '')} {value}".strip() if is_list else value
    return found


def best_settings(speed_of: Callable[[Sequence[str]], float]) -> tuple[dict[str, float], str]:
    """Measure each setting alone, then together those that gain; return all speeds and the best.

    `speed_of` returns tokens/s with some settings; 0 if they do not work.
    """
    plain = speed_of(())
    alone = {name: speed_of((name,)) for name in COMPILER}
    gaining = [
        name
        for name in sorted(alone, key=lambda each: -alone[each])
        if alone[name] > _LEAST_GAIN * plain
    ]
    levels = [name for name in gaining if "XLA_FLAGS" not in COMPILER[name]]
    together = [name for name in gaining if name not in levels[1:]]  # one level at a time
    speeds = {"as shipped": plain} | alone
    if len(together) > 1:
        speeds[" ".join(together)] = speed_of(together)
    return speeds, max(speeds, key=lambda each: speeds[each])


def compiler(size: Size) -> dict:
    """Compare the speed of the inner steps with each setting of the compiler."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import gpu; gpu.print_speed(sys.argv[2])"
    name = next(name for name, each in SIZES.items() if each == size)
    command = [sys.executable, "-c", code, str(Path(__file__).parent), name]

    def speed_of(settings: Sequence[str]) -> float:
        done = subprocess.run(
            command, env=environment_of(settings), stdout=subprocess.PIPE, text=True, check=False
        )
        return float(done.stdout.split()[-1]) if done.returncode == 0 else 0.0

    speeds, best = best_settings(speed_of)
    ratios = {each: speed / speeds["as shipped"] for each, speed in speeds.items()}
    text = "; ".join(f"`{each}` {ratios[each]:.3f}" for each in speeds if each != "as shipped")
    return {"compiler": {"text": text, "best": best, "speeds": speeds}}


def print_speed(size: str) -> None:
    """Print the tokens/s of the inner steps, the last word of the output."""
    shape, batch = SIZES[size].shape, SIZES[size].batch
    tokens = random_tokens(shape, batch, 1)
    times = interleave({"steps": InnerSteps(settings_of(shape), tokens)}, SIZES[size].repeats)
    print(tokens[..., 1:].size / float(np.median(times["steps"])))


PARTS: dict[str, Callable[[Size], dict]] = {
    "speed": speed,
    "statistics": statistics,
    "round": whole_round,
    "trainers": trainers,
    "resume": resume,
    "programs": programs,
    "memory": memory,
    "compiler": compiler,
}
# As in runs. side_by_side.py sets this to false, because PyTorch uses the same GPU.
_PREALLOCATE = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
_FLAGS = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true".strip()
ENVIRONMENT = {name: _PREALLOCATE for name in PARTS if name != "speed"}
ENVIRONMENT["resume"] = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": _FLAGS}

# For each line of the table: its name, its part, the part's figures, and their format.
ROWS = (
    ("MicroLlama, tokens/s", "speed", "tokens", "{median:,.0f} ({low:,.0f} to {high:,.0f})"),
    (
        "share of the bfloat16 peak",
        *("speed", "share", f"{{share:.3f}} of {{tera:,.3g}} TFLOP/s ({PUBLISHED})"),
    ),
    (
        "speed over `torch.compile` with fused AdamW",
        *("speed", "torch", "{ratio:.2f} ({tokens:,.0f} tokens/s; eager {eager:,.0f})"),
    ),
    (
        "gradient statistics over the plain gradient",
        *("statistics", "statistics", "{time:.2f} in time, {extra_mib:+,.0f} MiB"),
    ),
    ("a round over its bare inner steps", "round", "round", "{ratio:.3f}"),
    (
        "planned over measured peak memory",
        *("memory", "peak", "{ratio:.2f} ({planned:.2f} of {measured:.2f} GiB, batch {batch})"),
    ),
    ("memory and time of each program", "programs", "programs", "in the second table"),
    (
        "four stacked trainers over four times one",
        *("trainers", "trainers", "{time:.2f} in time, {memory:.2f} in memory"),
    ),
    ("resumed bit for bit, deterministic operations", "resume", "resume", "{verdict}"),
    ("largest batch found, and the true one", "memory", "batch", "{found} and {largest}"),
    ("speed by settings of the compiler", "compiler", "compiler", "best: `{best}`. {text}"),
)


def finished(lines: list[dict]) -> dict[str, dict]:
    """The last line of each part; a line without PyTorch or with an error is measured again."""
    last = {line["part"]: line for line in lines}
    return {
        part: line
        for part, line in last.items()
        if "error" not in line and not isinstance(line.get("torch"), str)
    }


def rates_of(kind: str) -> Rates | None:
    """How fast a kind of device is at most, if it is known."""
    return next((rates for name, rates in RATES.items() if re.search(rf"\b{name}\b", kind)), None)


def peak_of(kind: str, given: float | None) -> float | None:
    """Dense bfloat16 FLOP/s of a kind of device, if it is known."""
    known = rates_of(kind)
    return given or (known and known.operations)


def table(lines: list[dict], peak: float | None) -> str:
    """Format results as a table in Markdown; a missing figure is replaced by its reason."""
    last = {line["part"]: line for line in lines}
    rows = ["| | |", "|---|---|"]
    for name, part, key, form in ROWS:
        line = last.get(part, {"error": ""})
        value = line.get(key, line.get("error"))
        if key == "share" and "flops_per_s" in line:
            value = "the peak of this device is not known here; give --peak"
            if peak:
                value = {"share": line["flops_per_s"] / peak, "tera": peak / 1e12}
        if isinstance(value, dict):
            text = form.format(**value)
        else:
            text = f"not measured: {value}" if value else "not measured"
        rows.append(f"| {name} | {text} |")
    if peaks := last.get("programs", {}).get("programs"):
        rows += ["", "| program | GiB compiled | GiB measured | ms | ms at least |"]
        rows += ["|---|---|---|---|---|"]
        rows += [
            f"| {key} | {peak['planned'] / 2**30:.2f} | {peak['measured'] / 2**30:.2f}"
            f" | {1e3 * peak['seconds']:.1f}"
            f" | {f'{1e3 * least:.1f}' if (least := peak['least_seconds']) else '-'} |"
            for key, peak in peaks.items()
        ]
    where = last["machine"]["machine"] if "machine" in last else "no GPU was at hand"
    return "\n".join([*rows, "", f"Machine: {where}.", ""])


def read_results(path: Path, size: str) -> list[dict]:
    """The lines of this size in the results, if any."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [line for line in map(json.loads, lines) if line["size"] == size]


def append(path: Path, line: dict) -> None:
    """Add a line to the results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line, default=float) + "\n")


def measure_part(part: str, options: argparse.Namespace) -> None:
    """Measure a part in this process and write its line."""
    start_s = time.monotonic()
    figures = {} if part == "machine" else PARTS[part](SIZES[options.size])
    device = jax.devices()[0]
    about = {"part": part, "size": options.size, "device": device.device_kind}
    about |= {"platform": device.platform, "machine": machine()}
    about["seconds"] = round(time.monotonic() - start_s, 1)
    append(options.results, about | figures)


def run_part(part: str, options: argparse.Namespace, limit_s: float) -> str:
    """Measure a part in another process; return one line with its error, or an empty text."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"} | ENVIRONMENT.get(part, {})
    environment.setdefault("CUDA_VISIBLE_DEVICES", "0")  # one GPU, also where there are several
    if options.size == "toy":
        environment |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # most of the time is compilation
    command = [sys.executable, __file__, f"--part={part}", f"--size={options.size}"]
    command += [f"--results={options.results}"]
    process = subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _, said = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"took more than {limit_s:.0f} s"
    finally:
        if process.returncode is None:  # also at an interrupt: what it has started, too
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode == 0:
        return ""
    print(said, file=sys.stderr)
    last = (said.strip().splitlines() or [f"ended with {process.returncode}"])[-1]
    return last[:200].replace("|", "/")


def measure_all(options: argparse.Namespace) -> list[dict]:
    """Measure the parts that the results lack, and return all results.

    Raises:
      ConfigError: If there is no accelerator, or JAX does not start.
    """
    end_s = time.monotonic() + 60 * options.minutes
    if fault := run_part("machine", options, 120):
        raise ConfigError(f"jax does not start: {fault}")
    here = read_results(options.results, options.size)[-1]
    if here["platform"] == "cpu" and options.size != "toy":
        raise ConfigError(
            "no accelerator: jax finds only a CPU; install jax[cuda12] on a machine with a GPU, or"
            " give --size toy"
        )

    def lines() -> list[dict]:
        found = read_results(options.results, options.size)
        return [line for line in found if line["device"] == here["device"]]

    for part in PARTS:
        left_s = end_s - time.monotonic()
        if part in finished(lines()) or left_s <= 0:
            continue
        print(f"{part}, at most {min(left_s, PART_LIMIT_S):.0f} s", flush=True)
        fault = run_part(part, options, min(left_s, PART_LIMIT_S))
        if fault:
            append(options.results, here | {"part": part, "error": fault})
    return lines()


def main() -> int:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="microllama")
    parser.add_argument("--results", type=Path, default=Path("runs/gpu/results.jsonl"))
    parser.add_argument("--page", type=Path, help="holds the table; docs/GPU.md, of toy none")
    parser.add_argument("--minutes", type=float, default=20.0, help="for all parts together")
    parser.add_argument("--peak", type=float, help="dense bfloat16 FLOP/s of the device")
    parser.add_argument("--part", choices=["machine", *PARTS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        if options.part:
            measure_part(options.part, options)
            return 0
        lines = measure_all(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    text = table(lines, peak_of(lines[-1]["device"], options.peak))
    print(text)
    page = options.page or (ROOT / "docs" / "GPU.md" if options.size != "toy" else None)
    if page:
        page.write_text(TABLE.sub(lambda _: text, page.read_text("utf-8")), encoding="utf-8")
    missing = [part for part in PARTS if part not in finished(lines)]
    if missing:
        print(f"missing: {', '.join(missing)}; the same command measures them")
    return 1 if missing else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the part under way, too
    sys.exit(main())
