"""Documents to a token dataset: two safetensors files that appear only when complete.

All tokens go to one file; then those of the last documents are moved to the validation file. A part
keeps the one file; the parts of a preparation are joined by reading them.
"""

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from basics.errors import UserError, cannot_be_written, one_line, print_error
from basics.text import counted
from preparation.card import MAX_BAD_NAMES, Prepared, progress_bar, write_card
from preparation.cutting import BadShard, NoColumn
from preparation.encoding import Item, Result, cuts_of, encode, worker_pool
from preparation.journal import TOKENS, Finished, Journal, check_disk_space, check_output_dir
from preparation.parts import names_and_sizes, read_parts, share_of, write_part
from preparation.reading import TASK_BYTES, Task
from preparation.sources import Shard, Source
from preparation.token_stream import (
    Counts,
    DocumentEnds,
    TokenFileWriter,
    num_text_bytes,
    num_training_documents,
    read_tokens,
    start_of_last,
)
from tokens.tokenizer import Tokenizer, choose_tokenizer

LEAST_TOKEN_BYTES = 0.2  # for each byte of text; plain text has 0.4


@dataclass(frozen=True)
class PrepareOptions:
    """The options of a preparation, besides its source."""

    tokenizer: str = "gpt2"  # or bytes, or the path of a tokenizer.json or of its directory
    validation_fraction: float = 0.01
    max_documents: int | None = None
    num_workers: int = 1
    skip_bad_shards: bool = False
    part: str = ""  # I/N: prepare only this part, for several machines


def prepare_dataset(source: Source, output_dir: Path, options: PrepareOptions) -> Prepared:
    """Tokenise documents: the first ones for training, the last ones for validation.

    Everything is written next to `output_dir` and renamed to it when it is complete. After a kill
    or an error, the same call continues the work.

    Raises: UserError: `output_dir` is not empty, the source cannot be used or differs from that of
        an unfinished preparation, or the disk is full.
    """
    output_dir = check_output_dir(output_dir)
    tokenizer = choose_tokenizer(options.tokenizer)
    request = source.request.changed(
        tokenizer=tokenizer.name,
        validation_fraction=options.validation_fraction,
        max_documents=options.max_documents,
    )
    if options.part:
        if options.max_documents is not None:
            raise UserError(
                "--max-documents: is not for a part; leave it out, or prepare all on one machine"
            )
        request = request.changed(part=options.part, names_and_sizes=names_and_sizes(source))
        source = share_of(source, options.part)
    return _prepare(replace(source, request=request), output_dir, tokenizer, options)


def join_parts(
    part_dirs: Sequence[Path], output_dir: Path, *, skip_bad_shards: bool = False
) -> Prepared:
    """Write the dataset of all parts, as `prepare_dataset` does; the parts are not changed.

    Raises: UserError: a part is missing, damaged, or of another preparation; or for the reasons
        of `prepare_dataset`.
    """
    output_dir = check_output_dir(output_dir)
    source, tokenizer = read_parts(part_dirs)
    return _prepare(source, output_dir, tokenizer, PrepareOptions(skip_bad_shards=skip_bad_shards))


def check_documents(source: Source, output_dir: Path, options: PrepareOptions) -> None:
    """Refuse what `encode_documents` would refuse, as far as it is seen without reading documents.

    Raises: UserError.
    """
    journal = Journal(output_dir)
    with journal.locked():
        _check_shards(source, journal, options)


def encode_documents(
    source: Source, output_dir: Path, tokenizer: Tokenizer, options: PrepareOptions
) -> Journal:
    """Tokenise the documents of a source, and leave them in the directory of their journal.

    They are neither split nor published. After a kill or an error, the same call continues, also
    with a lower `max_documents`; there may then be more documents than that. Raises: UserError, as
    `prepare_dataset`; OSError: they cannot be written.
    """
    journal = Journal(output_dir)
    with journal.locked():
        if journal.lines:
            assert journal.request is not None
            earlier = journal.request.max_documents
            if (earlier or sys.maxsize) > (source.request.max_documents or sys.maxsize):
                source = replace(source, request=source.request.changed(max_documents=earlier))
        _begin(source, journal, tokenizer, options).encode()
    return journal


def _prepare(
    source: Source, output_dir: Path, tokenizer: Tokenizer, options: PrepareOptions
) -> Prepared:
    journal = Journal(output_dir)
    try:
        with journal.locked():
            dataset = _begin(source, journal, tokenizer, options).run()
            journal.publish()
    except OSError as error:
        raise cannot_be_written(Path(error.filename or output_dir), error) from None
    return dataset


def _begin(
    source: Source, journal: Journal, tokenizer: Tokenizer, options: PrepareOptions
) -> "_Preparation":
    """Check what can be checked at once, then start or continue. The journal must be locked."""
    _check_disk(source, journal)
    _check_shards(source, journal, options)
    journal.begin(source.request, source.shards, tokenizer)
    return _Preparation(source, journal, options, tokenizer)


def _check_disk(source: Source, journal: Journal) -> None:
    """Refuse a disk that has certainly too little space for tokens or downloads."""
    shards = source.shards[len(journal.shards) :]
    takes_all = source.request.max_documents is None
    if takes_all and source.kinds <= {"text"}:  # other files may hold much besides the text
        num_bytes = sum(shard.num_bytes for shard in shards)
        check_disk_space(journal.dir, LEAST_TOKEN_BYTES * num_bytes, "tokens")
    if source.raw_dir is not None:
        source.raw_dir.mkdir(parents=True, exist_ok=True)
        sizes = sorted(shard.missing_bytes() for shard in shards)
        if not (source.keeps_raw and takes_all):
            sizes = sizes[-2:]  # while one file is read, the next one is downloaded
        check_disk_space(source.raw_dir, sum(sizes), "files from the hub")


def _check_shards(source: Source, journal: Journal, options: PrepareOptions) -> None:
    """Refuse at once what would be refused after hours. Raises: UserError: too many of the files
    that are left cannot be read, as far as this can be seen without reading them."""
    if options.skip_bad_shards or source.request.max_documents is not None:
        return
    num_bad = len(journal.bad_files)
    for shard in source.shards[len(journal.shards) :]:
        try:
            shard.check()
        except BadShard as error:
            num_bad += 1
            if num_bad > source.max_bad_files:
                raise _too_many(str(error), num_bad) from None


def _too_many(reason: str, num_bad_files: int) -> UserError:
    return UserError(
        f"{reason}; files that cannot be read so far: {num_bad_files}; replace them,"
        " or skip them with --skip-bad-shards"
    )


class _Preparation:
    """A preparation in progress: splits shards into tasks, writes tokens and the journal."""

    def __init__(
        self, source: Source, journal: Journal, options: PrepareOptions, tokenizer: Tokenizer
    ) -> None:
        self._source = source
        self._request = source.request
        self._journal = journal
        self._limit = self._request.max_documents or sys.maxsize
        self._max_bad_files = sys.maxsize if options.skip_bad_shards else source.max_bad_files
        is_small = sum(shard.num_bytes for shard in source.shards) < 2 * TASK_BYTES
        self._num_workers = 1 if is_small else options.num_workers
        self._tokenizer = tokenizer
        counts = journal.last.counts
        self._tokens = TokenFileWriter(journal.dataset_dir / TOKENS, num_tokens=counts.num_tokens)
        self._ends = DocumentEnds(journal.ends_path, num_documents=counts.num_documents)
        self._first_reason = "".join(journal.bad_files[:1])  # of an earlier launch only its name
        self._warned_of: set[str] = set()
        self._begin_shard()

    def _begin_shard(self, *, is_bad: bool = False) -> None:
        """Count from the end of the last finished shard; of a bad one the rest is dropped."""
        self._counts = self._journal.last.counts
        self._findings = self._journal.last.findings
        self._bad_files: list[str] = []  # of the shard
        self._is_bad = is_bad

    def run(self) -> Prepared:
        """Tokenise all remaining shards, then write the headers and the dataset card."""
        self.encode()
        return self._finish()

    def encode(self) -> None:
        """Tokenise all remaining shards."""
        try:
            with worker_pool(self._tokenizer, self._num_workers) as pool:
                self._encode_all(encode(self._items(), self._tokenizer, pool, self._num_workers))
        finally:
            with contextlib.suppress(OSError):  # a full disk: reported already
                self._tokens.close()
                self._ends.close()

    def _items(self) -> Iterator[Item | None]:
        """Yield the tasks of all shards that are left, and their ends; see `encode`."""
        shards = self._source.shards
        has_limit = self._request.max_documents is not None
        cuts = cuts_of(self._tokenizer)
        ahead: Future[None] | None = None
        for number in range(len(self._journal.shards), len(shards)):
            if has_limit:
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
        limit = self._request.max_documents
        sizes = [shard.num_bytes for shard in self._source.shards]
        finished = sum(sizes[: len(self._journal.shards)])  # bytes of the source
        num_read = finished  # with those of the shard that is read
        if finished:
            print_error(f"continuing after document {self._counts.num_documents:,}")
        if limit:
            progress = progress_bar(limit, self._counts.num_documents, " documents")
        else:
            progress = progress_bar(sum(sizes), finished, "B")
        with progress as bar:
            for item, result in results:
                self._process(result)
                if isinstance(item, Shard):
                    finished += item.num_bytes
                    num_read = finished  # the sizes of tasks are only estimates
                elif isinstance(item, Task):
                    num_read += item.source_bytes
                done = self._counts.num_documents if limit else num_read
                bar.set_postfix_str(f"{self._counts.num_tokens / 1e6:,.0f} M tokens", refresh=False)
                bar.update(done - bar.n)

    def _has_all(self) -> bool:  # after the split, new files are too late
        return self._journal.is_split or self._counts.num_documents >= self._limit

    def _process(self, result: Result) -> None:
        """Write the tokens of a task, or record that a shard is finished or cannot be read."""
        if isinstance(result, Shard):
            self._tokens.sync()
            self._ends.sync()
            self._journal.add(
                Finished(
                    name=result.name,
                    identity=result.identity,
                    counts=self._counts,
                    findings=self._findings,
                    bad_files=self._bad_files,
                )
            )
            self._begin_shard()
            self._warn("damage", self._source.about_damage(self._findings, self._counts))
            result.release()
        elif self._has_all() or self._is_bad:
            pass  # more documents were read ahead than are wanted
        elif isinstance(result, BadShard):  # remove the part of the shard that could be read
            self._begin_shard(is_bad=True)
            self._tokens.truncate(self._counts.num_tokens)
            self._ends.truncate(self._counts.num_documents)
            shard = self._source.shards[len(self._journal.shards)]
            is_first = self._counts.num_documents == 0
            # The others may be like it, and they could be a hundred downloads.
            is_fatal = is_first and isinstance(result, NoColumn)
            self._leave_out(shard.name, str(result), is_fatal=is_fatal)
        else:
            num_wanted = self._limit - self._counts.num_documents
            wanted = result.first_documents(num_wanted, self._tokenizer)
            self._tokens.add(wanted.tokens)
            self._ends.add(self._counts.num_text_bytes + wanted.ends)
            self._counts += wanted.counts
            self._findings += wanted.findings
            self._warn("markers", self._source.about_markers(wanted.markers))
            for file in wanted.bad_files:
                self._leave_out(file.name, file.reason)

    def _leave_out(self, name: str, reason: str, *, is_fatal: bool = False) -> None:
        """Note a file that cannot be read. Raises: UserError: there are too many, or it is fatal
        unless all may be left out."""
        self._first_reason = self._first_reason or reason
        self._bad_files.append(name)
        count = len(self._journal.bad_files) + len(self._bad_files)
        if count > self._max_bad_files or (is_fatal and self._max_bad_files < sys.maxsize):
            raise _too_many(reason, count)
        if count <= MAX_BAD_NAMES:
            tqdm.write(one_line(f"left out: {reason}"), file=sys.stderr)

    def _warn(self, subject: str, line: str) -> None:
        """Print a warning, if there is one: once for each subject."""
        if line and subject not in self._warned_of:
            self._warned_of.add(subject)
            tqdm.write(one_line(line), file=sys.stderr)

    def _finish(self) -> Prepared:
        """Write what a finished part has, or the headers of both splits and the dataset card."""
        journal = self._journal
        if not self._request.part and not journal.is_split:
            self._split()
        last = journal.last
        dataset = Prepared(self._request, {"train": last.counts}, last.findings, journal.bad_files)
        if last.validation is None:
            write_part(journal.dataset_dir, dataset, journal.ends_path, self._source.max_bad_files)
            return dataset
        dataset.splits["validation"] = last.validation
        write_headers(journal.dataset_dir, dataset)
        return dataset

    def _split(self) -> None:
        """Copy the last documents to the validation file; of a single text the last tokens."""
        total = self._counts
        fraction = self._request.validation_fraction
        if self._source.is_one_text and total.num_text_bytes:
            total = replace(total, num_documents=2)
            start = num_training_documents(total.num_tokens, fraction)
            # The text's own share, not that of the tokens: the same with every tokenizer.
            train = Counts(1, start, num_training_documents(total.num_text_bytes, fraction))
        else:
            self._check_documents()
            num_train = num_training_documents(total.num_documents, fraction)
            start = start_of_last(
                self._tokens.path,
                total.num_tokens,
                total.num_documents - num_train,
                self._tokenizer.eot_token,
            )
            train = Counts(num_train, start, num_text_bytes(self._ends.path, num_train))
        writer = TokenFileWriter(self._journal.dataset_dir / "validation.safetensors")
        for tokens in read_tokens(self._tokens.path, start, total.num_tokens):
            writer.add(tokens)
        writer.sync()
        writer.close()
        self._journal.add(Finished(counts=train, validation=total - train, findings=self._findings))

    def _check_documents(self) -> None:
        """Refuse a source without text, or one that cannot fill both splits. Raises: UserError."""
        num_documents = self._counts.num_documents
        if num_documents >= 2 and self._counts.num_text_bytes:
            return
        num_bad = len(self._journal.bad_files)
        self._journal.forget()  # its files may be replaced then
        source = self._request.source
        if num_documents >= 2:
            raise UserError(
                f"{source}: has no text: all of its {num_documents:,} documents are empty"
            )
        wanted = "wanted at least 2"
        hint = "a document is a row, a JSON object or a .txt file"
        if self._request.document_separator:
            hint = f"is {self._request.document_separator!r} between them? (--document-separator)"
        if num_bad:
            first = ", the first" if num_bad > 1 else ""
            hint = f"left out {counted(num_bad, 'file')}{first}: {self._first_reason}"
            if self._source.kinds:  # no join, which has no such option
                wanted += ", one of them for the validation split (--validation-fraction)"
        raise UserError(f"{source}: {counted(num_documents, 'document')} found; {wanted}; {hint}")


def write_headers(dataset_dir: Path, dataset: Prepared) -> None:
    """Write the headers of both token files, whose tokens are written, and the dataset card.

    What a file has beyond the tokens of its split is cut off: `_split` leaves the training file
    with those that it has copied to the validation file.
    """
    for split, counts in dataset.splits.items():
        path = dataset_dir / f"{split}.safetensors"
        writer = TokenFileWriter(path, num_tokens=counts.num_tokens)
        chunks = read_tokens(path, 0, counts.num_tokens)
        writer.finish(dataset.metadata(split, max(int(tokens.max()) for tokens in chunks)))
    write_card(dataset_dir, dataset)


def _fetch(shard: Shard) -> Future[None]:
    """Download a shard in a daemon thread: an exiting process does not wait for it."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            shard.fetch()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="download", daemon=True).start()
    return future
