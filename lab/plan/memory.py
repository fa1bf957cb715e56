"""A model of the memory that training needs, by part, computed from a run's configs alone.

It counts the tensors that the trainer holds (PyTorch's allocated memory) at the peak of a step,
from the second step on. Activations are those of code that is not compiled: compiled code keeps
fewer. The loss is that of compiled code where the run compiles on a GPU. Letters as in `gpt.py`;
H heads, L layers.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, fields, replace

from lab.plan.optimizer_memory import state_bytes, step_bytes
from lab.plan.setting import FLOAT32, Setting, num_parameters
from ops.sizes import attention_blocks, head_chunk_tokens

IDS = 2 * 8  # bytes of a token's id and its target, int64
MAX_MICROBATCH = 2**21  # more than fits on any GPU


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
    if _chunk_tokens(setting, microbatch_size) is None:
        moments = [_in_loss_backward, _in_head_backward]
    else:
        moments = [_in_chunked_loss, _after_chunked_loss]
    if setting.train.activation_checkpointing:
        moments.append(_in_recomputed_layer)
    moments += [_before_optimizer_step, _in_optimizer_step]
    return max((moment(setting, microbatch_size) for moment in moments),
               key=lambda memory: memory.total)


def largest_microbatch(setting: Setting, memory_gib: float) -> int:
    """Return the largest microbatch whose peak is at most `memory_gib`; 0 if not even 1 fits.

    A run with a global batch counts as accumulating gradients even where one microbatch makes up
    the whole batch. Memory then grows with the microbatch, and every smaller one fits too.
    """
    if (setting.train.global_batch_size or 0) > setting.num_processes:
        accumulating = {"global_batch_size": None, "gradient_accumulation_steps": 2}
        setting = replace(setting, train=setting.train.model_copy(update=accumulating))
    sizes = range(1, MAX_MICROBATCH)
    return bisect_right(sizes, memory_gib * 2**30,
                        key=lambda size: peak_memory(setting, size).total)


def _in_loss_backward(setting: Setting, microbatch_size: int) -> Memory:
    """All activations, log-softmax's output, its gradient, and the logits' gradient are held.

    Of compiled code, the logits and their gradient, in low precision.
    """
    tokens = microbatch_size * setting.model.context_length
    logit = 2 * setting.element if _is_compiled(setting) else 3 * FLOAT32
    logits = logit * setting.model.vocab_size * tokens
    return _memory(setting, microbatch_size, temporary=logits)


def _in_head_backward(setting: Setting, microbatch_size: int) -> Memory:
    """The gradient of the head's weight is computed in low precision, then cast to float32."""
    V, C = setting.model.vocab_size, setting.model.emb_dim
    tokens = microbatch_size * setting.model.context_length
    gradient = (FLOAT32 + (setting.element if setting.element < FLOAT32 else 0)) * V * C
    logits = setting.element * V * tokens + gradient
    return _memory(setting, microbatch_size, temporary=logits)


def _chunk_tokens(setting: Setting, microbatch_size: int) -> int | None:
    train = setting.train.model_copy(update={"microbatch_size": microbatch_size})
    return head_chunk_tokens(setting.model, train, is_eager_on_cpu=setting.is_eager_on_cpu)


def _is_compiled(setting: Setting) -> bool:
    """Return whether the loss is compiled: it has no float32 logits then."""
    return setting.on_gpu and setting.train.compile is not False


def _in_chunked_loss(setting: Setting, microbatch_size: int) -> Memory:
    """One chunk's logits, float32 logits, probabilities and part of the head's gradient are held.

    So are the whole gradients of the head and of its input. Compiled code has two buffers of a
    chunk's size in low precision, which it uses in turn. Part of the head's gradient is float32 in
    fp16.
    """
    V, C, e = setting.model.vocab_size, setting.model.emb_dim, setting.element
    tokens = microbatch_size * setting.model.context_length
    n = min(_chunk_tokens(setting, microbatch_size) or tokens, tokens)
    logit = 2 * e if _is_compiled(setting) else 2 * FLOAT32 + (e if e < FLOAT32 else 0)
    chunk = logit * n * V + (FLOAT32 if setting.precision == "fp16" else e) * V * C
    whole = e * tokens * C + (FLOAT32 * tokens * C if e < FLOAT32 else 0) + FLOAT32 * V * C
    return _memory(setting, microbatch_size, temporary=chunk + whole)


def _after_chunked_loss(setting: Setting, microbatch_size: int) -> Memory:
    """The head's gradient is held, and its input's: as computed, scaled, and cast to float32."""
    V, C, e = setting.model.vocab_size, setting.model.emb_dim, setting.element
    tokens = microbatch_size * setting.model.context_length
    gradients = (2 * e + (FLOAT32 if e < FLOAT32 else 0)) * tokens * C + FLOAT32 * V * C
    return _memory(setting, microbatch_size, temporary=gradients)


def _in_recomputed_layer(setting: Setting, microbatch_size: int) -> Memory:
    """One layer's activations are recomputed; the residual stream's gradient is held too."""
    tokens = microbatch_size * setting.model.context_length
    V, C = setting.model.vocab_size, setting.model.emb_dim
    recomputed = _layer_bytes(setting) + (FLOAT32 + setting.residual) * C
    return _memory(setting, microbatch_size, temporary=tokens * recomputed + FLOAT32 * V * C)


def _before_optimizer_step(setting: Setting, _: int) -> Memory:
    """All gradients are held. A tied matrix has two, and in float32 their sum too."""
    tied = setting.model.vocab_size * setting.model.emb_dim if setting.model.tie_weights else 0
    return _with_gradients(setting, FLOAT32 * tied * (2 if setting.element == FLOAT32 else 1))


def _in_optimizer_step(setting: Setting, _: int) -> Memory:
    return _with_gradients(setting, step_bytes(setting))


def _with_gradients(setting: Setting, temporary: float) -> Memory:
    """Return what is held when no activations are left: all gradients, and temporary tensors."""
    memory = _memory(setting, 0, temporary=temporary)
    return memory if setting.num_processes > 1 else replace(memory, gradients=memory.weights)


def _memory(setting: Setting, microbatch_size: int, *, temporary: float) -> Memory:
    """Return what is held at a moment: temporary tensors, and all that lasts longer."""
    model, is_distributed = setting.model, setting.num_processes > 1
    weights = FLOAT32 * num_parameters(model)
    accumulates = _accumulates(setting, microbatch_size)
    matmul_weights = 12 * model.n_layers * model.emb_dim**2 + model.vocab_size * model.emb_dim
    tokens = microbatch_size * model.context_length
    has_copies = setting.element < FLOAT32 and tokens > 0
    return Memory(
        weights=weights,
        optimizer=state_bytes(setting),
        gradients=weights if accumulates and not is_distributed else 0,
        buckets=weights if is_distributed else 0,
        weight_copies=setting.element * matmul_weights if has_copies else 0,
        activations=tokens * _activation_bytes(setting),
        logits=temporary,
    )


def _accumulates(setting: Setting, microbatch_size: int) -> bool:
    """Return whether gradients of earlier microbatches are held while the next one runs."""
    wanted = setting.train.global_batch_size
    if wanted is None:
        return setting.train.gradient_accumulation_steps > 1
    return wanted > microbatch_size * setting.num_processes


def _activation_bytes(setting: Setting) -> float:
    """Return the bytes per token that the forward pass keeps for the backward pass."""
    model, C = setting.model, setting.model.emb_dim
    ends = _norm_bytes(setting) + IDS
    if model.drop_rate:
        ends += C if setting.on_gpu else FLOAT32 * C
    if setting.train.activation_checkpointing:
        return model.n_layers * setting.residual * C + ends
    return model.n_layers * _layer_bytes(setting) + ends


def _norm_bytes(setting: Setting) -> float:
    """Return a norm's bytes per token: input, output as the next product reads it, two statistics.

    On a GPU autocast casts the input to float32, and that copy is kept.
    """
    casts_input = setting.on_gpu and setting.element < FLOAT32
    input_element = FLOAT32 if casts_input else setting.residual
    return (input_element + setting.element) * setting.model.emb_dim + 2 * FLOAT32


def _layer_bytes(setting: Setting) -> float:
    """Return the bytes per token that one layer keeps for the backward pass."""
    model, e = setting.model, setting.element
    C, H, T = model.emb_dim, model.n_heads, model.context_length
    attention = (3 + 1) * e * C  # q, k, v; output
    chosen = setting.train.attention
    if setting.train.deterministic and setting.on_gpu and e == FLOAT32:
        chosen = "math"  # as trainer/precision.py decides
    if setting.is_eager_on_cpu and e < FLOAT32 and chosen == "auto":
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
