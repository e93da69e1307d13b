"""Measure training on one GPU, in at most 12 minutes, and write the tables of studies/GPU.md.

    python scripts/gpu.py --out FOLDER [--texts TEXTS --tokenizer FILE] [--minutes 12]
    python scripts/gpu.py --out studies/gpu --tables    only write studies/GPU.md from records
    python scripts/gpu.py --out FOLDER --tiny           the same on a CPU; figures mean nothing

Each of PARTS runs in a process of its own, for its seconds and what earlier parts have left, and
writes its figures to FOLDER/PART.json as they come. The same command continues with figures that
are missing. Nothing is downloaded; TEXTS are what `data.path` may name, and the tokenizer has
32,000 ids.
"""

import argparse
import dataclasses
import gc
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from side_by_side import (
    SHAPES,
    InnerSteps,
    Shape,
    flops_per_token,
    functions_of,
    measure,
    random_tokens,
    settings_of,
    torch_lacks,
)
from timing import interleave, machine, per_second

import adloco_jax
from adloco_jax.data.disk import replaced_file
from adloco_jax.engine.optimizers import inner_transform, labeller
from adloco_jax.errors import ConfigError, UserError
from adloco_jax.models.configured import build_network
from adloco_jax.run.kept.ledger import read

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from studies.compare import to_reach  # noqa: E402

# Dense bfloat16 FLOP/s by the vendor's data sheets ("NVIDIA H100", "H200", "A100", "L40S Tensor
# Core GPU"), which print twice as many, with sparsity. The first whose words are in the kind.
PEAKS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
}


class Figures:
    """The figures of a part, a JSON file that is written whenever a figure comes."""

    def __init__(self, path: Path):
        """Read what earlier processes have measured."""
        self._path = path
        self.known = json.loads(path.read_text("utf-8")) if path.exists() else {}

    def measure(self, name: str, call: Callable[[], Any]) -> None:
        """Call for a figure and write it, unless it is known; of an error write the first line."""
        if name in self.known:
            return
        start_s = time.monotonic()
        try:
            found = call()
        except Exception as error:  # deliberately broad: the other figures are still wanted
            traceback.print_exc()
            text = (str(error).strip().splitlines() or [""])[0]
            if type(error) not in (RuntimeError, TimeoutError):  # which this script words
                text = f"{type(error).__name__}: {text}"
            found = {"error": text[:200].replace("|", "/")}
        print(f"{self._path.stem}, {name}: {time.monotonic() - start_s:.0f} s", flush=True)
        self.write(**{name: found})

    def write(self, **found: Any) -> None:
        """Add figures; the file is replaced as a whole."""
        self.known |= json.loads(
            json.dumps(found, default=lambda figure: np.asarray(figure).tolist())
        )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with replaced_file(self._path) as file:
            file.write(json.dumps(self.known, indent=1).encode())


@dataclasses.dataclass(frozen=True)
class Steps:
    """The inner steps that are measured: `num_workers` with `batch` sequences each, at once."""

    shape: Shape
    batch: int
    num_workers: int
    clip_norm: float | None
    variants: Mapping[str, tuple[int, int]]  # other batches and numbers of workers


@dataclasses.dataclass(frozen=True)
class Size:
    """All that is measured, at full size or tiny."""

    steps: Mapping[str, Steps]
    repeats: int
    update: Shape  # of the update that is compared with a CPU's
    trained: dict[str, Any]  # changes of configs/growing_pool.py
    num_tokens: int  # of an arm


_SMALL: dict[str, Any] = {
    "vocab_size": 1000,
    "width": 256,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
}
_TOY: dict[str, Any] = {
    "vocab_size": 257,
    "width": 16,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
}
_TOY |= {"mlp_width": 32}
FULL = Size(
    steps={
        "growing_pool": Steps(
            dataclasses.replace(SHAPES["growing_pool"], num_steps=16),
            batch=16,
            num_workers=8,
            clip_norm=1.0,
            variants={"one worker": (16, 1), "one worker with 128 sequences": (128, 1)},
        ),
        "microllama": Steps(
            dataclasses.replace(SHAPES["microllama"], num_steps=8),
            batch=8,
            num_workers=1,
            clip_norm=None,
            variants={},
        ),
    },
    repeats=5,
    update=Shape(_SMALL | {"mlp_width": 512}, 128, 2),
    trained={},
    num_tokens=100_000_000,
)
TINY = Size(
    steps={
        name: dataclasses.replace(steps, shape=Shape(_TOY, 16, 2), batch=2)
        for name, steps in FULL.steps.items()
    },
    repeats=2,
    update=Shape(_TOY, 16, 2),
    trained={"model.width": 16, "model.num_heads": 2, "model.num_kv_heads": 1}
    | {"model.num_layers": 1, "model.mlp_width": 32, "model.vocab_size": 257}
    | {"data.sequence_length": 32, "inner.steps_per_round": 4, "inner.warmup_updates": 2},
    num_tokens=100_000,
)


# -- the parts -------------------------------------------------------------------------------


def acceptance(figures: Figures, size: Size, options: argparse.Namespace) -> None:
    """Compare a round with a CPU's."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import gpu; gpu.save_round(*sys.argv[2:])"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", code, str(Path(__file__).parent), f"{folder}/cpu.npz"]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        there = subprocess.Popen([*command, str(int(options.tiny))], env=environment)

        def update() -> dict:
            own = one_round(size.update)
            if there.wait() != 0:
                raise RuntimeError("the round does not run on the CPU")
            with np.load(f"{folder}/cpu.npz") as other:
                return compare(own, dict(other))

        figures.measure("update", update)
        there.kill()


def save_round(path: str, tiny: str) -> None:
    """Write the figures of `one_round` on this process's device."""
    np.savez(path, **one_round((TINY if int(tiny) else FULL).update))


def one_round(shape: Shape) -> dict[str, np.ndarray]:
    """A round of two workers, in float32 and in bfloat16: losses, statistics, what has changed."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        settings = settings_of(dataclasses.replace(shape, model=shape.model | {"dtype": dtype}))
        init_fn, loss_fn = functions_of(settings)
        params = jax.device_get(jax.jit(init_fn)(jax.random.key(0)))
        tokens_SRBL = random_tokens(shape, 4, 2)
        how: dict[str, Any] = {
            "inner_tx": inner_transform(settings.inner, labeller(settings.model.arch)),
            "outer_tx": optax.sgd(0.7),
        }
        rates_SR = np.full(tokens_SRBL.shape[:2], 1e-3, np.float32)

        def run(params, tokens_SRBL, rates_SR, loss_fn=loss_fn, how=how):
            ensemble = adloco_jax.init(params, num_trainers=1, num_workers=2, **how)
            stats = adloco_jax.gradient_stats(
                loss_fn, params, tokens_SRBL[0, 0], estimator="taps", inner_products=False
            )
            after, metrics = adloco_jax.outer_step(
                ensemble, tokens_SRBL, loss_fn, learning_rate_SR=rates_SR, **how
            )
            change = jax.tree.map(lambda new, old: new[0] - old, after.params_M, params)
            return metrics.loss_SR, adloco_jax.norm_test(stats, eta=0.8), change

        with jax.default_matmul_precision("highest"):
            loss_SR, batch, change = jax.device_get(jax.jit(run)(params, tokens_SRBL, rates_SR))
        changes = [np.ravel(leaf) for leaf in jax.tree.leaves(change)]
        found |= {f"{dtype} loss": loss_SR, f"{dtype} batch": batch}
        found |= {f"{dtype} change": np.concatenate(changes).astype(np.float32)}
    return found


def compare(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> dict:
    """The relative differences of all figures of `one_round`."""
    return {
        name: float(np.linalg.norm(found[name] - expected[name]) / np.linalg.norm(expected[name]))
        for name in expected
    }


def train(config: str, workdir: Path, changes: dict[str, Any], *more: str) -> list[str]:
    """The command that trains a shipped config with changes."""
    command = [sys.executable, "-m", "adloco_jax.main", f"--workdir={workdir}"]
    command += [f"--config={ROOT}/configs/{config}.py"]
    return [*command, *more, *(f"--config.{key}={value}" for key, value in changes.items())]


def speed(name: str) -> Callable[[Figures, Size, argparse.Namespace], None]:
    """Make the part that times a model's inner steps: as shipped, with variants, and PyTorch's."""

    def part(figures: Figures, size: Size, options: argparse.Namespace) -> None:
        steps = size.steps[name]
        network = build_network(settings_of(steps.shape).model)
        tokens_BL = jnp.zeros((1, 1), jnp.int32)
        params = jax.eval_shape(network.init, jax.random.key(0), tokens_BL)["params"]
        figures.write(flops_per_token=flops_per_token(steps.shape, params))
        shipped = compiled(steps, steps.batch, steps.num_workers)

        def beside(run: InnerSteps) -> dict:
            """Tokens/s of a program, and how many times as fast it is as the one shipped."""
            calls = {"shipped": shipped, "this": run}
            times = interleave(calls, size.repeats)
            own, base = (per_second(calls[n].num_tokens, times[n]) for n in ("this", "shipped"))
            return {"tokens_per_s": own, "ratio": own[1] / base[1]}

        figures.measure("shipped", lambda: beside(shipped))
        for each, sizes in steps.variants.items():
            figures.measure(each, lambda sizes=sizes: beside(compiled(steps, *sizes)))

    return part


def torch(figures: Figures, size: Size, options: argparse.Namespace) -> None:
    """Time one worker's steps of each model beside PyTorch's, which takes a minute to compile."""
    for name, steps in size.steps.items():

        def beside(steps=steps) -> dict:
            if lacks := torch_lacks():
                raise RuntimeError(lacks)
            found = measure(steps.shape, steps.batch, 1, size.repeats)
            return {library: {"tokens_per_s": of["tokens_per_s"]} for library, of in found.items()}

        figures.measure(name, beside)
        gc.collect()
        if (library := sys.modules.get("torch")) and library.cuda.is_available():
            library.cuda.empty_cache()


def compiled(steps: Steps, batch: int, num_workers: int) -> InnerSteps:
    """Compile the inner steps with a batch and a number of workers."""
    settings = settings_of(steps.shape, **{"inner.clip_norm": steps.clip_norm})
    return InnerSteps(settings, random_tokens(steps.shape, batch, num_workers))


# Changes of the config growing_pool with 35 M parameters, for which all arms have AdamW. One worker
# that skips the outer optimizer is plain AdamW.
_ADAMW: dict[str, Any] = {"inner.tx": "adamw", "inner.learning_rate": 1e-3, "outer.average": 0}
_ADAMW |= {"inner.weight_decay": 0.1, "inner.max_steps_per_round": "none"}
_CONSTANT: dict[str, Any] = {"batching.test": "constant", "ensemble.initial_workers": "none"}
_ONE: dict[str, Any] = {"ensemble.num_workers": 1, "batching.buckets": "(128,)"}
_ONE |= {f"batching.{name}": 128 for name in ("initial_batch_size", "max_batch_size", "batch_cap")}
ARMS: dict[str, dict[str, Any]] = {
    "growing_pool": {},
    "DiLoCo": _CONSTANT,
    "data parallel": _CONSTANT | _ONE,
}


def training(figures: Figures, size: Size, options: argparse.Namespace) -> None:
    """Train growing_pool, and with its settings DiLoCo and data parallelism, all with AdamW."""
    end_s = time.monotonic() + options.limit
    common: dict[str, Any] = {"num_tokens": size.num_tokens, "inner.steps_per_round": 110}
    common |= {"data.path": options.texts}
    common |= {"data.tokenizer": options.tokenizer, "eval.num_sequences": 256} | _ADAMW
    common |= {"checkpoint.every_s": 1e6, "checkpoint.keep": 1} | size.trained
    for number, (name, changes) in enumerate(ARMS.items()):
        if figures.known.get(name, {}).get("cut"):
            del figures.known[name]  # it continues
        elif name in figures.known:
            continue
        # What the arms before have left, but for the shares of those that follow.
        later = [each for each in list(ARMS)[number + 1 :] if each not in figures.known]
        later_s = sum(SHARES_S[each] for each in later)
        left_s = end_s - time.monotonic()
        limit_s = min(left_s, max(SHARES_S[name], left_s - later_s))
        if limit_s < 2 * _SAVING_S:
            raise TimeoutError(f"{limit_s:.0f} s are not enough for {name}")
        workdir = options.work / name.replace(" ", "_")
        command = train("growing_pool", workdir, common | changes, "--size=35M")

        def arm(command=command, workdir=workdir, limit_s=limit_s) -> dict:
            found = curve(command, workdir, limit_s)
            return found | {"cut": found["tokens_total"][-1] < size.num_tokens}

        figures.measure(name, arm)
    if any(figures.known[name].get("cut") for name in ARMS):
        raise TimeoutError("an arm was cut")


# One H200 took 151 s (to 91 M tokens; the steps are compiled for 1, 2, 4 and 8 workers), 79 and 74.
SHARES_S = {"growing_pool": 180, "DiLoCo": 82, "data parallel": 78}
_SAVING_S = 20  # for the round under way, and for saving the state


def curve(command: Sequence[str], workdir: Path, limit_s: float) -> dict:
    """Train for at most so many seconds; return held-out losses with what they cost."""
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    try:
        _, said = process.communicate(timeout=max(1.0, limit_s - _SAVING_S))
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            _, said = process.communicate(timeout=_SAVING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            _, said = process.communicate()
    if process.returncode not in (0, 75, -signal.SIGKILL):
        raise RuntimeError(last_line(said) or f"ended with {process.returncode}")
    events = read(workdir / "ledger.jsonl")
    names = ("tokens_total", "updates_total", "syncs_total", "loss", "wall_s")
    evals = [
        [event.get(name) for name in names]
        for event in events
        if (event["event"], event.get("trainer")) == ("eval", "consensus")
    ]
    rounds = [event for event in events if event["event"] == "round"]
    columns = dict(zip(names, zip(*evals, strict=True), strict=True))
    spent_s = [event["step_s"] for event in rounds]
    return columns | {
        "workers": [event["workers"] for event in rounds],
        "round_tokens": [event["tokens"] for event in rounds],
        "round_s": spent_s,
    }


Part = Callable[[Figures, Size, argparse.Namespace], None]
# In order of worth, each with its seconds; together at most 12 minutes. PyTorch's programs take a
# minute or more to compile, so they come after what is ours.
PARTS: dict[str, tuple[Part, float]] = {
    "acceptance": (acceptance, 95),
    "growing_pool": (speed("growing_pool"), 65),
    "microllama": (speed("microllama"), 100),
    "training": (training, sum(SHARES_S.values())),
    "torch": (torch, 95),
}


# -- the tables ------------------------------------------------------------------------------


def peak_of(kind: str) -> float:
    """The FLOP/s of a kind of device; NaN if they are not known."""
    return next((peak for name, peak in PEAKS.items() if re.search(rf"\b{name}\b", kind)), math.nan)


def read_all(folder: Path) -> dict[str, dict]:
    """The figures of all parts; a part that was not measured has none."""
    return {part: Figures(folder / f"{part}.json").known for part in PARTS}


_RAISED = re.compile(r"[\w.]*(Error|Exception)\b|[A-Z_]{5,}: ")  # no reason in words


def _cell(figure: dict | None, form: str) -> str:
    """Format a figure, or say why there is none."""
    if not figure:
        return "not measured"
    if "error" not in figure:
        return form.format(**figure)
    if _RAISED.match(figure["error"]):
        return "failed, with the error in `studies/gpu`"
    return f"not measured: {figure['error']}"


def _share(known: dict, figure: dict) -> float:
    return figure["tokens_per_s"][1] * known["flops_per_token"] / peak_of(known["device"])


LIBRARIES = ("adloco_jax", "compile", "eager")
TITLES = {
    "growing_pool": "growing_pool, eight workers of 16 x 512",
    "microllama": "MicroLlama, 8 x 1,024",
}


def speed_table(found: Mapping[str, dict]) -> list[str]:
    """Speeds as shipped; one worker's beside PyTorch's; then every variant's."""
    lines = ["| | tokens/s | share of the peak | one worker | `torch.compile` | eager PyTorch |"]
    lines += ["|---|---|---|---|---|---|"]
    for part, title in TITLES.items():
        known = found[part]
        shipped = known.get("shipped", {})
        cells = [_cell(shipped, "{tokens_per_s[1]:,.0f}")]
        cells.append(f"{_share(known, shipped):.3f}" if "tokens_per_s" in shipped else "")
        beside = found["torch"].get(part, {})
        for library in LIBRARIES:
            low, middle, high = beside.get(library, {}).get("tokens_per_s", (0, 0, 0))
            text = f"{middle:,.0f} ({low:,.0f} to {high:,.0f})"
            cells.append(text if library in beside else _cell(beside, "-"))
        lines.append(f"| {title} | {' | '.join(cells)} |")
    known = found["growing_pool"]
    lines += ["", "| growing_pool with | as shipped = 1 | tokens/s | share of the peak |"]
    lines += ["|---|---|---|---|"]
    for name in FULL.steps["growing_pool"].variants:
        figure = known.get(name, {})
        cells = [_cell(figure, "{ratio:.3f} | {tokens_per_s[1]:,.0f}")]
        cells.append(f"{_share(known, figure):.3f}" if "tokens_per_s" in figure else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def communications(name: str, arm: dict) -> list[int]:
    """Synchronisations until each evaluation; data parallelism was computed by one worker."""
    return arm["updates_total"] if name == "data parallel" else arm["syncs_total"]


def trained(known: dict) -> dict[str, dict]:
    """The arms that were trained, in their order."""
    return {name: known[name] for name in ARMS if "loss" in known.get(name, {})}


def training_table(known: dict) -> list[str]:
    """Held-out losses of the arms at equal tokens, with what they cost."""
    arms = trained(known)
    if not arms:
        return ["Training: not measured."]
    last = min(arm["tokens_total"][-1] for arm in arms.values())
    lines = ["| | loss | tokens | updates | synchronisations | loss at the end | tokens/s |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for name, arm in arms.items():
        # the evaluation nearest to the tokens that all arms have
        at = int(np.argmin(np.abs(np.array(arm["tokens_total"]) - last)))
        rate = sum(arm["round_tokens"][1:]) / max(sum(arm["round_s"][1:]), 1e-9)
        cells = [f"{arm['loss'][at]:.3f}", f"{arm['tokens_total'][at] / 1e6:.1f} M"]
        cells += [f"{arm['updates_total'][at]:,}", f"{communications(name, arm)[at]:,}"]
        cells += [
            f"{arm['loss'][-1]:.3f} after {arm['tokens_total'][-1] / 1e6:.1f} M",
            f"{rate:,.0f}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def spent(name: str, arm: dict, loss: float) -> str:
    """What an arm has spent to reach a loss (`to_reach`)."""
    counts = arm["loss"], arm["tokens_total"], arm["updates_total"], communications(name, arm)
    names = ("loss", "tokens", "updates", "syncs")
    points = [dict(zip(names, point, strict=True)) for point in zip(*counts, strict=False)]
    at = to_reach(points, loss)
    assert at is not None, "the loss is one that the arm has reached"
    cost = f"{at['tokens'] / 1e6:.1f} M tokens, {at['updates']:,.0f} updates, {at['syncs']:,.0f}"
    return f"{name} {cost} synchronisations"


def comparisons(known: dict) -> list[str]:
    """What growing_pool and each other arm have spent until the higher of their last losses."""
    arms, sentences = trained(known), []
    for name in list(arms)[1:] if "growing_pool" in arms else ():
        pair = {each: arms[each] for each in ("growing_pool", name)}
        loss = max(arm["loss"][-1] for arm in pair.values())
        costs = "; ".join(spent(each, arm, loss) for each, arm in pair.items())
        sentences.append(f"To {loss:.3f}: {costs}.")
    return sentences


def acceptance_lines(known: dict) -> list[str]:
    """How far a round is from a CPU's."""
    update = known.get("update") or {}
    text = ", ".join(f"{name} {value:.1e}" for name, value in update.items() if name != "error")
    return [f"- A round beside a CPU's, relative differences: {text or _cell(update, '')}."]


def front(found: Mapping[str, dict]) -> str:
    """The first sentences of the page."""
    speeds, beside = [], []
    device = next((known["device"] for known in found.values() if "device" in known), "one GPU")
    for part, title in (("growing_pool", "`growing_pool`"), ("microllama", "MicroLlama")):
        shipped, torch = found[part].get("shipped", {}), found["torch"].get(part, {})
        if "tokens_per_s" in shipped:
            share = _share(found[part], shipped)
            speeds.append(
                f"{title} {shipped['tokens_per_s'][1]:,.0f} tokens/s ({share:.2f} of the peak)"
            )
        if torch and "error" not in torch:
            ours, *others = (torch[each]["tokens_per_s"][1] for each in LIBRARIES)
            beside.append(f"{title} {ours / others[0]:.2f} and {ours / others[1]:.1f}")
    text = f"Inner steps on one {device}: {', '.join(speeds) or 'not measured'}."
    if beside:
        text += f" One worker over `torch.compile` and over eager PyTorch: {', '.join(beside)}."
    if arms := trained(found["training"]):
        ends = [f"{name} {arm['loss'][-1]:.3f}" for name, arm in arms.items()]
        text += (
            " Last held-out loss of the 35 M model in nats per token, one seed, no rate tuned:"
            f" {', '.join(ends)}."
        )
    return " ".join([text, *comparisons(found["training"])])


BLOCK = r"(?<=<!-- {} -->\n).*(?=<!-- end of the {} -->)"


def write_page(folder: Path, page: Path) -> None:
    """Replace the front and the tables of the page."""
    found = read_all(folder)
    machines = dict.fromkeys(known["machine"] for known in found.values() if "machine" in known)
    table = [*speed_table(found), "", *training_table(found["training"]), ""]
    table += [
        *acceptance_lines(found["acceptance"]),
        "",
        *(f"Machine: {each}." for each in machines),
    ]
    text = page.read_text("utf-8")
    for name, lines in (("front", textwrap.wrap(front(found), 120)), ("table", table)):
        block = re.compile(BLOCK.format(name, name), re.DOTALL)
        text = block.sub(lambda _, lines=lines: "\n".join([*lines, ""]), text)
    page.write_text(text, encoding="utf-8")


# -- running the parts -----------------------------------------------------------------------


def last_line(said: str) -> str:
    """The last line of what a process said, for a table."""
    return (said.strip().splitlines() or [""])[-1][:200].replace("|", "/")


def measure_part(part: str, options: argparse.Namespace) -> None:
    """Measure what a part lacks, in this process.

    Raises:
      ConfigError: If there is no accelerator.
    """
    device, path = jax.devices()[0], options.out / f"{part}.json"
    if device.platform == "cpu" and not options.tiny:
        raise ConfigError(
            "no accelerator: jax finds only a CPU; install jax[cuda12] on a machine with a GPU, or"
            " give --tiny"
        )
    figures = Figures(path)
    if figures.known.get("device", device.device_kind) != device.device_kind:
        path.unlink()  # of another card
        figures = Figures(path)
    figures.known.pop("stopped", None)
    figures.write(device=device.device_kind, machine=machine())
    PARTS[part][0](figures, TINY if options.tiny else FULL, options)
    figures.write(done=True)


def run_part(part: str, options: argparse.Namespace, limit_s: float) -> int:
    """Measure a part in another process for at most `limit_s`; return its exit code."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    environment.setdefault("CUDA_VISIBLE_DEVICES", "0")  # one GPU, also where there are several
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str((options.work / "programs").absolute()))
    environment.setdefault("PYTHONPATH", str(ROOT))
    if options.tiny:
        environment |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    own = {"part": part, "limit": max(1.0, limit_s - 5)}
    given = vars(options) | own
    command = [sys.executable, __file__, *(["--tiny"] if options.tiny else [])]
    names = ("out", "work", "texts", "tokenizer", "part", "limit")
    command += [f"--{name}={given[name]}" for name in names if given[name] is not None]
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL
    finally:
        if process.returncode is None:  # also at an interrupt: what it has started, too
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def measure_all(options: argparse.Namespace) -> int:
    """Measure the parts that are not done; return an exit code."""
    end_s = time.monotonic() + 60 * options.minutes
    waiting = {}
    for part, (_, seconds) in PARTS.items():
        needs = ("texts", "tokenizer") if part == "training" else ()
        lacks = [f"--{name}" for name in needs if getattr(options, name) is None]
        done = Figures(options.out / f"{part}.json").known.get("done")
        if lacks or done:
            print(f"{part}: {'done' if done else ' '.join(['skipped', *lacks])}")
        else:
            waiting[part] = seconds * (4 if options.tiny else 1)
    for part in list(waiting):
        # What the parts before have left, but for the seconds of those that follow.
        seconds, left_s = waiting.pop(part), end_s - time.monotonic()
        limit_s = min(left_s, max(seconds, left_s - sum(waiting.values())))
        if limit_s < _LEAST_S:
            print(f"{part}: skipped")
            continue
        print(f"{part}: at most {limit_s:.0f} s", flush=True)
        start_s = time.monotonic()
        code = run_part(part, options, limit_s)
        print(f"{part}: {time.monotonic() - start_s:.0f} s, exit code {code}", flush=True)
        if code == ConfigError.exit_code:
            return code
        figures = Figures(options.out / f"{part}.json")
        if code != 0:
            figures.write(stopped=f"exit code {code} after {time.monotonic() - start_s:.0f} s")
    return 0 if all(read_all(options.out)[part].get("done") for part in PARTS) else 1


_LEAST_S = 10


def main() -> int:
    """Measure, or write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the parts' figures")
    parser.add_argument("--work", type=Path, default=Path("runs/gpu"), help="runs and programs")
    parser.add_argument("--texts", type=Path, help="texts, for the part training")
    parser.add_argument("--tokenizer", help="their tokenizer")
    parser.add_argument("--minutes", type=float, default=12.0, help="for all parts together")
    parser.add_argument("--tiny", action="store_true", help="small models, on a CPU")
    parser.add_argument("--tables", type=Path, nargs="?", const=ROOT / "studies" / "GPU.md")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        if options.tables:
            write_page(options.out, options.tables)
        elif options.part:
            measure_part(options.part, options)
        else:
            return measure_all(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the part under way, too
    sys.exit(main())
