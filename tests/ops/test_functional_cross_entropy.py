from __future__ import annotations

import pytest
import torch

from gpt import ForwardOptions, GPTModel
from ops.chunked_cross_entropy import autocast_dtype, chunked_cross_entropy
from ops.functional_cross_entropy import HeadOptions, functional_cross_entropy
from run_config import ModelConfig
from tests.support.cross_entropy import FORMS, compare_head, compiled_buffers, head_inputs
from tests.support.workplace import TINY_MODEL

OURS = {name: options for name, options in FORMS.items() if not options.fused}
N, V = 2048, 1024  # tokens and padded vocabulary of `compiled_buffers`


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("multiple", [1, 128])
def test_value_and_gradients_are_those_of_float32(name: str, multiple: int) -> None:
    options = HeadOptions(OURS[name].chunk_tokens, multiple)
    differences = compare_head("cpu", options, compiles=False)
    assert differences["loss"] < 1e-3
    assert max(differences["input"], differences["weight"]) < 0.015


@pytest.mark.parametrize("name", OURS)
def test_compiled_code_has_the_values_of_eager_code(name: str) -> None:
    eager, compiled = (compare_head("cpu", OURS[name], compiles) for compiles in (False, True))
    assert compiled == pytest.approx(eager, rel=0.1)


@pytest.mark.parametrize("options", OURS.values(), ids=OURS)
def test_large_and_impossible_logits_are_exact(options: HeadOptions) -> None:
    x, weight, targets = (tensor.detach() for tensor in head_inputs("cpu"))
    x, weight = (x.float() * 100).requires_grad_(), (weight * 100).requires_grad_()
    loss = functional_cross_entropy(x, weight, targets, options)
    expected = torch.nn.functional.cross_entropy((x @ weight.T).double(), targets)
    grads, wanted = (torch.autograd.grad(value, (x, weight)) for value in (loss, expected))
    torch.testing.assert_close(loss.double(), expected)
    torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(functional_cross_entropy(x, weight, targets, options), loss)


def test_compiled_code_keeps_no_float32_logits() -> None:
    """Nor the row sums of the one-hot targets, which a backward pass of log_softmax computes."""
    whole = compiled_buffers(functional_cross_entropy, HeadOptions(None, 128))
    assert f"({N}, {V}) bfloat16" in whole
    assert [name for name in whole if "float32" in name and f"({N}, 1" in name] == [
        f"({N}, 1) float32"] * 2  # of the forward pass: largest logits, and sums
    chunked = compiled_buffers(functional_cross_entropy, HeadOptions(512, 128))
    assert not [name for name in whole + chunked if name.startswith((f"({N}, {V}) f", "(512, 10"))
                and name.endswith("float32")]
    assert chunked.count(f"(512, {V}) bfloat16") <= 2  # which all chunks use in turn
    assert f"({N}, {V}) bfloat16" not in chunked


def test_the_eager_form_would_keep_float32_logits_if_it_were_compiled() -> None:
    def chunked(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return chunked_cross_entropy(x, weight, targets, chunk_tokens=512, multiple=128)

    assert "(512, 1009) float32" in compiled_buffers(chunked)


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
