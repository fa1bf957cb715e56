"""GPT-2 as the systems of `throughput.py` build it, from the same weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt import GPTModel
from run_config import ModelConfig
from trainer.weight_formats import gpt2_config, to_gpt2

SEED = 42


def initial_model(config: ModelConfig) -> GPTModel:
    """Build the model whose weights all systems begin with."""
    torch.manual_seed(SEED)
    return GPTModel(config)


def hugging_face_model(model: GPTModel) -> Any:
    """Return the `transformers` model with a model's weights, with SDPA and without a cache."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config.from_dict(gpt2_config(model.config, None) | {"use_cache": False},
                                  attn_implementation="sdpa")
    theirs = GPT2LMHeadModel(config)
    theirs.load_state_dict(to_gpt2(model.state_dict(), model.config))
    return theirs


class NaiveNorm(nn.Module):
    """Layer norm in single operations."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.scale, self.shift = norm.weight, norm.bias

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        return self.scale * ((x - mean) / torch.sqrt(variance + 1e-5)) + self.shift


class NaiveBlock(nn.Module):
    """A layer with three projections, attention in single operations, and a stored mask."""

    def __init__(self, block: nn.Module, context_length: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(NaiveNorm(n) for n in (block.attention_norm, block.mlp_norm))
        parts = block.attention.qkv.weight.detach().chunk(3)
        self.projections = nn.ParameterList(nn.Parameter(part.clone()) for part in parts)
        self.n_heads, self.output = block.attention.n_heads, block.attention.output
        self.up, self.down = block.mlp.up, block.mlp.output
        mask = torch.triu(torch.ones(context_length, context_length), diagonal=1)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norms[0](x))
        y = self.up(self.norms[1](x))
        inner = torch.sqrt(torch.tensor(2.0 / torch.pi)) * (y + 0.044715 * torch.pow(y, 3))
        return x + self.down(0.5 * y * (1 + torch.tanh(inner)))

    def attend(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        heads = (B, T, self.n_heads, C // self.n_heads)
        q, k, v = (F.linear(x, weight).view(heads).transpose(1, 2) for weight in self.projections)
        scores = q @ k.transpose(2, 3)  # (B, H, T, T)
        scores.masked_fill_(self.mask.bool()[:T, :T], -torch.inf)
        weights = torch.softmax(scores / k.shape[-1] ** 0.5, dim=-1)
        return self.output((weights @ v).transpose(1, 2).contiguous().view(B, T, C))


class NaiveGPT(nn.Module):
    """The same network and weights as `GPTModel`, computed as in the original system."""

    def __init__(self, model: GPTModel) -> None:
        super().__init__()
        self.token_embedding, self.position_embedding = (model.token_embedding,
                                                         model.position_embedding)
        self.blocks = nn.Sequential(*(NaiveBlock(block, model.config.context_length)
                                      for block in model.blocks))
        self.final_norm, self.head = NaiveNorm(model.final_norm), model.head

    def forward(self, token_ids: Tensor) -> Tensor:
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        x = self.token_embedding(token_ids) + self.position_embedding(positions)
        return self.head(self.final_norm(self.blocks(x)))  # (B, T, V)
