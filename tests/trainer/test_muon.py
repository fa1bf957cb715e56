from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import optim
from gpt import GPTModel
from optim import build_optimizer, group_of, set_rates
from processes.launch import Process
from run_config import ModelConfig, TrainConfig
from tests.support.checkpoints import ONE_PROCESS
from tests.support.workplace import TINY_MODEL, TINY_TRAIN

QKV, UP, DOWN = (f"blocks.1.{name}.weight" for name in ("attention.qkv", "mlp.up", "mlp.output"))


def build(process: Process = ONE_PROCESS, *, model: dict[str, Any] | None = None,
          **changes: Any) -> tuple[dict[str, Tensor], torch.optim.Optimizer]:
    """Return a tiny model's parameters with gradients, and an optimizer of them."""
    torch.manual_seed(0)
    network = GPTModel(ModelConfig(**TINY_MODEL | (model or {})))
    train = TrainConfig(**TINY_TRAIN | {"optimizer": "muon"} | changes)
    optimizer = build_optimizer(network, train, process)
    optimizer.found_inf = torch.zeros(())
    parameters = dict(network.named_parameters())
    set_gradients(parameters)
    return parameters, optimizer


def set_gradients(parameters: dict[str, Tensor], *, seed: int = 1) -> None:
    torch.manual_seed(seed)
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)


def values_of(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def polar(matrix: Tensor) -> Tensor:
    """The orthogonal matrix nearest to a given one."""
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    return u @ v


def assert_points_along(update: Tensor, wanted: Tensor, *, rel: float = 0.15) -> None:
    cosine = torch.nn.functional.cosine_similarity(update.flatten(), wanted.flatten(), dim=0)
    assert cosine > 0.985
    assert update.norm().item() == pytest.approx(wanted.norm().item(), rel=rel)


@pytest.mark.parametrize(("name", "scale"), [(UP, 2.0), (DOWN, 1.0)])
def test_a_matrix_moves_along_its_orthogonalised_gradient(name: str, scale: float) -> None:
    parameters, optimizer = build(matrix_learning_rate=0.1, weight_decay=0.0)
    before, gradient = values_of(parameters), parameters[name].grad.clone()
    optimizer.step()
    assert_points_along(before[name] - parameters[name], 0.1 * scale * polar(gradient))


def test_queries_keys_and_values_are_orthogonalised_apart() -> None:
    parameters, optimizer = build(matrix_learning_rate=0.1, weight_decay=0.0)
    parameters[QKV].grad[:16] *= 100  # the queries' gradient would drown the others
    before, gradient = values_of(parameters), parameters[QKV].grad.clone()
    optimizer.step()
    update = before[QKV] - parameters[QKV]
    for rows in (slice(0, 16), slice(16, 32), slice(32, 48)):
        assert_points_along(update[rows], 0.1 * polar(gradient[rows]), rel=0.2)


def test_the_second_step_has_nesterov_momentum() -> None:
    parameters, optimizer = build(matrix_learning_rate=0.1, weight_decay=0.0)
    set_rates(optimizer, learning_rate=0.01, momentum=0.6)
    first = parameters[UP].grad.clone()
    optimizer.step()
    set_gradients(parameters, seed=2)
    before, second = values_of(parameters), parameters[UP].grad.clone()
    optimizer.step()
    moving_average = 0.6 * 0.4 * first + 0.4 * second
    torch.testing.assert_close(optimizer.state[parameters[UP]]["momentum"], moving_average)
    wanted = polar(0.4 * second + 0.6 * moving_average)
    assert_points_along(before[UP] - parameters[UP], 0.1 * 2 * wanted)


def test_the_other_parameters_take_adamws_step() -> None:
    parameters, optimizer = build(head_learning_rate=0.003, beta2=0.97)
    others = {name: value for name, value in parameters.items()
              if group_of(name, value) != "matrix"}
    reference, theirs = build(optimizer="adamw", head_learning_rate=0.003, beta2=0.97)
    for step in range(3):
        for values, built in ((parameters, optimizer), (reference, theirs)):
            set_gradients(values, seed=step)
            built.step()
    for name, value in others.items():
        assert torch.equal(value, reference[name]), name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weights_decay_before_the_update_and_vectors_do_not(optimizer: str) -> None:
    changes = {"optimizer": optimizer, "matrix_learning_rate": 0.1}
    parameters, plain = build(**changes, weight_decay=0.0)
    before = values_of(parameters)
    plain.step()
    decayed, decaying = build(**changes, weight_decay=0.5)
    decaying.step()
    for name in (QKV, UP, "token_embedding.weight"):
        rate = 0.01 if "embedding" in name else 0.1
        lost = rate * 0.5 * before[name]
        torch.testing.assert_close(decayed[name], parameters[name] - lost, rtol=1e-4, atol=1e-6)
    assert torch.equal(decayed["final_norm.weight"], parameters["final_norm.weight"])


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    parameters, optimizer = build()
    optimizer.step()
    before = copy.deepcopy((values_of(parameters), optimizer.state_dict()["state"]))
    set_gradients(parameters)
    for parameter in parameters.values():
        parameter.grad.view(-1)[0] = torch.nan
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    after = (values_of(parameters), optimizer.state_dict()["state"])
    torch.testing.assert_close(after, before, rtol=0, atol=0)


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


class Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write; matrix products count nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        result = operation(*args, **(kwargs or {}))
        schema = operation._schema
        is_view = any(value.alias_info and not value.alias_info.is_write
                      for value in schema.returns)
        if not (is_view or any(name in schema.name for name in ("view", "mm", "empty"))):
            written = args[0] if schema.arguments[0].alias_info else result
            self.num_bytes += sum(tensor.nbytes for tensor in tree_leaves((args, kwargs, written))
                                  if isinstance(tensor, Tensor))
        return result


def test_a_step_of_one_of_eight_processes_moves_at_most_12_times_the_matrices(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "all_gather_into_tensor", lambda *_, async_op: DoneWork())
    process = Process(rank=0, local_rank=0, world_size=8, device=torch.device("cpu"))
    _, optimizer = build(process, model={"n_layers": 12, "emb_dim": 48}, precision="bf16",
                         weight_decay=0.1)
    matrices = next(group for group in optimizer.param_groups if group["is_orthogonalised"])
    optimizer.step()  # makes the moving averages
    with torch.no_grad(), Traffic() as traffic:
        optimizer._step_matrices(matrices)
    moved = traffic.num_bytes / sum(parameter.nbytes for parameter in matrices["params"])
    assert 11 < moved <= 12


def test_groups_have_their_options() -> None:
    _, optimizer = build(
        model={"qkv_bias": True}, learning_rate=0.004, matrix_learning_rate=0.02,
        embedding_learning_rate=0.3, vector_learning_rate=0.015, weight_decay=0.2,
        matrix_weight_decay=0.05, beta1=0.8, beta2=0.96, epsilon=1e-10)
    set_rates(optimizer, learning_rate=0.002, momentum=0.9)  # half the peak
    by_rate = {group["lr"]: group for group in optimizer.param_groups}
    assert sorted(by_rate) == pytest.approx([0.002, 0.0075, 0.01, 0.15])
    rates = dict(zip(("head", "vector", "matrix", "embedding"), sorted(by_rate), strict=True))
    found = {name: by_rate[rate] for name, rate in rates.items()}
    assert [found[name]["weight_decay"] for name in ("matrix", "embedding", "head", "vector")] == [
        0.05, 0.2, 0.2, 0.0]
    assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.96)}
    assert {group["eps"] for group in optimizer.param_groups} == {1e-10}
    assert found["matrix"]["is_orthogonalised"] and found["matrix"]["momentum"] == 0.9
    assert [len(found[name]["params"]) for name in ("matrix", "embedding", "head")] == [8, 2, 1]


def test_a_tied_head_is_the_embedding() -> None:
    parameters, optimizer = build(model={"tie_weights": True}, embedding_learning_rate=0.3)
    assert "head.weight" not in parameters
    group = next(group for group in optimizer.param_groups
                 if any(p is parameters["token_embedding.weight"] for p in group["params"]))
    assert group["lr"] == 0.3
