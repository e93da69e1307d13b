"""Named points of a run at which a test kills the process or makes a write fail.

With `ADLOCO_CRASH_AT=name:n` the process kills itself by SIGKILL when it reaches a point for the
n-th time, so nothing is flushed or cleaned up. With `ADLOCO_FAIL_AT=name:n:ENOSPC` the point raises
an OSError with the error number ENOSPC at the n-th time, and only then.
"""

import collections
import errno
import os
import signal
import threading

_arrivals: collections.Counter[str] = collections.Counter()
_lock = threading.Lock()  # checkpoints are written on another thread


def crash_point(name: str) -> None:
    """Kill the process, or raise an error, if an environment variable names this point."""
    crash, fail = os.environ.get("ADLOCO_CRASH_AT"), os.environ.get("ADLOCO_FAIL_AT")
    if crash is None and fail is None:
        return
    with _lock:
        _arrivals[name] += 1
        arrival = f"{name}:{_arrivals[name]}"
    if crash == arrival:
        os.kill(os.getpid(), signal.SIGKILL)
    if fail is not None and fail.rpartition(":")[0] == arrival:
        number = getattr(errno, fail.rpartition(":")[2])
        raise OSError(number, os.strerror(number), name)
