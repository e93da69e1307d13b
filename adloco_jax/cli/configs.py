"""Lists the configs that come with the package, each with the first line of its card."""

import ast
from collections.abc import Sequence

from adloco_jax.cli.parser import Parser
from adloco_jax.config import SHIPPED


def run(words: Sequence[str]) -> int:
    """Prints a line per config, runs first."""
    Parser("configs", __doc__).parse(words)
    cards = {
        path.stem: (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").partition("\n")[0]
        for path in sorted(SHIPPED.glob("[!_]*.py"))
    }
    for command, is_comparison in (("train", False), ("compare", True)):
        print(f"adloco {command} --config NAME")
        for name, card in cards.items():
            if name.startswith("compare_") == is_comparison:
                print(f"  {name:20} {card}")
    print(f"the files: {SHIPPED}")
    return 0
