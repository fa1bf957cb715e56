"""Documents to a token dataset: two safetensors files that appear only when complete."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Iterator
from pathlib import Path

from basics.errors import DISK_FULL, UserError, cannot_be_written
from basics.files import write_atomically
from preparation.cutting import BadShard
from preparation.dataset_card import write_card
from preparation.documents import Shard, Source
from preparation.encoding import Encoded, Encoder, EndOfShard, TokenizerPlace
from preparation.journal import Journal, Progress
from preparation.planning import (
    PrepareOptions,
    check_disk,
    check_output_dir,
    num_training_documents,
    plan_request,
    with_advice,
)
from preparation.progress_display import ProgressDisplay
from preparation.readers import TASK_BYTES, Task, uncut
from preparation.token_file_writer import TokenFileWriter
from tokens.tokenizer import ChosenTokenizer, choose_tokenizer, file_beside
from tokens.tokenizer_file import parse_tokenizer

SPLITS = ("train", "validation")


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
        self._num_train = num_training_documents(self._request.num_documents,
                                                 options.validation_fraction)
        self._progress = journal.progress
        self._num_documents = self._first_document(self._progress.num_shards)
        self._is_bad = False  # the current shard
        self._writers = {
            split: TokenFileWriter(journal.dataset_dir / f"{split}.safetensors",
                                   num_tokens=self._progress.of(split).num_tokens)
            for split in SPLITS
        }

    def run(self) -> Progress:
        """Tokenise all remaining shards, then write the headers and the dataset card."""
        is_small = sum(shard.num_bytes for shard in self._shards) < 2 * TASK_BYTES
        num_workers = 1 if is_small else self._options.num_workers
        place = TokenizerPlace(self._tokenizer.name,
                               file_beside(self._journal.dataset_dir, self._tokenizer.name))
        try:
            if place.path is not None:  # the workers read the copy that belongs to the dataset
                write_atomically(place.path, self._tokenizer.content, durable=True)
            with (
                Encoder(place, num_workers=num_workers) as encoder,
                ProgressDisplay(self._request, self._num_documents) as display,
            ):
                for result in encoder.encode(self._tasks()):
                    self._process(result)
                    display.show(self._num_documents, self._progress)
            self._finish()
        finally:
            for writer in self._writers.values():
                with contextlib.suppress(OSError):  # a full disk: reported already
                    writer.close()
        return self._progress

    def _tasks(self) -> Iterator[Task | EndOfShard | None]:
        numbers = range(self._progress.num_shards, len(self._shards))
        fetches = (_Fetch(self._shards[number]) for number in numbers)
        next_fetch = next(fetches, None)
        for number in numbers:
            fetch, next_fetch = next_fetch, next(fetches, None)  # download one shard ahead
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
        return self._num_documents >= self._request.num_documents

    def _process(self, result: Encoded | BadShard | EndOfShard) -> None:
        if isinstance(result, EndOfShard):
            self._end_shard(result.number)
        elif self._has_all():
            pass  # more documents were read ahead than max_documents
        elif isinstance(result, BadShard):
            if not self._options.skip_bad_shards:
                raise with_advice(result)
            self._is_bad = True
        elif not self._is_bad:
            self._write(result)

    def _write(self, encoded: Encoded) -> None:
        """Append the documents to the training file up to its last one, then to the other."""
        wanted = self._request.num_documents - self._num_documents
        if len(encoded.ends) >= wanted:
            encoded = encoded.first_documents(wanted)
        num_train = min(max(self._num_train - self._num_documents, 0), len(encoded.ends))
        boundary = encoded.sizes.tolist()  # tokens, bytes, characters
        if self._num_documents + len(encoded.ends) >= self._num_train:
            boundary = encoded.ends[num_train - 1].tolist() if num_train else [0, 0, 0]
        num_in = {"train": num_train, "validation": len(encoded.ends) - num_train}
        parts = {"train": encoded.tokens[:boundary[0]], "validation": encoded.tokens[boundary[0]:]}
        _, num_bytes, num_characters = encoded.sizes.tolist()
        bytes_in = {"train": boundary[1], "validation": num_bytes - boundary[1]}
        counts = {}
        for split, tokens in parts.items():
            self._writers[split].add(tokens)
            counts[split] = self._progress.of(split).with_more(
                tokens, num_documents=num_in[split], num_text_bytes=bytes_in[split])
        self._progress = self._progress.model_copy(update=counts | {
            "num_bytes": self._progress.num_bytes + num_bytes,
            "num_characters": self._progress.num_characters + num_characters,
        })
        self._num_documents += len(encoded.ends)

    def _end_shard(self, number: int) -> None:
        end = min(self._first_document(number + 1), self._request.num_documents)
        facts = self._request.shards[number]
        if not self._is_bad and self._num_documents != end:
            found = self._num_documents - self._first_document(number)
            self._process(BadShard(f"{facts.name}: contains {found} documents, but"
                                   f" {facts.num_documents} were counted"))
        bad_shards = self._progress.bad_shards
        if self._is_bad or facts.is_bad:
            bad_shards = [*bad_shards, facts.name]
        if self._is_bad:  # remove the part that could be read
            self._progress = self._journal.progress
            for split, writer in self._writers.items():
                writer.truncate(self._progress.of(split).num_tokens)
        self._num_documents, self._is_bad = end, False
        self._progress = self._progress.model_copy(
            update={"num_shards": number + 1, "bad_shards": bad_shards})
        for writer in self._writers.values():
            writer.sync()
        self._journal.add(self._progress)
        self._shards[number].release()

    def _first_document(self, number: int) -> int:
        return sum(facts.num_documents for facts in self._request.shards[:number])

    def _finish(self) -> None:
        for split, writer in self._writers.items():
            count = self._progress.of(split)
            if not count.num_tokens:
                raise UserError(f"{self._source.name}: without the damaged shards,"
                                f" {split}.safetensors is empty; replace them")
            writer.finish(count.metadata() | {
                "tokenizer": self._request.tokenizer,
                "source": self._request.source[:400],
                "revision": self._request.revision[:100],
            })
        write_card(self._journal.dataset_dir, self._source, self._request, self._progress)


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
