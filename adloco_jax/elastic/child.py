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

_COMMAND = [sys.executable, "-m", "adloco_jax.cli.child"]  # the learner
_LOOK = [sys.executable, "-m", "adloco_jax.cli.look"]  # prints what fits the accelerator here
_SOON_S = 60.0  # a child that ends sooner than this fails for a reason that stays
_PAUSE_S = 5.0  # before another is started
_LAST_S = 10.0  # for a child to see that the run is over
_CHECK_S = 0.05  # from one look at whether the child has ended to the next
_KEEPER_S = 1.0  # for the thread that prints its lines to end
_MARK = "  here | "  # before each line that the child prints


@contextlib.contextmanager
def own_learner(
    given: LearnerSetup,
    address: str,
    is_over: Callable[[], bool],
    *,
    key: bytes = b"",
    secret: str = "",
) -> Iterator[None]:
    """Keep a learner on this computer, if the settings say so, as long as the `with` block runs.

    The learner joins the run like one of another computer, and its lines are printed with a mark.
    If it fails soon after its start, this process ends with ResourceError's code; if later, another
    is started. At the end of the block it has some seconds to see that the run is over.

    Args:
      given: That from which learners are made; not by `fit`, as a child has not the caller's model.
      address: The run's: a bucket's, or a ticket.
      is_over: Returns whether the run is over. If not, the child ends at once.
      key: The child's secret key, for a ticket.
      secret: The run's `ADLOCO_KEY`, for a bucket.
    """
    if given.by_fit or not given.settings.engine.starts_learner:
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
            if time.monotonic() - start_s < _SOON_S and not processes.is_asked_to_stop():
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
        if is_over():
            until_s += _LAST_S
        while child.poll() is None and time.monotonic() < until_s:
            time.sleep(_CHECK_S)
        if child.stdin is not None:
            with contextlib.suppress(OSError):  # the pipe is broken, as it has ended already
                child.stdin.close()  # ends it
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_LAST_S)
        child.kill()  # if it has not ended by itself; else this does nothing
        keeper.join(_KEEPER_S)


def _start(first_line: str) -> "subprocess.Popen[str]":
    """Start the child's process, and write the first line of its standard input, which stays open.

    `first_line` is JSON: the run's address, the child's key, the run's secret, and the paths of the
    config files. The input stays open because its end ends the child. Standard output and errors
    are one pipe of text, from which the caller reads lines.
    """
    process = subprocess.Popen(
        _COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",  # a byte that is no UTF-8 must not end the thread that prints
        bufsize=1,  # line by line
        start_new_session=True,  # ^C in the terminal is for the driver
    )
    assert process.stdin is not None
    # The pipe is broken if the child has ended already; whoever waits for it sees its exit code.
    with contextlib.suppress(OSError):
        process.stdin.write(first_line + "\n")
        process.stdin.flush()
    return process


def end_with_parent() -> None:
    """End this process when its standard input ends: the driver has ended."""

    def watch() -> None:
        """Read the input to its end, and end this process."""
        while sys.stdin.buffer.read(1):  # what comes after the first line means nothing
            pass
        os._exit(0)  # `sys.exit` would end only this thread

    processes.start_thread(watch, name="the driver's end")


def as_own_learner_fits(settings: Settings) -> Settings:
    """Find `model.base_dtype`, and an unset `model.remat`, for the learner on this computer.

    The learner has the accelerator here, not this process. So another process looks at it, and ends
    before the learner starts. Raises ResourceError if nothing fits.
    """
    asked = {"settings": settings.model_dump(), "configs": [str(path) for path in executed]}
    done = subprocess.run(_LOOK, input=json.dumps(asked) + "\n", stdout=subprocess.PIPE, text=True)
    lines = done.stdout.splitlines()
    last = lines[-1] if lines else ""  # JSON, or the error in words
    if done.returncode != 0:
        raise ResourceError(f"model.base_dtype: not found by what fits here; set it ({last})")
    found = json.loads(last)
    remat = settings.model.remat
    if remat is None:
        remat = found["remat"]
    model = settings.model.model_copy(update={"base_dtype": found["base_dtype"], "remat": remat})
    return settings.model_copy(update={"model": model})
