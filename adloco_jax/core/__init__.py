"""The algorithm of the paper, AdLoCo, as pure functions on arrays.

No module in this package imports a model or a config, or reads a clock or a file.
"""
