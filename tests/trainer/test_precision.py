from __future__ import annotations

import pytest
import torch

from run_config import TrainConfig
from tests.support.workplace import TINY_TRAIN
from trainer.precision import autocast, choose_precision, seed_for

CPU = torch.device("cpu")


def test_every_microbatch_has_another_seed() -> None:
    seeds = {seed_for(seed, index) for seed in range(50) for index in range(200)}
    assert len(seeds) == 50 * 200
    assert len({seed % 2**32 for seed in seeds}) == 50 * 200  # a CPU generator uses 32 bits
    assert seed_for(42, 7) == seed_for(42, 7)


@pytest.mark.parametrize(("changes", "has_bf16", "expected"), [
    ({}, True, "bf16"),
    ({}, False, "fp32"),
    ({"use_amp": False}, True, "fp32"),
    ({"precision": "tf32"}, True, "tf32"),
    ({"precision": "fp16"}, True, "fp16"),
])
def test_precision_on_cpu(changes: dict, has_bf16: bool, expected: str,
                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.precision._cpu_has_bf16", lambda: has_bf16)
    train = TrainConfig(**{k: v for k, v in TINY_TRAIN.items() if k != "precision"} | changes)
    assert choose_precision(train, CPU) == expected


@pytest.mark.parametrize(("has_bf16", "expected"), [(True, "bf16"), (False, "fp16")])
def test_precision_on_a_gpu(has_bf16: bool, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    train = TrainConfig(**{k: v for k, v in TINY_TRAIN.items() if k != "precision"})
    assert choose_precision(train, torch.device("cuda")) == expected


@pytest.mark.parametrize(("precision", "dtype"), [
    ("fp32", torch.float32), ("tf32", torch.float32),
    ("bf16", torch.bfloat16), ("fp16", torch.float16),
])
def test_autocast_computes_in_the_precision(precision: str, dtype: torch.dtype) -> None:
    with autocast(precision, CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
