"""The process in which a driver looks at its accelerator, before a learner here takes it.

It reads settings from the standard input, and prints what fits in a line of JSON.
"""

import json
import os
import sys

from adloco_jax.cli.names import add_entries
from adloco_jax.config import completed, validate
from adloco_jax.data.formats import with_tuples
from adloco_jax.engine.fitting import fitting_choice
from adloco_jax.engine.programs import use_compilation_cache
from adloco_jax.engine.spec import here
from adloco_jax.errors import UserError


def main() -> int:
    """Choose `model.base_dtype` and `model.remat` as one worker on these devices needs them."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    asked = json.loads(sys.stdin.buffer.readline())
    try:
        for config in asked["configs"]:
            add_entries(config)
        settings = completed(validate(with_tuples(asked["settings"])), reads=False)
        alone = {"num_trainers": 1, "num_workers": 1}
        ensemble = settings.ensemble.model_copy(update=alone)
        use_compilation_cache()
        settings = settings.model_copy(update={"ensemble": ensemble})
        settings, choice = fitting_choice(settings, here())
        choice.programs.close()
    except UserError as error:
        print(error, flush=True)
        return error.exit_code
    found = {"base_dtype": settings.model.base_dtype, "remat": choice.programs.spec.remat}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
