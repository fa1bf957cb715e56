"""nanoGPT's model and optimizer in a minimal loop, as a peer of `throughput.py`.

`--peer "nanoGPT=benchmarks/peer_nanogpt.py FOLDER --precision bf16 --compile"`, where FOLDER is a
copy of its repository. Biases are on and dropout is off, as in the other rows. Its vocabulary is
the 50,304 that it has by default for GPT-2's tokenizer, and its head is tied to its embedding.
Microbatches come from pinned memory, without waiting, as its own training loop copies them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import click
import torch

from benchmarks.throughput_blocks import time_steps
from benchmarks.throughput_tokens import as_in_a_plain_loop
from processes.launch import Process
from tokens.batch_plan import BatchPlan

GPT2_VOCABULARY = 50257


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--precision", type=click.Choice(["fp32", "bf16"]), default="fp32")
@click.option("--compile/--no-compile", "compiles", default=True)
def main(folder: Path, precision: str, compiles: bool) -> None:
    """Train on the benchmark's tokens, and print the speed as JSON."""
    shape = json.loads(os.environ["THROUGHPUT_SHAPE"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    sys.path.insert(0, str(folder))
    from model import GPT, GPTConfig  # nanoGPT's

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    default = GPTConfig().vocab_size
    vocab_size = default if shape["vocab_size"] == GPT2_VOCABULARY else shape["vocab_size"]
    began = time.perf_counter()
    model = GPT(GPTConfig(
        block_size=shape["context_length"], vocab_size=vocab_size, dropout=0.0, bias=True,
        n_layer=shape["n_layers"], n_head=shape["n_heads"], n_embd=shape["emb_dim"])).to(device)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), device.type)
    forward = torch.compile(model) if compiles else model
    context = torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()

    size = shape["microbatch_size"]
    plan = BatchPlan(size, shape["batch_size"] // size, 1, shape["context_length"],
                     shape["num_steps"])
    microbatches = as_in_a_plain_loop(Path(shape["tokens_path"]), plan, Process(0, 0, 1, device),
                                      pins=True)

    def step() -> None:
        for _ in range(plan.gradient_accumulation_steps):
            _, ids, targets = next(microbatches)
            with context:
                _, loss = forward(ids, targets)
            (loss / plan.gradient_accumulation_steps).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    built_seconds = time.perf_counter() - began
    timed = time_steps(step, plan.num_steps, torch.cuda.synchronize if on_gpu else lambda: None)
    compiling = built_seconds + timed.seconds_to_first - timed.step_seconds
    click.echo(json.dumps(timed.speeds(plan.tokens_per_step) | {
        "precision": precision, "is_compiled": compiles, "microbatch_size": size,
        "compile_seconds": compiling if compiles else 0.0,
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if on_gpu else None}))


if __name__ == "__main__":
    main()
