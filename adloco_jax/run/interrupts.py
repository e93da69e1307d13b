"""SIGTERM and SIGINT as a request to save and stop; a second one stops at once."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """Yields an event that the first SIGTERM or SIGINT sets; the second ends the process at once.

    Python runs signal handlers between two bytecodes of the main thread, which may be compiling for
    minutes. The interpreter also writes the number of each signal to a pipe at once, and a thread
    reads that pipe.

    If the caller is not on the main thread, no handler can be set, and signals keep their effect.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch():
        while data := os.read(reader, 1):
            if data[0] not in _SIGNALS:
                if fd_before >= 0:  # set by an event loop, as in a notebook
                    os.write(fd_before, data)
                continue
            if stop.is_set():
                os._exit(128 + data[0])
            stop.set()
            name = signal.Signals(data[0]).name
            print(
                f"{name}: finishing and saving the round under way; send it again to stop at once",
                file=sys.stderr,
                flush=True,
            )

    watcher = threading.Thread(target=watch, name="signals", daemon=True)
    before = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
    fd_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    watcher.start()
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(fd_before)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        os.close(writer)  # ends the thread
        watcher.join()
        os.close(reader)
