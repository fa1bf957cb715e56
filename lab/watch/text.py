"""`lab watch --text`: the state of runs in a terminal, drawn anew while they train."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table as Grid
from rich.text import Text

from basics.errors import one_line, visible
from lab.runs import chosen_runs, launched_runs
from lab.table import dollars, short_count
from lab.watch.answers import Watched
from lab.watch.run_state import RunState, read_state
from reporting.summary import duration

SECONDS_BETWEEN = 2.0
BLOCKS = "▁▂▃▄▅▆▇█"
MAX_SPARKLINE, LABEL_WIDTH = 80, 12  # characters
MAX_SAMPLES, MAX_SAMPLE_LENGTH = 2, 400  # the newest ones of a run; characters
HEADS, MIN_STATUS = ("run", "step", "loss", "validation", "time", "US$"), 12
STYLES = {"running": "green", "finished": "cyan", "failed": "red", "no heartbeat": "red"}


def watch_text(runs_dir: Path, names: tuple[str, ...]) -> None:
    """Show runs until Ctrl-C; once, if standard output is no terminal.

    Raises:
        UserError: a run does not exist or has not been launched.
    """
    chosen_runs(runs_dir, names)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.print(screen(runs_dir, names, console.width))
        sys.stdout.flush()
        return
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False,
                                           vertical_overflow="crop") as live:
        while True:
            live.update(screen(runs_dir, names, console.width, console.height), refresh=True)
            time.sleep(SECONDS_BETWEEN)


def screen(runs_dir: Path, names: Sequence[str], width: int,
           height: int | None = None) -> RenderableType:
    """Return all that is shown: runs that train first, a panel for each; the rest in a table.

    Args:
        names: of runs; empty for all that have been launched.
        width, height: of the terminal, in characters. What does not fit becomes a row of the
            table, and its last line tells how many rows are missing.
    """
    found = [read_state(runs_dir, name) for name in names or launched_runs(runs_dir)]
    with_panel = sorted((state for state in found if state.is_running or names),
                        key=lambda state: not state.is_running)
    others = [state for state in found if state not in with_panel]
    panels = [_panel(runs_dir, state, width) for state in with_panel]
    num_panels, num_rows = _fitting([_height(panel, width) for panel in panels], len(others),
                                    height)
    parts: list[RenderableType] = [*panels[:num_panels]]
    if rows := [*with_panel[num_panels:], *others]:
        parts.append(_table(rows[:num_rows], width))
        if len(rows) > num_rows:
            parts.append(Text(f"and {len(rows) - num_rows} more: lab list", style="dim"))
    return Group(*parts) if parts else Text("no run has been launched yet")


def _fitting(panels: Sequence[int], num_others: int, height: int | None) -> tuple[int, int]:
    """Return how many panels and how many rows of the table fit.

    Args:
        panels: the height of each panel.
        num_others: runs that have no panel.
        height: of the terminal; None for one without an end.
    """
    if height is None:
        return len(panels), num_others
    for num_panels in range(len(panels), -1, -1):
        num_rows = len(panels) - num_panels + num_others
        room = height - sum(panels[:num_panels]) - 1  # the table's headings
        if num_rows <= room or (num_rows == 0 and room >= -1):
            return num_panels, num_rows
        if len(panels) - num_panels < room:  # only runs that do not train are left out
            return num_panels, room - 1
    return 0, max(0, height - 2)


def _height(part: RenderableType, width: int) -> int:
    console = Console(file=io.StringIO(), width=width)
    return len(console.render_lines(part))


def _panel(runs_dir: Path, state: RunState, width: int) -> Panel:
    watched = Watched(runs_dir, (state.name,))
    rows = Grid.grid(padding=(0, 2))
    rows.add_column(width=LABEL_WIDTH, style="dim")
    rows.add_column(overflow="fold")
    for label, content in [("progress", _progress(state)), *_loss_rows(watched, state, width),
                           ("speed", _speed(state)), ("spent", _spent(state))]:
        if content:
            rows.add_row(label, content)
    for warning in state.warnings:
        rows.add_row("warning", Text(one_line(warning), style="yellow"))
    for sample in watched.samples(state.name)["samples"][:MAX_SAMPLES]:
        rows.add_row(f"step {sample['step']:,}", Text(_on_one_line(sample["prompt"]
                                                                   + sample["text"])))
    return Panel(rows, title=Text(state.name, style="bold"), title_align="left",
                 subtitle=status_of(state), subtitle_align="left")


def _on_one_line(text: str) -> str:
    """Return the beginning of a sample, with its lines joined."""
    text = " ".join(visible(text).split())
    return text if len(text) <= MAX_SAMPLE_LENGTH else f"{text[:MAX_SAMPLE_LENGTH - 1]}…"


def status_of(state: RunState) -> Text:
    words = [state.status, *([f"in {state.phase}"] if state.phase else []),
             *([f"({state.reason})"] if state.reason else [])]
    return Text(one_line(" ".join(words)), style=STYLES.get(state.status, "yellow"))


def _progress(state: RunState) -> RenderableType | None:
    if state.global_step is None or not state.num_steps:
        return None
    line = Grid.grid(padding=(0, 2))
    done = state.global_step + 1
    line.add_row(ProgressBar(total=state.num_steps, completed=done, width=20),
                 Text(f"{done / state.num_steps:.0%}, step {done:,} of {state.num_steps:,}"
                      f"{_left(state)}"))
    return line


def _left(state: RunState) -> str:
    """Return the time left and the time of the end, with the day unless it is today."""
    if not state.seconds_left:
        return ""
    end = time.localtime(time.time() + state.seconds_left)
    is_today = end[:3] == time.localtime()[:3]
    return (f", {duration(state.seconds_left)} left (until"
            f" {time.strftime('%H:%M' if is_today else '%a %d %b %H:%M', end)})")


def _loss_rows(watched: Watched, state: RunState, width: int) -> list[tuple[str, Text]]:
    """Return the last losses, each with a line of its course where there is one."""
    room = max(10, min(MAX_SPARKLINE, width - LABEL_WIDTH - 20))
    lines = watched.series(state.name, "steps")["lines"]
    rows = []
    for label, key, last in (("loss", "train_loss", state.train_loss),
                             ("validation", "validation_loss", state.validation_loss)):
        if last is not None:
            course = sparkline(lines.get(key, {"y": []})["y"], room)
            rows.append((label, Text(f"{last:.4f}  {course}")))
    return rows


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as blocks, one character for each of `width` means; empty for fewer than two.

    The scale is that of the last nine tenths: the steep beginning of a loss is cut off.
    """
    if len(values) < 2:
        return ""
    parts = np.array_split(np.asarray(values), min(width, len(values)))
    means = np.array([part.mean() for part in parts])
    low, high = means.min(), means[len(means) // 10:].max()
    scaled = (means - low) / (high - low) if high > low else np.zeros(len(means))
    return "".join(BLOCKS[round(level * (len(BLOCKS) - 1))] for level in scaled.clip(0, 1))


def _speed(state: RunState) -> str:
    words = [f"{state.tokens_per_second:,.0f} tokens/s" if state.tokens_per_second else "",
             f"{state.mfu:.1%} MFU" if state.mfu else "",
             f"{state.memory_gib:.1f} GiB" if state.memory_gib else "",
             f"{short_count(state.tokens)} tokens" if state.tokens else ""]
    return ", ".join(filter(None, words))


def _spent(state: RunState) -> str:
    words = [duration(state.seconds) if state.seconds else ""]
    if state.usd is not None:
        words.append(f"${dollars(state.usd)}"
                     + (f" of about ${dollars(state.usd_at_end)}" if state.usd_at_end else "")
                     + (f" at ${state.usd_per_hour:,.2f}/h" if state.usd_per_hour else ""))
    return ", ".join(filter(None, words))


def _table(states: list[RunState], width: int) -> Grid:
    """Return a table with one line for each run; a long reason is cut before all else."""
    cells = [[state.name, *figures(state)] for state in states]
    others = [max(map(len, column)) for column in zip(HEADS, *cells, strict=True)]
    table = Grid(box=None, header_style="dim", pad_edge=False)
    for heading in (HEADS[0], "status", *HEADS[1:]):
        table.add_column(heading, no_wrap=True, overflow="ellipsis",
                         justify="left" if heading in ("run", "status") else "right")
    for state, (name, *rest) in zip(states, cells, strict=True):
        status = status_of(state)
        status.truncate(max(MIN_STATUS, width - sum(others) - 2 * len(HEADS)), overflow="ellipsis")
        table.add_row(Text(name), status, *rest)
    return table


def figures(state: RunState) -> list[str]:
    """Return the cells of a run's figures: step, losses, time, dollars."""
    step = "-" if state.global_step is None else f"{state.global_step + 1:,}"
    if state.num_steps:
        step += f"/{state.num_steps:,}"
    losses = ["-" if loss is None else f"{loss:.4f}"
              for loss in (state.train_loss, state.validation_loss)]
    return [step, *losses, "-" if state.seconds is None else duration(state.seconds),
            "-" if state.usd is None else dollars(state.usd)]
