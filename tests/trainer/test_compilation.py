from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import InductorError

from basics.errors import UserError
from gpt import ForwardOptions, GPTModel
from run_config import ModelConfig, TrainConfig
from tests.support.steps import step_of
from tests.support.workplace import TINY_MODEL, TINY_TRAIN
from trainer import compilation
from trainer.compilation import (
    Recompilations,
    choose_forward_options,
    compile_now,
)
from trainer.precision import autocast, resolve_for_device

CPU = torch.device("cpu")
GPU = torch.device("cuda")
GPT2_SIZE = {"vocab_size": 50257, "context_length": 64}


def options_for(device: torch.device, precision: str, **keys: object) -> ForwardOptions:
    train = TrainConfig(**TINY_TRAIN | {"precision": precision} | keys)
    model = ModelConfig(**TINY_MODEL | GPT2_SIZE)
    return choose_forward_options(model, resolve_for_device(train, device), device)


def test_the_defaults_are_the_fastest_of_the_device() -> None:
    on_gpu = options_for(GPU, "bf16")
    assert on_gpu == ForwardOptions(residual_dtype=torch.bfloat16, head_multiple=128)
    assert options_for(GPU, "fp16") == ForwardOptions(head_multiple=128)
    assert options_for(GPU, "fp32") == ForwardOptions()
    assert options_for(CPU, "bf16") == ForwardOptions(
        head_chunk_tokens=2**23 // 50257, attention="blocks")
    assert options_for(CPU, "fp32") == ForwardOptions(
        head_chunk_tokens=2**23 // 50257)
    assert options_for(CPU, "bf16", compile=True) == ForwardOptions()


def test_what_is_compiled_again_after_the_first_validation_is_told_once() -> None:
    compiled = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    recompilations = Recompilations()

    def run(size: int) -> str:
        compiled(torch.ones(size))
        return recompilations.line()

    assert run(2) == run(3) == ""  # before the first validation
    recompilations.begin()
    assert run(3) == ""
    found = run(4)
    assert found.startswith("<lambda>, because ") and "size mismatch" in found
    assert found.endswith("; TORCH_LOGS=recompiles shows all") and "\n" not in found
    assert run(5) == ""


def test_with_several_processes_embedding_layers_and_loss_are_compiled(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    def compile(function, **_):  # stands in for torch.compile
        def run(*arguments):
            ran.append(function.__name__)
            return function(*arguments)
        return run

    monkeypatch.setattr(torch, "compile", compile)
    model = model_with(ForwardOptions(), n_layers=2)
    with torch._inductor.config.patch(use_static_cuda_launcher=True):
        compilation.ByLayer(model)(*torch.zeros(2, 1, 16, dtype=torch.int64))
        assert not torch._inductor.config.use_static_cuda_launcher
    assert ran == ["embed", "run_block", "run_block", "loss"]


def test_keys_of_the_run_override_the_defaults() -> None:
    asked = {"residual_dtype": "fp32", "head_chunks": 3, "activation_checkpointing": True}
    assert options_for(GPU, "bf16", **asked) == ForwardOptions(
        head_chunk_tokens=43, activation_checkpointing=True, head_multiple=128)  # of 128 tokens


def model_with(options: ForwardOptions, **changes: object) -> GPTModel:
    torch.manual_seed(0)
    return GPTModel(ModelConfig(**TINY_MODEL | {"drop_rate": 0.0} | changes), options)


def loss_and_gradients(model: GPTModel, precision: str = "fp32") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    token_ids, targets = torch.randint(257, (2, 3, 16), generator=generator)
    torch.manual_seed(2)
    with autocast(precision, CPU):
        loss = model(token_ids, targets)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize(("options", "drop_rate"), [
    (ForwardOptions(head_multiple=128), 0.2), (ForwardOptions(head_chunk_tokens=5), 0.2),
    (ForwardOptions(activation_checkpointing=True), 0.2),
    (ForwardOptions(head_chunk_tokens=5, head_multiple=128), 0.2),
    (ForwardOptions(head_chunk_tokens=48, activation_checkpointing=True), 0.0),
    # with dropout they draw other masks
    *((ForwardOptions(attention=attention), 0.0) for attention in ("blocks", "flash", "math")),
], ids=str)
def test_no_option_changes_the_result(options: ForwardOptions, drop_rate: float) -> None:
    plain = loss_and_gradients(model_with(ForwardOptions(), drop_rate=drop_rate))
    for found, wanted in zip(
            loss_and_gradients(model_with(options, drop_rate=drop_rate)), plain, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_padding_leaves_logits_and_weights_as_they_are() -> None:
    plain, padded = model_with(ForwardOptions()), model_with(ForwardOptions(head_multiple=128))
    token_ids = torch.arange(16)[None]
    torch.testing.assert_close(padded(token_ids), plain(token_ids))
    assert {k: v.shape for k, v in padded.state_dict().items()} == {
        k: v.shape for k, v in plain.state_dict().items()}


def test_activation_checkpointing_saves_memory() -> None:
    def saved_bytes(options: ForwardOptions) -> int:
        total = [0]
        with torch.autograd.graph.saved_tensors_hooks(
                lambda t: (total.__setitem__(0, total[0] + t.nbytes), t)[1], lambda t: t):
            model_with(options, n_layers=6)(*torch.zeros(2, 4, 16, dtype=torch.int64))
        return total[0]

    assert saved_bytes(ForwardOptions(activation_checkpointing=True)) < 0.4 * saved_bytes(
        ForwardOptions())


def raise_(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("failure", [
    RuntimeError("no compiler found\nsecond line"), OSError("no compiler found"),
    subprocess.CalledProcessError(1, "no compiler found"),
])
@pytest.mark.parametrize("broken", ["_training_loss", "_validation_loss"])
def test_a_compile_error_ends_the_run_in_one_line(
    monkeypatch: pytest.MonkeyPatch, failure: Exception, broken: str
) -> None:
    def compile(function, **_):
        return function if function.__name__ != broken else lambda *_: raise_(failure)

    monkeypatch.setattr(torch, "compile", compile)
    with pytest.raises(UserError, match=".*no compiler found") as caught:
        step_of(compile=True, n_layers=1, validation_interval=1, validation_batches=1)
    line = str(caught.value)
    assert line.startswith("compiling failed: ") and line.endswith(', or set "compile": false')
    assert "\n" not in line and caught.value.status == 2


@pytest.mark.parametrize(("device", "missing"), [(CPU, "no g++"), (GPU, "no gcc or clang")])
def test_a_compile_error_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, kept: Path, device: torch.device, missing: str
) -> None:
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    advice = ': install gcc, g++ and python3-dev, or set "compile": false'
    with pytest.raises(UserError, match=re.escape(missing + advice)):
        compile_now(lambda: trip_over(""), device)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(kept))
    with pytest.raises(UserError, match=re.escape(f"; no {kept}/Python.h{advice}")):
        compile_now(lambda: trip_over(""), device)


@pytest.mark.parametrize("failure", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), MemoryError(),
    InductorError(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), None),
    BackendCompilerFailed("inductor", RuntimeError("Triton Error [CUDA]: out of memory"), None),
], ids=["allocator", "host", "inductor", "dynamo"])
def test_out_of_memory_is_not_a_compile_error(failure: Exception) -> None:
    with pytest.raises(type(failure)) as caught:
        compile_now(lambda: raise_(failure), CPU)
    assert caught.value is failure
    reason = "out of resource: shared memory, required: 262144"
    with pytest.raises(UserError, match=f"compiling failed: {reason};"):
        compile_now(lambda: raise_(RuntimeError(reason)), CPU)


def test_compiled_code_is_kept_in_the_users_cache(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    compilation.keep_compiled_code()
    kept = Path.home() / ".cache/ddp-train/inductor"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(kept)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    compilation.keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/elsewhere"


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The cache of compiled code, with a truncated file in it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    compilation.keep_compiled_code()
    kept = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    kept.mkdir(parents=True)
    (kept / "half.so").write_bytes(b"\x7fELF")
    return kept


def trip_over(file: str) -> None:
    if (Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / file).exists():
        raise ImportError(f"backend='inductor' raised:\nImportError: {file}: file too short\n\n")


def test_damaged_compiled_code_is_an_error_that_names_the_cache_to_remove(kept: Path) -> None:
    with pytest.raises(UserError) as caught:
        compile_now(lambda: trip_over("half.so"), CPU)
    assert str(caught.value) == ("compiling failed: ImportError: half.so: file too short; remove"
                                 f' {kept}, if a kill damaged it, or set "compile": false')
    assert (kept / "half.so").exists()  # others may compile there


def test_a_user_without_a_home_uses_pytorchs_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    compilation.keep_compiled_code()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


@pytest.mark.parametrize("layout", [
    pytest.param(compilation.Whole, marks=pytest.mark.thorough), compilation.ByLayer])
def test_compiled_code_draws_the_dropout_of_eager_code(layout: type) -> None:
    step = step_of(n_layers=1, drop_rate=0.3)
    model, tokens = step.state.model, torch.randint(257, (2, 2, 16))
    losses = []
    for loss in (model, layout(model)):
        torch.manual_seed(5)
        losses.append(loss(*tokens))
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    assert not torch.allclose(losses[0], model(*tokens), rtol=1e-4)
