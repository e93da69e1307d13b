"""The training loop of AdLoCo, and the decisions that the host makes in it.

No module in this package reads a file or a clock.
"""
