"""Untrusted files in a run directory: refused with one error line, or skipped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from basics.errors import UserError
from basics.failpoints import MARKS, VARIABLE
from basics.files import write_atomically
from checkpointing import clean_up
from processes.run_lock import LockedError, lock_run, release_run
from processes.signals import DEADLINES
from reporting.charts import draw_charts
from reporting.metrics_file import MAX_RECORDS, check_records, read_metrics
from tests.support.checkpoints import save
from tests.support.in_process import contents, refused
from tests.support.runs import read_only, wait_for
from tests.support.workplace import Workplace, read_lines, start_forked, succeeded

RECORDS = ["metrics.jsonl", "samples.jsonl", "evaluations.jsonl", "summary.json", "heartbeat.json"]
KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo, "directory": Path.mkdir,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "a link to a file": lambda path: path.symlink_to(path.with_name("train.json")),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
}
NO_RECORDS = [
    b'{"global_step": 0, "seconds": 1e999}', b'{"global_step": 0, "usd": 1e999}',
    b'{"global_step": 0, "seconds": 1' + b"0" * 400 + b"}", b'{"global_step": 0, "seconds": -5}',
    b"", b"7", b"[]", b"NaN", b"\xff\xfe", b'{"a":' * 10**5, b'{"global_step": 1e99}',
    b'{"global_step": 0, "skipped_steps": "y"}', b'{"global_step": 0, "skipped_steps": null}',
    b'{"global_step": 0, "train_loss": "x"}', b'{"global_step": 0, "train_loss": [1]}',
    b'{"global_step": 0, "train_loss": 1e999}', b'{"global_step": -3, "train_loss": 2.0}',
    b'{"global_step": true}', b'{"global_step": 1' + b"0" * 30 + b"}",
    b'{"global_step": 0, "a": [' + b"0," * 2**18 + b"0]}",
]


def place_in(workplace: Workplace, name: str) -> Path:
    return workplace.runs_dir / "tiny" / name


@pytest.mark.parametrize(("file", "kind"), [
    *((file, "pipe") for file in RECORDS), *(("metrics.jsonl", kind) for kind in KINDS)])
def test_records_that_are_no_plain_files_are_refused(tiny: Workplace, file: str, kind: str) -> None:
    KINDS[kind](place_in(tiny, file))
    line = refused(tiny, "tiny")
    assert f"{file}: cannot be read (" in line and line.endswith(", or move it away\n")


@pytest.mark.parametrize("name", ["checkpoints", "set-aside"])
def test_what_is_no_directory_is_refused(tiny: Workplace, name: str) -> None:
    path = place_in(tiny, name)
    path.write_text("x")
    assert f"{name}: is not a directory; move it away" in refused(tiny, "tiny")
    path.unlink()
    (tiny.root / "victim").mkdir()
    path.symlink_to(tiny.root / "victim")
    assert f"{name}: leads out of" in refused(tiny, "tiny")


def test_records_that_are_too_large_are_refused(tmp_path: Path) -> None:
    for content in (b"{}\n" * (MAX_RECORDS + 1), b"\x0b" * (2**27 + 1)):
        (tmp_path / "metrics.jsonl").write_bytes(content)
        with pytest.raises(UserError, match=r"metrics.jsonl: .* move it away"):
            check_records(tmp_path / "metrics.jsonl")


def test_records_with_invalid_numbers_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for line in NO_RECORDS:
        path.write_bytes(line + b'\n{"global_step": 1, "train_loss": null}\n')
        assert read_metrics(path) == [{"global_step": 1, "train_loss": None}], line[:40]


def test_a_run_trains_with_hostile_numbers_in_its_records(tiny: Workplace) -> None:
    place_in(tiny, "metrics.jsonl").write_bytes(b"\n".join(NO_RECORDS))
    place_in(tiny, "summary.json").write_text('{"seconds": {"training": 1e999}, "usd": 1e999}')
    succeeded(tiny.ddp_train("tiny", "--nproc-per-node", "1", "--max-steps", "1"))
    assert [record["global_step"] for record in read_lines(place_in(tiny, "metrics.jsonl"))] == [0]


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    victim, run_dir = tmp_path / "victim", tmp_path / "run"
    victim.write_text("precious")
    run_dir.mkdir()
    for name in (".metrics.jsonl.partial", ".loss-chart.png.partial", "a.json",
                 ".grad-norm-chart.png.partial", ".learning-rate-chart.png.partial"):
        (run_dir / name).symlink_to(victim)
    write_atomically(run_dir / "metrics.jsonl", "new")
    names = ("train_loss", "train_loss_min", "train_loss_max", "grad_norm", "grad_norm_max",
             "learning_rate")
    draw_charts(run_dir, [{"global_step": 1} | dict.fromkeys(names, 1.0)])
    assert victim.read_text() == "precious"
    assert (run_dir / "metrics.jsonl").read_text() == "new"
    assert (run_dir / "loss-chart.png").read_bytes()[:4] == b"\x89PNG"
    save(run_dir / "checkpoints", 3)
    os.mkfifo(run_dir / "b.json")
    assert [path.name for path in clean_up(run_dir, from_step=0).glob("*.json*")] == [
        "metrics.jsonl"]


def test_a_read_only_checkpoints_directory_is_refused(tiny: Workplace) -> None:
    place_in(tiny, "checkpoints").mkdir()
    before = contents(tiny.root)
    with read_only(place_in(tiny, "checkpoints")):
        assert "tiny/checkpoints: cannot be written to (" in refused(tiny, "tiny")
    assert contents(tiny.root) == before


def test_the_error_of_a_locked_run_names_no_dead_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heartbeat of a killed process is not that of the process that holds the lock."""
    (tmp_path / "heartbeat.json").write_text(json.dumps(
        {"pid": 2**22 + 1, "host": os.uname().nodename, "time": "2020-01-01T00:00:00Z"}))
    lock_run(tmp_path)
    monkeypatch.setenv(DEADLINES, '{"orphans": 0}')
    with pytest.raises(LockedError, match="just begun") as caught:
        lock_run(tmp_path)
    release_run()
    assert str(2**22 + 1) not in str(caught.value) and "2020" not in str(caught.value)
    lock_run(tmp_path)
    release_run()


def test_the_process_that_starts_torchrun_holds_the_lock_while_it_prepares(
    tiny: Workplace,
) -> None:
    """Without torchrun the first process downloads the data: a second one must not do it too."""
    marks = tiny.root / "marks"
    first, _ = start_forked("ddp_train.py", tiny.arguments("tiny", "--nproc-per-node", "1"),
                            environment={VARIABLE: "prepare:hang", MARKS: str(marks)})
    try:
        wait_for(marks)  # it prepares
        assert f": process {first.pid} on " in refused(tiny, "tiny")
    finally:
        first.kill()
        first.join()
    succeeded(tiny.ddp_train("tiny", "--nproc-per-node", "1", "--max-steps", "1"))
