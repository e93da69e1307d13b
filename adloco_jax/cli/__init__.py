"""What the words after `adloco` do: a module each, with `run(words) -> exit code`."""
