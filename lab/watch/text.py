"""`lab watch --text`: the state of runs in a terminal, drawn anew while they train."""

import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table as Grid
from rich.text import Text

from basics.errors import one_line, visible
from basics.text import dollars
from lab.list_runs import table_of
from lab.runs import RUNNING, Result, chosen_runs, read_run
from lab.table import short_count
from lab.watch.answers import Watched
from reporting.summary import duration

SECONDS_BETWEEN = 2.0
BLOCKS = "▁▂▃▄▅▆▇█"
# Widths in characters.
MAX_SPARKLINE = 80
LABEL_WIDTH = 12
BAR = 20
MAX_SAMPLES = 2  # the newest ones of a run
MAX_SAMPLE_LENGTH = 400  # characters
STYLES = {"running": "green", "finished": "cyan", "failed": "red", "no heartbeat": "red"}


def watch_text(watched: Watched) -> None:
    """Show runs until Ctrl-C; once, if standard output is no terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.print(screen(watched, console.width))
        sys.stdout.flush()
        return
    with (
        suppress(KeyboardInterrupt),
        Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live,
    ):
        while True:
            live.update(screen(watched, console.width), refresh=True)
            time.sleep(SECONDS_BETWEEN)


def screen(watched: Watched, width: int) -> RenderableType:
    """Return a panel for each run that trains or is named, and a table of the rest."""
    names = chosen_runs(watched.runs_dir, watched.names)
    states = [read_run(watched.runs_dir / name, whole=False) for name in names]
    states.sort(key=lambda state: state.status != RUNNING)
    panels = [state for state in states if state.status == RUNNING or watched.names]
    parts: list[RenderableType] = [_panel(watched, state, width) for state in panels]
    if rest := states[len(panels) :]:
        parts.append(Text(table_of(rest).terminal(width), no_wrap=True, overflow="crop"))
    if not states:
        parts.append(Text("no run has been launched yet"))
    return Group(*parts)


def _panel(watched: Watched, state: Result, width: int) -> Panel:
    answer = watched.run(state.name)
    rows = Grid.grid(padding=(0, 2))
    rows.add_column(width=LABEL_WIDTH, style="dim")
    rows.add_column(overflow="fold")
    if state.global_step is not None and state.num_steps:
        rows.add_row("progress", _progress(state))
    room = max(10, min(MAX_SPARKLINE, width - LABEL_WIDTH - 20))
    for label, key in (("loss", "train_loss"), ("validation", "validation_loss")):
        last = getattr(state, key)
        if last is not None:
            line = answer["lines"].get(key, {"y": ()})
            values = [y for y in line["y"] if y is not None]
            rows.add_row(label, f"{last:.4f}  {sparkline(values, room)}")
    for key, line in answer["lines"].items():
        metric, _, name = key.partition("/")
        values = [y for y in line["y"] if y is not None]
        if name and metric == "validation_loss" and values:
            rows.add_row(f"on {name}", f"{values[-1]:.4f}  {sparkline(values, room)}")
    compared = state.validation_compared or state.train_compared
    if compared:
        rows.add_row("to reference", f"{compared}  ({state.reference})")
    if speed := _speed(state):
        rows.add_row("speed", speed)
    if spent := _spent(state):
        rows.add_row("spent", spent)
    for warning in state.warnings:
        rows.add_row("warning", Text(one_line(warning), style="yellow"))
    for sample in answer["samples"][:MAX_SAMPLES]:
        words = visible(sample["prompt"] + sample["text"]).split()
        shown = Text(" ".join(words))
        shown.truncate(MAX_SAMPLE_LENGTH, overflow="ellipsis")
        rows.add_row(f"step {sample['step']:,}", shown)
    status = state.status
    if state.phase:
        status += f" in {state.phase}"
    if state.reason:
        status += f" ({state.reason})"
    return Panel(
        rows,
        title=Text(state.name, style="bold"),
        title_align="left",
        subtitle=Text(one_line(status), style=STYLES.get(state.status, "yellow")),
        subtitle_align="left",
    )


def _speed(state: Result) -> str:
    parts = []
    if state.tokens_per_second:
        parts.append(f"{state.tokens_per_second:,.0f} tokens/s")
    if state.mfu:
        parts.append(f"{state.mfu:.1%} MFU")
    if state.memory_gib:
        parts.append(f"{state.memory_gib:.1f} GiB")
    if state.tokens:
        parts.append(f"{short_count(state.tokens)} tokens")
    return ", ".join(parts)


def _spent(state: Result) -> str:
    text = ""
    if state.seconds:
        text = duration(state.seconds)
    if state.usd:
        text += f", ${dollars(state.usd)}"
    if state.usd_at_end:
        text += f" of about ${dollars(state.usd_at_end)}"
    if state.usd_per_hour:
        text += f" at ${state.usd_per_hour:,.2f}/h"
    return text.removeprefix(", ")


def _progress(state: Result) -> str:
    done = state.global_step + 1
    share = min(1.0, done / state.num_steps)
    bar = "━" * round(BAR * share)
    text = f"{bar:{BAR}}  {share:.0%}, step {done:,} of {state.num_steps:,}"
    if state.seconds_left:
        end = time.localtime(time.time() + state.seconds_left)
        until = time.strftime("%a %H:%M", end)
        text += f", {duration(state.seconds_left)} left (until {until})"
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
