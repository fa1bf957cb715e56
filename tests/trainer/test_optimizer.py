"""Clipping, rates, the schedule, and what Muon shares out.

test_against_reference.py compares the steps.
"""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import optim
from gpt import GPTModel
from optim import build_optimizer, clip_gradients, learning_rate_at, rates_line
from processes.launch import Process
from run_config import ModelConfig, TrainConfig, with_defaults
from tests.support.models import ONE_PROCESS
from tests.support.workplace import TINY_MODEL, TINY_TRAIN
from trainer.startup import unused_options


def config(**changes):
    return TrainConfig(**TINY_TRAIN | changes)


@pytest.mark.parametrize(("max_norm", "norm_after"), [(None, 5.0), (1.0, 1.0), (10.0, 5.0)])
def test_the_norm_is_measured_and_clipped_where_set(max_norm, norm_after):
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
def test_options_without_effect_are_named(model, train, wanted):
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
def test_the_rates_are_named_and_which_are_defaults(model, train, wanted):
    given = {key: value for key, value in TINY_TRAIN.items() if key != "learning_rate"} | train
    assert rates_line(*with_defaults(
        ModelConfig(**TINY_MODEL | model), TrainConfig(**given))) == wanted


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize(("num_steps", "changes"), [
    (50, {"decay_period_percent": 2}), (3, {"decay_period_percent": 10}),
    (10, {"warmup_period_percent": 90}),
])
def test_a_decay_of_one_step_has_the_final_rate_in_it(schedule, num_steps, changes):
    train = config(learning_rate=1.0, schedule=schedule, final_learning_rate_fraction=0.25,
                   **changes)
    rates = [learning_rate_at(train, step, num_steps=num_steps) for step in range(num_steps)]
    assert rates[-2:] == [1.0, 0.25]
    assert learning_rate_at(train, 0, num_steps=1) == 1.0


@pytest.mark.parametrize(("schedule", "half_way", "final"), [
    ("cosine", 0.55, 0.1), ("linear", 0.5, 0.0), ("wsd", 1 - 0.5**0.5, 0.0),
])
def test_each_schedule_decays_over_its_share(schedule, half_way, final):
    train = config(learning_rate=1.0, schedule=schedule, decay_period_percent=40)
    rates = [learning_rate_at(train, step, num_steps=101) for step in range(101)]
    assert set(rates[:61]) == {1.0}
    assert rates[80] == pytest.approx(half_way)
    assert rates[100] == pytest.approx(final)
    assert all(later < earlier for earlier, later in zip(rates[60:], rates[61:], strict=False))


def build(process=ONE_PROCESS):
    """Return a tiny model's parameters with gradients, and an optimizer of them."""
    torch.manual_seed(0)
    network = GPTModel(ModelConfig(**TINY_MODEL))
    optimizer = build_optimizer(network, TrainConfig(**TINY_TRAIN, optimizer="muon"), process)
    optimizer.found_inf = torch.zeros(())
    for parameter in network.parameters():
        parameter.grad = torch.randn_like(parameter)
    return dict(network.named_parameters()), optimizer


class DoneWork:
    def wait(self):
        """What was started has ended."""


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_each_process_orthogonalises_its_share(world_size, monkeypatch):
    """The processes run one after the other: a first pass collects what each one sends."""
    alone, optimizer = build()
    optimizer.step()
    sent: list[list[Tensor]] = []
    num_matrices: list[int] = []

    def count(matrices):
        num_matrices.append(len(matrices))
        return orthogonalise(matrices)

    def collect(gathered, mine, *, async_op):
        sent[-1].append(mine.clone())
        gathered.zero_()
        return DoneWork()

    orthogonalise = optim.orthogonalise
    monkeypatch.setattr(optim, "orthogonalise", count)
    monkeypatch.setattr(dist, "all_gather_into_tensor", collect)
    processes = [Process(rank=rank, local_rank=rank, world_size=world_size,
                         device=torch.device("cpu")) for rank in range(world_size)]
    for process in processes:
        sent.append([])
        build(process)[1].step()
    assert len(num_matrices) == 2 * world_size  # of two shapes, in two layers
    assert max(num_matrices) == -(-8 // world_size)
    replies = iter([torch.cat(shape) for shape in zip(*sent, strict=True)])

    def reply(gathered, mine, *, async_op):
        gathered.copy_(next(replies))
        return DoneWork()

    monkeypatch.setattr(dist, "all_gather_into_tensor", reply)
    shared, optimizer = build(processes[-1])
    optimizer.step()
    for name, value in shared.items():
        torch.testing.assert_close(value, alone[name], rtol=1e-5, atol=1e-6)
