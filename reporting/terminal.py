"""What a terminal shows of a run that trains: a panel, drawn anew as the run goes on."""

import io
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from basics.errors import one_line, visible
from basics.text import dollars, short_count
from reporting.metrics_file import (
    WARNED_RECORDS,
    Sample,
    read_metrics,
    read_samples,
    record_warnings,
    set_keys,
)
from reporting.summary import duration

SECONDS_BETWEEN = 0.5  # between two drawings of one panel
BLOCKS = "▁▂▃▄▅▆▇█"
# Widths in characters.
MAX_SPARKLINE = 80
LABEL_WIDTH = 12
BAR = 8
MAX_SAMPLES = 2  # the newest ones of a run
MAX_SAMPLE_LENGTH = 400  # characters
# Keys of a record that are shown as they are.
NUMBERS = {
    "global_step",
    "seconds_left",
    "tokens",
    "tokens_per_second",
    "mfu",
    "grad_norm",
    "learning_rate",
    "seconds",
    "usd",
    "usd_at_end",
}
STYLES = {"running": "green", "finished": "cyan", "failed": "red", "no heartbeat": "red"}


@dataclass
class Shown:
    """What is shown of a run; None: not known. Seconds and US dollars are of all launches."""

    name: str
    status: str = "running"
    num_steps: int | None = None
    global_step: int | None = None  # counted from 0
    seconds_left: float | None = None
    # Losses in nats per token by label, from the first to the last one.
    losses: dict[str, list[float]] = field(default_factory=dict)
    compared: str = ""  # with its reference
    tokens: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None  # a fraction
    grad_norm: float | None = None
    learning_rate: float | None = None
    memory_gib: float | None = None
    seconds: float | None = None
    usd: float | None = None
    usd_at_end: float | None = None
    usd_per_hour: float | None = None
    warnings: Sequence[str] = ()
    samples: Sequence[Sample] = ()  # the newest first

    def add_losses(self, record: dict[str, Any]) -> None:
        """Add the losses of a record of `metrics.jsonl` to their lines."""
        for key, value in record.items():
            if (label := label_of(key)) and value is not None and math.isfinite(value):
                self.losses.setdefault(label, []).append(value)

    def panel(self, width: int) -> Panel:
        """Return a panel for a terminal of this width."""
        rows = Table.grid(padding=(0, 2))
        rows.add_column(width=LABEL_WIDTH, style="dim")
        rows.add_column(overflow="fold")
        if self.global_step is not None and self.num_steps:
            rows.add_row(
                "progress", _progress(self.global_step + 1, self.num_steps, self.seconds_left)
            )
        room = max(10, min(MAX_SPARKLINE, width - LABEL_WIDTH - 20))
        for label, losses in self.losses.items():
            rows.add_row(visible(label), f"{losses[-1]:.4f}  {sparkline(losses, room)}")
        if self.compared:
            rows.add_row("to reference", Text(one_line(self.compared)))
        speed = []
        if self.tokens_per_second:
            speed.append(f"{self.tokens_per_second:,.0f} tokens/s")
        if self.mfu:
            speed.append(f"{self.mfu:.1%} MFU")
        if self.memory_gib:
            speed.append(f"{self.memory_gib:.1f} GiB")
        if self.tokens:
            speed.append(f"{short_count(self.tokens)} tokens")
        if speed:
            rows.add_row("speed", ", ".join(speed))
        if self.grad_norm is not None and self.learning_rate is not None:
            norm = f"norm {self.grad_norm:.2f}, learning rate {self.learning_rate:.2e}"
            rows.add_row("gradient", norm)
        spent = [duration(self.seconds)] if self.seconds else []
        if self.usd:
            of_all = f" of about ${dollars(self.usd_at_end)}" if self.usd_at_end else ""
            at_price = f" at ${self.usd_per_hour:,.2f}/h" if self.usd_per_hour else ""
            spent.append(f"${dollars(self.usd)}{of_all}{at_price}")
        if spent:
            rows.add_row("spent", ", ".join(spent))
        for warning in self.warnings:
            rows.add_row("warning", Text(one_line(warning), style="yellow"))
        for sample in self.samples[:MAX_SAMPLES]:
            text = Text(" ".join((sample.prompt + sample.text).split()))
            text.truncate(MAX_SAMPLE_LENGTH, overflow="ellipsis")
            rows.add_row(f"step {sample.step:,}", text)
        style = STYLES.get(self.status.split()[0].rstrip(","), "yellow")
        return Panel(
            rows,
            title=Text(visible(self.name), style="bold"),
            title_align="left",
            subtitle=Text(one_line(self.status), style=style),
            subtitle_align="left",
        )


def _progress(num_done: int, num_steps: int, seconds_left: float | None) -> str:
    share = min(1.0, num_done / num_steps)
    text = f"{'━' * round(BAR * share):{BAR}}  {share:.0%}, step {num_done:,} of {num_steps:,}"
    if seconds_left:
        end = time.localtime(time.time() + seconds_left)
        is_today = seconds_left < 86400 and end.tm_mday == time.localtime().tm_mday
        until = time.strftime("%H:%M" if is_today else "%a %H:%M", end)
        text += f", {duration(seconds_left)} left (until {until})"
    return text


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as blocks, one character for each of `width` means; empty for fewer than two.

    The scale is that of the last nine tenths: the steep beginning of a loss is cut off.
    """
    if len(values) < 2:
        return ""
    parts = np.array_split(np.asarray(values), min(width, len(values)))
    means = np.array([part.mean() for part in parts])
    low = means.min()
    high = means[len(means) // 10 :].max()
    height = high - low or 1.0  # equal means have the lowest block
    levels = ((means - low) / height).clip(0, 1) * (len(BLOCKS) - 1)
    return "".join(BLOCKS[round(level)] for level in levels)


def label_of(key: str) -> str:
    """Return the label of a metric whose losses the panel shows; empty for every other one."""
    if of_set := set_keys({key, "validation_loss"}).get(key):
        metric, name = of_set
        return f"on {name}" if metric == "validation_loss" else ""
    return {"train_loss": "loss", "validation_loss": "validation"}.get(key, "")


class Terminal:
    """Standard output of a run that trains: a panel below the lines, or in a file lines alone.

    The panel is drawn over the last one, when the run goes on or a line is said, which another
    thread may do. After a stop signal nothing is drawn over: other processes print too.
    """

    def __init__(self, shown: Shown) -> None:
        self.shown = shown
        self._console: Console | None = None  # where there is a panel
        self._height = 0  # lines of the panel that the next one is drawn over
        self._drawn = -math.inf
        self._records: deque[dict[str, Any]] = deque(maxlen=WARNED_RECORDS)
        self._lock = threading.RLock()  # `say` is called by a thread too, until the first step

    @property
    def has_panel(self) -> bool:
        return self._console is not None

    def start(self, metrics_path: Path, samples_path: Path) -> None:
        """Draw the panel, if a terminal can show it, with the losses of earlier launches."""
        console = Console(highlight=False)
        if not _can_draw(console):
            return
        self._console = console
        for record in read_metrics(metrics_path):
            self.shown.add_losses(record)
        self.shown.samples = read_samples(samples_path)
        self.draw(self.shown.status)

    def say(self, line: str) -> None:
        """Print a line, above the panel."""
        with self._lock:
            erased = self._erased()  # before the panel is drawn, which may have another height
            panel = self._panel() if self._height else ""
            self._write(erased + visible(line) + "\n" + panel)

    def add(self, record: dict[str, Any]) -> None:
        """Show the numbers of a record of `metrics.jsonl`, and what it warns of."""
        with self._lock:
            self._records.append(record)
            self.shown.add_losses(record)
            for key in NUMBERS & record.keys():
                setattr(self.shown, key, record[key])
            if memory := record.get("gpu_memory_gib"):
                self.shown.memory_gib = max(filter(None, memory), default=None)
            self.shown.warnings = record_warnings(self._records)

    def draw(self, status: str) -> None:
        """Draw the panel, unless that was done just before."""
        now = time.monotonic()
        with self._lock:
            if self._console is None or now < self._drawn + SECONDS_BETWEEN:
                return
            self._drawn = now
            self.shown.status = status
            self._write(self._erased() + self._panel())

    def leave(self) -> None:
        """Draw over nothing that is there; the panel is drawn once more, by `close`."""
        with self._lock:
            if self._height:
                self._write("\n")  # a terminal has shown ^C where the cursor is
            self._height = 0
            self._drawn = math.inf

    def close(self, status: str) -> None:
        """Draw the panel for the last time; what is said from here on stands below it."""
        with self._lock:
            self._drawn = -math.inf
            self.draw(status)
            self._console = None
            self._height = 0

    def _panel(self) -> str:
        """Return the panel as text, as far as it fits the terminal, and count its lines."""
        assert self._console is not None
        width, height = self._console.size
        # Not printed by the console of standard output, which fails once the terminal is closed.
        text = io.StringIO()
        Console(
            file=text,
            force_terminal=True,
            color_system="standard" if self._console.color_system else None,
            width=width,
            highlight=False,
        ).print(self.shown.panel(width))
        lines = text.getvalue().splitlines(keepends=True)[: max(1, height - 1)]
        self._height = len(lines)
        return "".join(lines)

    def _erased(self) -> str:
        """Return what moves the cursor to the first line of the panel and erases it."""
        return f"\x1b[{self._height}A\x1b[J" if self._height else ""

    def _write(self, text: str) -> None:
        with suppress(OSError):  # a log on a full disk or a closed pipe must not end the run
            sys.stdout.write(text)
            sys.stdout.flush()


def _can_draw(console: Console) -> bool:
    """Return whether standard output is a terminal of a known width that shows the blocks."""
    try:
        width = os.get_terminal_size(sys.stdout.fileno()).columns  # 0 under `docker exec -t`
    except (OSError, ValueError):
        return False
    can_move = sys.stdout.isatty() and not console.is_dumb_terminal
    return bool(width) and can_move and console.encoding.startswith("utf")
