"""The panel of a run in a terminal: while it trains, and in `lab list --follow`."""

import io
import os
import sys
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from lab.follow import follow, screen
from lab.watch.answers import Watched
from reporting import terminal
from reporting.terminal import Shown, Terminal
from tests.support.lab_cli import error_line, run_lab, succeeded
from tests.support.watching import add_run, add_sample, append, report, validation


@pytest.fixture
def three_runs(runs_dir):
    """A run that trains, with a sample; one that was finished, one that was stopped."""
    run_dir = add_run(runs_dir, "trains", status="running", steps=0)
    (run_dir / "heartbeat.json").write_text('{"phase": "training"}')
    append(
        run_dir,
        *(
            report(
                step,
                seconds=2.0 * step,
                usd=0.01 * step,
                train_loss=5 - step / 50,
                tokens_per_second=500.0,
                seconds_left=2.0 * (200 - step),
                usd_at_end=2.0,
            )
            for step in range(1, 81)
        ),
    )
    add_sample(run_dir, 10, "Once", " upon \x1b]0;x\x07[red]<b>")
    add_run(runs_dir, "finished", global_step=199)
    add_run(runs_dir, "stopped", status="stopped", reason="the budget is spent " * 9)
    return runs_dir


def follow_runs(runs_dir, *arguments):
    return run_lab("list", "--follow", "--runs-dir", str(runs_dir), *arguments)


def shown(runs_dir, *names, width=100):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(screen(Watched(runs_dir, names), width))
    return console.file.getvalue()


def test_a_run_that_trains_has_a_panel_and_the_others_a_row(three_runs):
    output = shown(three_runs)
    panel, table = output[: output.rindex("╯")], output[output.rindex("╯") :]
    for part in (
        "trains",
        "40%, step 80 of 200, 0:04:00 left (until ",
        "3.4000  █",
        "▁ ",
        "500 tokens/s",
        "norm 0.50, learning rate 1.00e-03",
        "0:02:40, $0.8000 of about $2.00 at $18.00/h",
        "running in training",
        "step 10",
        "Once upon",
    ):
        assert part in panel, part
    assert "finished" in table and "200/200" in table and "trains" not in table
    assert "╯" in shown(three_runs, "finished")  # a run that is named has a panel too
    assert "step 80 of 200" in succeeded(follow_runs(three_runs)).output  # no terminal: once


def test_hostile_and_long_texts_are_cut_before_names_and_figures(three_runs):
    output = shown(three_runs, width=80)
    assert "\x1b]0" not in output and "\x07" not in output
    assert "[red]<b>" in "".join(line.strip("│ ") for line in output.splitlines())
    assert max(map(len, output.splitlines())) <= 80
    (line,) = [line for line in output.splitlines() if line.startswith("stopped ")]
    assert "stopped (the" in line and line.split()[-4:] == [
        "100/200",
        "1.4000",
        "1.5100",
        "0:00:10",
    ]


def test_a_terminal_is_drawn_anew_until_control_c(three_runs, monkeypatch):
    terminal, sleeps = io.StringIO(), []
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(
        "lab.follow.Console",
        lambda **_: Console(
            file=terminal, width=100, height=60, force_terminal=True, color_system=None
        ),
    )

    def sleep(seconds):
        sleeps.append(seconds)
        if len(sleeps) == 2:
            raise KeyboardInterrupt
        append(three_runs / "trains", report(156))

    # Not in the module `time` itself: other threads of this process sleep too.
    monkeypatch.setattr("lab.follow.time", SimpleNamespace(**vars(time) | {"sleep": sleep}))
    follow(Watched(three_runs, ("trains",)))
    first, _, second = terminal.getvalue().partition("step 80 of 200")
    assert first and "78%, step 156 of 200" in second


def test_following_takes_no_price_and_no_json(three_runs):
    for options in (["--json"], ["--usd-per-hour", "2"]):
        assert "--follow shows" in error_line(follow_runs(three_runs, *options))
    assert "no run 'b'; trained runs: " in error_line(follow_runs(three_runs, "b"))


# The terminal of a run that trains


class FakeTerminal(io.StringIO):
    """A terminal of 80 columns, as far as its size, its encoding and its descriptor matter."""

    encoding = "utf-8"
    columns = 80

    def isatty(self):
        return True

    def fileno(self):
        return 1


@pytest.fixture
def screen_of_run(monkeypatch):
    fake = FakeTerminal()
    monkeypatch.setenv("TERM", "xterm")
    size = os.terminal_size
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: size((fake.columns, 24)))
    monkeypatch.setattr(terminal, "SECONDS_BETWEEN", 0.0)
    return fake


def test_a_run_shows_its_records_in_a_panel_below_its_lines(screen_of_run, monkeypatch, runs_dir):
    run_dir = add_run(runs_dir, "grows", steps=40)
    add_sample(run_dir, 40, "Once", " upon")
    monkeypatch.setattr(sys, "stdout", screen_of_run)  # pytest sets it before each test
    run = Terminal(Shown("grows", num_steps=200, usd_per_hour=2.0))
    run.start(run_dir / "metrics.jsonl", run_dir / "samples.jsonl")  # of earlier launches
    assert run.has_panel
    first = screen_of_run.getvalue()
    assert "Once upon" in first and " left" not in first and "$" not in first
    run.add(report(50, train_loss=2.5, tokens_per_second=500.0, gpu_memory_gib=[3.0, 7.5]))
    run.add(validation(50, 2.25) | {"validation_loss/code": 1.5})
    run.add(report(60, train_loss=None, skipped_steps=3))  # not finite
    run.shown.compared = "-0.1"
    run.draw("running in validation, 40%")
    run.say("a line \x1b]0;x\x07" + "that is long " * 9)
    output = screen_of_run.getvalue()
    before, _, after = output.rpartition("a line ")
    for part in (
        "running in validation, 40%",
        "30%, step 60 of 200",
        "2.5000  ▆▃▂▁█",
        "2.2500",
        "on code",
        "3 of the last steps skipped",
    ):
        assert part in before, part
    assert "7.5 GiB" in after and "that is long " * 9 in after, "a long line is not cut"
    assert "\x1b]0" not in output and "\x07" not in output
    height = after.count("\n") - 1
    run.close("finished")
    end = screen_of_run.getvalue().removeprefix(output)
    assert end.startswith(f"\x1b[{height}A\x1b[J") and "finished" in end and end.endswith("╯\n")


def test_after_a_stop_signal_nothing_is_drawn_over(screen_of_run, monkeypatch, tmp_path):
    """Other processes print below the panel: torchrun does."""
    monkeypatch.setattr(sys, "stdout", screen_of_run)
    run = Terminal(Shown("stops", num_steps=200))
    run.start(tmp_path / "metrics.jsonl", tmp_path / "samples.jsonl")
    run.leave()
    before = screen_of_run.getvalue()
    run.say("a line")
    run.draw("running in checkpoint")
    run.close("stopped (SIGINT)")
    after = screen_of_run.getvalue().removeprefix(before)
    assert (
        after.startswith("a line\n╭")
        and before.endswith("\n\n")
        and "\x1b[J" not in after
        and "stopped (SIGINT)" in after
    )


@pytest.mark.parametrize(
    "change",
    [{"columns": 0}, {"encoding": "ascii"}, {"isatty": lambda: False}, {"TERM": "dumb"}],
    ids=["no width", "ascii", "a file", "dumb"],
)
def test_where_no_panel_can_be_drawn_there_are_lines_alone(
    screen_of_run, monkeypatch, tmp_path, change
):
    for name, value in change.items():
        if name == "TERM":
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.setattr(screen_of_run, name, value)
    monkeypatch.setattr(sys, "stdout", screen_of_run)
    run = Terminal(Shown("plain", num_steps=200))
    run.start(tmp_path / "metrics.jsonl", tmp_path / "samples.jsonl")
    run.draw("running in training")
    run.say("a line")
    run.close("finished")
    assert not run.has_panel and screen_of_run.getvalue() == "a line\n"
