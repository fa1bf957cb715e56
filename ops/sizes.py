"""Sizes of the pieces in which the forward pass computes. Needs no torch."""

from __future__ import annotations

from run_config import ModelConfig, TrainConfig

CACHED_LOGITS = 2**23  # of one piece, on a CPU: larger ones are a tenth quicker, for memory of GiBs
BLOCK_ROWS = 128  # of attention's scores, on a CPU


def head_chunk_tokens(model: ModelConfig, train: TrainConfig, *,
                      is_eager_on_cpu: bool) -> int | None:
    """Give the tokens of a piece in which head and loss are computed; None for all in one.

    `head_chunks` says so; where it does not, an eager CPU takes as many as stay in its cache.
    """
    if train.head_chunks is None:
        return max(1, CACHED_LOGITS // model.vocab_size) if is_eager_on_cpu else None
    if train.head_chunks == 1:
        return None
    return -(-train.microbatch_size * model.context_length // train.head_chunks)


def attention_blocks(context_length: int) -> list[tuple[int, int]]:
    """Cut the rows of attention's scores into blocks: the first row of each, and the one behind."""
    starts = range(0, context_length, BLOCK_ROWS)
    return [(start, min(start + BLOCK_ROWS, context_length)) for start in starts]
