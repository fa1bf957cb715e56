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
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait

import numpy as np
import tiktoken

from basics.errors import UserError
from preparation.cutting import BadShard, Cuts, Piece, joined
from preparation.reading import BadFile, Task, grouped
from preparation.sources import Shard
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
    bad_files: list[BadFile]

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
    bad_files: list[BadFile] = []
    num_tokens = num_bytes = num_characters = 0
    try:
        for (text, ends_document, _), ids in encoded_pieces(task.read(bad_files), tokenizer):
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
                   np.array([num_tokens, num_bytes, num_characters]), bad_files)


def cuts_of(tokenizer: Tokenizer) -> Cuts:
    """Return where a document may be cut without a change of its tokens."""
    if not isinstance(tokenizer, FileTokenizer):
        return "any"
    return "safe" if tokenizer.splits_like_gpt2 else "none"


def encoded_pieces(pieces: Iterable[Piece],
                   tokenizer: Tokenizer) -> Iterator[tuple[Piece, np.ndarray]]:
    """Yield pieces of text with their tokens, (n,) uint16. Raises: BadShard."""
    if isinstance(tokenizer, FileTokenizer):
        for piece in joined(pieces, cuts_of(tokenizer)):
            yield piece, np.array(tokenizer.encode_ordinary(piece.text), dtype=np.uint16)
        return
    sizes = ((piece, len(piece.text)) for piece in pieces)
    for batch, _ in grouped(sizes, BATCH_CHARACTERS):
        yield from zip(batch, encode_batch([piece.text for piece in batch], tokenizer),
                       strict=True)


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


Item = Task | BadShard | Shard  # an error: the tasks could not be read; a shard: it ends here
Result = Encoded | BadShard | Shard


@contextmanager
def worker_pool(load: LoadTokenizer, num_workers: int) -> Iterator[ProcessPoolExecutor | None]:
    """Start worker processes; none for one worker, whose tasks this process does.

    Ctrl-C waits until they have started: before, they would print tracebacks.
    """
    if num_workers == 1:
        yield None
        return
    pool = ProcessPoolExecutor(
        num_workers, initializer=_start_worker, initargs=(load,),
        mp_context=multiprocessing.get_context("forkserver"))  # workers share imported modules
    interrupts: list[int] = []
    previous_handler = signal.getsignal(signal.SIGINT)
    if previous_handler is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        try:
            futures.wait([pool.submit(os.getpid) for _ in range(num_workers)])
        finally:
            signal.signal(signal.SIGINT, previous_handler)
        if interrupts:
            raise KeyboardInterrupt
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def encode(items: Iterable[Item | None], load: LoadTokenizer, pool: ProcessPoolExecutor | None,
           num_workers: int) -> Iterator[tuple[Item, Result]]:
    """Yield all items in their order, tasks with their results, others with themselves.

    Args:
        items: None waits for all tasks submitted so far.

    Raises:
        UserError: a worker was killed.
    """
    if pool is None:
        for item in items:
            if item is not None:
                yield item, encode_task(item, load) if isinstance(item, Task) else item
        return
    max_bytes = max(MAX_BYTES, num_workers * MAX_BYTES_PER_WORKER)
    waiting: deque[tuple[Item, Future[Result] | None]] = deque()
    num_bytes = 0  # of text in the waiting tasks
    try:
        for item in itertools.chain(items, [None]):
            size = item.num_bytes if isinstance(item, Task) else 0
            while waiting and (item is None or waiting[0][1] is None or waiting[0][1].done()
                               or len(waiting) >= TASKS_PER_WORKER * num_workers
                               or num_bytes + size > max_bytes):
                first, future = waiting.popleft()
                num_bytes -= first.num_bytes if isinstance(first, Task) else 0
                yield first, first if future is None else future.result()
            if item is not None:
                waiting.append((item, pool.submit(encode_task, item, load)
                                if isinstance(item, Task) else None))
                num_bytes += size
    except BrokenProcessPool:
        raise UserError("a worker process was killed, perhaps because memory ran out; run the"
                        " same command again to continue, perhaps with fewer --workers") from None


def _start_worker(load: LoadTokenizer) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and stops the workers
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    load()


def _exit_with_parent() -> None:
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
