"""The shipped configs. Your own config can use `from adloco_jax.configs import quickstart`."""
