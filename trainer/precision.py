"""The number format, attention kernel and form of the forward pass, decided before building.

All functions but `resolve_for_device`, and all that is built later, take its result.
"""

import os
import warnings

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from basics.device import has_bf16, has_tf32, is_cpu, is_gpu, synchronize
from basics.errors import UserError, first_line, is_out_of_memory
from gpt import KERNELS, ForwardOptions, GPTModel, attend
from run_config import ModelConfig, TrainConfig
from settings.machine import Precision
from tokens.batch_plan import head_chunk_tokens

DTYPES: dict[str | None, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
OF_CPUS = {  # any of these makes a precision fast
    "bf16": ("avx512_bf16", "amx_bf16", "bf16"),
    "tf32": ("amx_fp16",),
    "fp16": ("avx512_fp16", "amx_fp16", "fp16_arith"),
}
HEAD_MULTIPLE = 128  # rows in a tile of the tensor cores' matrix products
LARGE_VOCABULARY = 8192  # on CPUs, whose matrix products also want rows of whole cache lines


def resolve_for_device(config: TrainConfig, device: torch.device) -> TrainConfig:
    """Return the config with the keys decided whose default depends on the device.

    The only place that decides them. A deterministic run gets its kernels here, since CUDA must not
    have been initialised before.

    Raises: UserError: a bfloat16 residual stream in another precision than bf16.
    """
    if config.deterministic:  # where a kernel is missing PyTorch raises
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
        # It finds errors, and is slow.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    on_gpu, precision = is_gpu(device), config.precision
    if precision is None:  # the fastest one that is safe on the device
        precision = "fp32"
        if config.use_amp and has_precision(device, "bf16"):
            precision = "bf16"
        elif config.use_amp and on_gpu:
            precision = "fp16"
    residual_dtype = config.residual_dtype
    if residual_dtype is None:
        residual_dtype = "bf16" if on_gpu and precision == "bf16" else "fp32"
    if residual_dtype == "bf16" and precision != "bf16":
        raise UserError(
            f'residual_dtype is "bf16", but the precision here is {precision}; remove'
            " it from train.json, or use a device that has bf16"
        )
    attention = config.attention
    if config.deterministic and on_gpu and attention == "auto":  # flash has 16 bits only
        attention = "flash" if precision in ("bf16", "fp16") else "math"
    return config.model_copy(
        update={
            "precision": precision,
            "attention": attention,
            "residual_dtype": residual_dtype,
            "compile": on_gpu if config.compile is None else config.compile,
        }
    )


def has_precision(device: torch.device, precision: Precision) -> bool:
    """Return whether a device computes in a precision, not only by conversions."""
    if is_cpu(device):
        wanted = OF_CPUS.get(precision)
        return wanted is None or any(map(torch.cpu.get_capabilities().get, wanted))
    if precision == "bf16":
        return has_bf16(device)
    return precision != "tf32" or has_tf32(device)


def choose_forward_options(
    model: ModelConfig, config: TrainConfig, device: torch.device
) -> ForwardOptions:
    """Return how the forward pass is computed; the config is one of `resolve_for_device`."""
    # Each of these is a form of the same computation that was measured to be faster there.
    on_gpu, in_16_bits = is_gpu(device), config.precision in ("bf16", "fp16")
    is_eager_on_cpu = not on_gpu and not config.compile
    pads_head = in_16_bits if on_gpu else config.compile and model.vocab_size >= LARGE_VOCABULARY
    return ForwardOptions(
        residual_dtype=torch.bfloat16 if config.residual_dtype == "bf16" else None,
        head_chunk_tokens=head_chunk_tokens(model, config, is_eager_on_cpu=is_eager_on_cpu),
        activation_checkpointing=config.activation_checkpointing,
        head_multiple=HEAD_MULTIPLE if pads_head else 1,
        attention=(
            "blocks"
            if is_eager_on_cpu and in_16_bits and config.attention == "auto"
            else config.attention
        ),
        adds_bias_apart=on_gpu and bool(config.compile),
    )


def autocast(precision: Precision | None, device: torch.device) -> torch.autocast:
    """Return the autocast context of a precision; for fp32 and tf32 it does nothing."""
    return torch.autocast(
        device.type, dtype=DTYPES.get(precision, torch.bfloat16), enabled=precision in DTYPES
    )


def check_attention(model: ModelConfig, config: TrainConfig, device: torch.device) -> None:
    """Compute attention with the kernel of the config. Raises: UserError: that failed."""
    if config.attention not in KERNELS:
        return
    try:
        with warnings.catch_warnings(action="ignore"):  # lines on why each kernel cannot run
            q, k, v = _attention_inputs(model, config, device)
            attend(q, k, v, model.drop_rate, config.attention).sum().backward()
            synchronize(device)  # a kernel's failure is reported later
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise UserError(
            f'attention is "{config.attention}", which cannot run here with head size'
            f" {model.emb_dim // model.n_heads}, precision {config.precision} and"
            f" drop_rate {model.drop_rate:g} ({first_line(error)}); set it to"
            f' "{"math" if config.deterministic else "auto"}" in train.json'
        ) from None


def attention_kernel(model: GPTModel, config: TrainConfig, device: torch.device) -> str:
    """Return the name of the kernel that computes a model's attention in training."""
    if model.options.attention != "auto":
        return model.options.attention
    q, k, v = _attention_inputs(model.config, config, device)
    chosen = torch._fused_sdp_choice(q, k, v, dropout_p=model.config.drop_rate, is_causal=True)
    return SDPBackend(chosen).name.split("_")[0].lower()


def _attention_inputs(
    model: ModelConfig, config: TrainConfig, device: torch.device
) -> tuple[Tensor, ...]:
    """Return queries, keys and values, (2, H, T, D), of a training step's dtype and strides."""
    shape = (2, model.context_length, 3, model.n_heads, model.emb_dim // model.n_heads)
    qkv = torch.zeros(
        shape, dtype=DTYPES.get(config.precision, torch.float32), device=device, requires_grad=True
    )
    return qkv.permute(2, 0, 3, 1, 4).unbind()
