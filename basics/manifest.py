"""`manifest.json`: sizes and SHA-256 digests of a checkpoint's files, written after them."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from basics.files import partial_file, read_regular_file, write_atomically

MANIFEST = "manifest.json"

PlainName = Annotated[str, Field(pattern=r"^[a-z][a-z._-]{0,63}$")]


class FileFacts(BaseModel):
    """Expected size and digest of a file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=re.compile(r"^[0-9a-f]{64}$"))

    @classmethod
    def of(cls, path: Path) -> FileFacts:
        return cls(bytes=path.stat().st_size, sha256=_sha256(path))


class Manifest(BaseModel):
    """The files beside the manifest, as they were when it was written."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = Field(default=1, ge=1, le=1)
    global_step: int
    tokens: int
    files: dict[PlainName, FileFacts]

    def text(self) -> str:
        """Return the file's exact content."""
        return self.model_dump_json(indent=2) + "\n"


def write_manifest(directory: Path, *, global_step: int, tokens: int) -> None:
    """Write the manifest of a directory's files. Call fsync on each of them first."""
    files = {path.name: FileFacts.of(path) for path in sorted(directory.iterdir())}
    manifest = Manifest(global_step=global_step, tokens=tokens, files=files)
    write_atomically(directory / MANIFEST, manifest.text(), durable=True)


def add_to_manifest(directory: Path, name: str) -> None:
    """Add one more file to a directory's manifest. Call fsync on the file before.

    Raises:
        OSError: the manifest could not be replaced; the old one is still whole.
    """
    manifest = read_manifest(directory)
    files = manifest.files | {name: FileFacts.of(directory / name)}
    write_atomically(directory / MANIFEST, manifest.model_copy(update={"files": files}).text(),
                     durable=True)


def read_manifest(directory: Path) -> Manifest:
    """Read a directory's manifest. Raises: OSError or ValueError if missing or damaged."""
    path = directory / MANIFEST
    try:
        return _parse(path)
    except ValueError:  # a kill may cut it off where the file system cannot rename files
        if not partial_file(path).is_file():
            raise
    return _parse(partial_file(path))


def _parse(path: Path) -> Manifest:
    text = read_regular_file(path)
    manifest = Manifest.model_validate_json(text)
    if text != manifest.text():
        raise ValueError("not the text that was written")
    return manifest


def find_damage(directory: Path, *, thoroughly: bool = False) -> str:
    """Compare a directory with its manifest; return the first difference, empty if none.

    Args:
        thoroughly: compare digests too, about a second per GB; else only sizes.
    """
    name = MANIFEST
    try:
        for name, facts in read_manifest(directory).files.items():
            size = (directory / name).lstat().st_size  # a link, a pipe: another one
            if size != facts.bytes:
                return f"{name} has {size:,} bytes, not {facts.bytes:,}"
            if thoroughly and _sha256(directory / name) != facts.sha256:
                return f"{name} has changed since it was written"
    except FileNotFoundError:
        return f"{name} is missing"
    except (OSError, ValueError) as error:
        return f"{name} cannot be read ({getattr(error, 'strerror', None) or 'damaged'})"
    return ""


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
