"""A local Hugging Face hub for the real huggingface_hub client, with faults on demand."""

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import datasets
import numpy as np
import pytest
from huggingface_hub import HfFileSystem, close_session, constants
from safetensors.numpy import save

SHA = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Fault:
    """A fault of the next requests for a path."""

    path: str  # or a part of it
    times: int = 1  # -1: always
    status: int = 0  # HTTP status of the response
    headers: dict[str, str] = field(default_factory=dict)
    cut_after: int = -1  # bytes of the body until the connection breaks
    method: str = "GET"


@dataclass
class Hub:
    """One repository, the faults of its requests, and a record of all requests."""

    files: dict[str, bytes]
    repository: str = "someone/texts"
    kind: str = "datasets"  # or models, or any: both, of the same name and with the same files
    sha: str = SHA
    card: dict[str, object] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    endpoint: str = ""
    requests: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, range
    num_bytes: int = 0  # of files sent

    def downloads(self, name: str) -> list[str]:
        """Return the byte ranges of all requests for a file."""
        return [
            part
            for method, path, part in self.requests
            if method == "GET" and "/resolve/" in path and path.endswith(name)
        ]

    def environment(self, home: Path) -> dict[str, str]:
        """Return the environment variables that make a process use this hub."""
        return {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "HF_TOKEN": ""}

    def fault_for(self, method: str, path: str) -> Fault | None:
        for fault in self.faults:
            if fault.times and fault.path in path and fault.method == method:
                fault.times -= 1
                return fault
        return None


class Handler(BaseHTTPRequestHandler):
    """What the local servers of the tests have in common."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_headers(status, {"Content-Length": str(len(body))} | (headers or {}))
        self.wfile.write(body)

    def send_headers(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()

    def send_json(self, answer: object, status: int = 200) -> None:
        self.send(status, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def close(self) -> None:
        self.connection.close()
        self.close_connection = True


@contextmanager
def listening(handler: type[Handler]) -> Iterator[str]:
    """Serve on the loopback interface inside the context, which gets the address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve a hub inside the context."""
    with listening(_handler_of(hub)) as hub.endpoint:
        yield hub


@contextmanager
def used_in_this_process(hub: Hub, home: Path) -> Iterator[None]:
    """Make huggingface_hub use this hub, without pauses between its attempts."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in hub.environment(home).items():
            patch.setenv(name, value)
        patch.setattr(constants, "ENDPOINT", hub.endpoint)
        patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        patch.setattr(datasets.config, "HF_ENDPOINT", hub.endpoint)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", home / "datasets")
        patch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        )
        patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        patch.setattr(time, "sleep", lambda _: None)
        HfFileSystem.clear_instance_cache()
        close_session()  # its connections are those of another test's hub
        yield


@pytest.fixture(name="tokens_hub")
def tokens_hub_fixture() -> Iterator[Hub]:
    """A hub with a dataset of tokens, and another file that no run needs."""
    steps = np.random.default_rng(0).integers(1, 4, size=400_000)
    tokens = (np.cumsum(steps) % 257).astype(np.uint16)
    files = {
        "train.safetensors": save({"tokens": tokens}),
        "validation.safetensors": save({"tokens": tokens[:500]}),
        "README.md": b"hello",
    }
    with serving(Hub(files, repository="someone/tokens")) as hub:
        yield hub


def _handler_of(hub: Hub) -> type[Handler]:
    class HubHandler(Handler):
        def do_GET(self) -> None:
            self.respond(has_body=True)

        def do_HEAD(self) -> None:
            self.respond(has_body=False)

        def do_POST(self) -> None:
            self.form = self.body()
            self.respond(has_body=True)

        def respond(self, *, has_body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path, self.headers.get("Range", "")))
            fault = hub.fault_for(self.command, path)
            kind = hub.kind
            if kind == "any":
                kind = "datasets" if "/datasets/" in path else "models"
            api_path = f"/api/{kind}/{hub.repository}"
            folder = "/datasets" if kind == "datasets" else ""
            file_pattern = rf"{folder}/{hub.repository}/resolve/(\w+)/(.+)"
            if fault and fault.status:
                self.send(fault.status, b"{}" if has_body else b"", fault.headers)
            elif match := re.fullmatch(file_pattern, path):
                self.send_file(*match.groups(), fault, has_body=has_body)
            elif path.startswith(api_path):
                answer = self.answer(path.removeprefix(api_path))
                if answer == [] and "/tree/" in path:
                    self.send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
                else:
                    self.send_json(answer)
            else:  # the real hub's response without a login
                self.send(
                    401,
                    b'{"error": "Invalid username or password."}' if has_body else b"",
                    {"X-Error-Code": "RepoNotFound"},
                )

        def answer(self, path: str) -> object:
            sha = hub.sha
            if path.startswith("/revision/"):
                sha = path.removeprefix("/revision/")
            if path.startswith("/tree/"):
                _, _, sha, *rest = path.split("/")
                folder = "".join(f"{part}/" for part in rest)
                if "recursive=true" in self.path.lower():
                    return [entry(name) for name in sorted(hub.files) if name.startswith(folder)]
                inside = {
                    name.removeprefix(folder).partition("/")[:2]
                    for name in hub.files
                    if name.startswith(folder)
                }
                return [
                    {"type": "directory", "path": folder + first, "oid": etag(b"")[:40]}
                    if slash
                    else entry(folder + first)
                    for first, slash in sorted(inside)
                ]
            if path.startswith("/paths-info/"):
                asked = json.loads(self.form)["paths"]
                return [entry(name) for name in hub.files if name in asked]
            return {
                "id": hub.repository,
                "sha": sha,
                "private": False,
                "tags": [],
                "downloads": 0,
                "likes": 0,
                "cardData": hub.card,
                "siblings": [{"rfilename": name} for name in hub.files],
            }

        def send_file(self, sha: str, name: str, fault: Fault | None, *, has_body: bool) -> None:
            if name not in hub.files:
                self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            content = hub.files[name]
            headers = {
                "ETag": f'"{etag(content)}"',
                "X-Repo-Commit": hub.sha if sha == "main" else sha,
                "Accept-Ranges": "bytes",
                "X-Linked-Size": str(len(content)),
                "X-Linked-Etag": f'"{etag(content)}"',
            }
            status, part = 200, content
            if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                start, stop = int(found[1]), int(found[2] or len(content) - 1) + 1
                status, part = 206, content[start:stop]
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            headers["Content-Length"] = str(len(part))
            if not has_body:
                self.send_headers(status, headers)
            elif fault and 0 <= fault.cut_after < len(part):
                self.send_headers(status, headers)
                self.wfile.write(part[: fault.cut_after])
                self.wfile.flush()
                self.close()
            else:
                hub.num_bytes += len(part)  # before the client can have read all
                self.send(status, part, headers)

    def entry(name: str) -> dict[str, object]:
        content = hub.files[name]
        facts = {"type": "file", "path": name, "size": len(content), "oid": etag(content)[:40]}
        if name.endswith((".parquet", ".safetensors")):
            facts["lfs"] = {"oid": etag(content), "size": len(content), "pointerSize": 130}
        return facts

    return HubHandler


def etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
