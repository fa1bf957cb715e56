"""Where the tokens of a preparation go: to one file, which is split when all are there."""

from __future__ import annotations

import numpy as np

from basics.errors import UserError
from preparation.document_table import DocumentTable, TokenStream
from preparation.encoding import Encoded
from preparation.journal import Journal, Progress, Request, SplitCount
from preparation.planning import num_training_documents
from preparation.token_file_writer import TokenFileWriter


class Output:
    """Token files that are being written, with a table of where the documents end."""

    def __init__(self, journal: Journal) -> None:
        is_part = journal.request is not None and journal.request.part
        self._writers = {
            split: TokenFileWriter(journal.token_path(split),
                                   num_tokens=journal.progress.of(split).num_tokens)
            for split in (("train",) if is_part else ("train", "validation"))}
        self._table = DocumentTable(journal.table_path,
                                    num_documents=journal.progress.num_documents)

    def write(self, encoded: Encoded, progress: Progress) -> Progress:
        """Append documents; return the progress with the counts of the token files."""
        self._table.add(encoded.ends + _totals(progress))
        self._writers["train"].add(encoded.tokens)
        return progress.model_copy(update={"train": progress.train.with_more(
            encoded.tokens, num_documents=len(encoded.ends) - len(encoded.bad_files),
            num_text_bytes=int(encoded.sizes[1]))})

    def leave_out(self, num_documents: int, progress: Progress) -> None:
        """Note documents that cannot be read."""
        self._table.add(np.tile(_totals(progress), (num_documents, 1)))

    def truncate(self, progress: Progress) -> None:
        """Remove everything that was written after this progress."""
        for split, writer in self._writers.items():
            writer.truncate(progress.of(split).num_tokens)
        self._table.truncate(progress.num_documents)

    def sync(self) -> None:
        """Write everything so far to the disk, with fsync."""
        for file in (*self._writers.values(), self._table):
            file.sync()

    def finish(self, progress: Progress, metadata: dict[str, str]) -> None:
        """Write the headers of the token files, and close them."""
        for split, writer in self._writers.items():
            writer.finish(progress.of(split).metadata() | metadata)

    def close(self) -> None:
        for file in (*self._writers.values(), self._table):
            file.close()

    def divide(self, progress: Progress, validation_fraction: float) -> Progress:
        """Make two documents of a single one, of its first and its last tokens."""
        totals = _totals(progress)
        first = [num_training_documents(total, validation_fraction) for total in totals.tolist()]
        self._table.truncate(0)
        self._table.add(np.array([first, totals]))
        return progress.model_copy(update={"num_documents": 2})

    def split(self, progress: Progress, *, num_train: int) -> Progress:
        """Copy the validation documents to their file; return the counts of both.

        `truncate` with these then removes them from the training file.
        """
        self.sync()
        stream = TokenStream(self._writers["train"].path, self._table.path)
        self._writers["validation"].truncate(0)
        nothing = SplitCount(num_text_bytes=0)
        return progress.model_copy(update={
            "train": stream.copy(0, num_train, nothing),
            "validation": stream.copy(num_train, progress.num_documents, nothing,
                                      self._writers["validation"])})


def token_metadata(request: Request, progress: Progress) -> dict[str, str]:
    """Return the metadata of the token files, besides their counts."""
    metadata = {"tokenizer": request.tokenizer, "source": request.source[:400],
                "revision": request.revision[:100]}
    if progress.num_bad_files:
        metadata["num_bad_files"] = str(progress.num_bad_files)
    return metadata


def check_not_empty(progress: Progress, source: str) -> None:
    """Refuse a dataset of which one split has no documents. Raises: UserError."""
    for split in ("train", "validation"):
        if not progress.of(split).num_tokens:
            raise UserError(f"{source}: without the damaged shards, {split}.safetensors is empty;"
                            " replace them")


def _totals(progress: Progress) -> np.ndarray:
    """Return tokens, bytes and characters so far, (3,) int64."""
    return np.array([progress.train.num_tokens, progress.num_bytes, progress.num_characters],
                    dtype=np.int64)
