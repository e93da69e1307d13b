"""Make a self-contained web page: it holds its charts and styles, and loads and runs nothing.

Every function escapes its arguments, except those whose name ends in `html`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from adloco_jax.data.disk import replaced_file
from adloco_jax.study import chart
from adloco_jax.study.chart import Panel, escaped

_TEMPLATE = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))


def page(
    title: str,
    lead: str,
    *,
    screen_html: str,
    details_html: str,
    num_curves: int,
) -> str:
    """Make the HTML of the whole web page.

    Args:
      title: Heading of the page.
      lead: One sentence with the result.
      screen_html: HTML of what is visible at once.
      details_html: HTML of the parts below, which open on a click.
      num_curves: Number of curves that a pointer on their row in a table highlights.
    """
    # A curve and its row in a table have the same `data-k`, a number from 1. While a pointer is on
    # one of them, all other curves are faint. Both are in `.hero`, what is visible at once.
    rules = []
    for number in range(1, num_curves + 1):
        key = f'[data-k="{number}"]'
        rules.append(f".hero:has({key}:is(:hover, :focus)) .curve:not({key}) {{ opacity: .12; }}")
    highlights = "\n".join(rules)
    return _TEMPLATE.substitute(
        title=escaped(title),
        lead=paragraph(lead),
        style=f"{chart.STYLE}{highlights}",
        kind="many" if num_curves else "single",  # a CSS class: of several runs, or of one
        screen=screen_html,
        details=details_html,
    )


def write_files(folder: Path, texts: Mapping[str, str]) -> None:
    """Write files by name to a folder, created if missing; older ones are replaced atomically.

    Characters that cannot be encoded, for instance in a file name, become question marks. Raises
    OSError if a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        with replaced_file(folder / name) as file:
            file.write(text.encode(errors="replace"))


def paragraph(text: str) -> str:
    """Return the HTML of a paragraph of plain text."""
    return f"<p>{escaped(text)}</p>"


def verbatim(text: str) -> str:
    """Return the HTML of preformatted text, such as a command, with line breaks and columns."""
    return f"<pre>{escaped(text)}</pre>"


def folded(summary: str, html: str) -> str:
    """Return the HTML of a part that a click on `summary` opens; in print it is always open."""
    return f"<details>\n<summary>{escaped(summary)}</summary>\n{html}\n</details>"


def figure(html: str, caption: str) -> str:
    """Return the HTML of charts with a caption below."""
    return f"<figure>\n{html}\n<figcaption>{escaped(caption)}</figcaption>\n</figure>"


def tabs(name: str, panels: Mapping[str, Panel]) -> str:
    """Return the HTML of charts behind tabs, by the text of each tab.

    `name` connects the tabs; it has only letters, and is unique on the page.
    """
    parts = []
    for number, (text, panel) in enumerate(panels.items()):
        key = f"{name}-{number}"
        checked = " checked" if number == 0 else ""  # the first is shown
        parts.append(
            f'<input type="radio" name="{name}" id="{key}"{checked}>'
            f'<label for="{key}">{escaped(text)}</label>\n<div class="tab">{panel.html()}</div>'
        )
    return '<div class="tabs">\n' + "\n".join(parts) + "\n</div>"


def table(
    caption: str, rows: Sequence[Mapping[str, str]], *, texts: int = 1, is_legend: bool = False
) -> str:
    """Return the HTML of a table with a caption.

    `rows` has one row at least: its texts by the names of the columns, which are the same in all
    rows. The first `texts` columns are text, the others numbers. The first cell is the row's
    heading; in a legend it also shows the number and the line style of the row's curve.
    """
    # The HTML attribute of the cells of each column; numbers need none.
    classes = [' class="text"' if column < texts else "" for column in range(len(rows[0]))]
    head = ""
    for css_class, name in zip(classes, rows[0], strict=True):
        head += f'<th{css_class} scope="col">{escaped(name)}</th>'
    body = []
    for number, row in enumerate(rows):
        cells = ""
        for column, (name, text) in enumerate(row.items()):
            html = escaped(text)
            # A narrow page shows the heading of a column beside each cell instead.
            attributes = f'{classes[column]} data-head="{escaped(name)}"'
            if column > 0:
                cells += f"<td{attributes}>{html}</td>"
                continue
            if is_legend:
                html = _in_legend(number, html)
            cells += f'<th{attributes} scope="row">{html}</th>'
        key = ""
        if is_legend:
            # By `data-k`, `page` highlights the row's curve; by `tabindex`, the keyboard can, too.
            key = f' data-k="{number + 1}" tabindex="0"'
        body.append(f"<tr{key}>{cells}</tr>")
    rows_html = "\n".join(body)
    # The caption is outside the table, because otherwise it would scroll with the table.
    return (
        f'<p class="caption">{escaped(caption)}</p>\n<div class="wide"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows_html}\n</tbody>\n"
        "</table></div>"
    )


def _in_legend(number: int, html: str) -> str:
    """Return the HTML of a row's heading with the number, from 1, and the line of its curve."""
    return (
        f'<span class="swatch {chart.look(number)}"><b>{number + 1}</b><svg width="20" height="8"'
        f' aria-hidden="true"><path class="line" d="M1 4H19"/></svg><span>{html}</span></span>'
    )
