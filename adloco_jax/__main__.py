"""The command `adloco` as `python -m adloco_jax`."""

from adloco_jax.main import command

if __name__ == "__main__":
    command()
