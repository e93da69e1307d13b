"""The process in which a driver looks at its accelerator, before a learner here takes it.

Its input is a line of JSON: the run's `settings`, and the config files that the driver executed.
Its output is a line of JSON: the values of `model.base_dtype` and `model.remat` with which a worker
fits. *Remat* stands for rematerialised: the backward pass computes activations of layers again.
"""

import json
import os
import sys

from adloco_jax.cli.names import add_entries
from adloco_jax.config import completed, validate
from adloco_jax.data.formats import with_tuples
from adloco_jax.engine.fitting import fitting_choice
from adloco_jax.engine.programs import use_compilation_cache
from adloco_jax.engine.spec import TAKEN, this_machine
from adloco_jax.errors import UserError


def main() -> int:
    """Print the values with which one worker fits on these devices; return the exit code.

    If none fit, or a config file is faulty, the line is the error in words.
    """
    # The share of a GPU's memory that JAX takes; its default, 0.75, would leave a quarter unused.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(TAKEN))
    asked = json.loads(sys.stdin.buffer.readline())
    try:
        for config in asked["configs"]:
            add_entries(config)
        # The driver has already found what stands in files, so that none is read here.
        settings = completed(validate(with_tuples(asked["settings"])), reads=False)
        # A learner has one worker at a time.
        ensemble = settings.ensemble.model_copy(update={"num_trainers": 1, "num_workers": 1})
        settings = settings.model_copy(update={"ensemble": ensemble})
        use_compilation_cache()  # the learner then finds the programs that are compiled here
        # The first values with which a worker's memory suffices; it is an error if none do.
        settings, choice = fitting_choice(settings, this_machine())
        choice.programs.close()  # only the choice is needed
    except UserError as error:
        print(error, flush=True)
        return error.exit_code
    found = {"base_dtype": settings.model.base_dtype, "remat": choice.programs.spec.remat}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
