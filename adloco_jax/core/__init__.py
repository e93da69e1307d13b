"""The algorithm of the paper, AdLoCo, as pure functions: no model, config, clock or file.

Wrong arguments raise ValueError, while tracing if arrays are traced.
"""
