"""`lab watch --text`: the state of runs in a terminal, drawn anew while they train."""

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
from basics.text import dollars
from lab.runs import launched_runs
from lab.table import short_count
from lab.watch.answers import Answer, Watched
from lab.watch.run_state import RunState, read_state
from reporting.summary import duration

SECONDS_BETWEEN = 2.0
BLOCKS = "▁▂▃▄▅▆▇█"
MAX_SPARKLINE, LABEL_WIDTH = 80, 12  # characters
MAX_SAMPLES, MAX_SAMPLE_LENGTH = 2, 400  # the newest ones of a run; characters
HEADS, MIN_STATUS = ("run", "step", "loss", "validation", "time", "US$"), 12
STYLES = {"running": "green", "finished": "cyan", "failed": "red", "no heartbeat": "red"}


def watch_text(runs_dir: Path, names: tuple[str, ...]) -> None:
    """Show runs until Ctrl-C; once, if standard output is no terminal."""
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
           height: int = sys.maxsize) -> RenderableType:
    """Return all that is shown: runs that train first, a panel for each; the rest in a table.

    Args:
        names: of runs, which get panels; empty for all that have been launched.
        width, height: of the terminal, in characters. A panel that does not fit becomes a row of
            the table, and a last line counts the rows that do not fit.
    """
    found = sorted((read_state(runs_dir, name) for name in names or launched_runs(runs_dir)),
                   key=lambda state: not state.is_running)
    rows, parts = list(found), []
    trains = sum(state.is_running or bool(names) for state in found)
    for state in found[:trains]:
        panel = _panel(runs_dir, state, width)
        panel_height = len(Console(file=io.StringIO(), width=width).render_lines(panel))
        # Below it: headings, a row for each other one that trains, and the line that counts.
        if panel_height + (len(rows) > 1) * (trains - len(parts) + 1) > height:
            break
        parts.append(panel)
        rows.remove(state)
        height -= panel_height
    if rows:
        num_rows = len(rows) if len(rows) < height else max(0, height - 2)
        parts.append(_table(rows[:num_rows], width))
        if num_rows < len(rows):
            parts.append(Text(f"and {len(rows) - num_rows} more: lab list", style="dim"))
    return Group(*parts) if parts else Text("no run has been launched yet")


def _panel(runs_dir: Path, state: RunState, width: int) -> Panel:
    answer = Watched(runs_dir).run(state.name)
    rows = Grid.grid(padding=(0, 2))
    rows.add_column(width=LABEL_WIDTH, style="dim")
    rows.add_column(overflow="fold")
    speed = [f"{state.tokens_per_second:,.0f} tokens/s" if state.tokens_per_second else "",
             f"{state.mfu:.1%} MFU" if state.mfu else "",
             f"{state.memory_gib:.1f} GiB" if state.memory_gib else "",
             f"{short_count(state.tokens)} tokens" if state.tokens else ""]
    spent = [duration(state.seconds) if state.seconds else "", _dollars(state)]
    for label, content in [("progress", _progress(state)), *_loss_rows(answer, state, width),
                           ("speed", ", ".join(filter(None, speed))),
                           ("spent", ", ".join(filter(None, spent)))]:
        if content:
            rows.add_row(label, content)
    for warning in state.warnings:
        rows.add_row("warning", Text(one_line(warning), style="yellow"))
    for sample in answer["samples"][:MAX_SAMPLES]:
        text = Text(" ".join(visible(sample["prompt"] + sample["text"]).split()))
        text.truncate(MAX_SAMPLE_LENGTH, overflow="ellipsis")
        rows.add_row(f"step {sample['step']:,}", text)
    return Panel(rows, title=Text(state.name, style="bold"), title_align="left",
                 subtitle=status_of(state), subtitle_align="left")


def status_of(state: RunState) -> Text:
    words = [state.status, *([f"in {state.phase}"] if state.phase else []),
             *([f"({state.reason})"] if state.reason else [])]
    return Text(one_line(" ".join(words)), style=STYLES.get(state.status, "yellow"))


def _progress(state: RunState) -> RenderableType | None:
    """Draw the steps, the time left and the time of the end, with the day unless it is today."""
    if state.global_step is None or not state.num_steps:
        return None
    done = state.global_step + 1
    text = f"{done / state.num_steps:.0%}, step {done:,} of {state.num_steps:,}"
    if state.seconds_left:
        end = time.localtime(time.time() + state.seconds_left)
        is_today = end[:3] == time.localtime()[:3]
        text += (f", {duration(state.seconds_left)} left (until"
                 f" {time.strftime('%H:%M' if is_today else '%a %d %b %H:%M', end)})")
    line = Grid.grid(padding=(0, 2))
    line.add_row(ProgressBar(total=state.num_steps, completed=done, width=20), Text(text))
    return line


def _loss_rows(answer: Answer, state: RunState, width: int) -> list[tuple[str, Text]]:
    """Return the last losses, each with a line of its course where there is one."""
    room = max(10, min(MAX_SPARKLINE, width - LABEL_WIDTH - 20))
    rows = []
    for label, key, last in (("loss", "train_loss", state.train_loss),
                             ("validation", "validation_loss", state.validation_loss)):
        if last is not None:
            values = [y for y in answer["lines"].get(key, {"y": ()})["y"] if y is not None]
            rows.append((label, Text(f"{last:.4f}  {sparkline(values, room)}")))
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


def _dollars(state: RunState) -> str:
    """Return what was spent, what it will be at the end, and the price."""
    if state.usd is None:
        return ""
    return (f"${dollars(state.usd)}"
            + (f" of about ${dollars(state.usd_at_end)}" if state.usd_at_end else "")
            + (f" at ${state.usd_per_hour:,.2f}/h" if state.usd_per_hour else ""))


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
