from __future__ import annotations

from dataclasses import replace

import pytest

from reporting.speed import (
    FAR_BELOW,
    Speed,
    checkpoint_bytes,
    find_gpu,
    flops_per_token,
    usable_gib,
)
from run_config import load_run
from tests.support.workplace import PROJECT_DIR

GOOD = Speed(
    tokens_per_second=2_800_000, num_processes=8, flops_per_token=854.44e6,
    device_name="NVIDIA H100 80GB HBM3", precision="bf16", attention_kernel="flash",
    is_compiled=True, waiting_share=0.0, microbatch_tokens=32768, throttling=None,
)
SLOW = replace(GOOD, tokens_per_second=500_000)


@pytest.mark.parametrize(("device", "name"), [
    ("NVIDIA A100-SXM4-40GB", "A100-40"),
    ("NVIDIA A100-SXM4-80GB", "A100-80"),
    ("NVIDIA A100 80GB PCIe", "A100-80"),
    ("NVIDIA H100 80GB HBM3", "H100"),
    ("NVIDIA H100 PCIe", "H100-PCIe"),
    ("NVIDIA H200", "H200"),
    ("NVIDIA GH200 480GB", "GH200"),
    ("NVIDIA B200", "B200"),
    ("NVIDIA GeForce RTX 3090", "RTX-3090"),
    ("NVIDIA L4", "L4"),
    ("NVIDIA L40S", "L40S"),
    ("Tesla T4", "T4"),
    ("h100", "H100"),
])
def test_gpus_are_found_by_their_drivers_names(device: str, name: str) -> None:
    assert find_gpu(device).name == name


@pytest.mark.parametrize("device", ["AMD EPYC", "NVIDIA Titan", "NVIDIA RTX A1000",
                                    "NVIDIA GeForce RTX 4090 Laptop GPU"])
def test_an_unknown_gpu_is_not_guessed(device: str) -> None:
    assert find_gpu(device) is None
    line = replace(SLOW, device_name=device).line()
    assert f"no peak known for {device}" in line and "MFU" not in line


def test_flops_of_gpt2_small_are_the_published_ones() -> None:
    model = load_run(PROJECT_DIR / "runs", "original").model
    assert flops_per_token(model) == pytest.approx(854.44e6, rel=1e-5)


def test_the_originals_speed_is_its_published_mfu() -> None:
    line = replace(SLOW, tokens_per_second=493_000).line()
    assert "493,000 tokens/s" in line and "5.3% MFU" in line


def test_higher_precision_has_a_lower_peak() -> None:
    a100 = find_gpu("NVIDIA A100-SXM4-40GB")
    assert a100.peak("bf16") == a100.peak("fp16") == 312e12
    assert a100.peak("tf32") == 156e12 and a100.peak("fp32") == 19.5e12


def test_a_good_speed_has_no_reasons() -> None:
    assert "30.2% MFU; H100 should reach up to 41%" in GOOD.line()
    assert "reason" not in GOOD.line()
    assert "likely reason: none found" in SLOW.line()


@pytest.mark.parametrize(("changes", "reason"), [
    ({"waiting_share": 0.3}, "waiting for data 30% of the time"),
    ({"is_compiled": False}, "the model is not compiled"),
    ({"attention_kernel": "math"}, "PyTorch's math attention kernel"),
    ({"precision": "fp32"}, "precision fp32"),
    ({"throttling": "sw thermal slowdown"}, "the GPU is throttled (sw thermal slowdown)"),
    ({"microbatch_tokens": 1024}, "a small microbatch of 1,024 tokens"),
])
def test_a_low_speed_has_its_reason_and_no_other(changes: dict, reason: str) -> None:
    assert replace(SLOW, **changes).line().endswith(f"likely reason: {reason}")
    assert reason not in replace(GOOD, **changes).line()


def test_several_reasons_are_listed_strongest_first() -> None:
    line = replace(SLOW, is_compiled=False, waiting_share=0.5).line()
    assert line.endswith("waiting for data 50% of the time, the model is not compiled")


def test_reasons_are_listed_below_half_of_the_expected_mfu() -> None:
    limit = 8 * 989e12 * 0.41 * FAR_BELOW / 854.44e6
    assert "reason" not in replace(GOOD, tokens_per_second=limit * 1.01).line()
    assert "reason" in replace(GOOD, tokens_per_second=limit * 0.99).line()


@pytest.mark.parametrize("card", [12, 16, 24, 40, 80, 141, 192])
def test_some_memory_of_a_card_is_not_usable(card: int) -> None:
    assert 0.85 * card < usable_gib(card) < card - 1


@pytest.mark.parametrize(("options", "num_floats"), [
    ({}, 3 * 163_009_536),
    ({"weight_average": 100}, 4 * 163_009_536),
    ({"optimizer": "muon"}, 3 * 163_009_536 - 12 * 12 * 768**2),  # one moment of each matrix
])
def test_a_checkpoint_holds_weights_moments_and_averages(options: dict, num_floats: int) -> None:
    run = load_run(PROJECT_DIR / "runs", "original")
    train = run.train.model_copy(update=options)
    assert checkpoint_bytes(run.model, train, 163_009_536) == 4 * num_floats
