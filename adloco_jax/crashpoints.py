"""Named points in the code at which a test can kill the process, or make a write fail.

Two environment variables select a point. With `ADLOCO_CRASH_AT=name:n` the process kills itself by
SIGKILL when it reaches the point `name` for the n-th time, so nothing is flushed or cleaned up.
With `ADLOCO_FAIL_AT=name:n:ENOSPC` the point `name` raises an OSError with the error number ENOSPC
when it is reached for the n-th time, and at no other time. Other error numbers may be named.
"""

import collections
import errno
import os
import signal
import threading

_arrivals: collections.Counter[str] = collections.Counter()
_lock = threading.Lock()  # checkpoints are written on another thread


def crash_point(name: str) -> None:
    """Kill the process, or raise an OSError, if an environment variable names this point now.

    Without the variables `ADLOCO_CRASH_AT` and `ADLOCO_FAIL_AT`, nothing happens.
    """
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
