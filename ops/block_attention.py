"""Causal attention in blocks of queries: the whole T x T logits never exist.

Keys after a block's last query are never multiplied, and a block's logits stay in a CPU's cache:
there this is faster than PyTorch's flash kernel. Shapes as in `gpt.py`.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_ROWS = 128  # queries in a block


def block_attention(q: Tensor, k: Tensor, v: Tensor, *, drop_rate: float) -> Tensor:
    """Compute `scaled_dot_product_attention(q, k, v, is_causal=True)`, all (B, H, T, D).

    Attention weights are kept for the backward pass: up to T * T / 2 per head and sequence, too
    many for a GPU's memory. `drop_rate` is theirs.
    """
    v, outputs = v.flatten(0, 1), []
    for logits in causal_logits(q, k):
        weights = F.dropout(logits.softmax(dim=-1), drop_rate)  # (B * H, n, stop)
        outputs.append(torch.bmm(weights, v[:, : logits.shape[2]]))
    return torch.cat(outputs, dim=1).view(q.shape)


def attention_blocks(context_length: int) -> list[tuple[int, int]]:
    """Split the T queries of attention into blocks; return each as (start, stop)."""
    starts = range(0, context_length, BLOCK_ROWS)
    return [(start, min(start + BLOCK_ROWS, context_length)) for start in starts]


def causal_logits(q: Tensor, k: Tensor) -> Iterator[Tensor]:
    """Yield the logits of each block of n queries and the keys up to its last one.

    They are (B * H, n, stop), and -inf where a key comes after its query.
    """
    B, H, T, D = q.shape
    q, k_t = q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)
    for start, stop in attention_blocks(T):
        mask = q.new_full((stop - start, stop), -math.inf).triu(start + 1)
        yield torch.baddbmm(mask, q[:, start:stop], k_t[:, :, :stop], alpha=D**-0.5)
