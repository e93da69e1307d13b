"""TensorBoard and Weights & Biases, fed with the ledger's lines; both are off by default.

A tracker is third-party code that uses disks and networks. It is called directly, between two
rounds; one that raises is dropped with a `fault` line.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from adloco_jax.errors import ConfigError
from adloco_jax.settings import Log

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
_AS_TEXT = ("merge", "refusal", "spawn", "fault")


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
        """Opens nothing yet: each tracker is opened at the `start` line.

        Args:
          log: Which trackers.
          workdir: The run's folder.
          history: The ledger of a resumed run, sent again to each tracker.
          on_fault: Called when a tracker is dropped: its name, the round, the cause.
        """
        self._names = [name for name in _TRACKERS if getattr(log, name)]
        self._workdir, self._history, self._on_fault = workdir, history, on_fault
        self._opened: dict[str, tuple[contextlib.ExitStack, Send]] = {}

    def __call__(self, event: dict) -> None:
        """Sends a line to every tracker."""
        if event["event"] == "start":
            for name in self._names:
                self._try(name, event, self._open)
        elif event["event"] in (*_NAMES, *_AS_TEXT):
            for name in [*self._opened]:
                self._try(name, event, lambda name, event: self._opened[name][1](event))

    def close(self) -> None:
        """Closes every tracker, which sends what it still holds."""
        self._on_fault = lambda *_: None  # the ledger closes next
        for name, (stack, _) in [*self._opened.items()]:
            self._try(name, {}, lambda name, event, stack=stack: stack.close())

    def _open(self, name: str, event: dict) -> None:
        with contextlib.ExitStack() as stack:
            history = [*self._history, event]
            send = stack.enter_context(_TRACKERS[name][1](self._workdir, history))
            self._opened[name] = stack.pop_all(), send
        for line in history:
            send(line)

    def _try(self, name: str, event: dict, act: Callable[[str, dict], None]) -> None:
        """Calls a tracker, and drops it if it raises."""
        try:
            act(name, event)
        # Deliberately broad: third-party code may raise anything, and must not stop training.
        except Exception as error:
            cause = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            stack, _ = self._opened.pop(name, (contextlib.ExitStack(), None))
            with contextlib.suppress(Exception):
                stack.close()
            self._on_fault(name, event.get("round", 0), cause)
