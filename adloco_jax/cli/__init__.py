"""The commands after `adloco`.

Each command except `train` and `plan` is a function `command(options, line)`. It takes the parsed
options and the command line as text, and returns the exit code; None means 0.
"""
