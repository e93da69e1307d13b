"""A pool of workers that grows: DiLoCo that begins with one worker; more join as noise grows.

Command:   adloco train growing_pool --config.data.path=my.txt
           adloco train growing_pool --size 35M --config.data.path='texts/*.jsonl.gz'
           --config.data.tokenizer=TOKENIZER
Hardware:  two CPU cores; with --size one GPU or more (`adloco plan` says what fits)
Model:     the quickstart's, with its text; with --size those of configs/diloco.py
Shows:     one worker at the start; others join when the norm test requests more sequences for an
           update than the workers provide. The outer optimizer begins with the second worker
Expected:  about a minute, half of it compilation
Measured:  at 0.08 and 0.61 M parameters (docs/RESULTS.md). With --size these settings were not run;
           a run of 35.2 M parameters on a GPU had AdamW
See also:  docs/choosing.md says over which links it ends first
"""

from ml_collections import ConfigDict

from adloco_jax.configs import diloco


def get_config(size: str | None = None) -> ConfigDict:
    """Return DiLoCo's config, changed to a pool that begins with one worker.

    Args:
      size: "10M", "35M" or "100M" parameters, for a text and a tokenizer of your own; None: the
        quickstart's model and text.
    """
    config = diloco.get_config(size)
    if size is None:
        config.num_rounds = None  # tokens end the run
        config.num_tokens = 1_000_000
        config.ensemble.num_workers = 4
        config.inner.steps_per_round = 60
    else:
        config.inner.max_steps_per_round = 220  # when all workers have joined
    config.ensemble.initial_workers = 1  # gradient noise decides when the others join
    config.outer.learning_rate = 0.7
    config.outer.momentum = 0.9
    config.outer.skip_single = True  # no outer optimizer before the second worker has joined

    config.batching.test = "norm"
    config.batching.growth = ("workers", "rounds")  # the batch of a worker does not grow
    # With a larger eta, workers join later. To reach a loss, the run then needs fewer tokens, but
    # more updates one after another.
    config.batching.eta = 1.6
    # Less than 0.9, because a run of a few dozen rounds has few tests to average.
    config.batching.smoothing = 0.5
    # While no signal is measured, the total batch grows to at most 4 times the last one with a
    # measured signal.
    config.batching.max_blind_growth = 4
    return config
