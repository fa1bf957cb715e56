"""The directory of an unfinished preparation: what was asked, and what is written so far."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt

from basics.errors import DISK_FULL, UserError
from basics.failpoints import failpoint
from basics.files import locked, write_atomically
from basics.text import gb
from preparation.card import CARD_FILE
from preparation.encoding import Losses
from preparation.output_dir import OutputDir
from preparation.sources import Record, Request
from preparation.token_stream import DATA_START, NUM_COLUMNS, ROW_BYTES, TOKENS
from settings.data import SPLITS, token_file_name
from tokens.tokenizer import TOKENIZER_FILE, FileTokenizer, Tokenizer

TOKENS_FILE = token_file_name("train")  # all tokens, until the last ones are in the validation file
TOKEN_FILES = {token_file_name(split) for split in SPLITS}
DATASET_FILES = TOKEN_FILES | {TOKENIZER_FILE, CARD_FILE}


class Progress(Record):
    """How far a preparation is."""

    request: Request
    position: Any = None  # of the chunk that is read; see `Source.chunks`
    num_pieces_done: NonNegativeInt = 0  # of this chunk
    num_documents: NonNegativeInt = 0
    sums: list[NonNegativeInt] = [0] * NUM_COLUMNS  # of all pieces, also after the last document
    losses: Losses = Losses()
    left_out: dict[str, str] = {}  # files, found while reading, and reasons
    is_read: bool = False  # all documents are written
    is_split: bool = False  # the last ones are in the validation file

    def changed(self, **values: object) -> "Progress":
        return self.model_copy(update=values)


class Journal:
    """The directory of an unfinished preparation, next to its output; `dataset/` becomes that."""

    def __init__(self, output_dir: Path, *, replace: bool = False) -> None:
        """Raises: UserError: the output cannot be used, see `OutputDir`."""
        self.output = OutputDir(output_dir, made=DATASET_FILES, signs=TOKEN_FILES, replace=replace)
        output_dir = self.output.path
        self.dir = output_dir.parent / f".{output_dir.name}.partial"
        self.dataset_dir = self.dir / "dataset"
        self.path = self.dir / "journal.json"
        self.index_path = self.dir / "documents.bin"
        self.progress: Progress | None = None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Create and lock the directory, and read what is in it. Raises: UserError."""
        with locked(
            self.dir,
            busy=f"{self.dir}: another process is preparing this dataset; wait"
            " for it, or name another output",
        ):
            self._read()
            try:
                yield
            finally:
                if self.progress is None or not self.progress.num_documents:
                    shutil.rmtree(self.dir, ignore_errors=True)  # there is no work to resume

    def _read(self) -> None:
        """Read what an earlier launch has left; nothing if its files are too short."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            progress = Progress.model_validate_json(self.path.read_bytes())
            num_tokens = 0 if progress.is_split else progress.sums[TOKENS]
            for path, num_bytes in (
                (self.dataset_dir / TOKENS_FILE, DATA_START + 2 * num_tokens),
                (self.index_path, ROW_BYTES * progress.num_documents),
            ):
                if path.stat().st_size < num_bytes:
                    return
            self.progress = progress

    def begin(self, request: Request, tokenizer: Tokenizer) -> Progress:
        """Start or continue; write the tokenizer's file, if it has one.

        Raises: UserError: an earlier launch wrote documents of another request.
        """
        earlier = self.progress
        if earlier and (changes := request.difference(earlier.request)):
            raise UserError(
                f"{self.dir}: an unfinished preparation differs: {changes}; repeat"
                " its command, or delete it"
            )
        if earlier is None:
            shutil.rmtree(self.dataset_dir, ignore_errors=True)  # of another request
        self.begin_dataset(tokenizer)
        return (earlier or Progress(request=request)).changed(request=request)

    def begin_dataset(self, tokenizer: Tokenizer) -> None:
        """Create the directory of the dataset, with the tokenizer's file, if it has one."""
        self.dataset_dir.mkdir(exist_ok=True)
        if isinstance(tokenizer, FileTokenizer):
            write_atomically(self.dataset_dir / TOKENIZER_FILE, tokenizer.content, durable=True)

    def save(self, progress: Progress) -> None:
        """Record what is written, which must have been fsynced."""
        write_atomically(self.path, progress.model_dump_json(), durable=True)
        self.progress = progress

    def forget(self) -> None:
        """Drop what is finished: the next launch begins again, also with other files."""
        self.path.unlink(missing_ok=True)
        self.progress = None

    def publish(self) -> None:
        """Rename the finished dataset to its final name, and delete the journal."""
        failpoint("provide")
        self.output.put(self.dataset_dir)
        shutil.rmtree(self.dir, ignore_errors=True)


def check_disk_space(directory: Path, num_bytes: float, content: str) -> None:
    """Raise UserError if the disk has less free space than this."""
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise UserError(
            f"{directory.parent}: {gb(free)} free; {content} need {gb(num_bytes)} or"
            " more: free some space, or name an output on another disk",
            DISK_FULL,
        )
