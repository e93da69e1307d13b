"""The process of a learner that a driver starts on its own computer (`elastic.child`)."""

import json
import math
import os
import sys
import threading

from adloco_jax import errors
from adloco_jax.cli.names import add_entries
from adloco_jax.elastic.child import end_with_parent
from adloco_jax.errors import UserError
from adloco_jax.run.join import join


def main() -> int:
    """Join the run that the driver names on the standard input; return the exit code.

    The input is a line of JSON: the `address` to join at, the run's `secret` if it has one, the
    `key` by which the driver knows this learner, and the config files that the driver executed.
    """
    # An error on another thread must end the process, because nobody waits for the thread.
    threading.excepthook = lambda failed: errors.end_process(failed.exc_value)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")  # of a GPU's memory, for JAX
    start = json.loads(sys.stdin.buffer.readline())
    end_with_parent()
    if start["secret"]:
        os.environ["ADLOCO_KEY"] = start["secret"]
    try:
        for config in start["configs"]:
            add_entries(config)
        join(
            start["address"],
            own={},
            # The driver, on this computer, reads the same data and has the same files.
            accepts_data=True,
            patience_s=math.inf,
            key=bytes.fromhex(start["key"]),
            has_files=True,
        )
    except UserError as error:
        print(error, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a library may have left a thread that never ends
