"""Networks as plain parameter trees; arrays in, arrays out."""

from adloco_jax.models.llama import Llama, next_token_loss, num_params, sequence_losses

__all__ = ["Llama", "next_token_loss", "num_params", "sequence_losses"]
