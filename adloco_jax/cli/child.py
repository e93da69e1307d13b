"""The process of a learner that a driver starts on its own computer (`elastic.child`)."""

import json
import math
import os
import sys
import threading

from adloco_jax import errors
from adloco_jax.cli.names import add_entries
from adloco_jax.elastic.child import end_with_parent
from adloco_jax.engine.spec import TAKEN
from adloco_jax.errors import UserError
from adloco_jax.run.join import join


def main() -> int:
    """Join the run that the driver names on the standard input; return the exit code.

    The input is a line of JSON: the `address` to join at, the run's `secret` if it has one, the
    `key` by which the driver knows this learner, and the config files that the driver executed. The
    exit code is 0, or that of the UserError that ended the learner, whose text is printed.
    """
    # An error on another thread must end the process, because nobody waits for the thread.
    threading.excepthook = lambda failed: errors.end_process(failed.exc_value)
    # The share of a GPU's memory that JAX takes; its default, 0.75, would leave a quarter unused.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(TAKEN))
    start = json.loads(sys.stdin.buffer.readline())
    end_with_parent()  # from here on: when the standard input ends, since the driver has then ended
    if start["secret"]:  # of a bucket, whose objects `join` signs with it
        os.environ["ADLOCO_KEY"] = start["secret"]
    try:
        # Config files may add entries to tables, such as an optimizer, which the run names.
        for config in start["configs"]:
            add_entries(config)
        join(
            start["address"],
            # The driver, on this computer, reads the same data and has the same files. So no
            # setting that names files has a value of its own here.
            own={},
            accepts_data=True,
            patience_s=math.inf,  # `end_with_parent` ends this process if the driver is gone
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
