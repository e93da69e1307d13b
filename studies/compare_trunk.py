"""Does it pay if one worker begins, and four workers then continue from its parameters?

The first part, with one worker, is called the *trunk*. The variants named "scratch" have no trunk:
their four workers begin from random weights.

Command:   python -m adloco_jax.main --config studies/compare_trunk.py --workdir runs/trunk
           adloco export runs/trunk --out runs/trunk/model
           (repeat both commands for runs/short-trunk, with --config.num_rounds=4)
           adloco compare studies/compare_trunk.py
Hardware:  two CPU cores, under 90 minutes
Model:     a Llama of 75,600 parameters that reads bytes, as in configs/compare_quick.py
Text:      this Python's own standard library
Results:   docs/RESULTS.md
"""

from ml_collections import ConfigDict

from adloco_jax.configs import compare_quick
from adloco_jax.configs.compare_quick import AVERAGE
from adloco_jax.study.compare import Comparison

TRUNK = {**AVERAGE, "model.init_from": "runs/trunk/model"}  # 8 rounds of one worker
SHORT_TRUNK = {**AVERAGE, "model.init_from": "runs/short-trunk/model"}  # 4 rounds of one worker
LINEAR = {"inner.schedule": "linear"}
NESTEROV = {"outer.tx": "nesterov", "outer.learning_rate": 0.7}


def _rounds(count: int, steps: int) -> dict[str, object]:
    return {"num_rounds": count, "inner.steps_per_round": steps}


def get_base() -> ConfigDict:
    """Return a config of four workers that begin from random weights.

    A run ends after a number of rounds, not after a number of tokens.
    """
    config = compare_quick.get_base()
    config.num_tokens = None
    # The sizes of the trunk's model are set here, because its checkpoint may not exist yet.
    config.model.vocab_size, config.model.norm_eps, config.model.rope_theta = 257, 1e-5, 1e4
    return config


def get_config() -> ConfigDict:
    """Return the config of the trunk: eight rounds of one worker."""
    config = get_base()
    config.update_from_flattened_dict({**AVERAGE, **_rounds(8, 440)})
    config.ensemble.num_workers = 1
    config.seed = 7
    return config


def get_comparison() -> Comparison:
    """Return the comparison: variants, seeds, and the losses for which costs are compared."""
    return Comparison(
        base=get_base(),
        variants={
            "scratch, rounds of 1200": AVERAGE | _rounds(5, 1200),
            "trunk, 2 rounds of 1200": TRUNK | _rounds(2, 1200),
            "trunk, 1 round of 2340": TRUNK | _rounds(1, 2340),
            "trunk, 1 round of 4680": TRUNK | _rounds(1, 4680),
            "trunk, 11 rounds of 440": TRUNK | _rounds(11, 440),
            "trunk, 11 rounds of 440, Nesterov": TRUNK | NESTEROV | _rounds(11, 440),
            "trunk, 2 rounds of 1200, linear": TRUNK | LINEAR | _rounds(2, 1200),
            "short trunk, 4 rounds of 1200": SHORT_TRUNK | _rounds(4, 1200),
            "one worker, linear": AVERAGE | LINEAR | {"ensemble.num_workers": 1} | _rounds(31, 440),
            "scratch, rounds of 1200, linear": AVERAGE | LINEAR | _rounds(5, 1200),
            "scratch, rounds of 440, Nesterov, linear": NESTEROV | LINEAR | _rounds(14, 440),
        },
        baseline="scratch, rounds of 1200",
        target_losses=(1.64, 1.6, 1.56),  # nats per byte
        seeds=(1, 2, 3),
    )
