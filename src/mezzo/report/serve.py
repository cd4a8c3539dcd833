"""Pages over HTTP, for a browser on another machine behind a tunnel: read-only, and only on the loopback address."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.client import HTTP_PORT
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

HOST = "127.0.0.1"
_TYPES = {".html": "text/html; charset=utf-8", ".json": "application/json; charset=utf-8"}
# A page below the folder may be somebody else's: it must not reach the network either.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


class _Handler(BaseHTTPRequestHandler):
    """Serves GET and HEAD requests for pages and records below one folder."""

    server: _Server
    server_version, sys_version = "mezzo", ""
    timeout = 30

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        if self.headers.get("Host", "").lower() not in self.server.names:
            # DNS rebinding: a hostile site whose name resolves to this address could read every page through a visitor's browser.
            self._refuse(HTTPStatus.FORBIDDEN)
            return
        path = _file_at(self.path, self.server.folder)
        data = None if path is None else _bytes_of(path)
        if path is None or data is None:
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        self.send_response(HTTPStatus.OK)
        self._headers(_TYPES[path.suffix], len(data))
        if with_body:
            self.wfile.write(data)

    def _refuse(self, status: HTTPStatus) -> None:
        body = f"{status.value} {status.phrase}\n".encode()  # without the path: it may be hostile
        self.send_response(status)
        self._headers("text/plain; charset=utf-8", len(body))
        if self.command != "HEAD":
            self.wfile.write(body)

    def _headers(self, content_type: str, length: int) -> None:
        fields = {
            "Content-Type": content_type,
            "Content-Length": str(length),
            "Content-Security-Policy": _POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
        }
        for name, value in fields.items():
            self.send_header(name, value)
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer requests that are not understood, such as other methods, without echoing any of their text."""
        self.send_response(HTTPStatus(code))
        self._headers("text/plain; charset=utf-8", 0)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: paths are other people's text, and a terminal obeys control characters."""


class _Server(ThreadingHTTPServer):
    """A server for one folder."""

    daemon_threads = True
    folder: Path
    names: frozenset[str]


def _file_at(target: str, folder: Path) -> Path | None:
    """Return the page or record that a request names; None if it is not below ``folder``."""
    try:
        parts = [part for part in unquote(urlsplit(target).path, errors="surrogateescape").split("/") if part]
    except ValueError:
        return None
    # A part that begins with a dot is hidden or leads upwards; a separator or a null byte inside a part is an attack.
    if any(part.startswith(".") or os.sep in part or (os.altsep or os.sep) in part or "\0" in part for part in parts):
        return None
    path = folder.joinpath(*parts) if parts else folder / "index.html"
    try:
        path = path.resolve(strict=True)
    except (OSError, RuntimeError):
        return None
    return path if path.suffix in _TYPES and path.is_relative_to(folder) else None


def _bytes_of(path: Path) -> bytes | None:
    """Return the content of a regular file; not of a pipe or device, which could block."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with open(handle, "rb") as file:
            return file.read() if stat.S_ISREG(os.fstat(handle).st_mode) else None
    except OSError:
        return None


@contextmanager
def serving(folder: Path, *, port: int = 0) -> Iterator[_Server]:
    """Serve the pages below ``folder`` until the block ends.

    Args:
        folder: the only folder whose files are served.
        port: the port; 0 for any free one.

    Raises:
        OSError: the port is in use or not allowed.
    """
    with _Server((HOST, port), _Handler) as server:
        server.folder = folder.resolve()
        server.names = names_of(server.server_port)
        yield server


def names_of(port: int) -> frozenset[str]:
    """Return the Host headers of requests to this server; browsers leave out HTTP's own port."""
    hosts = (HOST, "localhost")
    return frozenset(f"{host}:{port}" for host in hosts) | frozenset(hosts if port == HTTP_PORT else ())


def address_of(server: ThreadingHTTPServer) -> str:
    """Return the address to open."""
    return f"http://{HOST}:{server.server_port}/"
