"""The directory that a dataset or a tokenizer is written to: made beside it, renamed at the end."""

import os
from collections.abc import Set as AbstractSet
from pathlib import Path

from basics.errors import UserError
from basics.files import fsync, put_back, replace_directory


class OutputDir:
    """A directory that a command writes whole or not at all; its files are never mixed with others.

    Args:
        path: may be a link; `self.path` is where it leads.
        made: names of all files that the command writes.
        signs: those without which a directory is not one that the command has written.
        replace: whether an earlier one may be replaced.

    Raises: UserError: there are other files, or without `replace` an earlier one; or it cannot be
        renamed.
    """

    def __init__(
        self, path: Path, *, made: AbstractSet[str], signs: AbstractSet[str], replace: bool
    ) -> None:
        self.path = Path(os.path.realpath(path))  # Path.resolve() raises on loops of links
        self._made, self._signs, self._replace = made, signs, replace
        if self.path.is_mount() or self.path == Path.cwd():
            raise UserError(
                f"{self.path}: is a mount point or the current directory; name a directory in it"
            )
        put_back(self.path)
        self._check()

    def _check(self) -> None:
        if not self.path.exists():
            return
        found = list(self.path.iterdir()) if self.path.is_dir() else None
        if found == []:
            return
        names = {path.name for path in found or ()}
        others = [
            path.name
            for path in found or ()
            if path.name not in self._made or path.is_symlink() or not path.is_file()
        ]
        if others or not self._signs <= names:
            other = f" ({min(others)})" if others else ""
            raise UserError(
                f"{self.path}: is not empty{other}; name another output, or delete it yourself"
            )
        if not self._replace:
            raise UserError(
                f"{self.path}: is not empty; name another output, or replace what is there with"
                " --replace"
            )

    def put(self, new_dir: Path) -> None:
        """Rename a finished directory to this one. Raises: UserError, OSError: there are files."""
        for path in (*new_dir.iterdir(), new_dir):
            fsync(path)
        if self._replace:
            self._check()  # again: writing may have taken hours
            replace_directory(new_dir, self.path)
        else:
            new_dir.rename(self.path)  # replaces an empty directory, never files
            fsync(self.path.parent)
