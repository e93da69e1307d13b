"""A BERT that classifies movie reviews: the second experiment in the code of the AdLoCo paper.

Command:   python -m adloco_jax.main --config configs/bert_imdb.py
           The model and the reviews come from the Hugging Face hub. For your own files add
           --config.data.path=train.jsonl --config.data.heldout_path=test.jsonl
           --config.data.heldout_split=
Data:      the IMDB reviews (Maas et al. 2011) with labels (0 negative, 1 positive): 25,000 for
           training and 25,000 for evaluation
Hardware:  one GPU of 24 GB
Model:     109.5 M parameters, from google-bert/bert-base-uncased with a random classifier. To train
           from random parameters, add --config.model.init_from=''
Source:    AdLoCo (arXiv 2508.18182) describes only experiments with language models. The settings
           of the method are those of its table A.2, unless a comment says otherwise.
"""

from ml_collections import ConfigDict

from adloco_jax.config import default_config


def get_config() -> ConfigDict:
    """Return the config of a BERT that classifies the sentiment of movie reviews from IMDB."""
    config = default_config()
    config.num_rounds = 10  # our choice: about three epochs

    config.model.arch = "bert"  # with the sizes of BERT base (Devlin et al. 2019)
    config.model.vocab_size = 30_522
    config.model.width = 768
    config.model.num_layers = 12
    config.model.num_heads = 12
    config.model.mlp_width = 3072
    config.model.max_length = 512  # tokens
    config.model.norm_eps = 1e-12
    config.model.num_classes = 2
    config.model.dtype = "bfloat16"
    config.model.init_from = "google-bert/bert-base-uncased"

    config.data.source = "hf"
    config.data.path = "stanfordnlp/imdb"
    config.data.text_column = "text"
    config.data.heldout_split = "test"
    config.data.tokenizer = "google-bert/bert-base-uncased"
    config.data.sequence_length = 256  # our choice: half of the reviews are not longer
    config.data.heldout_frac = 0.1  # used only if your own files have no data.heldout_path

    config.ensemble.num_trainers = 4
    config.ensemble.num_workers = 4

    # DEPARTURE: table A.2 has 200 steps. With these, a round whose batches have grown would read
    # the 25,000 texts several times.
    config.inner.steps_per_round = 50
    config.inner.learning_rate = 2e-5
    config.inner.warmup_updates = 50  # our choice, after Devlin et al. 2019
    config.inner.weight_decay = 0.1  # section 6.1

    config.outer.tx = "sgd"
    config.outer.learning_rate = 0.5

    config.batching.eta = 0.8
    # Our choice, because the gradient of a single text says little about two classes.
    config.batching.initial_batch_size = 8
    config.batching.batch_cap = 256  # DEPARTURE: the paper has no cap

    config.merge.every_rounds = 3
    config.eval.num_sequences = 1000  # texts
    return config
