from __future__ import annotations

import pytest

from optim import learning_rate_at, momentum_at
from run_config import TrainConfig
from tests.support.workplace import TINY_TRAIN


def config(**changes: object) -> TrainConfig:
    return TrainConfig(**TINY_TRAIN | changes)


def test_a_constant_rate_stays() -> None:
    assert {learning_rate_at(config(), step, num_steps=9) for step in range(9)} == {0.01}


def test_warm_up_then_cosine_to_a_tenth() -> None:
    train = config(learning_rate=1.0, schedule_learning_rate=True, warmup_period_percent=10)
    rates = [learning_rate_at(train, step, num_steps=101) for step in range(101)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.55)  # half-way down
    assert rates[100] == pytest.approx(0.1)
    assert all(later < earlier for earlier, later in zip(rates[10:], rates[11:], strict=False))


def test_a_schedule_of_one_step_works() -> None:
    train = config(schedule_learning_rate=True)
    assert learning_rate_at(train, 0, num_steps=1) == pytest.approx(0.01)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize(("num_steps", "changes"), [
    (50, {"decay_period_percent": 2}), (3, {"decay_period_percent": 10}),
    (10, {"warmup_period_percent": 90}),
])
def test_a_decay_of_one_step_has_the_final_rate_in_it(
    schedule: str, num_steps: int, changes: dict
) -> None:
    train = config(learning_rate=1.0, schedule=schedule, final_learning_rate_fraction=0.25,
                   **changes)
    rates = [learning_rate_at(train, step, num_steps=num_steps) for step in range(num_steps)]
    assert rates[-2:] == [1.0, 0.25]


def test_a_decay_of_two_steps_begins_at_the_peak() -> None:
    train = config(learning_rate=1.0, schedule="linear", decay_period_percent=4)
    assert [learning_rate_at(train, step, num_steps=50) for step in (47, 48, 49)] == [1, 1, 0]


@pytest.mark.parametrize(("schedule", "half_way", "final"), [
    ("cosine", 0.55, 0.1), ("linear", 0.5, 0.0), ("wsd", 1 - 0.5**0.5, 0.0),
])
def test_each_schedule_decays_over_its_share(schedule: str, half_way: float, final: float) -> None:
    train = config(learning_rate=1.0, schedule=schedule, decay_period_percent=40)
    rates = [learning_rate_at(train, step, num_steps=101) for step in range(101)]
    assert set(rates[:61]) == {1.0}
    assert rates[80] == pytest.approx(half_way)
    assert rates[100] == pytest.approx(final)
    assert all(later < earlier for earlier, later in zip(rates[60:], rates[61:], strict=False))


@pytest.mark.parametrize(("schedule", "first_decayed"), [("cosine", 1), ("linear", 1), ("wsd", 81)])
def test_the_usual_share_of_the_decay(schedule: str, first_decayed: int) -> None:
    train = config(learning_rate=1.0, schedule=schedule)
    rates = [learning_rate_at(train, step, num_steps=100) for step in range(100)]
    assert rates.index(next(rate for rate in rates if rate < 1)) == first_decayed


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("fraction", [0.0, 0.3])
def test_the_last_step_has_the_final_fraction(schedule: str, fraction: float) -> None:
    train = config(learning_rate=2.0, schedule=schedule, final_learning_rate_fraction=fraction,
                   warmup_period_percent=10)
    assert learning_rate_at(train, 199, num_steps=200) == pytest.approx(2 * fraction)
    assert learning_rate_at(train, 0, num_steps=200) == pytest.approx(2 / 20)


def test_the_originals_key_means_the_cosine() -> None:
    theirs, ours = config(schedule_learning_rate=True), config(schedule="cosine")
    assert ([learning_rate_at(theirs, step, num_steps=50) for step in range(50)]
            == [learning_rate_at(ours, step, num_steps=50) for step in range(50)])


def test_the_momentum_warms_up_over_its_share() -> None:
    train = config(momentum=0.95, momentum_warmup_percent=20)
    momenta = [momentum_at(train, step, num_steps=100) for step in range(100)]
    assert momenta[0] == pytest.approx(0.85)
    assert momenta[10] == pytest.approx(0.9)
    assert set(momenta[20:]) == {0.95}
    assert momentum_at(config(momentum=0.5, momentum_warmup_percent=20), 0, num_steps=100) == 0.5
