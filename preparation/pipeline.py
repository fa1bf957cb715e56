"""Documents to a token dataset: two safetensors files that appear only when complete.

One process reads, others tokenise, and this one writes all tokens to one file. Then the tokens of
the last documents are moved to the validation file.
"""

import itertools
import sys
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from basics.errors import UserError, one_line, print_error, writing_to
from basics.text import counted
from preparation.card import Findings, Prepared, progress_bar, write_card
from preparation.cutting import Cuts
from preparation.encoding import Encoded, Task, cuts_of, encode, worker_pool
from preparation.journal import TOKENS_FILE, Journal, Progress, check_disk_space
from preparation.sources import Source, grouped, limited_memory, warnings
from preparation.token_stream import (
    REPLACED,
    ROW_DTYPE,
    TEXT_BYTES,
    TOKENS,
    Counts,
    Index,
    IndexWriter,
    TokenFileWriter,
    num_training_documents,
    read_tokens,
)
from settings.data import token_file_name
from tokens.tokenizer import Tokenizer, choose_tokenizer

TASK_BYTES = 2**20  # of text that a worker gets at once, roughly
JOURNAL_BYTES = 2**26  # of text: what is read again after a kill
LEAST_TOKEN_BYTES = 0.2  # for each byte of text; plain text has 0.4


@dataclass(frozen=True)
class PrepareOptions:
    """The options of a preparation, besides its source."""

    tokenizer: str = "gpt2"  # or bytes, or the path of a tokenizer.json or of its directory
    validation_fraction: float = 0.01
    max_documents: int | None = None
    num_workers: int = 1
    replace: bool = False  # a dataset that is there already


def prepare_dataset(source: Source, output_dir: Path, options: PrepareOptions) -> Prepared:
    """Tokenise documents: the first ones for training, the last ones for validation.

    Everything is written next to `output_dir` and renamed to it when it is complete. After a kill
    or an error, the same call continues the work.

    Raises: UserError: the output or the source cannot be used, the source differs from that of an
        unfinished preparation, or the disk is full.
    """
    journal = Journal(output_dir, replace=options.replace)
    tokenizer = choose_tokenizer(options.tokenizer)
    request = source.request.changed(
        tokenizer=tokenizer.name,
        validation_fraction=options.validation_fraction,
        max_documents=options.max_documents,
    )
    with writing_to(output_dir), journal.locked():
        check_disk_space(journal.dir, LEAST_TOKEN_BYTES * source.num_text_bytes, "tokens")
        progress = journal.begin(request, tokenizer)
        if progress.num_documents:
            print_error(f"continuing after document {progress.num_documents:,}")
        if not progress.is_read:
            _encode_all(source, journal, progress, tokenizer, options.num_workers)
        dataset = _finish(source, journal)
        journal.publish()
    return dataset


def _encode_all(
    source: Source, journal: Journal, progress: Progress, tokenizer: Tokenizer, num_workers: int
) -> None:
    """Tokenise all documents that are left; write tokens, the index and the journal."""
    limit = progress.request.max_documents or sys.maxsize
    tokens = TokenFileWriter(journal.dataset_dir / TOKENS_FILE, num_tokens=progress.sums[TOKENS])
    index = IndexWriter(journal.index_path, num_documents=progress.num_documents)
    warned_of: set[str] = set()

    def save(progress: Progress) -> Progress:
        tokens.sync()
        index.sync()
        journal.save(progress)
        return progress

    with (
        closing(tokens),
        closing(index),
        # The workers are forked before anything is read: reading starts threads.
        worker_pool(tokenizer, num_workers) as pool,
        limited_memory(),
        closing(_tasks(source, progress, cuts_of(tokenizer))) as tasks,
        progress_bar(progress.sums[TEXT_BYTES]) as bar,
    ):
        num_saved = progress.sums[TEXT_BYTES]
        for task, encoded in encode(tasks, tokenizer, pool, num_workers):
            tokens.add(encoded.tokens)
            before = np.array(progress.sums, ROW_DTYPE)
            index.add(encoded.rows[encoded.ends] + before)
            progress = _after(task, encoded, progress)
            num_text_bytes = progress.sums[TEXT_BYTES]
            num_replaced = progress.sums[REPLACED]
            for line in warnings(source, num_replaced, num_text_bytes, encoded.markers):
                subject = line.split(":")[0]
                if subject not in warned_of:
                    warned_of.add(subject)
                    tqdm.write(one_line(f"warning: {line}"), file=sys.stderr)
            bar.set_postfix_str(
                f"{task.chunk.place}, {progress.sums[TOKENS] / 1e6:,.0f} M tokens", refresh=False
            )
            bar.update(num_text_bytes - bar.n)
            if progress.num_documents >= limit:
                break
            if num_text_bytes - num_saved >= JOURNAL_BYTES:
                progress = save(progress)
                num_saved = num_text_bytes
        save(progress.changed(is_read=True))


def _tasks(source: Source, progress: Progress, cuts: Cuts) -> Generator[Task, None, None]:
    """Yield what is left to encode; of the chunk at which an earlier launch ended, the rest."""
    num_skipped = progress.num_pieces_done
    for chunk in source.chunks(progress.position, cuts):
        num_pieces = num_skipped
        pieces = itertools.islice(chunk.pieces, num_skipped, None)
        sizes = ((piece, len(piece.data)) for piece in pieces)
        for group, _ in grouped(sizes, TASK_BYTES):
            num_pieces += len(group)
            yield Task(group, chunk, num_pieces)
        if num_pieces == num_skipped:  # it has no text, but files that are left out
            yield Task([], chunk, num_pieces)
        num_skipped = 0


def _after(task: Task, encoded: Encoded, progress: Progress) -> Progress:
    """Return the progress when the result of a task is written."""
    sums = np.array(progress.sums, ROW_DTYPE)
    if task.pieces:
        sums += encoded.rows[-1]
    return progress.changed(
        position=task.chunk.position,
        num_pieces_done=task.num_pieces,
        num_documents=progress.num_documents + int(encoded.ends.sum()),
        sums=sums.tolist(),
        losses=progress.losses + encoded.losses,
        left_out=progress.left_out | found if (found := task.chunk.left_out) else progress.left_out,
    )


def _finish(source: Source, journal: Journal) -> Prepared:
    """Split the documents; write the headers of both token files and the dataset card."""
    progress = journal.progress
    assert progress is not None and progress.is_read
    request = progress.request
    fraction = request.validation_fraction
    left_out = source.left_out | progress.left_out
    index = Index(journal.index_path)
    num_documents = min(progress.num_documents, request.max_documents or sys.maxsize)
    total = index.counts(num_documents)
    num_repeated = 0
    if num_documents == 1 and total.num_text_bytes and not request.document_separator:
        num_documents = 2  # parts of the one
        num_train = 1
        # The text's own share, not that of the tokens: the same with every tokenizer.
        train = Counts(
            1,
            num_training_documents(total.num_tokens, fraction),
            num_training_documents(total.num_text_bytes, fraction),
        )
        findings = Findings.of(index.documents(0, 1))
    else:
        _check_documents(journal, total, left_out)
        num_train = num_training_documents(num_documents, fraction)
        train = index.counts(num_train)
        findings = Findings.of(index.documents(0, num_documents))
        num_repeated = index.num_repeated(num_train, num_documents)
    tokens_path = journal.dataset_dir / TOKENS_FILE
    if not progress.is_split:
        check_disk_space(journal.dir, 2 * (total.num_tokens - train.num_tokens), "tokens")
        with closing(
            TokenFileWriter(tokens_path.with_name(token_file_name("validation")))
        ) as writer:
            for tokens in read_tokens(tokens_path, train.num_tokens, total.num_tokens):
                writer.add(tokens)
            writer.sync()
        journal.save(progress.changed(is_split=True))
    validation = Counts(
        num_documents - num_train,
        total.num_tokens - train.num_tokens,
        total.num_text_bytes - train.num_text_bytes,
    )
    dataset = Prepared(
        request,
        {"train": train, "validation": validation},
        findings,
        left_out,
        num_repeated=num_repeated,
        losses=progress.losses,
        has_last_for_validation=True,
    )
    write_headers(journal.dataset_dir, dataset)
    return dataset


def _check_documents(journal: Journal, total: Counts, left_out: dict[str, str]) -> None:
    """Refuse a source without text, or one that cannot fill both splits. Raises: UserError."""
    if total.num_documents >= 2 and total.num_text_bytes:
        return
    assert journal.progress is not None
    request = journal.progress.request
    journal.forget()  # its files may be replaced then
    hint = "a document is a row, a JSON object or a file of text"
    if request.document_separator:
        hint = f"is {request.document_separator!r} between them? (--document-separator)"
    if total.num_documents >= 2:
        hint = "all of them are empty"
    elif left_out:
        name, reason = next(iter(left_out.items()))
        first = ", the first" if len(left_out) > 1 else ""
        hint = f"left out {counted(len(left_out), 'file')}{first}: {name}: {reason}"
    found = counted(total.num_documents, "document")
    raise UserError(f"{request.source}: {found} found; wanted at least 2, with text; {hint}")


def write_headers(dataset_dir: Path, dataset: Prepared) -> None:
    """Write the headers of both token files, whose tokens are written, and the dataset card.

    What a file has beyond the tokens of its split is cut off: the training file still has those
    that were copied to the validation file.
    """
    for split, counts in dataset.splits.items():
        path = dataset_dir / token_file_name(split)
        writer = TokenFileWriter(path, num_tokens=counts.num_tokens)
        chunks = read_tokens(path, 0, counts.num_tokens)
        writer.finish(dataset.metadata(split, max(int(tokens.max()) for tokens in chunks)))
    write_card(dataset_dir, dataset)
