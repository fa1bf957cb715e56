"""A hub on the loopback interface that accepts uploads in the real client's plain protocol."""

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.hub_server import Handler, listening

TOKEN = "hf_token_for_tests"
COMMIT = "fedcba9876543210fedcba9876543210fedcba98"


@dataclass
class UploadHub:
    """Repositories by kind and name, the faults to inject, and the requests received.

    Attributes:
        faults: by part of a path: how many requests fail, and with which status; status 0
            closes the connection.
    """

    repositories: dict[tuple[str, str], dict[str, object]] = field(default_factory=dict)
    large_files: dict[str, bytes] = field(default_factory=dict)  # by sha256
    faults: dict[str, tuple[int, int]] = field(default_factory=dict)
    received: Counter[str] = field(default_factory=Counter)  # complete large files, by sha256
    paths: list[str] = field(default_factory=list)
    endpoint: str = ""

    def environment(self, home: Path, token: str = TOKEN) -> dict[str, str]:
        """Return the variables that direct the client here, without the chunked protocol."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_TOKEN": token,
            "HF_HUB_DISABLE_XET": "1",
        }

    def files(self, kind: str, name: str) -> dict[str, bytes]:
        return self.repositories[kind, name]["files"]


@contextmanager
def taking_uploads() -> Iterator[UploadHub]:
    """Serve a hub inside the context."""
    hub = UploadHub()
    with listening(_handler_of(hub)) as hub.endpoint:
        yield hub


def _handler_of(hub: UploadHub) -> type[Handler]:
    class UploadHandler(Handler):
        def do_GET(self) -> None:
            hub.paths.append(f"{self.command} {self.path}")
            body = self.body()
            for part, (times, status) in hub.faults.items():
                if part in self.path and times:
                    hub.faults[part] = times - 1, status
                    if status:
                        return self.send_json({"error": "injected"}, status)
                    return self.close()
            is_allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            if not (is_allowed or self.path.startswith("/lfs/")):
                return self.send_json({"error": "Invalid token"}, 401)
            return self.answer(body)

        do_POST = do_PUT = do_GET

        def answer(self, body: bytes) -> None:
            path = self.path.split("?")[0]
            if path == "/api/repos/create":
                asked = json.loads(body)
                key = asked.get("type", "model"), f"{asked['organization']}/{asked['name']}"
                is_new = key not in hub.repositories
                if is_new:
                    is_private = asked["visibility"] == "private"
                    hub.repositories[key] = {"private": is_private, "files": {}}
                return self.send_json({"url": f"{hub.endpoint}/{key[1]}"}, 200 if is_new else 409)
            if path == "/api/validate-yaml":
                return self.send_json({"errors": [], "warnings": []})
            if path.startswith("/lfs/"):
                assert hashlib.sha256(body).hexdigest() == path.removeprefix("/lfs/")
                hub.large_files[path.removeprefix("/lfs/")] = body
                hub.received[path.removeprefix("/lfs/")] += 1
                return self.send_json({})
            if found := re.fullmatch(r"/(datasets/)?(.+/.+)\.git/info/lfs/objects/batch", path):
                return self.send_json(
                    {
                        "transfer": "basic",
                        "objects": [
                            self.upload_action(wanted) for wanted in json.loads(body)["objects"]
                        ],
                    }
                )
            if found := re.fullmatch(r"/api/(model|dataset)s/([^/]+/[^/]+)(/.+)?", path):
                return self.in_repository(found[1], found[2], found[3] or "", body)
            return self.send_json({"error": f"not supported: {path}"}, 404)

        def upload_action(self, wanted: dict[str, object]) -> dict[str, object]:
            if wanted["oid"] in hub.large_files:
                return wanted
            return wanted | {"actions": {"upload": {"href": f"{hub.endpoint}/lfs/{wanted['oid']}"}}}

        def in_repository(self, kind: str, name: str, rest: str, body: bytes) -> None:
            repository = hub.repositories.get((kind, name))
            if repository is None:
                return self.send_json({"error": "Repository not found"}, 404)
            if rest.startswith("/preupload/"):
                return self.send_json(
                    {
                        "files": [
                            {
                                "path": asked["path"],
                                "shouldIgnore": False,
                                "uploadMode": "lfs"
                                if asked["path"].endswith(".safetensors")
                                else "regular",
                            }
                            for asked in json.loads(body)["files"]
                        ]
                    }
                )
            if rest.startswith("/commit/"):
                for line in body.splitlines():
                    self.store(repository["files"], **json.loads(line))
                return self.send_json(
                    {
                        "success": True,
                        "commitOid": COMMIT,
                        "hookOutput": "",
                        "commitUrl": f"{hub.endpoint}/{name}/commit/{COMMIT}",
                    }
                )
            return self.send_json(
                {
                    "id": name,
                    "sha": COMMIT,
                    "private": repository["private"],
                    "tags": [],
                    "downloads": 0,
                    "likes": 0,
                    "siblings": [],
                }
            )

        def store(self, files: dict[str, bytes], key: str, value: dict[str, str]) -> None:
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = hub.large_files[value["oid"]]

    return UploadHandler
