from __future__ import annotations

import pytest
import torch

from gpt import ForwardOptions, GPTModel
from ops.chunked_cross_entropy import autocast_dtype
from ops.functional_cross_entropy import HeadOptions, functional_cross_entropy
from run_config import ModelConfig
from tests.support.cross_entropy import (
    CHUNK,
    FORMS,
    N,
    compare_head,
    head_inputs,
    repeated_targets,
    repeated_targets_gradient,
)
from tests.support.workplace import TINY_MODEL

OURS = {name: options for name, options in FORMS.items() if not options.fused}


@pytest.mark.parametrize("options", [*OURS.values(), HeadOptions(), HeadOptions(100)])
def test_value_and_gradients_are_those_of_float32(options: HeadOptions) -> None:
    assert_exact(compare_head("cpu", options, compiles=False))


def assert_exact(found: dict) -> None:
    assert found["loss"] < 1e-3 and max(found["input"], found["weight"]) < 0.015


@pytest.mark.thorough
def test_whole_compiled_code_keeps_the_logits_in_low_precision_only() -> None:
    found = compare_head("cpu", FORMS["whole"], compiles=True)
    assert_exact(found)
    float32 = [name for name in found["buffers"] if name.endswith("float32")]
    # Largest logits and sums. The backward pass has no third one, the sums of one-hot targets.
    assert [name for name in float32 if name.startswith(f"({N}, ")] == [f"({N}, 1) float32"] * 2
    assert found["buffers"].count(f"({N}, 1024) bfloat16") == 1


def test_compiled_code_in_chunks_uses_two_buffers_in_turn() -> None:
    found = compare_head("cpu", FORMS["in chunks"], compiles=True)
    assert_exact(found)
    sizes = [name for name in found["buffers"] if name.startswith((f"({N}, 10", f"({CHUNK}, 10"))]
    assert sizes == [f"({CHUNK}, 1024) bfloat16"] * 2


@pytest.mark.parametrize("options", OURS.values(), ids=OURS)
def test_large_logits_are_exact(options: HeadOptions) -> None:
    x, weight, targets = (tensor.detach() for tensor in head_inputs("cpu"))
    x, weight = (x.float() * 100).requires_grad_(), (weight * 100).requires_grad_()
    loss = functional_cross_entropy(x, weight, targets, options)
    expected = torch.nn.functional.cross_entropy((x @ weight.T).double(), targets)
    grads, wanted = (torch.autograd.grad(value, (x, weight)) for value in (loss, expected))
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(functional_cross_entropy(x, weight, targets, options), loss)


@pytest.mark.parametrize("options", [HeadOptions(), HeadOptions(2**17)])
def test_sums_over_many_tokens_do_not_overflow_in_fp16(options: HeadOptions) -> None:
    x, weight, targets = repeated_targets()
    with torch.autocast("cpu", torch.float16):
        loss = functional_cross_entropy(x, weight, targets, options)
    (loss * 2**14).backward()  # as a gradient scaler does; in the whole form, else they vanish
    torch.testing.assert_close(weight.grad / 2**14, repeated_targets_gradient(),
                               rtol=2e-3, atol=0)


@pytest.mark.parametrize("chunk_tokens", [None, 7])
def test_only_compiled_code_has_the_functional_form(
    monkeypatch: pytest.MonkeyPatch, chunk_tokens: int | None
) -> None:
    """Eager code keeps its numbers to the last bit."""
    calls = []

    def record(x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
        calls.append(autocast_dtype(x))
        return (x @ weight.T).sum()

    monkeypatch.setattr("gpt.functional_cross_entropy", record)
    config = ModelConfig(**TINY_MODEL)
    model = GPTModel(config, ForwardOptions(head_chunk_tokens=chunk_tokens))
    x, targets = torch.ones(2, 8, 16), torch.zeros(2, 8, dtype=torch.int64)
    model.loss(x, targets)
    assert not calls
    torch.compile(GPTModel.loss, backend="eager")(model, x, targets)
    assert calls
    model.use(ForwardOptions(head_chunk_tokens=chunk_tokens, fused_cross_entropy=True))
    calls.clear()
    model.loss(x, targets)
    assert calls
