"""The recommended settings on the quickstart's model and text: workers join with gradient noise.

Command:   python -m adloco_jax.main --config configs/recommended_quick.py
Hardware:  two CPU cores; no download, no accelerator
Model:     a Llama of 125,000 parameters that reads bytes
Shows:     one worker at the start; three more join as the gradient noise grows, and from then on
           the outer optimizer has momentum
Expected:  about a minute, half of it compilation
See also:  docs/choosing.md, and the study in docs/RESULTS.md
"""

from ml_collections import ConfigDict

from adloco_jax.configs import quickstart


def get_config() -> ConfigDict:
    """The quickstart's model and text with one trainer whose pool grows."""
    config = quickstart.get_config()
    config.num_rounds = 1_000_000  # tokens end the run
    config.num_tokens = 1_000_000

    config.ensemble.num_trainers = 1
    config.ensemble.num_workers = 4
    config.ensemble.initial_workers = 1

    config.inner.steps_per_round = 60
    config.outer.tx = "nesterov"  # at 0.7 with momentum 0.9, DiLoCo's
    config.outer.learning_rate = 0.7
    config.outer.skip_single = True  # Nesterov begins with the second worker

    config.batching.eta = 1.6  # a worker joins when the noise requires more sequences
    config.batching.smoothing = 0.5  # a short run has few tests to average
    config.batching.max_blind_growth = 4  # times the last total batch with a measured signal
    config.batching.max_batch_size = 4  # the pool grows, not the batch
    config.batching.buckets = (4,)
    config.batching.batch_cap = 4
    config.merge.policy = "none"  # there is one trainer
    return config
