"""`manifest.json`: sizes and SHA-256 digests of a directory's files, written after them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from basics.files import fsync, partial_file, read_regular_file, write_atomically

MANIFEST = "manifest.json"
MAX_BYTES = 2**20  # far more than a manifest needs

PlainName = Annotated[str, Field(pattern=r"^[a-z][a-z._-]{0,63}$")]


class FileFacts(BaseModel):
    """Expected size and digest of a file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=re.compile(r"^[0-9a-f]{64}$"))


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
    files = {path.name: FileFacts(bytes=path.stat().st_size, sha256=_sha256(path))
             for path in sorted(directory.iterdir())}
    manifest = Manifest(global_step=global_step, tokens=tokens, files=files)
    (directory / MANIFEST).write_text(manifest.text())
    fsync(directory / MANIFEST)


def add_to_manifest(directory: Path, name: str) -> None:
    """Add one more file to a directory's manifest. Call fsync on the file before.

    Raises:
        OSError: the manifest could not be replaced; the old one is still whole.
    """
    manifest, path = read_manifest(directory), directory / name
    facts = FileFacts(bytes=path.stat().st_size, sha256=_sha256(path))
    manifest = manifest.model_copy(update={"files": manifest.files | {name: facts}})
    write_atomically(directory / MANIFEST, manifest.text(), durable=True)


def read_manifest(directory: Path) -> Manifest:
    """Read a directory's manifest. Raises: OSError or ValueError if missing or damaged."""
    path = directory / MANIFEST
    try:
        return _parse(path)
    except (OSError, ValueError):
        if not partial_file(path).is_file():
            raise
    return _parse(partial_file(path))  # a kill, where files are not replaced by a rename


def _parse(path: Path) -> Manifest:
    text = read_regular_file(path, max_bytes=MAX_BYTES)
    manifest = Manifest.model_validate_json(text)
    if text != manifest.text():
        raise ValueError("not the text that was written")
    return manifest


def find_damage(directory: Path, *, thoroughly: bool = False) -> str:
    """Compare a directory with its manifest; return the first difference, empty if none.

    Args:
        thoroughly: compare digests too, about a second per GB; else only sizes.
    """
    try:
        manifest = read_manifest(directory)
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError):
        return f"{MANIFEST} cannot be read"
    return find_difference(manifest, directory, thoroughly=thoroughly)


def find_difference(manifest: Manifest, directory: Path, *, thoroughly: bool) -> str:
    """Compare a directory with a manifest; return the first difference, empty if none."""
    for name, facts in manifest.files.items():
        path = directory / name
        try:
            found = path.lstat()
            if not path.is_file() or path.is_symlink():
                return f"{name} is not a file"
            if found.st_size != facts.bytes:
                return f"{name} has {found.st_size:,} bytes, not {facts.bytes:,}"
            if thoroughly and _sha256(path) != facts.sha256:
                return f"{name} has changed since it was written"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return ""


def digest_of(directory: Path) -> str:
    """Return one digest for the whole directory: that of its manifest."""
    return _sha256(directory / MANIFEST)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_oversized(manifest: Manifest, names: Collection[str], max_bytes: int) -> str:
    """Return which file has another name than these, or is larger; empty if none is.

    A sparse file of terabytes takes no room on the disk, and hours to read.
    """
    for name, facts in manifest.files.items():
        if name not in names:
            return f"{name} is no file of a checkpoint"
        if facts.bytes > max_bytes:
            return f"{name} has {facts.bytes:,} bytes, more than the model needs"
    return ""
