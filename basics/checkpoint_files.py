"""Checkpoints as files: their names, manifests and links, and which of them are of the run.

A manifest has the sizes and SHA-256 digests of a checkpoint's files, but of `validation.json`,
which comes later. It is written last and removed first, so a directory without one is partial.
`latest` and `best` are links, or plain files that hold a name where links are refused.

`identity.json` has a random name for what a run directory trains, drawn anew when a run starts over
(--fresh) or goes on from an earlier checkpoint; each `meta.json` has the one that it was saved
under. So a checkpoint that the run has left stays left, wherever it comes back from.
"""

import re
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import Field

from basics.errors import UserError, status_of_place, writing_to
from basics.files import partial_file, read_regular_file, sha256_of, write_atomically
from basics.json_files import FrozenConfig, finite_or_none, found_object

CHECKPOINT_NAME = re.compile(r"\d{8}Z\d{6}-iteration-(\d{1,12})(-\d{1,6})?")
LATEST, BEST = "latest", "best"
MANIFEST, IDENTITY = "manifest.json", "identity.json"
OPTIMIZER_OF_THE_ORIGINAL = "optimizer.pt"
SNAPSHOT_BLOCK_BYTES = 2**29  # of pinned memory, of which a copy of a state takes whole blocks

PlainName = Annotated[str, Field(pattern=r"^[a-z][a-z._-]{0,63}$")]
IdentityName = Annotated[str, Field(pattern=r"^[0-9a-f]{0,32}$")]


class FileFacts(FrozenConfig):
    bytes: int
    sha256: str


class Manifest(FrozenConfig):
    """The files beside the manifest, as they were when it was written."""

    version: int = Field(default=1, ge=1, le=1)
    global_step: int
    tokens: int
    files: dict[PlainName, FileFacts]


def write_manifest(directory: Path, *, global_step: int, tokens: int) -> None:
    """Write the manifest of a directory's files. Call fsync on each of them first."""
    files = {
        path.name: FileFacts(bytes=path.stat().st_size, sha256=sha256_of(path))
        for path in sorted(directory.iterdir())
    }
    manifest = Manifest(global_step=global_step, tokens=tokens, files=files)
    write_atomically(directory / MANIFEST, manifest.model_dump_json(indent=2) + "\n", durable=True)


def read_manifest(directory: Path) -> Manifest:
    """Read a directory's manifest. Raises: OSError or ValueError if missing or damaged."""
    return Manifest.model_validate_json(read_regular_file(directory / MANIFEST))


def find_damage(directory: Path, *, thoroughly: bool = False) -> str:
    """Compare a directory with its manifest; return the first difference, empty if none.

    By sizes; `thoroughly` by digests too, about a second per GB.
    """
    name = MANIFEST
    try:
        for name, facts in read_manifest(directory).files.items():
            size = (directory / name).lstat().st_size  # of a link: another one
            if size != facts.bytes:
                return f"{name} has {size:,} bytes, not {facts.bytes:,}"
            if thoroughly and sha256_of(directory / name) != facts.sha256:
                return f"{name} has changed since it was written"
    except FileNotFoundError:
        return f"{name} is missing"
    except (OSError, ValueError) as error:
        return f"{name} cannot be read ({getattr(error, 'strerror', None) or 'damaged'})"
    return ""


def named_as_checkpoints(checkpoints_dir: Path, *, partial: bool = False) -> list[Path]:
    """Return the directories with a checkpoint's name, and a manifest or none, by global step."""
    paths = [
        path
        for path in checkpoints_dir.glob("*-iteration-*")
        if CHECKPOINT_NAME.fullmatch(path.name)
        and path.is_dir()
        and not path.is_symlink()
        and (path / MANIFEST).exists() != partial
    ]
    return sorted(paths, key=lambda path: (step_of(path), path.name))


def of_the_original(checkpoints_dir: Path) -> list[Path]:
    """Return the checkpoints of the original system, by global step; none beside our own.

    They have no manifest, and the optimizer's state as a pickle, which is not read.
    """
    if named_as_checkpoints(checkpoints_dir):
        return []
    partial = named_as_checkpoints(checkpoints_dir, partial=True)
    return [path for path in partial if (path / OPTIMIZER_OF_THE_ORIGINAL).exists()]


def losses_of_the_original(path: Path) -> dict[str, float | None]:
    """Return the training and the validation loss of a checkpoint of the original system."""
    found = found_object(path / "meta.json")
    losses = {"train_loss": found.get("train_loss"), "validation_loss": found.get("val_loss")}
    return {
        key: finite_or_none(loss) if type(loss) is float else None for key, loss in losses.items()
    }


def step_of(path: Path) -> int:
    return int(CHECKPOINT_NAME.fullmatch(path.name)[1])  # type: ignore[index]


def replace_link(link: Path, target: str) -> None:
    """Let `latest` or `best` name a checkpoint. Raises: OSError."""
    temporary = partial_file(link)
    temporary.unlink(missing_ok=True)
    try:
        temporary.symlink_to(target)
        temporary.replace(link)
    except OSError:  # the file system may have no links
        write_atomically(link, f"{target}\n")


def copied_links(checkpoints_dir: Path) -> list[Path]:
    """Return `latest` and `best` where they are directories: a copy has followed the links."""
    links = [checkpoints_dir / LATEST, checkpoints_dir / BEST]
    return [link for link in links if link.is_dir() and not link.is_symlink()]


def directory_of(place: Path) -> Path:
    """Return the checkpoint that a path names, also where `latest` and `best` are plain files."""
    if place.name in (LATEST, BEST) and place.is_file():
        with suppress(OSError):
            name = read_regular_file(place).removesuffix("\n")
            if CHECKPOINT_NAME.fullmatch(name):
                return place.with_name(name)
    return place


class Identity(FrozenConfig):
    """The identity of a run; of those that it goes on from, the last step that belongs to it."""

    name: IdentityName = Field(default_factory=lambda: uuid.uuid4().hex[:12])
    earlier: dict[IdentityName, Annotated[int, Field(ge=0, lt=2**40)]] = {}

    def includes(self, name: str, global_step: int) -> bool:
        """Return whether a checkpoint belongs to the run, by the name that it was saved under."""
        return name == self.name or global_step <= self.earlier.get(name, -1)

    def after_step_back(self, name: str, global_step: int) -> "Identity":
        """Return a new identity that goes on from a checkpoint."""
        is_known = name == self.name or name in self.earlier
        branch = min(global_step, self.earlier.get(name, global_step)) if is_known else 0
        before = {
            known: last for known, last in self.earlier.items() if last < branch and known != name
        }
        return Identity(earlier=before | {name: global_step})


def read_identity(run_dir: Path) -> Identity | None:
    """Return the identity of a run; None if it has none yet. Raises: UserError: it is damaged."""
    path = run_dir / IDENTITY
    try:
        return Identity.model_validate_json(read_regular_file(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "damaged"
        raise UserError(
            f"{path}: cannot be read ({reason}); restore it, or remove it and name a checkpoint",
            status_of_place(error),
        ) from None


def write_identity(run_dir: Path, identity: Identity) -> None:
    with writing_to(run_dir):
        write_atomically(run_dir / IDENTITY, identity.model_dump_json() + "\n", durable=True)
