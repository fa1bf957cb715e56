"""The kernel that computes a model's attention: which one runs, and whether a chosen one can."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from basics.errors import UserError, first_line
from basics.out_of_memory import is_out_of_memory
from gpt import KERNELS, ForwardOptions, attend
from run_config import ModelConfig, TrainConfig

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_attention(model: ModelConfig, train: TrainConfig, device: torch.device) -> None:
    """Refuse a kernel that cannot compute a model's attention on a device.

    Args:
        train: after `resolve_for_device`.

    Raises:
        UserError: it failed on two sequences.
    """
    if train.attention not in KERNELS:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # several lines on why each kernel cannot run
            q, k, v = _zeros(model, train, device)
            attend(q, k, v, model.drop_rate, train.attention).sum().backward()
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # a kernel's failure is reported later
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        head_size = model.emb_dim // model.n_heads
        raise UserError(f'attention is "{train.attention}", which cannot run here with head size'
                        f" {head_size}, precision {train.precision} and drop_rate"
                        f" {model.drop_rate:g} ({first_line(error)}); set it to"
                        f' "{"math" if train.deterministic else "auto"}" in train.json') from None


def kernel_name(model: ModelConfig, train: TrainConfig, device: torch.device,
                options: ForwardOptions) -> str:
    """Return the name of the kernel that computes a model's attention in training."""
    if options.attention != "auto":
        return options.attention
    q, k, v = _zeros(model, train, device)
    chosen = torch._fused_sdp_choice(q, k, v, dropout_p=model.drop_rate, is_causal=True)
    return SDPBackend(chosen).name.split("_")[0].lower()


def attention_line(kernel: str, device: torch.device) -> str:
    """Return a line for the log that names the kernel, and cuDNN's version on a GPU."""
    if kernel == "blocks":
        return "attention: blocks (this project's own code for CPUs)"
    version = cudnn_version(device)
    return f"attention: {kernel}" + (f" (cuDNN {version})" if version else "")


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


def _zeros(model: ModelConfig, train: TrainConfig, device: torch.device) -> tuple[Tensor, ...]:
    """Return queries, keys and values of two sequences, (2, H, T, D), as a training step has them.

    They have its dtype and its strides.
    """
    shape = (2, model.context_length, 3, model.n_heads, model.emb_dim // model.n_heads)
    qkv = torch.zeros(shape, dtype=DTYPES.get(train.precision, torch.float32), device=device,
                      requires_grad=True)
    return qkv.permute(2, 0, 3, 1, 4).unbind()
