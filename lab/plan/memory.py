"""The sizes of a model, and the memory that training needs, by part, from a run's configs alone.

It counts the tensors that the trainer holds (PyTorch's allocated memory) at the peak of a step,
from the second step on. Activations are those of code that is not compiled, the loss that of
compiled code where the run compiles on a GPU. Letters as in `gpt.py`; H heads, L layers.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from run_config import ModelConfig, TrainConfig
from settings.machine import Precision
from tokens.batch_plan import head_chunk_tokens

FLOAT32 = 4
IDS = 2 * 8  # bytes of a token's id and its target, int64
MAX_MICROBATCH = 2**21  # more than fits on any GPU
GPT2_SMALL = ModelConfig(
    vocab_size=50257,
    context_length=1024,
    emb_dim=768,
    n_heads=12,
    n_layers=12,
    drop_rate=0.0,
    qkv_bias=False,
)  # untied, as the original's
GPT2_SIZES = {
    (12, 768): "GPT-2 small",
    (24, 1024): "GPT-2 medium",
    (36, 1280): "GPT-2 large",
    (48, 1600): "GPT-2 XL",
}  # by layers and width


@dataclass(frozen=True)
class Setting:
    """All that the memory of a run depends on, except its microbatch size."""

    model: ModelConfig
    config: TrainConfig
    precision: Precision
    num_processes: int
    on_gpu: bool = True

    @property
    def flops_per_token(self) -> float:
        """The training FLOPs per token."""
        return self.config.flops_per_token(self.model)

    @property
    def element(self) -> int:
        """Bytes of an element of the activations in matrix products."""
        return 2 if self.precision in ("bf16", "fp16") else FLOAT32

    @property
    def is_eager_on_cpu(self) -> bool:
        return not self.on_gpu and not self.config.compile

    @property
    def residual(self) -> int:
        """Bytes of an element of the residual stream."""
        by_default = "bf16" if self.on_gpu and self.precision == "bf16" else "fp32"
        return 2 if (self.config.residual_dtype or by_default) == "bf16" else FLOAT32


def size_name(model: ModelConfig) -> str:
    """Name a model by its size, the same wherever it is shown: "GPT-2 small, untied (163M)"."""
    sizes = model.n_layers, model.emb_dim
    name = GPT2_SIZES.get(sizes, "{} layers, {} wide".format(*sizes))
    untied = "" if model.tie_weights else ", untied"
    millions = model.num_parameters / 1e6
    digits = 0 if millions >= 10 else 2
    return f"{name}{untied} ({millions:,.{digits}f}M)"


@dataclass(frozen=True)
class Memory:
    """Bytes of each part at one moment of a step."""

    weights: float
    optimizer: float
    gradients: float
    buckets: float  # of DDP; the gradients are views of them
    weight_copies: float  # of autocast, in low precision, kept for the backward pass
    activations: float
    logits: float  # and all temporary tensors of the loss, the backward pass and the optimizer

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


def peak_memory(setting: Setting, microbatch_size: int) -> Memory:
    """Return the memory at the peak of a step: in the backward pass, or in the optimizer's step."""
    C, L, model = setting.model.emb_dim, setting.model.n_layers, setting.model
    in_backward = _held(setting, microbatch_size, max(_in_backward(setting, microbatch_size)))
    tied = 0
    if model.tie_weights:
        # Before the optimizer's step the matrix has two gradients, and in float32 their sum too.
        num_gradients = 2 if setting.element == FLOAT32 else 1
        tied = num_gradients * FLOAT32 * model.vocab_size * C
    orthogonalising = 0
    if setting.config.optimizer == "muon":
        orthogonalising = max(
            _orthogonalising_bytes(setting, 4 * L, columns=C),
            _orthogonalising_bytes(setting, 2 * L, columns=4 * C),
        )
    before = 0
    if setting.config.diagnostics_interval:  # they keep the weights before the step
        before = FLOAT32 * model.num_parameters
    # No activations are left, and all gradients are there.
    in_update = _held(setting, 0, max(tied, orthogonalising + before))
    if setting.num_processes == 1:
        in_update = replace(in_update, gradients=in_update.weights)
    return max(in_backward, in_update, key=lambda memory: memory.total)


def largest_microbatch(setting: Setting, memory_gib: float) -> int:
    """Return the largest microbatch whose peak is at most `memory_gib`; 0 if not even 1 fits.

    A run with a global batch counts as accumulating gradients even where one microbatch makes up
    the whole batch. Memory then grows with the microbatch, and every smaller one fits too.
    """
    if (setting.config.global_batch_size or 0) > setting.num_processes:
        accumulating = {"global_batch_size": None, "gradient_accumulation_steps": 2}
        setting = replace(setting, config=setting.config.model_copy(update=accumulating))
    return bisect_right(
        range(1, MAX_MICROBATCH),
        memory_gib * 2**30,
        key=lambda size: peak_memory(setting, size).total,
    )


def _in_backward(setting: Setting, microbatch_size: int) -> Iterator[float]:
    """Yield the bytes of temporary tensors at each moment that may be the peak."""
    V, C, e = setting.model.vocab_size, setting.model.emb_dim, setting.element
    config = setting.config.model_copy(update={"microbatch_size": microbatch_size})
    tokens = microbatch_size * setting.model.context_length
    head = FLOAT32 * V * C
    is_low = e < FLOAT32  # what is computed is then cast to float32
    is_compiled = setting.on_gpu and config.compile is not False  # without float32 logits
    chunk = head_chunk_tokens(setting.model, config, is_eager_on_cpu=setting.is_eager_on_cpu)
    # A chunk's logits, float32 logits and probabilities, or two buffers of compiled code (one
    # suffices on a CPU, which is not known of GPUs); part of the head's gradient, float32 in fp16;
    # the whole gradients of the head and of its input.
    logit = 2 * e if is_compiled else 2 * FLOAT32 + is_low * e
    part = (FLOAT32 if setting.precision == "fp16" else e) * V * C
    whole = (e + is_low * FLOAT32) * tokens * C + head
    if chunk is None and is_compiled:  # those gradients begin to exist when the logits are freed
        yield logit * tokens * V
        yield e * tokens * V + part + whole
    else:
        yield logit * min(chunk or tokens, tokens) * V + part + whole
    # The head's gradient, and its input's: as computed, scaled, and cast to float32.
    yield (2 * e + is_low * FLOAT32) * tokens * C + head
    if config.activation_checkpointing:  # one layer's activations, the residual stream's gradient
        yield tokens * (_layer_bytes(setting) + (FLOAT32 + setting.residual) * C) + head


def _orthogonalising_bytes(setting: Setting, num_matrices: int, *, columns: int) -> int:
    """Count what Muon needs for all matrices of one shape, C x columns, beside all gradients.

    First a process holds its share of them: gradients and momenta in float32; then the input, x and
    the next x, and gram and polynomial, both C x C. Then its own updates beside the gathered ones;
    at last all updates as computed and in float32.
    """
    C, element = setting.model.emb_dim, 2 if setting.precision == "bf16" else FLOAT32
    share = -(-num_matrices // setting.num_processes)
    one, gathered = C * columns, share * setting.num_processes
    own = element * share * one
    gradients = FLOAT32 * setting.model.num_matrix_parameters
    return gradients + max(
        own + 2 * FLOAT32 * share * one,
        3 * own + 2 * element * share * C**2,
        (own if setting.num_processes > 1 else 0) + element * gathered * one,
        (element * gathered + FLOAT32 * num_matrices) * one,
    )


def _held(setting: Setting, microbatch_size: int, temporary: float) -> Memory:
    """Return what is held at a moment: temporary tensors, and all that lasts longer."""
    model, is_distributed = setting.model, setting.num_processes > 1
    weights = FLOAT32 * model.num_parameters
    matmul_weights = model.num_matrix_parameters + model.vocab_size * model.emb_dim
    tokens = microbatch_size * model.context_length
    wanted = setting.config.global_batch_size
    if wanted is None:
        accumulates = setting.config.gradient_accumulation_steps > 1
    else:
        accumulates = wanted > microbatch_size * setting.num_processes
    has_copies = setting.element < FLOAT32 and tokens > 0
    of_layer = _layer_bytes(setting)
    if setting.config.activation_checkpointing:  # only its input is kept
        of_layer = setting.residual * model.emb_dim
    activations = _norm_bytes(setting) + IDS + model.n_layers * of_layer
    if model.drop_rate:
        activations += (1 if setting.on_gpu else FLOAT32) * model.emb_dim
    return Memory(
        weights=weights,
        optimizer=setting.config.optimizer_state_bytes(model),
        gradients=weights if accumulates and not is_distributed else 0,
        buckets=weights if is_distributed else 0,
        weight_copies=setting.element * matmul_weights if has_copies else 0,
        activations=tokens * activations,
        logits=temporary,
    )


def _norm_bytes(setting: Setting) -> float:
    """Return a norm's bytes per token: input, output as the product reads it, two statistics."""
    # On a GPU autocast casts the input to float32, and that copy is kept.
    input_element = FLOAT32 if setting.on_gpu and setting.element < FLOAT32 else setting.residual
    return (input_element + setting.element) * setting.model.emb_dim + 2 * FLOAT32


def _layer_bytes(setting: Setting) -> float:
    """Return the bytes per token that one layer keeps for the backward pass."""
    model, e = setting.model, setting.element
    C, H, T = model.emb_dim, model.n_heads, model.context_length
    attention: float = (3 + 1) * e * C  # q, k, v; output
    chosen = setting.config.attention
    if setting.config.deterministic and setting.on_gpu and e == FLOAT32:
        chosen = "math"  # as trainer/precision.py decides
    if setting.is_eager_on_cpu and e < FLOAT32 and chosen == "auto":
        from ops.block_attention import attention_blocks  # imports torch: plans for GPUs do not

        # Attention weights; with dropout also the mask's factors and the weights after dropout.
        scores = sum((stop - start) * stop for start, stop in attention_blocks(T))
        attention += (3 if model.drop_rate else 1) * e * H * scores / T
    elif chosen == "math" or (model.drop_rate and not setting.on_gpu):
        # Not fused: all attention weights are kept, and float32 copies of q, k and v.
        attention += (3 if model.drop_rate else 1) * FLOAT32 * H * T
        attention += 3 * FLOAT32 * C if e < FLOAT32 else 0
    else:
        attention += FLOAT32 * H  # log-sum-exp
    mlp = (4 + 4) * e * C  # before and after GELU
    # A mask of one byte per element on a GPU, of factors on a CPU.
    dropout = 2 * C * (1 if setting.on_gpu else e) if model.drop_rate else 0
    return 2 * _norm_bytes(setting) + attention + mlp + dropout
