"""The progress of a preparation: a bar on a terminal, plain lines elsewhere; then a summary."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType

from tqdm import tqdm

from basics.errors import one_line, print_error
from preparation.journal import Progress, Request

BAR = "{percentage:3.0f}%|{bar}| {n_fmt} documents [{elapsed}<{remaining}{postfix}]"
LINE_INTERVAL = 30  # seconds between plain lines


class ProgressDisplay:
    """A progress bar over documents, with tokens, tokens per second and the time left."""

    def __init__(self, request: Request, num_documents: int) -> None:
        self._total, self._first_document = request.num_documents, num_documents
        self._first_tokens: int | None = None
        self._started = self._last_line = time.monotonic()
        if num_documents:
            print_error(f"continuing after document {num_documents:,} of {self._total:,}")
        self._bar = tqdm(total=request.num_documents, initial=num_documents, disable=None,
                         dynamic_ncols=True, bar_format=BAR)

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self._bar.close()

    def show(self, num_documents: int, progress: Progress) -> None:
        """Update the bar, or print a line every LINE_INTERVAL seconds."""
        now = time.monotonic()
        num_tokens = progress.train.num_tokens + progress.validation.num_tokens
        if self._first_tokens is None:  # the first tasks ended while workers still started
            self._first_tokens, self._started = num_tokens, now
        rate = (num_tokens - self._first_tokens) / max(now - self._started, 1e-3)
        text = f"{num_tokens / 1e6:,.0f} M tokens, {rate / 1e6:.2f} M tokens/s"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(num_documents - self._bar.n)
        if self._bar.disable and now - self._last_line > LINE_INTERVAL:
            self._last_line = now
            done = num_documents - self._first_document
            left = (now - self._started) / max(done, 1) * (self._total - num_documents)
            print_error(f"{num_documents:,} of {self._total:,} documents, {text},"
                        f" {tqdm.format_interval(left)} left")


def summary(output_dir: Path, progress: Progress) -> str:
    """Describe the finished dataset in a few lines."""
    num_documents = progress.train.num_documents + progress.validation.num_documents
    num_tokens = progress.train.num_tokens + progress.validation.num_tokens
    lines = [f"{num_documents:,} documents, {num_tokens:,} tokens"]
    if progress.num_bytes:  # unknown for imported tokens
        lines[0] += (f", {progress.num_bytes:,} bytes of text,"
                     f" {progress.num_characters / num_tokens:.2f} characters per token")
    for split in ("train", "validation"):
        path, count = output_dir / f"{split}.safetensors", progress.of(split)
        lines.append(f"{path}: {count.num_documents:,} documents, {count.num_tokens:,} tokens,"
                     f" {path.stat().st_size:,} bytes")
    if progress.bad_shards:
        lines.append(f"skipped: {len(progress.bad_shards)} damaged shards,"
                     f" {', '.join(map(one_line, progress.bad_shards[:5]))}")
    return "\n".join(lines)
