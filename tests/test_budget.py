"""When a launch ends: budgets, signals, steps; what a run costs. Simulated, and in whole runs."""

import json
import math
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
from reporting.estimate import Pace
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


def test_a_budget_is_the_nearer_of_its_limits(now):
    clock = PhaseClock()
    clock.resume({"training": 1800.0}, {"training": 5.0})
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


LONG_PLAN = BatchPlan(4, 2, 2, 16, num_steps=1000)


def slower_with_all_layers():
    model = ModelConfig(**TINY_MODEL)
    return model.flops_per_token / model.with_layers(1).flops_per_token


class Simulated:
    """A run whose steps, validations, checkpoints and writes only let time pass.

    Those of a run that grows take longer by the FLOPs from the growth on.
    """

    def __init__(self, seconds=None, *, plan=LONG_PLAN, first_step=0, **train):
        self.seconds = {"step": 0, "validation": 0, "checkpoint": 0, "write": 0} | (seconds or {})
        self.now, self.written_at, self.longest_write = 30.0, 0.0, 0.0
        self.clock = PhaseClock(since=0.0)
        self.clock._now = lambda: self.now
        self.run = simulated_run(**{"validation_interval": 50} | train)
        self.config, self.plan, self.factor = self.run.config, plan, 1.0
        self.stages = self.run.stages(plan.num_steps, first_step=first_step)
        self.pace = Pace(self.run, plan, self.clock, lambda: self.longest_write)
        self.pace.begin(self.stages)
        self.launch = launch_of(self.run, plan, self.clock, first_step=first_step)
        self.budget = Budget(self.launch, self.pace)
        self.said, self.is_validated = [], False  # of this stage

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

    def train(self):
        """Train; return the seconds it took."""
        since_report, seconds = 0, self.seconds["step"]
        for stage in range(len(self.stages)):
            if stage:
                self.factor, self.is_validated = slower_with_all_layers(), False
            self.pace.begin(self.stages[stage:])
            first = self.stages[stage].steps.start
            for step in self.stages[stage].steps:
                if step == first:
                    self.pass_time(compile=30 + (seconds * self.factor if stage else 0))
                else:
                    self.pass_time(training=seconds * self.factor)
                self.look_at_writes()
                since_report += 1
                is_report_due = since_report == 10
                ends = self.after(step, is_report_due=is_report_due)
                saves = ends or self.config.is_save_due(step, num_steps=self.plan.num_steps)
                if is_report_due or saves:
                    since_report = 0
                    self.say(self.pace.seconds_after_report(step, self.clock.read()), step > first)
                if saves:
                    self.save_and_validate(step, is_measured=step > first)
                if ends:
                    return max(self.now, self.written_at)

    def say(self, seconds, is_measured):
        assert (seconds is not None) == is_measured
        if is_measured:
            self.said.append((seconds, self.now, self.is_validated))

    def save_and_validate(self, step, *, is_measured):
        with self.clock.phase("checkpoint"):
            self.now = max(self.now, self.written_at)  # it waits for the last write
            self.look_at_writes()
            self.now += self.seconds["checkpoint"]
        self.written_at = self.now + self.seconds["write"]
        if self.config.is_validation_due(step, num_steps=self.plan.num_steps):
            self.pass_time(validation=self.seconds["validation"] * self.factor)
            self.is_validated = True
            self.say(self.pace.seconds_after_validation(step), is_measured)


@settings(max_examples=60)
@given(
    step=st.floats(0.1, 10),
    validation=st.floats(0, 90),
    checkpoint=st.floats(0.1, 20),
    write=st.floats(0, 30),
    extra=st.floats(0, 3),
)
def test_no_limit_is_exceeded(step, validation, checkpoint, write, extra):
    # Enough to learn in what validations and checkpoints take; then it ends anywhere.
    limit = 60 + 60 * step + 2 * (validation + checkpoint) + 6 * write
    limit += extra * (50 * step + validation)
    seconds = {"step": step, "validation": validation, "checkpoint": checkpoint, "write": write}
    plan = BatchPlan(2, 1, 1, 16, num_steps=3000)
    trainer = Simulated(seconds, plan=plan, max_hours=limit / 3600)
    assert 0.5 * limit < trainer.train() <= limit


@settings(max_examples=60)
@given(
    step=st.floats(0.1, 10),
    validation=st.none() | st.floats(0, 90),
    interval=st.integers(1, 60),
    first_step=st.integers(0, 60),
    grow=st.none() | st.floats(0.2, 0.8),
    num_sets=st.integers(1, 3),
    num_sequences=st.integers(1, 20),
)
def test_the_time_left_is_the_time_that_follows(
    step, validation, interval, first_step, grow, num_sets, num_sequences
):
    """Before a validation of these layers by its forward passes, then as long as it took."""
    by_forward_passes = step / 3 / 2 * num_sets * math.ceil(num_sequences / 4)
    trainer = Simulated(
        {"step": step, "validation": by_forward_passes if validation is None else validation},
        plan=BatchPlan(4, 2, 1, 16, num_steps=105),
        first_step=first_step,
        validation_interval=interval,
        validation_batches=None,
        validation_sequences=num_sequences,
        validation={name: name for name in "abc"[:num_sets]},
        grow=grow and {"at": grow},
    )
    trainer.clock.resume({"training": 9000.0, "validation": 50.0}, {})  # of a slower machine
    trainer.clock.count_lost(10_000.0)
    trainer.train()
    known = [one[:2] for one in trainer.said if validation is None or one[2]]
    assert [seconds for seconds, _ in known] == pytest.approx(
        [trainer.now - then for _, then in known]
    )


MEASURED = {"compile": 30, "training": 4, "waiting": 0.5, "diagnostics": 0.5}  # 5 s a step
SAVED = MEASURED | {"validation": 7, "checkpoint": 9, "chart": 1}
GROWN = {"compile": 30, "training": 105}  # seven steps of 15 s


@pytest.mark.parametrize(
    ("train", "global_step", "stages", "seconds"),
    [
        ({}, 1, [(SAVED, 0)], 10 * 5 + 10 + 2),
        ({}, 1, [(SAVED, 4)], 10 * 5 + 10 + 2 * 4 + 2),
        ({}, 49, [(SAVED | {"training": 244}, 0)], 10 * 5 + 7 + 2 * 10 + 2),  # validates step 49
        # Estimates: two validation microbatches, each a third of one of a step's two; 1.2 GB at
        # 100 MB/s. Before any step is measured, one takes as long as the first.
        ({}, 49, [(MEASURED | {"training": 244}, 0)], 10 * 5 + 5 / 2 / 3 * 2 + 2 * 12 + 2),
        (
            {"validate_on": "all"},  # one each
            49,
            [(MEASURED | {"training": 244}, 0)],
            10 * 5 + 5 / 2 / 3 + 2 * 12 + 2,
        ),
        ({}, 0, [({"compile": 30}, 0)], 10 * 30 + 12 + 2),
        (
            {"grow": {"at": 0.005}},  # is ahead
            1,
            [(SAVED, 4)],
            3 * 5 + 7 * 5 * slower_with_all_layers() + 30 + 10 + 2 * 9 + 1 + 2 * 2 * 4 + 2,
        ),
        # After it a validation is estimated anew. Checkpoints are the larger of those before, by
        # their size, and those since.
        (
            {"grow": {"at": 0.042}},
            49,
            [(SAVED, 4), (GROWN | {"checkpoint": 5}, 4)],
            10 * 15 + 15 / 2 / 3 * 2 + 2 * (2 * 9 + 1) + 2 * 2 * 4 + 2,
        ),
        (
            {"grow": {"at": 0.042}},
            49,
            [(SAVED, 4), (GROWN | {"checkpoint": 50}, 60)],
            10 * 15 + 15 / 2 / 3 * 2 + 2 * (50 + 1) + 2 * 60 + 2,
        ),
    ],
)
def test_the_time_ahead_has_due_work_and_a_quarter_more(train, global_step, stages, seconds):
    """`stages`: the seconds of each one so far, by phase, and those of its longest write."""
    taken = 30 + sum(sum(spent.values()) for spent, _ in stages)
    for share_left, is_spent in ((1.26, False), (1.24, True)):
        stop = Simulated(max_hours=(taken + share_left * seconds) / 3600, **train)
        for number, (spent, write) in enumerate(stages):
            if number:
                stop.pace.begin(stop.stages[number:])
            stop.pass_time(**spent)
            stop.longest_write = write
        assert stop.after(global_step, is_report_due=True) == is_spent


def test_windows_that_are_read_at_one_time_have_the_time_left_of_their_own_steps(
    workplace, now, monkeypatch
):
    """On a GPU, before a checkpoint: the older one is no slower, and the pace stays the same."""
    monkeypatch.setitem(LAG, "cpu", 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    clock, window, plan = PhaseClock(), LossWindow(CPU), BatchPlan(2, 2, 1, 16, num_steps=100)
    clock.usd_per_hour = 3600.0
    workplace.add_run(
        train={"validation_interval": None, "validation_batches": None, "checkpoint_interval": 30}
    )
    run = load_run(workplace.runs_dir, "tiny")
    pace = Pace(run, plan, clock)
    pace.begin(run.stages(plan.num_steps))
    log = RunLog(run, plan, None, None, clock=clock, pace=pace, is_active=True)
    log.start(0)
    clock.enter("compile")
    for step in range(60):
        now.seconds += 6 if step else 30
        window.add(torch.tensor(3.0), torch.tensor(1.0))
        clock.enter("training")
        if (step + 1) % 10 == 0:
            for closed in window.close(step, 0.1, clock, waits=step == 29):
                values = closed.numbers | {"tokens_per_second": None}
                log.report_steps(Report(closed.global_step, 0, 3.0, values, closed))
    records = read_lines(run.metrics_path)
    left = {record["global_step"]: record["seconds_left"] for record in records}
    assert left == pytest.approx({step: 6 * (99 - step) for step in (9, 19, 29, 39, 49)})
    assert [record["usd_at_end"] for record in records] == pytest.approx([30 + 6 * 99] * 5)


def test_stages_of_a_launch_begin_where_it_does():
    run = simulated_run(grow={"at": 0.5})
    small, whole = (run.model.with_layers(n) for n in (1, 2))
    assert run.stages(12) == [(small, range(6)), (whole, range(6, 12))]
    assert run.stages(12, first_step=3) == [(small, range(3, 6)), (whole, range(6, 12))]
    assert run.stages(12, first_step=6) == [(whole, range(6, 12))]
    assert run.stages(12, first_step=8) == [(whole, range(8, 12))]  # `at` was lowered
    assert run.stages(12, first_step=3, has_all_layers=True) == [(whole, range(3, 12))]  # raised
    assert simulated_run().stages(12) == [(whole, range(12))]


@pytest.mark.parametrize(
    ("shared", "reason"),
    [([15, 0], "SIGTERM"), ([15, 1], "SIGTERM"), ([0, 1], None), ([0, 0], None)],
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
    [(None, 20, 27), (12, 15, 19), (12, 99, 19), (0, 0, 7)],  # or with a restart in between
)
def test_max_steps_counts_from_the_beginning_of_the_launch(began_at, first_step, last_step):
    options = {"first_step": first_step, "max_steps": 8, "began_at": began_at}
    launch = launch_of(simulated_run(), LONG_PLAN, PhaseClock(), **options)
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
    records, summary = read_lines(run_dir / "metrics.jsonl"), summary_of(run_dir)
    for record in records:
        assert record["usd"] == pytest.approx(record["seconds"] * 10, abs=0.01)
    total = summary["usd"].pop("total")
    assert summary["usd"] == pytest.approx(
        {phase: 10 * seconds for phase, seconds in summary["seconds"].items()}
    )
    assert sum(summary["usd"].values()) == pytest.approx(total)
    spent = {phase for phase, usd in summary["usd"].items() if usd}
    assert spent >= {"training", "validation", "checkpoint", "compile", "waiting", "startup"}
    assert f"cost of all launches: ${dollars(total)} = $" in output and "machine up " in output
    first, last = read_uses(run_dir)  # from the launch's start, and from its end
    assert last.until - last.began == pytest.approx(sum(summary["seconds"].values()), abs=3)
    assert last.began == pytest.approx(first.began, abs=3) and first.until < last.until
    assert last.usd_per_hour == PRICE
    reports = [one for one in records if "seconds_left" in one]
    first, *_, before, after = reports
    left = first["usd_at_end"] - first["usd"]
    assert left == pytest.approx(10 * first["seconds_left"], abs=0.02) and left > 0
    assert (
        f"${dollars(first['usd'])} of ${dollars(first['usd_at_end'])}"
        f" | {duration(first['seconds_left'])} left"
    ) in output
    # The last report has a validation to come; after that nothing is left.
    assert len(reports) == 6 and before["seconds_left"] > 0 == after["seconds_left"]
    # The dollars of the end are of a moment before those of the record: at ten a second.
    assert after["usd_at_end"] == pytest.approx(after["usd"], abs=5)


def test_a_resumed_run_adds_the_cost_of_each_launch_and_of_undone_steps(workplace):
    run_dir = workplace.add_run()
    workplace.add_dataset()
    summaries, checkpoint = [], []
    for max_steps, price in ((5, PRICE), (7, PRICE / 10), (1, PRICE)):
        arguments = ("--max-steps", str(max_steps), "--usd-per-hour", str(price))
        succeeded(workplace.torchrun(1, "tiny", *checkpoint, *arguments))
        summaries.append(summary_of(run_dir))
        if summaries[1:]:  # the last one goes on from the first one's checkpoint
            checkpoint = [path.name for path in run_dir.glob("checkpoints/*-4")]
        else:
            [validated] = read_lines(next(run_dir.glob("checkpoints/*-4/validation.json")))
    # The first launch ended in order, so nothing of it is lost for the second one.
    assert summaries[1]["seconds"]["lost"] == summaries[1]["usd"]["lost"] == 0
    for phase, spent in summaries[0]["seconds"].items():
        assert summaries[1]["seconds"][phase] >= spent, phase
    first, second, third = (sum(each["seconds"].values()) for each in summaries)
    first_usd, second_usd, third_usd = (each["usd"]["total"] for each in summaries)
    assert second_usd == pytest.approx(first_usd + second - first)
    assert third_usd == pytest.approx(second_usd + 10 * (third - second))
    saved = sum(validated["seconds"].values())
    assert sum(validated["usd"].values()) == pytest.approx(10 * saved)
    assert summaries[2]["seconds"]["lost"] == pytest.approx(second - saved) and second > saved


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
    output = succeeded(workplace.torchrun(2, "tiny", "--max-steps", "110")).stdout
    assert summary_of(run_dir)["global_step"] == stopped_at + 110
    assert output.count("\nspeed: ") == 1  # it is judged once, after fifty steps


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


def test_the_time_left_after_a_validation_has_the_samples_of_those_to_come(
    workplace, now, monkeypatch
):
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    clock, window, saved = PhaseClock(), LossWindow(CPU), []
    workplace.add_run(train={"validation_interval": 10, "sample_prompts": ["a"]})
    run, plan = load_run(workplace.runs_dir, "tiny"), BatchPlan(2, 2, 1, 16, num_steps=100)
    pace = Pace(run, plan, clock)
    pace.begin(run.stages(plan.num_steps))
    log = RunLog(run, plan, None, None, clock=clock, pace=pace, is_active=True)
    log.start(0)

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
    values = closed.numbers | {"tokens_per_second": None}
    log.report_steps(Report(closed.global_step, 0, 3.0, values, closed))
    ddp_train.Trainer.validate(trainer, 9)
    validation = read_lines(log.run.metrics_path)[-1]
    assert validation["validation_seconds"] == 3 and len(saved) == 1
    assert validation["seconds_left"] == pytest.approx(90 * 60 / 9 + 9 * (3 + 20))
