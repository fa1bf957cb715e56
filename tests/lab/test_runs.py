"""The one reader of runs, `lab list`, and the statistics: also of damaged records."""

import json
import math
import os
import time
from pathlib import Path

import pytest

from basics.errors import UserError
from basics.text import dollars
from lab.compare import charts as comparison_charts
from lab.runs import END_BYTES, chosen_runs, launched_runs, read_run
from lab.stats import Difference, pooled_deviation, t_95
from lab.watch.answers import Watched
from reporting.metrics_file import MAX_RECORDS_BYTES
from tests.support.json_schemas import checked
from tests.support.lab_cli import error_line, run_lab, succeeded
from tests.support.watching import ODD_VALUES, add_run, append, lines, report, validation
from tests.support.workplace import draw_bare

COMMANDS = (
    ["list"],
    ["list", "--json"],
    ["list", "--follow"],
    ["watch", "--export", "page.html"],
    ["compare", "--charts", "charts"],
    ["compare", "--markdown"],
    ["compare", "--csv"],
    ["compare", "--json"],
)


def beat(run_dir, *, age=0.0, phase="training", **values):
    path = run_dir / "heartbeat.json"
    path.write_text(json.dumps({"phase": phase, "global_step": 1} | values))
    os.utime(path, (time.time() - age, time.time() - age))


# The state of a run


def test_the_state_of_a_finished_run(runs_dir):
    facts = {
        "seconds": {"training": 9.0, "startup": 1.5},
        "usd": {"training": 0.4, "total": 0.5},
        "machine": {"peak_memory_gib": 3.25},
    }
    state = read_run(add_run(runs_dir, "done", global_step=99, **facts), whole=False)
    assert (state.status, state.global_step, state.num_steps) == ("finished", 99, 200)
    assert state.tokens == 100 * 2048 and state.validation_loss == 1.5 + 1 / 100
    assert state.train_loss == 1.4 and state.tokens_per_second == 20480
    assert (state.seconds, state.usd, state.memory_gib) == (10.5, 0.5, 3.25)
    assert state.seconds_left is None and state.warnings == ()
    mean = add_run(runs_dir, "mean", global_step=99, seconds={}, tokens_per_second=1234.0)
    assert read_run(mean).tokens_per_second == 1234  # of the whole run, not of its last steps


def test_the_state_of_a_running_run(runs_dir):
    run_dir = add_run(runs_dir, "live", status="running", seconds={"training": 0.0})
    beat(run_dir, phase="validation")
    values = {"mfu": 0.41, "usd": 0.25, "gpu_memory_gib": [10.5, None, 70.25]}
    append(run_dir, report(110, **values, disk_free_gib=2.0, skipped_steps=3))
    state = read_run(run_dir, whole=False)
    assert (state.status, state.phase) == ("running", "validation")
    assert (state.mfu, state.usd, state.memory_gib, state.seconds) == (0.41, 0.25, 70.25, 11.0)
    skipped, disk = state.warnings
    assert "3 of the last" in skipped and "2.0 GiB free" in disk


def test_the_time_and_money_left_are_those_of_the_log(runs_dir):
    """Each report and validation records what the log says; records of before had neither."""
    run_dir = add_run(runs_dir, "live", status="running", steps=0)
    append(run_dir, {"global_step": 8, "train_loss": 3.0, "seconds": 8.0, "tokens": 1})
    assert read_run(run_dir, whole=False).seconds_left is None
    append(run_dir, report(10, usd=0.1, seconds_left=90.0, usd_at_end=1.0))
    append(run_dir, validation(10, 2.0) | {"seconds_left": 80.0, "usd_at_end": 0.9})
    beat(run_dir)
    state, (page,) = read_run(run_dir, whole=False), Watched(runs_dir).runs()["runs"]
    assert (state.seconds_left, state.usd_at_end) == (80, 0.9)
    assert (page["seconds_left"], page["usd_at_end"]) == (80, 0.9)
    assert (state.usd_per_hour, state.num_steps) == (pytest.approx(360), 200)


@pytest.mark.parametrize(
    ("spent_before", "phase", "seconds_left"),
    [(4.0, "training", 90.0), (9.0, "compile", None), (4.0, "startup", None)],
)
def test_the_time_and_money_left_are_not_those_of_an_earlier_launch(
    runs_dir, spent_before, phase, seconds_left
):
    """The summary has what was spent before a launch; one that starts up has not written it yet."""
    seconds = {"startup": 1.0, "training": spent_before - 1}
    run_dir = add_run(runs_dir, "resumed", status="running", steps=0, seconds=seconds)
    append(run_dir, report(80, seconds_left=90.0, usd_at_end=2.0))  # at 8 s
    beat(run_dir, phase=phase)
    state = read_run(runs_dir / "resumed", whole=False)
    assert state.seconds_left == seconds_left
    assert state.usd_at_end == (seconds_left and 2.0)
    append(run_dir, report(90, seconds=10.0, seconds_left=50.0))
    beat(run_dir)
    assert read_run(runs_dir / "resumed", whole=False).seconds_left == 50


def test_every_command_tells_the_same_time_and_money(runs_dir):
    """A killed run: its heartbeat is later than its last record."""
    spent = {"seconds": {"startup": 1.0}, "usd": {"startup": 0.01, "total": 0.01}}
    run_dir = add_run(runs_dir, "killed", status="running", steps=0, **spent)
    append(run_dir, report(50, seconds=40.0, usd=0.4), report(60, seconds=50.0, usd=0.5))
    beat(run_dir, age=1000.0, seconds=60.0)
    options = ("--json", "--runs-dir", str(runs_dir))
    (state,) = json.loads(run_lab("list", *options).stdout)["runs"]
    (row,) = json.loads(run_lab("compare", *options).stdout)["rows"]
    (page,) = Watched(runs_dir).runs()["runs"]
    for found in (state, row, page):
        assert (found["seconds"], found["usd"]) == (60.0, pytest.approx(0.6))
        assert found["status"] == "no heartbeat"


@pytest.mark.parametrize(
    ("summary", "heartbeat", "written", "status"),
    [
        ({"status": "running", "num_steps": 200}, 0, 0, "running"),
        ({"status": "running"}, 70, 0, "no heartbeat"),
        ({"status": "running", "num_steps": 200}, None, 0, "running"),
        ({"status": "running"}, None, 7200, "running when last written"),
        ({"status": "stopped", "reason": "SIGTERM"}, 0, 0, "stopped"),
        ({"status": "a\x1b[2J"}, None, 0, "a\\x1b[2J"),
        ({"status": 3}, None, 0, "summary damaged"),
        ([], None, 0, "summary damaged"),
        (None, None, 0, "no summary"),
        (None, 0, 0, "running"),
    ],
)
def test_the_status_of_a_run(runs_dir, summary, heartbeat, written, status):
    run_dir = add_run(runs_dir, "run")
    (run_dir / "summary.json").write_text(json.dumps(summary))
    if summary is None:
        (run_dir / "summary.json").unlink()
    for path in run_dir.iterdir():
        os.utime(path, (time.time() - written,) * 2)
    if heartbeat is not None:
        beat(run_dir, age=heartbeat)
    state = read_run(run_dir, whole=False)
    assert state.status == read_run(run_dir).status == status
    assert (state.seconds_left is None) == (status != "running")
    assert len(state.warnings) == (status in ("no heartbeat", "running when last written"))


@pytest.mark.parametrize(
    ("throttling", "warnings"),
    [
        (["sw power cap"] * 8, ()),
        (["", "x"], ()),
        (
            ["", "sw power cap, hw slowdown, hw thermal slowdown"],
            ("GPU 1: hw slowdown, hw thermal slowdown",),
        ),
        (
            ["hw slowdown", "", "hw slowdown", "sw thermal slowdown"],
            ("GPU 0, 2: hw slowdown", "GPU 3: sw thermal slowdown"),
        ),
    ],
)
def test_only_slowdowns_by_heat_and_supply_are_warned_of(runs_dir, throttling, warnings):
    append(add_run(runs_dir, "live", status="running"), report(110, gpu_throttling=throttling))
    assert read_run(runs_dir / "live", whole=False).warnings == warnings


def test_a_validation_long_before_the_end_of_the_records_is_found(runs_dir):
    run_dir = add_run(runs_dir, "long", steps=50)
    append(run_dir, *(report(step) for step in range(60, 60_000, 10)))
    assert (run_dir / "metrics.jsonl").stat().st_size > 2 * END_BYTES
    state = read_run(runs_dir / "long", whole=False)
    assert (state.global_step, state.validation_loss) == (59_989, 1.52)
    append(run_dir, validation(60_010, 1.25))
    assert read_run(runs_dir / "long", whole=False).validation_loss == 1.25


def test_launched_runs_have_plain_names_and_records(runs_dir, tmp_path):
    for name in ("b", "a", "<b>"):
        add_run(runs_dir, name)
    (runs_dir / "x\nforged").mkdir()
    (runs_dir / "x\nforged/train.json").write_text("{}")
    (runs_dir / "not-launched").mkdir()
    (add_run(runs_dir, "empty", steps=0) / "summary.json").write_text("")
    assert launched_runs(runs_dir) == ["a", "b"]
    assert "forged" not in succeeded(run_lab("list", "--runs-dir", str(runs_dir))).stdout
    assert chosen_runs(runs_dir, ("b", "b")) == ["b"]
    for name, words in (
        ("../a", "no run"),
        ("x", "trained runs: a, b"),
        ("not-launched", "has not been trained yet"),
    ):
        with pytest.raises(UserError, match=words):
            chosen_runs(runs_dir, (name,))
    for verb in ("list", "compare", "watch"):
        assert "--runs-dir" in error_line(run_lab(verb, "--runs-dir", str(tmp_path / "none")))


# Odd records


def survives(runs_dir, monkeypatch):
    """Run every command that reads runs; return what they print."""
    monkeypatch.chdir(runs_dir)
    monkeypatch.setattr(comparison_charts, "draw_by_hand", draw_bare)
    return [
        succeeded(run_lab(*command, "--runs-dir", str(runs_dir))).output for command in COMMANDS
    ]


@pytest.mark.parametrize("value", ODD_VALUES)
def test_odd_numbers_are_unknown_and_every_command_survives_them(runs_dir, monkeypatch, value):
    run_dir = add_run(runs_dir, "odd", steps=0)
    add_run(runs_dir, "good")
    of_summary = (
        "global_step num_steps tokens seconds usd machine train_loss best batch model train"
        " tokenizer code energy_kwh"
    )
    of_reports = (
        "mfu tokens_per_second seconds_left usd_at_end gpu_memory_gib gpu_throttling host_load"
        " disk_free_gib energy_kwh skipped_steps"
    )
    measured = {"split": "validation", "loss": "V", "num_tokens": 1, "score": 1, "judge": "V"}
    files = {
        "summary.json": [{"status": "finished"} | dict.fromkeys(of_summary.split(), "V")],
        "metrics.jsonl": [
            report(10),
            report(20, **dict.fromkeys(of_reports.split(), "V")),
            report(30, seconds="V", usd="V"),
            validation(30, 2.0) | {"validation_seconds": "V"},
        ],
        "evaluations.jsonl": [
            measured,
            measured | {"loss": 1, "num_tokens": "V", "score": "V", "judge": 1},
        ],
        "microbatch-search.json": [{"trials": "V"}],
        "samples.jsonl": [{"global_step": "V", "prompt": "V"}],
    }
    for name, records in files.items():
        (run_dir / name).write_text(lines(*records).replace('"V"', value))
    state = read_run(runs_dir / "odd", whole=False)
    assert state.num_steps is None and state.usd is None and state.mfu is None
    assert "mfu" not in Watched(runs_dir).run("odd")["lines"]
    printed = survives(runs_dir, monkeypatch)
    (run_dir / "summary.json").write_text('{"status": "running", "num_steps": 100}')  # its pace
    printed += survives(runs_dir, monkeypatch)
    assert all("good" in printed[place] for place in (0, 4, 5, 6, 7, 8, 12))


@pytest.mark.parametrize(
    "kind", ["", "\n\n", "[" * 100_000, "\0" * 100, "null", '{"a":1}', "directory", "huge"]
)
def test_odd_files_are_no_error_for_any_command(runs_dir, monkeypatch, kind):
    run_dir = add_run(runs_dir, "odd", steps=0)
    add_run(runs_dir, "good")
    (runs_dir / "loop").symlink_to(runs_dir / "loop")
    (runs_dir / "a-file").write_text("")
    for name in ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl"):
        (run_dir / name).mkdir() if kind == "directory" else (run_dir / name).write_text(kind)
    if kind == "huge":
        os.truncate(run_dir / "metrics.jsonl", MAX_RECORDS_BYTES)
        append(run_dir, report(10), report(20))
    assert read_run(runs_dir / "odd", whole=False).train_loss is None
    assert Watched(runs_dir).samples("odd") == []
    printed = survives(runs_dir, monkeypatch)
    assert all("good" in text for text in (printed[0], *printed[4:]))
    assert ("warning: left out" in printed[4]) == (kind in ("directory", "huge"))


# lab list


@pytest.fixture
def listed(workplace):
    """A run that trains, one that was finished, one that was killed, one that is new."""
    workplace.add_run("new")
    for name, status, last in (
        ("trains", "running", 40),
        ("finished", "finished", 100),
        ("killed", "running", 40),
    ):
        run_dir = workplace.add_run(name)
        (run_dir / "summary.json").write_text(json.dumps({"status": status, "num_steps": 100}))
        spent = {"seconds": 2.0 * last, "usd": 0.01 * last, "train_loss": 5 - last / 50}
        left = {"seconds_left": 2.0 * (100 - last), "usd_at_end": 1.0}
        append(run_dir, report(1, seconds=2.0, usd=0.01), report(last, **spent, **left))
    beat(workplace.runs_dir / "trains")
    beat(workplace.runs_dir / "killed", age=10**5)
    return workplace.runs_dir


def listing(runs_dir, *arguments):
    return succeeded(run_lab("list", *arguments, "--runs-dir", str(runs_dir))).stdout


def test_all_runs_are_listed_with_their_status_and_progress(listed):
    *rows, total = listing(listed).partition("--\n")[2].splitlines()
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in rows}
    assert next(iter(rows)) == "trains" and rows == {
        "finished": "finished 100/100 3.0000 0:03:20 1.00",
        "killed": "no heartbeat 40/100 4.2000 0:01:20 0.4000",
        "trains": "running 40/100 4.2000 0:01:20 0.4000",
        "new": "not launched - - - -",
    }
    assert total == "in all: 0:06:00, US$1.80"
    output = listing(listed, "new")  # also one that was not launched can be named
    assert "not launched" in output and "trains" not in output


def test_the_sum_of_all_runs_counts_those_without_a_price_and_those_killed_at_their_start(listed):
    (listed / "new/heartbeat.json").write_text('{"seconds": 40.0}')
    assert listing(listed).splitlines()[-1] == (
        "in all: 0:06:40, US$1.80 and 1 of 4 runs without a price"
    )
    assert "in all: 0:00:40\n" in listing(listed, "new")


def test_the_list_is_a_json_document(listed):
    states = {state.name: state for state in checked(listing(listed, "--json")).runs}
    assert states["trains"].seconds_left == pytest.approx(120)
    assert states["trains"].usd_per_hour == pytest.approx(18)
    assert states["new"].status == "not launched" and states["killed"].warnings
    (one,) = checked(listing(listed, "finished", "--json")).runs
    assert (one.name, one.usd) == ("finished", 1.0)


# Statistics


def test_interval_of_paired_differences():
    """Student's sleep data, in R: t.test(extra ~ group, paired = TRUE): -2.4598858 -0.7001142."""
    found = Difference.of([-1.2, -2.4, -1.3, -1.3, 0.0, -1.0, -1.8, -0.8, -4.6, -1.4])
    assert found.mean == pytest.approx(-1.58)
    assert found.interval == pytest.approx((-2.4598858, -0.7001142), abs=1e-3)
    assert found.is_noise is False
    assert Difference.of([0.1, -0.12]).is_noise is True
    assert Difference.of([0.1, 0.101]).is_noise is False
    one = Difference.of([-0.1])
    assert one.interval is None and one.is_noise is None and one.deviation is None
    assert Difference.of([]) is None


def test_deviations_are_pooled_by_degrees_of_freedom():
    assert pooled_deviation([(1.0, 2), (2.0, 4)]) == pytest.approx((math.sqrt((1 + 3 * 4) / 4), 4))
    assert pooled_deviation([]) == (0.0, 0)


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.706), (2, 4.303), (9, 2.262), (30, 2.042), (31, 2.040), (60, 2.000), (120, 1.980)],
)
def test_critical_values_of_student(freedom, quantile):
    assert t_95(freedom) == pytest.approx(quantile, abs=0.004)


def test_a_run_that_cannot_be_read_is_named(listed, monkeypatch):
    (listed / "locked").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "locked")
    warning = run_lab("list", "--runs-dir", str(listed)).stderr
    assert f"{listed / 'locked'}: cannot be read" in warning and warning.count("\n") == 1


@pytest.mark.parametrize(
    ("usd", "text"),
    [(0.0, "0.0000"), (9.8e-8, "<0.000001"), (0.000123, "0.00012"), (1234.5, "1,234.50")],
)
def test_small_sums_have_an_end(usd, text):
    assert dollars(usd) == text
