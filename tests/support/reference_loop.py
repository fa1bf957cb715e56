"""Training written down a second time, from the papers' formulas: a second opinion on the trainer.

All of it is float64, and plain: no modules, no kernels, no chunks, no processes, no optimizer
classes. Only the coefficients of Muon's polynomials are the trainer's. Shapes as in `gpt.py`.

Sources: Radford et al. 2019 for the model; Loshchilov and Hutter 2019, algorithm 2, for AdamW; Chen
et al. 2025, algorithm 1, for cautious decay; Jordan et al. 2024 and Amsel et al. 2025, algorithm 1,
for Muon; docs/configuration.md for the meaning of the keys.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.orthogonalise import POLYNOMIALS, SAFETY
from run_config import ModelConfig, TrainConfig

Weights = dict[str, Tensor]
LARGEST_STEP = 4.0  # of AdamW, in learning rates: more than its update can differ by


def forward(weights: Weights, model: ModelConfig, ids: Tensor, *, drops: bool = False) -> Tensor:
    """Compute the logits (B, T, V) of token ids (B, T); with `drops` draw dropout masks."""
    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    def norm(x: Tensor, name: str) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def drop(x: Tensor) -> Tensor:
        if not drops or not model.drop_rate:
            return x
        return x * F.dropout(torch.ones(x.shape), model.drop_rate)

    B, T = ids.shape
    future = torch.ones(T, T).triu(1).bool()
    x = drop(weights["token_embedding.weight"][ids] + weights["position_embedding.weight"][:T])
    for block in (f"blocks.{layer}" for layer in range(model.n_layers)):
        qkv = linear(norm(x, f"{block}.attention_norm"), f"{block}.attention.qkv")  # (B, T, 3 C)
        q, k, v = (part.reshape(B, T, model.n_heads, -1).transpose(1, 2)
                   for part in qkv.chunk(3, -1))  # (B, H, T, D) each
        scores = q @ k.mT / math.sqrt(q.shape[-1])  # (B, H, T, T)
        y = drop(scores.masked_fill(future, -math.inf).softmax(-1)) @ v  # (B, H, T, D)
        x = x + drop(linear(y.transpose(1, 2).reshape(x.shape), f"{block}.attention.output"))
        h = linear(norm(x, f"{block}.mlp_norm"), f"{block}.mlp.up")  # (B, T, 4 C)
        h = h / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        x = x + drop(linear(h, f"{block}.mlp.output"))
    head = weights["token_embedding.weight" if model.tie_weights else "head.weight"]
    return norm(x, "final_norm") @ head.T


def learning_rate(train: TrainConfig, step: int, num_steps: int) -> float:
    """Return the learning rate of a global step."""
    kind = train.schedule or ("cosine" if train.schedule_learning_rate else "constant")
    warmup = math.floor(num_steps * train.warmup_period_percent / 100)
    if step < warmup:
        return train.learning_rate * (step + 1) / warmup
    percent = train.decay_period_percent or (20 if kind == "wsd" else 100)
    start = max(warmup, num_steps - math.ceil(num_steps * percent / 100))
    done = 0.0 if step <= start else (step - start) / (num_steps - 1 - start)
    left = {"constant": 1.0, "linear": 1 - done, "wsd": 1 - math.sqrt(done),
            "cosine": (1 + math.cos(math.pi * done)) / 2}[kind]
    final = train.final_learning_rate_fraction
    if final is None:
        final = 0.1 if kind == "cosine" else 0.0
    return train.learning_rate * (final + (1 - final) * left)


def momentum(train: TrainConfig, step: int, num_steps: int) -> float:
    """Return Muon's momentum in a global step."""
    warmup = math.floor(num_steps * train.momentum_warmup_percent / 100)
    start = min(0.85, train.momentum)
    return start + (train.momentum - start) * min(1.0, step / warmup if warmup else 1.0)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return Muon's update of a moving average (out, in), before the learning rate."""
    x = matrix / (matrix.norm() * SAFETY + 1e-7)
    for a, b, c in POLYNOMIALS:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x * math.sqrt(max(1.0, matrix.shape[0] / matrix.shape[1]))


class ReferenceLoop:
    """A training run of one process.

    Args:
        weights: the initial ones.
        tokens: of the training file, (N,) int64.
        sequences: of a global step.
        rounding: how far rounding moves an element of a gradient, relative to the tensor's largest.

    Attributes:
        slack: how far rounding of the gradients may have moved each weight: a gradient that is
            itself as small as the rounding may have moved it by the learning rate either way.
    """

    def __init__(self, model: ModelConfig, train: TrainConfig, weights: Weights, tokens: Tensor, *,
                 sequences: int, rounding: float) -> None:
        self.model, self.train, self.tokens, self.rounding = model, train, tokens, rounding
        self.step_tokens = sequences * model.context_length
        self.num_steps = (len(tokens) - train.start_train_token - 1) // self.step_tokens
        if train.min_train_tokens != -1:
            self.num_steps = math.ceil(train.min_train_tokens / self.step_tokens)
        self.weights = {name: weight.detach().double().requires_grad_()
                        for name, weight in weights.items()}
        self.slack, self.first, self.second = ({
            name: torch.zeros_like(weight) for name, weight in self.weights.items()}
            for _ in range(3))
        self.average: Weights = {}
        self.num_updates = self.num_averaged = 0

    def take(self, step: int, *, skips: bool = False) -> tuple[Tensor, Tensor]:
        """Take a global step, or skip it; return its loss and its gradient's norm, () each."""
        loss, gradients = self._gradients(step)
        norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
        if not skips:
            self.num_updates += 1
            limit = self.train.clipping_max_norm or math.inf
            for name, gradient in gradients.items():
                self._update(name, gradient * min(1.0, limit / (norm + 1e-6)), step)
        self._add_to_average(step)
        return loss, norm

    def _gradients(self, step: int) -> tuple[Tensor, Weights]:
        size = self.train.microbatch_size * self.model.context_length
        indices = range(step * self.step_tokens // size, (step + 1) * self.step_tokens // size)
        losses = []
        for index in indices:
            start = self.train.start_train_token + index * size
            ids, targets = (self.tokens[start + shift : start + shift + size].view(
                -1, self.model.context_length) for shift in (0, 1))
            seed = hashlib.blake2b(f"{self.train.random_seed}/{index}".encode(), digest_size=7)
            torch.manual_seed(int.from_bytes(seed.digest()))
            logits = forward(self.weights, self.model, ids, drops=True)
            losses.append((logits.logsumexp(-1) - logits.gather(-1, targets[..., None])[..., 0])
                          .mean())
        loss = sum(losses) / len(losses)
        gradients = torch.autograd.grad(loss, list(self.weights.values()))
        return loss.detach(), dict(zip(self.weights, gradients, strict=True))

    @torch.no_grad()
    def _update(self, name: str, gradient: Tensor, step: int) -> None:
        options = self.options(name)
        rate = learning_rate(self.train, step, self.num_steps)
        rate *= options["learning_rate"] / self.train.learning_rate
        update, slack = (self._muon(name, gradient, step) if options["is_muon"] else
                         self._adamw(name, gradient, options))
        weight, decay = self.weights[name], options["weight_decay"] * self.weights[name]
        if self.train.cautious_weight_decay:
            self.slack[name] += rate * decay.abs() * (update.abs() <= slack + 1e-7 * weight.abs())
            decay = decay * (update * weight > 0)
        weight -= rate * (update + decay)
        self.slack[name] += rate * slack

    def _adamw(self, name: str, gradient: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        (beta1, beta2), t = options["betas"], self.num_updates
        first, second = self.first[name], self.second[name]
        first.copy_(beta1 * first + (1 - beta1) * gradient)
        second.copy_(beta2 * second + (1 - beta2) * gradient**2)
        scale = (second / (1 - beta2**t)).sqrt() + self.train.epsilon
        slack = self.rounding * gradient.abs().max() / scale
        return first / (1 - beta1**t) / scale, slack.clamp(max=LARGEST_STEP)

    def _muon(self, name: str, gradient: Tensor, step: int) -> tuple[Tensor, Tensor]:
        mu = momentum(self.train, step, self.num_steps)
        average = self.first[name].copy_(mu * self.first[name] + (1 - mu) * gradient)
        parts = (mu * average + (1 - mu) * gradient).chunk(3 if ".qkv." in name else 1)
        updates = [orthogonal(part) for part in parts]
        return torch.cat(updates), torch.cat([self._muon_slack(part) for part in parts])

    def _muon_slack(self, matrix: Tensor) -> Tensor:
        """Singular vectors whose value is as small as the rounding may point anywhere."""
        values = torch.linalg.svdvals(matrix)
        angles = (self.rounding * matrix.norm() / values.clamp(min=1e-300)).clamp(max=2.0)
        scale = math.sqrt(max(1.0, matrix.shape[0] / matrix.shape[1]))
        return torch.full_like(matrix, scale * angles.norm().item() / math.sqrt(matrix.numel()))

    def options(self, name: str) -> dict[str, Any]:
        """Return the optimizer's options for a parameter."""
        group = "vector" if name.endswith("bias") or "norm" in name else (
            "embedding" if "embedding" in name else "head" if name == "head.weight" else "matrix")
        is_muon = self.train.optimizer == "muon" and group == "matrix"
        own = {key: getattr(self.train, f"{group}_{key}")
               for key in ("learning_rate", "weight_decay", "beta1", "beta2")}
        default = {key: getattr(self.train, key) for key in own}
        if is_muon:
            default["learning_rate"] = 0.02
        if group == "vector" and not self.train.decay_norms_and_biases:
            default["weight_decay"] = 0.0
        found = {key: default[key] if own[key] is None else own[key] for key in own}
        return found | {"is_muon": is_muon, "betas": (found["beta1"], found["beta2"])}

    def _add_to_average(self, step: int) -> None:
        horizon = self.train.weight_average
        if horizon is None or step < self.num_steps - 5 * horizon:
            return
        self.num_averaged += 1
        share = max(1 / self.num_averaged, 1 / horizon)
        for name, weight in self.weights.items():
            old = self.average.get(name, torch.zeros_like(weight))
            self.average[name] = ((1 - share) * old + share * weight).detach()
