"""Tokenise on all cores: tasks are sent to worker processes, tokens come back in order."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait
from types import TracebackType

import numpy as np
import tiktoken

from basics.errors import UserError
from preparation.cutting import BadShard, Cuts, Piece, joined
from preparation.reading import BadFile, Task
from tokens.tokenizer import END_OF_TEXT, FileTokenizer, Tokenizer

# Limits of the submitted tasks: enough that no worker waits, few enough that memory stays small.
TASKS_PER_WORKER = 3
MAX_BYTES = 2**26  # of text, for all workers together
MAX_BYTES_PER_WORKER = 6 * 2**20  # used instead if it allows more, with many workers
BATCH_CHARACTERS = 2**19  # encoded in one call
LoadTokenizer = Callable[[], Tokenizer]  # is sent to the workers


@dataclass(frozen=True)
class Encoded:
    """The result of a task: tokens, with an end-of-text token after each document."""

    tokens: np.ndarray  # (num_tokens,) uint16
    ends: np.ndarray  # (num_documents, 3) int64: tokens, bytes, characters until its end
    sizes: np.ndarray  # (3,) int64: the same for the whole task
    bad_files: Sequence[BadFile] = ()

    def first_documents(self, num_documents: int) -> Encoded:
        """Return the part up to the end of the given number of documents."""
        sizes = self.ends[num_documents - 1]
        return Encoded(self.tokens[:sizes[0]], self.ends[:num_documents], sizes, self.bad_files)


def encode_task(task: Task, load: LoadTokenizer) -> Encoded | BadShard:
    """Tokenise a task; return the error if it cannot be read."""
    tokenizer = load()
    end_of_text = np.array([tokenizer.eot_token], dtype=np.uint16)
    pieces: list[np.ndarray] = [np.empty(0, dtype=np.uint16)]
    ends: list[tuple[int, int, int]] = []
    num_tokens = num_bytes = num_characters = 0
    try:
        for (text, ends_document, _), ids in encoded_pieces(task, tokenizer):
            pieces.append(ids)
            num_tokens += len(ids)
            num_bytes += len(text) if text.isascii() else len(text.encode())
            num_characters += len(text)
            if ends_document:
                pieces.append(end_of_text)
                num_tokens += 1
                ends.append((num_tokens, num_bytes, num_characters))
    except BadShard as error:
        return error
    return Encoded(np.concatenate(pieces), np.array(ends, dtype=np.int64).reshape(-1, 3),
                   np.array([num_tokens, num_bytes, num_characters]), task.bad_files)


def cuts_of(tokenizer: Tokenizer) -> Cuts:
    """Return where a document may be cut without a change of its tokens."""
    if not isinstance(tokenizer, FileTokenizer):
        return "any"
    return "safe" if tokenizer.splits_like_gpt2 else "none"


def encoded_pieces(task: Task, tokenizer: Tokenizer) -> Iterator[tuple[Piece, np.ndarray]]:
    """Yield the pieces of a task's text with their tokens, (n,) uint16. Raises: BadShard."""
    if isinstance(tokenizer, FileTokenizer):
        for piece in joined(task.pieces(), cuts_of(tokenizer)):
            yield piece, np.array(tokenizer.encode_ordinary(piece.text), dtype=np.uint16)
        return
    for batch in _batches(task.pieces()):
        yield from zip(batch, encode_batch([piece.text for piece in batch], tokenizer),
                       strict=True)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    num_characters = 0
    for piece in pieces:
        batch.append(piece)
        num_characters += len(piece.text)
        if num_characters >= BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def encode_batch(texts: Sequence[str], tokenizer: tiktoken.Encoding) -> list[np.ndarray]:
    """Return the tokens of each text, (n,) uint16. A literal <|endoftext|> in a text stays text.

    One call encodes them all, with end-of-text tokens between them: faster than a call for each.
    """
    together = END_OF_TEXT.join(texts)
    if together.count(END_OF_TEXT) >= len(texts):  # one of the texts contains it
        encoded = (tokenizer.encode_to_numpy(text, disallowed_special=()) for text in texts)
        return [ids.astype(np.uint16) for ids in encoded]
    ids = tokenizer.encode_to_numpy(together, allowed_special={END_OF_TEXT}).astype(np.uint16)
    ends = np.flatnonzero(ids == tokenizer.eot_token).tolist()
    return [ids[start + 1:end] for start, end in zip([-1, *ends], [*ends, len(ids)], strict=True)]


@dataclass(frozen=True)
class EndOfShard:
    """Marks the end of a shard between its tasks and those of the next one."""

    number: int


Item = Task | BadShard | EndOfShard  # BadShard: its tasks could not be read
Result = Encoded | BadShard | EndOfShard


class Encoder:
    """Encodes tasks in worker processes, or in this process if there is only one worker."""

    def __init__(self, load: LoadTokenizer, *, num_workers: int) -> None:
        self._load, self._num_workers = load, num_workers
        self._max_bytes = max(MAX_BYTES, num_workers * MAX_BYTES_PER_WORKER)
        self._pool: ProcessPoolExecutor | None = None
        if num_workers > 1:
            context = multiprocessing.get_context("forkserver")  # workers share imported modules
            self._pool = ProcessPoolExecutor(num_workers, mp_context=context,
                                             initializer=_start_worker, initargs=(load,))

    def __enter__(self) -> Encoder:
        """Start the workers. Ctrl-C waits for them: while they start, it would print tracebacks."""
        if self._pool is not None:
            interrupts: list[int] = []
            previous_handler = signal.getsignal(signal.SIGINT)
            if previous_handler is not signal.SIG_IGN:
                signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
            try:
                futures.wait([self._pool.submit(os.getpid) for _ in range(self._num_workers)])
            finally:
                signal.signal(signal.SIGINT, previous_handler)
            if interrupts:
                self._pool.shutdown()
                raise KeyboardInterrupt
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def encode(self, items: Iterable[Item | None]) -> Iterator[tuple[Item, Result]]:
        """Yield all items in their order, tasks with their results, others with themselves.

        Args:
            items: None waits for all tasks submitted so far.

        Raises:
            UserError: a worker was killed.
        """
        waiting: deque[tuple[Item, Future[Result]]] = deque()
        num_bytes = 0  # of text in the waiting tasks

        def first() -> tuple[Item, Result]:
            nonlocal num_bytes
            item, future = waiting.popleft()
            num_bytes -= _size(item)
            return item, future.result()

        try:
            for item in itertools.chain(items, [None]):
                while waiting and (item is None
                                   or len(waiting) >= TASKS_PER_WORKER * self._num_workers
                                   or num_bytes + _size(item) > self._max_bytes):
                    yield first()
                if item is not None:
                    num_bytes += _size(item)
                    waiting.append((item, self._submit(item)))
                while waiting and waiting[0][1].done():
                    yield first()
        except BrokenProcessPool:
            raise UserError("a worker process was killed, perhaps because memory ran out; run the"
                            " same command again to continue, perhaps with fewer"
                            " --workers") from None

    def _submit(self, item: Item) -> Future[Result]:
        if self._pool is not None and isinstance(item, Task):
            return self._pool.submit(encode_task, item, self._load)
        future: Future[Result] = Future()
        future.set_result(encode_task(item, self._load) if isinstance(item, Task) else item)
        return future


def _size(item: Item | None) -> int:
    return item.num_bytes if isinstance(item, Task) else 0


def _start_worker(load: LoadTokenizer) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and stops the workers
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    load()


def _exit_with_parent() -> None:
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
