"""An S3 server on loopback (moto), and a proxy in front of it that causes faults."""

import contextlib
import http.client
import itertools
import logging
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

Fate = Callable[[str, str, int], str]
"""`fate(method, path, number) -> fault` of the request with this number; "" for none."""

ERRORS = {
    "503": (503, "SlowDown", "Please reduce your request rate."),
    "expired": (400, "ExpiredToken", "The provided token has expired."),
    "denied": (403, "AccessDenied", "Access Denied"),
}
# reset: the connection ends before the server has the request; lost: after it has done it; cut: in
# the middle of the answer; wrong: a byte of the answer's body is another one; slow: a second.
# Beside these, silent: the request is never answered.
FAULTS = (*ERRORS, "reset", "lost", "cut", "wrong", "slow")
SLOW_S = 1.0


def environment(url: str) -> dict[str, str]:
    """The environment in which clients reach the server as they reach Amazon's."""
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    return keys | {"AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true"}


@contextlib.contextmanager
def s3_server(bucket: str) -> Iterator[str]:
    """Start a server with one empty bucket; return its address."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # not a line for each request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        url = "http://{}:{}".format(*server.get_host_and_port())
        urllib.request.urlopen(urllib.request.Request(f"{url}/{bucket}", method="PUT")).close()
        yield url
    finally:
        server.stop()


@contextlib.contextmanager
def faulty(url: str, fate: Fate) -> Iterator[str]:
    """Start a proxy in front of a server, and return its address."""
    upstream, numbers, closing = urlsplit(url).netloc, itertools.count(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_request(self) -> None:
            fault = fate(self.command, self.path, next(numbers))
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if fault in ERRORS:
                code, name, text = ERRORS[fault]
                xml = f"<Error><Code>{name}</Code><Message>{text}</Message></Error>".encode()
                self.answer(code, {"Content-Type": "application/xml"}, xml, len(xml))
                return
            if fault == "silent":
                closing.wait()
                return
            if fault == "reset":
                self.reset()
                return
            connection = http.client.HTTPConnection(upstream)
            with contextlib.closing(connection):
                connection.request(self.command, self.path, body, dict(self.headers))
                reply = connection.getresponse()
                data, headers = reply.read(), dict(reply.getheaders())
            length = int(headers.get("Content-Length", len(data)))
            if fault == "slow":
                time.sleep(SLOW_S)
            if fault == "wrong" and data:
                middle = len(data) // 2
                data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
            if fault == "cut":
                data = data[: len(data) // 2]
            if fault != "lost":
                self.answer(reply.status, headers, data, length)
            if fault in ("lost", "cut"):
                self.reset()

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = do_request  # noqa: N815

        def answer(self, code: int, headers: dict[str, str], data: bytes, length: int) -> None:
            self.send_response_only(code)
            for name, value in headers.items():
                if name not in ("Content-Length", "Transfer-Encoding", "Connection"):
                    self.send_header(name, value)
            self.send_header("Content-Length", f"{length}")
            self.end_headers()
            self.wfile.write(data)
            self.wfile.flush()

        def reset(self) -> None:
            self.close_connection = True
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.shutdown(socket.SHUT_RD)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads, request_queue_size = True, 128

        def handle_error(self, *_: object) -> None:
            pass  # a client that has gone

        def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]
            self.close_request(request)  # no orderly end, which would hide a reset

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield "http://{}:{}".format(*server.server_address)
        finally:
            closing.set()
            server.shutdown()
