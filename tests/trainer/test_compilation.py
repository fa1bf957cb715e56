from __future__ import annotations

import os
import re
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
from gpt import ForwardOptions, GPTModel
from processes.launch import Process
from run_config import ModelConfig, TrainConfig
from tests.support.steps import step_of
from tests.support.workplace import TINY_MODEL, TINY_TRAIN
from trainer import compilation
from trainer.compilation import (
    ByLayer,
    choose_forward_options,
    compile_now,
    compiled,
    compiled_code_of_run,
    recompilation,
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


def test_what_is_compiled_again_is_told_with_the_reason() -> None:
    recompilation()  # forgets what other tests compiled
    function = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    function(torch.ones(2))
    assert recompilation() == ""
    function(torch.ones(3))
    found = recompilation()
    assert found.startswith("<lambda>, because ") and "size mismatch" in found
    assert found.endswith("; TORCH_LOGS=recompiles shows all") and "\n" not in found
    function(torch.ones(3))
    assert recompilation() == ""


def model_with(options: ForwardOptions, **changes: object) -> GPTModel:
    torch.manual_seed(0)
    return GPTModel(ModelConfig(**TINY_MODEL | {"drop_rate": 0.0} | changes), options)


def loss_and_gradients(model: GPTModel) -> list[torch.Tensor]:
    token_ids, targets = torch.randint(257, (2, 3, 16), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    loss = model(token_ids, targets)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize(("options", "drop_rate"), [
    (ForwardOptions(head_multiple=128, activation_checkpointing=True), 0.2),
    (ForwardOptions(head_chunk_tokens=5, head_multiple=128), 0.2),
    (ForwardOptions(attention="blocks"), 0.0),  # with dropout it draws other masks
], ids=str)
def test_no_option_changes_the_result(options: ForwardOptions, drop_rate: float) -> None:
    plain, changed = (model_with(each, drop_rate=drop_rate)
                      for each in (ForwardOptions(), options))
    token_ids = torch.arange(16)[None]
    torch.testing.assert_close(changed.eval()(token_ids), plain.eval()(token_ids))
    torch.testing.assert_close(loss_and_gradients(changed.train()),
                               loss_and_gradients(plain.train()), rtol=1e-4, atol=1e-6)
    assert {k: v.shape for k, v in changed.state_dict().items()} == {
        k: v.shape for k, v in plain.state_dict().items()}


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


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The cache of compiled code, in the user's directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    compilation.keep_compiled_code()
    kept = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert kept == tmp_path / ".cache/ddp-train/inductor"
    return kept


def fail_to_compile(device: torch.device, error: Exception | None = None) -> str:
    error = error or ImportError("backend='inductor' raised:\nImportError: a.so: file too short\n")
    with pytest.raises(UserError) as caught:
        compile_now(lambda: raise_(error), device)
    return str(caught.value)


@pytest.mark.parametrize(("device", "missing"), [(CPU, "no g++"), (GPU, "no gcc or clang")])
def test_a_compile_error_names_what_is_missing_or_damaged(
    monkeypatch: pytest.MonkeyPatch, kept: Path, device: torch.device, missing: str
) -> None:
    reason = "compiling failed: ImportError: a.so: file too short; "
    assert fail_to_compile(CPU) == (
        f'{reason}remove {kept}, if a kill damaged it, or set "compile": false')
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    advice = ': install gcc, g++ and python3-dev, or set "compile": false'
    assert fail_to_compile(device) == f"{reason}{missing}{advice}"
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(kept))
    assert fail_to_compile(device).endswith(f"; no {kept}/Python.h{advice}")


@pytest.mark.parametrize("failure", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), MemoryError(),
    BackendCompilerFailed("inductor", RuntimeError("Triton Error [CUDA]: out of memory"), None),
], ids=["allocator", "host", "dynamo"])
def test_out_of_memory_is_not_a_compile_error(failure: Exception) -> None:
    with pytest.raises(type(failure)) as caught:
        compile_now(lambda: raise_(failure), CPU)
    assert caught.value is failure
    reason = "out of resource: shared memory, required: 262144"
    assert f"compiling failed: {reason};" in fail_to_compile(CPU, RuntimeError(reason))


@pytest.mark.parametrize("by_layer", [
    pytest.param(False, marks=pytest.mark.thorough), True])
def test_compiled_code_draws_the_dropout_of_eager_code(by_layer: bool) -> None:
    model = step_of(n_layers=1, drop_rate=0.3).state.model
    torch._inductor.config.use_static_cuda_launcher = True
    tokens, losses = torch.randint(257, (2, 2, 16)), []
    for loss in (model, ByLayer(model) if by_layer else compiled(lambda *x: model(*x), model)):
        torch.manual_seed(5)
        losses.append(loss(*tokens))
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    assert not torch.allclose(losses[0], model(*tokens), rtol=1e-4)
    assert not torch._inductor.config.use_static_cuda_launcher  # it would stop the watchdog


# --- the compiled code that goes with the run

ALONE = Process(rank=0, local_rank=0, world_size=1, device=CPU)
TRAIN = TrainConfig(**TINY_TRAIN | {"compile": True})


class Cache:
    """Stands in for PyTorch's cache of this machine: its content, and what was loaded into it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.content, self.loads = b"", []
        monkeypatch.setattr(torch.compiler, "save_cache_artifacts",
                            lambda: (self.content, None) if self.content else None)
        monkeypatch.setattr(torch.compiler, "load_cache_artifacts", self.loads.append)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Cache:
    return Cache(monkeypatch)


def compile_in(run_dir: Path, process: Process = ALONE, train: TrainConfig = TRAIN) -> list[Path]:
    with compiled_code_of_run(run_dir, train, process):
        pass
    return sorted(run_dir.glob("compiled/*"))


def test_what_is_compiled_is_loaded_by_the_next_launch(cache: Cache, tmp_path: Path) -> None:
    assert compile_in(tmp_path) == [] == cache.loads  # nothing was compiled
    for content in (b"first", b"second", b"third"):
        cache.content = content
        compile_in(tmp_path)
    assert cache.loads == [b"first", b"second"]


@pytest.mark.parametrize("damage", ["truncated", "a bit", "empty", "load", "save", "disk"])
def test_a_damaged_file_or_a_failure_is_at_most_one_warning(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str,
    capsys: pytest.CaptureFixture[str]
) -> None:
    cache.content = b"forward"
    file, = compile_in(tmp_path)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    damaged = {"truncated": content[:-3], "a bit": content, "empty": b""}
    broken = {"load": "torch.compiler.load_cache_artifacts",
              "save": "torch.compiler.save_cache_artifacts",
              "disk": "trainer.compilation.write_atomically"}
    file.write_bytes(damaged.get(damage, file.read_bytes()))
    with monkeypatch.context() as patch:
        if damage in broken:
            patch.setattr(broken[damage], lambda *_: raise_(OSError(28, "No space\nsecond")))
        assert compile_in(tmp_path) == [file]
    said = capsys.readouterr().out
    if damage in ("save", "disk"):
        assert not said
    else:
        assert re.fullmatch(rf"warning: {file}: not used \(OSError: .*\), all is compiled anew\n",
                            said)
    cache.loads.clear()
    compile_in(tmp_path)
    assert cache.loads == [b"forward"] and not capsys.readouterr().out


def test_each_device_of_one_node_has_a_file(cache: Cache, tmp_path: Path) -> None:
    cache.content = b"forward"
    processes = [replace(ALONE, rank=rank, local_rank=rank % 2, world_size=4) for rank in range(4)]
    found = [len(compile_in(tmp_path, process)) for process in processes]
    assert found == [1, 2, 2, 2] and cache.loads == [b"forward"] * 2  # the second node loads
    assert compile_in(tmp_path / "other", train=TRAIN.model_copy(update={"compile": False})) == []


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
