"""The table of a sweep in a terminal, drawn anew while several of its runs are trained."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from rich.console import Console
from rich.live import Live
from rich.text import Text

from basics.errors import visible
from lab.runs import RUNNING, read_run
from lab.sweep.definition import Sweep
from lab.sweep.execution import Execution, Outcome
from lab.sweep.report import entries_of, table_of
from reporting.summary import duration

SECONDS_BETWEEN = 2.0


@contextmanager
def showing(sweep: Sweep, execution: Execution) -> Iterator[Callable[[], None]]:
    """Yield what draws the table anew from time to time.

    It does nothing without a terminal, nor where one run is trained at a time, whose own lines are
    seen.
    """
    console = Console(highlight=False)
    if len(execution.shares) == 1 or not console.is_terminal:
        yield lambda: None
        return
    drawn_at = 0.0
    with Live(
        console=console, auto_refresh=False, transient=True, vertical_overflow="ellipsis"
    ) as live:

        def refresh() -> None:
            nonlocal drawn_at
            if time.monotonic() >= drawn_at + SECONDS_BETWEEN:
                text = Text(visible(screen(sweep, execution, console.width)), no_wrap=True)
                live.update(text, refresh=True)
                drawn_at = time.monotonic()

        yield refresh


def screen(sweep: Sweep, execution: Execution, width: int) -> str:
    """Return a line for each run that is being trained here, and the table as of now.

    The lines come first: of a text that is higher than the terminal, the end is not seen.
    """
    lines, outcomes = [], dict(execution.outcomes)
    for launch in execution.launches:
        run = launch.run
        outcomes[run.run_dir] = replace(Outcome.read(run), state=RUNNING)
        state = read_run(run.run_dir, whole=False)
        parts = [state.phase or "startup"]
        if state.status == RUNNING and state.global_step is not None and state.num_steps:
            parts = [f"step {state.global_step + 1:,} of {state.num_steps:,}"]
        if state.train_loss is not None:
            parts.append(f"training loss {state.train_loss:.4f}")
        if state.seconds_left:
            parts.append(f"{duration(state.seconds_left)} left")
        lines.append(f"{launch.share.name}: {run.label}: {', '.join(parts)}")
    if execution.num_elsewhere:
        lines.append(f"trained by other commands: {execution.num_elsewhere}")
    table = table_of(sweep, entries_of(sweep, outcomes)).terminal(width)
    return "\n".join([*lines, "", table])
