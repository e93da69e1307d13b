"""Named points in the code at which a test can kill the process, or make a write fail.

`ADLOCO_CRASH_AT=name:n` kills it by SIGKILL, with nothing flushed, at the n-th arrival at `name`;
`ADLOCO_FAIL_AT=name:n:ENOSPC` raises an OSError of that number there once.
"""

import collections
import errno
import os
import signal
import threading

_arrivals: collections.Counter[str] = collections.Counter()
_lock = threading.Lock()  # checkpoints are written on another thread


def crash_point(name: str) -> None:
    """Kill the process, or raise an OSError, if an environment variable names this point now."""
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
