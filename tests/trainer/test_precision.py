from __future__ import annotations

import pytest
import torch

from basics.errors import UserError
from run_config import TrainConfig
from tests.support.workplace import TINY_TRAIN
from trainer import precision
from trainer.precision import resolve_for_device

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def resolved(device: torch.device, **keys: object) -> TrainConfig:
    train = {k: v for k, v in TINY_TRAIN.items() if k != "precision"}
    return resolve_for_device(TrainConfig(**train | keys), device)


@pytest.mark.parametrize(("keys", "has_bf16", "expected"), [
    ({}, True, "bf16"), ({}, False, "fp32"), ({"use_amp": False}, True, "fp32"),
    ({"precision": "fp16"}, True, "fp16"), ({"precision": "tf32", "use_amp": False}, True, "tf32"),
])
def test_the_precision_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, keys: dict, has_bf16: bool, expected: str
) -> None:
    monkeypatch.setattr(precision, "_cpu_has_bf16", lambda: has_bf16)
    assert resolved(CPU, **keys).precision == expected
    assert resolved(CPU, **keys).residual_dtype == "fp32"


@pytest.mark.parametrize(("keys", "has_bf16", "expected"), [
    ({}, True, ("bf16", "bf16")), ({}, False, ("fp16", "fp32")),
    ({"use_amp": False}, True, ("fp32", "fp32")),
    ({"residual_dtype": "fp32"}, True, ("bf16", "fp32")),
])
def test_the_precision_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, keys: dict, has_bf16: bool, expected: tuple[str, str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: has_bf16)
    train = resolved(GPU, **keys)
    assert (train.precision, train.residual_dtype) == expected


def test_a_gpu_compiles_unless_the_run_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    assert resolved(GPU).compile and not resolved(CPU).compile
    assert not resolved(GPU, compile=False).compile and resolved(CPU, compile=True).compile


def test_a_bfloat16_residual_stream_needs_bf16() -> None:
    with pytest.raises(UserError, match='residual_dtype is "bf16", but the precision here is fp32'):
        resolved(CPU, precision="fp32", residual_dtype="bf16")
