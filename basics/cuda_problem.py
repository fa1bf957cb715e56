"""Why PyTorch cannot use the GPUs of a machine, and what helps, also inside a container."""

from __future__ import annotations

import os
from pathlib import Path

DEVICES = Path("/dev")  # has nvidia0 and so on where the kernel's driver is loaded
# By a part of what torch.cuda.init() says (c10/cuda/CUDAFunctions.cpp): the cause, and the remedy.
CAUSES = {
    "driver on your system is too old": (
        "the NVIDIA driver is too old for it",
        "run ./setup_lambda.sh, which installs PyTorch for older drivers, or take a machine with"
        " driver 580 or newer"),
    "Found no NVIDIA driver": (
        "there is no NVIDIA driver",
        "install one, or start the container with --gpus all and an image for CUDA"),
    "system not yet initialized": (  # error 802
        "the fabric manager of its NVSwitches does not run",
        "start nvidia-fabricmanager on the host, or take another machine: a container cannot"),
    "unsupported display driver / cuda driver combination": (  # error 803
        "the driver's parts are of two versions",
        "take cuda-compat out of LD_LIBRARY_PATH, or restart the machine"),
    "forward compatibility was attempted": (  # error 804
        "cuda-compat does not work with this kind of GPU",
        "take cuda-compat out of LD_LIBRARY_PATH, and run ./setup_lambda.sh"),
    "OS call failed": (  # error 304
        "this user may not open /dev/nvidia*",
        "start the container with --gpus all, or join the group that owns them"),
    "No CUDA GPUs are available": (
        "CUDA finds none of them",
        "unset CUDA_VISIBLE_DEVICES, or start the container with --gpus all"),
    "no CUDA-capable device": (
        "CUDA finds none of them",
        "unset CUDA_VISIBLE_DEVICES, or start the container with --gpus all"),
}
OTHER_REMEDY = "see what nvidia-smi says; restart the machine, or take another one"


def cuda_problem() -> tuple[str, str]:
    """Return why PyTorch cannot use the GPUs of this machine, and what helps; empty if it can.

    A machine without GPUs has no problem, nor one whose GPUs CUDA_VISIBLE_DEVICES hides.
    """
    import torch

    if torch.cuda.is_available() or torch.version.cuda is None:
        return "", ""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if not torch.cuda.device_count() and (is_hidden or not any(DEVICES.glob("nvidia[0-9]*"))):
        return "", ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        text = str(error).strip().partition("\n")[0].rpartition("already set an error? ")[2]
        return next((cause for part, cause in CAUSES.items() if part in text),
                    (text[:100], OTHER_REMEDY))
    return "", ""
