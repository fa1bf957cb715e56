"""Prepare datasets in the process of the test, or slowly in one of its own, and read them."""

import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
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
from preparation import encoding, journal, pipeline, sources
from preparation import find_source as finding
from preparation.journal import Journal
from preparation.pipeline import PrepareOptions
from preparation.sources import Request, Source, SourceOptions, Texts
from preparation.token_stream import IndexWriter, TokenFileWriter

DOCUMENTS = [f"document {i}: naïve 🎉 <|endoftext|>" for i in range(150)] + [""] * 2
BYTES = PrepareOptions(tokenizer="bytes")


def prepare(*arguments: str) -> CompletedProcess[str]:
    """Run prepare_dataset.py in this process, with one worker unless its documents are tokens."""
    stdout, stderr = io.StringIO(), io.StringIO()
    workers = [] if {"--import", "--mix"} & set(arguments) else ["--workers", "1"]
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


def documents_of(dataset_dir: Path) -> list[list[str]]:
    """Return the documents of both splits of a dataset in bytes."""
    return [decoded(dataset_dir / f"{split}.safetensors") for split in ("train", "validation")]


def contents(dataset_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(dataset_dir.iterdir())}


def texts_source(texts: list[str]) -> Source:
    return Texts(Request(source="texts", title="texts"), texts)


def find_source(source: str | Path, **options: str) -> Source:
    return finding.find_source(SourceOptions(str(source), **options))


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
            (source_dir / f"{i:04}").write_text(text)
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
def small_steps(num_bytes: int) -> Iterator[None]:
    """Make chunks and tasks of so many bytes, and write the journal after each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "TASK_BYTES", num_bytes)
        patch.setattr(sources, "CHUNK_BYTES", num_bytes)
        patch.setattr("preparation.text_files.CHUNK_BYTES", num_bytes)
        patch.setattr("preparation.dataset_source.CHUNK_BYTES", num_bytes)
        patch.setattr("preparation.text_files.BLOCK_BYTES", num_bytes)
        patch.setattr("preparation.dataset_source.ROWS", max(1, num_bytes // 50))
        patch.setattr(pipeline, "JOURNAL_BYTES", num_bytes)
        yield


@contextmanager
def stopping_after(num_writes: int | None) -> Iterator[None]:
    """Stop a preparation before the next write after so many: of tokens, of rows of the index,
    fsyncs, journals, headers, the dataset card, or the last rename."""
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
            (TokenFileWriter, "add"),
            (IndexWriter, "sync"),
            (IndexWriter, "add"),
            (Journal, "save"),
            (Journal, "begin"),
            (Journal, "publish"),
            (pipeline, "write_card"),
        ):
            patch.setattr(owner, name, stopping(getattr(owner, name)))
        with suppress(Stopped):
            yield


SLOW_COMMAND = [sys.executable, "-m", "tests.support.preparation"]  # in the project directory


def die(*_: object) -> None:
    os._exit(9)


def prepare_slowly() -> None:
    """Be prepare_dataset.py with small tasks, slow, or with a worker that dies.

    The environment variable JOURNALS holds a file that gets a byte after each journal, and
    LAST_JOURNAL the number of the journal after which the command waits until a test stops it; if
    WORKER_DIES is set, each worker exits at its first task.
    """
    pipeline.TASK_BYTES = pipeline.JOURNAL_BYTES = 2**16
    save = journal.Journal.save

    def slow_save(self: journal.Journal, *arguments: Any) -> None:
        save(self, *arguments)
        if "JOURNALS" in os.environ:
            journals = Path(os.environ["JOURNALS"])
            with journals.open("a") as file:
                file.write(".")
            is_last = journals.stat().st_size == int(os.environ["LAST_JOURNAL"])
            time.sleep(3600 if is_last else 0.05)

    journal.Journal.save = slow_save
    if "WORKER_DIES" in os.environ:
        encoding.encode_task = die
    command.run()


if __name__ == "__main__":
    prepare_slowly()
