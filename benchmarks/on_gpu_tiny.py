"""`throughput.py` with a tiny shape, for the dry run of `on_gpu.py` on a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

from benchmarks import throughput
from benchmarks.throughput import cpu_benches
from run_config import ModelConfig

MODEL = ModelConfig(vocab_size=257, context_length=16, emb_dim=16, n_heads=2, n_layers=2,
                    drop_rate=0.0, qkv_bias=False)
STEPS = 120  # in fewer, the loss falls too little for curves to be compared


def tiny_benches(*arguments: Any) -> list[throughput.Bench]:
    """Return the first shape for CPUs with its rows, made tiny."""
    return [replace(cpu_benches(*arguments)[0], title="tiny", model=MODEL, global_batch_size=4,
                    microbatch_size=2, num_steps=STEPS)]


def main() -> None:
    with patch.object(throughput, "cpu_benches", tiny_benches):
        throughput.main()


if __name__ == "__main__":
    main()
