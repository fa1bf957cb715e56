"""The progress of a preparation: a bar on a terminal, plain lines elsewhere; then a summary."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tqdm import tqdm

from basics.errors import one_line, print_error
from basics.text import counted, gb
from preparation.encoding import EndOfShard, Item
from preparation.journal import PART_FILE, Progress
from preparation.reading import Task

BAR = ("{percentage:3.0f}%|{bar}| {n_fmt}{unit} of {total_fmt}{unit}"
       " [{elapsed}<{remaining}{postfix}]")
LINE_INTERVAL = 30  # seconds between plain lines


class ProgressDisplay:
    """A progress bar over the bytes of a source, or up to a number of documents.

    Args:
        sizes: bytes of each shard.
        num_finished: shards of an earlier launch.
        limit: documents that are wanted; None for all.
    """

    def __init__(self, sizes: Sequence[int], num_finished: int, progress: Progress,
                 limit: int | None) -> None:
        self._sizes, self._shard, self._limit = sizes, num_finished, limit
        self._done = self._before = sum(sizes[:num_finished])  # bytes so far, of finished shards
        self._first_tokens: int | None = None
        self._started = self._last_line = time.monotonic()
        if num_finished:
            print_error(f"continuing after document {progress.num_documents:,}")
        self._first = progress.num_documents if limit else self._done
        self._bar = tqdm(total=limit or sum(sizes), initial=self._first, disable=None,
                         bar_format=BAR, unit=" documents" if limit else "B",
                         unit_scale=not limit, dynamic_ncols=True)

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self._bar.close()

    def show(self, item: Item, progress: Progress) -> None:
        """Update the bar after an item of work, or print a line every LINE_INTERVAL seconds."""
        if isinstance(item, EndOfShard):
            self._before += self._sizes[self._shard]
            self._done, self._shard = self._before, self._shard + 1
        elif isinstance(item, Task):
            self._done = min(self._done + item.source_bytes,
                             self._before + self._sizes[self._shard])
        now, done = time.monotonic(), progress.num_documents if self._limit else self._done
        if self._first_tokens is None:  # the first tasks ended while workers still started
            self._first_tokens, self._started = progress.num_tokens, now
        rate = (progress.num_tokens - self._first_tokens) / max(now - self._started, 1e-3)
        text = f"{progress.num_tokens / 1e6:,.0f} M tokens, {rate / 1e6:.2f} M tokens/s"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(done - self._bar.n)
        if self._bar.disable and now - self._last_line > LINE_INTERVAL:
            self._last_line = now
            total = self._bar.total
            left = "?" if done == self._first else tqdm.format_interval(
                (now - self._started) / (done - self._first) * (total - done))
            ratio = f"{done:,} of {total:,} documents" if self._limit else (
                f"{gb(done)} of {gb(total)}")
            print_error(f"{ratio}, {text}, {left} left")


def left_out(progress: Progress) -> str:
    """Name the files that could not be read."""
    more = progress.num_bad_files - len(progress.bad_files)
    return (f"left out because they could not be read: {progress.num_bad_files:,}"
            f" ({', '.join(map(one_line, progress.bad_files))}"
            f"{f' and {more:,} more' * bool(more)})")


def summary(output_dir: Path, progress: Progress) -> str:
    """Describe the finished dataset in a few lines."""
    lines = [f"{counted(progress.num_documents, 'document')}, {progress.num_tokens:,} tokens"]
    if progress.num_bytes:  # unknown for imported tokens
        lines[0] += (f", {progress.num_bytes:,} bytes of text,"
                     f" {progress.num_characters / progress.num_tokens:.2f} characters per token")
    if progress.num_empty:
        lines.append(f"documents without text: {progress.num_empty:,}")
    if (output_dir / PART_FILE).exists():
        lines.append(f"{output_dir}: a part; when all are ready, join them with prepare_dataset.py"
                     " --join PART... OUTPUT")
    else:
        for split in ("train", "validation"):
            path, count = output_dir / f"{split}.safetensors", progress.of(split)
            lines.append(f"{path}: {counted(count.num_documents, 'document')},"
                         f" {count.num_tokens:,} tokens, {path.stat().st_size:,} bytes")
    if progress.num_bad_files:
        lines.append(f"files {left_out(progress)}")
    return "\n".join(lines)
