"""`lab list` and `lab watch --text`: what they show of runs, also of hostile and damaged ones."""

import io
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from lab.watch import text
from lab.watch.text import BLOCKS, screen, sparkline
from tests.support.json_schemas import checked
from tests.support.lab_cli import error_line, run_lab, succeeded
from tests.support.workplace import PROJECT_DIR

HOSTILE = "\x1b]0;x\x07[red]<b>"


@pytest.fixture
def runs_dir(workplace):
    """A run that trains, one that was finished, one that was killed, one that is new."""
    for name in ("trains", "finished", "killed", "new"):
        run_dir = workplace.add_run(name)
        if name != "new":
            write_run(run_dir, "finished" if name == "finished" else "running")
    (workplace.runs_dir / "trains/heartbeat.json").write_text('{"phase": "training"}')
    beat = workplace.runs_dir / "killed/heartbeat.json"
    beat.write_text("{}")
    os.utime(beat, (time.time() - 10**5,) * 2)
    return workplace.runs_dir


def write_run(run_dir, status):
    steps = range(100) if status == "finished" else range(40)
    (run_dir / "summary.json").write_text(json.dumps(
        {"status": status, "reason": None, "num_steps": 100, "global_step": steps[-1]}))
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(
        {"global_step": step, "tokens": 1000 * (step + 1), "seconds": 2.0 * (step + 1),
         "usd": 0.01 * (step + 1), "train_loss": 5 - step / 50, "tokens_per_second": 500.0}
    ) + "\n" for step in steps))
    (run_dir / "samples.jsonl").write_text(json.dumps(
        {"global_step": 9, "prompt": "Once", "text": f" upon {HOSTILE}"}) + "\n")


def shown(runs_dir, *names, width=100):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(screen(runs_dir, names, width))
    return console.file.getvalue()


def test_all_runs_are_listed_with_their_status_and_progress(runs_dir):
    output = succeeded(run_lab("list", "--runs-dir", str(runs_dir))).stdout
    *lines, total = output.splitlines()[2:]
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines}
    assert next(iter(rows)) == "trains" and rows == {
        "finished": "finished 100/100 3.0200 - 0:03:20 1.00",
        "killed": "no heartbeat 40/100 4.2200 - 0:01:20 0.4000",
        "trains": "running 40/100 4.2200 - 0:01:20 0.4000",
        "new": "not launched - - - - -"}
    assert total == "in all: 0:06:00, US$1.80"


def test_the_sum_of_all_runs_counts_those_without_a_price_and_those_killed_at_their_start(runs_dir):
    (runs_dir / "new/heartbeat.json").write_text('{"seconds": 40.0}')
    output = succeeded(run_lab("list", "--runs-dir", str(runs_dir))).stdout
    assert output.splitlines()[-1] == "in all: 0:06:40, US$1.80 and 1 of 4 runs without a price"
    assert "in all: 0:00:40\n" in succeeded(run_lab("list", "new", "--runs-dir",
                                                    str(runs_dir))).stdout


def test_the_help_names_every_command_with_a_whole_sentence():
    output = " ".join(run_lab("--help").output.split())
    assert "..." not in output.partition("Commands:")[2]
    assert "RUN in TensorBoard, Weights & Biases or Trackio. gen" in output


def test_a_run_that_was_not_launched_can_be_named(runs_dir):
    output = succeeded(run_lab("list", "new", "--runs-dir", str(runs_dir))).stdout
    assert "not launched" in output and "trains" not in output


def test_a_long_reason_is_cut_before_names_and_figures(runs_dir):
    (runs_dir / "finished/summary.json").write_text(json.dumps(
        {"status": "stopped", "reason": "the budget is spent " * 9, "num_steps": 100,
         "global_step": 99}))
    (line,) = [line for line in shown(runs_dir, width=80).splitlines() if "finished" in line]
    assert "stopped (the budget" in line and "…" in line
    assert [*line.split()[-5:]] == ["100/100", "3.0200", "-", "0:03:20", "1.00"]


def test_the_list_is_a_json_document(runs_dir):
    document = checked(run_lab("list", "--json", "--runs-dir", str(runs_dir)).stdout)
    states = {state.name: state for state in document.runs}
    assert states["trains"].seconds_left == pytest.approx(120)
    assert states["trains"].usd_per_hour == pytest.approx(18)
    assert states["trains"].usd_at_end == pytest.approx(1.0) and states["finished"].usd == 1.0
    assert states["new"].status == "not launched" and states["killed"].warnings
    one = checked(run_lab("list", "finished", "--json", "--runs-dir", str(runs_dir)).stdout)
    assert [state.name for state in one.runs] == ["finished"]


def test_a_directory_cannot_forge_a_row(runs_dir):
    (runs_dir / "x\nforged finished").mkdir()
    (runs_dir / "x\nforged finished/train.json").write_text("{}")
    assert "forged" not in succeeded(run_lab("list", "--runs-dir", str(runs_dir))).stdout


@pytest.mark.parametrize("verb", [["list"], ["watch", "--text"]])
def test_a_run_that_is_unknown_is_one_line(verb, runs_dir):
    line = error_line(run_lab(*verb, "none", "--runs-dir", str(runs_dir)))
    assert "no run 'none'; trained runs: finished, killed, trains" in line


def test_a_run_that_trains_has_a_panel_and_the_others_a_row(runs_dir):
    output = shown(runs_dir)
    panel, table = output[:output.rindex("╯")], output[output.rindex("╯"):]
    for part in ("trains", "40%, step 40 of 100, 0:02:00 left (until ", "4.2200  █",
                 "500 tokens/s", "0:01:20, $0.4000 of about $1.00 at $18.00/h",
                 "running in training", "step 10", "Once upon"):
        assert part in panel, part
    assert "finished" in table and "no heartbeat" in table and "100/100" in table
    assert "killed" in shown(runs_dir, "killed") and "may have been killed" in shown(
        runs_dir, "killed")


def lines_of(runs_dir, height):
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    console.print(screen(runs_dir, (), 100, height))
    return console.file.getvalue().splitlines()


def test_panels_that_do_not_fit_become_rows_and_the_rest_is_counted(runs_dir, workplace):
    for number in range(4):
        write_run(workplace.add_run(f"other-{number}"), "running")
    whole = lines_of(runs_dir, 200)
    assert sum("step 40 of 100" in line for line in whole) == 5
    for height in range(2, len(whole) + 1):
        lines = lines_of(runs_dir, height)
        assert len(lines) <= height
        panels = sum("step 40 of 100" in line for line in lines)
        rows = sum("0/100" in line for line in lines)
        assert (panels > 0) == (height >= 13)  # a panel, headings, four rows, and what is missing
        (missing,) = [int(line.split()[1]) for line in lines if line.startswith("and ")] or [0]
        assert panels + rows + missing == 7, height


def test_a_long_sample_is_cut_at_its_end_and_only_there(runs_dir):
    text = "a \n b" + "".join(f" word{n}" for n in range(100))
    (runs_dir / "trains/samples.jsonl").write_text(json.dumps(
        {"global_step": 9, "prompt": "/a/long/path" * 20, "text": text}) + "\n")
    flat = "".join(line.strip("│ ") for line in shown(runs_dir).splitlines()).replace(" ", "")
    whole = ("/a/long/path" * 20 + " ".join(text.split()))[:399].replace(" ", "")
    assert f"{whole}…" in flat


@pytest.mark.parametrize("width", [40, 80, 200])
def test_hostile_text_is_shown_and_nothing_is_wider_than_the_terminal(runs_dir, width):
    output = shown(runs_dir, width=width)
    assert "\x1b]0" not in output and "\x07" not in output
    assert "[red]<b>" in "".join(line.strip("│ ") for line in output.splitlines())
    assert max(map(len, output.splitlines())) <= width


def test_the_sparkline_shows_the_course_whatever_the_scale_of_the_first_steps():
    falling = [10.0, *(3 - step / 100 for step in range(99))]
    drawn = sparkline(falling, 50)
    assert len(drawn) == 50 and drawn[0] == drawn[5] == BLOCKS[-1] and drawn[-1] == BLOCKS[0]
    assert [BLOCKS.index(block) for block in drawn] == sorted(
        (BLOCKS.index(block) for block in drawn), reverse=True)
    assert sparkline([1.0], 50) == "" and set(sparkline([2.0, 2.0], 9)) == {BLOCKS[0]}


def test_a_terminal_is_drawn_anew_until_control_c(runs_dir, monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(text, "Console", lambda **_: Console(
        file=terminal, width=100, height=60, force_terminal=True, color_system=None))
    sleeps = []

    def sleep(seconds):
        sleeps.append(seconds)
        if len(sleeps) == 2:
            raise KeyboardInterrupt
        summary = json.loads((runs_dir / "trains/summary.json").read_text())
        (runs_dir / "trains/summary.json").write_text(json.dumps(summary | {"global_step": 77}))

    # Not in the module `time` itself: other threads of this process sleep too.
    monkeypatch.setattr(text, "time", SimpleNamespace(**vars(time) | {"sleep": sleep}))
    text.watch_text(runs_dir, ("trains",))
    first, _, second = terminal.getvalue().partition("step 40 of 100")
    assert first and "78%, step 78 of 100" in second


def test_without_a_terminal_it_is_shown_once(runs_dir):
    result = subprocess.run(
        [sys.executable, "-m", "lab", "watch", "--text", "--runs-dir", runs_dir],
        cwd=PROJECT_DIR, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and "step 40 of 100" in result.stdout, result.stderr
