"""HTML5 for a report: one file without scripts or references, for screen, phone and paper.

Whatever comes from a ledger or a path is text here: every function escapes what it is given, except
where an argument is called `html`.
"""

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from string import Template

from adloco_jax.study.figures import Drawing

_LONGEST_COMMAND = 300  # characters that a caption repeats; a longer one stands on the page once

_TEXT = ' class="text"'

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light; }
body { margin: 0 auto; padding: 1rem; max-width: 50rem; color: #111; background: #fff;
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1, h2, h3 { line-height: 1.25; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #bbb; }
a { color: #004a80; }
code, pre { font: 0.85em/1.45 ui-monospace, monospace; }
pre { white-space: pre-wrap; overflow-wrap: normal; }
figure { margin: 1.5rem 0; }
figcaption, .caption { font-size: 0.9rem; }
.caption { margin: 1.5rem 0 0.4rem; }
.made { display: block; margin-top: 0.3rem; color: #444; font-size: 0.85rem; }
.wide { overflow-x: auto; }
img { display: block; width: 100%; min-width: 34rem; height: auto; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums;
  overflow-wrap: normal; }
th, td { padding: 0.25rem 0.5rem; border-bottom: 1px solid #ddd; text-align: right;
  vertical-align: top; }
td { white-space: nowrap; }
thead th { border-bottom: 2px solid #888; vertical-align: bottom; }
.text, tbody th { text-align: left; }
td.text { overflow-wrap: anywhere; white-space: normal; min-width: 7rem; }
small { display: block; color: #444; }
summary { cursor: pointer; font-size: 1.1rem; font-weight: 600; margin: 1rem 0; }
@page { size: A4; margin: 14mm; }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  figure, tr, pre, .caption { break-inside: avoid; }
  h1, h2, h3, summary, .caption { break-after: avoid; }
  img { min-width: 0; width: 180mm; max-width: 100%; }
  .wide { overflow: visible; }
  table { font-size: 8.5pt; }
  small { font-size: 8pt; }
  th, td { padding: 0.15rem 0.35rem; }
  details::details-content { display: block; content-visibility: visible; height: auto; }
}
</style>
</head>
<body>
<h1>$title</h1>
$lead
<nav aria-label="Contents">
<h2>Contents</h2>
<ol>
$contents
</ol>
</nav>
<main>
$sections
</main>
</body>
</html>
""")


@dataclass(frozen=True)
class Section:
    """A part of the page: its anchor, its heading, and its body."""

    anchor: str
    heading: str
    html: str


@dataclass(frozen=True)
class Cell:
    """A table's number, with a smaller line below it, such as its spread."""

    value: str
    spread: str


def page(title: str, lead_html: str, sections: Sequence[Section]) -> str:
    """The whole page, with a table of contents."""
    contents = "\n".join(
        f'<li><a href="#{escape(s.anchor)}">{escape(s.heading)}</a></li>' for s in sections
    )
    bodies = "\n".join(
        f'<section id="{escape(s.anchor)}">\n<h2>{escape(s.heading)}</h2>\n{s.html}\n</section>'
        for s in sections
    )
    return _PAGE.substitute(title=escape(title), lead=lead_html, contents=contents, sections=bodies)


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
    """Text whose line breaks and columns stay, such as a command."""
    return f"<pre>{escape(text)}</pre>"


def folded(summary: str, html: str) -> str:
    """A part that opens on a click, and is open on paper."""
    return f"<details>\n<summary>{escape(summary)}</summary>\n{html}\n</details>"


def figure(drawing: Drawing, png: bytes, *, file_name: str, command: str) -> str:
    """A figure with its caption: what it shows, the command that made it, and its own file."""
    data = base64.b64encode(png).decode()
    made = f"<code>{escape(command)}</code>"
    if len(command) > _LONGEST_COMMAND:
        made = 'the command at the top of <a href="#runs">Runs</a>'
    return (
        f'<figure>\n<div class="wide"><img alt="{escape(drawing.title)}"'
        f' src="data:image/png;base64,{data}"></div>\n'
        f"<figcaption><strong>{escape(drawing.title)}.</strong> {escape(drawing.caption)}"
        f'<span class="made">File <code>{escape(file_name)}</code>, made by {made}</span>'
        f"</figcaption>\n</figure>"
    )


def table(
    caption: str, header: Sequence[str], rows: Iterable[Sequence[str | Cell]], *, texts: int = 1
) -> str:
    """A table whose first columns hold text, and the others numbers.

    Args:
      caption: What it shows, in words.
      header: A heading per column, with its unit.
      rows: The cells of each row; the first is the row's heading.
      texts: Columns of text, from the left.
    """
    names = [_cell("th", name, i < texts, ' scope="col"') for i, name in enumerate(header)]
    body = []
    for first, *rest in rows:
        cells = [_cell("th", first, True, ' scope="row"')]
        cells += [_cell("td", cell, i < texts, "") for i, cell in enumerate(rest, start=1)]
        body.append(f"<tr>{''.join(cells)}</tr>")
    # A caption within the table would be as wide, and scroll away with it.
    return (
        f'<p class="caption">{escape(caption)}</p>\n<div class="wide"><table>\n'
        f"<thead><tr>{''.join(names)}</tr></thead>\n<tbody>\n" + "\n".join(body) + "\n</tbody>\n"
        "</table></div>"
    )


def _cell(tag: str, content: str | Cell, is_text: bool, more: str) -> str:
    if isinstance(content, Cell):
        inner = f"{escape(content.value)}<small>{escape(content.spread)}</small>"
    else:
        inner = escape(content)
    return f"<{tag}{_TEXT if is_text else ''}{more}>{inner}</{tag}>"
