"""The paper: AdLoCo as pure functions on arrays. Knows no model, config, clock or file."""
