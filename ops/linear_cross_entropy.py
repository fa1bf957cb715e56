"""Output head and cross-entropy: the mean loss of a microbatch, whole or in chunks of its tokens.

Shapes as in `gpt.py`, and: N tokens in a microbatch, n in a chunk, V' padded vocabulary size.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from basics.device import is_cpu


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk_tokens: int | None = None,
    multiple: int = 1,
) -> Tensor:
    """Compute the mean cross-entropy of `x @ weight.T`, () float32.

    The forward pass computes the gradients too, while the logits are there: each is read from
    memory once, and none is kept for the backward pass. PyTorch's function of this name returns
    the loss in the dtype of the matrix product: bf16 has two significant digits.

    Args:
        x, weight, targets: (N, C) after the final norm; (V, C), the output head; (N,) int64.
        chunk_tokens: n, of every chunk but the last; None computes all tokens at once.
        multiple: pad the head with zeros to a multiple of this in its matrix products.

    Source: Hsu et al. 2024, "Liger Kernel", section 3.2, for gradients in the forward pass.
    """
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type):
        x = x.to(torch.get_autocast_dtype(device_type))
    chunk_tokens = chunk_tokens or len(x)
    with torch.autocast(device_type, enabled=False):
        if torch.is_grad_enabled():
            return _LinearCrossEntropy.apply(x, weight, targets, chunk_tokens, multiple)
        head = pad_rows(weight.to(x.dtype), multiple)  # (V', C)
        chunks = zip(x.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
        losses = [
            _chunk(part @ head.T, part_targets, len(weight), differentiate=False)[0]
            for part, part_targets in chunks
        ]
        return sum(losses) / len(x)  # type: ignore[return-value]


def pad_rows(weight: Tensor, multiple: int) -> Tensor:
    """Pad a matrix (V, C) with rows of zeros: tensor cores are fastest on whole tiles."""
    missing_rows = -len(weight) % multiple
    return F.pad(weight, (0, 0, 0, missing_rows)) if missing_rows else weight


def token_sum(grad: Tensor, x: Tensor) -> Tensor:
    """Compute `grad.T @ x`: (n, V') and (n, C) to (V', C).

    In float32 where those are fp16, whose largest number, 65,504, sums over tokens can exceed.
    """
    if x.dtype != torch.float16:
        return grad.T @ x
    if is_cpu(x.device):  # CPUs have no matrix product with another dtype
        return grad.T.float() @ x.float()
    return torch.mm(grad.T, x, out_dtype=torch.float32)


class _LinearCrossEntropy(torch.autograd.Function):
    """The mean loss; its forward pass also computes the gradients of the summed loss."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int, multiple: int
    ) -> Tensor:
        head = pad_rows(weight.to(x.dtype), multiple)  # (V', C)
        x_grads, losses = [], []
        head_grad = torch.zeros_like(head, dtype=torch.float32)
        for part, part_targets in zip(
            x.split(chunk_tokens), targets.split(chunk_tokens), strict=True
        ):
            loss, grad = _chunk(part @ head.T, part_targets, len(weight), differentiate=True)
            losses.append(loss)
            x_grads.append(grad @ head)
            head_grad += token_sum(grad, part)
            del grad  # before the next chunk's logits are allocated
        ctx.save_for_backward(torch.cat(x_grads), head_grad[: len(weight)])
        return sum(losses) / len(x)  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, loss_grad: Tensor) -> tuple[Tensor | None, ...]:
        x_grad, weight_grad = ctx.saved_tensors
        scale = loss_grad / len(x_grad)
        return x_grad * scale, weight_grad * scale, None, None, None


def _chunk(
    logits: Tensor, targets: Tensor, vocab_size: int, *, differentiate: bool
) -> tuple[Tensor, Tensor | Any]:
    """Return the summed loss of logits (n, V'), of which V columns count, and its gradients.

    The gradients, (n, V') in the logits' dtype, are the probabilities, minus 1 at each target.
    """
    # Rows of V logits would not begin at addresses that a GPU can load 16 bytes from at a time. So
    # the columns that pad them stay, with a probability of 0.
    if logits.shape[1] > vocab_size:
        logits[:, vocab_size:] = -math.inf
    log_probabilities = F.log_softmax(logits, 1, dtype=torch.float32)  # (n, V')
    loss = -log_probabilities.gather(1, targets[:, None]).sum()
    if not differentiate:
        return loss, None
    if torch.compiler.is_compiling():  # fused; scattering would be a pass of its own
        columns = torch.arange(logits.shape[1], device=logits.device)
        grad = log_probabilities.exp() - (columns == targets[:, None]).float()
    else:
        grad = log_probabilities.exp_()
        grad.scatter_add_(1, targets[:, None], grad.new_full((len(targets), 1), -1.0))
    return loss, grad.to(logits.dtype)
