"""Bills: what rented machines have cost: the time that they were up, times the price."""

import json
import shutil
import time

import psutil
import pytest

from lab.bills import read_bills
from reporting import machine_time
from reporting.clock import PhaseClock
from reporting.machine_time import begin_launch, read_uses, record_launch, record_search
from run_config import load_run
from tests.support.json_schemas import checked
from tests.support.lab_cli import error_line, run_lab, succeeded
from tests.support.watching import ODD_VALUES, add_run, lines

UP = 1_000_000.0  # the machine's start, in seconds since 1970
HOUR = 3600.0


def use(run_dir, began, until, **changes):
    """Add the lines of a launch: one from its start, one from its end. Hours since `UP`."""
    line = {
        "run": run_dir.name,
        "kind": "launch",
        "host": "host",
        "boot": "boot",
        "up_since": UP + len(run_dir.name) / 10,  # clocks are not quite steady
        "began": UP + began * HOUR,
        "until": UP + until * HOUR,
        "usd_per_hour": 2.0,
        "earlier_seconds": 0.0,
    } | changes
    start = line | {"began": line["began"] + 0.01, "until": line["began"] + 1}
    with (run_dir / "machine-time.jsonl").open("a") as file:
        file.write(lines(start, line))


@pytest.fixture
def run(workplace):
    return load_run(workplace.runs_dir, workplace.add_run().name)


OTHER_BOOT = {"boot": "other", "up_since": UP + HOUR, "usd_per_hour": 10.0}
RESTARTED = {"up_since": UP + 10 * HOUR}  # of a container: the kernel is the same


@pytest.mark.parametrize(
    ("uses", "bills", "of_all"),
    [
        # One run after the other: each has all the time until its end, all together count it once.
        ([("a", 0.5, 2, {}), ("b", 3, 5, {})], {"a": (2, 4), "b": (5, 10)}, (5, 10)),
        ([("a", 0, 1, {}), ("b", 1, 3, {}), ("a", 3, 4, {})], {"a": (4, 8), "b": (3, 6)}, (4, 8)),
        ([("a", 0, 2, {}), ("b", 1, 4, {})], {"a": (2, 4), "b": (4, 8)}, (4, 8)),  # at once
        ([("a", 1, 2, {}), ("a", 1.5, 3, OTHER_BOOT)], {"a": (4, 24)}, (4, 24)),  # two machines
        ([("a", 1, 2, {}), ("a", 11, 12, RESTARTED)], {"a": (4, 8)}, (4, 8)),
        ([("a", 1, 2, {"usd_per_hour": None})], {"a": (2, None)}, (2, None)),
        (
            [("a", 0, 1, {"usd_per_hour": None}), ("a", 1, 2, {"usd_per_hour": 7.0})],
            {"a": (2, 14)},
            (2, 14),
        ),
        # A run that did not record all its launches has no bill; its time is still paid for.
        ([("a", 1, 2, {"earlier_seconds": 60.0}), ("b", 2, 3, {})], {"b": (3, 6)}, (3, 6)),
    ],
)
def test_a_bill_is_the_time_that_machines_were_up(runs_dir, uses, bills, of_all):
    for name, began, until, changes in uses:
        run_dir = runs_dir / name if (runs_dir / name).exists() else add_run(runs_dir, name)
        use(run_dir, began, until, **changes)
    found, all_together = read_bills(runs_dir, {})
    assert found.keys() == bills.keys()
    for bill, (hours, usd) in zip(
        (*found.values(), all_together), (*bills.values(), of_all), strict=True
    ):
        assert bill.machine_seconds == pytest.approx(hours * HOUR, abs=1)
        assert bill.machine_usd == (usd and pytest.approx(usd, abs=0.01))


def test_a_use_counts_once_where_a_run_was_copied(runs_dir, tmp_path):
    original, copy = add_run(runs_dir, "a"), add_run(runs_dir, "copy")
    use(original, 0, 1)
    shutil.copy(original / "machine-time.jsonl", copy)
    use(copy, 1, 3)
    bills, _ = read_bills(runs_dir, {})
    assert (round(bills["a"].machine_usd), round(bills["copy"].machine_usd)) == (2, 6)
    original.rename(tmp_path / "elsewhere")  # then the copy is all that is left of it
    assert read_bills(runs_dir, {})[1].machine_usd == pytest.approx(6, abs=0.01)


@pytest.mark.parametrize(("is_hidden", "seconds"), [(False, 100.0), (True, 9000.0)])
def test_a_container_is_up_since_its_first_process(monkeypatch, run, is_hidden, seconds):
    """That is what a provider bills: the host may have been up for weeks."""

    class First:
        def __init__(self, pid):
            if is_hidden:
                raise psutil.AccessDenied(pid)

        def create_time(self):
            return time.time() - 100

    monkeypatch.setattr(psutil, "Process", First)
    monkeypatch.setattr(psutil, "boot_time", lambda: time.time() - 9000)
    record_launch(run, Clock(10.0))
    (found,) = read_uses(run.run_dir)
    assert time.time() - found.up_since == pytest.approx(seconds, abs=30)
    assert found.boot and found.up_since <= found.began <= found.until


# What a launch records


class Clock(PhaseClock):
    """A clock of a launch that has taken an hour."""

    def __init__(self, seconds=HOUR):
        super().__init__(since=time.perf_counter() - seconds)
        self.usd_per_hour = 4.0


def heartbeat(run, seconds_ago, host):
    told = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - seconds_ago))
    run.heartbeat_path.write_text(json.dumps({"time": told, "pid": 1, "host": host}))


def test_a_launch_that_was_killed_lasted_until_its_heartbeat(run, monkeypatch):
    """Also when the next launch has replaced the heartbeat."""
    monkeypatch.setattr(machine_time, "machine_up_seconds", lambda: 10 * HOUR)
    now = time.time()
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: now - 3 * HOUR)
        begin_launch(run, Clock(0.0), read_uses(run.run_dir))
    heartbeat(run, HOUR, "another")
    assert read_uses(run.run_dir)[-1].until == pytest.approx(now - 3 * HOUR, abs=30)
    heartbeat(run, HOUR, read_uses(run.run_dir)[-1].host)
    assert read_uses(run.run_dir)[-1].until == pytest.approx(now - HOUR, abs=30)
    uses = read_uses(run.run_dir)
    heartbeat(run, -HOUR, uses[-1].host)  # by a clock that is wrong
    assert read_uses(run.run_dir)[-1].until == pytest.approx(now, abs=30)
    begin_launch(run, Clock(0.0), uses)
    run.heartbeat_path.unlink()
    *_, killed, last = read_uses(run.run_dir)
    assert killed.until - killed.began == pytest.approx(2 * HOUR, abs=30)
    assert last.until - last.began == pytest.approx(0, abs=30)


def test_a_launch_records_its_time_and_the_price_of_the_whole_machine(run, monkeypatch):
    begin_launch(run, Clock(), [])
    monkeypatch.setenv(machine_time.SHARES_VARIABLE, "2")  # a sweep gives each its share
    record_launch(run, Clock())
    first, last = read_uses(run.run_dir)
    assert last.until - last.began == pytest.approx(HOUR, abs=30)
    assert (first.usd_per_hour, last.usd_per_hour) == (4, 8)
    assert first.earlier_seconds == last.earlier_seconds == 0


def test_a_run_that_goes_on_from_an_earlier_version_says_so_once(run):
    clock = Clock()
    clock.resume({"training": 500.0}, {})
    record_search(run, None)
    begin_launch(run, clock, read_uses(run.run_dir))
    begin_launch(run, clock, read_uses(run.run_dir))
    assert sorted(use.earlier_seconds for use in read_uses(run.run_dir)) == [0, 0, 500, 500]
    assert read_bills(run.run_dir.parent, {})[0] == {}


def test_a_full_disk_ends_no_launch(run, monkeypatch):
    monkeypatch.setattr(machine_time, "append_whole", lambda *_: (_ for _ in ()).throw(OSError(28)))
    begin_launch(run, Clock(), [])
    assert read_uses(run.run_dir) == []


@pytest.mark.parametrize("value", [*ODD_VALUES, '"0001-01-01"'])
def test_odd_lines_are_left_out(runs_dir, value):
    run_dir = add_run(runs_dir, "odd")
    path = run_dir / "machine-time.jsonl"
    use(run_dir, 1, 2)
    whole = read_bills(runs_dir, {})
    good = path.read_text()
    line = json.loads(good.splitlines()[-1])
    odd = [
        json.dumps(line | {key: "V"}).replace('"V"', value)
        for key in ("up_since", "began", "until", "earlier_seconds", "usd_per_hour")
    ]
    if value == "null":
        odd.pop()  # a run without a price
    path.write_text("\n".join([value, *odd, good, "{"]))
    (run_dir / "heartbeat.json").write_text(f'{{"time": {value}, "pid": 1, "host": "host"}}')
    assert read_bills(runs_dir, {}) == whole
    assert "odd" in succeeded(run_lab("list", "--runs-dir", str(runs_dir))).stdout


# The commands


@pytest.fixture
def two(runs_dir):
    seconds = {"training": 5000.0, "download": 400.0}
    for name, began, until in (("a", 0.5, 2), ("b", 3, 4.5)):
        usd = {"training": 3.0, "total": 3.0}
        use(add_run(runs_dir, name, global_step=99, seconds=seconds, usd=usd), began, until)
    add_run(runs_dir, "old", global_step=99, seconds=seconds)
    return runs_dir


def documents(runs_dir, *options):
    """Return the rows of `lab list --json` and of `lab compare --json`, by run."""
    options = ("--json", *options, "--runs-dir", str(runs_dir))
    listed = checked(succeeded(run_lab("list", *options)).stdout).runs
    compared = checked(succeeded(run_lab("compare", *options)).stdout).rows
    return {state.name: state for state in listed}, {row.run: row for row in compared}


def test_the_time_of_the_machine_is_listed_only_where_it_has_a_price(runs_dir):
    seconds = {"training": 5000.0, "download": 400.0}
    use(add_run(runs_dir, "free", global_step=99, seconds=seconds), 0.5, 2, usd_per_hour=None)
    for options, is_shown in (((), False), (("--usd-per-hour", "2"), True)):
        listed = succeeded(run_lab("list", "--runs-dir", str(runs_dir), *options, COLUMNS="200"))
        assert ("machines up: " in listed.stdout) == is_shown
        assert (" machine " in listed.stdout.splitlines()[0]) == is_shown


def test_lists_and_comparisons_show_the_bill_apart_from_training(two):
    printed = succeeded(run_lab("list", "--runs-dir", str(two), COLUMNS="200")).stdout
    up = "machines up: 4:30:00, with set-up and idle time, US$9.00"
    assert printed.splitlines()[-1] == f"{up}; the bills of 1 run are not known"
    states, rows = documents(two)
    for name in ("a", "b"):
        row, state = rows[name], states[name]
        assert row.usd == state.usd == 3 and row.download_seconds == state.download_seconds == 400
        for key, value in state.bill:
            assert getattr(row, key) == value
    assert rows["old"].machine_seconds is states["old"].bill is None
    table = succeeded(run_lab("compare", "--markdown", "--runs-dir", str(two))).stdout
    assert "| 0:06:40 | 4:30:00 | 9.00 |" in table


@pytest.mark.parametrize("price", ["2", "searched=2"])
def test_a_price_afterwards_is_also_that_of_a_run_that_was_only_searched(runs_dir, price):
    searched = runs_dir / "searched"
    searched.mkdir()
    (searched / "train.json").write_text("{}")
    use(searched, 0.5, 2, kind="search", usd_per_hour=None)
    options = ("--json", "--usd-per-hour", price, "--runs-dir", str(runs_dir))
    (state,) = checked(succeeded(run_lab("list", "searched", *options)).stdout).runs
    assert state.status == "not launched"
    assert state.bill.machine_usd == pytest.approx(4, abs=0.01)


def test_prices_afterwards_are_those_of_one_run_or_of_all(two):
    states, rows = documents(two, "--usd-per-hour", "10", "--usd-per-hour", "a=1")
    for name, usd in (("a", 2), ("b", 45)):
        assert states[name].bill.machine_usd == rows[name].machine_usd
        assert rows[name].machine_usd == pytest.approx(usd, abs=0.01)
    assert states["old"].usd == rows["old"].usd == pytest.approx(15)
    for command in ("list", "compare"):
        line = error_line(run_lab(command, "--usd-per-hour", "nobody=1", "--runs-dir", str(two)))
        assert "--usd-per-hour 'nobody=1': wanted RUN=PRICE" in line
