"""The memory model compared with PyTorch's profiler, and with a GPU if there is one."""

from dataclasses import replace

import pytest
import torch

from gpt import GPTModel
from lab.plan.memory import largest_microbatch, peak_memory
from lab.plan.setting import Setting, num_parameters
from processes.launch import Process
from run_config import ModelConfig, TrainConfig
from tests.support.torchrun_workers import (
    GPT2_SMALL,
    MANY_TOKENS,
    MANY_WORDS,
    WIDE,
    peak_of_training,
)
from tests.support.workplace import TINY_MODEL, TINY_TRAIN, forked, succeeded

SHAPES = {"many tokens": MANY_TOKENS, "large vocabulary": MANY_WORDS, "wide": WIDE}
PRECISIONS = ("fp32", "bf16")
CHANGES = {
    "microbatch 1": {"microbatch_size": 1, "gradient_accumulation_steps": 1},
    "microbatch 6": {"microbatch_size": 6, "gradient_accumulation_steps": 1},
    "accumulation and dropout": {"microbatch_size": 6, "gradient_accumulation_steps": 2,
                                 "drop_rate": 0.1},
    "tied weights": {"microbatch_size": 3, "gradient_accumulation_steps": 1, "tie_weights": True,
                     "qkv_bias": True},
    "one head chunk": {"microbatch_size": 6, "gradient_accumulation_steps": 1, "head_chunks": 1},
    "three head chunks": {"microbatch_size": 6, "gradient_accumulation_steps": 2,
                          "head_chunks": 3},
    "activation checkpointing": {"microbatch_size": 6, "gradient_accumulation_steps": 1,
                                 "activation_checkpointing": True},
    "math attention": {"microbatch_size": 6, "gradient_accumulation_steps": 1,
                       "attention": "math"},
    "math attention and dropout": {"microbatch_size": 6, "gradient_accumulation_steps": 1,
                                   "attention": "math", "drop_rate": 0.1},
    "muon": {"microbatch_size": 1, "gradient_accumulation_steps": 1, "optimizer": "muon"},
}
CPU = Process(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))


def pytest_generate_tests(metafunc):
    """Measure every change in both precisions, each with one shape; all shapes if thorough."""
    if "change" not in metafunc.fixturenames:
        return
    shapes, is_thorough = list(SHAPES), metafunc.config.getoption("--thorough")
    metafunc.parametrize(("shape", "precision", "change"), [
        (shape, precision, change) for i, change in enumerate(CHANGES)
        for j, precision in enumerate(PRECISIONS) for k, shape in enumerate(shapes)
        if is_thorough or k == (i + j) % len(shapes)])


def configs(shape, **changes):
    model = {k: v for k, v in changes.items() if k in ModelConfig.model_fields}
    train = {k: v for k, v in changes.items() if k in TrainConfig.model_fields}
    return (ModelConfig(**{"drop_rate": 0.0, "qkv_bias": False} | shape | model),
            TrainConfig(**TINY_TRAIN | train))


@pytest.mark.parametrize("tie_weights", [False, True])
@pytest.mark.parametrize("qkv_bias", [False, True])
def test_num_parameters_equals_that_of_the_built_model(tie_weights, qkv_bias):
    model = ModelConfig(**TINY_MODEL | {"tie_weights": tie_weights, "qkv_bias": qkv_bias})
    assert num_parameters(model) == GPTModel(model).num_parameters()


def test_prediction_is_within_10_percent_of_the_measured_peak(shape, precision, change):
    model, train = configs(SHAPES[shape], precision=precision, **CHANGES[change])
    measured = peak_of_training(model, train, CPU)
    setting = Setting(model, train, precision, num_processes=1, on_gpu=False)
    assert peak_memory(setting, train.microbatch_size).total == pytest.approx(measured, rel=0.1)


def test_a_residual_stream_in_bf16_needs_less():
    model, train = configs(MANY_TOKENS, precision="bf16", microbatch_size=6,
                           gradient_accumulation_steps=1, residual_dtype="bf16")
    measured = peak_of_training(model, train, CPU)
    found = peak_memory(Setting(model, train, "bf16", num_processes=1, on_gpu=False), 6)
    assert found.total == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(("precision", "head_chunks", "compiled", "eager"), [
    ("bf16", None, 4, 12), ("fp16", None, 4, 12), ("fp32", None, 8, 12),
    ("bf16", 4, 4, 10), ("fp16", 4, 4, 10), ("fp32", 4, 8, 8)])
def test_a_compiled_loss_has_no_logits_in_float32(precision, head_chunks, compiled, eager):
    """Bytes per logit; tests/ops/test_linear_cross_entropy.py counts the buffers."""
    V, T = 2**16, 64  # logits are nearly all that grows with the microbatch
    for compiles, wanted in ((None, compiled), (True, compiled), (False, eager)):
        model, train = configs({"vocab_size": V, "context_length": T, "emb_dim": 4, "n_heads": 1,
                                "n_layers": 1}, head_chunks=head_chunks, compile=compiles)
        setting = Setting(model, train, precision, num_processes=1)
        more = peak_memory(setting, 8).logits - peak_memory(setting, 4).logits
        assert more == pytest.approx(wanted * V * 4 * T / (head_chunks or 1), rel=0.001)
        on_cpu = replace(setting, on_gpu=False, train=train.model_copy(update={"compile": True}))
        assert peak_memory(on_cpu, 8).logits == peak_memory(
            replace(setting, train=train.model_copy(update={"compile": False})), 8).logits


def test_fp16_sums_the_heads_gradient_in_float32():
    model, train = configs(MANY_WORDS, head_chunks=3, compile=False)
    bf16, fp16 = (peak_memory(Setting(model, train, precision, num_processes=1), 3).logits
                  for precision in ("bf16", "fp16"))
    assert fp16 - bf16 == 2 * model.vocab_size * model.emb_dim


@pytest.mark.parametrize(("shape", "optimizer", "tolerance"), [
    (MANY_WORDS, {}, 0.04),  # buckets are 5%
    (WIDE, {"optimizer": "muon"}, 0.1)])
def test_ddp_buckets_replace_gradients_with_several_processes(shape, optimizer, tolerance,
                                                              workplace):
    model, train = configs(shape, precision="bf16", microbatch_size=6,
                           gradient_accumulation_steps=2, **optimizer)
    workplace.add_run(model=model.model_dump(), train=train.model_dump(exclude_none=True))
    result = succeeded(forked("tests/support/torchrun_workers.py",
                              ["peak-memory", str(workplace.root)], num_processes=2))
    measured = int(result.stdout.split()[-1])
    setting = Setting(model, train, "bf16", num_processes=2, on_gpu=False)
    predicted = peak_memory(setting, 6)
    assert (predicted.buckets, predicted.gradients) == (4 * num_parameters(model), 0)
    assert predicted.total == pytest.approx(measured, rel=tolerance)


def test_processes_share_the_work_of_muon():
    """Each holds temporary tensors for its share of the matrices, and all updates."""
    model, train = configs(GPT2_SMALL | {"context_length": 16}, optimizer="muon")
    one, eight = (peak_memory(Setting(model, train, "bf16", num_processes=n), 1).logits
                  for n in (1, 8))
    C, L = 768, 12
    gradients, wide = 4 * 12 * L * C**2, 2 * L * 4 * C**2  # elements of all matrices of C x 4 C
    assert one == gradients + 2 * wide + 2 * 4 * wide  # stacked gradients and momenta, in float32
    assert eight == gradients + 2 * wide + 4 * wide  # all updates, in bf16 and float32


@pytest.mark.parametrize("num_processes", [1, 8])
@pytest.mark.parametrize("global_batch_size", [None, 12, 40])
def test_largest_microbatch_fits_and_the_next_one_does_not(global_batch_size, num_processes):
    model, train = configs(GPT2_SMALL, gradient_accumulation_steps=1)
    train = train.model_copy(update={"global_batch_size": global_batch_size})
    setting = Setting(model, train, "bf16", num_processes)
    for memory_gib in (2, 11.6, 39, 180):
        largest = largest_microbatch(setting, memory_gib)
        assert all(peak_memory(setting, size).total <= memory_gib * 2**30
                   for size in range(1, largest + 1))
        if global_batch_size is None:
            assert peak_memory(setting, largest + 1).total > memory_gib * 2**30


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("microbatch_size", [1, 8, 24])
@pytest.mark.parametrize("drop_rate", [0.0, 0.1])
def test_prediction_is_within_10_percent_on_a_gpu(precision, microbatch_size, drop_rate):
    model, train = configs(GPT2_SMALL, precision=precision, drop_rate=drop_rate,
                           microbatch_size=microbatch_size, compile=False)
    process = Process(rank=0, local_rank=0, world_size=1, device=torch.device("cuda", 0))
    measured = peak_of_training(model, train, process)
    predicted = peak_memory(Setting(model, train, precision, num_processes=1), microbatch_size)
    assert predicted.total == pytest.approx(measured, rel=0.1)
