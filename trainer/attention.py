"""The kernel that computes a model's attention: which one runs, and whether a chosen one can."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from basics.errors import UserError, first_line
from basics.out_of_memory import is_out_of_memory
from gpt import ForwardOptions, fused_attention
from run_config import ModelConfig, TrainConfig

KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
           "math": SDPBackend.MATH}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_attention(model: ModelConfig, train: TrainConfig, device: torch.device) -> None:
    """Refuse a kernel that cannot compute a model's attention on a device.

    Args:
        train: after `resolve_for_device`.

    Raises:
        UserError: it failed on one sequence.
    """
    kernel = KERNELS.get(train.attention)
    if kernel is None:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # several lines on why each kernel cannot run
            q = _zeros(model, train, device)
            fused_attention(q, q, q, model.drop_rate, kernel).sum().backward()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise UserError(f'attention is "{train.attention}", which cannot run here with head size'
                        f" {q.shape[-1]}, precision {train.precision} and drop_rate"
                        f" {model.drop_rate:g} ({first_line(error)}); set it to \"auto\" in"
                        " train.json") from None


def kernel_name(model: ModelConfig, train: TrainConfig, device: torch.device,
                options: ForwardOptions) -> str:
    """Return the name of the kernel that computes a model's attention in training.

    Args:
        train: after `resolve_for_device`.
    """
    if options.attention_in_blocks:
        return "blocks"
    if options.attention_kernel is not None:
        return train.attention
    q = _zeros(model, train, device)
    chosen = torch._fused_sdp_choice(q, q, q, dropout_p=model.drop_rate, is_causal=True)
    return SDPBackend(chosen).name.split("_")[0].lower()


def attention_facts(kernel: str, device: torch.device) -> dict[str, Any]:
    """Return what `summary.json` says of the attention: its kernel, and cuDNN's version."""
    return {"attention": kernel, "cudnn": cudnn_version(device)}


def remedy(kernel: str) -> str:
    """Return what to change where gradients stop being finite, as the end of a sentence."""
    others = "with a lower learning_rate, or with precision bf16 or fp32"
    if kernel != "cudnn":
        return others
    return ('with attention "flash": cuDNN\'s backward pass has been reported to give NaN at large'
            f" batches; if that does not help, {others}")


def cudnn_version(device: torch.device) -> str | None:
    """Return cuDNN's version, such as "9.10.2"; None without a GPU."""
    number = torch.backends.cudnn.version() if device.type == "cuda" else None
    if number is None:
        return None
    major, rest = divmod(number, 10_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _zeros(model: ModelConfig, train: TrainConfig, device: torch.device) -> torch.Tensor:
    """Return one sequence's queries, (1, H, T, D), in the dtype of a training step."""
    shape = (1, model.n_heads, model.context_length, model.emb_dim // model.n_heads)
    return torch.zeros(shape, dtype=DTYPES.get(train.precision, torch.float32), device=device,
                       requires_grad=True)
