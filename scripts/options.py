"""Write docs/options.md, the table of every key of a config, from the settings.

python scripts/options.py
"""

from itertools import groupby
from pathlib import Path

from adloco_jax.cli.keys import allowed
from adloco_jax.settings import OPTIONS, meaning

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
HEAD = """# Every key of a config

`--config.GROUP.KEY=VALUE` overrides a key on the command line, `--config.GROUP.KEY=none` unsets an
optional one. `adloco train --help` prints the same list, and `adloco configs --schema` a JSON
schema of it. (`python scripts/options.py` writes this page.)
"""


def page() -> str:
    """The page: a table for each group of keys."""
    lines = [HEAD]
    for group, keys in groupby(OPTIONS, key=lambda key: key.rpartition(".")[0]):
        lines += [f"## {group or 'The run'}\n", "| key | meaning | values |", "|---|---|---|"]
        for key in keys:
            cells = f"`{key}`", meaning(key), allowed(key)
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
