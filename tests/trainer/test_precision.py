"""Precision, attention kernel, deterministic kernels: how they are decided, and that they run."""

import itertools
import os

import pytest
import torch
import torch._inductor.config
from torch.profiler import ProfilerActivity, profile

from basics.errors import UserError
from checkpointing import SnapshotBuffers
from gpt import attend
from run_config import ModelConfig, TrainConfig
from tests.support.models import microbatches, step_of
from tests.support.runs import refused
from tests.support.workplace import TINY_MODEL, TINY_TRAIN
from tokens.batches import Microbatch
from trainer.precision import check_attention, remedy, resolve_for_device

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
DETERMINISTIC = {"compile": False, "deterministic": True}
STEPS = 6


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is restored
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    with torch._inductor.config.patch(deterministic=False):
        yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


def resolved(device, **keys):
    train = {key: value for key, value in TINY_TRAIN.items() if key != "precision"}
    return resolve_for_device(TrainConfig(**train | keys), device)


@pytest.mark.parametrize(("device", "keys", "has_bf16", "expected"), [
    (CPU, {}, True, ("bf16", "fp32")), (CPU, {}, False, ("fp32", "fp32")),
    (CPU, {"use_amp": False}, True, ("fp32", "fp32")),
    (CPU, {"precision": "fp16"}, True, ("fp16", "fp32")),
    (CPU, {"precision": "tf32", "use_amp": False}, True, ("tf32", "fp32")),
    (GPU, {}, True, ("bf16", "bf16")), (GPU, {}, False, ("fp16", "fp32")),
    (GPU, {"use_amp": False}, True, ("fp32", "fp32")),
    (GPU, {"residual_dtype": "fp32"}, True, ("bf16", "fp32")),
])
def test_the_precision_is_the_fastest_safe_one_of_the_device(monkeypatch, device, keys, has_bf16,
                                                             expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": has_bf16})
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: has_bf16)
    train = resolved(device, **keys)
    assert (train.precision, train.residual_dtype) == expected
    assert train.compile == (device == GPU)  # unless the run says otherwise
    assert not resolved(device, compile=False).compile and resolved(device, compile=True).compile


def test_a_bfloat16_residual_stream_needs_bf16():
    with pytest.raises(UserError, match='residual_dtype is "bf16", but the precision here is fp32'):
        resolved(CPU, precision="fp32", residual_dtype="bf16")


def test_deterministic_kernels_are_set_before_cuda_is_initialised(monkeypatch):
    seen = []

    def has_bf16(**_: object) -> bool:  # the first thing that initialises CUDA
        seen.append((os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
                     torch.are_deterministic_algorithms_enabled()))
        return True

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", has_bf16)
    assert resolved(GPU, compile=False).attention == "auto"  # without the key nothing is chosen
    assert resolved(GPU, **DETERMINISTIC).attention == "flash"
    assert seen == [(None, False), (":4096:8", True)]
    for device, keys, attention in (
        (GPU, {"precision": "fp16"}, "flash"), (GPU, {"precision": "tf32"}, "math"),
        (GPU, {"precision": "bf16", "attention": "math"}, "math"),
        (CPU, {"precision": "bf16"}, "auto"),
    ):
        assert resolved(device, **DETERMINISTIC | keys).attention == attention


def test_the_compiler_lets_the_watchdog_run_and_measures_no_kernels_if_deterministic(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for is_on in (False, True):
        torch._inductor.config.use_static_cuda_launcher = True
        torch.use_deterministic_algorithms(is_on)
        step_of(precision="fp32", compile=True, deterministic=is_on)
        assert torch._inductor.config.deterministic == is_on
        assert not torch._inductor.config.use_static_cuda_launcher


def train(step, first, stop):
    batches = itertools.islice(microbatches(GPU), 2 * first, None)
    for _ in range(first, stop):
        step.take(batches, num_microbatches=2, learning_rate=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("compiles", [False, True])
def test_a_deterministic_run_resumed_ends_bit_for_bit_as_the_uninterrupted_one(precision, compiles):
    """For CPUs see test_against_reference.py."""
    whole, first, second = (
        step_of(GPU, precision=precision, compile=compiles, vocab_size=1000, drop_rate=0.1,
                deterministic=True, emb_dim=128) for _ in range(3))
    assert whole.losses.attention_kernel() == "flash" or precision == "fp32"
    train(whole, 0, STEPS)
    train(first, 0, 3)
    second.state.model.load_state_dict(first.state.model.state_dict())
    second.state.optimizer.load_state_dict(first.state.optimizer.state_dict())
    train(second, 3, STEPS)
    found, wanted = (vars(SnapshotBuffers().take(step.state)) for step in (second, whole))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def ops_of(step):
    """Take a step; return the names of all operators and kernels that ran."""
    device = step.process.device
    tokens = torch.randint(0, 257, (2, 2, 16), device=device)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as profiler:
        step.take(iter([Microbatch(0, *tokens)]), num_microbatches=1, learning_rate=1e-3)
    return {event.key for event in profiler.key_averages()}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_kernel_of_the_run_computes_attention(precision):
    for attention, is_flash in (("flash", True), ("math", False)):
        step = step_of(precision=precision, attention=attention, drop_rate=0.0)
        assert step.losses.attention_kernel() == attention
        assert (f"{FLASH}_backward" in ops_of(step)) == is_flash


@pytest.mark.gpu
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("attention", ["flash", "cudnn"])
def test_the_kernel_runs_on_a_gpu(attention, compiles):
    step = step_of(GPU, precision="bf16", attention=attention, compile=compiles, drop_rate=0.0)
    assert step.train.compile == compiles and step.losses.attention_kernel() == attention
    assert any(f"{attention}_attention_backward" in name for name in ops_of(step))


@pytest.mark.thorough
def test_compiled_code_is_not_reused_for_another_kernel(tmp_path, monkeypatch):
    """Launches share a cache of compiled code, in which the kernel must make a difference."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    q, found = torch.randn(1, 2, 16, 8), []
    for attention in ("auto", "math", "flash"):
        torch.compiler.reset()  # as in another launch: only the files are left
        compiled = torch.compile(attend, dynamic=False, fullgraph=True)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            compiled(q, q, q, 0.0, attention)
        found.append(any(event.key == FLASH for event in profiler.key_averages()))
    torch.compiler.reset()
    assert found == [True, False, True]


def test_a_kernel_that_the_device_lacks_is_refused(workplace):
    with pytest.raises(UserError, match='attention is "flash", which cannot run here'):
        check_attention(ModelConfig(**TINY_MODEL | {"drop_rate": 0.1}),  # no CPU kernel can drop
                        resolved(CPU, attention="flash"), CPU)
    workplace.add_dataset()
    workplace.add_run("tiny", model={"drop_rate": 0.0}, train={"attention": "cudnn"})
    line = refused(workplace, "tiny", under_torchrun=True)
    assert 'attention is "cudnn"' in line and 'set it to "auto"' in line


def test_cudnn_is_named_before_the_learning_rate():
    assert "with a lower learning_rate" in remedy("flash") and '"flash"' in remedy("cudnn")
