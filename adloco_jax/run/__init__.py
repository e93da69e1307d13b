"""A run around its rounds: `before` the first one, what is `kept`, what is `watching`.

Here itself are the attempts to finish a run, and joining one as a learner.
"""
