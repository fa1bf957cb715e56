"""`model.json`: the shape of the network."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from basics.json_files import FrozenConfig

MAX_VOCAB_SIZE = 2**16  # token files hold uint16


class ModelConfig(FrozenConfig):
    """`model.json`: the shape of the network."""

    vocab_size: int = Field(ge=2, le=MAX_VOCAB_SIZE)
    context_length: int = Field(ge=1, le=2**20)
    emb_dim: int = Field(ge=1, le=2**16)
    n_heads: int = Field(ge=1, le=2**12)
    n_layers: int = Field(ge=1, le=2**10)
    drop_rate: float = Field(ge=0, lt=1)
    qkv_bias: bool
    tie_weights: bool = False
    init: Literal["gpt2", "torch", "zero_projections"] = "gpt2"

    @model_validator(mode="after")
    def _heads_divide_embedding(self) -> Self:
        if self.emb_dim % self.n_heads:
            raise ValueError(f"emb_dim {self.emb_dim} is not divisible by n_heads {self.n_heads}")
        return self

    def shape(self) -> dict[str, Any]:
        """Return the keys that decide the tensors of the network, with their values."""
        return self.model_dump(exclude={"drop_rate", "init"})

    def with_layers(self, n_layers: int) -> Self:
        """Return the shape of so many of the layers, with embeddings and head."""
        return self.model_copy(update={"n_layers": n_layers})

    @property
    def num_matrix_parameters(self) -> int:
        """The parameters in the layers' matrices: QKV, attention output, the two of the MLP."""
        return self.n_layers * (3 + 1 + 4 + 4) * self.emb_dim**2

    @property
    def num_parameters(self) -> int:
        """The parameters of a `GPTModel` of this shape."""
        C = self.emb_dim
        biases = C + 4 * C + C + (3 * C if self.qkv_bias else 0)  # attention output, MLP, QKV
        norms = 2 * 2 * C
        embeddings = (self.vocab_size + self.context_length) * C
        head = 0 if self.tie_weights else self.vocab_size * C
        layers = self.num_matrix_parameters + self.n_layers * (biases + norms)
        return layers + embeddings + 2 * C + head

    @property
    def flops_per_token(self) -> int:
        """The training FLOPs per token, forward and backward: 6 N + 12 L T C.

        N counts the parameters in matrix products: embeddings are look-ups and do not count, the
        vocabulary is unpadded, and attention counts as if it were not causal.

        Source: Chowdhery et al. 2022, "PaLM", appendix B.
        """
        matmul_parameters = self.num_matrix_parameters + self.vocab_size * self.emb_dim
        attention = 12 * self.n_layers * self.context_length * self.emb_dim
        return 6 * matmul_parameters + attention
