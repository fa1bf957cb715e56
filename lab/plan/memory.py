"""The memory that training takes, by part, from a run's configs alone.

Counted are the tensors that the trainer holds (what PyTorch calls allocated memory), at the
fullest moment of a step from the second on, where the model is not compiled: compiled, it keeps
fewer activations and no float32 logits. Letters as in `gpt.py`; H heads, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from ops.sizes import attention_blocks, head_chunk_tokens
from run_config import ModelConfig, Precision, TrainConfig

FLOAT32 = 4
IDS = 2 * 8  # a token's id and its target, int64


@dataclass(frozen=True)
class Memory:
    """Bytes by part, at one moment of a step."""

    weights: float
    optimizer: float
    gradients: float
    buckets: float  # DDP's; the gradients live in them
    weight_copies: float  # autocast's, in the lower precision, kept for the backward pass
    activations: float
    logits: float  # with what the loss and its backward pass make of them

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Setting:
    """What the memory of a run depends on."""

    model: ModelConfig
    train: TrainConfig
    precision: Precision
    num_processes: int
    on_gpu: bool = True

    @property
    def element(self) -> int:
        """Bytes of an activation in matrix products."""
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
    """Count the parameters of `GPTModel` without building one."""
    C = model.emb_dim
    matrices = 12 * C**2
    biases = C + 4 * C + C + (3 * C if model.qkv_bias else 0)  # attention output, MLP, QKV
    norms = 2 * 2 * C
    embeddings = (model.vocab_size + model.context_length) * C
    head = 0 if model.tie_weights else model.vocab_size * C
    return model.n_layers * (matrices + biases + norms) + embeddings + 2 * C + head


def peak_memory(setting: Setting, microbatch_size: int) -> Memory:
    """Give the fullest moment of a step: in the loss's backward pass, or later in small steps."""
    moments = [_in_the_loss, _in_the_head, _in_the_optimizer]
    if _chunk_tokens(setting, microbatch_size) is not None:
        moments = [_in_a_piece, _behind_the_pieces, _in_the_optimizer]
    if setting.train.activation_checkpointing:
        moments.append(_in_a_layer)
    return max((moment(setting, microbatch_size) for moment in moments),
               key=lambda memory: memory.total)


def largest_microbatch(setting: Setting, memory_gib: float) -> int:
    """Give the largest microbatch whose peak stays within a size; 0 if not even 1 does.

    A global batch that one microbatch may make up is taken as accumulated, so that what is smaller
    than one that fits, fits too.
    """
    if (setting.train.global_batch_size or 0) > setting.num_processes:
        accumulating = {"global_batch_size": None, "gradient_accumulation_steps": 2}
        setting = replace(setting, train=setting.train.model_copy(update=accumulating))
    size = 0
    step = 2**20  # more than any card holds
    while step:
        if peak_memory(setting, size + step).total <= memory_gib * 2**30:
            size += step
        step //= 2
    return size


def _in_the_loss(setting: Setting, microbatch_size: int) -> Memory:
    """All activations are held, and log-softmax's output, its gradient, and the next gradient."""
    tokens = microbatch_size * setting.model.context_length
    logits = 3 * FLOAT32 * setting.model.vocab_size * tokens
    return _held(setting, microbatch_size, logits=logits, all_gradients=False)


def _in_the_head(setting: Setting, microbatch_size: int) -> Memory:
    """The head's weight gradient is made in the lower precision, then widened."""
    V, C = setting.model.vocab_size, setting.model.emb_dim
    tokens = microbatch_size * setting.model.context_length
    gradient = (FLOAT32 + (setting.element if setting.element < FLOAT32 else 0)) * V * C
    logits = setting.element * V * tokens + gradient
    return _held(setting, microbatch_size, logits=logits, all_gradients=False)


def _chunk_tokens(setting: Setting, microbatch_size: int) -> int | None:
    train = setting.train.model_copy(update={"microbatch_size": microbatch_size})
    return head_chunk_tokens(setting.model, train,
                             is_eager_on_cpu=setting.is_eager_on_cpu)


def _in_a_piece(setting: Setting, microbatch_size: int) -> Memory:
    """Of one piece there are logits, wide ones and probabilities; and a piece's part in the head's
    gradient, that gradient, and the one of the head's input."""
    V, C, e = setting.model.vocab_size, setting.model.emb_dim, setting.element
    tokens = microbatch_size * setting.model.context_length
    n = min(_chunk_tokens(setting, microbatch_size), tokens)
    piece = (2 * FLOAT32 + (e if e < FLOAT32 else 0)) * n * V + e * V * C
    whole = e * tokens * C + (FLOAT32 * tokens * C if e < FLOAT32 else 0) + FLOAT32 * V * C
    return _held(setting, microbatch_size, logits=piece + whole, all_gradients=False)


def _behind_the_pieces(setting: Setting, microbatch_size: int) -> Memory:
    """The head's gradient, and its input's as it was made, scaled, and widened."""
    V, C, e = setting.model.vocab_size, setting.model.emb_dim, setting.element
    tokens = microbatch_size * setting.model.context_length
    gradients = (2 * e + (FLOAT32 if e < FLOAT32 else 0)) * tokens * C + FLOAT32 * V * C
    return _held(setting, microbatch_size, logits=gradients, all_gradients=False)


def _in_a_layer(setting: Setting, microbatch_size: int) -> Memory:
    """With checkpointing one layer's activations are there again, and the stream's gradient."""
    tokens = microbatch_size * setting.model.context_length
    V, C = setting.model.vocab_size, setting.model.emb_dim
    again = _layer_bytes(setting) + (FLOAT32 + setting.residual) * C
    return _held(setting, microbatch_size, logits=tokens * again + FLOAT32 * V * C,
                 all_gradients=False)


def _in_the_optimizer(setting: Setting, microbatch_size: int) -> Memory:
    """The activations are gone, all gradients are there.

    Where head and embedding are tied, the gradients of both were there a moment before, and in
    float32 their sum beside them.
    """
    tied = setting.model.vocab_size * setting.model.emb_dim if setting.model.tie_weights else 0
    extra = FLOAT32 * tied * (2 if setting.element == FLOAT32 else 1)
    return _held(setting, 0, logits=extra, all_gradients=True)


def _held(setting: Setting, microbatch_size: int, *, logits: float,
          all_gradients: bool) -> Memory:
    model, several = setting.model, setting.num_processes > 1
    weights = FLOAT32 * num_parameters(model)
    holds_gradients = all_gradients or _accumulates(setting, microbatch_size)
    matmul_weights = 12 * model.n_layers * model.emb_dim**2 + model.vocab_size * model.emb_dim
    tokens = microbatch_size * model.context_length
    has_copies = setting.element < FLOAT32 and tokens > 0
    return Memory(
        weights=weights,
        optimizer=2 * weights,
        gradients=weights if holds_gradients and not several else 0,
        buckets=weights if several else 0,
        weight_copies=setting.element * matmul_weights if has_copies else 0,
        activations=tokens * _activation_bytes(setting),
        logits=logits,
    )


def _accumulates(setting: Setting, microbatch_size: int) -> bool:
    """Tell if gradients of one microbatch are held while the next one runs."""
    wanted = setting.train.global_batch_size
    if wanted is None:
        return setting.train.gradient_accumulation_steps > 1
    return wanted > microbatch_size * setting.num_processes


def _activation_bytes(setting: Setting) -> float:
    """Count what a token's forward pass keeps for its backward pass."""
    model, C = setting.model, setting.model.emb_dim
    ends = _norm_bytes(setting) + IDS
    if model.drop_rate:
        ends += C if setting.on_gpu else FLOAT32 * C
    if setting.train.activation_checkpointing:
        return model.n_layers * setting.residual * C + ends
    return model.n_layers * _layer_bytes(setting) + ends


def _norm_bytes(setting: Setting) -> float:
    """A norm's input, its output as the next product takes it, and two statistics.

    Autocast on a GPU widens the input first, and the wide one is kept.
    """
    widens = setting.on_gpu and setting.element < FLOAT32
    input_element = FLOAT32 if widens else setting.residual
    return (input_element + setting.element) * setting.model.emb_dim + 2 * FLOAT32


def _layer_bytes(setting: Setting) -> float:
    model, e = setting.model, setting.element
    C, H, T = model.emb_dim, model.n_heads, model.context_length
    attention = (3 + 1) * e * C  # q, k, v; output
    if setting.is_eager_on_cpu and e < FLOAT32:
        # Its weights; with dropout the factors too, and the weights that are left.
        scores = sum((stop - start) * stop for start, stop in attention_blocks(T))
        attention += (3 if model.drop_rate else 1) * e * H * scores / T
    elif model.drop_rate and not setting.on_gpu:  # in the open
        attention += 3 * FLOAT32 * H * T
    else:
        attention += FLOAT32 * H  # log-sum-exp
    mlp = (4 + 4) * e * C  # before and after GELU
    dropout = 2 * C * (1 if setting.on_gpu else e) if model.drop_rate else 0  # bytes, or factors
    return 2 * _norm_bytes(setting) + attention + mlp + dropout
