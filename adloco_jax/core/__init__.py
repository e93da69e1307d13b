"""The algorithm of the paper, AdLoCo, as pure functions on arrays.

Nothing here uses a model, a config, a clock or a file.
"""
