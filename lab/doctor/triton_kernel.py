"""A kernel that `lab doctor` compiles and runs: torch.compile makes such kernels on a GPU.

Triton reads a kernel's source, so it stands in a module of its own, which only a GPU imports.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

SIZE = 1024


@triton.jit
def double(source, target, SIZE: tl.constexpr):
    """Write twice each number of one vector of `SIZE` float32 to another."""
    places = tl.arange(0, SIZE)
    tl.store(target + places, 2 * tl.load(source + places))


def run_kernel(device: torch.device) -> dict[str, Any]:
    """Compile the kernel and run it; return Triton's version, and whether the result is right."""
    source = torch.arange(SIZE, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    double[(1,)](source, target, SIZE=SIZE)
    return {"version": triton.__version__, "is_right": torch.equal(target, 2 * source)}
