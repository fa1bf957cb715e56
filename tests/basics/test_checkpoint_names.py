"""Checkpoints on a file system without links and renames."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import safetensors.torch
from safetensors import SafetensorError

from basics.checkpoint_names import directory_of, named_as_checkpoints
from basics.manifest import find_damage
from checkpointing import (
    Validation,
    add_validation,
    clean_up,
    find_checkpoint,
    list_checkpoints,
    load_checkpoint,
    prune,
    renew_links,
)
from tests.support import odd_files
from tests.support.checkpoints import save, state

NAME = "20260101Z000000-iteration-3"


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory whose file system lacks calls."""
    for patch in odd_files.patches(tmp_path):
        monkeypatch.setattr(*patch)
    return tmp_path


def test_checkpoints_are_saved_linked_pruned_and_set_aside(odd: Path) -> None:
    checkpoints_dir = odd / "checkpoints"
    saved = [save(checkpoints_dir, step, loss) for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0))]
    assert [found.path for found in list_checkpoints(checkpoints_dir)] == [
        one.path for one in saved]
    for link, wanted in (("latest", saved[2]), ("best", saved[1])):
        path = checkpoints_dir / link
        assert not path.is_symlink() and path.read_text() == f"{wanted.name}\n"
        assert directory_of(path) == wanted.path
        assert find_checkpoint(checkpoints_dir, link).name == wanted.name
    validated = add_validation(saved[2], Validation(loss=0.5))
    assert not find_damage(validated.path, thoroughly=True)
    renew_links(checkpoints_dir)
    assert directory_of(checkpoints_dir / "best") == saved[2].path
    prune(checkpoints_dir, keep=1, protected=[])
    assert [found.name for found in list_checkpoints(checkpoints_dir)] == [saved[2].name]
    aside_dir = clean_up(odd, from_step=0)
    assert not list(checkpoints_dir.iterdir())
    assert not find_damage(aside_dir / "checkpoints" / saved[2].name, thoroughly=True)


def test_a_write_that_fails_leaves_nothing(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDP_TRAIN_FAILPOINT", "save.manifest:full")
    with pytest.raises(OSError, match="No space"):
        save(odd, 1)
    assert not list(odd.iterdir())


def test_a_manifest_that_a_kill_cut_off_is_read_from_its_copy(odd: Path) -> None:
    checkpoint = save(odd, 1)
    manifest = checkpoint.path / "manifest.json"
    manifest.with_name(".manifest.json.partial").write_bytes(manifest.read_bytes())
    os.truncate(manifest, 9)
    assert find_checkpoint(odd, "latest") == checkpoint


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


@pytest.mark.parametrize("content", [b"", b"../../etc\n", b"x", b"\0" * 200])
def test_a_plain_file_that_names_no_checkpoint_is_replaced(tmp_path: Path, content: bytes) -> None:
    link = tmp_path / "latest"
    link.write_bytes(content)
    assert directory_of(link) == link
    saved = save(tmp_path, 1)
    assert link.resolve() == saved.path


def test_only_directories_with_a_manifest_are_checkpoints(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    (tmp_path / f"{NAME}-1").symlink_to(NAME)
    (tmp_path / "mine-iteration-3").mkdir()
    assert not named_as_checkpoints(tmp_path)
    assert [path.name for path in named_as_checkpoints(tmp_path, partial=True)] == [NAME]
    (tmp_path / NAME / "manifest.json").touch()
    assert [path.name for path in named_as_checkpoints(tmp_path)] == [NAME]
