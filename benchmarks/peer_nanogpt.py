"""nanoGPT's model and optimizer in a minimal loop, as a peer of `throughput.py`.

`--peer "nanoGPT=benchmarks/peer_nanogpt.py FOLDER --precision fp32 --compile"`, where FOLDER is a
copy of its repository. Biases are on and dropout is off, as in the other rows.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import click
import torch

WARM_UP_STEPS = 3


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--precision", type=click.Choice(["fp32", "bf16"]), default="fp32")
@click.option("--compile/--no-compile", "compiles", default=True)
def main(folder: Path, precision: str, compiles: bool) -> None:
    """Train on random tokens, and print the speed of the median step."""
    shape = json.loads(os.environ["THROUGHPUT_SHAPE"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    sys.path.insert(0, str(folder))
    from model import GPT, GPTConfig  # nanoGPT's

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    model = GPT(GPTConfig(
        block_size=shape["context_length"], vocab_size=shape["vocab_size"], dropout=0.0, bias=True,
        n_layer=shape["n_layers"], n_head=shape["n_heads"], n_embd=shape["emb_dim"])).to(device)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), device.type)
    forward = torch.compile(model) if compiles else model
    context = torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()

    size, context_length = shape["microbatch_size"], shape["context_length"]
    num_microbatches = shape["batch_size"] // size
    ids, targets = torch.randint(shape["vocab_size"], (2, num_microbatches, size, context_length),
                                 device=device)
    seconds = []
    for _ in range(shape["num_steps"]):
        began = time.perf_counter()
        for microbatch in zip(ids, targets, strict=True):
            with context:
                _, loss = forward(*microbatch)
            (loss / num_microbatches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    tokens = shape["batch_size"] * context_length
    click.echo(f"{tokens / statistics.median(seconds[WARM_UP_STEPS:]):,.0f} tokens/s")


if __name__ == "__main__":
    main()
