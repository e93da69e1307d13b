"""The configs that ship; an own one imports them as `from adloco_jax.configs import quickstart`."""
