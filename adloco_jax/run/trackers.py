"""TensorBoard and Weights & Biases, fed with the ledger's lines; both are off by default.

A tracker is third-party code that uses disks and networks. Each has a thread of its own, so that
one that is slow, hangs or raises does not delay the run: it is dropped with a `fault` line.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from adloco_jax.errors import ConfigError
from adloco_jax.settings import Log

CLOSE_S = 60.0  # how long the end of a run waits for a tracker

Send = Callable[[dict], None]

# Names of scalars, by event and field; `{}` is the trainer. A step is a round.
_NAMES = {
    "round": {
        "train_loss": "train_loss/{}",
        "requested_batch_size": "batch_requested/{}",
        "micro_batch_size": "batch_micro/{}",
        "num_accum_steps": "accumulation/{}",
        "workers": "workers/{}",
        "learning_rate": "learning_rate/{}",
        "noise": "noise/{}",
        "signal": "signal/{}",
        "test_value": "test_value/{}",
        "pseudo_grad_norm": "pseudo_grad_norm/{}",
    },
    "eval": {
        "loss": "heldout_loss/{}",
        "perplexity": "perplexity/{}",
        "accuracy": "accuracy/{}",
        "tokens_total": "total/tokens",
        "bytes_total": "total/bytes",
        "syncs_total": "total/syncs",
        "updates_total": "total/updates",
    },
    "merge": {"barrier": "merge/barrier", "loss_after": "merge/loss_after"},
    "memory": {"host_peak_bytes": "memory/host_peak_bytes"},
}
_AS_TEXT = ("branch", "merge", "refusal", "spawn", "fault")


def scalars(event: dict) -> dict[str, float]:
    """The numbers of a ledger line by name, without those that are null (not finite)."""
    trainer = event.get("trainer")
    who = trainer if trainer == "consensus" else f"trainer_{trainer}"
    named = {
        name.format(who): event.get(field) for field, name in _NAMES.get(event["event"], {}).items()
    }
    if event.get("step_s"):
        named[f"tokens_per_s/{who}"] = event["tokens"] / event["step_s"]
    for device, peak in enumerate(event.get("device_peak_bytes", ())):
        named[f"memory/device_{device}_peak_bytes"] = peak
    return {name: value for name, value in named.items() if value is not None}


@contextlib.contextmanager
def tensorboard(workdir: Path, history: Sequence[dict]) -> Iterator[Send]:
    """Writes to `tensorboard/` in the run's folder, replacing older files there.

    Args:
      workdir: The run's folder.
      history: The ledger so far; its last line is the `start` of this process.
    """
    from tensorboardX import SummaryWriter

    folder = str(workdir / "tensorboard")
    # Everything is written again: a killed process lost what it had not flushed.
    with SummaryWriter(folder, purge_step=0, flush_secs=10) as writer:

        def send(event):
            for name, value in scalars(event).items():
                writer.add_scalar(name, value, event["round"])
            if event["event"] in _AS_TEXT:
                writer.add_text(event["event"], json.dumps(event), event["round"])

        yield send


@contextlib.contextmanager
def wandb(workdir: Path, history: Sequence[dict]) -> Iterator[Send]:
    """Sends to Weights & Biases, or with `WANDB_MODE=offline` to `wandb/` in the run's folder.

    A run's id is a hash of the first `start` line in its ledger, so that a resumed run goes on in
    the same W&B run. Steps that it already has are not sent again: W&B cannot overwrite them.

    Args:
      workdir: The run's folder.
      history: The ledger so far; its last line is the `start` of this process.
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
                # To the step it is at: a fault may name the next round, which would close this.
                run.log({event["event"]: json.dumps(event)}, commit=False)

        yield send


_TRACKERS = {"tensorboard": ("tensorboardX", tensorboard), "wandb": ("wandb", wandb)}


def check_installed(log: Log) -> None:
    """Refuses trackers that the config names but are not installed.

    Raises:
      ConfigError: Naming the extras to install.
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
    """Passes ledger lines on to the trackers that a config names."""

    def __init__(
        self,
        log: Log,
        workdir: Path,
        history: Sequence[dict],
        on_fault: Callable[[str, int, str], None],
    ):
        """Starts a thread per tracker, which opens it at the `start` line.

        Args:
          log: Which trackers.
          workdir: The run's folder.
          history: The ledger of a resumed run, sent again to each tracker.
          on_fault: Called when a tracker is dropped: its name, the round, the cause.
        """
        self._workdir, self._history, self._on_fault = workdir, history, on_fault
        self._threads: dict[threading.Thread, queue.SimpleQueue] = {}
        for name in _TRACKERS:
            if getattr(log, name):
                lines = queue.SimpleQueue()
                thread = threading.Thread(
                    target=self._work, args=(name, lines), name=name, daemon=True
                )
                self._threads[thread] = lines
                thread.start()

    def __call__(self, event: dict) -> None:
        """Queues a line for every tracker, without waiting."""
        for lines in self._threads.values():
            lines.put(event)

    def close(self) -> None:
        """Waits until every tracker has sent its lines, up to `CLOSE_S` seconds each."""
        for lines in self._threads.values():
            lines.put(None)
        for thread in self._threads:
            thread.join(CLOSE_S)
            if thread.is_alive():
                self._on_fault(thread.name, 0, f"not done {CLOSE_S} s after the run")
        self._on_fault = lambda *_: None  # the ledger closes next

    def _work(self, name: str, lines: queue.SimpleQueue) -> None:
        """Runs one tracker from its `start` line until the run ends or it raises."""
        at_round, send = 0, None
        try:
            with contextlib.ExitStack() as stack:
                for event in iter(lines.get, None):
                    at_round = event.get("round", at_round)
                    if event["event"] == "start":
                        history = [*self._history, event]
                        send = stack.enter_context(_TRACKERS[name][1](self._workdir, history))
                        for line in self._history:
                            send(line)
                    if send:
                        send(event)
        # Deliberately broad: third-party code may raise anything, and must not stop training.
        except Exception as error:
            cause = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            self._on_fault(name, at_round, cause)
