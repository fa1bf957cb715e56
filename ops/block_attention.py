"""Causal attention in blocks of rows, for CPUs: quicker there than PyTorch's flash kernel.

What lies above the diagonal is computed in the blocks on it only, and a block's scores stay in the
cache. Letters as in `gpt.py`. The weights are kept for the backward pass: up to T * T / 2 for each
head and sequence, which no GPU has room for.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.sizes import attention_blocks


def block_attention(q: Tensor, k: Tensor, v: Tensor, *, drop_rate: float) -> Tensor:
    """Attend as `scaled_dot_product_attention(q, k, v, is_causal=True)` does.

    Args:
        q, k, v: (B, H, T, D) each.
        drop_rate: of the weights.

    Returns:
        (B, H, T, D), in the dtype of `q`.
    """
    B, H, T, D = q.shape
    q, k_t, v = q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), v.flatten(0, 1)
    outputs = []
    for start, stop in attention_blocks(T):
        mask = q.new_full((stop - start, stop), -math.inf).triu(start + 1)
        scores = torch.baddbmm(mask, q[:, start:stop], k_t[:, :, :stop], alpha=D**-0.5)
        weights = F.dropout(scores.softmax(dim=-1), drop_rate)  # (B * H, rows, stop)
        outputs.append(torch.bmm(weights, v[:, :stop]))
    return torch.cat(outputs, dim=1).view(B, H, T, D)
