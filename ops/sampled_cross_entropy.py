"""Output head and cross-entropy over a part of the vocabulary: sampled softmax.

The cost of the head falls with the number of entries. Each token's own target always takes part, so
no step needs the part to have it.

Shapes as in `gpt.py`, and: N tokens in a microbatch, n in a chunk, K candidates.

Source: Jean et al. 2015, "On Using Very Large Target Vocabulary for Neural Machine Translation".
"""

import math
from typing import Any

import torch
from torch import Tensor

from ops.linear_cross_entropy import token_sum


class Candidates:
    """The entries of the vocabulary that the training loss of a step has.

    Half of them are the first ids, which are the most frequent entries of a byte-pair vocabulary:
    they were merged first. The other half takes turns over all other ids, in a shuffled order.

    `ids` (K,) int64; `columns` (V,) int64, the place of each entry in `ids`, or -1; `log_weights`
    (K,) float32, minus the logarithm of the share of the draws that a candidate is in.
    """

    def __init__(self, vocab_size: int, count: int, *, seed: int, device: torch.device) -> None:
        self._num_first = count // 2
        order = torch.randperm(
            vocab_size - self._num_first, generator=torch.Generator().manual_seed(seed)
        )
        self._others = (order + self._num_first).to(device)
        self.ids = torch.arange(count, device=device)
        self.columns = torch.empty(vocab_size, dtype=torch.int64, device=device)
        self.log_weights = torch.zeros(count, device=device)
        self.log_weights[self._num_first :] = math.log(len(order) / (count - self._num_first))
        self._places = torch.arange(count, device=device)
        self.draw(0)

    def draw(self, number: int) -> None:
        """Set the candidates of a draw. In place, so compiled code goes on to read them."""
        num_others = len(self.ids) - self._num_first
        turn = (number * num_others + self._places[:num_others]) % len(self._others)
        self.ids[self._num_first :] = self._others[turn]
        self.columns.fill_(-1)
        self.columns[self.ids] = self._places


def sampled_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    candidates: Candidates,
    *,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Estimate the mean cross-entropy of `x @ weight.T`, () float32, from candidates.

    The sum of a token's exponentials is estimated by its target's and the candidates', each counted
    as often as its log-weight says: its mean over the draws is the sum over the whole vocabulary.

    Args:
        x, weight, targets: (N, C) after the final norm; (V, C), the output head; (N,) int64.
        chunk_tokens: n, of every chunk but the last; None computes all tokens at once.
    """
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type):
        x = x.to(torch.get_autocast_dtype(device_type))
    with torch.autocast(device_type, enabled=False):
        return _SampledCrossEntropy.apply(
            x,
            weight,
            targets,
            candidates.ids,
            candidates.columns,
            candidates.log_weights,
            chunk_tokens or len(x),
        )


class _SampledCrossEntropy(torch.autograd.Function):
    """The mean loss; its forward pass also computes the gradients of the summed loss."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        ids: Tensor,
        columns: Tensor,
        log_weights: Tensor,
        chunk_tokens: int,
    ) -> Tensor:
        head = weight[ids].to(x.dtype)  # (K, C)
        places = torch.arange(len(ids), device=x.device)
        x_grads, losses = [], []
        head_grad = torch.zeros_like(head, dtype=torch.float32)  # of the candidates' logits
        weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        for part, part_targets in zip(
            x.split(chunk_tokens), targets.split(chunk_tokens), strict=True
        ):
            own_rows = weight[part_targets].to(x.dtype)  # (n, C)
            own = (part.float() * own_rows.float()).sum(1)  # (n,) logits
            logits = (part @ head.T).float() + log_weights  # (n, K)
            # The target counts once, by its own logit.
            logits.masked_fill_(places == columns[part_targets][:, None], -math.inf)
            log_sum = torch.logaddexp(logits.logsumexp(1), own)  # (n,)
            losses.append((log_sum - own).sum())
            grad = (logits - log_sum[:, None]).exp().to(x.dtype)  # (n, K)
            own_grad = ((own - log_sum).exp() - 1)[:, None]  # (n, 1)
            x_grads.append(grad @ head + (own_grad * own_rows).to(x.dtype))
            head_grad += token_sum(grad, part)
            weight_grad.index_add_(0, part_targets, own_grad * part)
            del logits, grad  # before the next chunk's are allocated
        weight_grad.index_add_(0, ids, head_grad)
        ctx.save_for_backward(torch.cat(x_grads), weight_grad)
        return sum(losses) / len(x)  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, loss_grad: Tensor) -> tuple[Tensor | None, ...]:
        x_grad, weight_grad = ctx.saved_tensors
        scale = loss_grad / len(x_grad)
        return x_grad * scale, weight_grad * scale, None, None, None, None, None
