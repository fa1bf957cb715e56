"""The training and validation loss in the form that is fastest on a device: dtypes, compiling."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from basics.compilers import find_compiler
from basics.errors import UserError, print_line
from basics.out_of_memory import is_out_of_memory
from gpt import ForwardOptions, GPTModel, run_block
from ops.sizes import head_chunk_tokens
from run_config import ModelConfig, TrainConfig
from trainer.attention import KERNELS

HEAD_MULTIPLE = 128  # rows in a tile of the tensor cores' matrix products
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_own_caches: list[str] = []


def choose_forward_options(
    model: ModelConfig, train: TrainConfig, device: torch.device
) -> ForwardOptions:
    """Return how the forward pass is computed on a device.

    Args:
        train: after `resolve_for_device`.
    """
    on_gpu, in_16_bits = device.type == "cuda", train.precision in ("bf16", "fp16")
    is_eager_on_cpu = not on_gpu and not train.compile
    return ForwardOptions(
        residual_dtype=torch.bfloat16 if train.residual_dtype == "bf16" else None,
        head_chunk_tokens=head_chunk_tokens(model, train, is_eager_on_cpu=is_eager_on_cpu),
        activation_checkpointing=train.activation_checkpointing,
        head_multiple=HEAD_MULTIPLE if on_gpu and in_16_bits else 1,
        attention_in_blocks=is_eager_on_cpu and in_16_bits and train.attention == "auto",
        attention_kernel=KERNELS.get(train.attention),
    )


def keep_compiled_code() -> None:
    """Keep compiled code in the user's cache directory, unless the environment names another one.

    PyTorch's default is a temporary directory, which a reboot clears. Call this before anything
    imports torch._dynamo (building an optimizer does), because that reads the variable.
    """
    with suppress(RuntimeError):  # the user has no home directory
        os.environ.setdefault(CACHE_VARIABLE, str(Path.home() / ".cache/ddp-train/inductor"))


class ByLayer(nn.Module):
    """A model's training loss for DistributedDataParallel, with each layer compiled separately.

    One compilation serves all layers. A layer's gradients are complete when its own backward pass
    ends, so they are all-reduced while the backward pass goes on. With one graph for the whole
    model, all gradients would become available only at the end of the backward pass.
    """

    def __init__(self, model: GPTModel) -> None:
        super().__init__()
        torch._dynamo.config.optimize_ddp = False  # do not cut a layer's graph at DDP's buckets
        _draw_dropout_as_eager(model)
        self.model = model
        self._embed, self._run_block, self._loss = (
            _compiled(function) for function in (GPTModel.embed, run_block, GPTModel.loss))

    def forward(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        x = self.model.transform(self._embed(self.model, token_ids), self._run_block)
        return self._loss(self.model, x, targets)


class Whole(nn.Module):
    """A model's training loss, compiled as one graph."""

    def __init__(self, model: GPTModel) -> None:
        super().__init__()
        _draw_dropout_as_eager(model)
        self.model = model
        self._loss = _compiled(_training_loss)

    def forward(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        return self._loss(self.model, token_ids, targets)


def compiled_validation_loss(model: GPTModel) -> Callable[..., Tensor]:
    """Return a model's loss as a function of (token_ids, targets), compiled for validation."""
    return partial(_compiled(_validation_loss), model)


def compile_now(work: Callable[[], object], device: torch.device) -> None:
    """Run something that compiles for a device.

    After a failure it is tried once more with a cache of its own: a process that was killed while
    it compiled may have left a truncated file. The shared cache stays: others may compile in it.

    Raises:
        UserError: it failed, which says what is missing.
        Exception: memory ran out, which is not a compile error.
    """
    if reason := _compile_error(work):
        shared, damage = os.environ.get(CACHE_VARIABLE, "PyTorch's cache"), reason
        own = os.environ[CACHE_VARIABLE] = tempfile.mkdtemp(prefix="ddp-train-compiled-")
        _own_caches.append(own)
        atexit.register(remove_own_caches)
        os.environ.pop("TRITON_CACHE_DIR", None)  # a directory inside the other one
        _forget_compiled_code()
        reason = _compile_error(work)
        if reason:
            _, missing = find_compiler(on_gpu=device.type == "cuda")
            advice = f" {missing}: install gcc, g++ and python3-dev, or" if missing else ""
            reason = reason[: 50 if missing else 110].strip()
            raise UserError(f'compiling failed: {reason};{advice} set "compile": false')
        if os.environ.get("RANK", "0") == "0":
            print_line(f"warning: {shared}: has damaged compiled code ({damage}), which was"
                       " compiled again elsewhere; remove that directory while no run is starting")


def remove_own_caches() -> None:
    """Remove the caches that only this process has used; nothing compiles afterwards."""
    while _own_caches:
        shutil.rmtree(_own_caches.pop(), ignore_errors=True)


def _forget_compiled_code() -> None:
    """Drop this process's compiled code and the paths of its files."""
    from torch._inductor.utils import clear_caches  # slow to import, and rarely needed

    torch.compiler.reset()
    clear_caches()


def _compile_error(work: Callable[[], object]) -> str:
    try:
        work()
    # Dynamo, inductor, Triton, the C++ compiler and the cache raise errors of many types.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        lines = [line for line in str(error).splitlines()
                 if line.strip() and not line.endswith("raised:")]
        return (lines or [type(error).__name__])[0][:160]
    return ""


class Recompilations:
    """Tells once why something was compiled again after `begin`: that stalls a step."""

    def __init__(self) -> None:
        self._is_looking: bool | None = None  # not yet

    def begin(self) -> None:
        """Look from now on: after the first validation all should be compiled."""
        if self._is_looking is None:
            _take_recompilations()
            self._is_looking = True

    def line(self) -> str:
        """Return what was compiled again, and why; empty if nothing was, or all is told."""
        found = _take_recompilations() if self._is_looking else []
        self._is_looking = self._is_looking and not found
        return f"{found[0]}; TORCH_LOGS=recompiles shows all" if found else ""


def _take_recompilations() -> list[str]:
    """Return the recompilations since the last call, as dynamo has recorded them."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes long
        return []
    from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

    found = [f"{each.co_name}, because {' '.join(each.recompile_reason.split())[:160]}"
             for each in get_compilation_metrics() if each.recompile_reason]
    clear_compilation_metrics()
    return found


# Dynamo caches by code object: two functions keep training and validation apart.
def _training_loss(model: GPTModel, token_ids: Tensor, targets: Tensor) -> Tensor:
    return model(token_ids, targets)


def _validation_loss(model: GPTModel, token_ids: Tensor, targets: Tensor) -> Tensor:
    return model(token_ids, targets)


def _draw_dropout_as_eager(model: GPTModel) -> None:
    """Draw dropout masks as eager code does; inductor's masks depend on how graphs are cut."""
    if model.config.drop_rate > 0:
        torch._inductor.config.fallback_random = True


def _compiled(function: Callable) -> Callable:
    """Compile for fixed shapes. The settings are part of the cache's key, so all set them here."""
    # PyTorch's own launcher of kernels holds Python's lock while it waits for a GPU that hangs: the
    # watchdog's thread would wait as well. Triton's launcher releases it.
    torch._inductor.config.use_static_cuda_launcher = False
    if torch.are_deterministic_algorithms_enabled():  # do not measure which kernel is fastest
        torch._inductor.config.deterministic = True
    return torch.compile(function, dynamic=False, fullgraph=True)
