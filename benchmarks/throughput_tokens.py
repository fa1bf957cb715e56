"""The tokens that the systems of `throughput.py` train on, and how they come to the device.

Ids follow Zipf's law over the whole vocabulary, as words do: the cost of an embedding's gradient
depends on how often ids repeat. A model learns their frequencies within a few steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from ddp_train import microbatch_indices
from preparation.token_file_writer import TokenFileWriter
from processes.launch import Process
from run_config import ModelConfig
from tokens.batch_plan import BatchPlan
from tokens.batches import Microbatch, Microbatches, read_ahead
from tokens.token_file import TokenFile

SEED = 0


def zipf_tokens(num_tokens: int, vocab_size: int) -> np.ndarray:
    """Draw ids, (num_tokens,) uint16, each of them with a probability of about 1 / (id + 1).

    More tokens begin with the same ones.
    """
    cumulated = np.cumsum(1 / np.arange(1, vocab_size + 1))
    draws = np.random.default_rng(SEED).random(num_tokens) * cumulated[-1]
    return np.searchsorted(cumulated, draws).clip(max=vocab_size - 1).astype(np.uint16)


def write_token_files(dataset_dir: Path, model: ModelConfig, num_tokens: int) -> Path:
    """Write a dataset of such tokens; return the path of its training split."""
    dataset_dir.mkdir(parents=True, exist_ok=True)
    tokens = zipf_tokens(num_tokens, model.vocab_size)
    for split, length in (("train", num_tokens), ("validation", model.context_length + 1)):
        writer = TokenFileWriter(dataset_dir / f"{split}.safetensors")
        writer.add(tokens[:length])
        writer.finish({"max_token_id": str(tokens[:length].max())})
    return dataset_dir / "train.safetensors"


def as_in_a_run(tokens_path: Path, plan: BatchPlan, vocab_size: int,
                process: Process) -> Iterator[Microbatch]:
    """Yield a process's microbatches as `ddp_train.py` reads them: uint16, pinned, in advance."""
    data = Microbatches(TokenFile(tokens_path), plan, start_token=0, vocab_size=vocab_size)
    return read_ahead(data, microbatch_indices(plan, process.rank, first_step=0),
                    device=process.device)


def as_in_a_plain_loop(tokens_path: Path, plan: BatchPlan, process: Process, *,
                       pins: bool) -> Iterator[Microbatch]:
    """Yield a process's microbatches, widened to int64 on the host and copied to the device.

    Args:
        pins: copy from pinned memory without waiting, as nanoGPT does.
    """
    file, pins = TokenFile(tokens_path), pins and process.device.type == "cuda"
    for index in microbatch_indices(plan, process.rank, first_step=0):
        first = index * plan.tokens_per_microbatch
        flat = file.read(first, first + plan.tokens_per_microbatch + 1).astype(np.int64)
        pair = [torch.from_numpy(part).view(-1, plan.context_length)
                for part in (flat[:-1], flat[1:])]
        yield Microbatch(index, *((part.pin_memory() if pins else part).to(
            process.device, non_blocking=pins) for part in pair))
