"""Training written down a second time, from the papers' formulas: a second opinion on the trainer.

Everything is float64 and plain: no modules, kernels, chunks, processes or optimizer classes, and
nothing of the trainer's but its configs. Shapes as in `gpt.py`.

Sources: Radford et al. 2019 for the model; Loshchilov and Hutter 2019, algorithm 2, for AdamW;
Jordan et al. 2024 and Amsel et al. 2025, algorithm 1, for Muon; docs/configuration.md for the
meaning of the keys.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from run_config import ModelConfig, TrainConfig
from settings.machine import Precision

Weights = dict[str, Tensor]
FLOAT32 = 2.0**-22  # relative rounding of a few operations in float32
# Largest rounding of the trainer's gradients in units of this loop's own in the same precision, and
# twice what 500 configurations have shown: in bf16 the trainer's attention rounds its scores too.
NOISE = {"fp32": 12.0, "tf32": 12.0, "bf16": 18.0, "fp16": 12.0}
SIXTEEN_BITS = {"bf16": torch.bfloat16, "fp16": torch.float16}
POLYNOMIALS = (  # of Muon, each used once
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
SAFETY = 1.02  # they are for singular values below 1
LOSS_SCALE = 2.0**10  # keeps the gradients of fp16 from vanishing
LARGEST_UPDATE = 4.0  # of AdamW, before the learning rate, if rounding decides it


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
        q, k, v = (
            part.reshape(B, T, model.n_heads, -1).transpose(1, 2) for part in qkv.chunk(3, -1)
        )  # (B, H, T, D) each
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
    if start < num_steps - 1:
        done = max(0, step - start) / (num_steps - 1 - start)
    else:  # a decay of one step is all done in it, unless it is the whole run
        done = 1.0 if step == start > 0 else 0.0
    left = {
        "constant": 1.0,
        "linear": 1 - done,
        "wsd": 1 - math.sqrt(done),
        "cosine": (1 + math.cos(math.pi * done)) / 2,
    }[kind]
    final = train.final_learning_rate_fraction
    if final is None:
        final = 0.1 if kind == "cosine" else 0.0
    return train.learning_rate * (final + (1 - final) * left)


def options_of(name: str, train: TrainConfig) -> dict[str, Any]:
    """Return the optimizer's options for a parameter."""
    group = (
        "vector"
        if name.endswith("bias") or "norm" in name
        else ("embedding" if "embedding" in name else "head" if name == "head.weight" else "matrix")
    )
    is_muon = train.optimizer == "muon" and group == "matrix"
    options = {key: getattr(train, key) for key in ("learning_rate", "weight_decay", "beta2")}
    if train.optimizer == "muon":
        is_decayed = group == "matrix"
    else:
        is_decayed = group != "vector" or train.decay_norms_and_biases
    if not is_decayed:
        options["weight_decay"] = 0.0
    own_rate = getattr(train, f"{group}_learning_rate")
    if own_rate is not None:
        options["learning_rate"] = own_rate
    return options | {"is_muon": is_muon, "beta1": train.beta1}


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

    Attributes:
        noise: how far rounding may move an element of each parameter's gradient in the last step;
            `first_noise` and `second_noise`: of the moving averages of it and of its square.
        slack: how far that may move each weight: where the gradient is as small as the noise, by
            the learning rate either way.
    """

    def __init__(
        self,
        model: ModelConfig,
        train: TrainConfig,
        weights: Mapping[str, Tensor],
        *,
        tokens: Tensor,
        sequences: int,
    ) -> None:
        self.model, self.train, self.tokens, self.precision = model, train, tokens, train.precision
        self.step_tokens = sequences * model.context_length
        self.num_steps = (len(tokens) - train.start_train_token - 1) // self.step_tokens
        if train.min_train_tokens != -1:
            self.num_steps = math.ceil(train.min_train_tokens / self.step_tokens)
        self.weights = {
            name: weight.detach().double().requires_grad_() for name, weight in weights.items()
        }
        self.first, self.second = (
            {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
            for _ in range(2)
        )
        self.first_noise, self.second_noise = (dict.fromkeys(self.weights, 0.0) for _ in range(2))
        self.num_updates = self.num_skipped = 0

    def take(self, step: int, *, skips: bool = False) -> tuple[Tensor, Tensor]:
        """Take a global step, or skip it; return its loss and its gradient's norm, () each."""
        loss, norm, gradients = self._gradients(step, self.weights)
        self.noise: dict[str, float] = {}
        self.slack = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self._measure_noise(step, gradients)
        self.num_skipped += skips
        self.num_updates += not skips
        for name, gradient in ({} if skips else gradients).items():
            self._update(name, gradient, step)
        return loss, norm

    @torch.no_grad()
    def follow(self, weights: Mapping[str, Tensor]) -> None:
        """Go on from other weights than its own."""
        for name, weight in weights.items():
            self.weights[name].copy_(weight)

    def _gradients(self, step: int, weights: Weights) -> tuple[Tensor, Tensor, Weights]:
        """Return loss and gradient norm of a step, () each, and the clipped gradients."""
        T, B = self.model.context_length, self.train.microbatch_size
        losses = []
        for index in range(
            step * self.step_tokens // (B * T), (step + 1) * self.step_tokens // (B * T)
        ):
            start = self.train.start_train_token + index * B * T
            ids, targets = (
                self.tokens[first : first + B * T].view(B, T) for first in (start, start + 1)
            )
            seed = hashlib.blake2b(f"{self.train.random_seed}/{index}".encode(), digest_size=7)
            torch.manual_seed(int.from_bytes(seed.digest()))
            logits = forward(weights, self.model, ids, drops=True)
            logits = logits.to(weights["final_norm.weight"].dtype)  # for sums not in 16 bits
            correct = logits.gather(-1, targets[..., None])[..., 0]
            losses.append((logits.logsumexp(-1) - correct).mean())
        loss = sum(losses) / len(losses)
        gradients = torch.autograd.grad(loss * LOSS_SCALE, list(weights.values()))
        gradients = [gradient / LOSS_SCALE for gradient in gradients]
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        factor = min(1.0, (self.train.clipping_max_norm or math.inf) / (norm + 1e-6))
        return (
            loss.detach(),
            norm,
            {name: gradient * factor for name, gradient in zip(weights, gradients, strict=True)},
        )

    def _measure_noise(self, step: int, gradients: Weights) -> None:
        """Compute the gradients in the run's precision, to know what rounding does to them."""
        weights = {
            name: weight.detach().float().requires_grad_() for name, weight in self.weights.items()
        }
        with torch.autocast(
            "cpu", dtype=SIXTEEN_BITS.get(self.precision), enabled=self.precision in SIXTEEN_BITS
        ):
            rounded = self._gradients(step, weights)[2]
        for name, gradient in gradients.items():
            self.noise[name] = (
                NOISE[self.precision] * (rounded[name] - gradient).abs().max()
                + FLOAT32 * gradient.abs().max()
            ).item()

    @torch.no_grad()
    def _update(self, name: str, gradient: Tensor, step: int) -> None:
        options, weight = options_of(name, self.train), self.weights[name]
        rate = learning_rate(self.train, step, self.num_steps)
        rate *= options["learning_rate"] / self.train.learning_rate
        mu = self.train.momentum if options["is_muon"] else options["beta1"]
        self.first[name].copy_(mu * self.first[name] + (1 - mu) * gradient)
        self.first_noise[name] = mu * self.first_noise[name] + (1 - mu) * self.noise[name]
        update, slack = (
            self._muon(name, gradient, mu)
            if options["is_muon"]
            else self._adamw(name, gradient, options)
        )
        decay = options["weight_decay"] * weight
        self.slack[name] = rate * slack + FLOAT32 * (weight.abs() + rate * update.abs())
        weight -= rate * (update + decay)

    def _adamw(self, name: str, gradient: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        beta1, beta2, t = options["beta1"], options["beta2"], self.num_updates
        second = self.second[name].copy_(beta2 * self.second[name] + (1 - beta2) * gradient**2)
        self.second_noise[name] = beta2 * self.second_noise[name] + (
            2 * (1 - beta2) * gradient.abs().max().item() * self.noise[name]
        )
        scale = (second / (1 - beta2**t)).sqrt() + self.train.epsilon
        slack = (self.noise[name] / scale).clamp(max=LARGEST_UPDATE)
        return self.first[name] / (1 - beta1**t) / scale, slack

    def _muon(self, name: str, gradient: Tensor, mu: float) -> tuple[Tensor, Tensor]:
        parts = (mu * self.first[name] + (1 - mu) * gradient).chunk(3 if ".qkv." in name else 1)
        noise = mu * self.first_noise[name] + (1 - mu) * self.noise[name]
        return (
            torch.cat([orthogonal(part) for part in parts]),
            torch.cat([muon_slack(part, noise, self.precision) for part in parts]),
        )


def muon_slack(matrix: Tensor, noise: float, precision: Precision | None) -> Tensor:
    """Return the slack of an orthogonalised matrix, 4 standard deviations of its elements.

    Noise turns each singular vector by an angle, the more the smaller its value is, up to where the
    polynomials do not raise it to 1. In bf16 the orthogonalisation itself rounds too.
    """
    growth = math.prod(a for a, _, _ in POLYNOMIALS) / SAFETY  # of the smallest values
    own = 2.0**-7 if precision == "bf16" else FLOAT32
    values = torch.linalg.svdvals(matrix).clamp(min=matrix.norm() / growth + 1e-300)
    angles = ((noise * math.sqrt(max(matrix.shape)) + own * values.max()) / values).clamp(max=2.0)
    scale = math.sqrt(max(1.0, matrix.shape[0] / matrix.shape[1]))
    return torch.full_like(matrix, 4 * scale * angles.norm() / math.sqrt(matrix.numel()))
