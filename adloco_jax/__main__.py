"""Make `python -m adloco_jax` the same as the command `adloco`."""

from adloco_jax.main import command

if __name__ == "__main__":
    command()
