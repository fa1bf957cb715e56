"""The form of a model that is fastest on a device, compiling it, and where its code is kept."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from basics.errors import UserError, is_out_of_memory
from basics.machine import find_compiler
from gpt import Block, ForwardOptions, GPTModel
from ops.sizes import head_chunk_tokens
from run_config import ModelConfig, TrainConfig

HEAD_MULTIPLE = 128  # rows in a tile of the tensor cores' matrix products
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def choose_forward_options(model: ModelConfig, train: TrainConfig,
                           device: torch.device) -> ForwardOptions:
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
        attention=("blocks" if is_eager_on_cpu and in_16_bits and train.attention == "auto"
                   else train.attention),
    )


def keep_compiled_code() -> None:
    """Keep compiled code in the user's cache directory, unless the environment names another one.

    PyTorch's default is a temporary directory, which a reboot clears. Call this before anything
    imports torch._dynamo (building an optimizer does), because that reads the variable.
    """
    with suppress(RuntimeError):  # the user has no home directory
        os.environ.setdefault(CACHE_VARIABLE, str(Path.home() / ".cache/ddp-train/inductor"))


def compiled(function: Callable, model: GPTModel) -> Callable:
    """Compile for fixed shapes. The settings are part of the cache's key, so all set them here."""
    if model.config.drop_rate > 0:  # as eager code: inductor's masks depend on how graphs are cut
        torch._inductor.config.fallback_random = True
    # PyTorch's own launcher of kernels holds Python's lock while it waits for a GPU that hangs: the
    # watchdog's thread would wait as well. Triton's launcher releases it.
    torch._inductor.config.use_static_cuda_launcher = False
    if torch.are_deterministic_algorithms_enabled():  # do not measure which kernel is fastest
        torch._inductor.config.deterministic = True
    return torch.compile(function, dynamic=False, fullgraph=True)


class ByLayer(nn.Module):
    """A model's training loss for DistributedDataParallel, with each layer compiled separately.

    One compilation serves all layers. A layer's gradients are complete when its own backward pass
    ends, so they are all-reduced while the backward pass goes on. With one graph for the whole
    model, all gradients would become available only at the end of the backward pass.
    """

    def __init__(self, model: GPTModel) -> None:
        super().__init__()
        torch._dynamo.config.optimize_ddp = False  # do not cut a layer's graph at DDP's buckets
        self.model = model
        self._embed, self._run_block, self._loss = (
            compiled(function, model)
            for function in (GPTModel.embed, Block.forward, GPTModel.loss))

    def forward(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        x = self.model.transform(self._embed(self.model, token_ids), self._run_block)
        return self._loss(self.model, x, targets)


def compile_now(work: Callable[[], object], device: torch.device) -> None:
    """Run something that compiles for a device.

    Raises:
        UserError: it failed, which says what is missing, or that the cache may be damaged.
        Exception: memory ran out, which is not a compile error.
    """
    try:
        work()
    # Dynamo, inductor, Triton, the C++ compiler and the cache raise errors of many types.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        lines = [line.strip() for line in str(error).splitlines()
                 if line.strip() and not line.endswith("raised:")]
        reason = (lines or [type(error).__name__])[0][:60].strip()
        _, missing = find_compiler(on_gpu=device.type == "cuda")
        cache = os.environ.get(CACHE_VARIABLE, "PyTorch's cache of compiled code")
        # A process that was killed while it compiled may have left a truncated file.
        advice = (f"{missing}: install gcc, g++ and python3-dev" if missing
                  else f"remove {cache}, if a kill damaged it")
        raise UserError(f'compiling failed: {reason}; {advice}, or set "compile": false') from None
