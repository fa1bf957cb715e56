"""Instruction data, the prompts made from it, and files of models' answers."""

import hashlib
import http.client
import json
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from basics.errors import UserError
from basics.files import write_atomically
from basics.json_files import describe

# The 1,100 entries of "Build a Large Language Model (from Scratch)", chapter 7.
DEFAULT_URL = ("https://raw.githubusercontent.com/rasbt/LLMs-from-scratch/main/"
               "ch07/01_main-chapter-code/instruction-data.json")
DEFAULT_NAME = "instruction-data.json"
DOWNLOAD_SECONDS = 30  # timeout without any data
MIN_ENTRIES = 10  # leaves one for the test
MAX_DOWNLOAD_BYTES = 2**24  # many times what the book's entries have; the branch may change

# Alpaca's template: the head, the instruction, the input if there is one, and the response.
HEAD = ("Below is an instruction that describes a task. Write a response that appropriately"
        " completes the request.\n\n### Instruction:\n")
INPUT = "\n\n### Input:\n"
RESPONSE = "\n\n### Response:\n"
T = TypeVar("T")


class Entry(BaseModel):
    """One entry of an Alpaca-style file. Other keys are ignored."""

    model_config = ConfigDict(frozen=True, strict=True)

    instruction: str
    input: str = ""
    output: str

    def prompt(self) -> str:
        """Return the prompt that the response follows, in Alpaca's template."""
        input_part = f"{INPUT}{self.input}" if self.input else ""
        return f"{HEAD}{self.instruction}{input_part}{RESPONSE}"


class AnsweredEntry(Entry):
    """An entry with one model's answer. `output` is the reference answer."""

    answer: str


class AnswersFile(BaseModel):
    """The parts of a file written by `lab tune` that `lab judge` needs."""

    model_config = ConfigDict(frozen=True, strict=True, protected_namespaces=())

    model: str = Field(min_length=1)
    checkpoint: str | None = None
    answers: list[AnsweredEntry] = Field(min_length=1)


def chat_template() -> str:
    """Return `Entry.prompt` as the Jinja template of a tokenizer, for one user message.

    The message's `content` is the instruction; an `input` of its own is optional. Answers, and
    further messages, follow as in training: each answer ends with the end of text.
    """
    head, input_part, response = map(json.dumps, (HEAD, INPUT, RESPONSE))
    return ("{%- for message in messages -%}"
            "{%- if message['role'] == 'user' -%}"
            f"{{{{- {head} + message['content'] -}}}}"
            "{%- if message['input'] -%}"
            f"{{{{- {input_part} + message['input'] -}}}}"
            "{%- endif -%}"
            f"{{{{- {response} -}}}}"
            "{%- elif message['role'] == 'assistant' -%}"
            "{{- message['content'] + eos_token -}}"
            "{%- else -%}"
            "{{- raise_exception('this model knows user and assistant messages only') -}}"
            "{%- endif -%}"
            "{%- endfor -%}")


@dataclass(frozen=True)
class Data:
    """The entries of a file in its order: 85% for training, 10% for the test, then validation.

    Attributes:
        sha256: of the bytes from which they were read.
    """

    path: Path
    sha256: str
    train: list[Entry]
    test: list[Entry]
    validation: list[Entry]


def load_entries(path: Path) -> Data:
    """Read an Alpaca-style file. Raises: UserError if it is invalid or too short to split."""
    return _split(path, _read(path))


def _split(path: Path, content: bytes) -> Data:
    entries = _parse(path, content, TypeAdapter(list[Entry]))
    count = len(entries)
    if count < MIN_ENTRIES:
        raise UserError(f"{path}: has {count} entries; give {MIN_ENTRIES} or more, for training,"
                        " validation and test")
    first, second = int(count * 0.85), int(count * 0.85) + int(count * 0.1)
    return Data(path, hashlib.sha256(content).hexdigest(), entries[:first], entries[first:second],
                entries[second:])


def load_answers(path: Path) -> AnswersFile:
    """Read one model's answers. Raises: UserError if the file is invalid."""
    return _parse(path, _read(path), TypeAdapter(AnswersFile))


def fetch_default_entries(datasets_dir: Path) -> Path:
    """Return the path of the book's entries; download them first if they are missing.

    Raises:
        UserError: they cannot be downloaded, or the download is not valid.
    """
    path = datasets_dir / DEFAULT_NAME
    if path.exists():
        return path
    try:
        with urllib.request.urlopen(DEFAULT_URL, timeout=DOWNLOAD_SECONDS) as response:
            content = response.read(MAX_DOWNLOAD_BYTES + 1)
            if len(content) > MAX_DOWNLOAD_BYTES:
                raise OSError(f"it has more than {MAX_DOWNLOAD_BYTES:,} bytes")
            if response.length:  # bytes that did not come; with a limit, `read` does not tell
                raise http.client.IncompleteRead(content, response.length)
        _split(path, content)  # do not save a login page as the data
        datasets_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except (OSError, http.client.HTTPException, UserError) as error:
        reason = str(error).removeprefix(f"{path}: ")[:60]
        raise UserError(f"{DEFAULT_URL}: cannot be downloaded into {datasets_dir} ({reason});"
                        " download it by other means and name it with --data FILE") from None
    return path


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}; name a JSON file of"
                        " entries") from None


def _parse(path: Path, content: bytes, kind: TypeAdapter[T]) -> T:
    try:
        return kind.validate_json(content)
    except ValidationError as error:
        raise UserError(f"{path}: {describe(error)}") from None
