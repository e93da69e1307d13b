"""Models, their losses and their layers, as functions of parameter trees and arrays."""

from adloco_jax.models.bert import Bert, class_logits, classification_loss, classification_losses
from adloco_jax.models.llama import Llama, next_token_loss, sequence_losses

__all__ = [
    "Bert",
    "Llama",
    "class_logits",
    "classification_loss",
    "classification_losses",
    "next_token_loss",
    "sequence_losses",
]
