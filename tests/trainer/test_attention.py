"""The key `attention`: which kernel runs, eager and compiled, and which one is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from basics.errors import UserError
from ddp_train import TrainingStep
from gpt import attend
from run_config import ModelConfig, TrainConfig
from tests.support.in_process import refused
from tests.support.steps import step_of
from tests.support.workplace import TINY_MODEL, TINY_TRAIN, Workplace, succeeded
from tokens.batches import Microbatch
from trainer.precision import attention_line, check_attention, remedy, resolve_for_device

CPU = torch.device("cpu")
FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
FLASH_BACKWARD = f"{FLASH}_backward"


def ops_of(step: TrainingStep) -> set[str]:
    """Take a step; return the names of all operators that ran."""
    tokens = torch.randint(0, 257, (2, 2, 16))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step.take(iter([Microbatch(0, *tokens)]), num_microbatches=1, learning_rate=1e-3)
    return {event.key for event in profiler.key_averages()}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_kernel_of_the_run_computes_attention(precision: str) -> None:
    for attention, is_flash in (("flash", True), ("math", False)):
        step = step_of(precision=precision, attention=attention, drop_rate=0.0)
        assert step.losses.attention_kernel() == attention
        assert (FLASH_BACKWARD in ops_of(step)) == is_flash


@pytest.mark.thorough
def test_compiled_code_is_not_reused_for_another_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_kernel_that_the_device_lacks_is_refused() -> None:
    model = ModelConfig(**TINY_MODEL | {"drop_rate": 0.0})
    for attention, drop_rate in (("cudnn", 0.0), ("flash", 0.1)):  # no CPU kernel can drop
        train = resolve_for_device(TrainConfig(**TINY_TRAIN | {"attention": attention}), CPU)
        with pytest.raises(UserError, match=f'attention is "{attention}", which cannot run here'):
            check_attention(model.model_copy(update={"drop_rate": drop_rate}), train, CPU)
    check_attention(model, resolve_for_device(TrainConfig(**TINY_TRAIN), CPU), CPU)


def test_a_run_names_its_kernel_and_refuses_another(workplace: Workplace) -> None:
    workplace.add_dataset()
    workplace.add_run("tiny", model={"drop_rate": 0.0}, train={"attention": "cudnn"})
    line = refused(workplace, "tiny", under_torchrun=True)
    assert 'attention is "cudnn"' in line and 'set it to "auto"' in line
    workplace.add_run("flash", model={"drop_rate": 0.0}, train={"attention": "flash"})
    result = succeeded(workplace.torchrun(1, "flash"))
    assert "attention: flash\n" in result.stdout
    machine = json.loads((workplace.runs_dir / "flash/summary.json").read_text())["machine"]
    assert machine["attention"] == "flash" and machine["cudnn"] is None


def test_cudnn_is_named_before_the_learning_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    assert attention_line("cudnn", torch.device("cuda")) == "attention: cudnn (cuDNN 9.10.2)"
    advice = remedy("cudnn")
    assert advice.index('attention "flash"') < advice.index("learning_rate")
    assert "cuDNN" not in remedy("flash") and remedy("flash").startswith("with a lower learning")


@pytest.mark.gpu
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("attention", ["flash", "cudnn"])
def test_the_kernel_runs_on_a_gpu(attention: str, compiles: bool) -> None:
    step = step_of(torch.device("cuda", 0), precision="bf16", attention=attention,
                   compile=compiles, drop_rate=0.0)
    assert step.train.compile == compiles and step.losses.attention_kernel() == attention
    tokens = torch.randint(0, 257, (2, 2, 16), device="cuda")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step.take(iter([Microbatch(0, *tokens)]), num_microbatches=1, learning_rate=1e-3)
    assert any(f"{attention}_attention_backward" in event.key
               for event in profiler.key_averages())
