"""The report on a run that is under way, as a page on this computer that follows the run."""

import contextlib
import functools
import os
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from adloco_jax.errors import ConfigError, UserError
from adloco_jax.study import page, report

_REFRESH_MS = 3000

# Replaces the page by its successor, with the same tabs chosen and the same parts open.
_SCRIPT = """<script>
setInterval(async () => {
  const answer = await fetch(location.href).catch(() => null);
  const text = answer && await answer.text();
  if (!text || text === window.last) return;
  window.last = text;
  const next = new DOMParser().parseFromString(text, "text/html");
  document.querySelectorAll("input:checked").forEach(old => {
    const own = next.getElementById(old.id);
    if (own) own.setAttribute("checked", "");
  });
  const before = [...document.querySelectorAll("details")];
  next.querySelectorAll("details").forEach((own, i) => { own.open = before[i]?.open ?? own.open; });
  document.head.querySelector("style").replaceWith(next.querySelector("style"));
  document.body.replaceWith(next.body);
}, %d);
</script>"""


def serve(
    runs: Sequence[str | os.PathLike[str]], *, labels: Sequence[str] | None = None, port: int = 0
) -> None:
    """Print the page's address, and serve it until interrupted (Ctrl-C); see `server`.

    Raises:
      ConfigError: If the port cannot be used.
    """
    try:
        own = server(runs, labels=labels, port=port)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--port {port}: {error}; name another, or none for any free one"
        ) from error
    with own, contextlib.suppress(KeyboardInterrupt):
        print(f"report: http://127.0.0.1:{own.server_port}/ (Ctrl-C ends it)", flush=True)
        own.serve_forever()


def server(
    runs: Sequence[str | os.PathLike[str]], *, labels: Sequence[str] | None = None, port: int = 0
) -> ThreadingHTTPServer:
    """A server of the report on this computer alone; `serve_forever()` runs it.

    The page is made again when a ledger has grown and someone looks.

    Args:
      runs: The runs' folders; one without a finished round gives a page that waits for it.
      labels: As of `report.write`.
      port: 0 takes any that is free; `server_port` says which.

    Raises:
      OSError: If the port is taken.
    """

    @functools.lru_cache(maxsize=1)
    def drawn(sizes: tuple[int, ...]) -> bytes:
        try:
            text = report.html(runs, labels=labels)
        except UserError as error:  # no round yet, most likely
            screen = (page.paragraph(f"Not yet: {error}"), "", "")
            text = page.page("Waiting", "", html=screen, details_html="", num_curves=0)
        text = text.replace("</head>", f"{_SCRIPT % _REFRESH_MS}</head>", 1)
        return text.encode(errors="replace")  # a path need not be text

    class Handler(BaseHTTPRequestHandler):
        """Answers every request with the page as it is now."""

        def do_GET(self) -> None:  # noqa: N802, the library's name
            """Send the page."""
            ledgers = [Path(run) / "ledger.jsonl" for run in runs]
            body = drawn(tuple(p.stat().st_size if p.exists() else 0 for p in ledgers))
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Cache-Control", "no-store")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: a line for every refresh would bury the address."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)
