from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt import GPTModel
from run_config import ModelConfig
from tests.support.workplace import TINY_MODEL
from trainer import layer_statistics
from trainer.layer_statistics import Statistics, attention_statistics, forward_statistics

V, T = 257, 16


@pytest.fixture
def model() -> GPTModel:
    torch.manual_seed(0)
    model = GPTModel(ModelConfig(**TINY_MODEL | {"n_layers": 3}))
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight.mul_(20)  # attention that is far from uniform
    return model


@pytest.fixture
def tokens() -> tuple[Tensor, Tensor]:
    token_ids, targets = torch.randint(V, (2, 1, T), generator=torch.Generator().manual_seed(1))
    return token_ids, targets


def direct_attention(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit and the mean entropy of causal attention, from all logits at once."""
    logits = q.double() @ k.double().transpose(-1, -2) / math.sqrt(q.shape[-1])
    allowed = torch.ones(logits.shape[-2:]).tril().bool()
    weights = logits.masked_fill(~allowed, -math.inf).softmax(dim=-1)
    entropy = -(weights * weights.clamp_min(1e-300).log()).sum(dim=-1).mean()
    return logits[..., allowed].max().float(), entropy.float()


def test_attention_in_blocks_is_that_of_all_logits() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k = torch.randn(2, 2, 3, 300, 8, generator=generator)  # two whole blocks, and a part
    q[0, 0, 0], k[0, 0, 299] = 9.0, 9.0  # a query before its key: masked
    found = attention_statistics(q, k)
    torch.testing.assert_close(found, direct_attention(q, k))
    assert found[0] < 9 * 9 * 8**0.5


def test_uniform_attention_has_the_entropy_of_a_choice_among_the_tokens_before() -> None:
    _, entropy = attention_statistics(torch.zeros(1, 1, 4, 8), torch.randn(1, 1, 4, 8))
    assert entropy.item() == pytest.approx(math.log(1 * 2 * 3 * 4) / 4)


def test_every_layer_is_measured_without_dropout(model: GPTModel, tokens) -> None:
    found = forward_statistics(model, *tokens)
    assert all(module.training for module in model.modules())
    seen: dict[str, list[Tensor]] = {"block": [], "input": [], "attention": []}
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, output: seen["block"].append(output))
        block.attention.register_forward_hook(lambda module, inputs, _: seen["attention"].append(
            torch.stack(direct_attention(*module.project(inputs[0])[:2]))))
    model.eval()
    with torch.no_grad():
        model(tokens[0])
        embedded = model.token_embedding(tokens[0]) + model.position_embedding.weight
    largest, entropies = torch.stack(seen["attention"]).unbind(1)
    torch.testing.assert_close(found["embedding_activation_norm"], embedded.norm(dim=-1).mean())
    torch.testing.assert_close(found["layer_activation_norm"], torch.stack(
        [output.norm(dim=-1).mean() for output in seen["block"]]))
    torch.testing.assert_close(found["layer_max_attention_logit"], largest)
    torch.testing.assert_close(found["layer_attention_entropy"], entropies)


def ranked(found: Statistics, name: str) -> list[float]:
    return [found[f"{name}_{part}"].item() for part in ("p1", "p50", "p99", "max")]


@pytest.mark.parametrize("cached_logits", [2**23, 5 * V])
def test_logits_and_losses_are_ranked(model: GPTModel, tokens, cached_logits: int,
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_statistics, "CACHED_LOGITS", cached_logits)
    found = forward_statistics(model, *tokens)
    with torch.no_grad():
        logits = model.eval()(tokens[0])[0]
    losses = F.cross_entropy(logits, tokens[1][0], reduction="none").sort().values.tolist()
    ordered = logits.flatten().sort().values.tolist()
    assert ranked(found, "token_loss") == pytest.approx(
        [losses[0], losses[8], losses[15], losses[15]])
    n = T * V - 1
    assert ranked(found, "logit") == pytest.approx(
        [ordered[round(0.01 * n)], ordered[round(0.5 * n)], ordered[round(0.99 * n)], ordered[-1]])


def test_of_many_logits_those_of_some_tokens_are_ranked(
    model: GPTModel, tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_statistics, "MAX_SORTED", 4 * V)
    found = forward_statistics(model, *tokens)
    with torch.no_grad():
        logits = model.eval()(tokens[0])[0]
    median = logits[::4].flatten().sort().values[round((4 * V - 1) / 2)]
    assert found["logit_p50"].item() == pytest.approx(median.item())
    assert found["logit_max"].item() == pytest.approx(logits.max().item())  # of all
