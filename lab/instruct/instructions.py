"""Instructions with their outputs, the prompts made of them, and models' answers to them."""

from __future__ import annotations

import http.client
import os
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from basics.errors import UserError

# The 1,100 entries of "Build a Large Language Model (from Scratch)", chapter 7.
DEFAULT_URL = ("https://raw.githubusercontent.com/rasbt/LLMs-from-scratch/main/"
               "ch07/01_main-chapter-code/instruction-data.json")
DEFAULT_NAME = "instruction-data.json"
DOWNLOAD_SECONDS = 30  # without a byte
FEWEST_ENTRIES = 10  # that leave one for the test
MAX_FILE_BYTES = 2**30
T = TypeVar("T")


class Entry(BaseModel):
    """One entry of an Alpaca-style file. Keys that are not needed are left unread."""

    model_config = ConfigDict(frozen=True, strict=True)

    instruction: str
    input: str = ""
    output: str

    def prompt(self) -> str:
        """Give what a model gets to see; its response follows. The template is Alpaca's."""
        given = f"\n\n### Input:\n{self.input}" if self.input else ""
        return ("Below is an instruction that describes a task. Write a response that"
                " appropriately completes the request."
                f"\n\n### Instruction:\n{self.instruction}{given}\n\n### Response:\n")


class AnsweredEntry(Entry):
    """An entry, and what one model answers. `output` is the answer to compare with."""

    answer: str


class AnswersFile(BaseModel):
    """What `lab judge` needs of a file that `lab tune` has written."""

    model_config = ConfigDict(frozen=True, strict=True, protected_namespaces=())

    model: str = Field(min_length=1)
    answers: list[AnsweredEntry] = Field(min_length=1)


@dataclass(frozen=True)
class Split:
    """Entries by what they are for, in the order in which they stand in the file."""

    train: list[Entry]
    test: list[Entry]
    validation: list[Entry]


def split_entries(entries: list[Entry]) -> Split:
    """Take the first 85% to train on, the next 10% as the test, the rest to validate on."""
    num_train, num_test = int(len(entries) * 0.85), int(len(entries) * 0.1)
    return Split(entries[:num_train], entries[num_train : num_train + num_test],
                 entries[num_train + num_test :])


def load_entries(path: Path) -> list[Entry]:
    """Read an Alpaca-style file. Raises: UserError if it is not one, or too short to split."""
    entries = _load(path, TypeAdapter(list[Entry]))
    if len(entries) < FEWEST_ENTRIES:
        raise UserError(f"{path}: has {len(entries)} entries; wanted {FEWEST_ENTRIES} or more, to"
                        " train, validate and test on")
    return entries


def load_answers(path: Path) -> AnswersFile:
    """Read one model's answers. Raises: UserError if the file does not hold them."""
    return _load(path, TypeAdapter(AnswersFile))


def fetch_default_entries(datasets_dir: Path) -> Path:
    """Give the place of the book's entries, downloaded if they are not there yet.

    Raises:
        UserError: they cannot be downloaded, or what comes is something else.
    """
    path = datasets_dir / DEFAULT_NAME
    if path.exists():
        return path
    partial = datasets_dir / f".{DEFAULT_NAME}.{os.getpid()}.partial"
    try:
        datasets_dir.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(DEFAULT_URL, timeout=DOWNLOAD_SECONDS) as response:
            partial.write_bytes(response.read())
        load_entries(partial)  # a login page is not to take the place of the data
        partial.replace(path)
    except (OSError, http.client.HTTPException, UserError) as error:
        reason = str(error).removeprefix(f"{partial}: ")[:60]
        raise UserError(f"{DEFAULT_URL}: cannot be fetched into {datasets_dir} ({reason}); fetch it"
                        " by other means, and give it with --data FILE") from None
    finally:
        partial.unlink(missing_ok=True)
    return path


def _load(path: Path, kind: TypeAdapter[T]) -> T:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}; name a JSON file of"
                        " entries") from None
    try:
        return kind.validate_json(content)
    except ValidationError as error:
        raise UserError(f"{path}: {_first_mistake(error)}; correct it") from None


def _first_mistake(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = " ".join(f"entry {part + 1}" if isinstance(part, int) else f'"{part}"'
                     for part in first["loc"])
    said = "is missing" if first["type"] == "missing" else first["msg"]
    return f"{place} {said}".strip() if place else f"the file: {said}"
