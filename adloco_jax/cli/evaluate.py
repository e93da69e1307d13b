"""The command `adloco eval`: benchmarks of lm-evaluation-harness on the model of a run."""

import argparse
import difflib
import logging
from pathlib import Path

from adloco_jax.cli.names import is_run
from adloco_jax.errors import ConfigError, DataError, reason
from adloco_jax.study import benchmarks, card
from adloco_jax.study.report import write


def evaluate(options: argparse.Namespace, command: str) -> None:
    """Run tasks of lm-evaluation-harness on a run's export or a folder in Hugging Face layout.

    A run keeps the results in `benchmarks.json`, in its report, and in the card of its export.

    Raises:
      ConfigError: If the extra `eval` is not installed, there is no such task, or the model cannot
        be evaluated.
      DataError: If the harness cannot load a task's data or the model's tokenizer.
    """
    model = Path(options.model)
    folder = model / "export" if is_run(model) else model
    if not (folder / "tokenizer_config.json").is_file():
        raise ConfigError(
            f"{folder}: no export with a tokenizer that transformers loads; adloco export writes"
            " one of a run that reads text"
        )
    try:
        import torch
        from lm_eval import simple_evaluate
        from lm_eval.config.evaluate_config import EvaluatorConfig
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table
    except ImportError as error:
        raise ConfigError(
            f"adloco eval needs lm-evaluation-harness: pip install 'adloco-jax[eval]' ({error.name}"
            " is missing)"
        ) from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    chosen = EvaluatorConfig(tasks=options.tasks)
    try:
        manager = chosen.process_tasks()
    except ValueError as error:
        known = TaskManager().all_tasks
        near = [difflib.get_close_matches(name, known, n=1) for name in options.tasks.split(",")]
        meant = "".join(f"; did you mean {name}?" for names in near for name in names)
        raise ConfigError(f"--tasks {options.tasks}: {reason(error)}{meant}") from error
    try:
        found = simple_evaluate(
            model=HFLM(
                pretrained=str(folder),
                device="cuda" if torch.cuda.is_available() else "cpu",
                dtype="float32",
                batch_size=options.batch_size,
            ),
            tasks=chosen.tasks,
            task_manager=manager,
            limit=options.limit,
            log_samples=False,
        )
    except (OSError, ValueError, ConnectionError) as error:
        raise DataError(f"--tasks {options.tasks}: {reason(error)}") from error
    assert found is not None  # None in processes other than the first
    print(make_table(found))
    if is_run(model):
        benchmarks.add(model, found, limit=options.limit, command=command)
        card.add_benchmarks(folder, benchmarks.read(model))
        print(f"report: {write([model], model / 'report')}")
