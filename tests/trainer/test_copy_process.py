"""One update of a second copy, killed at every step."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from basics import verified_copy
from basics.checkpoint_names import linked_name, named_as_checkpoints
from basics.failpoints import VARIABLE
from basics.manifest import find_damage
from checkpointing import Validation, add_validation, list_checkpoints, renew_links
from tests.support import odd_files
from tests.support.checkpoints import save
from tests.support.thorough import thorough_but
from tests.support.workplace import PROJECT_DIR
from trainer import copy_process
from trainer.copy_process import OWN, Copy, Job, read_own

PLACES = ["copy.start", "copy.own", "copy.set-aside", "copy.records", "copy.file:hit=2",
          "copy.verify", "copy.manifest", "copy.rename", "copy.links", "copy.late",
          "copy.late-manifest", "copy.prune"]
ON_ODD_FILES = ["copy.set-aside", "copy.file:hit=2", "copy.rename", "copy.late-manifest",
                "copy.prune", "move.remove"]


class Scene:
    """A run directory and its second copy, with ways to bring that up to date."""

    def __init__(self, root: Path) -> None:
        self.run_dir, self.copy_dir = root / "runs" / "tiny", root / "copies" / "tiny"
        self.source, self.target = self.run_dir / "checkpoints", self.copy_dir / "checkpoints"
        self.run_dir.mkdir(parents=True)
        for name in ("model.json", "train.json", "summary.json", "loss-chart.png"):
            (self.run_dir / name).write_text(name)
        (self.run_dir / "metrics.jsonl").write_text('{"global_step": 1}\n')

    def job(self, **options: int) -> Job:
        return Job(str(self.run_dir), str(self.copy_dir), **options)

    def update(self, **options: int) -> str:
        return Copy(self.job(**options)).update()

    def update_in_process(self, fault: str = "", **options: int) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "tests.support.odd_files", "trainer.copy_process",
             self.job(**options).text(), str(os.getpid())],
            cwd=PROJECT_DIR, env=os.environ | {VARIABLE: fault}, capture_output=True, text=True,
            timeout=60)

    def assert_whole(self) -> None:
        for path in named_as_checkpoints(self.target):
            assert find_damage(path, thoroughly=True) == ""
        assert len(list_checkpoints(self.target)) == len(named_as_checkpoints(self.target))

    def assert_equal(self) -> None:
        self.assert_whole()
        assert contents(self.source) == contents(self.target)
        for name in ("model.json", "metrics.jsonl", "summary.json", "loss-chart.png"):
            assert (self.run_dir / name).read_text() == (self.copy_dir / name).read_text()
        for link in ("latest", "best"):
            assert linked_name(self.source / link) == linked_name(self.target / link) != ""


def contents(checkpoints_dir: Path) -> dict[str, bytes]:
    assert not list(checkpoints_dir.glob(".partial*"))
    return {f"{path.name}/{file.name}": file.read_bytes()
            for path in named_as_checkpoints(checkpoints_dir) for file in path.iterdir()}


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


@pytest.fixture
def odd(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of the copy, on a file system that lacks calls."""
    place = scene.copy_dir.parent
    place.mkdir()
    monkeypatch.setenv(odd_files.VARIABLE, str(place))
    for patch in odd_files.patches(place):
        monkeypatch.setattr(*patch)
    return place


def remove(scene: Scene, *steps: int) -> None:
    for found in list_checkpoints(scene.source):
        if found.meta.global_step in steps:
            shutil.rmtree(found.path)


def assert_a_kill_is_harmless(scene: Scene, place: str) -> None:
    """Kill an update that copies, adds a validation, prunes and sets aside; then complete it."""
    for step, loss in ((1, 3.0), (2, 2.0), (9, 1.0)):
        save(scene.source, step, loss)
    assert scene.update() == ""
    scene.assert_equal()
    remove(scene, 1, 9)
    add_validation(list_checkpoints(scene.source)[0], Validation(loss=0.5))
    save(scene.source, 3, 4.0)
    (scene.run_dir / "metrics.jsonl").write_text('{"global_step": 1}\n{"global_step": 3}\n')
    point, _, condition = place.partition(":")
    fault = ":".join(filter(None, (point, "kill", condition)))
    killed = scene.update_in_process(fault, keep=2, from_step=3)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    scene.assert_whole()
    assert scene.update(keep=2, from_step=3) == ""
    scene.assert_equal()
    aside = {path.name for path in scene.copy_dir.glob("set-aside/*/checkpoints/*")
             if not find_damage(path, thoroughly=True)}
    assert {name.rpartition("-")[2] for name in aside} == {"9"}


@pytest.mark.parametrize("place", PLACES)
def test_a_kill_at_any_step_leaves_whole_checkpoints(scene: Scene, place: str) -> None:
    assert_a_kill_is_harmless(scene, place)


@pytest.mark.parametrize("place", thorough_but(["copy.rename", "copy.prune"], ON_ODD_FILES))
def test_a_kill_at_any_step_on_a_file_system_without_renames(
    scene: Scene, odd: Path, place: str
) -> None:
    assert_a_kill_is_harmless(scene, place)
    assert not (scene.target / "latest").is_symlink()


def test_nothing_is_removed_that_was_not_copied(scene: Scene) -> None:
    other = save(scene.target, 0, 9.0).path
    (scene.target / ".partial-20260101Z000000-iteration-5").mkdir()
    save(scene.source, 1, 1.0)
    assert scene.update(keep=1) == ""
    remove(scene, 1)
    save(scene.source, 2, 0.5)
    assert scene.update(keep=1) == ""
    assert [path.name.rpartition("-")[2] for path in named_as_checkpoints(scene.target)] == [
        "0", "2"]
    assert not find_damage(other, thoroughly=True)
    assert (scene.target / ".partial-20260101Z000000-iteration-5").is_dir()


def test_without_a_record_of_what_was_copied_nothing_is_removed(scene: Scene) -> None:
    save(scene.source, 1, 1.0)
    scene.update(keep=1)
    (scene.copy_dir / OWN).write_text('{"checkpoints": 3')
    remove(scene, 1)
    save(scene.source, 2, 0.5)
    assert scene.update(keep=1) == ""
    assert len(named_as_checkpoints(scene.target)) == 2


def test_what_reads_back_different_does_not_count(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save(scene.source, 1)

    def change(path: Path) -> None:
        if path.name == "optimizer.safetensors":
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)

    with monkeypatch.context() as broken:
        broken.setattr(verified_copy, "_flush", change)
        problem = scene.update()
    assert problem == (f"{saved.name}: reads back different: optimizer.safetensors has changed"
                       " since it was written")
    assert not named_as_checkpoints(scene.target) and not list(scene.target.glob(".partial*"))
    assert scene.update() == ""
    scene.assert_equal()


def test_a_checkpoint_that_is_pruned_while_it_is_copied_is_copied_whole(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save(scene.source, 1)
    genuine = shutil.copyfileobj

    def prune(source: object, *arguments: object) -> None:
        if "checkpoints" in str(getattr(arguments[0], "name", "")):
            shutil.rmtree(saved.path, ignore_errors=True)
        genuine(source, *arguments)

    monkeypatch.setattr(verified_copy.shutil, "copyfileobj", prune)
    assert scene.update() == ""
    assert not saved.path.exists()
    (copied,) = named_as_checkpoints(scene.target)
    assert find_damage(copied, thoroughly=True) == ""


def test_a_damaged_copy_is_made_anew_and_a_damaged_checkpoint_is_not_copied(scene: Scene) -> None:
    first, second = save(scene.source, 1), save(scene.source, 2)
    scene.update()
    (scene.target / first.name / "optimizer.safetensors").write_bytes(b"short")
    (second.path / "model.safetensors").unlink()
    shutil.rmtree(scene.target / second.name)
    assert scene.update() == ""
    assert [path.name for path in named_as_checkpoints(scene.target)] == [first.name]
    scene.assert_whole()


def test_another_checkpoint_of_that_name_is_left_alone(scene: Scene) -> None:
    saved = save(scene.source, 1)
    scene.update()
    shutil.rmtree(saved.path)
    changed = save(scene.source, 2)
    changed.path.rename(saved.path)
    renew_links(scene.source)
    before = (scene.target / saved.name / "manifest.json").read_text()
    assert scene.update() == f"{saved.name}: is another checkpoint of that name"
    assert (scene.target / saved.name / "manifest.json").read_text() == before


def test_room_is_made_before_anything_is_copied(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step, loss in ((1, 3.0), (2, 2.0), (3, 1.0)):
        save(scene.source, step, loss)
    assert scene.update(keep=2) == ""
    remove(scene, 1, 2)
    save(scene.source, 4, 5.0)

    def refuse(source: Path, _: Path) -> None:
        assert [path.name.rpartition("-")[2] for path in named_as_checkpoints(scene.target)] == [
            "3"]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(copy_process, "copy_checkpoint", refuse)
    assert "No space left" in scene.update(keep=2)
    monkeypatch.undo()
    assert scene.update(keep=2) == ""
    scene.assert_equal()


def test_the_best_checkpoint_that_the_run_has_lost_stays(scene: Scene) -> None:
    for step, loss in ((1, 1.0), (2, 3.0)):
        save(scene.source, step, loss)
    assert scene.update(keep=1) == ""
    remove(scene, 1)
    renew_links(scene.source)
    for step in (3, 4):
        save(scene.source, step, 2.0)
        remove(scene, step - 1)
        assert scene.update(keep=1) == ""
    assert [path.name.rpartition("-")[2] for path in named_as_checkpoints(scene.target)] == [
        "1", "4"]


def test_a_checkpoint_that_cannot_be_read_at_this_moment_is_not_removed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save(scene.source, step, 1.0)
    assert scene.update(keep=2) == ""
    remove(scene, 1, 2)
    save(scene.source, 3, 1.0)
    monkeypatch.setattr(copy_process, "find_damage", lambda path, **_: "cannot be read" if (
        path.parent == scene.target) else "")
    scene.update(keep=2)
    assert len(named_as_checkpoints(scene.target)) == 3


def test_records_that_cannot_be_copied_stop_nothing_else(scene: Scene, tmp_path: Path) -> None:
    (scene.run_dir / "a-chart.png").symlink_to(tmp_path)
    (scene.run_dir / "samples.jsonl").write_bytes(b"")
    os.truncate(scene.run_dir / "samples.jsonl", copy_process.MAX_RECORD_BYTES + 1)
    save(scene.source, 1)
    problem = scene.update()
    assert "samples.jsonl: File too large; a-chart.png: " in problem
    (scene.run_dir / "samples.jsonl").unlink()
    scene.assert_equal()


def test_what_the_run_has_left_is_set_aside_before_anything_is_written(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        save(scene.source, step)
    assert scene.update() == ""
    remove(scene, 2, 3)
    moved = []
    genuine = copy_process.move_directory
    monkeypatch.setattr(copy_process, "move_directory", lambda path, target: (
        moved.append(path.name.rpartition("-")[2]), genuine(path, target)))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(copy_process, "write_atomically", refuse)
    (scene.copy_dir / OWN).unlink()
    with pytest.raises(OSError, match="No space left"):
        scene.update(from_step=2)
    assert moved == ["3", "2"] and len(named_as_checkpoints(scene.target)) == 1


def test_a_list_of_copies_whose_replacement_was_cut_off_is_recovered(scene: Scene) -> None:
    save(scene.source, 1)
    assert scene.update() == ""
    text = (scene.copy_dir / OWN).read_text()
    (scene.copy_dir / f".{OWN}.partial").write_text(text)
    (scene.copy_dir / OWN).write_text(text[:9])
    assert read_own(scene.copy_dir).whole == [named_as_checkpoints(scene.source)[0].name]


def test_nothing_is_copied_through_a_link(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (scene.run_dir / "samples.jsonl").symlink_to(tmp_path / "secret")
    save(scene.source, 1)
    assert scene.update_in_process().returncode == 1
    assert not (scene.copy_dir / "samples.jsonl").exists()
