"""Files are replaced in one step, and nothing is read or written through a link."""

from __future__ import annotations

import errno
from pathlib import Path
from unittest.mock import Mock

import pytest

from basics import files
from basics.files import (
    append_whole,
    read_regular_file,
    recover,
    replacing,
    write_atomically,
    write_held,
)
from tests.support import odd_files


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with replacing(path, durable=durable) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and names(tmp_path) == ["a.json"]


def test_an_error_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and names(tmp_path) == ["a.json"]


def test_a_link_at_the_temporary_name_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / ".a.json.partial").symlink_to(tmp_path / "victim")
    write_atomically(tmp_path / "a.json", "näu")
    assert (tmp_path / "victim").read_text() == "precious"
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == "näu"
    assert names(tmp_path) == ["a.json", "victim"]


def test_a_link_is_not_read_and_a_large_file_neither(tmp_path: Path) -> None:
    append_whole(tmp_path / "a", "12")
    append_whole(tmp_path / "a", "3")
    assert read_regular_file(tmp_path / "a") == "123"
    with pytest.raises(OSError, match="3 bytes"):
        read_regular_file(tmp_path / "a", max_bytes=2)
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match="symbolic links"):
        read_regular_file(tmp_path / "b")


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose file system lacks calls."""
    for patch in odd_files.patches(tmp_path):
        monkeypatch.setattr(*patch)
    return tmp_path


def test_a_file_that_cannot_be_appended_to_is_rewritten(odd: Path) -> None:
    append_whole(odd / "a", "1\n")
    append_whole(odd / "a", "2\n", may_wait=True)
    assert (odd / "a").read_text() == "1\n2\n"


def test_a_large_file_is_not_rewritten_at_each_append(
    odd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SMALL_BYTES", 100)
    (odd / "a").write_text("x" * 159 + "\n")
    append_whole(odd / "a", "123\n", may_wait=True)
    append_whole(odd / "a", "456\n", may_wait=True)
    assert (odd / "a").stat().st_size == 160
    append_whole(odd / "a", "78\n", may_wait=True)  # a sixteenth
    assert (odd / "a").read_text().endswith("x\n123\n456\n78\n")
    append_whole(odd / "a", "9\n", may_wait=True)
    assert (odd / "a").read_text().endswith("78\n")
    write_held(odd / "a")
    assert (odd / "a").read_text().endswith("78\n9\n")
    append_whole(odd / "a", "0\n")  # one that may not wait
    assert (odd / "a").read_text().endswith("9\n0\n")


def test_a_failed_rewrite_loses_no_text_that_waits(
    odd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SMALL_BYTES", 0)
    (odd / "a").write_text("x" * 1000)
    append_whole(odd / "a", "1\n", may_wait=True)
    with monkeypatch.context() as full:
        full.setattr(files, "write_atomically", Mock(side_effect=OSError(28, "full")))
        with pytest.raises(OSError, match="full"):
            append_whole(odd / "a", "2\n")
    append_whole(odd / "a", "2\n")
    assert (odd / "a").read_text().endswith("x1\n2\n")


@pytest.mark.parametrize("place", ["before", "while", "after"])
def test_a_kill_loses_neither_the_old_file_nor_the_new_one(
    odd: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    write_atomically(odd / "a", "1\n2\n3\n")
    new = "1\n2\n"  # shorter, as when a run resumes

    def cut_off(source: Path, target: Path) -> None:
        assert source.read_text() == new
        if place != "before":
            target.write_text(new if place == "after" else "1")
        raise KeyboardInterrupt

    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(files.shutil, "copyfile", cut_off)
        write_atomically(odd / "a", new)
    recover(odd / "a")
    assert (odd / "a").read_text() == ("1\n2\n3\n" if place == "before" else new)
    assert [path.name for path in odd.iterdir()] == ["a"]


def test_fsync_of_a_directory_may_be_refused(odd: Path) -> None:
    files.fsync(odd)
    with pytest.raises(FileNotFoundError):
        files.fsync(odd / "a")


def test_too_many_open_files_do_not_change_how_a_file_is_appended_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        with pytest.raises(OSError, match="Too many open files"):
            append_whole(path, "1")
    append_whole(path, "2")
    assert path.read_text() == "2" and path not in files._held
