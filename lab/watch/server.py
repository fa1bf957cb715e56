"""The server of the page: read-only, for who started it only, and nothing but what it needs."""

import gzip
import json
import re
import secrets
import socket
import time
from contextlib import suppress
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from basics.errors import UserError
from lab.watch.answers import AXES, Answer, Watched

STATIC = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".json": "application/json",
}
FILES = {"/": "page.html"} | {
    f"/{name}": name
    for name in (
        "page.css",
        "charts.js",
        "page.js",
        "uPlot.min.css",
        "uPlot.iife.min.js",
        "icon.svg",
    )
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " connect-src 'self'; img-src"
    " 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
# `ssh -L` may use any port; another name would be another site that points to this machine.
HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
TOKEN_HEADER = "X-Token"
MAX_CONNECTIONS = 32  # a browser opens at most six to one server
# In an exported page: what is loaded; what could end a script or a line of it, as \uXXXX.
LOADED = re.compile(r'<link rel="stylesheet" href="([\w.]+)">|<script src="([\w.]+)"></script>')
ESCAPED = str.maketrans({c: f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"})


class Server(ThreadingHTTPServer):
    """Serves the page on 127.0.0.1, and what runs wrote to those who know its token.

    The token is in the fragment of the page's address, which a browser sends to nobody; the page
    sends it as a header. So neither another user of the machine nor another site can ask.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64  # of connections that are not yet accepted

    def __init__(self, watched: Watched, port: int, allowed_hosts: tuple[str, ...] = ()) -> None:
        """Listen. Raises: UserError if the port cannot be used.

        Args:
            allowed_hosts: names of this machine that a proxy in front of this server passes on.
        """
        self.allowed_hosts = {name.lower() for name in allowed_hosts}
        self.watched = watched
        self.token = secrets.token_urlsafe(16)
        self._connections: dict[socket.socket, None] = {}  # the open ones, the oldest first
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except OSError as error:
            raise UserError(
                f"port {port} of 127.0.0.1 cannot be used ({error.strerror}); choose"
                " another one with --port"
            ) from None
        self.address = f"http://127.0.0.1:{self.server_port}/#token={self.token}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread; of too many the oldest is closed.

        Anybody on the machine can open some and leave them idle. A browser opens its own again.
        """
        self._connections[request] = None
        if len(self._connections) > MAX_CONNECTIONS:
            oldest = list(self._connections)[0]
            self._connections.pop(oldest, None)
            with suppress(OSError):  # it has just ended
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: the browser has gone away."""


class Handler(BaseHTTPRequestHandler):
    """Answers one connection; `BaseHTTPRequestHandler` refuses methods other than GET."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "lab-watch"
    sys_version = ""
    timeout = 60.0  # of an idle connection
    headers = Message()  # of a request that is too malformed to have any

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        hosts = self.headers.get_all("Host", [])
        tokens = self.headers.get_all(TOKEN_HEADER, [])
        if len(hosts) != 1 or not self._is_allowed(hosts[0].strip()):
            self.send_error(HTTPStatus.FORBIDDEN)
        elif path in FILES:
            file = STATIC / FILES[path]
            self._send(HTTPStatus.OK, file.read_bytes(), TYPES[file.suffix])
        elif len(tokens) != 1 or not secrets.compare_digest(
            tokens[0].encode(errors="replace"), self.server.token.encode()
        ):
            self.send_error(HTTPStatus.FORBIDDEN)
        elif (answer := _answer(self.server.watched, path, query)) is None:
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            body = json.dumps(answer, separators=(",", ":"))
            self._send(HTTPStatus.OK, body.encode(), TYPES[".json"])

    def _is_allowed(self, host: str) -> bool:
        return HOST.fullmatch(host) is not None or host.lower() in self.server.allowed_hosts

    def _send(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{content_type}; charset=utf-8")
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body, compresslevel=4, mtime=0)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer with the status alone, and close: nothing of the request is repeated."""
        # Without a status line the answer to a malformed request would be none.
        self.close_connection = True
        self.request_version = self.protocol_version
        status = HTTPStatus(code)
        self._send(status, f"{status.value} {status.phrase}\n".encode(), "text/plain")

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def _answer(watched: Watched, path: str, query: str) -> Answer | None:
    """Return the answer to a question of the page, or None if it is no such question."""
    with suppress(KeyError, ValueError):
        asked = dict(parse_qsl(query, max_num_fields=8))
        if path == "/runs":
            return watched.runs()
        if path == "/run" and watched.has(asked["run"]):
            if "x" not in asked:
                return watched.run(asked["run"])
            within = asked["x"], float(asked["from"]), float(asked["to"])
            if asked["x"] in AXES:
                return watched.run(asked["run"], within)
    return None


def exported_page(watched: Watched) -> str:
    """Return an HTML page with all that it needs inside, which may ask for nothing else."""
    nonce = secrets.token_urlsafe(16)
    answer = watched.runs()

    def content(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        tag = "style" if found[1] else "script"
        return f'<{tag} nonce="{nonce}">{(STATIC / name).read_text(encoding="utf-8")}</{tag}>'

    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}';"
        " img-src data:; base-uri 'none'; form-action 'none'"
    )
    exported = answer | {
        "run": {run["name"]: watched.run(run["name"]) for run in answer["runs"]},
        "exported": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }
    data = json.dumps(exported, separators=(",", ":")).translate(ESCAPED)
    page = LOADED.sub(content, (STATIC / "page.html").read_text(encoding="utf-8"))
    for place, new in (
        ('<link rel="icon" href="icon.svg">', '<link rel="icon" href="data:,">'),
        ("<title>", f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<title>'),
        ("</main>", f'</main>\n<script type="application/json" id="data">{data}</script>'),
    ):
        page = page.replace(place, new, 1)
    return page
