from __future__ import annotations

import math

import pytest

from reporting.clock import Budget, Pace, PhaseClock
from run_config import TrainConfig
from tests.support.workplace import TINY_TRAIN
from tokens.batch_plan import BatchPlan

PLAN = BatchPlan(microbatch_size=4, gradient_accumulation_steps=2, world_size=2,
                 context_length=16, num_steps=1000)


class FakeTime:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    time = FakeTime()
    monkeypatch.setattr("reporting.clock.time.perf_counter", time)
    return time


def train_config(**changes: object) -> TrainConfig:
    return TrainConfig(**TINY_TRAIN | changes)


def test_time_is_booked_to_its_phase(now: FakeTime) -> None:
    clock = PhaseClock(since=90.0)
    now.seconds = 102.0
    clock.enter("training")
    now.seconds = 110.0
    with clock.phase("validation") as validation:
        now.seconds = 115.0
        with clock.phase("waiting"):
            now.seconds = 116.0
    now.seconds = 120.0
    seconds = clock.read()
    assert validation.seconds == seconds["validation"] == clock.longest["validation"] == 5
    assert (seconds["startup"], seconds["training"], seconds["waiting"]) == (12, 12, 1)
    assert sum(seconds.values()) == 30


def test_waiting_for_items_is_booked_and_closing_reaches_their_source(now: FakeTime) -> None:
    closed = []

    def items():
        try:
            for item in range(5):
                now.seconds += 2
                yield item
        finally:
            closed.append(True)

    clock = PhaseClock()
    waiting = clock.waiting_for(items())
    assert [next(waiting), next(waiting)] == [0, 1]
    now.seconds += 7
    assert clock.read()["waiting"] == 4 and clock.read()["startup"] == 7
    waiting.close()
    assert closed
    assert list(clock.waiting_for(items())) == [0, 1, 2, 3, 4]


def test_earlier_starts_count_at_the_price_they_had(now: FakeTime) -> None:
    clock = PhaseClock()
    clock.go_on_from({"training": 3600.0}, {"training": 10.0})
    clock.enter("training")
    now.seconds += 1800
    assert clock.usd()["training"] == 10.0  # no price for this start: it adds nothing
    clock.usd_per_hour = 40.0
    assert clock.read()["training"] == 5400
    assert clock.usd()["training"] == 30.0
    assert clock.read_this_start()["training"] == 1800


def test_without_any_price_there_are_no_dollars(now: FakeTime) -> None:
    assert PhaseClock().usd() == {}


def test_what_the_starting_process_spent_is_handed_over_once(
    now: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDP_TRAIN_SPENT_SECONDS", "")
    starter = PhaseClock()
    with starter.phase("download"):
        now.seconds += 60
    now.seconds += 3
    starter.hand_over()
    worker = PhaseClock()
    worker.take_over()
    assert worker.read()["download"] == 60 and worker.read()["startup"] == 3
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    restarted = PhaseClock()
    restarted.take_over()
    assert restarted.read()["download"] == 0


def clock_with(now: FakeTime, **seconds: float) -> PhaseClock:
    clock = PhaseClock()
    for phase, spent in seconds.items():
        with clock.phase(phase):
            now.seconds += spent
    return clock


def pace_of(clock: PhaseClock, num_steps: int = 20) -> Pace:
    return Pace.measured(clock, num_steps=num_steps, plan=PLAN,
                         train=train_config(microbatch_size=4), num_parameters=10**9)


def test_the_pace_is_measured(now: FakeTime) -> None:
    clock = clock_with(now, compile=30, training=36, waiting=4, validation=5, checkpoint=2, chart=1)
    assert pace_of(clock) == Pace(step=2.0, validation=5, saving=3)


def test_what_has_not_happened_yet_is_guessed(now: FakeTime) -> None:
    pace = pace_of(clock_with(now, compile=30, training=60))
    # three validation microbatches, each a third of one of a step's two; 12 GB at 100 MB/s
    assert pace == Pace(step=3.0, validation=pytest.approx(3 * 3 / 2 / 3), saving=120)
    assert pace_of(clock_with(now, compile=30), num_steps=0).step == 30


def test_a_step_carries_its_share_of_validations_and_checkpoints() -> None:
    pace = Pace(step=1.0, validation=8, saving=2)
    train = train_config(validation_interval=10, checkpoint_interval=4)
    assert pace.with_its_share(train) == 1 + 10 / 10 + 2 / 4


def test_a_budget_is_the_nearer_of_its_limits(now: FakeTime) -> None:
    clock = clock_with(now, training=1800)
    clock.usd_per_hour = 10.0
    unlimited = Budget(train_config(), clock)
    assert not unlimited.is_limited and unlimited.seconds_left() == math.inf
    by_hours = Budget(train_config(max_hours=1.0, max_cost_usd=20.0), clock)
    assert by_hours.is_limited and by_hours.seconds_left() == 1800
    assert by_hours.nearest_limit() == "max_hours is 1, and the run has taken 0.5"
    by_cost = Budget(train_config(max_hours=1.0, max_cost_usd=6.0), clock)
    assert by_cost.seconds_left() == pytest.approx(360)
    assert by_cost.nearest_limit() == "max_cost_usd is 6, and the run has spent 5"


def test_steps_are_afforded_with_what_falls_due_and_a_surprise(now: FakeTime) -> None:
    clock = clock_with(now, training=3500)  # leaves 100 seconds
    budget = Budget(train_config(max_hours=1.0), clock)
    pace = Pace(step=5.0, validation=7, saving=10)
    assert budget.affords(pace.seconds(12, num_savings=2))  # 80, and a quarter more
    assert not budget.affords(pace.seconds(12, num_savings=2, num_validations=1))
    assert not budget.affords(pace.seconds(17))


def test_affordable_steps_end_inside_the_budget_and_use_it(now: FakeTime) -> None:
    clock = clock_with(now, training=1600)
    train = train_config(max_hours=1.0, validation_interval=100)
    pace = Pace(step=1.0, validation=20, saving=30)
    steps = Budget(train, clock).affordable_steps(pace)
    used = steps * 1.0 + (steps // 100 + 1) * 50
    assert 0.9 * 2000 < used <= 2000
    now.seconds += 2000
    assert Budget(train, clock).affordable_steps(pace) == 0
