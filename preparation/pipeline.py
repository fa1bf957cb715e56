"""Documents to a token dataset: two safetensors files that appear only when complete."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from basics.errors import DISK_FULL, UserError, cannot_be_written
from basics.files import write_atomically
from preparation.cutting import BadShard
from preparation.dataset_card import write_card
from preparation.documents import Shard, Source
from preparation.encoding import Encoded, Encoder, EndOfShard
from preparation.journal import Journal, Progress
from preparation.outputs import Output, check_not_empty, token_metadata
from preparation.parts import share_of, write_part
from preparation.planning import (
    PrepareOptions,
    check_disk,
    check_num_documents,
    check_output_dir,
    leave_out,
    num_training_documents,
    plan_request,
)
from preparation.progress_display import ProgressDisplay
from preparation.readers import TASK_BYTES, uncut
from preparation.tasks import Task
from tokens.tokenizer import (
    ChosenTokenizer,
    choose_tokenizer,
    file_beside,
    load_tokenizer,
    parse_tokenizer,
)


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
    journal = Journal(output_dir)
    try:
        with journal:
            request = plan_request(source, options, journal, tokenizer_name=tokenizer.name)
            check_disk(request, journal, source)
            journal.begin(request)
            progress = _Preparation(source, options, journal, tokenizer).run()
            journal.publish(output_dir)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise UserError(f"{journal.dir}: the disk is full; free some space, then run the same"
                            f" command again: {journal.progress.num_shards} shards are finished",
                            DISK_FULL) from None
        raise cannot_be_written(output_dir, error) from None
    return progress


class _Preparation:
    """A preparation in progress: splits shards into tasks, writes tokens and the journal."""

    def __init__(self, source: Source, options: PrepareOptions, journal: Journal,
                 tokenizer: ChosenTokenizer) -> None:
        assert journal.request is not None
        self._tokenizer = tokenizer
        self._source, self._options, self._journal = source, options, journal
        self._request = journal.request
        self._shards = source.shards[:len(self._request.shards)]
        self._limit = self._request.num_documents  # None: all that there are
        if self._limit is None:
            self._limit = options.max_documents
        self._progress = journal.progress
        self._is_bad = False  # the current shard
        self._output = Output(journal)

    def run(self) -> Progress:
        """Tokenise all remaining shards, then write the headers and the dataset card."""
        is_small = sum(shard.num_bytes for shard in self._shards) < 2 * TASK_BYTES
        num_workers = 1 if is_small else self._options.num_workers
        name = self._tokenizer.name
        path = file_beside(self._journal.dataset_dir, name)
        try:
            if path is not None:  # the workers read the copy that belongs to the dataset
                write_atomically(path, self._tokenizer.content, durable=True)
            with (
                Encoder(partial(load_tokenizer, name, path), num_workers=num_workers) as encoder,
                ProgressDisplay(self._request, self._progress.num_documents) as display,
            ):
                for result in encoder.encode(self._tasks()):
                    self._process(result)
                    display.show(self._progress)
            self._finish()
        finally:
            with contextlib.suppress(OSError):  # a full disk: reported already
                self._output.close()
        return self._progress

    def _tasks(self) -> Iterator[Task | EndOfShard | None]:
        numbers = range(self._progress.num_shards, len(self._shards))
        fetches = (_Fetch(self._shards[number]) for number in numbers)
        # Download one shard ahead, unless the one before it may be the last that is needed.
        is_last_unknown = self._request.num_documents is None and self._limit is not None
        next_fetch = None if is_last_unknown else next(fetches, None)
        for number in numbers:
            if is_last_unknown:
                yield None
                if self._has_all():
                    break
                fetch = next(fetches)
            else:
                fetch, next_fetch = next_fetch, next(fetches, None)
            if not fetch.is_done():
                yield None  # write the results of all submitted tasks meanwhile
            fetch.wait()
            if not self._request.shards[number].is_bad:
                for task in self._tasks_of(self._shards[number]):
                    if self._has_all():
                        break
                    yield task
            yield EndOfShard(number)

    def _tasks_of(self, shard: Shard) -> Iterator[Task]:
        if self._tokenizer.content is None:
            return shard.tasks()
        tokenizer = parse_tokenizer(self._tokenizer.content)
        return uncut(shard.tasks(), shard.name, at_safe_cuts=not tokenizer.splits_like_gpt2)

    def _has_all(self) -> bool:
        return self._limit is not None and self._progress.num_documents >= self._limit

    def _process(self, result: Encoded | BadShard | EndOfShard) -> None:
        if isinstance(result, EndOfShard):
            self._end_shard(result.number)
        elif self._has_all():
            pass  # more documents were read ahead than max_documents
        elif isinstance(result, BadShard):
            self._give_up_shard(result)
        elif not self._is_bad:
            self._write(result)

    def _write(self, encoded: Encoded) -> None:
        if self._limit is not None:
            wanted = self._limit - self._progress.num_documents
            if len(encoded.ends) >= wanted:
                encoded = encoded.first_documents(wanted)
        progress = self._output.write(encoded, self._progress)
        _, num_bytes, num_characters = encoded.sizes.tolist()
        self._progress = progress.model_copy(update={
            "num_documents": progress.num_documents + len(encoded.ends),
            "num_bytes": progress.num_bytes + num_bytes,
            "num_characters": progress.num_characters + num_characters,
        })
        for _, file in encoded.bad_files:
            self._progress = self._progress.without(file.name)
            leave_out(self._progress.num_bad_files, file.reason, self._source, self._options)

    def _give_up_shard(self, error: BadShard) -> None:
        if not self._is_bad:
            leave_out(self._journal.progress.num_bad_files + 1, str(error), self._source,
                      self._options)
        self._is_bad = True

    def _end_shard(self, number: int) -> None:
        before, facts = self._journal.progress, self._request.shards[number]
        wanted = facts.num_documents
        if wanted is not None and self._limit is not None:
            wanted = min(wanted, self._limit - before.num_documents)
        found = self._progress.num_documents - before.num_documents
        if wanted is not None and found != wanted:
            self._give_up_shard(BadShard(f"{facts.name}: contains {found} documents, but"
                                         f" {facts.num_documents} were counted"))
        if self._is_bad:  # remove the part that could be read; the splits stay where they were
            self._output.truncate(before)
            self._output.leave_out(wanted or 0, before)
            self._progress = before.model_copy(
                update={"num_documents": before.num_documents + (wanted or 0)})
        if self._is_bad or facts.is_bad:
            self._progress = self._progress.without(facts.name)
        self._is_bad = False
        self._progress = self._progress.model_copy(update={"num_shards": number + 1})
        self._output.sync()
        self._journal.add(self._progress)
        self._shards[number].release()

    def _finish(self) -> None:
        if self._request.part:
            self._output.finish(self._progress, token_metadata(self._request, self._progress))
            write_part(self._journal.dataset_dir, self._source, self._request, self._progress)
            return
        if not self._progress.validation.num_tokens:
            self._split()
        self._output.finish(self._progress, token_metadata(self._request, self._progress))
        write_card(self._journal.dataset_dir, self._source.origin(), self._request,
                   self._progress)

    def _split(self) -> None:
        """Divide the documents into splits, now that their number is known."""
        progress, fraction = self._progress, self._options.validation_fraction
        if self._source.is_one_text() and progress.num_characters:
            progress = self._output.divide(progress, fraction)
        check_num_documents(progress.num_documents, self._source.name)
        progress = self._output.split(progress, num_train=num_training_documents(
            progress.num_documents, fraction))
        check_not_empty(progress, self._source.name)
        self._output.sync()
        self._journal.add(progress)  # from now on, the training file may be shorter
        self._output.truncate(progress)
        self._progress = progress


class _Fetch:
    """Downloads one shard, in a daemon thread: an exiting process does not wait for it."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._shard.fetch()
        except BaseException as error:
            self._error = error
