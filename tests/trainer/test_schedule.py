from __future__ import annotations

import pytest

from run_config import TrainConfig
from tests.support.workplace import TINY_TRAIN
from trainer.schedule import learning_rate_at


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
