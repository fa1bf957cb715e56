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
from preparation.card import token_metadata, write_card
from preparation.cutting import BadShard
from preparation.encoding import Encoded, Encoder, EndOfShard, Item, cuts_of
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
from preparation.parts import Part, share_of, write_part
from preparation.progress_display import ProgressDisplay
from preparation.reading import TASK_BYTES
from preparation.sources import FileShard, Shard, Source
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
    part: Part | None = None  # prepare only this part, for several machines


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
    if not 0 < options.validation_fraction < 1:
        raise UserError(f"--validation-fraction is {options.validation_fraction}; wanted a number"
                        " between 0 and 1")
    if options.part is not None:
        source = share_of(source, options.part)
    request = Request(
        source=source.name, revision=source.revision, asked_revision=source.asked_revision,
        text_column=source.text_column, tokenizer=tokenizer.name,
        validation_fraction=options.validation_fraction, max_documents=options.max_documents,
        part=str(options.part or ""))
    journal = Journal(output_dir)
    try:
        with journal:
            _check_disk(source, options, journal)
            journal.begin(request, source.shards)
            progress = _Preparation(source, options, journal, tokenizer).run()
            journal.publish(output_dir)
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
        if not isinstance(shards[0], FileShard):  # such files may hold much besides the text
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

    def __init__(self, source: Source, options: PrepareOptions, journal: Journal,
                 tokenizer: ChosenTokenizer) -> None:
        self._source, self._options, self._journal = source, options, journal
        self._tokenizer, self._cuts = tokenizer, cuts_of(tokenizer.load())
        self._progress = journal.progress
        self._is_bad = False  # the current shard
        self._tokens = TokenFileWriter(journal.dataset_dir / TOKENS,
                                       num_tokens=self._progress.train.num_tokens)
        self._table = DocumentTable(journal.table_path,
                                    num_documents=self._progress.train.num_documents)
        self._display = ProgressDisplay([shard.num_bytes for shard in source.shards],
                                        journal.num_finished, self._progress,
                                        options.max_documents)

    def run(self) -> Progress:
        """Tokenise all remaining shards, then write the headers and the dataset card."""
        is_small = sum(shard.num_bytes for shard in self._source.shards) < 2 * TASK_BYTES
        num_workers = 1 if is_small else self._options.num_workers
        name, dataset_dir = self._tokenizer.name, self._journal.dataset_dir
        path = file_beside(dataset_dir, name)
        try:
            if path is not None:  # the workers read the copy that belongs to the dataset
                write_atomically(path, self._tokenizer.content, durable=True)
            load = partial(load_tokenizer, name, path)
            with Encoder(load, num_workers=num_workers) as encoder, self._display:
                for item, result in encoder.encode(self._items()):
                    self._process(item, result)
            self._finish()
        finally:
            with contextlib.suppress(OSError):  # a full disk: reported already
                self._tokens.close()
                self._table.close()
        return self._progress

    def _items(self) -> Iterator[Item | None]:
        """Yield the tasks of all shards that are left, and their ends; see `Encoder.encode`."""
        shards, has_limit = self._source.shards, self._options.max_documents is not None
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
                for task in shards[number].tasks(self._cuts):
                    if self._has_all():
                        break
                    yield task
            except BadShard as error:
                yield error
            yield EndOfShard(number)

    def _has_all(self) -> bool:
        limit, progress = self._options.max_documents, self._progress
        is_split = progress.validation.num_tokens > 0  # a file that is new since then is too late
        return is_split or (limit is not None and progress.num_documents >= limit)

    def _process(self, item: Item, result: Encoded | BadShard | EndOfShard) -> None:
        if isinstance(result, EndOfShard):
            self._end_shard(result.number)
        elif self._has_all() or self._is_bad:
            pass  # more documents were read ahead than are wanted
        elif isinstance(result, BadShard):
            self._give_up_shard(result)
        else:
            self._write(result)
        self._display.show(item, self._progress)

    def _write(self, encoded: Encoded) -> None:
        progress, limit = self._progress, self._options.max_documents
        if limit is not None and len(encoded.ends) >= limit - progress.num_documents:
            encoded = encoded.first_documents(limit - progress.num_documents)
        totals = [progress.train.num_tokens, progress.num_bytes, progress.num_characters]
        self._table.add(encoded.ends + np.array(totals, dtype=np.int64))
        self._tokens.add(encoded.tokens)
        _, num_bytes, num_characters = encoded.sizes.tolist()
        self._progress = progress.changed(
            train=progress.train.with_more(encoded.tokens, num_documents=len(encoded.ends),
                                           num_text_bytes=num_bytes),
            num_characters=progress.num_characters + num_characters)
        for file in encoded.bad_files:
            self._leave_out(file.name, file.reason)

    def _give_up_shard(self, error: BadShard) -> None:
        """Remove the part of the current shard that could be read."""
        self._is_bad = True
        self._progress = self._journal.progress
        self._tokens.truncate(self._progress.train.num_tokens)
        self._table.truncate(self._progress.num_documents)
        self._leave_out(self._source.shards[self._journal.num_finished].name, str(error))

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

    def _end_shard(self, number: int) -> None:
        shard = self._source.shards[number]
        self._is_bad = False
        self._tokens.sync()
        self._table.sync()
        self._journal.add(self._progress, name=shard.name, identity=shard.identity)
        shard.release()

    def _finish(self) -> None:
        journal, request = self._journal, self._journal.request
        assert request is not None
        if request.part:
            stream = TokenStream(self._tokens.path, self._table.path)
            self._progress = self._progress.changed(
                num_empty=stream.num_empty(stream.num_documents))
        elif not self._progress.validation.num_tokens:
            self._split(request)
        metadata = token_metadata(request, self._progress)
        self._tokens.finish(self._progress.train.metadata() | metadata)
        if request.part:
            write_part(journal.dataset_dir, self._source, request, self._progress)
        else:
            write_card(journal.dataset_dir, self._source.origin(), request, self._progress)

    def _split(self, request: Request) -> None:
        """Move the last documents to the validation file; of a single text the last tokens."""
        progress, fraction = self._progress, request.validation_fraction
        num_documents, num_bytes = progress.num_documents, progress.num_bytes
        stream = TokenStream(self._tokens.path, self._table.path)
        num_empty = stream.num_empty(num_documents)
        if self._source.is_one_text() and num_bytes:
            totals = [progress.num_tokens, num_bytes, progress.num_characters]
            first = [num_training_documents(total, fraction) for total in totals]
            self._table.truncate(0)
            self._table.add(np.array([first, totals]))
            self._table.sync()
            num_documents = 2
        check_documents(progress, num_documents, self._source.name)
        num_train = num_training_documents(num_documents, fraction)
        validation = TokenFileWriter(self._journal.dataset_dir / "validation.safetensors")
        nothing = SplitCount(num_text_bytes=0)
        progress = progress.changed(
            train=stream.copy(0, num_train, nothing),
            validation=stream.copy(num_train, num_documents, nothing, validation),
            num_empty=num_empty)
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
