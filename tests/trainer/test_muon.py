"""What Muon shares out; test_against_reference.py compares its steps."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import optim
from gpt import GPTModel
from optim import build_optimizer
from processes.launch import Process
from run_config import ModelConfig, TrainConfig
from tests.support.checkpoints import ONE_PROCESS
from tests.support.workplace import TINY_MODEL, TINY_TRAIN


def build(process: Process = ONE_PROCESS) -> tuple[dict[str, Tensor], torch.optim.Optimizer]:
    """Return a tiny model's parameters with gradients, and an optimizer of them."""
    torch.manual_seed(0)
    network = GPTModel(ModelConfig(**TINY_MODEL))
    optimizer = build_optimizer(network, TrainConfig(**TINY_TRAIN, optimizer="muon"), process)
    optimizer.found_inf = torch.zeros(())
    for parameter in network.parameters():
        parameter.grad = torch.randn_like(parameter)
    return dict(network.named_parameters()), optimizer


class DoneWork:
    def wait(self) -> None:
        """What was started has ended."""


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_each_process_orthogonalises_its_share(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes run one after the other: a first pass collects what each one sends."""
    alone, optimizer = build()
    optimizer.step()
    sent: list[list[Tensor]] = []
    num_matrices: list[int] = []

    def count(matrices: Tensor) -> Tensor:
        num_matrices.append(len(matrices))
        return orthogonalise(matrices)

    def collect(gathered: Tensor, mine: Tensor, *, async_op: bool) -> DoneWork:
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

    def reply(gathered: Tensor, mine: Tensor, *, async_op: bool) -> DoneWork:
        gathered.copy_(next(replies))
        return DoneWork()

    monkeypatch.setattr(dist, "all_gather_into_tensor", reply)
    shared, optimizer = build(processes[-1])
    optimizer.step()
    repeated, optimizer = build(processes[-1])
    optimizer._shares = False
    optimizer.step()
    for name, value in shared.items():
        torch.testing.assert_close(value, alone[name], rtol=1e-5, atol=1e-6)
        assert torch.equal(value, repeated[name])  # the choice changes no number
