"""GPT-2's architecture: token ids to logits, or straight to the loss.

Shapes: B sequences in a microbatch, T tokens in a sequence, C `emb_dim`, H `n_heads`,
D = C / H, V `vocab_size`.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from run_config import ModelConfig

INIT_STD = 0.02


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a token sees itself and what came before it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.drop_rate = config.drop_rate
        self.qkv = nn.Linear(config.emb_dim, 3 * config.emb_dim, bias=config.qkv_bias)
        self.output = nn.Linear(config.emb_dim, config.emb_dim)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.n_heads, C // self.n_heads)  # (B, T, 3, H, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()  # each (B, H, T, D)
        # No mask tensor: with one, PyTorch could not choose its flash kernels.
        dropout = self.drop_rate if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.output(y.transpose(1, 2).reshape(B, T, C))  # (B, T, C)


class MLP(nn.Module):
    """Four times as wide in the middle, with GPT-2's tanh form of GELU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.emb_dim, 4 * config.emb_dim)
        self.output = nn.Linear(4 * config.emb_dim, config.emb_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(F.gelu(self.up(x), approximate="tanh"))  # (B, T, C)


class Block(nn.Module):
    """One layer: attention, then MLP, each normalised first and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.emb_dim)
        self.attention = CausalSelfAttention(config)
        self.mlp_norm = nn.LayerNorm(config.emb_dim)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.drop_rate)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))  # (B, T, C)
        return x + self.dropout(self.mlp(self.mlp_norm(x)))  # (B, T, C)


class GPTModel(nn.Module):
    """A GPT-2-class language model."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.emb_dim)
        self.position_embedding = nn.Embedding(config.context_length, config.emb_dim)
        self.dropout = nn.Dropout(config.drop_rate)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.final_norm = nn.LayerNorm(config.emb_dim)
        if not config.tie_weights:
            self.head = nn.Linear(config.emb_dim, config.vocab_size, bias=False)
        if config.init == "gpt2":
            self._init_gpt2()

    def forward(self, token_ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """Give the logits, or with `targets` the mean cross-entropy in nats a token.

        Args:
            token_ids: (B, T) int64, T at most `context_length`.
            targets: (B, T) int64, the token that follows each of `token_ids`.

        Returns:
            Logits (B, T, V), in the autocast dtype if there is one; or the loss, () float32.
        """
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)  # (T,)
        x = self.token_embedding(token_ids) + self.position_embedding(positions)  # (B, T, C)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.final_norm(x), self.head_weight)  # (B, T, V)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    @property
    def head_weight(self) -> Tensor:
        """(V, C): the output head's own matrix, or the token embedding's where they are tied."""
        return self.token_embedding.weight if self.config.tie_weights else self.head.weight

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def _init_gpt2(self) -> None:
        """Normal weights, zero biases, residual projections smaller by 1 / sqrt(2 x layers).

        Source: Radford et al. 2019, section 2.3; the 0.02 is that of OpenAI's released code.
        """
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                residual = name.endswith("output.weight")
                scale = 1 / math.sqrt(2 * self.config.n_layers) if residual else 1.0
                nn.init.normal_(parameter, std=INIT_STD * scale)
