import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt import GPTModel
from run_config import ModelConfig, load_run
from tests.support.workplace import PROJECT_DIR, TINY_MODEL


def tiny_model(**changes):
    torch.manual_seed(0)
    return GPTModel(ModelConfig(**TINY_MODEL | {"drop_rate": 0.0} | changes))


@settings(max_examples=20, deadline=None)
@given(position=st.integers(0, 15), replacement=st.integers(0, 256))
def test_a_token_changes_no_logits_before_it(position, replacement):
    model = tiny_model().double()
    token_ids = torch.arange(16)[None] * 7  # (1, T)
    changed = token_ids.clone()
    changed[0, position] = replacement
    before, after = model(token_ids), model(changed)
    torch.testing.assert_close(before[:, :position], after[:, :position], rtol=0, atol=1e-12)
    if replacement != position * 7:
        assert not torch.allclose(before[:, position:], after[:, position:])


def test_gpt2_init_scales_the_residual_projections():
    model = tiny_model(emb_dim=128, n_layers=8)
    block = model.blocks[3]
    assert block.attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for projection in (block.attention.output, block.mlp.output):
        assert projection.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
        assert not projection.bias.any()


@pytest.mark.parametrize("tie_weights", [False, True])
def test_zero_projections_start_with_the_loss_of_a_uniform_guess(tie_weights):
    model = tiny_model(init="zero_projections", tie_weights=tie_weights)
    for block in model.blocks:
        assert not block.attention.output.weight.any() and not block.mlp.output.weight.any()
        assert block.mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert model.token_embedding.weight.any(), "a tied head is the embedding"
    token_ids = torch.randint(0, model.config.vocab_size, (2, 9))
    loss = model(token_ids[:, :-1], token_ids[:, 1:])
    assert abs(loss.item() - math.log(model.config.vocab_size)) < (0.2 if tie_weights else 1e-5)
    loss.backward()
    assert model.head_weight.grad.any() or tie_weights


def test_the_original_has_163_million_parameters():
    with torch.device("meta"):
        model = GPTModel(load_run(PROJECT_DIR / "runs", "original").model)
    assert model.num_parameters() == 163_009_536
    assert model.state_dict().keys() == dict(model.named_parameters()).keys()  # and no mask


def test_the_loss_is_the_mean_cross_entropy_of_the_logits():
    model = tiny_model()
    token_ids, targets = torch.randint(0, 257, (2, 3, 16))
    logits = model(token_ids)
    assert logits.shape == (3, 16, 257)
    expected = F.cross_entropy(logits.reshape(-1, 257), targets.reshape(-1))
    torch.testing.assert_close(model(token_ids, targets), expected)


def test_dropout_applies_in_training_mode_only():
    model = tiny_model(drop_rate=0.5)
    token_ids = torch.randint(0, 257, (2, 16))
    assert not torch.equal(model(token_ids), model(token_ids))
    model.eval()
    assert torch.equal(model(token_ids), model(token_ids))
