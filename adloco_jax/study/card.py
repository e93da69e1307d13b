"""The card of an exported model: `README.md`, of about fifteen lines.

The hub is Hugging Face's, where a card describes a model. What the caller of `fit` gave, such as a
model or rows, the run's config does not describe; a card calls it "own". A trainer is a model in
training; its workers train copies of it. The consensus is the model that stands for all trainers.
"""

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

    Args:
      folder: The folder of the export, which has the model.
      workdir: Folder of the run.
      round: Rounds after which the model was read; None: all.
      trainer: The id of the model's trainer; None: it is the consensus of all trainers.

    Raises:
      DataError: If the run has no ledger, or a damaged one.
      OSError: If the file cannot be written.
    """
    events = curves.read_run(workdir).events
    if round is not None:
        # Without the lines of later rounds. An `end` line has `rounds` in place of `round`. A line
        # without either is not about a round, and is kept.
        events = [e for e in events if e.get("round", e.get("rounds", 0)) <= round]
    run = curves.RunRecord(workdir, events)
    config = run.start["config"]
    own = run.start.get("own", [])  # what the caller of `fit` gave; a command's run has none
    totals = dict(summary.totals_as_text(summary.totals(events, trainer=trainer)))  # by name

    # What the hub reads: lines at the top of the file, without those that are not known.
    metadata = {}
    task = task_of(folder)  # None: `transformers` cannot load the model
    metadata["library_name"] = "transformers" if task else "jax"
    if (folder / _ADAPTER).exists():
        metadata["library_name"] = "peft"
    if task:
        metadata["pipeline_tag"] = task
    init_from = config["model"]["init_from"]  # a checkpoint; empty: random weights
    base = _on_hub(init_from)
    if base:
        metadata["base_model"] = base
    data = config["data"]
    dataset = None
    if data["source"] == "hf":
        dataset = _on_hub(data["path"])
    if dataset:
        metadata["datasets"] = f"[{dataset}]"

    if "model" in own:
        start = "own weights"
    elif base:
        start = base
    elif init_from:
        start = "a local checkpoint"
    else:
        start = "random weights"
    if "rows" in own:
        rows = "own rows"
    elif dataset:
        rows = f"{data['source']} {dataset}"
    else:
        rows = data["source"]
    about = {
        "method": method(config, own),
        "starts from": f"{start}; {run.start['num_params']:,} parameters",
        "data": rows,
        "trained for": f"{totals['updates']} updates, {totals['tokens']} tokens",
        "held-out loss": totals["held-out loss"],
        "command": " ".join(run.start["command"].split()),  # on one line
    }

    version = run.start.get("versions", {}).get("adloco_jax", "")  # empty: not recorded
    trained_with = f"Trained with adloco_jax {version}".rstrip()
    lines = [
        "---",
        *(f"{key}: {value}" for key, value in metadata.items()),
        "---",
        f"# {summary.markdown(workdir.resolve().name)}",
        "",
        f"{trained_with}.",
        "",
        # A run of `fit` may have no command.
        *(f"- {key}: {summary.markdown(value)}" for key, value in about.items() if value),
        "",
        "No licence is stated: add `license` to the lines at the top of this file.",
    ]
    page.write_files(folder, {FILE: "\n".join(lines) + "\n"})


def method(config: Mapping[str, Any], own: list[str]) -> str:
    """Name the method that a run's config describes, its workers, optimizers and rounds.

    The first description that fits counts. Its number of workers is that of all trainers together.
    Trainers are counted for AdLoCo alone; the other descriptions do not name them. `own` has what
    the caller of `fit` gave: "model" and "rows", and perhaps "inner_tx" and "outer_tx", optimizers
    that the config does not name.
    """
    pool = config["ensemble"]
    inner = config["inner"]
    outer = config["outer"]
    trainers = pool["num_trainers"]
    workers = pool["num_workers"]  # of all trainers together
    merges = trainers > 1 and config["merge"]["policy"] != "none"
    # All other batch-size tests measure gradients; these two are declared sizes.
    measures_noise = config["batching"]["test"] not in ("constant", "ramp")
    if pool["initial_workers"]:  # None: all workers are there from the start
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
    inner_optimizer = f"{inner['tx']} {inner['learning_rate']:g}"
    if "inner_tx" in own:
        inner_optimizer = "own optimizer"
    outer_optimizer = f"{outer['tx']} {outer['learning_rate']:g}"
    if "outer_tx" in own:
        outer_optimizer = "own optimizer"
    steps = counted(inner["steps_per_round"], "update")
    return f"{name}; rounds of {steps} ({inner_optimizer}), outer {outer_optimizer}"


def task_of(folder: Path) -> str | None:
    """Return the hub's name for the task of the model in a folder, such as "text-generation".

    `folder` is an export, or missing. An export of an adapter, small matrices that were trained
    beside the frozen weights of a model, has `adapter_config.json`. Returns None if `transformers`
    cannot load what is there, as it has no `config.json` or a class that is not in `_TASKS`. Raises
    DataError if its `config.json` is damaged.
    """
    if (folder / _ADAPTER).exists():
        # Of this library's architectures only Llama, which writes text, can have an adapter.
        return "text-generation"
    path = folder / "config.json"
    if not path.exists():
        return None
    name = read_json(path, DataError)["architectures"][0]  # such as LlamaForCausalLM
    for end, task in _TASKS.items():
        if name.endswith(end):
            return task
    return None


def _on_hub(name: str) -> str | None:
    """Return the name of a model or data set on the hub; None if it names a local file.

    A folder of this computer counts before a name on the hub that is spelled alike.
    """
    name = re.sub("^hf://(datasets/)?", "", name)
    if not hub.NAME.fullmatch(name) or "/" not in name or Path(name).exists():
        return None
    return name
