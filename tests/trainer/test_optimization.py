from __future__ import annotations

import pytest
import torch
from torch import nn

from optim import clip_gradients, rates_line
from run_config import ModelConfig, TrainConfig, with_defaults
from tests.support.workplace import TINY_MODEL, TINY_TRAIN
from trainer.startup import unused_options


def config(**changes: object) -> TrainConfig:
    return TrainConfig(**TINY_TRAIN | changes)


@pytest.mark.parametrize(("max_norm", "norm_after"), [(None, 5.0), (1.0, 1.0), (10.0, 5.0)])
def test_the_norm_is_measured_and_clipped_where_set(
    max_norm: float | None, norm_after: float
) -> None:
    model = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    assert clip_gradients(list(model.parameters()), max_norm).item() == pytest.approx(5.0)
    assert model.weight.grad.norm().item() == pytest.approx(norm_after, rel=1e-4)


@pytest.mark.parametrize(("model", "train", "wanted"), [
    ({}, {"momentum": 0.9}, ['momentum: no effect with optimizer "adamw"']),
    ({}, {"optimizer": "muon", "momentum": 0.9, "schedule": "wsd"}, []),
    ({}, {"final_learning_rate_fraction": 0.1},
     ['final_learning_rate_fraction: no effect with schedule "constant"']),
    ({}, {"final_learning_rate_fraction": 0.1, "schedule": "cosine"}, []),
    ({}, {"decay_norms_and_biases": True, "weight_decay": 0.0},
     ["decay_norms_and_biases: no effect with weight_decay 0"]),
    ({"init": "gpt2"}, {"init_from": "demo"}, ["init: no effect with init_from"]),
    ({"tie_weights": True}, {"head_learning_rate": 0.1},
     ["head_learning_rate: no effect with tie_weights"]),
])
def test_options_without_effect_are_named(model: dict, train: dict, wanted: list[str]) -> None:
    assert unused_options(ModelConfig(**TINY_MODEL | model), config(**train)) == wanted


@pytest.mark.parametrize(("model", "train", "wanted"), [
    ({}, {}, "matrix 0.0004 (default), embedding 0.0004 (default), head 0.0004 (default),"
             " vector 0.0004 (default)"),
    ({"tie_weights": True}, {"learning_rate": 0.01, "embedding_learning_rate": 0.3},
     "matrix 0.01, embedding 0.3, vector 0.01"),
    ({"emb_dim": 32}, {"optimizer": "muon", "vector_learning_rate": 0.5},
     "matrix 0.02 (default), embedding 0.3 (default), head 0.04 (default), vector 0.5"),
    ({}, {"optimizer": "muon", "learning_rate": 0.01},
     "matrix 0.02 (default), embedding 0.01, head 0.01, vector 0.01"),
])
def test_the_rates_are_named_and_which_are_defaults(
    model: dict, train: dict, wanted: str
) -> None:
    given = {key: value for key, value in TINY_TRAIN.items() if key != "learning_rate"} | train
    assert rates_line(*with_defaults(
        ModelConfig(**TINY_MODEL | model), TrainConfig(**given))) == wanted
