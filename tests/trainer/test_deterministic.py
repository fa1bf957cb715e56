"""The key `deterministic`: which kernels it chooses, and what a resumed run ends with."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch._inductor.config

from checkpointing import Snapshot, SnapshotBuffers
from ddp_train import TrainingStep
from run_config import TrainConfig
from tests.support import steps
from tests.support.workplace import TINY_TRAIN
from tokens.batches import Microbatch
from trainer.precision import resolve_for_device

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
STEPS = 6


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is restored
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    with torch._inductor.config.patch(deterministic=False):
        yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


def resolved(device: torch.device, **keys: object) -> TrainConfig:
    return resolve_for_device(
        TrainConfig(**TINY_TRAIN | {"compile": False, "deterministic": True} | keys), device)


def test_all_is_set_before_cuda_is_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def has_bf16(**_: object) -> bool:  # the first thing that initialises CUDA
        seen.append((os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
                     torch.are_deterministic_algorithms_enabled()))
        return True

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", has_bf16)
    assert resolved(GPU, precision=None).attention == "flash"
    assert seen == [(":4096:8", True)]


def test_a_deterministic_compiler_measures_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for is_on in (False, True):
        torch.use_deterministic_algorithms(is_on)
        step_of(CPU, "fp32", compiles=True, deterministic=is_on)
        assert torch._inductor.config.deterministic == is_on


def test_without_the_key_nothing_is_chosen() -> None:
    assert resolved(GPU, deterministic=False).attention == "auto"
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


@pytest.mark.parametrize(("device", "keys", "attention"), [
    (GPU, {"precision": "bf16"}, "flash"), (GPU, {"precision": "fp16"}, "flash"),
    (GPU, {"precision": "fp32"}, "math"), (GPU, {"precision": "tf32"}, "math"),
    (GPU, {"precision": "bf16", "attention": "math"}, "math"), (CPU, {"precision": "bf16"}, "auto"),
])
def test_attention_has_a_deterministic_kernel(
    device: torch.device, keys: dict, attention: str
) -> None:
    assert resolved(device, **keys).attention == attention


def step_of(device: torch.device, precision: str, *, compiles: bool,
            deterministic: bool = True) -> TrainingStep:
    return steps.step_of(device, precision=precision, compile=compiles, vocab_size=1000,
                         deterministic=deterministic, drop_rate=0.1, emb_dim=128)


def train(step: TrainingStep, first: int, stop: int) -> None:
    """Take steps; ids repeat, so that gradients of the embedding are sums."""
    tokens = torch.randint(0, 40, (2 * STEPS, 2, 8, 16), generator=torch.Generator().manual_seed(0))
    batches = (Microbatch(index, *tokens[index].to(step.process.device))
               for index in range(2 * first, 2 * stop))
    for _ in range(first, stop):
        step.take(batches, num_microbatches=2, learning_rate=1e-2)


def end_of(step: TrainingStep) -> Snapshot:
    """Return a copy of a step's state."""
    return SnapshotBuffers().take(step.state)


@pytest.mark.parametrize(("device", "precision", "compiles"), [
    (CPU, "fp32", False), (CPU, "bf16", False),
    *(pytest.param(GPU, precision, compiles, marks=pytest.mark.gpu)
      for precision in ("bf16", "fp32") for compiles in (False, True))])
def test_stopped_and_resumed_ends_bit_for_bit_as_the_uninterrupted_run(
    device: torch.device, precision: str, compiles: bool
) -> None:
    whole, first, second = (step_of(device, precision, compiles=compiles) for _ in range(3))
    assert whole.losses.facts()["deterministic"]
    assert whole.losses.attention_kernel() == "flash" or (device, precision) != (GPU, "bf16")
    train(whole, 0, STEPS)
    train(first, 0, 3)
    second.state.model.load_state_dict(first.state.model.state_dict())
    second.state.optimizer.load_state_dict(first.state.optimizer.state_dict())
    train(second, 3, STEPS)
    found, wanted = end_of(second), end_of(whole)
    for kind, tensors in vars(wanted).items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, vars(found)[kind][name]), f"{kind} {name}"
