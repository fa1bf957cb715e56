"""The shapes and rows that `throughput.py` measures."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.throughput_report import CEILING, HUGGING_FACE, ORIGINAL, REFERENCE
from benchmarks.throughput_rows import Row
from lab.plan.setting import GPT2_SMALL, size_name
from run_config import ModelConfig

RUN_STEPS = 40  # of "ours, whole run": four reports of the speed, of which the first is left out
WHOLE_RUN = Row("ours, whole run", "whole run")
MATRIX_PRODUCT = Row(CEILING, "matrix product")


@dataclass(frozen=True)
class Bench:
    """A shape, the rows to compare on it, and how long to train each."""

    title: str
    model: ModelConfig
    rows: tuple[Row, ...]
    global_batch_size: int
    microbatch_size: int
    num_steps: int
    rounds: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the dataset that all rows read; the last one is only a target."""
        steps = max(self.num_steps, RUN_STEPS)
        return steps * self.global_batch_size * self.model.context_length + 1

    def measurements(self) -> list[tuple[Row, int]]:
        """Return every row once per round, in turn, and the first of several again at the end."""
        rounds = [(row, number) for number in range(1, self.rounds + 1) for row in self.rows]
        again = [(self.rows[0], self.rounds + 1)] if len(self.rows) > 1 else []
        return [*rounds, *again]


def benches_of(device: str, rounds: int, *, ladder: bool) -> list[Bench]:
    """Return the shapes of a device; with `ladder` with one change at a time as rows."""
    benches = cpu_benches(rounds) if device == "cpu" else gpu_benches(rounds)
    if ladder:
        rows = CPU_LADDER if device == "cpu" else GPU_LADDER
        return [replace(bench, rows=rows) for bench in benches]
    return benches


def cpu_benches(rounds: int) -> list[Bench]:
    """Return the CPU shapes: GPT-2's vocabulary, where the head dominates, and bytes."""
    rows = (
        Row("ours", "ours"),
        Row("ours, compiled", "ours", {"compile": True}),
        Row(REFERENCE, "ours", {"precision": "fp32"}),
        Row("ours, fp32, compiled", "ours", {"precision": "fp32", "compile": True}),
        Row(HUGGING_FACE, "hugging face", {"precision": "fp32"}),
        Row("Hugging Face in bf16", "hugging face", {"precision": "bf16"}),
        Row(ORIGINAL, "original"),
        Row("ours, 1 thread", "ours", num_threads=1),
        Row("ours, 2 processes", "ours", num_processes=2, num_threads=1),
        WHOLE_RUN,
    )
    shape = {"context_length": 256, "emb_dim": 128, "n_heads": 4, "n_layers": 4, "drop_rate": 0.0,
             "qkv_bias": False}
    return [Bench(f"4 layers, 128 wide, context 256, vocabulary {size:,}",
                  ModelConfig(vocab_size=size, **shape), rows, global_batch_size=16,
                  microbatch_size=8, num_steps=steps, rounds=rounds)
            for size, steps in ((50257, 10), (257, 40))]


def gpu_benches(rounds: int) -> list[Bench]:
    """Return the GPU shape: GPT-2 small, in global batches that 48, 64 and 96 divide."""
    rows = (
        Row("ours", "ours"),
        Row("ours, microbatch 48", "ours", microbatch_size=48),
        Row("ours, microbatch 96", "ours", microbatch_size=96),
        Row(HUGGING_FACE, "hugging face", {"precision": "bf16"}),
        WHOLE_RUN,
        Row(ORIGINAL, "original"),
        Row(REFERENCE, "ours", EAGER | {"precision": "fp32"}),
    )
    return [Bench(size_name(GPT2_SMALL), GPT2_SMALL, rows, global_batch_size=192,
                  microbatch_size=64, num_steps=34, rounds=rounds)]


# One change at a time, from the original to this trainer, and changes that are not defaults.
EAGER = {"compile": False, "residual_dtype": "fp32"}
WITHOUT_BLOCKS = {"attention": "auto"}
CPU_LADDER = (
    Row(ORIGINAL, "original"),
    Row("fused attention, norms and GELU", "plain", {"reads_loss": True}),
    Row("fused AdamW", "plain", {"reads_loss": True, "fused": True}),
    Row("loss not read in every step", "plain", {"fused": True}),
    Row("freed memory kept", "plain", {"fused": True, "keeps_memory": True}),
    Row("gradient norm, skipping, buckets", "ours",
        EAGER | {"precision": "fp32", "head_chunks": 1}),
    Row("bf16", "ours", EAGER | {"precision": "bf16", "head_chunks": 1}, forward=WITHOUT_BLOCKS),
    Row("attention in blocks (CPU only)", "ours", EAGER | {"precision": "bf16", "head_chunks": 1}),
    Row("head and loss in chunks", "ours", EAGER | {"precision": "bf16"}),
    Row("tried: bf16 residual stream", "ours",
        EAGER | {"precision": "bf16", "residual_dtype": "bf16"}),
    Row("tried: compiled, head in one chunk", "ours",
        {"precision": "bf16", "residual_dtype": "fp32", "compile": True}),
    Row("tried: compiled, bf16 residual stream", "ours",
        {"precision": "bf16", "residual_dtype": "bf16", "compile": True}),
)
BF16 = {"precision": "bf16"}
GPU_LADDER = (
    Row(ORIGINAL, "original"),
    Row("bf16, fused attention, norms and GELU", "plain", BF16 | {"reads_loss": True}),
    Row("fused AdamW", "plain", BF16 | {"reads_loss": True, "fused": True}),
    Row("loss not read in every step", "plain", BF16 | {"fused": True}),
    Row("gradient norm, skipping", "ours", EAGER, forward={"head_multiple": 1}),
    Row("head padded", "ours", EAGER),
    Row("bf16 residual stream", "ours", {"compile": False}),
    Row("compiled: ours", "ours"),
    Row("tried: cuDNN attention", "ours", {"attention": "cudnn"}),
    Row("tried: flash attention", "ours", {"attention": "flash"}),
    Row("tried: head in 2 chunks", "ours", {"head_chunks": 2}),
    Row("tried: head in 4 chunks", "ours", {"head_chunks": 4}),
    Row("tried: head in 8 chunks", "ours", {"head_chunks": 8}),
    Row("tried: activation checkpointing", "ours", {"activation_checkpointing": True}),
    Row(REFERENCE, "ours", EAGER | {"precision": "fp32"}),
)
