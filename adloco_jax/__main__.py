"""`python -m adloco_jax` is the command `adloco`."""

from adloco_jax.main import command

if __name__ == "__main__":
    command()
