"""Instruction data, the prompts made from it, and files of models' answers."""

import hashlib
import json
import os
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from basics.errors import UserError, first_line, writing_to
from basics.files import append_whole, write_atomically
from basics.json_files import describe

# The 1,100 entries of "Build a Large Language Model (from Scratch)", chapter 7.
BOOK_URL = (
    "https://raw.githubusercontent.com/rasbt/LLMs-from-scratch/main/"
    "ch07/01_main-chapter-code/instruction-data.json"
)
MIN_ENTRIES = 10  # leaves one for the test

# Alpaca's template: the head, the instruction, the input if there is one, and the response.
HEAD = (
    "Below is an instruction that describes a task. Write a response that appropriately"
    " completes the request.\n\n### Instruction:\n"
)
INPUT = "\n\n### Input:\n"
RESPONSE = "\n\n### Response:\n"
# `Entry.prompt` as the Jinja template of a tokenizer: a user message's `content` is the
# instruction, its `input` is optional. Each answer ends with the end of text, as in training.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}{%- if message['role'] == 'user' -%}"
    f"{{{{- {json.dumps(HEAD)} + message['content'] -}}}}"
    "{%- if message['input'] -%}"
    f"{{{{- {json.dumps(INPUT)} + message['input'] -}}}}"
    "{%- endif -%}"
    f"{{{{- {json.dumps(RESPONSE)} -}}}}"
    "{%- elif message['role'] == 'assistant' -%}{{- message['content'] + eos_token -}}"
    "{%- else -%}{{- raise_exception('this model knows user and assistant messages only') -}}"
    "{%- endif -%}{%- endfor -%}"
)
T = TypeVar("T")


class Entry(BaseModel):
    """One entry of an Alpaca-style file. Other keys are ignored."""

    instruction: str
    input: str = ""
    output: str

    def prompt(self) -> str:
        input_part = f"{INPUT}{self.input}" if self.input else ""
        return f"{HEAD}{self.instruction}{input_part}{RESPONSE}"


class AnsweredEntry(Entry):
    """An entry with one model's answer. `output` is the reference answer."""

    answer: str


class AnswersFile(BaseModel):
    """The parts of a file written by `lab tune` that `lab judge` needs."""

    model: str = Field(min_length=1)
    checkpoint: str | None = None
    answers: list[AnsweredEntry] = Field(min_length=1)


@dataclass(frozen=True)
class Data:
    """The entries of a file in its order: 85% for training, 10% for the test, then validation."""

    path: Path
    sha256: str  # of the bytes from which they were read
    train: list[Entry]
    test: list[Entry]
    validation: list[Entry]


def load_entries(path: Path) -> Data:
    """Read an Alpaca-style file. Raises: UserError if it is invalid or too short to split."""
    content, entries = read_entries(path, TypeAdapter(list[Entry]))
    count = len(entries)
    if count < MIN_ENTRIES:
        raise UserError(
            f"{path}: has {count} entries; give {MIN_ENTRIES} or more, for training,"
            " validation and test"
        )
    first = int(count * 0.85)
    second = int(count * 0.85) + int(count * 0.1)
    return Data(
        path,
        hashlib.sha256(content).hexdigest(),
        entries[:first],
        entries[first:second],
        entries[second:],
    )


def book_entries(datasets_dir: Path) -> Path:
    """Return the path of the book's entries, which are downloaded once. Raises: UserError."""
    path = datasets_dir / "instruction-data.json"
    if path.exists():
        return path
    try:
        with urllib.request.urlopen(BOOK_URL, timeout=30) as response:
            content = response.read(2**24)  # many times what they have
        TypeAdapter(list[Entry]).validate_json(content)  # neither cut short nor a login page
        datasets_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except (OSError, HTTPException, ValidationError) as error:
        reason = describe(error) if isinstance(error, ValidationError) else first_line(error)
        raise UserError(
            f"{BOOK_URL}: cannot be downloaded into {datasets_dir} ({reason});"
            " name a file of entries with --data FILE"
        ) from None
    return path


def read_entries(path: Path, kind: TypeAdapter[T]) -> tuple[bytes, T]:
    """Return a JSON file's bytes, and what they hold. Raises: UserError: it is invalid."""
    try:
        content = path.read_bytes()
        return content, kind.validate_json(content)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read: {error.strerror}; name a JSON file of entries"
        ) from None
    except ValidationError as error:
        raise UserError(f"{path}: {describe(error)}") from None


def check_writable(path: Path) -> None:
    """Check that a file can be written, before the work for it. Raises: UserError."""
    is_new = not os.path.lexists(path)  # do not delete a broken link of the user
    with writing_to(path):
        append_whole(path, "")
        if is_new:
            path.unlink()
