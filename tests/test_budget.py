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
from reporting import estimate, machine_time
from reporting.clock import PhaseClock, nearest_limit
from reporting.estimate import Pace, Rates, seconds_ahead
from reporting.loss_window import LAG, LossWindow
from reporting.machine_time import read_uses
from reporting.run_log import Report, RunLog, SetResult
from reporting.summary import BUDGET, StopReason, duration
from run_config import ModelConfig, Run, TrainConfig, load_run
from tests.support.optional import given, settings, st
from tests.support.runs import run_in_process, summary_of
from tests.support.workplace import TINY_MODEL, TINY_TRAIN, forked, read_lines, succeeded
from tokens.batch_plan import BatchPlan
from trainer import startup
from trainer.budget import Budget
from trainer.launch import Launch
from trainer.observer import Observer
from trainer.resuming import ResumePoint
from trainer.stopping import Stop

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def alone():
    """Simulated launches have no process group; whole ones are in other processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda *_: None)
        # 1.2 GB with the two layers of the simulated runs.
        patch.setattr(estimate, "checkpoint_bytes", lambda model, _: 6 * 10**8 * model.n_layers)
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


def simulated_run(**train):
    return Run("simulated", Path("simulated"), ModelConfig(**TINY_MODEL), train_config(**train))


def launch_of(run, plan, clock, *, first_step=0, is_main=True, **options):
    process = SimpleNamespace(device=CPU, is_main=is_main)
    watchdog = SimpleNamespace(process=process, stop_signal=0, suspended=nullcontext)
    checkpoint = first_step and SimpleNamespace(meta=SimpleNamespace(global_step=first_step - 1))
    return Launch(
        run,
        SimpleNamespace(plan=plan),
        ResumePoint(checkpoint or None),
        reference=None,
        options=Options("simulated", **options),
        watchdog=watchdog,
        clock=clock,
        progress=None,
        group=None,
    )


class Simulated:
    """A run whose steps, validations, checkpoints and writes only let time pass."""

    def __init__(self, seconds, *, limit, plan=None, validate_on="rank0", **train):
        self.seconds, self.now, self.written_at = seconds, 30.0, 0.0
        self.clock, self.longest_write = PhaseClock(since=0.0), 0.0
        self.clock._now = lambda: self.now
        self.plan = plan or BatchPlan(2, 1, 1, 16, num_steps=3000)
        run = simulated_run(
            validation_interval=50, max_hours=limit / 3600, validate_on=validate_on, **train
        )
        self.config, self.stages = run.config, run.stages(self.plan.num_steps)
        self.pace = Pace(run, self.plan, self.clock, lambda: self.longest_write)
        self.pace.begin(self.stages)
        self.launch = launch_of(run, self.plan, self.clock)
        self.budget = Budget(self.launch, self.pace)

    def after(self, step, *, is_report_due):
        self.budget.step(step, is_report_due=is_report_due)
        return self.budget.stop_reason is not None or step >= self.launch.last_step

    def pass_time(self, **seconds):
        for phase, spent in seconds.items():
            with self.clock.phase(phase):
                self.now += spent

    def look_at_writes(self):
        if 0 < self.written_at <= self.now:
            self.longest_write = self.seconds["write"]

    def run(self):
        """Train; return the seconds it took."""
        since_report = 0
        self.clock.enter("compile")
        for step in itertools.count():
            self.now += self.seconds["step"] if step else 30
            if step == 0:
                self.clock.enter("training")
            self.look_at_writes()
            since_report += 1
            is_report_due = since_report == 10
            ends = self.after(step, is_report_due=is_report_due)
            saves = ends or self.config.is_save_due(step, num_steps=self.plan.num_steps)
            if is_report_due or saves:
                since_report = 0
            if saves:
                self.save_and_validate(step)
            if ends:
                return max(self.now, self.written_at)

    def save_and_validate(self, step):
        with self.clock.phase("checkpoint"):
            self.now = max(self.now, self.written_at)  # it waits for the last write
            self.look_at_writes()
            self.now += self.seconds["checkpoint"]
        self.written_at = self.now + self.seconds["write"]
        if self.config.is_validation_due(step, num_steps=self.plan.num_steps):
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


LONG_PLAN = BatchPlan(4, 2, 2, 16, num_steps=1000)
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
            plan=LONG_PLAN,
            validate_on=validate_on,
        )
        stop.pass_time(**spent)
        assert stop.after(global_step, is_report_due=True) == is_spent


def times_left(now, *, first_step=0, estimated=100, **changes):
    """Simulate a launch; return what each report and validation says is left, and what follows.

    A step takes 6 s, and its forward passes in a validation `estimated`; a validation takes 120 s.
    """
    plan = BatchPlan(4, 2, 1, 16, num_steps=105)
    run = simulated_run(
        validation_interval=25,
        validation_batches=None,
        validation_sequences=4 * estimated,
        **changes,
    )
    config, clock = run.config, PhaseClock()
    clock.resume({"training": 9000.0, "validation": 50.0}, {})  # an earlier, slower machine
    clock.count_lost(10_000.0)
    pace, said = Pace(run, plan, clock), []

    def pass_time(phase, seconds):
        with clock.phase(phase):
            now.seconds += seconds

    pass_time("startup", 50)
    pace.begin(run.stages(plan.num_steps, first_step=first_step))
    pass_time("compile", 30)
    for step in range(first_step, plan.num_steps):
        if step > first_step:
            pass_time("training", 5)
            pass_time("waiting", 1)
        is_due = config.is_validation_due(step, num_steps=plan.num_steps)
        if is_due or (step + 1) % 10 == 0:
            said.append((pace.seconds_after_report(step, clock.read()), now.seconds))
        if is_due:
            pass_time("validation", 120)
            said.append((pace.seconds_after_validation(step), now.seconds))
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
    run, clock = simulated_run(), PhaseClock()
    pace = Pace(run, BatchPlan(4, 2, 1, 16, num_steps=100), clock)
    pace.begin(run.stages(100, first_step=10))
    assert pace.seconds_after_report(10, clock.read()) is None
    assert pace.seconds_after_validation(10) is None
    now.seconds += 5
    assert pace.seconds_after_report(11, clock.read()) is not None


def started_log(workplace, clock, **train):
    """Return the log of a run of 100 steps, whose first step is next."""
    workplace.add_run(train=train)
    run = load_run(workplace.runs_dir, "tiny")
    plan = BatchPlan(2, 2, 1, 16, num_steps=100)
    pace = Pace(run, plan, clock)
    pace.begin(run.stages(plan.num_steps))
    log = RunLog(run, plan, None, None, clock=clock, pace=pace, is_active=True)
    log.start(0)
    return log


def report_of(window):
    values = window.numbers | {"tokens_per_second": None}
    return Report(window.global_step, 0, window.numbers["train_loss"], values, window)


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
                log.report_steps(report_of(closed))
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

    class Slow(Observer):
        def validation(self, report):
            with clock.phase("validation"):
                now.seconds += 20

    trainer = SimpleNamespace(
        launch=SimpleNamespace(clock=clock, plan=log.plan),
        log=log,
        measure_validation_losses=validates,
        observers=[Slow()],
        saver=SimpleNamespace(add_validation=saved.append),
    )
    clock.enter("training")
    for _ in range(10):
        window.add(torch.tensor(3.0), torch.tensor(1.0))
        now.seconds += 6
    (closed,) = window.close(9, 0.1, clock, waits=True)
    log.report_steps(report_of(closed))
    ddp_train.Trainer.validate(trainer, 9)
    validation = read_lines(log.run.metrics_path)[-1]
    assert validation["validation_seconds"] == 3 and len(saved) == 1
    assert validation["seconds_left"] == pytest.approx(90 * 60 / 9 + 9 * (3 + 20))


GROW = {"at": 50 / 105}  # from one of two layers


def slower_with_all_layers():
    model = ModelConfig(**TINY_MODEL)
    return model.flops_per_token / model.with_layers(1).flops_per_token


def test_the_time_left_counts_steps_and_validations_after_a_growth_as_longer(now):
    """Steps of 6 s, validations of 120 s, longer by the FLOPs from step 50 on; compiling 30 s."""
    run = simulated_run(validation_interval=25, validation_batches=4, grow=GROW)
    plan, clock, config = BatchPlan(4, 2, 1, 16, num_steps=105), PhaseClock(), run.config
    pace, said, stages = Pace(run, plan, clock), [], run.stages(105)

    def pass_time(phase, seconds):
        with clock.phase(phase):
            now.seconds += seconds

    pass_time("compile", 30)
    pace.begin(stages)
    for step in range(plan.num_steps):
        factor = 1 if step < 50 else slower_with_all_layers()
        if step == 50:
            pass_time("compile", 30)
            pace.begin(stages[1:])
        elif step:
            pass_time("training", 6 * factor)
        is_due = config.is_validation_due(step, num_steps=plan.num_steps)
        if is_due or (step + 1) % 10 == 0:
            said.append((step, pace.seconds_after_report(step, clock.read()), now.seconds))
        if is_due:
            pass_time("validation", 120 * factor)
            said.append((step, pace.seconds_after_validation(step), now.seconds))
    known = [each for each in said if 25 <= each[0] < 50 or 75 <= each[0]]  # by a validation
    # The first step with all layers compiles, so that it is not measured but counted.
    first = 6 * slower_with_all_layers()
    wanted = [now.seconds - then + (first if step < 50 else 0) for step, _, then in known]
    assert [seconds for _, seconds, _ in known] == pytest.approx(wanted)


@given(
    first=st.integers(0, 60),
    number=st.integers(0, 60),
    done=st.integers(0, 3),
    grows=st.booleans(),
    intervals=st.tuples(*[st.none() | st.integers(1, 20)] * 2),
)
def test_the_seconds_ahead_are_the_sum_over_steps(first, number, done, grows, intervals):
    validation_interval, checkpoint_interval = intervals
    run = simulated_run(
        validation_interval=validation_interval,
        validation_batches=validation_interval and 1,
        checkpoint_interval=checkpoint_interval if validation_interval else 7,
        grow={"at": 0.4} if grows else None,
    )
    plan, stop = BatchPlan(4, 2, 1, 16, num_steps=60), min(60, first + number)
    stages, first_due = run.stages(60), max(0, first - done)
    rates = Rates(stages[0].model, step=1, validation=100, save=10**4, chart=10**6, compilation=0.1)
    found = seconds_ahead(run, plan, stages, rates, first=first, stop=stop, first_due=first_due)
    wanted = 0.0
    for step in range(first_due, stop):
        has_all = not grows or step >= 24
        slower = slower_with_all_layers() if grows and has_all else 1.0
        larger = 2.0 if grows and has_all else 1.0
        is_validated = bool(validation_interval) and (
            (step + 1) % validation_interval == 0 or step == 59
        )
        is_saved = (
            is_validated
            or step in (59, 23 if grows else 59)
            or (step + 1) % (run.config.checkpoint_interval or 61) == 0
        )
        wanted += slower * (step >= first) + 100 * slower * is_validated
        wanted += is_saved * (10**4 * larger + 10**6)
    wanted += 0.1 * (grows and first <= 24 < stop)
    assert sum(map(sum, found)) == pytest.approx(wanted)


def test_stages_of_a_launch_begin_where_it_does():
    run = simulated_run(grow={"at": 0.5})
    small, whole = (run.model.with_layers(n) for n in (1, 2))
    assert run.stages(12) == [(small, range(6)), (whole, range(6, 12))]
    assert run.stages(12, first_step=3) == [(small, range(3, 6)), (whole, range(6, 12))]
    assert run.stages(12, first_step=6) == [(whole, range(6, 12))]
    assert run.stages(12, first_step=8) == [(whole, range(8, 12))]  # `at` was lowered
    assert run.stages(12, first_step=3, has_all_layers=True) == [(whole, range(3, 12))]  # raised
    assert simulated_run().stages(12) == [(whole, range(12))]


def test_a_budget_reserves_what_a_growth_ahead_takes():
    spent, write = MEASURED | {"validation": 7, "checkpoint": 19, "chart": 1}, 4
    slower = slower_with_all_layers()
    now = 10 * 5 + 20 + 2 * write + 2
    later = 3 * 5 + 7 * 5 * slower + 30 + 20 + 2 * 19 + 1 + 2 * 2 * write + 2
    for grow, seconds in ((None, now), ({"at": 0.005}, later)):
        for left, is_spent in ((1.26 * seconds, False), (1.24 * seconds, True)):
            stop = Simulated({}, limit=30 + sum(spent.values()) + left, plan=LONG_PLAN, grow=grow)
            stop.pass_time(**spent)
            stop.longest_write = write
            assert stop.after(1, is_report_due=True) == is_spent
    # After it the steps since then count: 7 of 15 s in 105 s; a validation is estimated anew.
    # Checkpoints are the larger of those before, by their size, and those since.
    estimated = 10 * 15 + 15 / 2 / 3 * 2 + 2 * (2 * 19 + 1) + 2 * 2 * write + 2
    measured = 10 * 15 + 15 / 2 / 3 * 2 + 2 * (50 + 1) + 2 * 60 + 2
    for seconds, took, last_write in ((estimated, 10, write), (measured, 50, 60)):
        since = {"compile": 30, "training": 105, "checkpoint": took}
        for left, is_spent in ((1.26 * seconds, False), (1.24 * seconds, True)):
            limit = 30 + sum(spent.values()) + sum(since.values()) + left
            stop = Simulated({}, limit=limit, plan=LONG_PLAN, grow={"at": 0.042})
            stop.pass_time(**spent)
            stop.longest_write = write
            stop.pace.begin(stop.stages[1:])
            stop.pass_time(**since)
            stop.longest_write = last_write
            assert stop.after(49, is_report_due=True) == is_spent


@pytest.mark.parametrize(
    ("shared", "reason"),
    [
        ([15, 0], "SIGTERM"),
        ([15, 1], "SIGTERM"),
        ([0, 1], None),
        ([0, 0], None),
    ],
)
def test_all_ranks_end_for_what_any_of_them_knows(monkeypatch, shared, reason):
    """A signal to any rank, and an observer of rank 0: one agreement for all."""
    launch = launch_of(simulated_run(), LONG_PLAN, PhaseClock(), is_main=False)
    stop, offered, noted = Stop(launch, []), [], []
    launch.watchdog.note_stop = noted.append  # else it might end before its watchdog hears of it

    def share(numbers, *_):
        offered.append(numbers.tolist())
        numbers.copy_(torch.tensor(shared))

    monkeypatch.setattr(dist, "all_reduce", share)
    assert stop.after(9) == stop.has_ended == any(shared)
    assert offered == [[0, 0]]
    assert (stop.reason and stop.reason.text) == reason
    assert noted == ([15] if reason == "SIGTERM" else [])


def test_rank_0_ends_for_the_first_of_its_observers_that_wants_it():
    observers = [Observer() for _ in range(3)]
    stop = Stop(launch_of(simulated_run(), LONG_PLAN, PhaseClock()), observers)
    assert not stop.after(9) and stop.reason is None
    observers[1].stop_reason = wanted = StopReason(BUDGET, "max_hours is 1")
    observers[2].stop_reason = StopReason("behind", "later")
    assert stop.after(10) and stop.reason is wanted
    assert Stop(stop._launch, []).after(999)  # the last step


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
    launch = launch_of(
        simulated_run(),
        LONG_PLAN,
        PhaseClock(),
        first_step=first_step,
        max_steps=8,
        began_at=began_at,
    )
    assert launch.last_step == last_step


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
        assert record["usd"] == pytest.approx(record["seconds"] * 10, abs=0.01)
    summary = summary_of(run_dir)
    total = summary["usd"].pop("total")
    assert summary["usd"] == pytest.approx(
        {phase: 10 * seconds for phase, seconds in summary["seconds"].items()}
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
    assert last.began == pytest.approx(first.began, abs=3) and first.until < last.until
    assert last.usd_per_hour == PRICE
    (line,) = re.findall(r"^step 5/12 .*tok/s \| .*", output, re.MULTILINE)
    reports = [one for one in read_lines(run_dir / "metrics.jsonl") if "seconds_left" in one]
    first = reports[0]
    left = first["usd_at_end"] - first["usd"]
    assert left == pytest.approx(10 * first["seconds_left"], abs=0.02) and left > 0
    assert line.endswith(
        f" | ${dollars(first['usd'])} of ${dollars(first['usd_at_end'])}"
        f" | {duration(first['seconds_left'])} left"
    )
    # The last report has a validation to come; after that nothing is left.
    *_, before, after = reports
    assert before["seconds_left"] > 0 == after["seconds_left"]
    # The dollars of the end are of a moment before those of the record: at ten a second.
    assert len(reports) == 6 and after["usd_at_end"] == pytest.approx(after["usd"], abs=5)


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
                10 * sum(validated["seconds"].values())
            )
    # The first launch ended in order, so nothing of it is lost for the second one.
    earlier, later, summary = summaries
    assert later["seconds"]["lost"] == later["usd"]["lost"] == 0
    for phase, spent in earlier["seconds"].items():
        assert later["seconds"][phase] >= spent, phase
    totals = [(sum(each["seconds"].values()), each["usd"]["total"]) for each in summaries]
    (first, first_usd), (second, second_usd), (third, third_usd) = totals
    assert second_usd == pytest.approx(first_usd + second - first)
    assert third_usd == pytest.approx(second_usd + 10 * (third - second))
    lost = second - sum(validated["seconds"].values())
    assert summary["seconds"]["lost"] == pytest.approx(lost) and lost > 0
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
