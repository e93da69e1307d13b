"""Send the lines of a run's ledger to TensorBoard and Weights & Biases (off by default).

A tracker is third-party code that uses disks and networks. Trackers are called directly, between
two rounds. A tracker that raises an error is dropped, and a `fault` line records this.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from adloco_jax.errors import ConfigError, reason
from adloco_jax.run import processes, resume
from adloco_jax.run.build import Run
from adloco_jax.run.ledger import Ledger, cut, read
from adloco_jax.run.terminal import Progress
from adloco_jax.settings import Log

Send = Callable[[dict], None]

# For each event, the ledger fields that are sent as scalars. A tracker's step is a round.
_SCALARS = {
    "round": "train_loss requested_batch_size micro_batch_size num_accum_steps workers"
    " learning_rate noise signal test_value pseudo_grad_norm",
    "eval": "loss perplexity accuracy tokens_total bytes_total syncs_total updates_total",
    "merge": "barrier loss_after",
    "memory": "host_peak_bytes",
}
_AS_TEXT = ("merge", "refusal", "spawn", "fault")


def scalars(event: dict) -> dict[str, float]:
    """Map the names of the numbers in one line of the run's ledger file to their values.

    Only numbers that trackers show are selected. Numbers that were not finite are null in the
    ledger; they are left out. A name is `<field>/trainer_<id>`, or `<field>/consensus` for the
    consensus model. It is `<field>/<event>` for a line without a trainer. The peak memory of a
    device is `device_peak_bytes/<device number>`.
    """
    kind, trainer = event["event"], event.get("trainer")
    is_consensus = trainer == "consensus"
    who = kind if trainer is None else "consensus" if is_consensus else f"trainer_{trainer}"
    fields = _SCALARS.get(kind, "").split()
    # Totals are of the whole run and equal on all trainers' lines, so they are sent once.
    fields = [name for name in fields if is_consensus or not name.endswith("_total")]
    named = {f"{name}/{who}": event.get(name) for name in fields}
    if event.get("step_s"):
        named[f"tokens_per_s/{who}"] = event["tokens"] / event["step_s"]
    for device, peak in enumerate(event.get("device_peak_bytes", ())):
        named[f"device_peak_bytes/{device}"] = peak
    return {name: value for name, value in named.items() if value is not None}


@contextlib.contextmanager
def tensorboard(workdir: Path, history: Sequence[dict]) -> Iterator[Send]:
    """Open a tracker that writes TensorBoard files to `tensorboard/` in the run's folder.

    Older files in this folder are replaced.

    Args:
      workdir: The run's folder.
      history: The lines of the ledger so far. The last one is the `start` line that this process
        has written.
    """
    from tensorboardX import SummaryWriter

    folder = str(workdir / "tensorboard")
    # The whole history is written again, because a killed process may have lost some of it.
    with SummaryWriter(folder, purge_step=0, flush_secs=10) as writer:

        def send(event):
            for name, value in scalars(event).items():
                writer.add_scalar(name, value, event["round"])
            if event["event"] in _AS_TEXT:
                writer.add_text(event["event"], json.dumps(event), event["round"])

        yield send


@contextlib.contextmanager
def wandb(workdir: Path, history: Sequence[dict]) -> Iterator[Send]:
    """Open a tracker that sends a run to Weights & Biases.

    With `WANDB_MODE=offline` it writes to `wandb/` in the run's folder instead.

    A run's id is a hash of the first `start` line in its ledger, so that a resumed run continues
    the same W&B run. Steps that W&B already has are not sent again, because they cannot be
    overwritten.

    Args:
      workdir: The run's folder.
      history: The lines of the ledger so far. The last one is the `start` line that this process
        has written.
    """
    import wandb

    first = next(event for event in history if event["event"] == "start")
    with wandb.init(
        project=os.environ.get("WANDB_PROJECT", "adloco-jax"),
        id=hashlib.sha256(json.dumps(first).encode()).hexdigest()[:16],
        name=first["run"],
        config=history[-1]["config"],
        dir=str(workdir),
        resume="allow",
        settings=wandb.Settings(console="off"),
    ) as run:
        first_step = run.step

        def send(event):
            if event.get("round", 0) < first_step:
                return
            if numbers := scalars(event):
                run.log(numbers, step=event["round"])
            if event["event"] in _AS_TEXT:
                # At W&B's current step: a fault may name the next round, which would end this step.
                run.log({event["event"]: json.dumps(event)}, commit=False)

        yield send


_TRACKERS = {"tensorboard": ("tensorboardX", tensorboard), "wandb": ("wandb", wandb)}


def check_installed(log: Log) -> None:
    """Refuse trackers that the config names but that are not installed.

    Raises:
      ConfigError: If a tracker is not installed. The message names the extra to install.
    """
    missing = [
        f"log.{name} = True: the package {package} is not installed;"
        f" pip install 'adloco-jax[{name}]', or leave it off"
        for name, (package, _) in _TRACKERS.items()
        if getattr(log, name) and importlib.util.find_spec(package) is None
    ]
    if missing:
        raise ConfigError("\n".join(missing))


class Trackers:
    """Sends each line of a run's ledger to the trackers that the config names."""

    def __init__(
        self,
        log: Log,
        workdir: Path,
        history: Sequence[dict],
        on_fault: Callable[[str, int, str], None],
    ):
        """Store the arguments; a tracker is opened when the ledger has its `start` line.

        Args:
          log: The config's group that names the trackers.
          workdir: The run's folder.
          history: The earlier lines of a resumed run's ledger, which are sent again to each
            tracker.
          on_fault: Called when a tracker is dropped, with its name, the round and the cause.
        """
        self._names = [name for name in _TRACKERS if getattr(log, name)]
        self._workdir, self._history, self._on_fault = workdir, history, on_fault
        self._opened: dict[str, tuple[contextlib.ExitStack, Send]] = {}

    def __call__(self, event: dict) -> None:
        """Send a line of the ledger to every tracker."""
        is_start = event["event"] == "start"
        for name in self._names if is_start else [*self._opened]:
            with self._dropped_if_it_raises(name, event.get("round", 0)):
                if is_start:
                    self._open(name, event)
                elif event["event"] in (*_SCALARS, *_AS_TEXT):
                    self._opened[name][1](event)

    def close(self) -> None:
        """Close every tracker, which sends its buffered data."""
        self._on_fault = lambda *_: None  # faults are no longer recorded: the ledger closes next
        for name, (stack, _) in [*self._opened.items()]:
            with self._dropped_if_it_raises(name, 0):
                stack.close()

    def _open(self, name: str, start: dict) -> None:
        with contextlib.ExitStack() as stack:
            history = [*self._history, start]
            send = stack.enter_context(_TRACKERS[name][1](self._workdir, history))
            self._opened[name] = stack.pop_all(), send
        for line in history:
            send(line)

    @contextlib.contextmanager
    def _dropped_if_it_raises(self, name: str, at_round: int) -> Iterator[None]:
        try:
            yield
        # Deliberately broad: third-party code may raise anything, and must not stop training.
        except Exception as error:
            cause = f"{type(error).__name__}: {reason(error)}"
            stack, _ = self._opened.pop(name, (contextlib.ExitStack(), None))
            with contextlib.suppress(Exception):
                stack.close()
            self._on_fault(name, at_round, cause)


def open_ledger(
    run: Run, stack: contextlib.ExitStack, position: dict, progress: Progress
) -> Ledger:
    """Open a run's ledger, truncated to the time of the restored checkpoint, and its trackers.

    Args:
      run: The data of the run. Process 0 also writes the run's config to the folder again.
      stack: Receives the ledger and the trackers, to close them.
      position: Size and hash of the ledger when the restored checkpoint was written, see
        `Ledger.position`.
      progress: The terminal, which shows the name of a tracker that is dropped.
    """
    if not processes.is_first():
        return stack.enter_context(Ledger(os.devnull))
    path = run.workdir / "ledger.jsonl"
    made_with = {"versions": resume.versions(), "data_fingerprint": run.corpus.fingerprint}
    made_with["data_commit"] = getattr(run.corpus, "commit", "")
    resume.write_config(run.workdir, run.settings, **made_with)
    cut(path, position)
    kept = read(path) if path.exists() else []

    def drop(name: str, at_round: int, cause: str) -> None:
        ledger.write("fault", kind="tracker", round=at_round, tracker=name, cause=cause)
        progress.note(f"log.{name} is off from here on: {cause}")

    trackers = Trackers(run.settings.log, run.workdir, kept, drop)
    ledger = stack.enter_context(Ledger(path, trackers))
    stack.callback(trackers.close)
    return ledger
