"""The card of an exported model: `README.md`, of about fifteen lines."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adloco_jax.data import hub
from adloco_jax.data.formats import read_json
from adloco_jax.errors import DataError, counted
from adloco_jax.study import curves, page, summary

FILE = "README.md"
# The hub's name of what a model does, by the end of its class in `config.json`.
_TASKS = {"ForCausalLM": "text-generation", "ForSequenceClassification": "text-classification"}
_ADAPTER = "adapter_config.json"


def write(
    folder: Path, workdir: Path, *, round: int | None = None, trainer: int | None = None
) -> None:
    """Write the card into the folder of an export.

    `round` and `trainer` are those of the model; None: all rounds, the consensus model.

    Raises:
      DataError: If the run has no ledger, or a damaged one.
      OSError: If the file cannot be written.
    """
    events = curves.read_run(workdir).events
    if round is not None:
        events = [e for e in events if e.get("round", e.get("rounds", 0)) <= round]
    run = curves.RunRecord(workdir, events)
    config = run.start["config"]
    own = run.start.get("own", [])
    facts = dict(summary.totals_as_text(summary.totals(events, trainer=trainer)))
    init_from = config["model"]["init_from"]
    data = config["data"]
    base = _on_hub(init_from)
    dataset = _on_hub(data["path"]) if data["source"] == "hf" else None

    task = task_of(folder)
    library = "transformers" if task else "jax"
    if (folder / _ADAPTER).exists():
        library = "peft"
    metadata = {
        "library_name": library,
        "pipeline_tag": task,
        "base_model": base,
        "datasets": dataset and f"[{dataset}]",
    }
    start = base or ("a local checkpoint" if init_from else "random weights")
    if "model" in own:
        start = "own weights"
    rows = "own rows" if "rows" in own else " ".join(filter(None, (data["source"], dataset)))
    version = run.start.get("versions", {}).get("adloco_jax", "")
    about = {
        "method": method(config, own),
        "starts from": f"{start}; {run.start['num_params']:,} parameters",
        "data": rows,
        "trained for": f"{facts['updates']} updates, {facts['tokens']} tokens",
        "held-out loss": facts["held-out loss"],
        "command": " ".join(run.start["command"].split()),
    }
    lines = ["---"]
    lines += [f"{key}: {value}" for key, value in metadata.items() if value]
    lines += ["---", f"# {summary.markdown(workdir.resolve().name)}", ""]
    lines += [f"Trained with adloco_jax {version}".rstrip() + ".", ""]
    lines += [f"- {key}: {summary.markdown(value)}" for key, value in about.items() if value]
    lines += ["", "No licence is stated: add `license` to the lines at the top of this file."]
    page.write_files(folder, {FILE: "\n".join(lines) + "\n"})


def method(config: Mapping[str, Any], own: list[str]) -> str:
    """Name the method that a run's config describes, its workers, optimizers and rounds.

    `own` has what the caller of `fit` gave (`Run.own`).
    """
    pool, inner, outer = config["ensemble"], config["inner"], config["outer"]
    trainers, workers = pool["num_trainers"], pool["num_workers"]
    merges = trainers > 1 and config["merge"]["policy"] != "none"
    measures_noise = config["batching"]["test"] not in ("constant", "ramp")
    if pool["initial_workers"]:
        name = f"a growing pool of up to {workers} workers"
    elif workers == 1:
        name = "one worker"
    elif merges or measures_noise:
        name = f"AdLoCo (arXiv 2508.18182), {counted(trainers, 'trainer')}, {workers} workers"
    elif outer["fragments"] > 1:
        name = f"Streaming DiLoCo (arXiv 2501.18512), {workers} workers"
    elif inner["steps_per_round"] == 1:
        name = f"data parallelism, {workers} workers"
    elif outer["tx"] == "sgd" and outer["learning_rate"] == 1:
        name = f"local SGD, {workers} workers"
    else:
        name = f"DiLoCo (arXiv 2311.08105), {workers} workers"
    inside = f"{inner['tx']} {inner['learning_rate']:g}"
    if "inner_tx" in own:
        inside = "own optimizer"
    outside = f"{outer['tx']} {outer['learning_rate']:g}"
    if "outer_tx" in own:
        outside = "own optimizer"
    steps = counted(inner["steps_per_round"], "update")
    return f"{name}; rounds of {steps} ({inside}), outer {outside}"


def task_of(folder: Path) -> str | None:
    """Return the hub's name of what the model in a folder does; None if `transformers` has none."""
    if (folder / _ADAPTER).exists():
        return "text-generation"
    path = folder / "config.json"
    if not path.exists():
        return None
    name = read_json(path, DataError)["architectures"][0]
    for end, task in _TASKS.items():
        if name.endswith(end):
            return task
    return None


def _on_hub(name: str) -> str | None:
    """Return the name of a model or data set on the hub; None if it names a local file."""
    name = re.sub("^hf://(datasets/)?", "", name)
    is_hub = hub.NAME.fullmatch(name) and "/" in name and not Path(name).exists()
    return name if is_hub else None
