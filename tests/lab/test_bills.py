"""Bills: what rented machines have cost, also when idle, divided among runs."""

import json
import time

import psutil
import pytest

from basics.errors import UserError
from lab.bills import prices_of, read_bills
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


def bills(runs_dir, **prices):
    """Return the hours of each part of each bill, and the dollars."""
    return {
        name: {
            key.removesuffix("_seconds"): value and round(value / HOUR, 3)
            if key.endswith("seconds")
            else value and pytest.approx(value, abs=0.01)
            for key, value in bill.items()
        }
        for name, bill in read_bills(runs_dir, prices).items()
    }


def expected(usd, *, setup=0.0, search=0.0, launch=0.0, idle=0.0):
    parts = {"setup": setup, "search": search, "launch": launch, "idle": idle}
    return parts | {"machine": sum(parts.values()), "machine_usd": usd}


def test_two_runs_one_after_the_other_share_the_machine(runs_dir):
    """Their sum is the time from the machine's start to the last end."""
    use(add_run(runs_dir, "a"), 0.5, 2)
    use(add_run(runs_dir, "b"), 3, 3.5, kind="search")
    use(runs_dir / "b", 3.5, 5)
    assert bills(runs_dir) == {
        "a": expected(4, setup=0.5, launch=1.5),
        "b": expected(6, idle=1, search=0.5, launch=1.5),
    }
    total = sum(bill["machine_seconds"] for bill in read_bills(runs_dir, {}).values())
    assert 5 * HOUR - 1 < total <= 5 * HOUR


def test_a_run_that_goes_on_after_another_one_pays_for_its_launches_alone(runs_dir):
    use(add_run(runs_dir, "a"), 0, 1)
    use(add_run(runs_dir, "b"), 1, 3)
    use(runs_dir / "a", 3, 4)
    assert bills(runs_dir) == {"a": expected(4, launch=2), "b": expected(4, launch=2)}


def test_runs_at_the_same_time_divide_it(runs_dir):
    """As the runs of a sweep do, each of which has the whole machine's price in its lines."""
    use(add_run(runs_dir, "a"), 0, 2)
    use(add_run(runs_dir, "b"), 1, 4)
    assert bills(runs_dir) == {"a": expected(3, launch=1.5), "b": expected(5, launch=2.5)}


def test_two_machines_of_one_run_are_both_in_its_bill(runs_dir):
    """Two with the same host name at the same time, with prices of their own."""
    run_dir = add_run(runs_dir, "moved")
    use(run_dir, 1, 2)
    use(run_dir, 1.5, 3, boot="other", up_since=UP + HOUR, usd_per_hour=10.0)
    assert bills(runs_dir) == {"moved": expected(4 + 20, setup=1.5, launch=2.5)}


def test_a_container_that_was_stopped_meanwhile_costs_nothing_then(runs_dir):
    """The kernel is the same, and the container's first process is a new one."""
    use(add_run(runs_dir, "a"), 1, 2)
    use(add_run(runs_dir, "b"), 11, 12, up_since=UP + 10 * HOUR)
    assert bills(runs_dir) == {
        "a": expected(4, setup=1, launch=1),
        "b": expected(4, setup=1, launch=1),
    }


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


@pytest.mark.parametrize(("price", "usd"), [({}, None), ({"a": 3.0}, 6.0)])
def test_a_price_given_afterwards_is_that_of_all_the_time(runs_dir, price, usd):
    use(add_run(runs_dir, "a"), 1, 2, usd_per_hour=None)
    assert bills(runs_dir, **price) == {"a": expected(usd, setup=1, launch=1)}
    use(add_run(runs_dir, "b"), 3, 4)
    assert bills(runs_dir, b=5.0)["b"] == expected(10, idle=1, launch=1)


def test_a_use_without_a_price_has_that_of_the_run(runs_dir):
    use(add_run(runs_dir, "a"), 0, 1, usd_per_hour=None)
    use(runs_dir / "a", 1, 2, usd_per_hour=7.0)
    assert bills(runs_dir)["a"] == expected(14, launch=2)


def test_runs_that_did_not_record_all_their_launches_have_no_bill(runs_dir):
    """Of earlier versions; their time is still not that of others."""
    add_run(runs_dir, "old")
    use(add_run(runs_dir, "half"), 1, 2, earlier_seconds=60.0)
    use(add_run(runs_dir, "new"), 2, 3)
    assert bills(runs_dir) == {"new": expected(2, launch=1)}


def test_a_use_counts_once_where_a_run_was_copied(runs_dir, tmp_path):
    use(add_run(runs_dir, "a"), 0, 1)
    add_run(runs_dir, "copy")
    (runs_dir / "copy/machine-time.jsonl").write_text(
        (runs_dir / "a/machine-time.jsonl").read_text()
    )
    use(runs_dir / "copy", 1, 3)
    assert bills(runs_dir) == {"a": expected(2, launch=1), "copy": expected(4, launch=2)}
    (runs_dir / "a").rename(tmp_path / "elsewhere")  # then the copy is all that is left of it
    assert bills(runs_dir) == {"copy": expected(6, launch=3)}


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
    parts = read_bills(run.run_dir.parent, {})["tiny"]
    assert parts["launch_seconds"] == pytest.approx(2 * HOUR, abs=30)
    assert parts["idle_seconds"] == pytest.approx(HOUR, abs=30)


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
    assert read_bills(run.run_dir.parent, {}) == {}


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


def test_lists_and_comparisons_show_the_bill_apart_from_training(two):
    printed = succeeded(run_lab("list", "--runs-dir", str(two), COLUMNS="200")).stdout
    texts = {line.split()[0]: " ".join(line.split()[-8:]) for line in printed.splitlines() if line}
    assert texts["b"] == "1:30:00 3.00 0:00:00 0:06:40 0:00:00 1:00:00 2:30:00 5.00"
    assert texts["old"] == "1:30:00 - - 0:06:40 - - - -"
    total = "machines: 4:30:00, US$9.00; the bills of 1 run are not known"
    assert printed.splitlines()[-1] == total
    states, rows = documents(two)
    for name in ("a", "b"):
        row, state = rows[name], states[name]
        assert row.usd == state.usd == 3 and row.download_seconds == state.download_seconds == 400
        for key, value in state.bill:
            assert getattr(row, key) == value
    assert rows["old"].machine_seconds is states["old"].bill is None
    table = succeeded(run_lab("compare", "--markdown", "--runs-dir", str(two))).stdout
    assert "| set-up s | download s | search s | idle s | machine s | US$ of machine |" in table
    assert "| 0 | 400 | 0 | 3600 | 9000 | 5.00 |" in table.replace(",", "")


def test_a_price_afterwards_is_also_that_of_a_run_that_was_only_searched(runs_dir):
    searched = runs_dir / "searched"
    searched.mkdir()
    (searched / "train.json").write_text("{}")
    use(searched, 0.5, 2, kind="search", usd_per_hour=None)
    for price in ("2", "searched=2"):
        listed = run_lab(
            "list", "searched", "--json", "--usd-per-hour", price, "--runs-dir", str(runs_dir)
        )
        (state,) = checked(succeeded(listed).stdout).runs
        assert state.status == "not launched"
        assert state.bill.machine_usd == pytest.approx(4, abs=0.01)


def test_prices_afterwards_are_those_of_one_run_or_of_all(two):
    states, rows = documents(two, "--usd-per-hour", "10", "--usd-per-hour", "a=1")
    for name, usd in (("a", 2), ("b", 25)):
        assert (
            states[name].bill.machine_usd == rows[name].machine_usd == pytest.approx(usd, abs=0.01)
        )
    assert states["old"].usd == rows["old"].usd == pytest.approx(15)
    for command in ("list", "compare"):
        line = error_line(run_lab(command, "--usd-per-hour", "nobody=1", "--runs-dir", str(two)))
        assert "--usd-per-hour 'nobody=1': wanted RUN=PRICE" in line
    with pytest.raises(UserError, match="wanted RUN=PRICE"):
        prices_of(["=1"], ["a"], two)
