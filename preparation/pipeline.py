"""Documents to a token dataset: two safetensors files that appear only when complete.

All tokens go to one file, with a table of where the documents end; then the last ones are moved to
the validation file.
"""

import contextlib
import errno
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from basics.errors import DISK_FULL, UserError, cannot_be_written, one_line, print_error
from basics.files import write_atomically
from preparation.card import ProgressDisplay, token_metadata, write_card
from preparation.cutting import BadShard
from preparation.encoding import Encoded, Item, Result, cuts_of, encode, worker_pool
from preparation.journal import (
    MAX_BAD_NAMES,
    TOKENS,
    Journal,
    Progress,
    Request,
    SplitCount,
    check_disk_space,
    check_output_dir,
)
from preparation.parts import share_of, write_part
from preparation.reading import TASK_BYTES, Task
from preparation.sources import Shard, Source
from preparation.token_stream import (
    DocumentTable,
    TokenFileWriter,
    TokenStream,
    check_documents,
    num_training_documents,
)
from tokens.tokenizer import ChosenTokenizer, choose_tokenizer, file_beside, load_tokenizer

LEAST_TOKEN_BYTES = 0.2  # for each byte of the source; FineWeb has 0.7, plain text 0.4


@dataclass(frozen=True)
class PrepareOptions:
    """The options of a preparation, besides its source."""

    tokenizer: str = "gpt2"  # or bytes, or the path of a tokenizer.json or of its directory
    validation_fraction: float = 0.01
    max_documents: int | None = None
    num_workers: int = 1
    skip_bad_shards: bool = False
    part: str = ""  # I/N: prepare only this part, for several machines


def prepare_dataset(source: Source, output_dir: Path, options: PrepareOptions) -> Progress:
    """Tokenise documents: the first ones for training, the last ones for validation.

    Everything is written next to `output_dir` and renamed to it when it is complete. After a kill
    or an error, the same call continues the work.

    Raises:
        UserError: `output_dir` is not empty, the source cannot be used or differs from that of an
            unfinished preparation, or the disk is full.
    """
    output_dir = check_output_dir(output_dir)
    tokenizer = choose_tokenizer(options.tokenizer)
    if options.part:
        if options.max_documents is not None:
            raise UserError("--max-documents: is not for a part; leave it out, or prepare all on"
                            " one machine")
        source = share_of(source, options.part)
    request = Request(
        source=source.name, revision=source.revision, asked_revision=source.asked_revision,
        text_column=source.text_column, tokenizer=tokenizer.name,
        validation_fraction=options.validation_fraction, max_documents=options.max_documents,
        part=options.part)
    journal = Journal(output_dir)
    try:
        with journal.locked():
            _check_disk(source, options, journal)
            journal.begin(request, source.shards)
            progress = _Preparation(source, options, journal).run(tokenizer)
            journal.publish()
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise UserError(f"{journal.dir}: the disk is full; free some space, then run the same"
                            f" command again: {journal.num_finished} shards are finished",
                            DISK_FULL) from None
        raise cannot_be_written(output_dir, error) from None
    return progress


def _check_disk(source: Source, options: PrepareOptions, journal: Journal) -> None:
    """Refuse a disk that has certainly too little space for tokens or downloads."""
    shards = source.shards[journal.num_finished:]
    num_bytes = LEAST_TOKEN_BYTES * sum(shard.num_bytes for shard in shards)
    try:
        check_disk_space(journal.dir, num_bytes * (options.max_documents is None), "tokens")
    except UserError as error:
        if source.kind in ("", "text"):  # other files may hold much besides the text
            raise
        print_error(one_line(f"warning: {error} (less if the files hold more than text)"))
    if source.raw_dir is not None:
        try:
            source.raw_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_be_written(source.raw_dir, error) from None
        raw = sorted(shard.missing_bytes() for shard in shards)
        keeps_all = source.keeps_raw and options.max_documents is None
        # One is downloaded ahead.
        check_disk_space(source.raw_dir, sum(raw if keeps_all else raw[-2:]), "files from the hub")


class _Preparation:
    """A preparation in progress: splits shards into tasks, writes tokens and the journal."""

    def __init__(self, source: Source, options: PrepareOptions, journal: Journal) -> None:
        self._source, self._options, self._journal = source, options, journal
        self._progress = journal.progress
        self._is_bad = False  # the current shard
        self._tokens = TokenFileWriter(journal.dataset_dir / TOKENS,
                                       num_rows=self._progress.train.num_tokens)
        self._table = DocumentTable(journal.table_path,
                                    num_rows=self._progress.train.num_documents)

    def run(self, tokenizer: ChosenTokenizer) -> Progress:
        """Tokenise all remaining shards, then write the headers and the dataset card."""
        num_bytes = sum(shard.num_bytes for shard in self._source.shards)
        num_workers = 1 if num_bytes < 2 * TASK_BYTES else self._options.num_workers
        path = file_beside(self._journal.dataset_dir, tokenizer.name)
        try:
            if path is not None:  # the workers read the copy that belongs to the dataset
                write_atomically(path, tokenizer.content, durable=True)
            load = partial(load_tokenizer, tokenizer.name, path)
            with worker_pool(load, num_workers) as pool:
                self._encode_all(encode(self._items(tokenizer), load, pool, num_workers))
            self._finish()
        finally:
            with contextlib.suppress(OSError):  # a full disk: reported already
                self._tokens.close()
                self._table.close()
        return self._progress

    def _items(self, tokenizer: ChosenTokenizer) -> Iterator[Item | None]:
        """Yield the tasks of all shards that are left, and their ends; see `encode`."""
        shards, has_limit = self._source.shards, self._options.max_documents is not None
        cuts = cuts_of(tokenizer.load())
        ahead: Future[None] | None = None
        for number in range(self._journal.num_finished, len(shards)):
            if has_limit and shards[number].missing_bytes():
                yield None  # with the results of all tasks, this shard may not be needed
            if self._has_all():
                break
            fetched = ahead or _fetch(shards[number])
            if not has_limit and number + 1 < len(shards):
                ahead = _fetch(shards[number + 1])
            if not fetched.done():
                yield None  # write the results of all submitted tasks meanwhile
            fetched.result()
            try:
                for task in shards[number].tasks(cuts):
                    if self._has_all():
                        break
                    yield task
            except BadShard as error:
                yield error
            yield shards[number]

    def _encode_all(self, results: Iterator[tuple[Item, Result]]) -> None:
        limit, sizes = self._options.max_documents, [s.num_bytes for s in self._source.shards]
        done = finished = sum(sizes[:self._journal.num_finished])  # bytes of the source
        train = self._progress.train
        if finished:
            print_error(f"continuing after document {train.num_documents:,}")
        with contextlib.closing(ProgressDisplay(
                limit or sum(sizes), train.num_documents if limit else finished,
                train.num_tokens, unit=" documents" if limit else "B")) as display:
            for item, result in results:
                self._process(result)
                if isinstance(item, Shard):
                    done = finished = finished + item.num_bytes
                elif isinstance(item, Task):
                    done += item.source_bytes
                train = self._progress.train
                display.show(train.num_documents if limit else done, train.num_tokens)

    def _has_all(self) -> bool:
        limit = self._options.max_documents  # after the split, new files are too late
        return self._journal.is_split or (
            limit is not None and self._progress.train.num_documents >= limit)

    def _process(self, result: Result) -> None:
        if isinstance(result, Shard):
            self._is_bad = False
            self._tokens.sync()
            self._table.sync()
            self._journal.add(self._progress, result)
            result.release()
        elif self._has_all() or self._is_bad:
            pass  # more documents were read ahead than are wanted
        elif isinstance(result, BadShard):  # remove the part of the shard that could be read
            self._is_bad = True
            self._progress = self._journal.progress
            self._tokens.truncate(self._progress.train.num_tokens)
            self._table.truncate(self._progress.train.num_documents)
            self._leave_out(self._source.shards[self._journal.num_finished].name, str(result))
        else:
            self._write(result)

    def _write(self, encoded: Encoded) -> None:
        progress, limit = self._progress, self._options.max_documents
        train = progress.train
        if limit is not None and len(encoded.ends) >= limit - train.num_documents:
            encoded = encoded.first_documents(limit - train.num_documents)
        totals = [train.num_tokens, train.num_text_bytes, progress.num_characters]
        self._table.add(encoded.ends + np.array(totals, dtype=np.int64))
        self._tokens.add(encoded.tokens)
        num_tokens, num_bytes, num_characters = encoded.sizes.tolist()
        self._progress = progress.changed(
            train=train + SplitCount(num_documents=len(encoded.ends), num_tokens=num_tokens,
                                     num_text_bytes=num_bytes),
            num_characters=progress.num_characters + num_characters)
        for file in encoded.bad_files:
            self._leave_out(file.name, file.reason)

    def _leave_out(self, name: str, reason: str) -> None:
        """Note a file that cannot be read. Raises: UserError, if there are too many."""
        self._progress = self._progress.without(name)
        count = self._progress.num_bad_files
        if not self._options.skip_bad_shards and count > self._source.max_bad_files():
            raise UserError(
                f"{reason}; replace it, or skip it with --skip-bad-shards" if count == 1 else
                f"{reason}; {count} files cannot be read: replace them, or skip them with"
                " --skip-bad-shards")
        if count <= MAX_BAD_NAMES:
            tqdm.write(one_line(f"left out: {reason}"), file=sys.stderr)

    def _finish(self) -> None:
        journal, request = self._journal, self._journal.request
        assert request is not None
        stream = TokenStream(self._tokens.path, self._table.path)
        num_empty = stream.num_empty(stream.num_documents)
        if request.part:
            self._progress = self._progress.changed(
                train=stream.copy(0, stream.num_documents), num_empty=num_empty)
        elif not journal.is_split:
            self._split(request, num_empty)
        metadata = token_metadata(request, self._progress)
        self._tokens.finish(self._progress.train.metadata() | metadata)
        if request.part:
            write_part(journal.dataset_dir, self._source, request, self._progress)
        else:
            write_card(journal.dataset_dir, self._source.origin, request, self._progress)

    def _split(self, request: Request, num_empty: int) -> None:
        """Move the last documents to the validation file; of a single text the last tokens."""
        fraction = request.validation_fraction
        progress = self._progress.changed(num_empty=num_empty)
        num_documents = progress.train.num_documents
        if self._source.is_one_text() and progress.num_characters:
            totals = [progress.train.num_tokens, progress.train.num_text_bytes,
                      progress.num_characters]
            first = [num_training_documents(total, fraction) for total in totals]
            self._table.truncate(0)
            self._table.add(np.array([first, totals]))
            self._table.sync()
            num_documents = 2
        check_documents(progress, num_documents, self._source.name)
        num_train = num_training_documents(num_documents, fraction)
        stream = TokenStream(self._tokens.path, self._table.path)
        validation = TokenFileWriter(self._journal.dataset_dir / "validation.safetensors")
        progress = progress.changed(
            train=stream.copy(0, num_train),
            validation=stream.copy(num_train, num_documents, validation))
        validation.finish(progress.validation.metadata() | token_metadata(request, progress))
        self._journal.add(progress)  # from now on, the training file may be shorter
        self._tokens.truncate(progress.train.num_tokens)
        self._progress = progress


def _fetch(shard: Shard) -> Future[None]:
    """Download a shard in a daemon thread: an exiting process does not wait for it."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            future.set_result(shard.fetch())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
