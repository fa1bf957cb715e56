"""Tokenise on all cores: tasks are sent to worker processes, tokens come back in order."""

import gc
import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import numpy as np
import tiktoken

from basics import files
from basics.errors import UserError
from preparation.cutting import BadShard, Cuts, Piece
from preparation.encoded import Encoded, findings_of
from preparation.findings import markers_in
from preparation.reading import Reading, Task, grouped
from preparation.sources import Item, Shard
from tokens.tokenizer import END_OF_TEXT, FileTokenizer, Tokenizer

# Limits of the submitted tasks: enough that no worker waits, few enough that memory stays small.
TASKS_PER_WORKER = 3
MAX_BYTES = 2**26  # of text, for all workers together
MAX_BYTES_PER_WORKER = 6 * 2**20  # used instead if it allows more, with many workers
BATCH_CHARACTERS = 2**19  # encoded in one call
_tokenizer: Tokenizer  # of a worker


def encode_task(task: Task, tokenizer: Tokenizer) -> Encoded | BadShard:
    """Tokenise a task; return the error if it cannot be read."""
    end_of_text = np.array([tokenizer.eot_token], dtype=np.uint16)
    tokens = [end_of_text[:0]]  # a task may have no text
    reading = Reading(cuts_of(tokenizer), [])
    ends: list[int] = []
    replaced: list[int] = []
    markers: frozenset[str] = frozenset()
    num_bytes = 0
    try:
        for piece, ids in encoded_pieces(task.read(reading), tokenizer):
            text = piece.text
            tokens.append(ids)
            num_bytes += len(text) if text.isascii() else len(text.encode())
            markers |= markers_in([text])
            if piece.ends_document:
                tokens.append(end_of_text)
                ends.append(num_bytes)
                replaced.append(piece.num_replaced)
    except BadShard as error:
        return error
    ends_array = np.array(ends, np.int64)
    replaced_array = np.array(replaced, np.int64)
    return Encoded(
        np.concatenate(tokens),
        ends_array,
        replaced_array,
        findings_of(ends_array, replaced_array),
        num_bytes,
        reading.bad_files,
        markers,
    )


def cuts_of(tokenizer: Tokenizer) -> Cuts:
    """Return where a document may be cut without a change of its tokens."""
    if not isinstance(tokenizer, FileTokenizer):
        return "any"
    return "safe" if tokenizer.splits_like_gpt2 else "none"


def encoded_pieces(
    pieces: Iterable[Piece], tokenizer: Tokenizer
) -> Iterator[tuple[Piece, np.ndarray]]:
    """Yield pieces of text with their tokens, (n,) uint16. Raises: BadShard."""
    if isinstance(tokenizer, FileTokenizer):
        for piece in pieces:
            yield piece, np.array(tokenizer.encode_ordinary(piece.text), dtype=np.uint16)
        return
    sizes = ((piece, len(piece.text)) for piece in pieces)
    for batch, _ in grouped(sizes, BATCH_CHARACTERS):
        yield from zip(batch, encode_batch([piece.text for piece in batch], tokenizer), strict=True)


def encode_batch(texts: Sequence[str], tokenizer: tiktoken.Encoding) -> list[np.ndarray]:
    """Return the tokens of each text, (n,) uint16. A literal <|endoftext|> in a text stays text.

    One call encodes them all, with end-of-text tokens between them: faster than a call for each."""
    together = END_OF_TEXT.join(texts)
    if together.count(END_OF_TEXT) >= len(texts):  # one of the texts contains it
        encoded = (tokenizer.encode_to_numpy(text, disallowed_special=()) for text in texts)
        return [ids.astype(np.uint16) for ids in encoded]
    ids = tokenizer.encode_to_numpy(together, allowed_special={END_OF_TEXT}).astype(np.uint16)
    separators = np.flatnonzero(ids == tokenizer.eot_token).tolist()
    places = itertools.pairwise([-1, *separators, len(ids)])
    return [ids[before + 1 : after] for before, after in places]


# An error: the tasks could not be read; a shard: it ends here.
Result = Encoded | BadShard | Shard


@contextmanager
def worker_pool(tokenizer: Tokenizer, num_workers: int) -> Iterator[ProcessPoolExecutor | None]:
    """Start worker processes; none for one worker, whose tasks this process does.

    They are forked, to share the tokenizer and all modules: this process must not have threads.
    """
    if num_workers == 1:
        yield None
        return
    gc.freeze()  # a garbage collection would write to the shared pages, and so copy them
    pool = ProcessPoolExecutor(
        num_workers,
        initializer=_start_worker,
        initargs=(tokenizer,),
        mp_context=multiprocessing.get_context("fork"),
    )
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # in the workers, for ever
        try:
            wait([pool.submit(os.getpid) for _ in range(num_workers)])
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(tokenizer: Tokenizer) -> None:
    def exit_with_parent() -> None:
        parent: Any = multiprocessing.parent_process()
        parent.join()
        os._exit(1)

    for descriptor in files.held:  # a killed command's lock must not wait for its workers
        os.close(descriptor)
    global _tokenizer
    _tokenizer = tokenizer
    threading.Thread(target=exit_with_parent, daemon=True).start()


def _encode_in_worker(task: Task) -> Encoded | BadShard:
    return encode_task(task, _tokenizer)


def _result_of(
    item: Item, tokenizer: Tokenizer, pool: ProcessPoolExecutor | None
) -> Future[Result]:
    if pool is not None and isinstance(item, Task):
        return pool.submit(_encode_in_worker, item)
    result: Future[Result] = Future()
    result.set_result(encode_task(item, tokenizer) if isinstance(item, Task) else item)
    return result


def encode(
    items: Iterable[Item | None],
    tokenizer: Tokenizer,
    pool: ProcessPoolExecutor | None,
    num_workers: int,
) -> Iterator[tuple[Item, Result]]:
    """Yield all items in their order, tasks with their results, others with themselves.

    An item None waits for all tasks submitted so far. Raises: UserError: a worker was killed.
    """
    max_bytes = max(MAX_BYTES, num_workers * MAX_BYTES_PER_WORKER)
    waiting: deque[tuple[Item, int, Future[Result]]] = deque()
    num_bytes = 0  # of text in the waiting tasks
    try:
        for item in itertools.chain(items, [None]):
            if item is not None:
                size = item.num_bytes if isinstance(item, Task) else 0
                waiting.append((item, size, _result_of(item, tokenizer, pool)))
                num_bytes += size
            while waiting and (
                item is None
                or waiting[0][-1].done()
                or len(waiting) > TASKS_PER_WORKER * num_workers
                or num_bytes > max_bytes
            ):
                first, size, future = waiting.popleft()
                num_bytes -= size
                yield first, future.result()
    except BrokenExecutor:
        raise UserError(
            "a worker process was killed, perhaps because memory ran out; run the"
            " same command again to continue, perhaps with fewer --workers"
        ) from None
