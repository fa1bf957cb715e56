"""The progress of a preparation: a bar on a terminal, plain lines elsewhere; then a summary."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType

from tqdm import tqdm

from basics.errors import one_line, print_error
from preparation.journal import Progress, Request
from preparation.parts import PART_FILE

BAR = "{percentage:3.0f}%|{bar}| {n_fmt} documents [{elapsed}<{remaining}{postfix}]"
BAR_WITHOUT_TOTAL = "{n_fmt} documents [{elapsed}{postfix}]"
LINE_INTERVAL = 30  # seconds between plain lines


class ProgressDisplay:
    """A progress bar over documents, with tokens, tokens per second and the time left."""

    def __init__(self, request: Request, num_documents: int) -> None:
        self._total, self._first_document = request.num_documents, num_documents
        self._num_shards = len(request.shards)
        self._first_tokens: int | None = None
        self._started = self._last_line = time.monotonic()
        if num_documents:
            of_all = "" if self._total is None else f" of {self._total:,}"
            print_error(f"continuing after document {num_documents:,}{of_all}")
        self._bar = tqdm(total=request.num_documents, initial=num_documents, disable=None,
                         dynamic_ncols=True,
                         bar_format=BAR if self._total else BAR_WITHOUT_TOTAL)

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self._bar.close()

    def show(self, progress: Progress) -> None:
        """Update the bar, or print a line every LINE_INTERVAL seconds."""
        now, num_documents = time.monotonic(), progress.num_documents
        num_tokens = progress.train.num_tokens + progress.validation.num_tokens
        if self._first_tokens is None:  # the first tasks ended while workers still started
            self._first_tokens, self._started = num_tokens, now
        rate = (num_tokens - self._first_tokens) / max(now - self._started, 1e-3)
        text = f"{num_tokens / 1e6:,.0f} M tokens, {rate / 1e6:.2f} M tokens/s"
        if self._total is None:
            text += f", {progress.num_shards} of {self._num_shards} files"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(num_documents - self._bar.n)
        if self._bar.disable and now - self._last_line > LINE_INTERVAL:
            self._last_line = now
            print_error(self._done(num_documents, now, text))

    def _done(self, num_documents: int, now: float, text: str) -> str:
        if self._total is None:
            return f"{num_documents:,} documents, {text}"
        done = num_documents - self._first_document
        left = (now - self._started) / max(done, 1) * (self._total - num_documents)
        return (f"{num_documents:,} of {self._total:,} documents, {text},"
                f" {tqdm.format_interval(left)} left")


def left_out(progress: Progress) -> str:
    """Name the files that could not be read."""
    more = progress.num_bad_files - len(progress.bad_files)
    return (f"left out because they could not be read: {progress.num_bad_files:,}"
            f" ({', '.join(map(one_line, progress.bad_files))}"
            f"{f' and {more:,} more' * bool(more)})")


def summary(output_dir: Path, progress: Progress) -> str:
    """Describe the finished dataset in a few lines."""
    num_documents = progress.train.num_documents + progress.validation.num_documents
    num_tokens = progress.train.num_tokens + progress.validation.num_tokens
    lines = [f"{num_documents:,} documents, {num_tokens:,} tokens"]
    if progress.num_bytes:  # unknown for imported tokens
        lines[0] += (f", {progress.num_bytes:,} bytes of text,"
                     f" {progress.num_characters / num_tokens:.2f} characters per token")
    if (output_dir / PART_FILE).exists():
        lines.append(f"{output_dir}: a part; when all are ready, join them with prepare_dataset.py"
                     " --join PART... OUTPUT")
    else:
        lines += _files(output_dir, progress)
    if progress.num_bad_files:
        lines.append(f"files {left_out(progress)}")
    return "\n".join(lines)


def _files(output_dir: Path, progress: Progress) -> list[str]:
    lines = []
    for split in ("train", "validation"):
        path, count = output_dir / f"{split}.safetensors", progress.of(split)
        lines.append(f"{path}: {count.num_documents:,} documents, {count.num_tokens:,} tokens,"
                     f" {path.stat().st_size:,} bytes")
    return lines
