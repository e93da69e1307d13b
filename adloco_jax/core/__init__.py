"""The algorithm of the paper, AdLoCo, as pure functions: no model, config, clock or file."""
