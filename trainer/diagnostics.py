"""Diagnostics of every so many global steps, measured on rank 0: norms, attention, logits, losses.

Shapes as in `gpt.py`. Each statistic is () float32, or (n_layers,) if its name says "layer".
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from basics.device import DeviceTime
from gpt import GPTModel
from ops.block_attention import causal_logits
from reporting.run_log import Report, RunLog
from settings.machine import Precision
from tokens.batch_plan import CACHED_LOGITS
from trainer.observer import Observer
from trainer.precision import autocast

Statistics = dict[str, Tensor]

DIGITS = 5  # significant ones in the records
PERCENTILES = (1, 50, 99)
MAX_SORTED = 2**20  # logits whose percentiles are computed: those of evenly spaced tokens


@dataclass
class Measured:
    """What was measured of a global step, and how long that took.

    Reading waits until the device has finished that step, not for those that it was given since.
    """

    global_step: int
    statistics: Statistics = field(default_factory=dict)
    times: list[tuple[DeviceTime, DeviceTime]] = field(default_factory=list)

    @property
    def numbers(self) -> dict[str, float | list[float]]:
        """The statistics as numbers: a list by layer, or one number."""
        for _, end in self.times:
            end.wait()
        rounded = {
            name: [float(f"{number:.{DIGITS}g}") for number in value.flatten().tolist()]
            for name, value in self.statistics.items()
        }
        return {
            name: values if self.statistics[name].dim() else values[0]
            for name, values in rounded.items()
        }

    @property
    def seconds(self) -> float:
        return sum(end.seconds_since(begin) for begin, end in self.times)


class Diagnostics(Observer):
    """Measures every `interval`-th step; nothing waits for the device before it is read. Rank 0.

    That rank has the averaged gradients and the weights of all ranks; its own data is enough for
    the rest, so that nothing is a collective. No number of the training changes.
    """

    def __init__(
        self,
        interval: int | None = None,
        precision: Precision | None = None,
        log: RunLog | Any = None,  # that `report` writes to
    ) -> None:
        self._interval, self._precision, self._log = interval, precision, log
        self._is_due = False
        self._measured: list[Measured] = []

    def begin_step(self, global_step: int) -> None:
        self._is_due = self._interval is not None and (global_step + 1) % self._interval == 0
        if self._is_due:
            self._measured.append(Measured(global_step))

    def report(self, report: Report) -> None:
        """Record what was measured in the steps of the report, and book its seconds."""
        assert report.window is not None
        for measured in self.pop_measured(up_to=report.global_step):
            self._log.record(measured.global_step, measured.numbers, report.window.spent)
            self._log.clock.count_diagnostics(measured.seconds)

    def before_update(self, model: GPTModel, token_ids: Tensor, targets: Tensor) -> None:
        """Measure the weights on a microbatch, and the averaged gradients before clipping."""
        if not self._is_due:
            return
        began, parts = DeviceTime(token_ids.device), parts_of(model)
        with autocast(self._precision, token_ids.device):
            statistics = forward_statistics(model, token_ids[:1], targets[:1])
        self._before = [[weight.detach().clone() for weight in part] for part in parts]
        statistics |= _by_layer("grad_norm", gradient_norms(parts))
        self._keep(statistics, began, token_ids.device)

    @torch.no_grad()
    def after_update(self, model: GPTModel) -> None:
        if not self._is_due:
            return
        device = model.token_embedding.weight.device
        began = DeviceTime(device)
        ratios = update_ratios(self._before, parts_of(model))
        del self._before
        self._keep(_by_layer("update_ratio", ratios), began, device)

    def _keep(self, statistics: Statistics, began: DeviceTime, device: torch.device) -> None:
        # Sent to pinned memory before the end that a report waits for, as `LossWindow` does it: a
        # copy at the report would wait for all steps that the device has been given by then.
        self._measured[-1].statistics |= {
            name: value.to("cpu", non_blocking=True) for name, value in statistics.items()
        }
        self._measured[-1].times.append((began, DeviceTime(device)))

    def pop_measured(self, up_to: int) -> Iterator[Measured]:
        """Yield what was measured since the last call, of steps up to `up_to`."""
        while self._measured and self._measured[0].global_step <= up_to:
            yield self._measured.pop(0)


NO_DIAGNOSTICS = Diagnostics()


def parts_of(model: GPTModel) -> list[list[nn.Parameter]]:
    """Return the parameters by layer, then those before the layers, then those after them."""
    embedding = [*model.token_embedding.parameters(), *model.position_embedding.parameters()]
    head = [] if model.config.tie_weights else [*model.head.parameters()]
    return [
        *([*block.parameters()] for block in model.blocks),
        embedding,
        [*model.final_norm.parameters(), *head],
    ]


def _by_layer(name: str, values: list[Tensor]) -> Statistics:
    """Name one () value of each of `parts_of`."""
    *layers, embedding, head = values
    return {
        f"layer_{name}": torch.stack(layers),
        f"embedding_{name}": embedding,
        f"head_{name}": head,
    }


def gradient_norms(parts: list[list[nn.Parameter]]) -> list[Tensor]:
    return [get_total_norm([weight.grad for weight in part]) for part in parts]  # type: ignore[misc]


def update_ratios(before: list[list[Tensor]], after: list[list[nn.Parameter]]) -> list[Tensor]:
    """Return for each part the norm of its change, as a share of its norm before, ()."""
    ratios = []
    for old_part, new_part in zip(before, after, strict=True):
        changes = [new - old for new, old in zip(new_part, old_part, strict=True)]
        ratios.append(get_total_norm(changes) / get_total_norm(old_part))
    return ratios


@torch.no_grad()
def forward_statistics(model: GPTModel, token_ids: Tensor, targets: Tensor) -> Statistics:
    """Run the layers one by one, without dropout and not compiled, and measure each.

    `token_ids` and `targets` are (B, T) int64. Nothing here draws random numbers. Returns the
    mean norm of the residual stream of a token, as embedded and after each layer; by layer the
    largest attention logit and the mean entropy of the attention weights, in nats; and percentiles
    of the logits and of the losses of tokens, in nats.
    """
    was_training = model.training
    model.eval()
    x = model.embed(token_ids)
    norms, largest, entropies = [x.float().norm(dim=-1).mean()], [], []
    for block in model.blocks:
        q, k, _ = block.attention.project(block.attention_norm(x))  # (B, H, T, D)
        maximum, entropy = attention_statistics(q, k)
        largest.append(maximum)
        entropies.append(entropy)
        x = block(x)
        norms.append(x.float().norm(dim=-1).mean())
    statistics = head_statistics(model, model.final_norm(x).flatten(0, 1), targets.flatten())
    model.train(was_training)
    return {
        "embedding_activation_norm": norms[0],
        "layer_activation_norm": torch.stack(norms[1:]),
        "layer_max_attention_logit": torch.stack(largest),
        "layer_attention_entropy": torch.stack(entropies),
    } | statistics


def attention_statistics(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit and the mean entropy, in nats, of queries and keys (B, H, T, D)."""
    with torch.autocast(q.device.type, enabled=False):
        parts = [
            (logits.amax(), torch.special.entr(logits.softmax(dim=-1)).sum())
            for logits in causal_logits(q.float(), k.float())
        ]
    maxima, sums = map(torch.stack, zip(*parts, strict=True))
    return maxima.amax(), sums.sum() / q[..., 0].numel()


def head_statistics(model: GPTModel, x: Tensor, targets: Tensor) -> Statistics:
    """Measure logits and losses of x (N, C), after the final norm; targets (N,)."""
    V, largest, losses = len(model.head_weight), [], []
    n = max(1, CACHED_LOGITS // V)
    for x_chunk, chunk_targets in zip(x.split(n), targets.split(n), strict=True):
        logits = F.linear(x_chunk, model.head_weight).float()  # (n, V)
        largest.append(logits.amax())
        losses.append(F.cross_entropy(logits, chunk_targets, reduction="none"))  # (n,)
    some = x[:: -(-len(x) * V // MAX_SORTED)]
    statistics = {"logit_max": torch.stack(largest).amax()}
    for name, values in (
        ("logit", F.linear(some, model.head_weight).float()),
        ("token_loss", torch.cat(losses)),
    ):
        ordered = values.flatten().sort().values
        # Copies: a view would keep all of the sorted values until it is read.
        statistics |= {
            f"{name}_p{percent}": ordered[round(percent / 100 * (len(ordered) - 1))].clone()
            for percent in PERCENTILES
        }
    return statistics | {"token_loss_max": ordered[-1].clone()}
