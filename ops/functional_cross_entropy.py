"""Output head and cross-entropy without buffers of its own, for compiled and for fused code.

In compiled code, what is written into a buffer made beforehand must exist in memory: it cannot be
fused with what reads it. Eager code on a CPU is faster with such buffers: `chunked_cross_entropy`.
Shapes as there. Padded columns are masked by their index, since slicing (N, V') would copy it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.chunked_cross_entropy import autocast_dtype, pad_rows, token_sum
from ops.fused_cross_entropy import fused_losses_


@dataclass(frozen=True)
class HeadOptions:
    """How head and loss are computed; the fields are those of `ForwardOptions` in `gpt.py`."""

    chunk_tokens: int | None = None
    multiple: int = 1
    fused: bool = False


def functional_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor,
                             options: HeadOptions) -> Tensor:
    """Compute the mean cross-entropy of `x @ weight.T`, () float32.

    In chunks, and if it is fused, the forward pass computes the gradients too.

    Args:
        x: (N, C), after the final norm.
        weight: (V, C), the output head.
        targets: (N,) int64, each from 0 to V - 1.
    """
    x = x.to(autocast_dtype(x))
    with torch.autocast(x.device.type, enabled=False):
        if options.chunk_tokens is None and not options.fused:
            logits = F.linear(x, pad_rows(weight.to(x.dtype), options.multiple))  # (N, V')
            return _WholeCrossEntropy.apply(logits, targets, len(weight))
        if torch.is_grad_enabled():
            return _ChunkedCrossEntropy.apply(x, weight, targets, options)
        padded = pad_rows(weight.to(x.dtype), options.multiple)  # (V', C)
        losses = [_loss_sum(x_chunk @ padded.T, chunk_targets, len(weight), options.fused)
                  for x_chunk, chunk_targets in _chunks(x, targets, options)]
        return sum(losses) / len(x)


class _WholeCrossEntropy(torch.autograd.Function):
    """The mean loss of logits (N, V'), of which V columns count; keeps the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
        largest, total = _softmax_parts(logits, vocab_size)
        ctx.save_for_backward(logits, targets, largest, total)
        ctx.vocab_size = vocab_size
        return _losses(logits, targets, largest, total).mean()

    @staticmethod
    def backward(ctx: Any, loss_grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, largest, total = ctx.saved_tensors
        scale = loss_grad / len(logits)
        grad = _logit_gradients(logits, targets, largest, total, ctx.vocab_size) * scale
        return grad.to(logits.dtype), None, None


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The mean loss; its forward pass also computes the gradients of the summed loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor,
                options: HeadOptions) -> Tensor:
        padded = pad_rows(weight.to(x.dtype), options.multiple)  # (V', C)
        x_grads, losses = [], []
        weight_grad = torch.zeros_like(padded, dtype=torch.float32)
        for x_chunk, chunk_targets in _chunks(x, targets, options):
            logits = x_chunk @ padded.T  # (n, V')
            grad, loss = _gradients_and_loss_sum(logits, chunk_targets, len(weight), options.fused)
            losses.append(loss)
            x_grads.append(grad @ padded)
            weight_grad += token_sum(grad, x_chunk)
            del logits, grad  # before the next chunk's are allocated
        ctx.save_for_backward(torch.cat(x_grads), weight_grad[: len(weight)])
        return sum(losses) / len(x)

    @staticmethod
    def backward(ctx: Any, loss_grad: Tensor) -> tuple[Tensor | None, ...]:
        x_grad, weight_grad = ctx.saved_tensors
        scale = loss_grad / len(x_grad)
        return x_grad * scale, weight_grad * scale, None, None


def _chunks(x: Tensor, targets: Tensor, options: HeadOptions) -> list[tuple[Tensor, Tensor]]:
    n = options.chunk_tokens or len(x)
    return list(zip(x.split(n), targets.split(n), strict=True))


def _loss_sum(logits: Tensor, targets: Tensor, vocab_size: int, fused: bool) -> Tensor:
    if fused:
        return fused_losses_(logits, targets, vocab_size, with_gradients=False).sum()
    return _losses(logits, targets, *_softmax_parts(logits, vocab_size)).sum()


def _gradients_and_loss_sum(logits: Tensor, targets: Tensor, vocab_size: int,
                            fused: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients of the summed loss, (n, V') in the logits' dtype, and that sum."""
    if fused:
        losses = fused_losses_(logits, targets, vocab_size, with_gradients=True)
        return logits, losses.sum()  # the gradients are where the logits were
    largest, total = _softmax_parts(logits, vocab_size)
    grad = _logit_gradients(logits, targets, largest, total, vocab_size)
    return grad.to(logits.dtype), _losses(logits, targets, largest, total).sum()


def _softmax_parts(logits: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return each row's largest logit m, and its sum of exp(logit - m): (n, 1) float32 each.

    Written out, because inductor knows this form: it reads the logits once.
    """
    logits = _masked(logits, vocab_size)
    largest = logits.amax(1, keepdim=True)
    return largest, (logits - largest).exp().sum(1, keepdim=True)


def _losses(logits: Tensor, targets: Tensor, largest: Tensor, total: Tensor) -> Tensor:
    """Return the loss of each row, (n, 1) float32."""
    return total.log() - (logits.gather(1, targets[:, None]).float() - largest)


def _logit_gradients(logits: Tensor, targets: Tensor, largest: Tensor, total: Tensor,
                     vocab_size: int) -> Tensor:
    """Return the gradients of the losses, (n, V') float32: probabilities, minus 1 at targets."""
    probabilities = (_masked(logits, vocab_size) - largest).exp() / total
    is_target = _columns(logits) == targets[:, None]
    return probabilities - is_target.float()


def _masked(logits: Tensor, vocab_size: int) -> Tensor:
    """Return the logits in float32, with -inf in padded columns."""
    logits = logits.float()
    if logits.shape[1] == vocab_size:
        return logits
    return torch.where(_columns(logits) < vocab_size, logits, -math.inf)


def _columns(logits: Tensor) -> Tensor:
    return torch.arange(logits.shape[1], device=logits.device)  # (V',)
