"""Lines on the terminal."""

from tqdm import tqdm


def say(line: str) -> None:
    """Print a line at once, above a progress bar if one is shown."""
    with tqdm.external_write_mode():
        print(line, flush=True)
