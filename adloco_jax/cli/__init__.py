"""The commands after `adloco`: functions `command(options, line) -> exit code or None`."""
