"""The memory model against what PyTorch's profiler counts, and against GPUs where there is one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.memory_model import (
    GPT2_SMALL,
    MANY_TOKENS,
    MANY_WORDS,
    WIDE,
    peak_of_training,
)
from gpt import GPTModel
from lab.plan.memory import Setting, largest_microbatch, num_parameters, peak_memory
from processes.launch import Process
from run_config import ModelConfig, TrainConfig
from tests.support.workplace import TINY_MODEL, TINY_TRAIN, Workplace, forked, succeeded

SHAPES = {"many tokens": MANY_TOKENS, "many words": MANY_WORDS, "wide": WIDE}


def configs(shape: dict, **changes: object) -> tuple[ModelConfig, TrainConfig]:
    model = {k: v for k, v in changes.items() if k in ModelConfig.model_fields}
    train = {k: v for k, v in changes.items() if k in TrainConfig.model_fields}
    return (ModelConfig(**{"drop_rate": 0.0, "qkv_bias": False} | shape | model),
            TrainConfig(**TINY_TRAIN | train))


@pytest.mark.parametrize("tie_weights", [False, True])
@pytest.mark.parametrize("qkv_bias", [False, True])
def test_parameters_are_counted_without_a_model(tie_weights: bool, qkv_bias: bool) -> None:
    model = ModelConfig(**TINY_MODEL | {"tie_weights": tie_weights, "qkv_bias": qkv_bias})
    assert num_parameters(model) == GPTModel(model).num_parameters()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("changes", [
    {"microbatch_size": 1, "gradient_accumulation_steps": 1},
    {"microbatch_size": 6, "gradient_accumulation_steps": 1},
    {"microbatch_size": 6, "gradient_accumulation_steps": 2, "drop_rate": 0.1},
    {"microbatch_size": 3, "gradient_accumulation_steps": 1, "tie_weights": True,
     "qkv_bias": True},
    {"microbatch_size": 6, "gradient_accumulation_steps": 1, "head_chunks": 1},
    {"microbatch_size": 6, "gradient_accumulation_steps": 2, "head_chunks": 3},
    {"microbatch_size": 6, "gradient_accumulation_steps": 1, "activation_checkpointing": True},
], ids=["one", "six", "accumulated with dropout", "tied", "head in one", "head in three",
        "layers recomputed"])
def test_the_model_is_within_a_tenth_of_the_measured_peak(
    shape: str, precision: str, changes: dict
) -> None:
    model, train = configs(SHAPES[shape], precision=precision, **changes)
    process = Process(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
    measured = peak_of_training(model, train, process)
    setting = Setting(model, train, precision, num_processes=1, on_gpu=False)
    assert peak_memory(setting, train.microbatch_size).total == pytest.approx(measured, rel=0.1)


def test_a_bfloat16_residual_stream_counts_half() -> None:
    model, train = configs(MANY_TOKENS, precision="bf16", microbatch_size=6,
                           gradient_accumulation_steps=1, residual_dtype="bf16")
    process = Process(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
    measured = peak_of_training(model, train, process)
    setting = Setting(model, train, "bf16", num_processes=1, on_gpu=False)
    wide = replace(setting, train=train.model_copy(update={"residual_dtype": "fp32"}))
    assert peak_memory(setting, 6).total == pytest.approx(measured, rel=0.05)
    assert peak_memory(wide, 6).total > 1.05 * peak_memory(setting, 6).total


@pytest.mark.parametrize("lever", [{"head_chunks": 8}, {"activation_checkpointing": True}])
def test_the_original_model_fits_a_small_card_with_either_lever(lever: dict) -> None:
    model, train = configs(GPT2_SMALL, microbatch_size=8, gradient_accumulation_steps=12)
    small = train.model_copy(update=lever)
    sizes = [largest_microbatch(Setting(model, t, "bf16", num_processes=1), 10.76)
             for t in (train, small)]
    assert sizes[0] < sizes[1] and sizes[1] >= 8


@pytest.mark.parametrize("accumulation", [1, 2])
def test_with_several_processes_the_buckets_count(workplace: Workplace, accumulation: int) -> None:
    model, train = configs(MANY_WORDS, precision="bf16", microbatch_size=6,
                           gradient_accumulation_steps=accumulation)
    workplace.add_run(model=model.model_dump(), train=train.model_dump(exclude_none=True))
    result = succeeded(forked("tests/support/torchrun_workers.py",
                              ["peak-memory", str(workplace.root)], num_processes=2))
    measured = int(result.stdout.split()[-1])
    setting = Setting(model, train, "bf16", num_processes=2, on_gpu=False)
    predicted = peak_memory(setting, 6)
    assert predicted.buckets == 4 * num_parameters(model)
    assert predicted.total == pytest.approx(measured, rel=0.04)  # the buckets are a twentieth


@pytest.mark.parametrize("num_processes", [1, 8])
@pytest.mark.parametrize("memory_gib", [2, 11, 39, 180])
def test_the_largest_microbatch_fits_and_the_next_does_not(
    memory_gib: float, num_processes: int
) -> None:
    model, train = configs(GPT2_SMALL)
    setting = Setting(model, train, "bf16", num_processes)
    largest = largest_microbatch(setting, memory_gib)
    if largest:
        assert peak_memory(setting, largest).total <= memory_gib * 2**30
    assert peak_memory(setting, largest + 1).total > memory_gib * 2**30


@pytest.mark.parametrize("global_batch_size", [12, 16, 40, 96])
def test_with_a_global_batch_everything_below_the_largest_fits(global_batch_size: int) -> None:
    model, train = configs(GPT2_SMALL, gradient_accumulation_steps=1)
    train = train.model_copy(update={"global_batch_size": global_batch_size})
    for memory_gib in (9.0, 11.6, 13.2, 20.0):
        setting = Setting(model, train, "bf16", num_processes=1)
        largest = largest_microbatch(setting, memory_gib)
        sizes = range(1, largest + 1)
        assert all(peak_memory(setting, n).total <= memory_gib * 2**30 for n in sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("microbatch_size", [1, 8, 24])
@pytest.mark.parametrize("drop_rate", [0.0, 0.1])
def test_the_model_is_within_a_tenth_on_a_gpu(
    precision: str, microbatch_size: int, drop_rate: float
) -> None:
    model, train = configs(GPT2_SMALL, precision=precision, drop_rate=drop_rate,
                           microbatch_size=microbatch_size, compile=False)
    process = Process(rank=0, local_rank=0, world_size=1, device=torch.device("cuda", 0))
    measured = peak_of_training(model, train, process)
    predicted = peak_memory(Setting(model, train, precision, num_processes=1), microbatch_size)
    assert predicted.total == pytest.approx(measured, rel=0.1)
