"""What the memory of a run depends on, and the sizes of its model."""

from dataclasses import dataclass

from run_config import ModelConfig, Precision, TrainConfig

FLOAT32 = 4
GPT2_SMALL = ModelConfig(vocab_size=50257, context_length=1024, emb_dim=768, n_heads=12,
                         n_layers=12, drop_rate=0.0, qkv_bias=False)  # untied, as the original's
GPT2_SIZES = {(12, 768): "GPT-2 small", (24, 1024): "GPT-2 medium", (36, 1280): "GPT-2 large",
              (48, 1600): "GPT-2 XL"}  # by layers and width


@dataclass(frozen=True)
class Setting:
    """All that the memory of a run depends on, except its microbatch size."""

    model: ModelConfig
    train: TrainConfig
    precision: Precision
    num_processes: int
    on_gpu: bool = True

    @property
    def element(self) -> int:
        """Bytes of an element of the activations in matrix products."""
        return 2 if self.precision in ("bf16", "fp16") else FLOAT32

    @property
    def is_eager_on_cpu(self) -> bool:
        return not self.on_gpu and not self.train.compile

    @property
    def residual(self) -> int:
        """Bytes of an element of the residual stream."""
        by_default = "bf16" if self.on_gpu and self.precision == "bf16" else "fp32"
        return 2 if (self.train.residual_dtype or by_default) == "bf16" else FLOAT32


def num_parameters(model: ModelConfig) -> int:
    """Return the number of parameters of a `GPTModel` without building one."""
    C = model.emb_dim
    matrices = 12 * C**2
    biases = C + 4 * C + C + (3 * C if model.qkv_bias else 0)  # attention output, MLP, QKV
    norms = 2 * 2 * C
    embeddings = (model.vocab_size + model.context_length) * C
    head = 0 if model.tie_weights else model.vocab_size * C
    return model.n_layers * (matrices + biases + norms) + embeddings + 2 * C + head


def size_name(model: ModelConfig) -> str:
    """Name a model by its size, the same wherever it is shown: "GPT-2 small, untied (163M)"."""
    sizes = model.n_layers, model.emb_dim
    name = GPT2_SIZES.get(sizes, "{} layers, {} wide".format(*sizes))
    millions = num_parameters(model) / 1e6
    return (f"{name}{'' if model.tie_weights else ', untied'}"
            f" ({millions:,.{0 if millions >= 10 else 2}f}M)")


def parameters_by_group(model: ModelConfig) -> dict[str, int]:
    """Return the number of parameters in each group of the optimizer."""
    C = model.emb_dim
    sizes = {"matrix": 12 * model.n_layers * C**2,
             "embedding": (model.vocab_size + model.context_length) * C,
             "head": 0 if model.tie_weights else model.vocab_size * C}
    return sizes | {"vector": num_parameters(model) - sum(sizes.values())}
