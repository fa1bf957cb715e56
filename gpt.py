"""GPT-2's architecture: token ids to logits, or directly to the loss.

Shapes: B sequences in a microbatch, T tokens in a sequence, C `emb_dim`, H `n_heads`,
D = C / H per head, V `vocab_size`.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from ops.add_bias import AddBias
from ops.block_attention import block_attention
from ops.linear_cross_entropy import linear_cross_entropy, pad_rows
from ops.sampled_cross_entropy import Candidates, sampled_cross_entropy
from run_config import ModelConfig

INIT_STD = 0.02
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
# For sequences of many lengths: cuDNN plans anew for each length, which takes tens of milliseconds.
FOR_ANY_LENGTH = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@dataclass(frozen=True)
class ForwardOptions:
    """How the forward pass is computed: ways that differ in speed, memory and rounding only."""

    residual_dtype: torch.dtype | None = None  # if not the embeddings'; bfloat16 needs autocast
    head_chunk_tokens: int | None = None  # per chunk of head and loss; None computes all at once
    activation_checkpointing: bool = False  # run each layer again in the backward pass
    head_multiple: int = 1  # the head is padded with zeros to a multiple in its matrix product
    attention: str = "auto"  # one of `KERNELS`, "auto" to let PyTorch choose one, or "blocks"
    adds_bias_apart: bool = False  # in the MLP's first layer, for compiled code: see `AddBias`


class CausalSelfAttention(nn.Module):
    """Multi-head attention of each token to itself and the tokens before it."""

    def __init__(self, config: ModelConfig, kernel: str) -> None:
        super().__init__()
        self.n_heads, self.drop_rate, self.kernel = config.n_heads, config.drop_rate, kernel
        self.qkv = nn.Linear(config.emb_dim, 3 * config.emb_dim, bias=config.qkv_bias)
        self.output = nn.Linear(config.emb_dim, config.emb_dim)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.project(x)  # (B, H, T, D) each
        drop_rate = self.drop_rate if self.training else 0.0
        y = attend(q, k, v, drop_rate, self.kernel)  # (B, H, T, D)
        return self.output(y.transpose(1, 2).reshape(B, T, C))  # (B, T, C)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and values of x (B, T, C): (B, H, T, D) each."""
        B, T, C = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.n_heads, C // self.n_heads)  # (B, T, 3, H, D)
        return qkv.permute(2, 0, 3, 1, 4).unbind()


def attend(q: Tensor, k: Tensor, v: Tensor, drop_rate: float, attention: str) -> Tensor:
    """Compute causal attention, (B, H, T, D), of q, k and v, (B, H, T, D) each.

    A kernel that is asked for is set here, inside of what is compiled: PyTorch's cache of compiled
    code does not see a choice that is made outside, and would return code with another kernel.
    """
    if attention == "blocks":
        return block_attention(q, k, v, drop_rate=drop_rate)
    if attention in KERNELS:
        with sdpa_kernel(KERNELS[attention]):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=drop_rate, is_causal=True)
    # The causal mask is a flag, not a tensor: a mask tensor would rule out the flash kernels.
    return F.scaled_dot_product_attention(q, k, v, dropout_p=drop_rate, is_causal=True)


class MLP(nn.Module):
    """Two linear layers, four times as wide in between, with GPT-2's tanh form of GELU."""

    def __init__(self, config: ModelConfig, *, adds_bias_apart: bool) -> None:
        super().__init__()
        self.adds_bias_apart = adds_bias_apart
        self.up = nn.Linear(config.emb_dim, 4 * config.emb_dim)
        self.output = nn.Linear(4 * config.emb_dim, config.emb_dim)

    def forward(self, x: Tensor) -> Tensor:
        # The same sum in two forms; compiled for a GPU, the first saves a pass over the gradient.
        if self.adds_bias_apart:
            hidden = AddBias.apply(F.linear(x, self.up.weight), self.up.bias)  # (B, T, 4 C)
        else:
            hidden = self.up(x)  # (B, T, 4 C)
        return self.output(F.gelu(hidden, approximate="tanh"))  # (B, T, C)


class Block(nn.Module):
    """One layer: attention, then MLP, each on a normalised input and added to the residual."""

    def __init__(self, config: ModelConfig, options: ForwardOptions) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.emb_dim)
        self.attention = CausalSelfAttention(config, options.attention)
        self.mlp_norm = nn.LayerNorm(config.emb_dim)
        self.mlp = MLP(config, adds_bias_apart=options.adds_bias_apart)
        self.dropout = nn.Dropout(config.drop_rate)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))  # (B, T, C)
        return x + self.dropout(self.mlp(self.mlp_norm(x)))  # (B, T, C)


class GPTModel(nn.Module):
    """A GPT-2-class language model."""

    def __init__(self, config: ModelConfig, options: ForwardOptions | None = None) -> None:
        super().__init__()
        self.config, self.options = config, options or ForwardOptions()
        self.candidates: Candidates | None = None  # of the training loss; None for all entries
        self.token_embedding = nn.Embedding(config.vocab_size, config.emb_dim)
        self.position_embedding = nn.Embedding(config.context_length, config.emb_dim)
        self.dropout = nn.Dropout(config.drop_rate)
        self.blocks: Sequence[Block] = nn.ModuleList(  # type: ignore[assignment]
            Block(config, self.options) for _ in range(config.n_layers)
        )
        self.final_norm = nn.LayerNorm(config.emb_dim)
        if not config.tie_weights:
            self.head = nn.Linear(config.emb_dim, config.vocab_size, bias=False)
        if config.init != "torch":
            self._init_weights()

    def forward(self, token_ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """Compute the logits, or with `targets` the mean cross-entropy in nats per token.

        Args:
            token_ids: (B, T) int64, T at most `context_length`.
            targets: (B, T) int64, the token that follows each of `token_ids`; all count.

        Returns:
            Logits (B, T, V), in the autocast dtype under autocast; or the loss, () float32.
        """
        x = self.transform(self.embed(token_ids))
        if targets is None:
            weight = pad_rows(self.head_weight, self.options.head_multiple)
            # The logits of the padding are cut off again.
            return F.linear(self.final_norm(x), weight)[..., : self.config.vocab_size]
        return self.loss(x, targets)

    def embed(self, token_ids: Tensor, *, first_position: int = 0) -> Tensor:
        """Add token and position embeddings: (B, T) int64 to (B, T, C)."""
        stop = first_position + token_ids.shape[1]
        positions = torch.arange(first_position, stop, device=token_ids.device)  # (T,)
        x = self.token_embedding(token_ids) + self.position_embedding(positions)  # (B, T, C)
        x = self.dropout(x)
        # All layers add to x, so its dtype here is that of the whole residual stream.
        return x if self.options.residual_dtype is None else x.to(self.options.residual_dtype)

    def transform(
        self, x: Tensor, run: Callable[[Block, Tensor], Tensor] = lambda block, x: block(x)
    ) -> Tensor:
        """Run all layers, (B, T, C) to (B, T, C), each one through `run`."""
        # Without gradients nothing is kept for a backward pass, so nothing would be saved.
        recomputes = self.options.activation_checkpointing and torch.is_grad_enabled()
        for block in self.blocks:
            if recomputes:
                # Only dropout draws random numbers; the second pass must draw the same ones.
                x = checkpoint(
                    run, block, x, use_reentrant=False, preserve_rng_state=self.config.drop_rate > 0
                )
            else:
                x = run(block, x)
        return x

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean loss, () float32, of the layers' output (B, T, C); targets (B, T).

        In training mode, with `candidates`, it is estimated from these entries.
        """
        x, targets = self.final_norm(x).flatten(0, 1), targets.flatten()  # (B * T, C), (B * T,)
        if self.training and self.candidates is not None:
            return sampled_cross_entropy(
                x,
                self.head_weight,
                targets,
                self.candidates,
                chunk_tokens=self.options.head_chunk_tokens,
            )
        return linear_cross_entropy(
            x,
            self.head_weight,
            targets,
            chunk_tokens=self.options.head_chunk_tokens,
            multiple=self.options.head_multiple,
        )

    @property
    def head_weight(self) -> Tensor:
        """The output head's matrix, (V, C); the token embedding's if they are tied."""
        return self.token_embedding.weight if self.config.tie_weights else self.head.weight

    def _init_weights(self) -> None:
        """Draw weights with standard deviation 0.02; set biases to zero.

        Residual projections are scaled by 1 / sqrt(2 * n_layers), or with "zero_projections" they
        and an untied head are zero: each layer starts as the identity.

        Source: Radford et al. 2019, section 2.3; 0.02 is from OpenAI's released code. Zeros: Yang
        et al. 2022, "Tensor Programs V", appendix D.2, for the head; the projections follow Zhang
        et al. 2019, "Fixup Initialization", section 3.
        """
        zeros = self.config.init == "zero_projections"
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                is_residual = name.endswith("output.weight")
                scale = 1 / math.sqrt(2 * self.config.n_layers) if is_residual else 1.0
                # Drawn even if zeros follow, so that all other weights are the same for any `init`.
                nn.init.normal_(parameter, std=INIT_STD * scale)
                if zeros and (is_residual or name == "head.weight"):
                    nn.init.zeros_(parameter)
