"""Head and cross-entropy in pieces, so that the logits of a whole microbatch never exist.

Letters as in `gpt.py`; N tokens of a microbatch, n of a piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def chunked_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, *, chunk_tokens: int,
                      multiple: int = 1) -> Tensor:
    """Give the mean cross-entropy of `x @ weight.T`, () float32, piece by piece.

    The gradients are made in the forward pass, while a piece's logits are still in the cache:
    nothing is computed twice. PyTorch's own `linear_cross_entropy` would do as much, but gives the
    loss in the dtype of the matrix product: bf16 has two digits of it.

    Args:
        x: (N, C), the normalised end of the residual stream.
        weight: (V, C), the output head.
        targets: (N,) int64.
        chunk_tokens: n, of every piece but the last.
        multiple: rows of zeros fill the head up to a multiple of this in its matrix products.

    Source: Hsu et al. 2024, "Liger Kernel", section 3.2, for gradients in the forward pass.
    """
    x = x.to(autocast_dtype(x))
    with torch.autocast(x.device.type, enabled=False):
        if torch.is_grad_enabled():
            return _ChunkedCrossEntropy.apply(x, weight, targets, chunk_tokens, multiple)
        return _losses(x, _Pieces(x, weight, chunk_tokens, multiple), targets)


def pad_rows(weight: Tensor, multiple: int) -> Tensor:
    """Fill a matrix, (V, C), up with rows of zeros: the tensor cores want whole tiles."""
    missing_rows = -len(weight) % multiple
    return F.pad(weight, (0, 0, 0, missing_rows)) if missing_rows else weight


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Give the dtype that a matrix product of `x` would have here."""
    device_type = x.device.type
    is_on = torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if is_on else x.dtype


def _losses(x: Tensor, pieces: _Pieces, targets: Tensor) -> Tensor:
    total = torch.zeros((), device=x.device)
    for some, wanted in pieces.cut(x, targets):
        total = total + pieces.log_probabilities(some, wanted)[1]
    return total / len(x)


class _Pieces:
    """What one piece after another is computed in.

    To take memory anew for each costs a CPU more than to fill it: the system clears it first.
    """

    def __init__(self, x: Tensor, weight: Tensor, chunk_tokens: int, multiple: int) -> None:
        self.vocab_size, self._chunk_tokens = len(weight), chunk_tokens
        n = min(chunk_tokens, len(x))
        self.weight = pad_rows(weight.to(x.dtype), multiple)  # (V', C)
        self._logits = self.weight.new_empty(n, len(self.weight))  # of the rows of zeros 0, always
        self._log_probabilities = weight.new_empty(n, len(weight), dtype=torch.float32)
        if x.dtype != torch.float32:
            self._wide = torch.empty_like(self._log_probabilities)

    def cut(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Cut tensors of N rows into pieces of n."""
        return zip(*(tensor.split(self._chunk_tokens) for tensor in tensors), strict=True)

    def log_probabilities(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Give a piece's log-probabilities, (n, V) float32, and the sum of its losses, ()."""
        n = len(x)
        logits = torch.mm(x, self.weight.T, out=self._logits[:n])[:, : self.vocab_size]
        if logits.dtype != torch.float32:
            logits = self._wide[:n].copy_(logits)
        log_probabilities = torch.log_softmax(logits, 1, out=self._log_probabilities[:n])
        return log_probabilities, -log_probabilities.gather(1, targets[:, None]).sum()

    def logit_gradients(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Give the gradients of a piece's logits, (n, V') in their dtype, and its losses' sum.

        They are its probabilities, less 1 at each target.
        """
        log_probabilities, loss = self.log_probabilities(x, targets)
        grad = log_probabilities.exp_()
        grad.scatter_add_(1, targets[:, None], grad.new_full((len(x), 1), -1.0))
        self._logits[: len(x), : self.vocab_size] = grad
        return self._logits[: len(x)], loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The mean loss, and with it the gradients of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int,
                multiple: int) -> Tensor:
        pieces = _Pieces(x, weight, chunk_tokens, multiple)
        x_grad, weight_grad = torch.empty_like(x), torch.zeros_like(weight, dtype=torch.float32)
        product = torch.empty_like(pieces.weight)
        total = torch.zeros((), device=x.device)
        for some, some_grad, wanted in pieces.cut(x, x_grad, targets):
            grad, loss = pieces.logit_gradients(some, wanted)
            total += loss
            torch.mm(grad, pieces.weight, out=some_grad)
            weight_grad += torch.mm(grad.T, some, out=product)[: len(weight)]
        ctx.save_for_backward(x_grad, weight_grad)
        return total / len(x)

    @staticmethod
    def backward(ctx: Any, loss_grad: Tensor) -> tuple[Tensor | None, ...]:
        x_grad, weight_grad = ctx.saved_tensors
        scale = loss_grad / len(x_grad)
        return x_grad * scale, weight_grad.mul_(scale), None, None, None
