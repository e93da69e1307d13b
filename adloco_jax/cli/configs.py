"""Lists the configs that come with the package, each with the first line of its card."""

import argparse
import ast

from adloco_jax.config import SHIPPED


def run(options: argparse.Namespace, command: str) -> int:
    """Prints a line per config, runs first."""
    cards = {
        path.stem: (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").partition("\n")[0]
        for path in sorted(SHIPPED.glob("[!_]*.py"))
    }
    for verb, is_comparison in (("train", False), ("compare", True)):
        print(f"adloco {verb} NAME")
        for name, card in cards.items():
            if name.startswith("compare_") == is_comparison:
                print(f"  {name:20} {card}")
    print(f"the files: {SHIPPED}")
    return 0
