"""The server of the page: read-only, for this machine only, and nothing but what the page needs."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from basics.errors import UserError
from basics.json_files import to_json
from lab.watch.answers import MAX_POINTS, MIN_POINTS, Answer, Watched
from lab.watch.columns import AXES

STATIC = Path(__file__).parent / "static"
FILES = {  # path: file, type
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/uPlot.min.css": ("uPlot.min.css", "text/css; charset=utf-8"),
    "/uPlot.iife.min.js": ("uPlot.iife.min.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
JSON = "application/json; charset=utf-8"
HEADERS = {
    "Content-Security-Policy":
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src"
        " 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
# `ssh -L` may use any port; another name would be another site that points to this machine.
HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
OWN_SITES = {"same-origin", "none"}  # the page itself, and an address that a person typed
MIN_COMPRESSED = 1000  # bytes; shorter answers are sent as they are


class Server(ThreadingHTTPServer):
    """Serves the page on 127.0.0.1."""

    daemon_threads, block_on_close = True, False

    def __init__(self, watched: Watched, port: int) -> None:
        """Listen. Raises: UserError if the port cannot be used."""
        self.watched = watched
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except OSError as error:
            raise UserError(f"port {port} of 127.0.0.1 cannot be used ({error.strerror}); choose"
                            " another one with --port") from None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: the browser has gone away."""


class Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    server: Server
    protocol_version, server_version, sys_version = "HTTP/1.1", "lab-watch", ""
    timeout = 60.0  # of an idle connection

    def do_GET(self) -> None:
        if self._is_own():
            path, query = urlsplit(self.path).path, urlsplit(self.path).query
            if path in FILES:
                name, content_type = FILES[path]
                self._send(HTTPStatus.OK, (STATIC / name).read_bytes(), content_type)
            elif (answer := self._answer(path, query)) is None:
                self.send_error(HTTPStatus.NOT_FOUND)
            else:
                self._send(HTTPStatus.OK, to_json(answer, separators=(",", ":")).encode(), JSON)

    do_HEAD = do_GET

    def _refuse_method(self) -> None:
        self.send_error(HTTPStatus.METHOD_NOT_ALLOWED)

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_CONNECT = do_TRACE = _refuse_method

    def _is_own(self) -> bool:
        """Refuse what another site's page asks for, also under a name of its own for 127.0.0.1."""
        hosts, origins = (self.headers.get_all(name, []) for name in ("Host", "Origin"))
        is_own = (len(hosts) == 1 and HOST.fullmatch(hosts[0].strip()) is not None
                  and all(origin == f"http://{hosts[0].strip()}" for origin in origins)
                  and set(self.headers.get_all("Sec-Fetch-Site", [])) <= OWN_SITES)
        if not is_own:
            self.send_error(HTTPStatus.FORBIDDEN)
        return is_own

    def _answer(self, path: str, query: str) -> Answer | None:
        """Return the answer to a question of the page, or None if it is no such question."""
        try:
            asked = {key: values[-1] for key, values in parse_qs(query, max_num_fields=8).items()}
        except ValueError:
            return None
        watched = self.server.watched
        if path == "/runs":
            return watched.runs()
        questions: dict[str, Callable[[str, dict[str, str]], Answer | None]] = {
            "/series": partial(_series, watched), "/samples": lambda name, _: watched.samples(name)}
        name = asked.get("run", "")
        if path not in questions or not watched.has(name):
            return None
        return questions[path](name, asked)

    def _send(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
        with suppress(ConnectionError, TimeoutError):  # the browser has gone away
            self.send_response(status)
            for name, value in HEADERS.items():
                self.send_header(name, value)
            self.send_header("Content-Type", content_type)
            accepted = self.headers.get("Accept-Encoding", "") if self.headers else ""
            if len(body) >= MIN_COMPRESSED and "gzip" in accepted:
                body = gzip.compress(body, compresslevel=4, mtime=0)
                self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Length", str(len(body)))
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer with the status alone, and close: nothing of the request is repeated."""
        self.close_connection, status = True, HTTPStatus(code)
        self._send(status, f"{status.value} {status.phrase}\n".encode(),
                   "text/plain; charset=utf-8")

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def _series(watched: Watched, name: str, asked: dict[str, str]) -> Answer | None:
    axis, points = asked.get("x", "steps"), asked.get("points", str(MAX_POINTS))
    if axis not in AXES or not points.isdecimal() or len(points) > 6:
        return None
    within = None
    if "from" in asked or "to" in asked:
        try:
            within = float(asked["from"]), float(asked["to"])
        except (KeyError, ValueError):
            return None
    return watched.series(name, axis, max_points=min(MAX_POINTS, max(MIN_POINTS, int(points))),
                          within=within)
