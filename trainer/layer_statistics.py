"""Statistics of a model on one sequence: activations and attention by layer, logits and losses.

Shapes as in `gpt.py`. Each statistic is () float32, or (n_layers,) if its name says "layer". All of
them stay on the device.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt import GPTModel
from ops.sizes import CACHED_LOGITS, attention_blocks

Statistics = dict[str, Tensor]

PERCENTILES = (1, 50, 99)
MAX_SORTED = 2**20  # logits whose percentiles are computed: those of evenly spaced tokens


@torch.no_grad()
def forward_statistics(model: GPTModel, token_ids: Tensor, targets: Tensor) -> Statistics:
    """Run the layers one by one, without dropout and not compiled, and measure each.

    Nothing here draws random numbers.

    Args:
        token_ids, targets: (B, T) int64.

    Returns:
        The mean norm of the residual stream of a token, as embedded and after each layer; by layer
        the largest attention logit and the mean entropy of the attention weights, in nats; and
        percentiles of the logits and of the losses of tokens, in nats.
    """
    was_training = model.training
    model.eval()
    x = model.embed(token_ids)
    norms, largest, entropies = [_mean_norm(x)], [], []
    for block in model.blocks:
        q, k, _ = block.attention.project(block.attention_norm(x))
        largest_logit, entropy = attention_statistics(q, k)
        x = block(x)
        norms.append(_mean_norm(x))
        largest.append(largest_logit)
        entropies.append(entropy)
    statistics = _head_statistics(model, model.final_norm(x).flatten(0, 1), targets.flatten())
    model.train(was_training)
    return {"embedding_activation_norm": norms[0], "layer_activation_norm": torch.stack(norms[1:]),
            "layer_max_attention_logit": torch.stack(largest),
            "layer_attention_entropy": torch.stack(entropies)} | statistics


def attention_statistics(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit of causal attention, and the mean entropy of its weights in nats.

    A block of queries at a time, so that the T x T logits never exist.

    Args:
        q, k: (B, H, T, D) each.
    """
    B, H, T, D = q.shape
    q, k_t = q.flatten(0, 1).float(), k.flatten(0, 1).float().transpose(1, 2)
    largest, entropies = [], []
    with torch.autocast(q.device.type, enabled=False):
        for start, stop in attention_blocks(T):
            mask = q.new_full((stop - start, stop), -math.inf).triu(start + 1)
            logits = torch.baddbmm(mask, q[:, start:stop], k_t[:, :, :stop], alpha=D**-0.5)
            largest.append(logits.amax())
            entropies.append(torch.special.entr(logits.softmax(dim=-1)).sum())
    return torch.stack(largest).amax(), torch.stack(entropies).sum() / (B * H * T)


def _mean_norm(x: Tensor) -> Tensor:
    return x.float().norm(dim=-1).mean()


def _head_statistics(model: GPTModel, x: Tensor, targets: Tensor) -> Statistics:
    """Measure logits and losses of x (N, C), after the final norm; targets (N,)."""
    V = len(model.head_weight)
    chunk_tokens = max(1, CACHED_LOGITS // V)
    largest, losses = [], []
    for x_chunk, chunk_targets in zip(x.split(chunk_tokens), targets.split(chunk_tokens),
                                      strict=True):
        logits = F.linear(x_chunk, model.head_weight).float()  # (n, V)
        largest.append(logits.amax())
        losses.append(F.cross_entropy(logits, chunk_targets, reduction="none"))  # (n,)
    every = -(-len(x) * V // MAX_SORTED)
    sample = F.linear(x[::every], model.head_weight).float()
    all_losses = torch.cat(losses)
    return (percentiles("logit", sample) | {"logit_max": torch.stack(largest).amax()}
            | percentiles("token_loss", all_losses) | {"token_loss_max": all_losses.amax()})


def percentiles(name: str, values: Tensor) -> Statistics:
    """Return the PERCENTILES of a tensor, each the value that is nearest in rank."""
    ordered = values.flatten().sort().values
    return {f"{name}_p{percent}": ordered[round(percent / 100 * (len(ordered) - 1))]
            for percent in PERCENTILES}
