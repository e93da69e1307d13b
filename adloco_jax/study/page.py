"""A self-contained web page: figures and styles are embedded, and nothing is fetched or run.

Texts may come from a ledger or a path: every function escapes what it is given, except where an
argument is called `html`.
"""

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import NamedTuple, TypeVar

Cell = str | tuple[str, str]
"""Text of a table's cell; the second of two is smaller and below, such as a range."""

_LONGEST_COMMAND = 300  # characters that a caption repeats; a longer one is on the page once
_TEMPLATE = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))

T = TypeVar("T")


class Section(NamedTuple):
    """A part of the page: its anchor, its heading, and its body."""

    anchor: str
    heading: str
    html: str


def page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The whole page, with a table of contents."""
    contents, bodies = [], []
    for anchor, name, html in sections:
        anchor, name = escape(anchor), escape(name)
        contents.append(f'<li><a href="#{anchor}">{name}</a></li>')
        bodies.append(f'<section id="{anchor}">\n<h2>{name}</h2>\n{html}\n</section>')
    return _TEMPLATE.substitute(
        title=escape(title),
        lead=paragraph(lead),
        contents="\n".join(contents),
        sections="\n".join(bodies),
    )


def paragraph(text: str) -> str:
    """A paragraph of plain text."""
    return f"<p>{escape(text)}</p>"


def heading(text: str) -> str:
    """A heading within a section."""
    return f"<h3>{escape(text)}</h3>"


def bullets(items: Iterable[str]) -> str:
    """A list of plain sentences."""
    return "<ul>\n" + "\n".join(f"<li>{escape(item)}</li>" for item in items) + "\n</ul>"


def verbatim(text: str) -> str:
    """Text that keeps its line breaks and columns, such as a command."""
    return f"<pre>{escape(text)}</pre>"


def folded(summary: str, html: str) -> str:
    """A part that opens on a click, and is open on paper."""
    return f"<details>\n<summary>{escape(summary)}</summary>\n{html}\n</details>"


def figure(title: str, caption: str, png: bytes, *, file_name: str, command: str) -> str:
    """A figure with its caption: what it shows, the command that made it, and its own file."""
    made = f"<code>{escape(command)}</code>"
    if len(command) > _LONGEST_COMMAND:
        made = 'the command at the top of <a href="#runs">Runs</a>'
    return (
        f'<figure>\n<div class="wide"><img alt="{escape(title)}"'
        f' src="data:image/png;base64,{base64.b64encode(png).decode()}"></div>\n'
        f"<figcaption><strong>{escape(title)}.</strong> {escape(caption)}"
        f'<span class="made">File <code>{escape(file_name)}</code>, made by {made}</span>'
        f"</figcaption>\n</figure>"
    )


def table(
    caption: str, columns: Mapping[str, Callable[[T], Cell]], items: Iterable[T], *, texts: int = 1
) -> str:
    """A table with a row per item, whose first columns hold text, and the others numbers.

    Args:
      caption: What it shows, in words.
      columns: By heading, with its unit: the cell of an item. The first is the row's own heading.
      items: What has a row.
      texts: Columns of text, from the left.
    """
    classes = [' class="text"' if i < texts else "" for i in range(len(columns))]
    head = [
        f'<th{kind} scope="col">{escape(name)}</th>'
        for kind, name in zip(classes, columns, strict=True)
    ]
    rows = []
    for item in items:
        first, *rest = map(_cell, (cell(item) for cell in columns.values()))
        cells = [f"<td{kind}>{html}</td>" for kind, html in zip(classes[1:], rest, strict=True)]
        rows.append(f'<tr><th{classes[0]} scope="row">{first}</th>{"".join(cells)}</tr>')
    # A caption within the table would be as wide, and scroll away with it.
    return (
        f'<p class="caption">{escape(caption)}</p>\n<div class="wide"><table>\n'
        f"<thead><tr>{''.join(head)}</tr></thead>\n<tbody>\n" + "\n".join(rows) + "\n</tbody>\n"
        "</table></div>"
    )


def _cell(content: Cell) -> str:
    if isinstance(content, str):
        return escape(content)
    return f"{escape(content[0])}<small>{escape(content[1])}</small>"
