import os
import shutil
import subprocess
import sysconfig

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from basics.errors import UserError
from gpt import ForwardOptions
from run_config import ModelConfig, TrainConfig
from tests.support.models import step_of
from tests.support.workplace import TINY_MODEL, TINY_TRAIN
from trainer.compilation import (
    choose_forward_options,
    compile_now,
    keep_compiled_code,
)
from trainer.precision import resolve_for_device

CPU, GPU = torch.device("cpu"), torch.device("cuda")
CHUNK = 2**23 // 50257  # tokens of a chunk whose logits fit in a CPU's cache
ASKED = {"residual_dtype": "fp32", "head_chunks": 3, "activation_checkpointing": True}


@pytest.mark.parametrize(("device", "keys", "options"), [
    (GPU, {"precision": "bf16"}, {"residual_dtype": torch.bfloat16, "head_multiple": 128}),
    (GPU, {"precision": "fp16"}, {"head_multiple": 128}), (GPU, {"precision": "fp32"}, {}),
    (CPU, {"precision": "bf16"}, {"head_chunk_tokens": CHUNK, "attention": "blocks"}),
    (CPU, {"precision": "fp32"}, {"head_chunk_tokens": CHUNK}),
    (CPU, {"precision": "bf16", "compile": True}, {}),
    (GPU, {"precision": "bf16"} | ASKED, {  # 128 tokens in 3 chunks
        "head_chunk_tokens": 43, "activation_checkpointing": True, "head_multiple": 128}),
])
def test_the_defaults_are_the_fastest_of_the_device_and_keys_override_them(device, keys, options):
    train = resolve_for_device(TrainConfig(**TINY_TRAIN | keys), device)
    model = ModelConfig(**TINY_MODEL | {"vocab_size": 50257, "context_length": 64})
    assert choose_forward_options(model, train, device) == ForwardOptions(**options)


def raise_(error):
    raise error


@pytest.mark.parametrize("broken", [0, 1], ids=["training", "validation"])
def test_a_compile_error_ends_the_run_in_one_line(monkeypatch, broken):
    made = []

    def compile(function, **_):
        made.append(function)
        error = subprocess.CalledProcessError(1, "no compiler found\nsecond line")
        return function if len(made) - 1 != broken else lambda *_: raise_(error)

    monkeypatch.setattr(torch, "compile", compile)
    with pytest.raises(UserError, match=".*no compiler found") as caught:
        step_of(compile=True, n_layers=1, validation_interval=1, validation_batches=1)
    line = str(caught.value)
    assert line.startswith("compiling failed: ") and line.endswith(', or set "compile": false')
    assert "\n" not in line and caught.value.status == 2


def test_a_compile_error_names_what_is_missing_or_damaged(monkeypatch, tmp_path):
    def failure(device):
        error = ImportError("backend='inductor' raised:\nImportError: a.so: file too short\n")
        with pytest.raises(UserError) as caught:
            compile_now(lambda: raise_(error), device)
        return str(caught.value).removeprefix("compiling failed: ImportError: a.so: file too short")

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    keep_compiled_code()
    kept = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    assert kept == str(tmp_path / ".cache/ddp-train/inductor")
    assert failure(CPU) == f'; remove {kept}, if a kill damaged it, or set "compile": false'
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    advice = 'install gcc, g++ and python3-dev, or set "compile": false'
    assert failure(CPU) == f"; no g++: {advice}"
    assert failure(GPU) == f"; no gcc or clang: {advice}"
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert failure(CPU) == f"; no {tmp_path}/Python.h: {advice}"


@pytest.mark.parametrize("failure", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    BackendCompilerFailed("inductor", RuntimeError("Triton Error [CUDA]: out of memory"), None),
], ids=["allocator", "dynamo"])
def test_out_of_memory_is_not_a_compile_error(failure):
    with pytest.raises(type(failure)) as caught:
        compile_now(lambda: raise_(failure), CPU)
    assert caught.value is failure
