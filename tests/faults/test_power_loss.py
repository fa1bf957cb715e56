"""What a disk may do: a model of power loss, and whole runs on a file system that lacks calls.

Data without fsync may be gone after a power loss, although the program could read it. The file
operations of two saves are recorded. Then the power fails after each of them: of the names made or
changed since a directory was last flushed some first part is on the disk, and a file that was not
flushed is whole, cut short or empty.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import safetensors.torch

import checkpointing
from basics import checkpoint_files, files
from basics.checkpoint_files import directory_of, find_damage, named_as_checkpoints
from basics.failpoints import VARIABLE
from checkpointing import (
    SnapshotBuffers,
    Validation,
    add_validation,
    clean_up,
    list_checkpoints,
    newest_whole,
    renew_links,
    save_checkpoint,
)
from reporting import metrics_file
from reporting.metrics_file import remove_metrics_from
from tests.support import stand_ins
from tests.support.models import describe, state
from tests.support.runs import (
    SETTINGS,
    metrics_of,
    summary_of,
    thorough_but,
    weights_of,
    with_deadlines,
)
from tests.support.workplace import succeeded
from trainer.background_saver import BackgroundSaver


@dataclass
class Recorder:
    """Records every file operation below a directory: its kind, path and content."""

    root: Path
    operations: list[tuple[str, str, object]] = field(default_factory=list)

    def note(self, kind, path, value=None):
        self.operations.append((kind, str(Path(path).relative_to(self.root)), value))

    def attach(self, monkeypatch):
        def watch(owner, name, kind, place):
            genuine = getattr(owner, name)

            def watched(*arguments, **options):
                result = genuine(*arguments, **options)
                path, value = Path(arguments[place]), None
                if kind == "write":
                    value = path.read_bytes()
                elif kind == "link":
                    value = str(arguments[1])
                elif kind == "move":
                    value = str(Path(arguments[1]).relative_to(self.root))
                self.note(kind, path, value)
                return result

            monkeypatch.setattr(owner, name, watched)

        watch(safetensors.torch, "save_file", "write", 1)
        watch(Path, "write_text", "write", 0)
        watch(Path, "mkdir", "make", 0)
        watch(Path, "rename", "move", 0)
        watch(Path, "replace", "move", 0)
        watch(Path, "symlink_to", "link", 0)
        for module in (checkpointing, files, metrics_file):
            watch(module, "fsync", "flush", 0)
        write_atomically = files.write_atomically

        def watched_write(path, text, **options):
            self.note("write", files.partial_file(path), text.encode())
            write_atomically(path, text, **options)

        for module in (checkpointing, checkpoint_files):
            monkeypatch.setattr(module, "write_atomically", watched_write)


def after_power_loss(operations, root, rng):
    """Create a state that a disk may have after these operations."""
    flushed = {place: at for at, (kind, place, _) in enumerate(operations) if kind == "flush"}
    lost_from: dict[str, int] = {}  # by directory, the first change of names that is gone
    for at, (kind, place, _) in enumerate(operations):
        directory = str(Path(place).parent)
        if kind != "flush" and at > flushed.get(directory, -1):  # it makes a name, or changes one
            if directory not in lost_from and rng.random() < 0.3:
                lost_from[directory] = at
    for at, (kind, place, value) in enumerate(operations):
        gone = at >= lost_from.get(str(Path(place).parent), len(operations))
        target = root / place
        if kind == "make" and not gone:
            target.mkdir(parents=True, exist_ok=True)
        elif kind == "write" and not gone and target.parent.is_dir():
            is_safe = flushed.get(place, -1) > at
            content = value if is_safe else rng.choice([value, b"", value[: len(value) // 2]])
            target.write_bytes(content)
        elif kind == "link" and not gone:
            target.unlink(missing_ok=True)
            target.symlink_to(value)
        elif kind == "move" and not gone and (target.exists() or target.is_symlink()):
            target.replace(root / value)


def test_after_a_power_loss_the_newest_whole_checkpoint_is_one_that_was_saved(
    tmp_path, monkeypatch
):
    checkpoints_dir = tmp_path / "real" / "checkpoints"
    checkpoints_dir.parent.mkdir()
    recorder = Recorder(checkpoints_dir.parent)
    recorder.attach(monkeypatch)
    acknowledged, validated = [], []
    for step in (1, 2):
        snapshot = SnapshotBuffers().take(state(step))
        checkpoint = save_checkpoint(checkpoints_dir, snapshot, describe(step, None))
        acknowledged.append(len(recorder.operations))
        add_validation(checkpoint, Validation(loss=1.0))
        validated.append(len(recorder.operations))
        renew_links(checkpoints_dir)
    monkeypatch.undo()
    rng = random.Random(0)
    for number in range(1, len(recorder.operations) + 1):
        for attempt in range(12):
            root = tmp_path / f"{number}-{attempt}"
            root.mkdir()
            after_power_loss(recorder.operations[:number], root, rng)
            found, damaged = newest_whole(root / "checkpoints")
            assert not damaged
            step = found.meta.global_step if found else 0
            reached = sum(at <= number for at in acknowledged)
            assert step >= reached, (number, recorder.operations[number - 1][:2])
            if sum(at <= number for at in validated) == step > 0:
                assert found.loss == 1.0
            clean_up(root, from_step=step + 1)  # what the next start does


def test_after_a_power_loss_a_run_has_the_old_records_or_the_new_ones(tmp_path, monkeypatch):
    run_dir = tmp_path / "real"
    run_dir.mkdir()
    lines = "".join(f'{{"global_step": {step}}}\n' for step in range(9))
    recorder = Recorder(run_dir)
    (run_dir / "metrics.jsonl").write_text(lines)
    recorder.attach(monkeypatch)
    remove_metrics_from(run_dir / "metrics.jsonl", 5)
    monkeypatch.undo()
    kept = (run_dir / "metrics.jsonl").read_text()
    partial = ".metrics.jsonl.partial"  # its descriptor is not watched, only what comes after
    first = [
        ("make", ".", None),
        ("write", "metrics.jsonl", lines.encode()),
        ("flush", "metrics.jsonl", None),
        ("flush", ".", None),
        ("write", partial, kept.encode()),
    ]
    assert recorder.operations == [
        ("flush", partial, None),
        ("move", partial, "metrics.jsonl"),
        ("flush", ".", None),
    ]
    operations, rng = first + recorder.operations, random.Random(0)
    for number in range(len(first), len(operations) + 1):
        for attempt in range(12):
            root = tmp_path / f"{number}-{attempt}"
            root.mkdir()
            after_power_loss(operations[:number], root, rng)
            expected = [kept] if number == len(operations) else [lines, kept]
            assert (root / "metrics.jsonl").read_text() in expected


def test_metrics_are_durable_before_the_checkpoint(tmp_path, monkeypatch):
    """A resumed run has no other record of the steps before it."""
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    recorder, writer = Recorder(tmp_path), BackgroundSaver(tmp_path / "checkpoints")
    recorder.attach(monkeypatch)
    writer.save(state(1), describe(1))
    writer.wait()
    assert recorder.operations[0] == ("flush", "metrics.jsonl", None)
    assert ("flush", ".", None) in recorder.operations  # `checkpoints` has been made there


@pytest.mark.parametrize(
    "fault",
    thorough_but(
        ["save.manifest:kill:rank=0:hit=1"],
        [
            f"{place}:kill:rank=0:hit={hit}"
            for place, hit in (
                ("save.manifest", 1),
                ("save.remove", 1),
                ("save.validation", 2),
                ("save.links", 2),
                ("save.prune", 1),
                ("record", 1),
            )
        ],
    ),
)
def test_a_run_without_links_locks_or_fsync_that_is_killed_resumes(workplace, undisturbed, fault):
    workplace.add_dataset()
    run_dir = workplace.add_run(train=SETTINGS | {"keep_checkpoints": 1})
    environment = {stand_ins.ODD_FILES: str(workplace.runs_dir)} | with_deadlines(heartbeat=0.5)
    assert workplace.torchrun(2, "tiny", **environment, **{VARIABLE: fault}).returncode
    for found in list_checkpoints(run_dir / "checkpoints"):
        assert find_damage(found.path, thoroughly=True) == ""
    result = succeeded(workplace.torchrun(2, "tiny", **environment))
    assert "its file system has no locks" in result.stdout
    latest = directory_of(run_dir / "checkpoints/latest")
    assert latest.name != "latest" and (run_dir / "checkpoints/latest").is_file()
    assert weights_of(run_dir) == weights_of(undisturbed)
    assert metrics_of(run_dir) == metrics_of(undisturbed)
    assert summary_of(run_dir)["status"] == "finished"
    assert not named_as_checkpoints(run_dir / "checkpoints", partial=True)
    assert len(list_checkpoints(run_dir / "checkpoints")) <= 2  # one may have been resumed from
    result = succeeded(workplace.ddp_train("tiny", "--nproc-per-node", "2"))  # on a usual one
    assert "tiny is complete" in result.stdout
