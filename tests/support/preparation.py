"""Prepare datasets in the process of the test, or slowly in one of its own, and read them."""

import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import prepare_dataset as command
from preparation import encoding, journal, pipeline, reading, sources
from preparation.choosing import SourceOptions
from preparation.cutting import Cuts
from preparation.journal import Journal
from preparation.pipeline import PrepareOptions, prepare_dataset
from preparation.reading import Task
from preparation.sources import Request, Source, texts_shard
from preparation.token_stream import DocumentEnds, TokenFileWriter

DOCUMENTS = [f"document {i}: naïve 🎉 <|endoftext|>" for i in range(150)] + [""] * 2
BYTES = PrepareOptions(tokenizer="bytes")


def prepare(*arguments: str) -> CompletedProcess[str]:
    """Run prepare_dataset.py in this process, with one worker unless it imports tokens."""
    stdout, stderr = io.StringIO(), io.StringIO()
    workers = [] if {"--import", "--join"} & set(arguments) else ["--workers", "1"]
    with redirect_stdout(stdout), redirect_stderr(stderr):
        with pytest.raises(SystemExit) as caught:
            command.run([*arguments, *workers])
    return CompletedProcess(arguments, caught.value.code or 0, stdout.getvalue(), stderr.getvalue())


def tokens_in(dataset_dir: Path) -> dict[str, np.ndarray]:
    """Return the tokens of a dataset by split."""
    return {
        split: load_file(dataset_dir / f"{split}.safetensors")["tokens"]
        for split in ("train", "validation")
    }


def metadata_of(dataset_dir: Path, split: str = "train") -> dict[str, str]:
    with safe_open(dataset_dir / f"{split}.safetensors", framework="numpy") as file:
        return file.metadata()


def decoded(path: Path) -> list[str]:
    """Return the documents of a token file of the tokenizer `bytes`."""
    tokens = load_file(path)["tokens"]
    assert tokens.dtype == np.uint16
    ends = np.flatnonzero(tokens == 256)
    assert ends[-1] == len(tokens) - 1, "the last document has no end-of-text token"
    return [bytes(d[:-1].astype(np.uint8)).decode() for d in np.split(tokens, ends + 1)[:-1]]


def contents(dataset_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(dataset_dir.iterdir())}


def texts_source(*shards: list[str]) -> Source:
    return Source(
        Request(source="texts", title="texts"),
        [texts_shard(f"shard {i}", texts) for i, texts in enumerate(shards)],
    )


def find_documents(source: str | Path, **options: str) -> Source:
    return sources.find_documents(SourceOptions(str(source), **options))


def write_parquet(folder: Path, *parts: list[str | None]) -> Path:
    """Write one parquet file for each part, with a column of ids next to the text."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, part in enumerate(parts):
        table = pyarrow.table(
            {
                "text": pyarrow.array(part, pyarrow.string()),
                "id": [str(n) for n in range(len(part))],
            }
        )
        pyarrow.parquet.write_table(table, folder / f"{i:03}.parquet")
    return folder


def write_source(kind: str, source_dir: Path) -> Path:
    """Write DOCUMENTS to a directory of parquet, JSON lines or text files."""
    source_dir.mkdir()
    if kind == "parquet":
        write_parquet(
            source_dir / "sample" / "10BT",
            DOCUMENTS[:100],
            [text or None for text in DOCUMENTS[100:]],
        )
        (source_dir / "README.md").write_text("not a document")
    elif kind == "jsonl":
        lines = [json.dumps({"text": text}) for text in DOCUMENTS]
        (source_dir / "a.jsonl").write_text("\n".join(lines[:50]) + "\n\n")
        (source_dir / "b.jsonl").write_text("\n".join(lines[50:]))
    else:
        for i, text in enumerate(DOCUMENTS):
            (source_dir / f"{i:04}.txt").write_text(text)
    return source_dir


def corrupt(path: Path, *, footer: bool) -> None:
    """Damage the data or the footer of a parquet file."""
    content = bytearray(path.read_bytes())
    start = len(content) - 6 if footer else 8
    content[start : start + 40] = b"\xff" * len(content[start : start + 40])
    path.write_bytes(content)


class Stopped(Exception):
    """Raised by a test in the middle of a preparation."""


@contextmanager
def stopping_after(num_writes: int | None) -> Iterator[None]:
    """Stop a preparation before the next write after so many: of tokens, fsyncs, journal lines,
    headers, the dataset card or part.json, or the last rename."""
    left = num_writes

    def stopping(function: Callable) -> Callable:
        def wrapper(*arguments: object, **keywords: object) -> object:
            nonlocal left
            if left == 0:
                raise Stopped
            if left is not None:
                left -= 1
            return function(*arguments, **keywords)

        return wrapper

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (TokenFileWriter, "finish"),
            (TokenFileWriter, "sync"),
            (TokenFileWriter, "truncate"),
            (TokenFileWriter, "add"),
            (DocumentEnds, "sync"),
            (DocumentEnds, "add"),
            (Journal, "add"),
            (Journal, "begin"),
            (Journal, "publish"),
            (pipeline, "write_card"),
            (pipeline, "write_part"),
        ):
            patch.setattr(owner, name, stopping(getattr(owner, name)))
        with suppress(Stopped):
            yield


def leave_unfinished(source: Source, out: Path, options: PrepareOptions = BYTES) -> None:
    """Prepare all shards of a source but the last."""

    def stop(cuts: Cuts) -> Iterator[Task]:
        raise Stopped

    shards = [*source.shards[:-1], replace(source.shards[-1], tasks=stop)]
    with pytest.raises(Stopped):
        prepare_dataset(replace(source, shards=shards), out, options)


SLOW_COMMAND = [sys.executable, "-m", "tests.support.preparation"]  # in the project directory


def die(*_: object) -> None:
    os._exit(9)


def prepare_slowly() -> None:
    """Be prepare_dataset.py with small tasks, slow, or with a worker that dies.

    Small tasks make it use worker processes for a small corpus. The environment variable
    PAUSE_SECONDS holds a pause after each shard, in which a test can stop the command; if
    WORKER_DIES is set, each worker exits at its first task.
    """
    pipeline.TASK_BYTES = reading.TASK_BYTES = 2**16
    add = journal.Journal.add

    def slow_add(self: journal.Journal, *arguments: Any) -> None:
        add(self, *arguments)
        time.sleep(float(os.environ.get("PAUSE_SECONDS", "0")))

    journal.Journal.add = slow_add
    if "WORKER_DIES" in os.environ:
        encoding.encode_task = die
    command.run()


if __name__ == "__main__":
    prepare_slowly()
