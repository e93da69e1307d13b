"""Send the ledger's lines to TensorBoard and Weights & Biases (off by default).

Such trackers are third-party, use disks and networks, and are called between rounds. One that
raises an error, or is not installed, is dropped: it is closed and used no more, with a line on the
terminal and a `fault` line in the ledger; the run goes on. A line of the ledger, the log of a run,
is a dict with its kind under `event`; the `start` line says that a process begins or resumes the
run. A trainer is a model in training, and the consensus the model that stands for all of them.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from adloco_jax.errors import reason
from adloco_jax.settings import LogSettings

Send = Callable[[dict], None]
"""A function that is given a line of the ledger, and sends what a tracker shows of it."""

# Kinds of lines of the ledger: those that are sent whole as text, and those whose numbers are sent.
_AS_TEXT = ("merge", "refusal", "spawn", "fault")
_AS_NUMBERS = ("round", "eval", "merge", "memory")
_PLACES = ("round", "trainer", "into")  # fields that say where a number belongs, and are none


def scalars(event: dict) -> dict[str, float]:
    """Map names of the numbers in a ledger line to their finite values.

    Names are `<field>/trainer_<id>`, `<field>/consensus`, `<field>/<kind of event>`, and
    `device_peak_bytes/<device number>`. Without numbers to send, the result is empty.
    """
    kind = event["event"]
    trainer = event.get("trainer")
    if kind not in _AS_NUMBERS:
        return {}
    if trainer is None:  # of a line on the whole run, such as its memory
        who = kind
    elif trainer == "consensus":
        who = "consensus"
    else:
        who = f"trainer_{trainer}"
    named = {f"{name}/{who}": value for name, value in event.items() if name not in _PLACES}
    if event.get("step_s"):  # a `round` line, if its seconds were measured and are not zero
        named[f"tokens_per_s/{who}"] = event["tokens"] / event["step_s"]
    # Of a `memory` line; None for a device that does not report its memory.
    for device, peak in enumerate(event.get("device_peak_bytes", ())):
        named[f"device_peak_bytes/{device}"] = peak
    # Left out are null (not finite, or not measured), texts and lists.
    return {name: value for name, value in named.items() if isinstance(value, int | float)}


def losses_by_update(event: dict) -> list[tuple[int, dict[str, float]]]:
    """List the training losses within a round, each with the trainer's updates until then.

    A loss is a dict from its name to its value. Those that were not finite are left out. `event` is
    any line of the ledger; only `round` lines have such losses.
    """
    name = f"train_loss_by_update/trainer_{event.get('trainer')}"
    pairs = event.get("train_losses", ())
    return [(updates, {name: loss}) for updates, loss in pairs if loss is not None]


@contextlib.contextmanager
def tensorboard(workdir: Path, history: Sequence[dict]) -> Iterator[Send]:
    """Open a tracker that writes TensorBoard files in the run's folder; yield its `Send`.

    `history` has the lines of the ledger so far, and ends with the `start` line of this process.
    The caller sends all of it again, and what older files have is hidden.
    """
    from tensorboardX import SummaryWriter

    folder = str(workdir / "tensorboard")
    # The history is sent again because a killed process may have lost the last part of its file.
    # `purge_step=0` hides what older files have from step 0 on. Lines are on disk within 10 s.
    with SummaryWriter(folder, purge_step=0, flush_secs=10) as writer:

        def send(event: dict) -> None:
            """Write a line's numbers by round, and its losses within the round by update."""
            for updates, named in losses_by_update(event):
                for name, loss in named.items():
                    writer.add_scalar(name, loss, updates)
            for name, value in scalars(event).items():
                writer.add_scalar(name, value, event["round"])
            if event["event"] in _AS_TEXT:
                writer.add_text(event["event"], json.dumps(event), event["round"])

        yield send


@contextlib.contextmanager
def wandb(workdir: Path, history: Sequence[dict]) -> Iterator[Send]:
    """Open a tracker that sends a run to W&B, or with WANDB_MODE=offline writes to the folder.

    `history` has the lines of the ledger so far, and ends with the `start` line of this process.
    The caller sends all of it again. A row of W&B is what one call of `log` sends. W&B cannot
    overwrite rows, so they are numbered in the order of the ledger, and those that it has already
    are not sent again.
    """
    import wandb

    first_start = next(event for event in history if event["event"] == "start")
    newest_start = history[-1]
    # The same in each process of a run, so that W&B continues a run that is resumed. 16 digits of
    # the hash tell runs apart.
    run_id = hashlib.sha256(json.dumps(first_start).encode()).hexdigest()[:16]
    with wandb.init(
        project=os.environ.get("WANDB_PROJECT", "adloco-jax"),
        id=run_id,
        name=first_start["run"],
        config=newest_start["config"],
        dir=str(workdir),
        resume="allow",  # W&B continues the run with this id, if it has one
        settings=wandb.Settings(console="off"),  # the terminal's lines are not sent
    ) as run:
        # The axes of the charts: losses within a round by update, all else by round.
        run.define_metric("*", step_metric="round")
        run.define_metric("train_loss_by_update/*", step_metric="updates")
        first_step = run.step  # number of rows that W&B has already
        num_rows = 0  # rows of the lines that `send` was given

        def send(event: dict) -> None:
            """Number the rows of a line of the ledger, and send those that W&B lacks."""
            nonlocal num_rows
            rows: list[dict] = []
            for updates, named in losses_by_update(event):
                rows.append(named | {"updates": updates})
            shown: dict = scalars(event)
            if event["event"] in _AS_TEXT:
                shown[event["event"]] = json.dumps(event)
            if shown:
                rows.append(shown | {"round": event["round"]})
            for row in rows:
                step = num_rows
                num_rows += 1
                if step >= first_step:
                    run.log(row, step=step)

        yield send


LOGGERS = {"tensorboard": tensorboard, "wandb": wandb}
"""Trackers by name: `open(workdir, history)` is a context manager that yields `send(event)`.

Those of the package are used if the option `log.NAME` says so, and entries of yours always.
"""


class Trackers:
    """Sends each line of a run's ledger to the trackers in use."""

    def __init__(
        self,
        log: LogSettings,
        workdir: Path,
        history: Sequence[dict],
        on_fault: Callable[[str, int, str], None],
    ):
        """Store the arguments; the `start` line opens the trackers.

        Args:
          log: Says which of the package's trackers are used.
          workdir: Folder of the run.
          history: Lines of the ledger that earlier processes wrote, which are sent again.
          on_fault: Called when a tracker is dropped, with its name, the round and the cause.
        """
        # A user's own entry of `LOGGERS` has no option in `log`, and is always used.
        self._names = [name for name in LOGGERS if getattr(log, name, True)]
        self._workdir = workdir
        self._history = history
        self._on_fault = on_fault
        # By name of each tracker in use: its function `send`, and what closes it.
        self._sends: dict[str, Send] = {}
        self._stacks: dict[str, contextlib.ExitStack] = {}

    def __call__(self, event: dict) -> None:
        """Send a line of the ledger to every tracker; the `start` line opens the trackers."""
        at_round = event.get("round", 0)
        if event["event"] == "start":
            for name in self._names:
                with self._dropped_if_it_raises(name, at_round):
                    self._open(name, event)
        elif event["event"] in (*_AS_NUMBERS, *_AS_TEXT):
            for name, send in [*self._sends.items()]:  # a copy, because a drop removes one
                with self._dropped_if_it_raises(name, at_round):
                    send(event)

    def close(self) -> None:
        """Close every tracker; when it is closed, a tracker sends the data in its buffers."""
        # Faults are no longer recorded, because the ledger is closed next.
        self._on_fault = lambda *_: None
        for name, stack in [*self._stacks.items()]:
            with self._dropped_if_it_raises(name, 0):
                stack.close()

    def _open(self, name: str, start: dict) -> None:
        """Open the tracker `name` of `LOGGERS`; send it the earlier lines, then `start`."""
        history = [*self._history, start]
        stack = contextlib.ExitStack()
        send = stack.enter_context(LOGGERS[name](self._workdir, history))
        # Stored before lines are sent, so that an error of `send` closes the tracker.
        self._stacks[name] = stack
        self._sends[name] = send
        for line in history:
            send(line)

    @contextlib.contextmanager
    def _dropped_if_it_raises(self, name: str, at_round: int) -> Iterator[None]:
        """Close a tracker that raises an error in the `with` block, and use it no more.

        `name` is that of the tracker. The error is told to `on_fault` and does not leave the block.
        """
        try:
            yield
        # Deliberately broad: third-party code may raise anything, and must not stop training.
        except Exception as error:
            cause = f"{type(error).__name__}: {reason(error)}"
            self._sends.pop(name, None)
            stack = self._stacks.pop(name, None)
            if stack is not None:
                with contextlib.suppress(Exception):  # one that is broken may not close either
                    stack.close()
            self._on_fault(name, at_round, cause)
