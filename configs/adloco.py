"""AdLoCo as in its paper, with a model and a text of laptop size.

Command:   adloco train adloco --config.data.path=my.txt
           Without a path the text is Python's standard library, as in the quickstart
Hardware:  two CPU cores
Model:     the quickstart's, a Llama of 125,000 parameters that reads bytes, from random weights
Source:    configs/microllama.py has the paper's values, and where it departs from them. In
           addition, DEPARTURE marks here what a small model that starts from scratch needs
Expected:  a held-out loss of 1.81 nats per byte on Tiny Shakespeare, after 14 minutes beside other
           work. Trainers merge until one is left, and its batch grows to 12 sequences
"""

from ml_collections import ConfigDict

from adloco_jax.configs import microllama, quickstart


def get_config() -> ConfigDict:
    """Return the config of the paper's experiment, with the quickstart's model and text."""
    config = microllama.get_config()
    small = quickstart.get_config()
    config.model = small.model  # in float32
    config.data = small.data
    config.data.num_sequences = None  # all of the text
    config.inner.learning_rate = 1e-3  # DEPARTURE: 2e-5 is for trained weights
    config.batching.max_batch_size = 8  # sequences; a size that a CPU computes well
    config.batching.buckets = (1, 4, 8)  # programs are compiled for these sizes only
    config.batching.batch_cap = 32  # DEPARTURE: the paper has no cap
    return config
