"""The loss of a model as fast as its device allows: dtypes, pieces, compiling."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from basics.errors import UserError
from gpt import ForwardOptions, GPTModel, run_block
from ops.sizes import head_chunk_tokens
from run_config import ModelConfig, TrainConfig
from trainer.precision import choose_precision

HEAD_MULTIPLE = 128  # rows in a tile of the tensor cores' matrix products
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def choose_forward_options(
    model: ModelConfig, train: TrainConfig, device: torch.device
) -> ForwardOptions:
    """Settle how the forward pass is computed: what the run asks for, else the fastest here.

    Raises:
        UserError: a bfloat16 residual stream, where the precision is another one.
    """
    precision, on_gpu = choose_precision(train, device), device.type == "cuda"
    residual = train.residual_dtype or ("bf16" if on_gpu and precision == "bf16" else "fp32")
    if residual == "bf16" and precision != "bf16":
        raise UserError(f'residual_dtype is "bf16", but the precision here is {precision}; drop it'
                        " from train.json, or use a device that has bf16")
    is_eager_on_cpu = not on_gpu and not chooses_compile(train, device)
    return ForwardOptions(
        residual_dtype=torch.bfloat16 if residual == "bf16" else None,
        head_chunk_tokens=head_chunk_tokens(model, train, is_eager_on_cpu=is_eager_on_cpu),
        activation_checkpointing=train.activation_checkpointing,
        head_multiple=HEAD_MULTIPLE if on_gpu and precision in ("bf16", "fp16") else 1,
        attention_in_blocks=is_eager_on_cpu and precision in ("bf16", "fp16"),
    )


def chooses_compile(train: TrainConfig, device: torch.device) -> bool:
    """Tell if the model is to be compiled: what the run asks for, else on a GPU."""
    return device.type == "cuda" if train.compile is None else train.compile


def keep_compiled_code() -> None:
    """Let what is compiled outlive a reboot, unless the environment names a place for it.

    Call it before anything imports torch._dynamo, as building an optimizer does: PyTorch then
    settles for a temporary directory. Not in the run's own directory: it is code.
    """
    ours = _our_cache_dir()
    if ours is not None:
        os.environ.setdefault(CACHE_VARIABLE, str(ours))


class ByLayer(nn.Module):
    """A model's training loss for DistributedDataParallel, each layer compiled by itself.

    One compilation serves all layers. The gradients of a layer are there when its own backward
    pass ends, and travel while the layers before it go on: of one graph, all would come at its end.
    """

    def __init__(self, model: GPTModel, train: TrainConfig) -> None:
        super().__init__()
        torch._dynamo.config.optimize_ddp = False  # a layer is not to be cut further
        _drop_as_eager(model)
        self.model = model
        self._run_block, self._loss = (_compiled(function, train)
                                       for function in (run_block, GPTModel.loss))

    def forward(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        x = self.model.transform(self.model.embed(token_ids), self._run_block)
        return self._loss(self.model, x, targets)


class Whole(nn.Module):
    """A model's training loss, compiled in one piece."""

    def __init__(self, model: GPTModel, train: TrainConfig) -> None:
        super().__init__()
        _drop_as_eager(model)
        self.model = model
        self._loss = _compiled(_training_loss, train)

    def forward(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        return self._loss(self.model, token_ids, targets)


def compiled_validation_loss(model: GPTModel, train: TrainConfig) -> Callable[..., Tensor]:
    """Give a model's loss as a function of (token_ids, targets), compiled apart from training's."""
    return partial(_compiled(_validation_loss, train), model)


def compile_error(work: Callable[[], object]) -> str:
    """Do something that compiles; give a line of what it trips over, else nothing.

    It is tried a second time with nothing kept: a process that was killed while it compiled may
    have left half a file, on which all later ones would trip.

    Raises:
        torch.OutOfMemoryError: the device is full, which is no fault of the compiler.
    """
    reason = _compile_error(work)
    if reason:
        kept = Path(os.environ.get(CACHE_VARIABLE, ""))
        os.environ[CACHE_VARIABLE] = tempfile.mkdtemp(prefix="ddp-train-compiled-")
        os.environ.pop("TRITON_CACHE_DIR", None)  # which is below the other
        _forget_compiled_code()
        reason = _compile_error(work)
        if not reason and kept == _our_cache_dir():
            shutil.rmtree(kept, ignore_errors=True)
    return reason


def _forget_compiled_code() -> None:
    """Drop what this process holds of it, the paths of its files too."""
    from torch._inductor.utils import clear_caches  # seconds, where nothing is compiled

    torch.compiler.reset()
    clear_caches()


def _our_cache_dir() -> Path | None:
    try:
        return Path.home() / ".cache" / "ddp-train" / "inductor"
    except RuntimeError:  # a user without a home
        return None


def _compile_error(work: Callable[[], object]) -> str:
    try:
        work()
    except torch.OutOfMemoryError:
        raise
    # A compiler, its language, its cache and its generated code fail in ways of their own.
    except Exception as error:
        lines = [line for line in str(error).splitlines()
                 if line.strip() and not line.endswith("raised:")]
        return (lines or [type(error).__name__])[0][:160]
    return ""


# What is compiled is kept by the function's code: two of them do not look through each other's.
def _training_loss(model: GPTModel, token_ids: Tensor, targets: Tensor) -> Tensor:
    return model(token_ids, targets)


def _validation_loss(model: GPTModel, token_ids: Tensor, targets: Tensor) -> Tensor:
    return model(token_ids, targets)


def _drop_as_eager(model: GPTModel) -> None:
    """Draw dropout as eager code does: else the masks would depend on what is one graph."""
    if model.config.drop_rate > 0:
        torch._inductor.config.fallback_random = True


def _compiled(function: Callable, train: TrainConfig) -> Callable:
    """Compile for fixed shapes."""
    return torch.compile(function, dynamic=False, fullgraph=True, mode=train.compile_mode)
