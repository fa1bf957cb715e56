"""The number format that a run computes in: decided once, before anything is built from it."""

from __future__ import annotations

import os

import torch

from basics.errors import UserError
from run_config import Precision, TrainConfig


def resolve_for_device(train: TrainConfig, device: torch.device) -> TrainConfig:
    """Return the config with the keys decided whose default depends on the device.

    The only place that decides them. Everything that is built later reads the returned config.
    A deterministic run gets its kernels here, since CUDA must not have been initialised before.

    Raises:
        UserError: a bfloat16 residual stream in another precision than bf16.
    """
    if train.deterministic:  # where a kernel is missing PyTorch raises
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # it finds errors, and is slow
    on_gpu, precision = device.type == "cuda", train.precision
    if precision is None:  # the fastest one that is safe on the device
        if not train.use_amp:
            precision = "fp32"
        elif on_gpu:
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
            precision = "bf16" if has_bf16 else "fp16"
        else:
            precision = "bf16" if _cpu_has_bf16() else "fp32"
    residual_dtype = train.residual_dtype or (
        "bf16" if on_gpu and precision == "bf16" else "fp32")
    if residual_dtype == "bf16" and precision != "bf16":
        raise UserError(f'residual_dtype is "bf16", but the precision here is {precision}; remove'
                        " it from train.json, or use a device that has bf16")
    attention = train.attention
    if train.deterministic and on_gpu and attention == "auto":  # flash has 16 bits only
        attention = "flash" if precision in ("bf16", "fp16") else "math"
    return train.model_copy(update={
        "precision": precision, "attention": attention, "residual_dtype": residual_dtype,
        "compile": on_gpu if train.compile is None else train.compile})


def _cpu_has_bf16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def set_matmul_precision(precision: Precision) -> None:
    """Allow TF32 in float32 matrix products, unless the precision is fp32."""
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """Return the autocast context of a precision; for fp32 and tf32 it does nothing."""
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype, enabled=precision in ("bf16", "fp16"))
