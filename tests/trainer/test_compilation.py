from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

from basics.errors import UserError
from gpt import ForwardOptions
from processes.launch import Process
from run_config import ModelConfig, TrainConfig
from tests.support.steps import step_of
from tests.support.workplace import TINY_MODEL, TINY_TRAIN
from trainer.compilation import (
    choose_forward_options,
    compile_now,
    compiled_code_of_run,
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
def test_the_defaults_are_the_fastest_of_the_device_and_keys_override_them(
    device: torch.device, keys: dict, options: dict
) -> None:
    train = resolve_for_device(TrainConfig(**TINY_TRAIN | keys), device)
    model = ModelConfig(**TINY_MODEL | {"vocab_size": 50257, "context_length": 64})
    assert choose_forward_options(model, train, device) == ForwardOptions(**options)


def raise_(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("broken", [0, 1], ids=["training", "validation"])
def test_a_compile_error_ends_the_run_in_one_line(
    monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
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


def test_a_compile_error_names_what_is_missing_or_damaged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def failure(device: torch.device) -> str:
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
def test_out_of_memory_is_not_a_compile_error(failure: Exception) -> None:
    with pytest.raises(type(failure)) as caught:
        compile_now(lambda: raise_(failure), CPU)
    assert caught.value is failure


# --- the compiled code that goes with the run

ALONE = Process(rank=0, local_rank=0, world_size=1, device=CPU)
TRAIN = TrainConfig(**TINY_TRAIN | {"compile": True})


def test_each_device_of_one_node_keeps_the_code_for_the_next_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, loads = [None], []
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (content[0], None))
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts",
                        lambda artifacts: loads.append(artifacts) or "loaded")

    def compile_in(process: Process = ALONE, **keys: bool) -> int:
        with compiled_code_of_run(tmp_path, TRAIN.model_copy(update=keys), process):
            pass
        return len(list(tmp_path.glob("compiled/*")))

    assert compile_in() == 0  # nothing was compiled
    content[0] = b"first"
    assert compile_in(compile=False) == 0 and compile_in() == 1 and loads == []
    content[0] = b"second"
    processes = [replace(ALONE, rank=rank, local_rank=rank % 2, world_size=4) for rank in range(4)]
    assert [compile_in(process) for process in processes] == [1, 2, 2, 2]
    assert loads == [b"first", b"second", b"second"]  # the second node loads


def test_a_damaged_file_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"no artifacts", None))
    for _ in range(2):
        with compiled_code_of_run(tmp_path, TRAIN, ALONE):
            pass
    path, = tmp_path.glob("compiled/*")
    assert capfd.readouterr() == (f"warning: {path}: damaged, so all is compiled anew\n", "")


@pytest.mark.thorough  # compiles
def test_another_machine_finds_what_was_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits = []
    for machine in ("first", "second", "third"):  # the second one saves again what it has loaded
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / machine))
        torch.compiler.reset()
        counters.clear()
        with compiled_code_of_run(tmp_path, TRAIN, ALONE):
            torch.compile(lambda x: x.sin() * 3)(torch.ones(1000))
        hits.append(counters["inductor"]["fxgraph_cache_hit"]
                    + counters["aot_autograd"]["autograd_cache_hit"])
    assert hits[0] == 0 < hits[1] == hits[2]
