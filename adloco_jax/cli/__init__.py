"""The commands after `adloco`.

Each command is a function `command(options, line)` of the parsed options and the command line as
text; it returns the exit code, or None for 0.
"""
