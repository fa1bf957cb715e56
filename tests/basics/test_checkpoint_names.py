"""Checkpoints on a file system without links and renames."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
from safetensors import SafetensorError

from basics import checkpoint_names
from basics.checkpoint_names import (
    directory_of,
    is_link,
    linked_name,
    named_as_checkpoints,
    partial_of,
    remove_partial,
    write_directory,
)
from basics.manifest import find_damage
from checkpointing import (
    Validation,
    add_validation,
    find_checkpoint,
    list_checkpoints,
    load_checkpoint,
)
from tests.support import odd_files
from tests.support.checkpoints import save, state
from trainer.checkpoint_cleanup import prune, remove_partial_checkpoints, set_aside

NAME = "20260101Z000000-iteration-3"


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory whose file system lacks calls."""
    for patch in odd_files.patches(tmp_path):
        monkeypatch.setattr(*patch)
    return tmp_path


def test_checkpoints_are_saved_linked_pruned_and_set_aside(
    odd: Path, capsys: pytest.CaptureFixture
) -> None:
    checkpoints_dir = odd / "checkpoints"
    saved = [save(checkpoints_dir, step, loss) for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0))]
    assert capsys.readouterr().out.count("cannot rename directories") == 1
    assert [found.path for found in list_checkpoints(checkpoints_dir)] == [
        one.path for one in saved]
    assert not any(one.remark for one in saved)
    for link, wanted in (("latest", saved[2]), ("best", saved[1])):
        path = checkpoints_dir / link
        assert not path.is_symlink() and path.read_text() == f"{wanted.name}\n"
        assert is_link(path) and directory_of(path) == wanted.path
        assert find_checkpoint(checkpoints_dir, link).name == wanted.name
    validated = add_validation(saved[2], Validation(loss=0.5))
    assert not find_damage(validated.path, thoroughly=True)
    assert linked_name(checkpoints_dir / "best") == saved[2].name
    prune(checkpoints_dir, keep=1, protected=[])
    assert [found.name for found in list_checkpoints(checkpoints_dir)] == [saved[2].name]
    aside_dir = set_aside(odd, from_step=0)
    assert not list(checkpoints_dir.iterdir())
    assert not find_damage(aside_dir / "checkpoints" / saved[2].name, thoroughly=True)


@pytest.mark.parametrize("has_manifest", [False, True])
def test_a_marked_checkpoint_is_no_checkpoint_and_is_removed(
    odd: Path, has_manifest: bool
) -> None:
    whole, killed = save(odd, 1), save(odd, 2)
    partial_of(killed.path).touch()
    if not has_manifest:
        (killed.path / "manifest.json").unlink()
    assert named_as_checkpoints(odd) == [whole.path]
    remove_partial_checkpoints(odd)
    assert not killed.path.exists() and whole.path.exists()
    assert not list(odd.glob(".partial*"))


def test_a_write_that_fails_leaves_nothing(odd: Path) -> None:
    def write(directory: Path) -> None:
        directory.mkdir()
        (directory / "a").write_text("a")
        if directory.name == NAME:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_directory(odd / NAME, write, place="x")
    assert not list(odd.iterdir())


def test_tensors_are_written_where_their_library_needs_calls_that_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(tensors: object, path: Path, metadata: object) -> None:
        (path.parent / ".tmpA1b2").touch()  # as it leaves behind
        raise SafetensorError("Error while serializing: I/O error: not supported (os error 95)")

    monkeypatch.setattr(safetensors.torch, "save_file", refuse)
    saved = save(tmp_path, 1)
    assert find_damage(saved.path, thoroughly=True) == ""
    load_checkpoint(saved, state(2))
    assert not list(saved.path.glob(".tmp*"))


def test_a_rename_that_fails_later_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some mounts rename only directories with few files."""
    assert checkpoint_names.can_rename_directories(tmp_path)
    for patch in odd_files.patches(tmp_path):
        monkeypatch.setattr(*patch)
    save(tmp_path, 1)
    assert len(list_checkpoints(tmp_path)) == 1
    assert not checkpoint_names.can_rename_directories(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir())[1:] == ["best", "latest"]


@pytest.mark.parametrize("content", [b"../../etc\n", b"x", NAME.encode() + b"\n", b"\0" * 200])
def test_a_plain_file_that_names_no_checkpoint_is_no_link(tmp_path: Path, content: bytes) -> None:
    link = tmp_path / "latest"
    link.write_bytes(content)
    assert not is_link(link) and not linked_name(link) and directory_of(link) == link
    (tmp_path / NAME).mkdir()
    assert is_link(link) == (content == NAME.encode() + b"\n")


def test_a_link_that_a_kill_left_empty_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / "latest").touch()
    assert is_link(tmp_path / "latest") and not linked_name(tmp_path / "latest")
    saved = save(tmp_path, 1)
    assert linked_name(tmp_path / "latest") == saved.name


def test_removing_what_is_partial_follows_no_link(tmp_path: Path) -> None:
    victim = tmp_path / NAME
    victim.mkdir()
    (victim / "precious").touch()
    partial_of(victim).symlink_to(victim)
    remove_partial(partial_of(victim))
    assert (victim / "precious").exists() and not partial_of(victim).is_symlink()
