"""Causal attention in blocks of queries: faster on CPUs than PyTorch's flash kernel.

Keys after a block's last query are never multiplied, and a block's scores stay in the cache.
Shapes as in `gpt.py`. Attention weights are kept for the backward pass: up to T * T / 2 per head
and sequence, too many for a GPU's memory.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.sizes import attention_blocks


def block_attention(q: Tensor, k: Tensor, v: Tensor, *, drop_rate: float) -> Tensor:
    """Compute `scaled_dot_product_attention(q, k, v, is_causal=True)`.

    Args:
        q, k, v: (B, H, T, D) each.
        drop_rate: dropout rate of the attention weights.

    Returns:
        (B, H, T, D), in the dtype of `q`.
    """
    B, H, T, D = q.shape
    q, k_t, v = q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), v.flatten(0, 1)
    outputs = []
    for start, stop in attention_blocks(T):
        mask = q.new_full((stop - start, stop), -math.inf).triu(start + 1)
        scores = torch.baddbmm(mask, q[:, start:stop], k_t[:, :, :stop], alpha=D**-0.5)
        weights = F.dropout(scores.softmax(dim=-1), drop_rate)  # (B * H, stop - start, stop)
        outputs.append(torch.bmm(weights, v[:, :stop]))
    return torch.cat(outputs, dim=1).view(B, H, T, D)
