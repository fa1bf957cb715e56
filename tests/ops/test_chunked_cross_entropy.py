from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ops.chunked_cross_entropy import chunked_cross_entropy, token_sum
from tests.support.cross_entropy import repeated_targets, repeated_targets_gradient

N, C, V = 40, 16, 301


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, C, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, C, generator=generator).requires_grad_()
    return x, weight, torch.randint(V, (N,), generator=generator)


def loss_and_gradients(chunk_tokens: int | None, *, precision: torch.dtype | None,
                       x_dtype: torch.dtype = torch.float32,
                       multiple: int = 1) -> tuple[Tensor, ...]:
    x, weight, targets = inputs(x_dtype)
    with torch.autocast("cpu", precision, enabled=precision is not None):
        if chunk_tokens is None:
            loss = F.cross_entropy(F.linear(x, weight).float(), targets)
        else:
            loss = chunked_cross_entropy(x, weight, targets, chunk_tokens=chunk_tokens,
                                         multiple=multiple)
    (loss * 8 / 3).backward()  # factors of a gradient scaler and of accumulation
    assert loss.dtype == weight.grad.dtype == torch.float32 and x.grad.dtype == x_dtype
    return loss.detach(), x.grad.float(), weight.grad


@pytest.mark.parametrize(("chunk_tokens", "multiple"), [
    (1, 1), (7, 64), (20, 1), (N, 64), (N + 1, 1)])
@pytest.mark.parametrize(("precision", "x_dtype", "tolerance"), [
    (None, torch.float32, 1e-6),
    (torch.bfloat16, torch.float32, 2e-2),
    (torch.bfloat16, torch.bfloat16, 2e-2),
    (torch.float16, torch.float32, 2e-3),
])
def test_chunks_have_the_loss_and_gradients_of_the_whole(
    chunk_tokens: int, multiple: int, precision: torch.dtype | None, x_dtype: torch.dtype,
    tolerance: float
) -> None:
    whole = loss_and_gradients(None, precision=None, x_dtype=torch.float32)
    chunked = loss_and_gradients(chunk_tokens, precision=precision, x_dtype=x_dtype,
                                 multiple=multiple)
    for found, wanted in zip(chunked, whole, strict=True):
        assert (found - wanted).norm() <= tolerance * wanted.norm()


def test_sums_over_many_tokens_do_not_overflow_in_fp16() -> None:
    x, weight, targets = repeated_targets()
    with torch.autocast("cpu", torch.float16):
        loss = chunked_cross_entropy(x, weight, targets, chunk_tokens=len(x))
    loss.backward()
    torch.testing.assert_close(weight.grad, repeated_targets_gradient(), rtol=2e-3, atol=0)


def test_gpus_sum_fp16_over_tokens_in_float32() -> None:
    """On the device without memory, which has the operators of GPUs."""
    for dtype, wanted in ((torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)):
        grad, x = (torch.empty(6, n, dtype=dtype, device="meta") for n in (5, 4))
        assert token_sum(grad, x).dtype == wanted and token_sum(grad, x).shape == (5, 4)


def test_the_loss_is_float32_in_low_precision() -> None:
    exact = loss_and_gradients(None, precision=None)[0]
    found = loss_and_gradients(9, precision=torch.bfloat16)[0]
    assert found != found.bfloat16()  # not rounded to two digits
    assert abs(found - exact) < 2e-3 * exact


def test_without_gradients_the_loss_is_the_same() -> None:
    x, weight, targets = inputs()
    with torch.no_grad():
        found = chunked_cross_entropy(x, weight, targets, chunk_tokens=9)
    assert found == loss_and_gradients(9, precision=None)[0]


def test_an_impossible_target_has_a_finite_loss() -> None:
    x, weight = torch.full((1, C), 10.0), torch.zeros(V, C)
    weight[1] = 10.0
    loss = chunked_cross_entropy(x, weight, torch.tensor([0]), chunk_tokens=1)
    assert loss == 10.0 * 10.0 * C


def test_no_tensor_has_the_logits_of_all_tokens() -> None:
    sizes = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **kwargs or {})
            for tensor in result if isinstance(result, tuple | list) else [result]:
                if isinstance(tensor, Tensor):
                    sizes.append(tensor.numel())
            return result

    x, weight, targets = inputs()
    with Recorder():
        chunked_cross_entropy(x, weight, targets, chunk_tokens=10).backward()
    assert max(sizes) == V * C  # the head itself; a chunk has 10 * V


@pytest.mark.parametrize("trains", [True, False])
def test_every_matrix_product_has_the_padded_head(trains: bool) -> None:
    seen = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.name().startswith("aten::mm"):
                seen.append(sorted({*args[0].shape, *args[1].shape} - {10, C}))
            return function(*args, **kwargs or {})

    x, weight, targets = inputs()
    with Recorder(), torch.set_grad_enabled(trains):
        chunked_cross_entropy(x, weight, targets, chunk_tokens=10, multiple=64)
    assert seen == [[320]] * (12 if trains else 4)
