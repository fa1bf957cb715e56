"""When a launch ends: budgets, signals, steps; what a run costs. Simulated, and in whole runs."""

import itertools
import json
import math
import re
import socket
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import ddp_train
from basics.text import dollars
from processes.command_line import Options
from processes.watchdog import Watchdog
from reporting import machine_time
from reporting.clock import PhaseClock, nearest_limit
from reporting.loss_window import LAG, LossWindow
from reporting.machine_time import read_uses
from reporting.reference import ReferenceComparison
from reporting.run_log import RunLog, SetResult
from reporting.speed import checkpoint_bytes
from reporting.summary import duration
from reporting.time_left import NO_GROWTH, Growth, TimeLeft
from run_config import ModelConfig, Run, TrainConfig, load_run
from tests.support.optional import given, settings, st
from tests.support.runs import run_in_process, summary_of
from tests.support.workplace import TINY_MODEL, TINY_TRAIN, forked, read_lines, succeeded
from tokens.batch_plan import BatchPlan
from trainer import startup
from trainer.stopping import Stop

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def alone():
    """Simulated launches have no process group; whole ones are in other processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda *_: None)
        yield


def train_config(**changes):
    return TrainConfig(**TINY_TRAIN | changes)


def clock_with(now, **seconds):
    clock = PhaseClock()
    for phase, spent in seconds.items():
        with clock.phase(phase):
            now.seconds += spent
    return clock


def test_a_budget_is_the_nearer_of_its_limits(now):
    clock = clock_with(now, training=1800)
    clock.usd_per_hour = 10.0
    assert nearest_limit(train_config(), clock) == (math.inf, "")
    assert nearest_limit(train_config(max_hours=1.0, max_cost_usd=20.0), clock) == (
        1800,
        "max_hours is 1, and the run has taken 0.5",
    )
    assert nearest_limit(train_config(max_hours=1.0, max_cost_usd=6.0), clock) == (
        pytest.approx(360),
        "max_cost_usd is 6, and the run has spent 5",
    )


class Simulated(Stop):
    """A run whose steps, validations, checkpoints and writes only let time pass."""

    def __init__(self, seconds, *, limit, plan=None, first_step=0, validate_on="rank0", **options):
        self.seconds, self.now, self.written_at = seconds, 30.0, 0.0
        train = train_config(
            validation_interval=50, max_hours=limit / 3600, validate_on=validate_on
        )
        self.clock, self.saver = PhaseClock(since=0.0), SimpleNamespace(longest_write_seconds=0.0)
        self.clock._now = lambda: self.now
        process = SimpleNamespace(device=torch.device("cpu"), is_main=True)
        watchdog = SimpleNamespace(process=process, stop_signal=0, suspended=nullcontext)
        super().__init__(
            Run("simulated", Path("simulated"), ModelConfig(**TINY_MODEL), train),
            plan or BatchPlan(2, 1, 1, 16, num_steps=3000),
            first_step=first_step,
            options=Options("simulated", **options),
            clock=self.clock,
            watchdog=watchdog,
            group=None,
            saver=self.saver,
            comparison=ReferenceComparison(None, train),
        )
        self._checkpoint_bytes = 12 * 10**8

    def pass_time(self, **seconds):
        for phase, spent in seconds.items():
            with self.clock.phase(phase):
                self.now += spent

    def look_at_saver(self):
        if 0 < self.written_at <= self.now:
            self.saver.longest_write_seconds = self.seconds["write"]

    def run(self):
        """Train; return the seconds it took."""
        since_report = 0
        self.clock.enter("compile")
        for step in itertools.count():
            self.now += self.seconds["step"] if step else 30
            if step == 0:
                self.clock.enter("training")
            self.look_at_saver()
            since_report += 1
            is_report_due = since_report == 10
            ends = self.after(step, is_report_due=is_report_due)
            saves = ends or self._config.is_save_due(step, num_steps=self._plan.num_steps)
            if is_report_due or saves:
                since_report = 0
            if saves:
                self.save_and_validate(step)
            if ends:
                return max(self.now, self.written_at)

    def save_and_validate(self, step):
        with self.clock.phase("checkpoint"):
            self.now = max(self.now, self.written_at)  # it waits for the last write
            self.look_at_saver()
            self.now += self.seconds["checkpoint"]
        self.written_at = self.now + self.seconds["write"]
        if self._config.is_validation_due(step, num_steps=self._plan.num_steps):
            self.pass_time(validation=self.seconds["validation"])


@settings(max_examples=60)
@given(
    step=st.floats(0.1, 10),
    validation=st.floats(0, 90),
    checkpoint=st.floats(0.1, 20),
    write=st.floats(0, 30),
    extra=st.floats(0, 3),
)
def test_no_limit_is_exceeded(step, validation, checkpoint, write, extra):
    seconds = {"step": step, "validation": validation, "checkpoint": checkpoint, "write": write}
    # Enough to learn in what validations and checkpoints take; then it ends anywhere.
    limit = 60 + 60 * step + 2 * (validation + checkpoint) + 6 * write
    limit += extra * (50 * step + validation)
    trainer = Simulated(seconds, limit=limit)
    taken = trainer.run()
    assert taken <= limit
    assert taken > 0.5 * limit


MEASURED = {"compile": 30, "training": 4, "waiting": 0.5, "diagnostics": 0.5}  # 5 s a step


@pytest.mark.parametrize(
    ("validate_on", "global_step", "spent", "seconds"),
    [
        ("rank0", 1, MEASURED | {"validation": 7, "checkpoint": 9, "chart": 1}, 10 * 5 + 10 + 2),
        (
            "rank0",
            49,
            MEASURED | {"training": 244, "validation": 7, "checkpoint": 9, "chart": 1},
            10 * 5 + 7 + 2 * 10 + 2,
        ),  # with the validation of step 49
        # Estimates: two validation microbatches, each a third of one of a step's two; 1.2 GB at
        # 100 MB/s. Before any step is measured, one takes as long as the first.
        ("rank0", 49, MEASURED | {"training": 244}, 10 * 5 + 5 / 2 / 3 * 2 + 2 * 12 + 2),
        ("all", 49, MEASURED | {"training": 244}, 10 * 5 + 5 / 2 / 3 + 2 * 12 + 2),  # one each
        ("rank0", 0, {"compile": 30}, 10 * 30 + 12 + 2),
    ],
)
def test_the_time_ahead_has_due_work_and_a_quarter_more(validate_on, global_step, spent, seconds):
    for left, is_spent in ((1.26 * seconds, False), (1.24 * seconds, True)):
        stop = Simulated(
            {},
            limit=30 + sum(spent.values()) + left,
            plan=BatchPlan(4, 2, 2, 16, num_steps=1000),
            validate_on=validate_on,
        )
        stop.pass_time(**spent)
        assert stop.after(global_step, is_report_due=True) == is_spent


def times_left(now, *, first_step=0, estimated=100, **changes):
    """Simulate a launch; return what each report and validation says is left, and what follows.

    A step takes 6 s, and its forward passes in a validation `estimated`; a validation takes 120 s.
    """
    plan = BatchPlan(4, 2, 1, 16, num_steps=105)
    config = train_config(
        validation_interval=25,
        validation_batches=None,
        validation_sequences=4 * estimated,
        **changes,
    )
    clock = PhaseClock()
    clock.resume({"training": 9000.0, "validation": 50.0}, {})  # an earlier, slower machine
    clock.count_lost(10_000.0)
    left, said = TimeLeft(config, plan, clock), []

    def pass_time(phase, seconds):
        with clock.phase(phase):
            now.seconds += seconds

    pass_time("startup", 50)
    left.start(first_step)
    pass_time("compile", 30)
    for step in range(first_step, plan.num_steps):
        if step > first_step:
            pass_time("training", 5)
            pass_time("waiting", 1)
        is_due = config.is_validation_due(step, num_steps=plan.num_steps)
        if is_due or (step + 1) % 10 == 0:
            said.append((left.after_steps(step, clock.read()), now.seconds))
        if is_due:
            pass_time("validation", 120)
            said.append((left.after_validation(step), now.seconds))
    return [(seconds, now.seconds - then) for seconds, then in said]


@pytest.mark.parametrize("first_step", [0, 60])
def test_the_time_left_has_the_validations_to_come(now, first_step):
    """Before the first one by its forward passes, afterwards as long as it took."""
    said = times_left(now, first_step=first_step)
    num_before = 3 if first_step == 0 else 2  # reports before the first validation
    for seconds, follows in said[:num_before]:
        num_validations = {0: 5, 60: 3}[first_step]
        assert seconds == pytest.approx(follows - 20 * num_validations)
    assert [seconds for seconds, _ in said[num_before:]] == pytest.approx(
        [follows for _, follows in said[num_before:]]
    )
    assert said[-1] == (0, 0)


def test_the_estimate_of_a_validation_knows_its_sets_and_its_length(now):
    (one, _), *_ = times_left(now)
    (sets, _), *_ = times_left(now, validation={"a": "x", "b": "y", "c": "z"})
    assert sets - one == pytest.approx(5 * 2 * 100)
    (shorter, _), *_ = times_left(now, estimated=1)
    assert one - shorter == pytest.approx(5 * 99)


def test_nothing_is_left_to_say_before_a_step_is_measured(now):
    clock = PhaseClock()
    left = TimeLeft(train_config(), BatchPlan(4, 2, 1, 16, num_steps=100), clock)
    left.start(10)
    assert left.after_steps(10, clock.read()) is None and left.after_validation(10) is None
    now.seconds += 5
    assert left.after_steps(11, clock.read()) is not None


def started_log(workplace, clock, **train):
    """Return the log of a run of 100 steps, whose first step is next."""
    workplace.add_run(train=train)
    run = load_run(workplace.runs_dir, "tiny")
    plan, comparison = BatchPlan(2, 2, 1, 16, num_steps=100), ReferenceComparison(None, run.config)
    log = RunLog(run, plan, None, None, clock=clock, comparison=comparison, is_active=True)
    log.start(0)
    return log


def test_windows_that_are_read_at_one_time_have_the_time_left_of_their_own_steps(
    workplace, now, monkeypatch
):
    """On a GPU, before a checkpoint: the older one is no slower, and the pace stays the same."""
    monkeypatch.setitem(LAG, "cpu", 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    clock, window = PhaseClock(), LossWindow(CPU)
    clock.usd_per_hour = 3600.0
    log = started_log(
        workplace, clock, validation_interval=None, validation_batches=None, checkpoint_interval=30
    )
    clock.enter("compile")
    for step in range(60):
        now.seconds += 6 if step else 30
        window.add(torch.tensor(3.0), torch.tensor(1.0))
        clock.enter("training")
        if (step + 1) % 10 == 0:
            for closed in window.close(step, 0.1, clock, waits=step == 29):
                log.report_steps(closed, {})
    records = read_lines(log.run.metrics_path)
    left = {record["global_step"]: record["seconds_left"] for record in records}
    assert left == pytest.approx({step: 6 * (99 - step) for step in (9, 19, 29, 39, 49)})
    assert [record["usd_at_end"] for record in records] == pytest.approx([30 + 6 * 99] * 5)


def test_the_time_left_after_a_validation_has_the_samples_of_those_to_come(
    workplace, now, monkeypatch
):
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    clock, window, saved = PhaseClock(), LossWindow(CPU), []
    log = started_log(workplace, clock, validation_interval=10, sample_prompts=["a"])

    def validates(_):
        now.seconds += 3
        return [SetResult("", 5.0)]

    def samples(*_):
        now.seconds += 20
        return ""

    trainer = SimpleNamespace(
        clock=clock,
        config=log.run.config,
        log=log,
        measure_validation_losses=validates,
        process=SimpleNamespace(device=CPU),
        run=log.run,
        sampler=SimpleNamespace(try_to_write=samples),
        saver=SimpleNamespace(add_validation=saved.append),
    )
    clock.enter("training")
    for _ in range(10):
        window.add(torch.tensor(3.0), torch.tensor(1.0))
        now.seconds += 6
    (closed,) = window.close(9, 0.1, clock, waits=True)
    log.report_steps(closed, {})
    ddp_train.Trainer.validate(trainer, 9)
    validation = read_lines(log.run.metrics_path)[-1]
    assert validation["validation_seconds"] == 3 and len(saved) == 1
    assert validation["seconds_left"] == pytest.approx(90 * 60 / 9 + 9 * (3 + 20))


def test_the_time_left_counts_steps_and_validations_after_a_growth_as_longer(now):
    """Steps of 6 s and validations of 120 s, 3 times as long from step 50 on; compiling 30 s."""
    config = train_config(validation_interval=25, validation_batches=4)
    plan, clock = BatchPlan(4, 2, 1, 16, num_steps=105), PhaseClock()
    left, said = TimeLeft(config, plan, clock), []

    def pass_time(phase, seconds):
        with clock.phase(phase):
            now.seconds += seconds

    pass_time("compile", 30)
    left.start(0, Growth(step=50, factor=3.0))
    for step in range(plan.num_steps):
        factor = 1 if step < 50 else 3
        if step == 50:
            pass_time("compile", 30)
            clock.measure_from_here()
            left.start(50)
        elif step:
            pass_time("training", 6 * factor)
        is_due = config.is_validation_due(step, num_steps=plan.num_steps)
        if is_due or (step + 1) % 10 == 0:
            said.append((step, left.after_steps(step, clock.read()), now.seconds))
        if is_due:
            pass_time("validation", 120 * factor)
            said.append((step, left.after_validation(step), now.seconds))
    known = [each for each in said if 25 <= each[0] < 50 or 75 <= each[0]]  # by a validation
    # The first step with all layers compiles, so that it is not measured but counted.
    wanted = [now.seconds - then + (18 if step < 50 else 0) for step, _, then in known]
    assert [seconds for _, seconds, _ in known] == pytest.approx(wanted)


def test_the_growth_ahead_is_that_of_the_weights(tmp_path):
    model = ModelConfig(**TINY_MODEL)
    run = Run("tiny", tmp_path, model, train_config(grow={"at": 0.5}))
    small = model.with_layers(1)
    found = Growth.ahead(run, small, num_steps=12, first_step=3)
    # 6 (12 L C^2 + V C) + 12 L T C
    flops = [6 * (layers * 12 * 256 + 257 * 16) + 12 * layers * 256 for layers in (1, 2)]
    state = [checkpoint_bytes(each, run.config) for each in (model, small)]
    assert found == (6, pytest.approx(flops[1] / flops[0]), state[0] / state[1]) and found[2] > 1
    assert found.as_steps_now(4, 12) == pytest.approx(2 + 6 * flops[1] / flops[0])
    assert found.as_steps_now(4, 5) == 1 and found.as_steps_now(8, 9) == found.factor
    assert Growth.ahead(run, small, num_steps=12, first_step=8).step == 8  # `at` was lowered
    assert Growth.ahead(run, model, num_steps=12, first_step=3) == NO_GROWTH
    assert NO_GROWTH.as_steps_now(4, 12) == 8


def test_a_budget_reserves_what_a_growth_ahead_takes():
    plan, growth = BatchPlan(4, 2, 2, 16, num_steps=1000), Growth(5, 3.0, checkpoint_factor=2.0)
    spent, write = MEASURED | {"validation": 7, "checkpoint": 19, "chart": 1}, 4
    now = 10 * 5 + 20 + 2 * write + 2
    later = 3 * 5 + 7 * 15 + 30 + 2 * 19 + 1 + 2 * 2 * write + 2
    for ahead, seconds in ((NO_GROWTH, now), (growth, later)):
        for left, is_spent in ((1.26 * seconds, False), (1.24 * seconds, True)):
            stop = Simulated({}, limit=30 + sum(spent.values()) + left, plan=plan)
            stop.start(0, ahead)
            stop.pass_time(**spent)
            stop.saver.longest_write_seconds = write
            assert stop.after(1, is_report_due=True) == is_spent
    # After it the steps since then count: 7 of 15 s in 105 s; a validation is estimated anew.
    # Checkpoints are the larger of those before, by their size, and those since.
    estimated = 10 * 15 + 15 / 2 / 3 * 2 + 2 * (2 * 19 + 1) + 2 * 2 * write + 2
    measured = 10 * 15 + 15 / 2 / 3 * 2 + 2 * (50 + 1) + 2 * 60 + 2
    for seconds, took, last_write in ((estimated, 10, write), (measured, 50, 60)):
        since = {"compile": 30, "training": 105, "checkpoint": took}
        for left, is_spent in ((1.26 * seconds, False), (1.24 * seconds, True)):
            limit = 30 + sum(spent.values()) + sum(since.values()) + left
            stop = Simulated({}, limit=limit, plan=plan)
            stop.start(0, growth)
            stop.pass_time(**spent)
            stop.saver.longest_write_seconds = write
            stop.clock.measure_from_here()
            stop.start(42)
            stop.pass_time(**since)
            stop.saver.longest_write_seconds = last_write
            assert stop.after(49, is_report_due=True) == is_spent


@pytest.mark.parametrize("interval", [None, 1, 3, 7, 50])
def test_validations_to_come_are_those_that_are_due(interval):
    config = train_config(
        validation_interval=interval,
        validation_batches=interval and 1,
        checkpoint_interval=10,
    )
    for num_steps in (1, 7, 21, 22):
        due = [config.is_validation_due(step, num_steps=num_steps) for step in range(num_steps)]
        for after in range(num_steps + 1):
            assert config.num_validations(num_steps, after=after) == sum(due[after:])


@pytest.mark.parametrize(
    ("shared", "reason"),
    [
        ([15, 0, 1], "SIGTERM"),
        ([15, 1, 0], "SIGTERM"),
        ([0, 1, 0], "max_hours is 1, and "),
        ([0, 0, 0], None),
    ],
)
def test_all_ranks_end_for_what_any_of_them_knows(monkeypatch, shared, reason):
    """A signal to any rank and the budget of rank 0: one agreement for all."""
    stop = Simulated({}, limit=3600)
    stop._watchdog.process.is_main = False
    offered, noted = [], []
    stop._watchdog.note_stop = noted.append  # else it might end before its watchdog hears of it

    def share(numbers, *_):
        offered.append(numbers.tolist())
        numbers.copy_(torch.tensor(shared))

    monkeypatch.setattr(dist, "all_reduce", share)
    assert stop.after(9, is_report_due=True) == (reason is not None)
    assert offered == [[0, 0, 0]]
    assert (stop.reason.text if stop.reason else "").startswith(reason or "")
    assert (stop.reason and stop.reason.kind) == {None: None, "SIGTERM": "signal"}.get(
        reason, "budget"
    )
    assert noted == ([15] if reason == "SIGTERM" else [])


@pytest.mark.parametrize(
    ("began_at", "first_step", "last_step"),
    [
        (None, 20, 27),  # steps 20 to 27, or 12 to 19 with a restart in between
        (12, 15, 19),
        (12, 99, 19),
        (0, 0, 7),
    ],
)
def test_max_steps_counts_from_the_beginning_of_the_launch(began_at, first_step, last_step):
    stop = Simulated({}, limit=3600, first_step=first_step, max_steps=8, began_at=began_at)
    assert stop.last_step == last_step


PRICE = 36_000  # dollars an hour: ten a second
LONG = {"min_train_tokens": 2000 * 128, "validation_interval": 50, "learning_rate": 1e-3}


def change(run_dir, **values):
    path = run_dir / "train.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_dollars_are_shown_recorded_and_split(workplace):
    run_dir = workplace.add_run()
    workplace.add_dataset()
    output = succeeded(workplace.torchrun(2, "tiny", "--usd-per-hour", str(PRICE))).stdout
    for record in read_lines(run_dir / "metrics.jsonl"):
        assert record["usd"] == pytest.approx(record["seconds"] * 10, rel=0.02)
    summary = summary_of(run_dir)
    total = summary["usd"].pop("total")
    assert summary["usd"] == pytest.approx(
        {phase: 10 * seconds for phase, seconds in summary["seconds"].items()}, abs=1
    )
    assert sum(summary["usd"].values()) == pytest.approx(total)
    assert {phase for phase, usd in summary["usd"].items() if usd} >= {
        "training",
        "validation",
        "checkpoint",
        "compile",
        "waiting",
        "startup",
    }
    assert re.search(rf"^cost: \${dollars(total)} = \$[\d.,]+ training, ", output, re.MULTILINE)
    assert re.search(r"^machine up \d+:\d\d:\d\d, US\$[\d.,]+ for all that", output, re.MULTILINE)
    first, last = read_uses(run_dir)  # from the launch's start, and from its end
    assert last.until - last.began == pytest.approx(sum(summary["seconds"].values()), abs=3)
    assert last.began == pytest.approx(first.began, abs=0.1) and first.until < last.until
    assert last.usd_per_hour == PRICE
    (line,) = re.findall(r"^step 5/12 .*tok/s \| .*", output, re.MULTILINE)
    reports = [one for one in read_lines(run_dir / "metrics.jsonl") if "seconds_left" in one]
    first = reports[0]
    left = first["usd_at_end"] - first["usd"]
    # Here and below: time and dollars are read one after the other, and a cent is a millisecond.
    assert left == pytest.approx(10 * first["seconds_left"], abs=0.5) and left > 0
    assert line.endswith(
        f" | ${dollars(first['usd'])} of ${dollars(first['usd_at_end'])}"
        f" | {duration(first['seconds_left'])} left"
    )
    # The last report has a validation to come; after that nothing is left.
    *_, before, after = reports
    assert before["seconds_left"] > 0 == after["seconds_left"]
    assert len(reports) == 6 and after["usd_at_end"] == pytest.approx(after["usd"], abs=0.5)


def test_a_resumed_run_adds_the_cost_of_each_launch_and_of_undone_steps(workplace):
    run_dir = workplace.add_run()
    workplace.add_dataset()
    summaries, validated = [], {}
    for arguments, price in (
        (("--max-steps", "5"), PRICE),
        (("--max-steps", "7"), PRICE / 10),
        ((), PRICE),
    ):  # the last one goes on from the first one's checkpoint
        checkpoint = [path.name for path in run_dir.glob("checkpoints/*-4") if summaries[1:]]
        succeeded(
            workplace.torchrun(1, "tiny", *checkpoint, *arguments, "--usd-per-hour", str(price))
        )
        summaries.append(summary_of(run_dir))
        if not validated:
            validated = read_lines(next(run_dir.glob("checkpoints/*-4/validation.json")))[0]
            assert sum(validated["usd"].values()) == pytest.approx(
                10 * sum(validated["seconds"].values()), rel=0.05
            )
    # The first launch ended in order, so nothing of it is lost for the second one.
    earlier, later, summary = summaries
    assert later["seconds"]["lost"] == later["usd"]["lost"] == 0
    for phase, spent in earlier["seconds"].items():
        assert later["seconds"][phase] >= spent, phase
    totals = [(sum(each["seconds"].values()), each["usd"]["total"]) for each in summaries]
    (first, first_usd), (second, second_usd), (third, third_usd) = totals
    assert second_usd == pytest.approx(first_usd + second - first, rel=0.02)
    assert third_usd == pytest.approx(second_usd + 10 * (third - second), rel=0.02)
    lost = second - sum(validated["seconds"].values())
    assert summary["seconds"]["lost"] == pytest.approx(lost, rel=0.01) and lost > 0
    output = succeeded(workplace.torchrun(1, "tiny", "--fresh", "--max-steps", "5")).stdout
    assert summary_of(run_dir)["seconds"]["lost"] == 0 and summary_of(run_dir)["usd"] is None
    assert "$" not in output.split("sample:")[0]
    assert not any("usd" in record for record in read_lines(run_dir / "metrics.jsonl"))


def test_launches_that_were_killed_use_up_the_budget(workplace):
    run_dir = workplace.add_run(train={"max_hours": 1.0})
    workplace.add_dataset()
    (run_dir / "heartbeat.json").write_text(
        json.dumps({"pid": 1, "host": socket.gethostname(), "time": "now", "seconds": 7200})
    )
    result = run_in_process(*workplace.arguments("tiny"))
    assert result.returncode == 2
    assert "max_hours is 1, and the run has taken 2" in result.stderr


def test_a_limit_stops_inside_it_with_a_checkpoint(workplace):
    run_dir = workplace.add_run(train=LONG | {"max_cost_usd": 20.0, "usd_per_hour": PRICE})
    workplace.add_dataset(num_tokens=300_000)
    output = succeeded(
        forked(  # with a clock that moves by 4 ms each time it is read
            "tests/support/torchrun_workers.py",
            ["train-in-fake-time", str(workplace.root), *workplace.arguments("tiny")],
            num_processes=2,
        )
    ).stdout
    summary = summary_of(run_dir)
    assert summary["status"] == "stopped" and summary["reason"].startswith("max_cost_usd is ")
    assert f"({summary['reason']})" in output and "the rest is a reserve" in summary["reason"]
    assert 1.7 < sum(summary["seconds"].values()) <= 2  # the next ten steps take 0.2 s
    stopped_at = json.loads((run_dir / "checkpoints/latest/meta.json").read_text())["global_step"]
    assert 20 < stopped_at == summary["global_step"] < 1999
    # With less than it has spent, it does not go on; with more, it does.
    change(run_dir, max_cost_usd=10)
    assert (
        "max_cost_usd is 10, and the run has spent "
        in run_in_process(*workplace.arguments("tiny", "--nproc-per-node", "2")).stderr
    )
    change(run_dir, max_cost_usd=20_000)
    succeeded(workplace.torchrun(2, "tiny", "--max-steps", "3"))
    assert summary_of(run_dir)["global_step"] == stopped_at + 3


def test_speed_is_judged_once_after_fifty_steps(workplace):
    workplace.add_run(train=LONG)
    workplace.add_dataset(num_tokens=300_000)
    output = succeeded(workplace.torchrun(2, "tiny", "--max-steps", "110")).stdout
    lines = re.findall(
        r"^speed: ([\d,]+) tokens/s, .* \(no MFU: the peak speed of ", output, re.MULTILINE
    )
    assert len(lines) == 1 and int(lines[0].replace(",", "")) > 0
    assert re.search(r" parameters, [\d.]+ tokens per parameter; ", output)


def test_the_time_of_a_launch_counts_from_before_its_model_is_built(workplace, monkeypatch):
    """A kill while a large checkpoint is read would otherwise cost nothing."""
    workplace.add_dataset()
    run_dir = workplace.add_run()
    calls = []
    monkeypatch.setattr(Watchdog, "write_heartbeats", lambda _, path: calls.append(path))
    # The heartbeat of a killed launch says how long that has used the machine: it is read first.
    monkeypatch.setattr(machine_time, "read_uses", lambda run_dir: calls.append(run_dir))
    monkeypatch.setattr(startup, "build_state", lambda *_: calls.append("state"))
    with pytest.raises(pytest.fail.Exception, match="training would start now"):
        run_in_process(*workplace.arguments("tiny"), under_torchrun=True)
    assert calls == [run_dir, run_dir / "heartbeat.json", "state"]
