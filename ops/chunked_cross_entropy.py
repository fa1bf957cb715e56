"""Output head and cross-entropy in chunks: the logits of a whole microbatch never exist.

Shapes as in `gpt.py`, and: N tokens in a microbatch, n in a chunk, V' padded vocabulary size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def chunked_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, *, chunk_tokens: int,
                          multiple: int = 1) -> Tensor:
    """Compute the mean cross-entropy of `x @ weight.T`, () float32, chunk by chunk.

    The forward pass computes the gradients too, while a chunk's logits are in the cache, so that
    nothing is computed twice. PyTorch's `linear_cross_entropy` does the same, but returns the loss
    in the dtype of the matrix product: bf16 has two significant digits.

    Args:
        x: (N, C), after the final norm.
        weight: (V, C), the output head.
        targets: (N,) int64.
        chunk_tokens: n, of every chunk but the last.
        multiple: pad the head with zeros to a multiple of this in its matrix products.

    Source: Hsu et al. 2024, "Liger Kernel", section 3.2, for gradients in the forward pass.
    """
    x = x.to(autocast_dtype(x))
    with torch.autocast(x.device.type, enabled=False):
        if torch.is_grad_enabled():
            return _ChunkedCrossEntropy.apply(x, weight, targets, chunk_tokens, multiple)
        return _mean_loss(x, _Chunks(x, weight, chunk_tokens, multiple), targets)


def pad_rows(weight: Tensor, multiple: int) -> Tensor:
    """Pad a matrix (V, C) with rows of zeros: tensor cores are fastest on whole tiles."""
    missing_rows = -len(weight) % multiple
    return F.pad(weight, (0, 0, 0, missing_rows)) if missing_rows else weight


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that autocast would give a matrix product of `x`."""
    device_type = x.device.type
    is_on = torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if is_on else x.dtype


def token_sum(grad: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute `grad.T @ x`: (n, V') and (n, C) to (V', C), in `sum_dtype`."""
    if sum_dtype(x) == x.dtype:
        return torch.mm(grad.T, x, out=out)
    if x.device.type == "cpu":  # CPUs have no matrix product with another dtype
        return torch.mm(grad.T.float(), x.float(), out=out)
    return torch.mm(grad.T, x, out_dtype=torch.float32, out=out)


def sum_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of sums over tokens: in fp16, they can exceed its largest number, 65,504."""
    return torch.float32 if x.dtype == torch.float16 else x.dtype


def _mean_loss(x: Tensor, chunks: _Chunks, targets: Tensor) -> Tensor:
    total = torch.zeros((), device=x.device)
    for x_chunk, chunk_targets in chunks.split(x, targets):
        total = total + chunks.log_probabilities(x_chunk, chunk_targets)[1]
    return total / len(x)


class _Chunks:
    """Buffers that all chunks share.

    On a CPU, allocating a buffer takes longer than filling it: the system clears it first.
    """

    def __init__(self, x: Tensor, weight: Tensor, chunk_tokens: int, multiple: int) -> None:
        self.vocab_size, self._chunk_tokens = len(weight), chunk_tokens
        n = min(chunk_tokens, len(x))
        self.weight = pad_rows(weight.to(x.dtype), multiple)  # (V', C)
        self._logits = self.weight.new_empty(n, len(self.weight))  # padding columns are always 0
        self._log_probabilities = weight.new_empty(n, len(weight), dtype=torch.float32)
        if x.dtype != torch.float32:
            self._float32_logits = torch.empty_like(self._log_probabilities)

    def split(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Split tensors of N tokens into chunks of n."""
        return zip(*(tensor.split(self._chunk_tokens) for tensor in tensors), strict=True)

    def log_probabilities(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return a chunk's log-probabilities, (n, V) float32, and the sum of its losses, ()."""
        n = len(x)
        logits = torch.mm(x, self.weight.T, out=self._logits[:n])[:, : self.vocab_size]
        if logits.dtype != torch.float32:
            logits = self._float32_logits[:n].copy_(logits)
        log_probabilities = torch.log_softmax(logits, 1, out=self._log_probabilities[:n])
        return log_probabilities, -log_probabilities.gather(1, targets[:, None]).sum()

    def logit_gradients(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of a chunk's logits, (n, V') in their dtype, and its loss sum.

        The gradients are the probabilities, minus 1 at each target.
        """
        log_probabilities, loss = self.log_probabilities(x, targets)
        grad = log_probabilities.exp_()
        grad.scatter_add_(1, targets[:, None], grad.new_full((len(x), 1), -1.0))
        self._logits[: len(x), : self.vocab_size] = grad
        return self._logits[: len(x)], loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The mean loss; its forward pass also computes the gradients of the summed loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int,
                multiple: int) -> Tensor:
        chunks = _Chunks(x, weight, chunk_tokens, multiple)
        x_grad, weight_grad = torch.empty_like(x), torch.zeros_like(weight, dtype=torch.float32)
        product = torch.empty_like(chunks.weight, dtype=sum_dtype(x))
        total = torch.zeros((), device=x.device)
        for x_chunk, x_chunk_grad, chunk_targets in chunks.split(x, x_grad, targets):
            grad, loss = chunks.logit_gradients(x_chunk, chunk_targets)
            total += loss
            torch.mm(grad, chunks.weight, out=x_chunk_grad)
            weight_grad += token_sum(grad, x_chunk, product)[: len(weight)]
        ctx.save_for_backward(x_grad, weight_grad)
        return total / len(x)

    @staticmethod
    def backward(ctx: Any, loss_grad: Tensor) -> tuple[Tensor | None, ...]:
        x_grad, weight_grad = ctx.saved_tensors
        scale = loss_grad / len(x_grad)
        return x_grad * scale, weight_grad.mul_(scale), None, None, None
