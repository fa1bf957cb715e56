"""Adding a bias, with its gradient summed in two steps."""

from typing import Any

import torch
from torch import Tensor


class AddBias(torch.autograd.Function):
    """Add a bias (C) to x (B, T, C), in x's dtype; the bias gets a gradient in its own.

    Its gradient is summed over T and then over B. A compiler can take the first sum in the kernel
    that computes the gradient of x, and so reads that once less. As one sum over B * T it would be
    cut into parts that fit no other kernel.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.bias_dtype = bias.dtype
        return x + bias.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.sum(1, dtype=ctx.bias_dtype).sum(0)
