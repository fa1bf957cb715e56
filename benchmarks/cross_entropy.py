"""Head and cross-entropy in every form: `uv run python -m benchmarks.cross_entropy`.

Forward and backward pass of an output head and the loss, in bfloat16 from the normalised residual
stream to the gradients of that and of the head's float32 weight. The forms take turns; medians of
all rounds, and the peak memory that a form adds on a GPU. A form that fails is a row that says why.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from ops.linear_cross_entropy import linear_cross_entropy, pad_rows
from trainer.compilation import HEAD_MULTIPLE

Form = Callable[[Tensor, Tensor, Tensor], Tensor]
compiled = partial(torch.compile, dynamic=False, fullgraph=True)


def main() -> None:
    on_gpu, parser = torch.cuda.is_available(), argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=65_536 if on_gpu else 256)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=50_257)
    parser.add_argument("--rounds", type=int, default=20 if on_gpu else 3)
    parser.add_argument("--forms", nargs="*", metavar="NAME", help="only these")
    parser.add_argument("--output", type=Path, help="append a JSON line for each time measured")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # forms share code objects
    inputs = random_inputs(options, torch.device("cuda" if on_gpu else "cpu"))
    rows = measure(forms(options.tokens, options.forms), inputs, options)
    print(f"{torch.cuda.get_device_name() if on_gpu else 'CPU'}, PyTorch {torch.__version__},"
          f" {options.tokens:,} tokens\n")
    print(tabulate(rows, headers="keys", tablefmt="github"))


def measure(makers: dict[str, Callable[[], Form]], inputs: tuple[Tensor, ...],
            options: argparse.Namespace) -> list[dict]:
    """Time all forms in turn; return a row for each. Every time goes to the output at once."""
    steps, rows = {}, []
    for name, make in makers.items():
        row = {"form": name, "ms": None}
        try:
            steps[name] = prepare(make(), inputs, row)
        except Exception as error:  # other packages raise errors of any type
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
            write(row, options.output)
        rows.append(row)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(options.rounds):
        for name in list(steps)[:: 1 if number % 2 else -1]:
            seconds[name].append(steps[name]())
            row = {"form": name, "round": number, "ms": seconds[name][-1] * 1e3}
            write(row | {"tokens": options.tokens}, options.output)
    for row in (row for row in rows if row["form"] in seconds):
        row["ms"] = statistics.median(seconds[row["form"]]) * 1e3
        write(row, options.output)
    return rows


def forms(num_tokens: int, names: list[str] | None) -> dict[str, Callable[[], Form]]:
    """Return functions that build the named forms, or all, so that each can fail for itself."""
    result = {"whole, eager": lambda: whole, "whole, compiled": lambda: compiled(whole),
              "ours whole, compiled": lambda: compiled(ours(None))}
    for chunks in (2, 4, 8):
        n = -(-num_tokens // chunks)
        result[f"{chunks} chunks, eager"] = lambda n=n: ours(n)
        result[f"{chunks} chunks, compiled"] = lambda n=n: compiled(ours(n))
    result |= {"PyTorch's linear_cross_entropy, compiled": linear, "Liger": liger}
    return {name: result[name] for name in names or result}


def whole(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Compute the loss as eager code does without chunks."""
    logits = F.linear(x, pad_rows(weight, HEAD_MULTIPLE))[:, : len(weight)]
    return F.cross_entropy(logits.float(), targets)


def ours(chunk_tokens: int | None) -> Form:
    return partial(linear_cross_entropy, chunk_tokens=chunk_tokens, multiple=HEAD_MULTIPLE)


def linear() -> Form:
    function = F.linear_cross_entropy  # PyTorch 2.13 and later
    return compiled(lambda x, weight, targets: function(x, weight.to(x.dtype), targets).float())


def liger() -> Form:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    return lambda x, weight, targets: loss(weight.to(x.dtype), x, targets)


def random_inputs(options: argparse.Namespace, device: torch.device) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    N, C, V = options.tokens, options.width, options.vocabulary
    x = torch.randn(N, C, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(V, C, device=device).mul_(0.02).requires_grad_()
    return x, weight, torch.randint(V, (N,), device=device)


def prepare(form: Form, inputs: tuple[Tensor, ...], row: dict) -> Callable[[], float]:
    """Run a form three times, for its peak and loss; return a function that times it."""
    (x, weight, _), on_gpu = inputs, inputs[0].is_cuda

    def step() -> float:
        began = time.perf_counter()
        with torch.autocast(x.device.type, torch.bfloat16):
            loss = form(*inputs)
        torch.autograd.grad(loss, (x, weight))
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        row.setdefault("loss", round(loss.item(), 5))
        return seconds

    step(), step()
    if on_gpu:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        row["peak MiB"] = round((torch.cuda.max_memory_allocated() - before) / 2**20)
    return step


def write(row: dict, output: Path | None) -> None:
    if output:
        with output.open("a") as file:
            file.write(json.dumps(row | {"pytorch": torch.__version__}) + "\n")


if __name__ == "__main__":
    main()
