"""Comparisons of methods: configs that differ in some keys, with several seeds, and their costs.

All numbers come from the runs' ledgers, at the evaluations of the consensus model. Synchronisations
and bytes are counted as in the report (`curves.heldout_points`).
"""

import contextlib
import copy
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from adloco_jax.config import completed, unknown_key_fault, validate
from adloco_jax.errors import ConfigError, DataError
from adloco_jax.run.kept.folder import InUse, faults_if_finished
from adloco_jax.settings import OPTIONS
from adloco_jax.study.curves import heldout_points
from adloco_jax.training import train
from studies.cluster import Cluster, run_seconds


@dataclass(frozen=True)
class Comparison:
    """Variants of a config and their seeds, and the losses to which their costs are compared."""

    base: ConfigDict
    variants: Mapping[str, Mapping[str, object]]
    """The keys that differ from `base`, by the variant's name."""
    target_losses: Sequence[float]
    """Nats per token."""
    seeds: Sequence[int] = (0, 1, 2)
    simulated: Cluster = Cluster(num_params=300_000_000, sequence_length=1024)


class Trial(NamedTuple):
    """One run of a comparison: a variant with a seed, its config and its folder."""

    variant: str
    seed: int
    config: ConfigDict
    workdir: Path


def runs_of(comparison: Comparison, folder: str | Path) -> list[Trial]:
    """Check a comparison; list its runs, in `<folder>/<variant>/seed-<seed>`, in order.

    Raises:
      ConfigError: If a variant is invalid; the message lists all faults.
    """
    faults, runs = [], []
    for name, changes in comparison.variants.items():
        if unknown := [key for key in changes if key not in OPTIONS]:
            faults += [f"{name}: {unknown_key_fault(key)}" for key in unknown]
            continue
        workdir = Path(folder) / re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        try:
            for seed in comparison.seeds:
                config = copy.deepcopy(comparison.base)
                config.update_from_flattened_dict({**changes, "seed": seed})
                validate(config)
                runs.append(Trial(name, seed, config, workdir / f"seed-{seed}"))
        except (ConfigError, TypeError) as error:  # TypeError: a value of another type
            faults += [f"{name}: {line}" for line in str(error).splitlines()]
    if len({run.workdir for run in runs}) < len(runs):
        faults.append("two variants would share a folder; name them apart")
    if faults:
        raise ConfigError("\n".join(faults))
    return runs


def execute(runs: Iterable[Trial], *, on_end: Callable[[Trial], None], command: str) -> None:
    """Train the unfinished ones of runs, one by one.

    Several processes may share runs: one that another process trains is skipped. What a run prints
    goes to `output.txt` in its folder.

    Args:
      runs: Of a comparison (`runs_of`); unfinished ones are resumed.
      on_end: Called for each finished run.
      command: The command line, which is recorded in the ledgers of the runs.

    Raises:
      UserError: If a run raises it (`train`). Another call resumes the comparison.
    """
    for run in runs:
        try:
            settings = completed(validate(run.config), run.workdir)
            if faults_if_finished(run.workdir, settings) is None:
                run.workdir.mkdir(parents=True, exist_ok=True)
                path = run.workdir / "output.txt"
                with (
                    open(path, "a", encoding="utf-8", errors="backslashreplace") as output,
                    contextlib.redirect_stdout(output),
                ):
                    train(settings, run.workdir, command=command)
        except InUse:
            continue
        on_end(run)


def curve(events: Sequence[dict], simulated: Cluster) -> list[dict[str, float]]:
    """Loss (nats/token) and costs at each evaluation of a run's consensus model.

    The costs are tokens, synchronisations (`syncs`), bytes moved, sequential steps (`updates`),
    simulated seconds (`time_s`) and rounds. Evaluations whose loss is not finite are left out.

    Raises:
      DataError: If no evaluation is left.
    """
    end_s = run_seconds(events, simulated)
    points = [
        {
            "loss": point["value"],
            "rounds": point["round"],
            "tokens": point["tokens"],
            "syncs": point["syncs"],
            "bytes": point["bytes"],
            "updates": point["updates"],
            "time_s": end_s.get(point["round"], 0.0),
        }
        for point in heldout_points(events)
        if math.isfinite(point["value"])
    ]
    if not points:
        raise DataError("the ledger has no evaluation with a finite loss")
    return points


def to_reach(points: Sequence[dict], loss: float) -> dict[str, float] | None:
    """Return the point at which a curve first reaches a loss; None if it never does.

    Its costs lie between those of the evaluations before and after, linearly in the loss. So they
    are no whole rounds. A curve that begins below the loss has its first point.
    """
    after = next((i for i, point in enumerate(points) if point["loss"] <= loss), None)
    if not after:
        return None if after is None else points[0]
    high, low = points[after - 1], points[after]
    share = (high["loss"] - loss) / (high["loss"] - low["loss"])
    return {name: high[name] + share * (low[name] - high[name]) for name in low}
