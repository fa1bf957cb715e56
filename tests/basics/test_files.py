"""Files are replaced in one step, and nothing is read or written through a link."""


import pytest

from basics import files
from basics.files import append_whole, read_regular_file, replacing, write_atomically
from tests.support import odd_files


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_file_is_replaced_and_an_error_leaves_the_old_one(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and names(tmp_path) == ["a.json"]
    with replacing(path, durable=True) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and names(tmp_path) == ["a.json"]


def test_a_link_at_the_temporary_name_is_not_followed(tmp_path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / ".a.json.partial").symlink_to(tmp_path / "victim")
    write_atomically(tmp_path / "a.json", "näu")
    assert (tmp_path / "victim").read_text() == "precious"
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == "näu"
    assert names(tmp_path) == ["a.json", "victim"]


def test_a_link_is_not_read_and_a_large_file_neither(tmp_path):
    append_whole(tmp_path / "a", "12")
    append_whole(tmp_path / "a", "3")
    assert read_regular_file(tmp_path / "a") == "123"
    with pytest.raises(OSError, match="3 bytes"):
        read_regular_file(tmp_path / "a", max_bytes=2)
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match="symbolic links"):
        read_regular_file(tmp_path / "b")


def test_fsync_of_a_directory_may_be_refused(tmp_path, monkeypatch):
    for patch in odd_files.patches(tmp_path):
        monkeypatch.setattr(*patch)
    files.fsync(tmp_path)
    with pytest.raises(FileNotFoundError):
        files.fsync(tmp_path / "a")
