"""The commands after `adloco` except `train` and `plan`, which are in `adloco_jax.main`.

Each command is a function `command(options, line)`. It takes the parsed options and the command
line as text, and returns the exit code; None means 0.
"""
