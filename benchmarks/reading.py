"""Read one token file of 20 GiB in eight processes: `uv run python benchmarks/reading.py`.

The file is sparse and, like those of the original system, has no metadata. Prints the seconds from
opening it to the first microbatch, and the growth of a process's private memory over 200
microbatches from all parts of the file; then the seconds that checking the ids of a microbatch of
12 x 1,024 tokens takes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import struct
import sys
import tempfile
import time
from pathlib import Path

PROJECT_DIR = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT_DIR))

GIB = 2**30


def write_sparse_token_file(path: Path, num_tokens: int) -> None:
    """Write a token file of zeros that takes no disk space."""
    header = json.dumps({"tokens": {"dtype": "U16", "shape": [num_tokens],
                                    "data_offsets": [0, 2 * num_tokens]}}).encode()
    header = header.ljust(-(-len(header) // 8) * 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 8 + len(header) + 2 * num_tokens)


def private_bytes() -> int:
    """Return the anonymous memory of this process, in bytes: not shared, and not of a file."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"^Anonymous:\s+(\d+)", text, re.MULTILINE)[1]) * 1024


def read(path: Path, rank: int, results) -> None:
    """Read microbatches as training does, in one of the processes."""
    import torch

    from tokens.batches import read_ahead
    from tokens.token_file import TokenFile

    before, started = private_bytes(), time.perf_counter()
    data = microbatches(TokenFile(path))
    seconds = None
    for _ in read_ahead(data, range(rank, len(data), len(data) // 200),
                      device=torch.device("cpu")):
        seconds = seconds or time.perf_counter() - started
    results.put((seconds, private_bytes() - before))


def microbatches(token_file):
    from tokens.batch_plan import BatchPlan
    from tokens.batches import Microbatches

    plan = BatchPlan(microbatch_size=12, gradient_accumulation_steps=1, world_size=8,
                     context_length=1024, num_steps=1)
    return Microbatches(token_file, plan, start_token=0, vocab_size=50257)


def read_with(num_processes: int, path: Path) -> list[tuple[float, int]]:
    """Return each process's seconds to its first microbatch and its memory growth in bytes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tokens.batches"])  # imports torch once, before the timing
    results = context.SimpleQueue()
    processes = [context.Process(target=read, args=(path, rank, results))
                 for rank in range(num_processes)]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join()
    return found


def main() -> None:
    from tokens.batches import check_token_ids
    from tokens.token_file import TokenFile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.safetensors"
        write_sparse_token_file(path, 20 * GIB // 2)
        found = read_with(8, path)
        print(f"first microbatch after {max(seconds for seconds, _ in found):.2f} s,"
              f" private memory grew by {max(growth for _, growth in found) / 2**20:.0f} MiB")
        data = microbatches(TokenFile(path))
        tokens, started = data[0].numpy(), time.perf_counter()
        for _ in range(10_000):
            check_token_ids(tokens, path, first=0, vocab_size=data.vocab_size)
        print(f"checked a microbatch in {(time.perf_counter() - started) * 100:.1f} us")


if __name__ == "__main__":
    main()
