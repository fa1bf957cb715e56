"""What proves that a directory of files is whole: their sizes and digests, written last."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from basics.files import fsync

MANIFEST = "manifest.json"
MAX_BYTES = 2**20  # of a manifest: more is none of ours

PlainName = Annotated[str, Field(pattern=r"^[a-z][a-z._-]{0,63}$")]


class FileFacts(BaseModel):
    """What a file must be."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=re.compile(r"^[0-9a-f]{64}$"))


class Manifest(BaseModel):
    """`manifest.json`: the files beside it, as they were when all of them were written."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = Field(default=1, ge=1, le=1)
    global_step: int
    tokens: int
    files: dict[PlainName, FileFacts]

    def text(self) -> str:
        return self.model_dump_json(indent=2) + "\n"


def write_manifest(directory: Path, *, global_step: int, tokens: int) -> None:
    """Describe the files of a directory. Call fsync on each before."""
    files = {path.name: FileFacts(bytes=path.stat().st_size, sha256=_sha256(path))
             for path in sorted(directory.iterdir())}
    manifest = Manifest(global_step=global_step, tokens=tokens, files=files)
    (directory / MANIFEST).write_text(manifest.text())
    fsync(directory / MANIFEST)


def read_manifest(directory: Path) -> Manifest:
    """Read a directory's manifest. Raises: OSError or ValueError if there is no whole one."""
    path = directory / MANIFEST
    if path.stat().st_size > MAX_BYTES:
        raise ValueError("is too large to be one")
    manifest = Manifest.model_validate_json(path.read_bytes())
    if path.read_text() != manifest.text():
        raise ValueError("is not as it was written")
    return manifest


def find_damage(directory: Path, *, thoroughly: bool = False) -> str:
    """Say what speaks against a directory being whole; empty if nothing does.

    Args:
        thoroughly: read every byte, about a second a GB; else sizes alone are looked at.
    """
    try:
        manifest = read_manifest(directory)
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError):
        return f"{MANIFEST} cannot be read"
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
    """Give one digest for all that a directory holds, from its manifest."""
    return _sha256(directory / MANIFEST)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
