"""`adloco plan` is `adloco train --plan`."""

from collections.abc import Sequence

from adloco_jax.cli import train


def run(words: Sequence[str]) -> int:
    """Prints the plan of the run that these words describe."""
    return train.run(["--plan", *words])
