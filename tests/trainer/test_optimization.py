from __future__ import annotations

import pytest
import torch
from torch import nn

from gpt import GPTModel
from run_config import ModelConfig, TrainConfig
from tests.support.workplace import TINY_MODEL, TINY_TRAIN
from trainer.optimization import build_optimizer, clip_gradients, learning_rate_at


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


@pytest.mark.parametrize("everything", [False, True])
def test_norms_and_biases_decay_only_where_asked(everything: bool) -> None:
    model = GPTModel(ModelConfig(**TINY_MODEL | {"qkv_bias": True}))
    train = config(weight_decay=0.3, decay_norms_and_biases=everything)
    decays = {id(p): group["weight_decay"] for group in build_optimizer(model, train).param_groups
              for p in group["params"]}
    for name, parameter in model.named_parameters():
        matrix = name.endswith("weight") and "norm" not in name
        assert decays[id(parameter)] == (0.3 if matrix or everything else 0.0), name


@pytest.mark.parametrize(("max_norm", "norm_after"), [(None, 5.0), (1.0, 1.0), (10.0, 5.0)])
def test_the_norm_is_measured_and_clipped_where_set(
    max_norm: float | None, norm_after: float
) -> None:
    model = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    assert clip_gradients(model, max_norm).item() == pytest.approx(5.0)
    assert model.weight.grad.norm().item() == pytest.approx(norm_after, rel=1e-4)
