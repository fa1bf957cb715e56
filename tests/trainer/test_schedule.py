from __future__ import annotations

import pytest

from optim import learning_rate_at
from run_config import TrainConfig
from tests.support.workplace import TINY_TRAIN


def config(**changes: object) -> TrainConfig:
    return TrainConfig(**TINY_TRAIN | changes)


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
