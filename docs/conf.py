"""Sphinx settings of the documentation; `make docs` builds it."""

import re
import shutil

from docutils import nodes
from latex2mathml.converter import convert

import adloco_jax

project = "adloco_jax"
author = "the authors of adloco_jax"
copyright = f"2026, {author}"
release = adloco_jax.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
extensions += ["sphinx_copybutton"]
exclude_patterns = ["_build"]
suppress_warnings = ["toc.not_included"]  # the index links to more pages than the sidebar

html_theme = "furo"
html_title = f"adloco_jax {release}"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0072b2", "color-brand-content": "#0072b2"},
    "dark_css_variables": {"color-brand-primary": "#56b4e9", "color-brand-content": "#56b4e9"},
}
html_static_path = ["static"]
html_css_files = ["page.css"]
html_math_renderer = "mathml"  # needs no script and no network

myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "auto"  # the notebooks are stored without outputs, so every build runs them
nb_execution_timeout = 300
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_merge_streams = True

napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 72
default_role = "literal"  # docstrings have code in single backticks


def readable(app, what, name, obj, options, lines):
    """Escapes a docstring's plain text for reStructuredText; indented blocks stay verbatim."""
    verbatim = None  # the indentation of the line that introduces such a block
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if verbatim is not None and (not line or indent > verbatim):
            continue
        verbatim = None
        parts = re.split(r"(`+[^`]*`+)", line)
        parts[::2] = [re.sub(r"[|*]|(?<=\w)_(?!\w)", r"\\\g<0>", part) for part in parts[::2]]
        lines[number] = "".join(parts)
        after = lines[number + 1 : number + 3] if line.endswith(":") else []
        if len(after) == 2 and not after[0] and after[1].startswith(" " * (indent + 1)):
            lines[number] += ":"
            verbatim = indent


def evidence(app, config):
    """Copies the pages of studies/, so that they are in the site."""
    (app.srcdir / "_studies").mkdir(exist_ok=True)
    for page in (app.srcdir.parent / "studies").glob("*.md"):
        shutil.copy(page, app.srcdir / "_studies" / page.name)


def in_the_site(app, name, source):
    """Makes links to studies/ lead to the copies; puts the README on the first page."""
    source[0] = source[0].replace("../docs/", "../").replace("../studies/", "_studies/")
    if name == "index":
        readme = (app.srcdir.parent / "README.md").read_text("utf-8")
        readme = re.sub(r"^\[!\[.*\n", "", readme, flags=re.M)  # badges
        readme = readme.replace("](docs/", "](").replace("](studies/", "](_studies/")
        readme = re.sub(r"\[([\w ]+)\]\([A-Z]+\.md\)", r"\1", readme)  # not in the site
        source[0] = readme + "\n#" + source[0]


def pictures(app, exception):
    """Copies the pictures that a page names in HTML."""
    shutil.copytree(app.srcdir / "images", app.outdir / "images", dirs_exist_ok=True)


def inline_math(translator, node):
    """Writes a formula within a line as MathML."""
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def displayed_math(translator, node):
    """Writes a formula on a line of its own as MathML."""
    translator.body.append(convert(node.astext(), display="block"))
    raise nodes.SkipNode


def setup(app):
    """Registers the functions above."""
    app.add_html_math_renderer("mathml", (inline_math, None), (displayed_math, None))
    app.connect("autodoc-process-docstring", readable, priority=100)  # before napoleon
    app.connect("config-inited", evidence)
    app.connect("source-read", in_the_site)
    app.connect("build-finished", pictures)
