"""Untrusted files in a run directory: refused with one error line, or skipped."""


import pytest

from basics.errors import UserError
from basics.failpoints import MARKS, VARIABLE
from reporting.metrics_file import MAX_RECORDS_BYTES, read_metrics
from tests.support.in_process import contents, refused
from tests.support.runs import read_only, wait_for
from tests.support.workplace import start_forked, succeeded

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


def place_in(workplace, name):
    return workplace.runs_dir / "tiny" / name


def test_what_is_of_another_kind_is_refused(tiny):
    for name in ("metrics.jsonl", "summary.json", "heartbeat.json"):
        place_in(tiny, name).mkdir()
        line = refused(tiny, "tiny")
        assert f"{name}: cannot be read (" in line and line.endswith(", or move it away\n")
        place_in(tiny, name).rmdir()
    for name in ("checkpoints", "set-aside"):
        place_in(tiny, name).write_text("x")
        assert f"{name}: is not a directory; move it away" in refused(tiny, "tiny")
        place_in(tiny, name).unlink()


def test_records_that_are_too_large_are_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b"\x0b" * (MAX_RECORDS_BYTES + 1))
    with pytest.raises(UserError, match=r"metrics.jsonl: .* move it away"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_records_with_invalid_numbers_are_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for line in NO_RECORDS:
        path.write_bytes(line + b'\n{"global_step": 1, "train_loss": null}\n')
        assert read_metrics(path) == [{"global_step": 1, "train_loss": None}], line[:40]


def test_a_read_only_checkpoints_directory_is_refused(tiny):
    place_in(tiny, "checkpoints").mkdir()
    before = contents(tiny.root)
    with read_only(place_in(tiny, "checkpoints")):
        assert "tiny/checkpoints: cannot be written to (" in refused(tiny, "tiny")
    assert contents(tiny.root) == before


def test_the_process_that_starts_torchrun_holds_the_lock_while_it_prepares(tiny):
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
