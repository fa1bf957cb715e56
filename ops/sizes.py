"""Chunk sizes of the forward pass. Needs no torch."""

from run_config import ModelConfig, TrainConfig

CACHED_LOGITS = 2**23  # per chunk, on a CPU; larger chunks are 10% faster but take GiBs
BLOCK_ROWS = 128  # queries in a block of CPU attention


def head_chunk_tokens(model: ModelConfig, train: TrainConfig, *,
                      is_eager_on_cpu: bool) -> int | None:
    """Return the tokens per chunk of head and loss; None to compute all tokens at once.

    Without `head_chunks`, an eager CPU uses chunks that fit in its cache.
    """
    if train.head_chunks is None:
        return max(1, CACHED_LOGITS // model.vocab_size) if is_eager_on_cpu else None
    if train.head_chunks == 1:
        return None
    return -(-train.microbatch_size * model.context_length // train.head_chunks)


def attention_blocks(context_length: int) -> list[tuple[int, int]]:
    """Split the T queries of attention into blocks; return each as (start, stop)."""
    starts = range(0, context_length, BLOCK_ROWS)
    return [(start, min(start + BLOCK_ROWS, context_length)) for start in starts]
