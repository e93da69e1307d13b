"""Train an adapter for a checkpoint on your chats or text, with all workers from the start.

Command:   adloco train finetune --config.model.init_from=Qwen/Qwen3-0.6B
           --config.data.path=chats.jsonl
Model:     matrices of rank 16 (LoRA) beside the frozen weights of a Llama, or of another family of
           docs/guides/huggingface.md; sizes and tokenizer are the checkpoint's. All weights are
           trained with --config.adapter.rank=0 --config.inner.learning_rate=2e-5, as AdLoCo
           continues them
Hardware:  `adloco plan finetune --device h100x1` with the same options says whether it fits
Expected:  not run at the size of Qwen3-0.6B
"""

from ml_collections import ConfigDict

from adloco_jax.config import default_config


def get_config() -> ConfigDict:
    """Return a config with one trainer of four workers.

    The command line must set `model.init_from` and `data.path`.
    """
    config = default_config()
    config.num_epochs = 1.0  # passes over the rows, as many rounds as they take

    config.model.dtype = "bfloat16"
    config.model.loss_chunk = 1  # the logits of 512 tokens of Qwen3 take 311 MB
    config.adapter.rank = 16
    config.adapter.alpha = 32.0  # twice the rank, as usual
    config.data.sequence_length = 512  # tokens

    config.ensemble.num_trainers = 1
    # All at once: a trained checkpoint is past the phase in which a single worker suffices.
    config.ensemble.num_workers = 4

    config.inner.steps_per_round = 50
    config.inner.learning_rate = 2e-4  # ten times that of all weights, as usual for adapters
    config.inner.clip_norm = 1.0
    config.outer.tx = "nesterov"  # with DiLoCo's learning rate of 0.7 and momentum of 0.9

    config.batching.test = "constant"
    config.batching.initial_batch_size = 8  # sequences per worker; this number stays constant
    config.eval.sample_tokens = 48  # of the answer to a held-out question that each round shows
    config.merge.policy = "none"  # there is only one trainer
    return config
