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
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tiktoken

from basics import files
from basics.errors import UserError
from preparation.cutting import Cuts, Piece, decoded, markers_in
from preparation.sources import Chunk, grouped
from preparation.token_stream import NUM_COLUMNS, ROW_DTYPE, digest_of
from tokens.tokenizer import END_OF_TEXT, FileTokenizer, Tokenizer

TASKS_PER_WORKER = 3  # submitted: enough that no worker waits, few enough that memory stays small

BATCH_CHARACTERS = 2**19  # encoded in one call
SAMPLES_PER_TASK, SAMPLE_CHARACTERS = 16, 1000  # decoded again, to see whether text is lost
_tokenizer: Tokenizer  # of a worker


class Task(NamedTuple):
    """What a worker encodes at once, and where reading begins after it."""

    pieces: list[Piece]
    chunk: Chunk
    num_pieces: int  # of the chunk, up to the end of this task


@dataclass(frozen=True)
class Losses:
    """What a sample of texts shows of a tokenizer that changes them."""

    num_sampled: int = 0
    num_changed: int = 0
    example: str = ""

    def __add__(self, more: "Losses") -> "Losses":
        return Losses(
            self.num_sampled + more.num_sampled,
            self.num_changed + more.num_changed,
            self.example or more.example,
        )


@dataclass(frozen=True)
class Encoded:
    """The result of a task."""

    tokens: np.ndarray  # (num_tokens,) uint16, with an end-of-text token after each document
    rows: np.ndarray  # (num_parts, 4) uint64: sums up to the end of each part of the pieces
    ends: np.ndarray  # (num_parts,) bool: whether a document ends there
    losses: Losses
    markers: frozenset[str]  # of the end of a text, that are in the texts


def encode_task(pieces: Sequence[Piece], tokenizer: Tokenizer) -> Encoded:
    """Tokenise pieces of text."""
    end_of_text = np.array([tokenizer.eot_token], dtype=np.uint16)
    tokens = [end_of_text[:0]]  # a task may have no text
    parts = [(part, bool(piece.ends)) for piece in pieces for part in piece.parts()]
    found = [decoded(part) for part, _ in parts]
    texts = [text for text, _ in found]
    rows = np.zeros((len(parts), NUM_COLUMNS), ROW_DTYPE)
    markers: set[str] = set()
    encoded = _encoded(texts, tokenizer)
    for row, (part, is_end), (text, num_replaced), ids in zip(
        rows, parts, found, encoded, strict=True
    ):
        num_bytes = len(text.encode()) if num_replaced else len(part)
        row[:] = len(ids) + is_end, num_bytes, num_replaced, digest_of(ids)
        tokens.append(ids)
        if is_end:
            tokens.append(end_of_text)
        markers |= markers_in(text)
    return Encoded(
        np.concatenate(tokens),
        np.cumsum(rows, axis=0, dtype=ROW_DTYPE),
        np.array([is_end for _, is_end in parts], dtype=bool),
        losses_of(texts, tokenizer),
        frozenset(markers),
    )


def losses_of(texts: Sequence[str], tokenizer: Tokenizer) -> Losses:
    """Encode and decode a sample of the texts. GPT-2's tokenizer and bytes lose nothing."""
    found = Losses()
    if isinstance(tokenizer, FileTokenizer):
        for whole in texts[:: max(1, len(texts) // SAMPLES_PER_TASK)]:
            text = whole[:SAMPLE_CHARACTERS]
            back = tokenizer.decode(tokenizer.encode_ordinary(text))
            # Some put a space in front of each text, or drop one there.
            is_same = back.removeprefix(" ") == text.removeprefix(" ")
            found += Losses(1, not is_same, "" if is_same else _example(text, back))
    return found


def _example(text: str, back: str) -> str:
    """Show where a text and what came back of it begin to differ."""
    common = len(os.path.commonprefix([text, back]))
    start = max(0, common - 10)
    return f"{text[start : common + 20]!r} became {back[start : common + 20]!r}"


def cuts_of(tokenizer: Tokenizer) -> Cuts:
    """Return where a document may be cut without a change of its tokens."""
    if not isinstance(tokenizer, FileTokenizer):
        return "any"
    return "safe" if tokenizer.splits_like_gpt2 else "none"


def _encoded(texts: Sequence[str], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yield the tokens of each text, (n,) uint16."""
    if isinstance(tokenizer, FileTokenizer):
        for text in texts:
            yield np.array(tokenizer.encode_ordinary(text), dtype=np.uint16)
        return
    sizes = ((text, len(text)) for text in texts)
    for batch, _ in grouped(sizes, BATCH_CHARACTERS):
        yield from encode_batch(batch, tokenizer)


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


@contextmanager
def worker_pool(tokenizer: Tokenizer, num_workers: int) -> Iterator[ProcessPoolExecutor | None]:
    """Start worker processes; none for one worker, whose tasks this process does.

    They are forked, to share the tokenizer and all modules: this process must not have threads.
    """
    if num_workers == 1:
        yield None
        return
    gc.freeze()  # a garbage collection would write to the shared pages, and so copy them
    gc.set_threshold(100_000)  # of new objects: importing `datasets` makes many, all of which stay
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


def _encode_in_worker(pieces: list[Piece]) -> Encoded:
    return encode_task(pieces, _tokenizer)


def _result_of(
    task: Task, tokenizer: Tokenizer, pool: ProcessPoolExecutor | None
) -> Future[Encoded]:
    if pool is not None:
        return pool.submit(_encode_in_worker, task.pieces)
    result: Future[Encoded] = Future()
    result.set_result(encode_task(task.pieces, tokenizer))
    return result


def encode(
    tasks: Iterable[Task],
    tokenizer: Tokenizer,
    pool: ProcessPoolExecutor | None,
    num_workers: int,
) -> Iterator[tuple[Task, Encoded]]:
    """Yield all tasks in their order, with results. Raises: UserError: a worker was killed."""
    waiting: deque[tuple[Task, Future[Encoded]]] = deque()
    try:
        for task in tasks:
            waiting.append((task, _result_of(task, tokenizer, pool)))
            while waiting[0][1].done() or len(waiting) > TASKS_PER_WORKER * num_workers:
                first, future = waiting.popleft()
                yield first, future.result()
                if not waiting:
                    break
        for first, future in waiting:
            yield first, future.result()
    except BrokenExecutor:
        raise UserError(
            "a worker process was killed, perhaps because memory ran out; run the"
            " same command again to continue, perhaps with fewer --workers"
        ) from None
