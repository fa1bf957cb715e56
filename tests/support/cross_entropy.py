"""Head and cross-entropy in all forms, on a GPU or (run as a program) on Triton's interpreter."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import torch
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from ops.functional_cross_entropy import HeadOptions, functional_cross_entropy
from ops.fused_cross_entropy import fused_losses_

N, C, CHUNK, RAGGED = 256, 16, 64, 100  # the last one of three ragged chunks has 56
VOCABULARIES = [(5, 5), (257, 384), (4095, 4096), (4096, 4096), (4099, 4224), (50257, 50304)]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOGITS = ["normal", "large", "infinite"]
ROWS = [(vocabulary, dtype, kind) for vocabulary in VOCABULARIES for dtype in DTYPES
        for kind in LOGITS if vocabulary[0] < 50257 or kind == "infinite"]  # many are slow
FUSED = {"fused": HeadOptions(None, 128, fused=True),
         "fused in chunks": HeadOptions(RAGGED, 128, fused=True)}
HEADS = [("fused", "bfloat16", False), ("fused in chunks", "float16", False),
         ("fused in chunks", "bfloat16", True)]  # to compile is slow
FORMS = {"whole": HeadOptions(None, 128), "in chunks": HeadOptions(CHUNK, 128), **FUSED}


def compare_rows(device: str, vocabulary: tuple[int, int], dtype: str, kind: str) -> dict:
    """Compare the kernels' losses and gradients with PyTorch's; return the largest differences."""
    vocab_size, num_columns = vocabulary
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, num_columns, generator=generator)
    targets = torch.tensor([0, 1, 2, vocab_size // 2, vocab_size - 2, vocab_size - 1])
    if kind == "large":
        logits = logits.sign() * 1e4
    elif kind == "infinite":
        hidden = torch.rand(logits.shape, generator=generator) < 0.5
        hidden[3:, : vocab_size // 2] = True  # blocks in which no logit is finite
        logits[hidden.scatter(1, targets[:, None], False)] = -torch.inf
    logits = logits.to(device, DTYPES[dtype]).contiguous()
    targets = targets.to(device)
    exact = logits[:, :vocab_size].double().requires_grad_()
    expected = F.cross_entropy(exact, targets, reduction="none")
    expected.sum().backward()
    untouched = logits.clone()
    alone = fused_losses_(untouched, targets, vocab_size, with_gradients=False)
    found, before = fused_losses_(logits, targets, vocab_size, with_gradients=True), untouched
    return {"loss": ((found - expected).abs() / (1 + expected)).max().item(),
            "gradient": (logits[:, :vocab_size] - exact.grad).abs().max().item(),
            "padding": logits[:, vocab_size:].abs().sum().item(),
            "same without gradients": bool((found == alone).all()),
            "written without gradients": not torch.equal(before, untouched)}


def compare_head(device: str, options: HeadOptions, dtype: str = "bfloat16", *,
                 compiles: bool) -> dict:
    """Compare a form of head and loss with float32; return the relative differences.

    With `compiles`, "buffers" has "(shape) dtype" of each buffer that the compiled forward and
    backward code allocates.
    """
    x, weight, targets = head_inputs(device, dtype=DTYPES[dtype])
    exact = _with_gradients(F.cross_entropy(F.linear(x.float(), weight), targets), x, weight)

    def run(function: Callable = functional_cross_entropy) -> list[Tensor]:
        with torch.autocast(device, DTYPES[dtype]):
            return _with_gradients(function(x, weight, targets, options), x, weight)

    found, buffers = _compiled(run) if compiles else (run(), [])
    assert [tensor.dtype for tensor in found] == [torch.float32, DTYPES[dtype], torch.float32]
    result = {name: ((a.float() - b.float()).norm() / b.float().norm()).item()
              for name, a, b in zip(("loss", "input", "weight"), found, exact, strict=True)}
    return result | {"buffers": buffers}


def head_inputs(device: str, num_tokens: int = N, vocab_size: int = 1009,
                dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, C, generator=generator).to(device, dtype)
    weight = torch.randn(vocab_size, C, generator=generator).to(device)
    targets = torch.randint(vocab_size, (num_tokens,), generator=generator).to(device)
    return x.requires_grad_(), weight.requires_grad_(), targets


def repeated_targets() -> tuple[Tensor, ...]:
    """Return x, weight and targets whose gradients, summed over tokens, are too large for fp16.

    The logits are equal, and most tokens have the first of five targets.
    """
    num_tokens = 2**17
    targets = torch.zeros(num_tokens, dtype=torch.int64)
    targets[::4] = 1
    x = torch.full((num_tokens, 2), 2.0, requires_grad=True)
    return x, torch.zeros(5, 2, requires_grad=True), targets


def repeated_targets_gradient() -> Tensor:
    """Return the gradient of the mean loss over the weight of `repeated_targets`."""
    shares = torch.tensor([0.75, 0.25, 0, 0, 0])
    return (2 * (0.2 - shares))[:, None].expand(5, 2)


def _with_gradients(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    scaled = loss * 8 / 3  # factors of a gradient scaler and of accumulation
    return [loss.detach(), *torch.autograd.grad(scaled, inputs)]


def _compiled(run: Callable) -> tuple[list[Tensor], list[str]]:
    compiled = torch.compile(functional_cross_entropy, fullgraph=True, dynamic=False)
    with (torch._inductor.config.patch(fx_graph_cache=False),  # else there is no code to see
          torch._functorch.config.patch(enable_autograd_cache=False)):
        torch.compiler.reset()
        found, codes = run_and_get_code(run, compiled)
    made = re.findall(r"= empty_strided_\w+\((\(.*?\)), \(.*?\), torch\.(\w+)", "\n".join(codes))
    return found, [f"{shape} {dtype}" for shape, dtype in made]


def main() -> None:
    """Print a JSON object per case, computed by Triton's interpreter on the CPU."""
    for vocabulary, dtype, kind in ROWS:
        result = compare_rows("cpu", vocabulary, dtype, kind)
        print(json.dumps({"case": [*vocabulary, dtype, kind]} | result))
    for name, dtype, compiles in HEADS:
        result = compare_head("cpu", FUSED[name], dtype, compiles=compiles)
        print(json.dumps({"case": [name, dtype, compiles]} | result))


if __name__ == "__main__":
    main()
