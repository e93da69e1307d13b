"""The learner that a driver starts on its own computer: a child process, which ends with it.

The child reads its ticket from a pipe, and ends when the pipe does, however the driver ends.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

from adloco_jax.config import executed
from adloco_jax.elastic.learner import LearnerSetup
from adloco_jax.errors import ResourceError, end_process
from adloco_jax.host import processes
from adloco_jax.host.terminal import say
from adloco_jax.settings import Settings

# -P: a folder of this name in the working directory, such as a clone, is not the package.
_COMMAND = [sys.executable, "-P", "-m", "adloco_jax.cli.child"]  # the learner
# Prints, as JSON, the values of `model.base_dtype` and `model.remat` that fit the accelerator here.
_LOOK = [sys.executable, "-P", "-m", "adloco_jax.cli.look"]
_SOON_S = 60.0  # a child that fails within this time would fail again
_PAUSE_S = 5.0  # after a failure, before another child is started
_LAST_S = 10.0  # for a child to see that the run is over, and to end
_CHECK_S = 0.05  # between two checks of whether the child has ended
_KEEPER_S = 1.0  # for the thread that prints the child's lines to print the last ones
_MARK = "  here | "  # before each line that the child prints


@contextlib.contextmanager
def own_learner(
    setup: LearnerSetup,
    address: str,
    is_over: Callable[[], bool],
    *,
    key: bytes = b"",
    secret: str = "",
) -> Iterator[None]:
    """Keep a learner on this computer, if the settings say so, as long as the `with` block runs.

    The learner joins the run like one of another computer, and its lines are printed with a mark.
    If it fails within a minute of its start, this process ends with ResourceError's exit code; if
    later, another is started.

    Args:
      setup: What learners are made from: its settings, and whether the model was given to `fit`
        (`by_fit`). A child cannot be sent such a model, so then no learner is started.
      address: The run's: a bucket's, or a ticket.
      is_over: Called at the end of the `with` block: whether the run is over. Then the learner has
        some seconds to leave by itself; otherwise it is ended at once.
      key: The child's secret key, for a ticket.
      secret: The run's `ADLOCO_KEY`, for a bucket.
    """
    if setup.by_fit or not setup.settings.engine.starts_learner:
        yield
        return
    configs = [str(path) for path in executed]  # the user's config files, which the child runs too
    start = json.dumps({"address": address, "key": key.hex(), "secret": secret, "configs": configs})
    child = _start(start)
    ended = threading.Event()  # set at the end of the block

    def keep() -> None:
        """Print the child's lines, and start another when it has failed."""
        nonlocal child
        while True:
            start_s = time.monotonic()
            for line in child.stdout or ():
                say(f"{_MARK}{line.rstrip()}")
            code = child.wait()
            if ended.is_set() or code == 0:  # 0: the run is over for it, or it was asked to leave
                return
            say(f"the learner on this computer has ended, exit code {code}")
            has_failed_soon = time.monotonic() - start_s < _SOON_S
            if has_failed_soon and not processes.is_asked_to_stop():  # a signal may have ended it
                # An error raised in this thread would not end the driver.
                end_process(ResourceError("engine.trains_here: it ended soon after its start"))
            if ended.wait(_PAUSE_S):
                return
            child = _start(start)

    keeper = processes.start_thread(keep, name="the learner here")
    try:
        yield
    finally:
        ended.set()
        until_s = time.monotonic()
        if is_over():  # then the child leaves by itself
            until_s += _LAST_S
        while child.poll() is None and time.monotonic() < until_s:
            time.sleep(_CHECK_S)
        if child.stdin is not None:
            with contextlib.suppress(OSError):  # the pipe is broken, as the child has ended already
                child.stdin.close()  # the child ends when its input does
        with contextlib.suppress(subprocess.TimeoutExpired):  # it is killed next
            child.wait(_LAST_S)
        child.kill()  # does nothing if it has ended by itself
        keeper.join(_KEEPER_S)  # it prints the child's last lines


def _start(first_line: str) -> "subprocess.Popen[str]":
    """Start the child's process, and write the first line of its standard input.

    The input stays open, because its end ends the child. The child's output and errors come as
    lines of text from `stdout` of the process that is returned.

    `first_line` is JSON: the run's address, the child's key, the run's secret, and the paths of the
    config files.
    """
    process = subprocess.Popen(
        _COMMAND,
        env=os.environ | {"PYTHONPATH": processes.import_path()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",  # a byte that is no UTF-8 must not end the thread that prints
        bufsize=1,  # line by line
        start_new_session=True,  # ^C in the terminal is for the driver
    )
    assert process.stdin is not None
    # The pipe is broken if the child has ended already. The caller, who waits for it, sees that.
    with contextlib.suppress(OSError):
        process.stdin.write(first_line + "\n")
        process.stdin.flush()
    return process


def end_with_parent() -> None:
    """Start a thread that ends this process when its standard input ends: the driver has ended.

    It is called in the child, which has read the first line of the input; nothing comes after that.
    """

    def watch() -> None:
        """Wait for the end of the input, and end this process."""
        while sys.stdin.buffer.read(1):
            pass
        os._exit(0)  # `sys.exit` would end only this thread

    processes.start_thread(watch, name="the driver's end")


def as_own_learner_fits(settings: Settings) -> Settings:
    """Choose `model.base_dtype` to fit the memory of this computer's accelerator; return settings.

    `model.remat` is chosen as well if it is unset. The accelerator is for the learner on this
    computer, so this process does not touch it: another one tries what fits, and ends before the
    learner starts. Raises ResourceError if nothing fits, or that process fails.
    """
    asked = {"settings": settings.model_dump(), "configs": [str(path) for path in executed]}
    first_line = json.dumps(asked) + "\n"
    environment = os.environ | {"PYTHONPATH": processes.import_path()}
    done = subprocess.run(
        _LOOK, env=environment, input=first_line, stdout=subprocess.PIPE, text=True
    )
    lines = done.stdout.splitlines()
    last = lines[-1] if lines else ""  # JSON with the two values, or the error in words
    if done.returncode != 0:
        raise ResourceError(f"model.base_dtype: not found by what fits here; set it ({last})")
    found = json.loads(last)
    remat = settings.model.remat
    if remat is None:
        remat = found["remat"]
    model = settings.model.model_copy(update={"base_dtype": found["base_dtype"], "remat": remat})
    return settings.model_copy(update={"model": model})
