"""The recommended method with the quickstart's model and text: more workers join as noise grows.

Command:   python -m adloco_jax.main --config configs/recommended_quick.py
Hardware:  two CPU cores; no download, no accelerator
Model:     a Llama of 125,000 parameters that reads bytes
Shows:     one worker at the start; three more join as the gradient noise grows. When the second
           worker has joined, the outer optimizer, which has momentum, is used.
Expected:  about a minute, half of it compilation
See also:  docs/choosing.md, and the study in docs/RESULTS.md
"""

from ml_collections import ConfigDict

from adloco_jax.configs import quickstart


def get_config() -> ConfigDict:
    """Return the quickstart's config, changed to one trainer whose number of workers grows."""
    config = quickstart.get_config()
    config.num_rounds, config.num_tokens = None, 1_000_000  # tokens end the run

    config.ensemble.num_trainers = 1
    config.ensemble.num_workers = 4
    config.ensemble.initial_workers = 1

    config.inner.tx = "muon"  # 1.5 times AdamW's time for an update at this size, two thirds of its
    config.inner.learning_rate = 0.006  # memory, and a lower loss after as many tokens
    config.inner.steps_per_round = 60
    config.outer.tx = "nesterov"  # with DiLoCo's learning rate of 0.7 and momentum of 0.9
    config.outer.learning_rate = 0.7
    config.outer.skip_single = True  # no outer optimizer before the second worker has joined
    config.outer.average = 0.5  # the reported model is a running average over rounds

    config.batching.eta = 1.6  # workers join when the noise requires more sequences for an update
    config.batching.smoothing = 0.5  # less than 0.9, because a short run has few tests to average
    # While no signal is measured, the total batch grows to at most 4 times the last one with a
    # measured signal.
    config.batching.max_blind_growth = 4
    config.batching.max_batch_size = 4  # the number of workers grows, not the batch of a worker
    config.batching.buckets = (4,)
    config.batching.batch_cap = 4
    config.merge.policy = "none"  # there is only one trainer
    return config
