"""The card of an exported model: `README.md` with the metadata that the Hugging Face hub reads."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adloco_jax.data import hub
from adloco_jax.data.formats import read_json
from adloco_jax.errors import DataError
from adloco_jax.study import chart, curves, loss, page, summary
from adloco_jax.study.benchmarks import Score

FILE = "README.md"
# The hub's name of what a model does, by the end of its class in `config.json`.
_TASKS = {"ForCausalLM": "text-generation", "ForSequenceClassification": "text-classification"}
_ADAPTER = "adapter_config.json"
_METRICS = ("loss", "perplexity", "bits_per_byte", "accuracy")


def write(
    folder: Path, workdir: Path, *, round: int | None = None, trainer: int | None = None
) -> None:
    """Write the card and the curve of the loss into the folder of an export.

    `round` and `trainer` are those of the model; None: all rounds, the consensus model.

    Raises:
      DataError: If the run has no ledger, or a damaged one.
      OSError: If the files cannot be written.
    """
    from huggingface_hub import EvalResult, ModelCardData

    events = curves.read_run(workdir).events
    if round is not None:
        events = [e for e in events if e.get("round", e.get("rounds", 0)) <= round]
    run = curves.RunRecord(workdir, events)
    config, found = run.start["config"], summary.totals(events, trainer=trainer)
    start, data = config["model"]["init_from"], config["data"]
    base, dataset = _on_hub(start), _on_hub(data["path"]) if data["source"] == "hf" else None
    language = data["name"] if re.fullmatch("[a-z]{2}", data["name"]) else None
    name, task = workdir.resolve().name, task_of(folder)
    is_adapter = (folder / _ADAPTER).exists()
    scores = {metric: found[metric] for metric in _METRICS if found[metric] is not None}
    metadata = ModelCardData(
        base_model=base,
        datasets=dataset and [dataset],
        language=language,
        library_name="peft" if is_adapter else "transformers" if task else "jax",
        pipeline_tag=task,
        tags=["adloco", "diloco", "jax"],
        metrics=[*scores],
        model_name=name,
        eval_results=[
            EvalResult(
                task_type=task or "other",
                dataset_type=dataset or data["source"],
                dataset_name="held-out text of the run",
                metric_type=metric,
                metric_value=value,
            )
            for metric, value in scores.items()
        ],
    )
    facts = [
        ("", ""),
        ("starts from", base or ("a local checkpoint" if start else "random weights")),
        ("parameters", f"{run.start['num_params']:,}"),
        ("data", " ".join(filter(None, [data["source"], dataset, data["name"]]))),
        ("method", _method(config)),
        *(fact for fact in summary.described(found) if fact[0] not in ("programs", "memory")),
        ("versions", ", ".join(map(" ".join, run.start.get("versions", {}).items()))),
    ]
    text = [f"---\n{metadata.to_yaml()}\n---\n# {summary.markdown(name)}"]
    text.append("Trained by [AdLoCo](https://arxiv.org/abs/2508.18182) with `adloco_jax`.")
    if curves.lines(events, "round"):
        variants = curves.variants([run])
        panels, caption = loss.charts(variants), loss.caption(variants)
        drawn = chart.document([panels["Tokens"]], title=caption, caption=caption, right_px=180)
        page.write_files(folder, {"loss.svg": drawn})
        text.append(f"![{caption}](loss.svg)")
    text.append(summary.markdown_table(facts))
    if command := run.start["command"]:
        text.append(f"Trained by the command\n\n    {' '.join(command.split())}")
    text.append("No licence is stated: add `license` to the metadata at the top of this file.")
    page.write_files(folder, {FILE: "\n\n".join(text) + "\n"})


def task_of(folder: Path) -> str | None:
    """Return the hub's name of what the model in a folder does; None if `transformers` has none."""
    if (folder / _ADAPTER).exists():
        return "text-generation"
    path = folder / "config.json"
    name = read_json(path, DataError)["architectures"][0] if path.exists() else ""
    return next((task for end, task in _TASKS.items() if name.endswith(end)), None)


def _on_hub(name: str) -> str | None:
    name = re.sub("^hf://(datasets/)?", "", name)
    is_hub = hub.NAME.fullmatch(name) and "/" in name and not Path(name).exists()
    return name if is_hub else None


def _method(config: Mapping[str, Any]) -> str:
    pool, inner, outer = config["ensemble"], config["inner"], config["outer"]
    return (
        f"trainers {pool['num_trainers']}, workers {pool['num_workers']}, updates per round"
        f" {inner['steps_per_round']}; {inner['tx']} {inner['learning_rate']:g}, outer"
        f" {outer['tx']} {outer['learning_rate']:g}; batch-size test {config['batching']['test']},"
        f" merges {config['merge']['policy']}"
    )


def add_scores(folder: Path, scores: Sequence[Score]) -> None:
    """Add scores of benchmarks to the metadata of a card; the card's text is kept."""
    from huggingface_hub import EvalResult, ModelCard

    if not scores or not (folder / FILE).exists():
        return
    card = ModelCard.load(folder / FILE)
    known: list[Any] = card.data.get("eval_results", [])
    found = [
        EvalResult("text-generation", score.task, score.task, score.metric, score.value)
        for score in scores
    ]
    kept = [e for e in known if not any(map(e.is_equal_except_value, found))]
    card.data["eval_results"] = kept + found
    card.save(folder / FILE)
