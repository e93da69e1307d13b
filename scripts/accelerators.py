"""Compile shipped configs for GPUs that are not here, and check the programs.

    python scripts/accelerators.py            all of it; the same command continues where it stopped
    python scripts/accelerators.py --short    the inner steps and statistics of a small model

The script needs the extra `plan`. Nothing runs on a device: the table of compiled programs in
studies/GPU.md comes from the compiler.
"""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported, which would look for others
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from kernels import Work, count  # noqa: E402
from ml_collections import ConfigDict  # noqa: E402

from adloco_jax.cli.names import load_config  # noqa: E402
from adloco_jax.config import validate  # noqa: E402
from adloco_jax.engine.memory import Mode  # noqa: E402
from adloco_jax.engine.model import spec_of  # noqa: E402
from adloco_jax.engine.programs import lower  # noqa: E402
from adloco_jax.engine.sharding import bytes_here, num_sequential, placement, workers_spec  # noqa: E402
from adloco_jax.engine.spec import ProgramKey, ProgramSpec  # noqa: E402
from adloco_jax.errors import UserError  # noqa: E402
from adloco_jax.run.before.estimate import device_plan, machine_named  # noqa: E402
from probes.hlo import collectives  # noqa: E402

TABLE = re.compile(r"(?<=<!-- compiled -->\n).*(?=<!-- end of what was compiled -->)", re.DOTALL)
TEXT: dict[str, Any] = {"data.path": "texts", "data.tokenizer": "bytes"}  # never read
# As on the GPU page: with AdamW.
ADAMW = TEXT | {"inner.tx": "adamw", "inner.learning_rate": 1e-3, "outer.average": 0.0}
SIZES = {"growing_pool": {"size": "35M"}}  # arguments of get_config
# The title of a row, the name of the config, changes of it, and the devices.
CASES: tuple[tuple[str, str, dict[str, Any], tuple[str, ...]], ...] = (
    ("growing_pool", "growing_pool", ADAMW, ("h100x1", "h100x8")),
    ("microllama, 4 workers", "microllama", {"ensemble.num_workers": 4}, ("h100x1",)),
    ("microllama, 16 workers", "microllama", {}, ("h100x1",)),
)
# Bytes of temporaries of the short inner steps, for each worker at once, and for one that goes
# alone: a tenth more than measured.
MOST_TEMPORARIES = {False: 2.0e9, True: 2.4e9}
# Kernels and GB of an update by the short programs for one H100, by whether workers run one after
# another and whether gradients accumulate, as counted with jax 0.10.2. A program may have SLACK
# times as many.
SLACK = 1.05
KEPT = {
    (False, False): (157, 78.4),
    (False, True): (161, 80.1),
    (True, False): (180, 9.99),
    (True, True): (176, 10.2),
}


def configured(name: str, changes: dict[str, Any]) -> ConfigDict:
    """A shipped config with changes."""
    config = load_config(ROOT / "configs" / f"{name}.py", **SIZES.get(name, {}))
    config.update_from_flattened_dict(changes)
    return config


def float32_products(text: str) -> list[str]:
    """Matrix products of an optimised program whose two factors are float32 matrices."""
    types: dict[str, str] = {}
    found = []
    for line in text.splitlines():
        if line and not line.startswith(" ") and "{" in line:
            types = {}
        if defined := re.match(r"\s+(?:ROOT )?%([\w.\-]+) = \(?(\w+\[[\d,]*\])", line):
            types[defined[1]] = defined[2]
            factors = re.search(r" dot\(%([\w.\-]+), %([\w.\-]+)\)", line)
            if "__cublas$" in line:
                factors = re.search(r"custom-call\(%([\w.\-]+), %([\w.\-]+)", line)
            if factors and all(types.get(name, "").startswith("f32[") for name in factors.groups()):
                found.append(line.strip()[:200])
    return found


def faults_of(spec: ProgramSpec, key: ProgramKey, compiled: Any, *, fused: bool) -> list[str]:
    """Describe what is wrong with a compiled program of inner steps or statistics."""
    text, memory = compiled.as_text(), compiled.memory_analysis()
    at, faults = placement(spec, key.layout), []
    names = ("fmhaSoftmax(", "fmhaSoftmaxBackward") if fused else ()
    targets = set(re.findall(r'custom_call_target="__cudnn\$(\w+)"', text))
    for name in names:
        if name.rstrip("(") not in targets:
            faults.append(f"{key}: no {name.rstrip('(')} among {sorted(targets)}")
    if key.kind != "steps":
        return faults
    is_shared = at.mesh.shape["data"] * at.mesh.shape["model"] > 1
    inside = [c for c in collectives(text) if c.in_loop]
    if inside and not is_shared:
        faults.append(f"{key}: in the loop: {inside[0].line[:150]}")
    faults += [f"{key}: {line}" for line in float32_products(text)]
    state = bytes_here(workers_spec(spec, key.layout).params_R)
    if memory.alias_size_in_bytes < state:
        faults.append(f"{key}: {memory.alias_size_in_bytes} bytes are aliased, of {state}")
    turns = num_sequential(spec, key.layout)
    workers = sum(key.sizes) // (at.mesh.shape["trainer"] * at.mesh.shape["worker"]) // turns
    most = workers * MOST_TEMPORARIES[spec.sequential]
    if memory.temp_size_in_bytes > most:
        faults.append(f"{key}: {memory.temp_size_in_bytes:,} bytes of temporaries, {most:,.0f}")
    return faults


def above_kept(spec: ProgramSpec, key: ProgramKey, work: Work) -> list[str]:
    """Name the figures of an update by a short program for one H100 that are above `KEPT`."""
    kept = KEPT[spec.sequential, key.accumulates]
    return [
        f"{key}: {found:.1f} {unit} in an update, were {least}"
        for unit, found, least in zip(
            ("kernels", "GB"), (work.kernels, work.num_bytes / 1e9), kept, strict=True
        )
        if found > SLACK * least
    ]


def short() -> list[str]:
    """Check the inner steps, with and without accumulation, and the statistics of a small model."""
    faults = []
    changes = ADAMW | {"model.num_layers": 2, "model.remat": False}
    settings = validate(configured("growing_pool", changes))
    for device in ("h100x1", "h100x2"):
        machine = machine_named(device)
        for mode in (Mode(False, False), Mode(True, False)):
            spec = spec_of(settings, machine, mode)
            fused = spec.attention == "cudnn"
            assert fused, "auto does not choose cuDNN"
            pool = (settings.ensemble.num_workers,)
            alone = (False,) if device == "h100x1" else ()  # a program that accumulates has it all
            keys = [ProgramKey("steps", pool, 16, accumulates) for accumulates in (*alone, True)]
            if not mode.sequential:
                keys.append(ProgramKey("stats", pool))
            for key in keys:
                start_s = time.perf_counter()
                compiled = lower(spec, key).compile()
                faults += faults_of(spec, key, compiled, fused=fused)
                temporaries = compiled.memory_analysis().temp_size_in_bytes / 1e9
                print(f"{device}, {mode}, {key}: {temporaries:.2f} GB,", end=" ")
                if device == "h100x1" and key.kind == "steps":
                    work = count(compiled.as_text()).times(1 / spec.num_micro_batches)
                    faults += above_kept(spec, key, work)
                    print(f"{work.kernels:.1f} kernels, {work.num_bytes / 1e9:.2f} GB", end=" ")
                    print("in an update,", end=" ")
                print(f"{time.perf_counter() - start_s:.0f} s", flush=True)
    return faults


def cases() -> Iterator[tuple[str, str, dict[str, Any], str]]:
    """Every config with every kind of device."""
    for title, name, changes, devices in CASES:
        for device in devices:
            yield title, name, changes, device


def row(title: str, name: str, changes: dict[str, Any], device: str) -> dict:
    """Compiles a config for a device."""
    config = configured(name, changes)
    settings = validate(config)
    _, record = device_plan(config, device)
    kernel = spec_of(settings, machine_named(device)).attention
    return {"config": title, "device": device, "attention": kernel} | record


def table(rows: list[dict]) -> str:
    """Format the rows as a table in Markdown, without configs that have not been compiled."""
    lines = [
        "| config | devices | mode | micro-batch | attention | largest, GB | share of memory |",
        f"|{'---|' * 7}",
    ]
    for line in rows:
        about = [line["config"], line["device"]]
        if "error" in line:
            about += [f"does not compile: {line['error']}", *[""] * 4]
        elif not line["fits"]:
            about += [f"does not fit: {line['fault']}", "", line["attention"], *[""] * 2]
        else:
            share = line["largest_bytes"] / line["device_bytes"]
            about += [line["mode"], str(line["max_batch_size"]), line["attention"]]
            about += [f"{line['largest_bytes'] / 1e9:.2f}", f"{share:.0%}"]
        lines.append(f"| {' | '.join(about)} |")
    left = len(list(cases())) - len(rows)
    lines += ["", f"Not compiled yet: {left} of {len(list(cases()))}.", ""]
    return "\n".join(lines)


def main() -> int:
    """Compile missing cases, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--minutes", type=float, default=60.0, help="to begin cases in")
    parser.add_argument("--results", type=Path, default=Path("runs/accelerators/results.jsonl"))
    parser.add_argument("--page", type=Path, default=ROOT / "studies" / "GPU.md")
    options = parser.parse_args()
    if options.short:
        faults = short()
        print(*faults, sep="\n", end="\n" * bool(faults))
        return 1 if faults else 0
    end_s = time.monotonic() + 60 * options.minutes
    options.results.parent.mkdir(parents=True, exist_ok=True)
    text = options.results.read_text("utf-8") if options.results.exists() else ""
    done = {(line["config"], line["device"]): line for line in map(json.loads, text.splitlines())}
    for case in cases():
        title, *_, device = case
        if (title, device) in done or time.monotonic() > end_s:
            continue
        try:
            found = row(*case)
        except UserError as error:
            print(error, file=sys.stderr)
            return error.exit_code
        except RuntimeError as error:  # the compiler's, and a fault to show in the table
            found = {"config": title, "device": device, "error": str(error).split("\n")[0][:150]}
        done[title, device] = found
        with open(options.results, "a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        print(title, device, found.get("mode", found.get("error", "does not fit")), flush=True)
    rows = [done[title, device] for title, _, _, device in cases() if (title, device) in done]
    page = TABLE.sub(lambda _: table(rows), options.page.read_text("utf-8"))
    options.page.write_text(page, encoding="utf-8")
    return 0 if len(rows) == len(list(cases())) else 1


if __name__ == "__main__":
    sys.exit(main())
