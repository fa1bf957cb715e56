"""Untrusted files and names: one error line, status 2, no file changed, no code executed."""

import json
import os
import pickle
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

from basics.checkpoint_files import MANIFEST, read_manifest, write_manifest
from basics.errors import UserError
from basics.failpoints import MARKS, VARIABLE
from processes.signals import DEADLINES
from reporting.metrics_file import MAX_RECORDS_BYTES, read_metrics
from run_config import load_run
from tests.support.runs import LONGEST_ERROR, read_only, refused, struck_by
from tests.support.workplace import (
    PROJECT_DIR,
    TINY_TRAIN,
    Workplace,
    read_lines,
    start_forked,
    succeeded,
    write_tokens,
)

MARK = Path("/tmp") / f"hostile-code-was-run-{os.getpid()}"


class RunsCode:
    """A pickle of this runs a command when it is loaded."""

    def __reduce__(self):
        return os.system, (f"touch {MARK}",)


def header(text, tensors=b""):
    """Return a safetensors file."""
    return struct.pack("<Q", len(text)) + text + tensors


def tokens_header(**changes):
    facts = {"dtype": "U16", "shape": [4000], "data_offsets": [0, 8000]} | changes
    return header(json.dumps({"tokens": facts}).encode(), bytes(8000))


TRAIN = json.dumps(TINY_TRAIN).encode()

CONFIG_CONTENTS = {
    "empty": b"",
    "no object": b"[]",
    "cut short": TRAIN[:-5],
    "binary": bytes(range(256)),
    "infinity": TRAIN[:-1] + b', "x": -Infinity}',
    "a key twice": TRAIN[:-1] + b', "dataset": "x"}',
    "deep": b'{"a":' * 10**5,
    "large": b"[" + b"0," * 10**6 + b"0]",
    "control characters": b'{"\\u001b[31m\\n": 1}',
    "a huge exponent": TRAIN.replace(b"0.01", b"1e999"),
}
TOKEN_FILES = {
    "empty": b"",
    "cut short": tokens_header()[:-9],
    "a header longer than the file": struct.pack("<Q", 10**6) + b"{}",
    "a header of 2**63": struct.pack("<Q", 2**63) + b"{}",
    "no JSON": header(b"rubbish!"),
    "deep": header(b'{"a":' * 10**5),
    "no tensors": header(b"{}      "),
    "int32": tokens_header(dtype="I32", shape=[2000]),
    "no dtype": tokens_header(dtype="U17"),
    "2-D": tokens_header(shape=[2, 2000]),
    "0-D": tokens_header(shape=[], data_offsets=[0, 2]),
    "a negative shape": tokens_header(shape=[-4000]),
    "a huge shape": tokens_header(shape=[2**62]),
    "offsets past the end": tokens_header(data_offsets=[0, 10**9]),
    "offsets backwards": tokens_header(data_offsets=[8000, 0]),
    "another name": tokens_header().replace(b"tokens", b"tokenz"),
    "a pickle": pickle.dumps(RunsCode()),
    "a page": b"<!DOCTYPE html><html>404</html>",
    "an LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    "a control character": tokens_header().replace(b"tokens", b"tok\\u001b[31mens"),
}


def write_pickle(path):
    path.write_bytes(pickle.dumps(RunsCode()))


def tensors(change):
    def make(path):
        found = safetensors.numpy.load_file(path)
        change(found)
        safetensors.numpy.save_file(found, path)

    return make


def meta(**changes):
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | changes))


CHECKPOINT_FILES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a pickle of code": ("optimizer.safetensors", write_pickle),
    "an archive of code": ("optimizer.safetensors", lambda p: torch.save(RunsCode(), p)),
    "a third moment": ("optimizer.safetensors", tensors(lambda t: t.update(x=np.zeros(3)))),
    "weights of complex numbers": (
        "model.safetensors",
        tensors(lambda w: w.update({"final_norm.weight": w["final_norm.weight"].astype("c8")})),
    ),
    "seconds beyond all numbers": ("meta.json", meta(seconds={"training": 1e308})),
    "seconds below 0": ("meta.json", meta(seconds={"training": -1e9})),
    "a step of 10**30": ("meta.json", meta(global_step=10**30)),
    "a negative step": ("meta.json", meta(global_step=-2)),
    "meta without end": ("meta.json", lambda p: p.write_bytes(b'{"a":' * 10**5)),
    "a large meta": ("meta.json", lambda p: p.write_bytes(b" " * 2**21 + b"{}")),
    "a meta with NaN": ("meta.json", lambda p: p.write_text('{"global_step": NaN}')),
}
CHECKPOINT_NAMES = [
    "../..",
    "/etc",
    "latest/..",
    "x" * 3000,
    "\x1b[31m",
    "tiny\nError: no",
    "20260101Z000000-iteration-9",
    "best ",
]


@pytest.fixture(autouse=True)
def no_code_was_run():
    yield
    assert not MARK.exists()


def test_valid_input_is_accepted(tiny):
    for under_torchrun in (False, True):
        with pytest.raises(pytest.fail.Exception, match="the input was accepted"):
            refused(tiny, "tiny", under_torchrun=under_torchrun)


def test_an_invalid_config_is_refused(tiny):
    for case, content in CONFIG_CONTENTS.items():
        (tiny.runs_dir / "tiny/train.json").write_bytes(content)
        with pytest.raises(UserError, match=r"tiny/train.json: ") as caught:
            load_run(tiny.runs_dir, "tiny")
        line = caught.value.line()
        assert line.isprintable() and len(line) <= LONGEST_ERROR, case


def test_an_invalid_token_file_is_refused(tiny):
    path = tiny.datasets_dir / "tiny/train.safetensors"
    for case, content in TOKEN_FILES.items():
        path.write_bytes(content)
        assert "train.safetensors" in refused(tiny, "tiny"), case


@pytest.mark.parametrize(
    ("split", "position", "where"),
    [
        ("train", 170, "rank 1 failed in waiting at step 2"),
        ("validation", 40, "rank 0 failed in validation at step 5"),
    ],
)
def test_an_id_outside_the_vocabulary_ends_all_processes(tiny, split, position, where):
    tokens = np.zeros(4000, dtype=np.uint16)
    tokens[position] = 257  # the first one outside
    write_tokens(tiny.datasets_dir / f"tiny/{split}.safetensors", tokens)
    result = tiny.torchrun(2, "tiny")
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert line.startswith(f"Error: {where}: ")
    assert f"{split}.safetensors: token {position} has id 257, outside the vocabulary" in line
    assert "exitcode  : 2" in result.stderr and 'batches.py", line' not in result.stderr


def test_an_unknown_run_or_checkpoint_is_refused(tiny):
    assert "nix: no such run; " in refused(tiny, "nix")
    assert "no checkpoint yet" in refused(tiny, "tiny", "best")
    for name in CHECKPOINT_NAMES:
        line = refused(tiny, "tiny", name)  # with a slash it would be the directory of the datasets
        assert re.search(
            "is neither a directory of datasets|is a second|: no checkpoint '2026", line
        )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with one checkpoint."""
    workplace = Workplace(tmp_path_factory.mktemp("trained"))
    workplace.add_run(train={"gradient_accumulation_steps": 1})
    workplace.add_dataset()
    succeeded(workplace.torchrun(1, "tiny", "--max-steps", "3"))
    return workplace


@pytest.fixture
def resumable(trained, tmp_path):
    shutil.copytree(trained.root, tmp_path / "copy", symlinks=True)
    workplace = Workplace(tmp_path / "copy")
    (checkpoint,) = (workplace.runs_dir / "tiny/checkpoints").glob("*-iteration-2")
    return workplace, checkpoint


def renew_manifest(checkpoint):
    """Write a manifest that fits the changed files, as an attacker would."""
    written = read_manifest(checkpoint)
    (checkpoint / MANIFEST).unlink()
    write_manifest(checkpoint, global_step=written.global_step, tokens=written.tokens)


@pytest.mark.parametrize("case", CHECKPOINT_FILES)
def test_a_hostile_checkpoint_is_refused(resumable, case, monkeypatch):
    workplace, checkpoint = resumable
    file, make = CHECKPOINT_FILES[case]
    make(checkpoint / file)
    renew_manifest(checkpoint)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    line = refused(workplace, "tiny", under_torchrun=True)
    # The manifest fits, so only reading the file shows the error.
    assert ("damaged: meta.json" if file == "meta.json" else "cannot be loaded: ") in line


def test_a_run_resumes_with_damaged_records(resumable):
    workplace, _ = resumable
    for file in ("metrics.jsonl", "summary.json"):
        (workplace.runs_dir / "tiny" / file).write_bytes(b"\xff{" + b'{"a":' * 10**5)
    succeeded(workplace.torchrun(1, "tiny", "--max-steps", "1"))
    assert [r["global_step"] for r in read_lines(workplace.runs_dir / "tiny/metrics.jsonl")] == [3]


def test_no_file_of_the_project_unpickles_code():
    paths = [
        path
        for path in PROJECT_DIR.glob("**/*.py")
        if path.relative_to(PROJECT_DIR).parts[0] not in (".venv", "tests")
    ]
    assert PROJECT_DIR / "checkpointing.py" in paths
    for path in paths:
        text = path.read_text()
        assert "torch.load(" not in text and "shell=True" not in text, path
        assert not {f"import {name}\n" for name in ("pickle", "dill")} & set(text.splitlines(True))


NO_RECORDS = [
    b"",
    b"7",
    b"[]",
    b"NaN",
    b"\xff\xfe",
    b'{"a":' * 10**5,
    b'{"global_step": 1e99}',
    b'{"global_step": true}',
    b'{"global_step": 1' + b"0" * 30 + b"}",
    *(
        b'{"global_step": 0, ' + part + b"}"
        for part in (
            b'"seconds": 1e999',
            b'"usd": 1e999',
            b'"seconds": 1' + b"0" * 400,
            b'"skipped_steps": "y"',
            b'"train_loss": "x"',
            b'"train_loss": [1]',
            b'"train_loss": 1e999',
        )
    ),
    b'{"global_step": -3, "train_loss": 2.0}',
]


def test_what_is_of_another_kind_is_refused(tiny):
    run_dir = tiny.runs_dir / "tiny"
    for name in ("metrics.jsonl", "summary.json"):
        (run_dir / name).mkdir()
        line = refused(tiny, "tiny")
        assert f"{name}: cannot be read (" in line and line.endswith(", or move it away\n")
        (run_dir / name).rmdir()


def test_records_that_are_too_large_are_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b"\x0b" * (MAX_RECORDS_BYTES + 1))
    with pytest.raises(UserError, match=r"metrics.jsonl: .* move it away"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_records_with_invalid_numbers_are_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for line in NO_RECORDS:
        path.write_bytes(line + b'\n{"global_step": 1, "train_loss": null}\n')
        assert read_metrics(path) == [{"global_step": 1, "train_loss": None}], line[:40]


def test_a_read_only_directory_is_refused(tiny):
    """Such as that of a read-only checkout, where room on the disk would not help."""
    reason = "Read-only file system" if os.geteuid() == 0 else "Permission denied"
    checkpoints_dir = tiny.runs_dir / "tiny/checkpoints"
    checkpoints_dir.mkdir()
    for place in (checkpoints_dir.parent, checkpoints_dir):
        with read_only(place):
            assert refused(tiny, "tiny").endswith(
                f"/{place.name}: cannot be written to ({reason}); a run writes its"
                " checkpoints and charts there\n"
            )


def test_checkpoints_in_no_directory_are_refused(tiny):
    """Such as on a disk that is not mounted: no checkpoint could be saved."""
    place = tiny.runs_dir / "tiny/checkpoints"
    for make in (lambda: place.write_text(""), lambda: place.symlink_to("gone")):
        make()
        assert "tiny/checkpoints: cannot be written to (Not a directory)" in refused(tiny, "tiny")
        place.unlink()


def test_the_process_that_starts_torchrun_holds_the_lock_while_it_prepares(tiny, monkeypatch):
    """Without torchrun the first process downloads the data: a second one must not do it too."""
    deadlines = '{"orphans": 0.2}'  # the second launch must not take the first one for an orphan
    marks = tiny.root / "marks"
    first, _ = start_forked(
        "ddp_train.py",
        tiny.arguments("tiny", "--nproc-per-node", "1"),
        environment={VARIABLE: "prepare:hang", MARKS: str(marks), DEADLINES: deadlines},
    )
    monkeypatch.setenv(DEADLINES, deadlines)
    try:
        struck_by(marks)  # it prepares, and writes nothing more
        assert "another launch is training this run (without a heartbeat: it begins or ends); " in (
            refused(tiny, "tiny")
        )
    finally:
        first.kill()
        first.join()
    succeeded(tiny.ddp_train("tiny", "--nproc-per-node", "1", "--max-steps", "1"))
