"""Convert weights to and from other formats of GPT-2: names and layouts, no files.

A linear layer here has its matrix as (out, in); GPT-2's code, and `transformers` after it, keeps
(in, out). Source: Radford et al. 2019 for the architecture; the names are those of the published
files.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from run_config import ModelConfig
from settings.model import MAX_VOCAB_SIZE

Weights = dict[str, Tensor]

# Our names, GPT-2's names, and the original system's names.
OUTER = {
    "token_embedding": ("wte", "tok_emb"),
    "position_embedding": ("wpe", "pos_emb"),
    "final_norm": ("ln_f", "final_norm"),
}
INNER = {
    "attention_norm": ("ln_1", "norm1"),
    "attention.output": ("attn.c_proj", "att.out_proj"),
    "mlp_norm": ("ln_2", "norm2"),
    "mlp.up": ("mlp.c_fc", "ff.layers.0"),
    "mlp.output": ("mlp.c_proj", "ff.layers.2"),
    "attention.qkv": ("attn.c_attn", "att.W_qkv"),
}  # the original has three: query, key, value
NORM_PARTS = {"weight": "scale", "bias": "shift"}  # in the original system


class Gpt2Config(BaseModel):
    """The `config.json` of a GPT-2; other values would mean another architecture."""

    model_config = ConfigDict(frozen=True, strict=True)

    model_type: Literal["gpt2"]
    vocab_size: int = Field(default=50257, ge=2, le=MAX_VOCAB_SIZE)
    n_positions: int = Field(default=1024, ge=1, le=2**20)
    n_embd: int = Field(default=768, ge=1, le=2**16)
    n_head: int = Field(default=12, ge=1, le=2**12)
    n_layer: int = Field(default=12, ge=1, le=2**10)
    n_inner: int | None = None
    resid_pdrop: float = Field(default=0.1, ge=0, lt=1)
    tie_word_embeddings: bool = True
    activation_function: Literal["gelu_new", "gelu_pytorch_tanh"] = "gelu_new"
    layer_norm_epsilon: float = Field(default=1e-5, ge=1e-5, le=1e-5)
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    add_cross_attention: Literal[False] = False
    eos_token_id: int | list[int] | None = 50256

    def as_model_config(self) -> ModelConfig:
        """Return this project's config; one dropout rate stands for GPT-2's three."""
        if self.n_inner not in (None, 4 * self.n_embd):
            raise ValueError(f"n_inner is {self.n_inner}; wanted 4 x n_embd = {4 * self.n_embd}")
        return ModelConfig(
            vocab_size=self.vocab_size,
            context_length=self.n_positions,
            emb_dim=self.n_embd,
            n_heads=self.n_head,
            n_layers=self.n_layer,
            drop_rate=self.resid_pdrop,
            qkv_bias=True,
            tie_weights=self.tie_word_embeddings,
        )


def gpt2_config(model: ModelConfig, end_of_text: int | None) -> dict[str, Any]:
    """Return `config.json` for `transformers`, with the id of the end-of-text token, if known."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": model.vocab_size,
        "n_positions": model.context_length,
        "n_embd": model.emb_dim,
        "n_head": model.n_heads,
        "n_layer": model.n_layers,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "embd_pdrop": model.drop_rate,
        "attn_pdrop": model.drop_rate,
        "resid_pdrop": model.drop_rate,
        "initializer_range": 0.02,
        "scale_attn_weights": True,
        "tie_word_embeddings": model.tie_weights,
        "use_cache": True,
        "dtype": "float32",
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
    }


def to_gpt2(weights: Weights, model: ModelConfig) -> Weights:
    """Rename and transpose this project's weights to GPT-2's; missing biases become zeros."""
    ours = dict(weights)
    if not model.qkv_bias:
        for layer in range(model.n_layers):
            ours[f"blocks.{layer}.attention.qkv.bias"] = torch.zeros(3 * model.emb_dim)
    theirs = {
        f"transformer.{gpt2}": ours[name].t().contiguous() if transpose else ours[name]
        for name, gpt2, _, transpose in _names(model.n_layers)
    }
    return theirs if model.tie_weights else theirs | {"lm_head.weight": ours["head.weight"]}


def from_gpt2(weights: Weights, model: ModelConfig) -> tuple[Weights, ModelConfig]:
    """Convert GPT-2's weights. Raises: KeyError: one is missing; ValueError: wrong sizes.

    Its files always have query, key and value biases: where all are zero, they are left out.
    """
    theirs = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
    if f"h.{model.n_layers}.ln_1.weight" in theirs:
        raise ValueError(f"it has more layers than n_layer, {model.n_layers}")
    ours = {
        name: theirs[gpt2].t() if transpose else theirs[gpt2]
        for name, gpt2, _, transpose in _names(model.n_layers)
    }
    if not model.tie_weights:
        ours["head.weight"] = theirs["lm_head.weight"]
    biases = [name for name in ours if name.endswith("qkv.bias")]
    if not any(ours[name].any() for name in biases):
        ours = {name: weight for name, weight in ours.items() if name not in biases}
        model = model.model_copy(update={"qkv_bias": False})
    return ours, model


def from_original(weights: Weights, model: ModelConfig) -> tuple[Weights, ModelConfig]:
    """Convert the original system's weights; its masks are left out. Raises: KeyError."""
    theirs = {name.removeprefix("model."): weight for name, weight in weights.items()}
    if model.tie_weights and "tok_emb.weight" not in theirs:  # files keep one of the two names
        theirs["tok_emb.weight"] = theirs["out_head.weight"]
    ours = {} if model.tie_weights else {"head.weight": theirs["out_head.weight"]}
    for name, _, original, _ in _names(model.n_layers):
        if ".qkv." not in name:
            ours[name] = theirs[original]
        elif name.endswith("weight") or model.qkv_bias:
            parts = [theirs[original.replace("qkv", part)] for part in ("query", "key", "value")]
            ours[name] = torch.cat(parts)
    return ours, model


def _names(n_layers: int) -> Iterator[tuple[str, str, str, bool]]:
    """Yield our name, GPT-2's, the original system's, and whether GPT-2 has it transposed."""
    rows = [(ours, *theirs) for ours, theirs in OUTER.items()]
    for layer in range(n_layers):
        rows += [
            (f"blocks.{layer}.{ours}", f"h.{layer}.{gpt2}", f"trf_blocks.{layer}.{original}")
            for ours, (gpt2, original) in INNER.items()
        ]
    for ours, gpt2, original in rows:
        is_norm, is_matrix = "norm" in ours, ours.startswith("blocks.") and "norm" not in ours
        parts = ["weight"] if ours.endswith("embedding") else ["weight", "bias"]
        for part in parts:
            of_original = NORM_PARTS[part] if is_norm else part
            is_transposed = is_matrix and part == "weight"
            yield f"{ours}.{part}", f"{gpt2}.{part}", f"{original}.{of_original}", is_transposed
