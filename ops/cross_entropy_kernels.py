"""Triton kernels of `fused_cross_entropy`, which imports this file where it launches them.

One program computes one row of the logits (N, V'), of which V columns count.

Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", algorithm 3.
"""

from __future__ import annotations

import triton
import triton.language as tl

NUM_WARPS = 8
BLOCK = tl.constexpr(4096)  # columns that a program reads at a time


@triton.jit
def write_losses(logits, targets, losses,
                 vocab_size: tl.constexpr, num_columns: tl.constexpr):
    """Write each row's loss; vocab_size is V, num_columns V'."""
    row = tl.program_id(0).to(tl.int64)  # N * V' can exceed int32
    logits += row * num_columns
    target_logit = tl.load(logits + tl.load(targets + row)).to(tl.float32)
    largest, total = softmax_parts(logits, target_logit, vocab_size, num_columns)
    tl.store(losses + row, tl.log(total) - (target_logit - largest))


@triton.jit
def write_losses_and_gradients(logits, targets, losses,
                               vocab_size: tl.constexpr, num_columns: tl.constexpr):
    """Write each row's loss, and the loss's gradients over the logits."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * num_columns
    target = tl.load(targets + row)
    target_logit = tl.load(logits + target).to(tl.float32)
    largest, total = softmax_parts(logits, target_logit, vocab_size, num_columns)
    tl.store(losses + row, tl.log(total) - (target_logit - largest))
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        grad = tl.exp(load(logits, columns, vocab_size, num_columns) - largest) / total
        grad = tl.where(columns == target, grad - 1.0, grad)
        tl.store(logits + columns, grad, mask=columns < num_columns)


@triton.jit
def softmax_parts(logits, target_logit,
                  vocab_size: tl.constexpr, num_columns: tl.constexpr):
    """Return a row's largest logit, and its sum of exp(logit - largest)."""
    largest = target_logit  # finite, even where a whole block is -inf
    total = 0.0
    for start in range(0, vocab_size, BLOCK):
        values = load(logits, start + tl.arange(0, BLOCK), vocab_size, num_columns)
        larger = tl.maximum(largest, tl.max(values, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(values - larger), 0)
        largest = larger
    return largest, total


@triton.jit
def load(logits, columns,
         vocab_size: tl.constexpr, num_columns: tl.constexpr):
    """Load a block in float32, with -inf in padded columns.

    A mask by V would make the loads narrow: V need not be a multiple of their width, V' is.
    """
    values = tl.load(logits + columns, mask=columns < num_columns, other=0.0).to(tl.float32)
    return tl.where(columns < vocab_size, values, -float("inf"))
