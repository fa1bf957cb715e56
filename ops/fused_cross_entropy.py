"""Cross-entropy and its gradient as one Triton kernel, which replaces logits by their gradients.

Triton is imported when a kernel is launched: a machine without it can train in other ways.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op


@custom_op("ddp_train::fused_losses_", mutates_args=("logits",))
def fused_losses_(logits: Tensor, targets: Tensor, vocab_size: int, *,
                  with_gradients: bool) -> Tensor:
    """Compute the cross-entropy of each row, (N,) float32; write its gradients over the logits.

    There are no ignored rows: every target counts. A row may have logits of -inf, but not at its
    target. No derivative is registered: call this inside an autograd.Function, on logits that
    nothing reads afterwards.

    Args:
        logits: (N, V') contiguous. With `with_gradients`, each then holds the gradient of its
            row's loss, computed in float32, in the logits' dtype; 0 in columns from V on.
        targets: (N,) int64, each from 0 to V - 1.
        vocab_size: V, at most V'.
    """
    from ops.cross_entropy_kernels import NUM_WARPS, write_losses, write_losses_and_gradients

    assert logits.is_contiguous() and targets.is_contiguous()
    num_rows, num_columns = logits.shape
    losses = logits.new_empty(num_rows, dtype=torch.float32)
    kernel = write_losses_and_gradients if with_gradients else write_losses
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        kernel[(num_rows,)](logits, targets, losses, vocab_size, num_columns, num_warps=NUM_WARPS)
    return losses


@fused_losses_.register_fake
def _fake(logits: Tensor, targets: Tensor, vocab_size: int, *, with_gradients: bool) -> Tensor:
    return logits.new_empty(len(logits), dtype=torch.float32)
