from __future__ import annotations

import os
from pathlib import Path

import pytest

from basics import directory_lock
from basics.directory_lock import LOCK_NAME, locked
from basics.errors import UserError


def test_a_temporary_directory_goes_with_its_lock(tmp_path: Path) -> None:
    directory = tmp_path / "a/b"
    with locked(directory, busy="busy", is_temporary=True):
        (directory / LOCK_NAME).touch()  # as where directories cannot be locked
        with pytest.raises(UserError, match="busy"), locked(directory, busy="busy"):
            pass
    assert not directory.exists()
    with locked(directory, busy="busy", is_temporary=True):
        (directory / "state").touch()
    with locked(directory, busy="busy"):
        (directory / "state").unlink()
    assert directory.is_dir()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_directory_that_is_removed_while_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """A lock on a removed directory would keep nobody out."""
    directory, lock_directory, removed = tmp_path / "state", directory_lock.lock_directory, []

    def lock_late(path: Path) -> int:
        if not removed and moment == "before":
            removed.append(path.rmdir())
        descriptor = lock_directory(path)
        if not removed:
            removed.append(path.rmdir())
        return descriptor

    monkeypatch.setattr(directory_lock, "lock_directory", lock_late)
    with locked(directory, busy="busy"):
        assert removed and directory.is_dir()
        with pytest.raises(BlockingIOError):
            os.close(lock_directory(directory))
