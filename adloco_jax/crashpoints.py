"""Named points of a run at which a test kills the process or makes a write fail.

`ADLOCO_CRASH_AT=name:n` kills the process at the n-th arrival at a point, as SIGKILL does: nothing
is flushed or cleaned up. `ADLOCO_FAIL_AT=name:n:ENOSPC` raises that error there, once.
"""

import collections
import errno
import os
import signal
import threading

_arrivals: collections.Counter[str] = collections.Counter()
_lock = threading.Lock()  # checkpoints are written on a thread of their own


def crash_point(name: str) -> None:
    """Kills the process, or raises, if the environment names this point."""
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
