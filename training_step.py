"""One global step: forward, backward, accumulation, gradients shared, weights updated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.attention import SDPBackend
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gpt import GPTModel
from launching import (
    Process,
    autocast,
    choose_precision,
    seed_for,
    set_matmul_precision,
    share_cpu_cores,
)
from optimization import build_optimizer, clip_gradients, set_learning_rate
from run_config import ModelConfig, TrainConfig
from token_dataset import Microbatch


@dataclass(frozen=True)
class TrainingState:
    """What a checkpoint holds of the training: the unwrapped model, the optimizer, the scaler.

    The schedule and the random streams are functions of the position in the run: nothing of them
    has to be kept.
    """

    model: GPTModel
    optimizer: Optimizer
    scaler: GradScaler


def build_training_state(
    model_config: ModelConfig, train: TrainConfig, device: torch.device
) -> TrainingState:
    """Build a model, the same on every rank, and its optimizer, as they are before step 0."""
    torch.manual_seed(train.random_seed)
    model = GPTModel(model_config).to(device)
    scaler = GradScaler(device.type, enabled=choose_precision(train, device) == "fp16")
    return TrainingState(model, build_optimizer(model, train), scaler)


class TrainingStep:
    """Takes the global steps of one process."""

    def __init__(self, state: TrainingState, train: TrainConfig, process: Process) -> None:
        share_cpu_cores(process)
        self.state, self.train, self.process = state, train, process
        self.precision = choose_precision(train, process.device)
        set_matmul_precision(self.precision)
        self.parallel_model = self._parallel(state.model)

    def _parallel(self, model: GPTModel) -> nn.Module:
        if self.process.world_size == 1:
            return model  # nobody to share gradients with: DDP would only cost time
        device_ids = [self.process.device] if self.process.device.type == "cuda" else None
        return DistributedDataParallel(
            model, device_ids=device_ids, gradient_as_bucket_view=True
        )

    def attention_kernel(self) -> str:
        """Name the kernel that PyTorch chooses for this model's attention in training."""
        model, drop_rate = self.state.model.config, self.state.model.config.drop_rate
        shape = (1, model.n_heads, model.context_length, model.emb_dim // model.n_heads)
        with autocast(self.precision, self.process.device):
            dtype = torch.mm(*torch.zeros(2, 1, 1, device=self.process.device)).dtype
        q = torch.zeros(shape, dtype=dtype, device=self.process.device, requires_grad=True)
        chosen = torch._fused_sdp_choice(q, q, q, dropout_p=drop_rate, is_causal=True)
        return SDPBackend(chosen).name.split("_")[0].lower()

    def take(self, microbatches: Iterator[Microbatch], *, num_microbatches: int,
             learning_rate: float) -> tuple[Tensor, Tensor]:
        """Take one global step. Every rank; nothing here waits for the device.

        Args:
            microbatches: the next `num_microbatches` of it are this process's part of the step.

        Returns:
            This process's mean loss and the norm of the averaged gradient, each () float32.
        """
        optimizer, scaler = self.state.optimizer, self.state.scaler
        set_learning_rate(optimizer, learning_rate)
        loss = self._accumulate_gradients(microbatches, num_microbatches)
        scaler.unscale_(optimizer)
        grad_norm = clip_gradients(self.state.model, self.train.clipping_max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss, grad_norm

    def _accumulate_gradients(
        self, microbatches: Iterator[Microbatch], num_microbatches: int
    ) -> Tensor:
        step_loss = torch.zeros((), device=self.process.device)
        for accumulation_step in range(num_microbatches):
            index, token_ids, targets = next(microbatches)
            torch.manual_seed(seed_for(self.train.random_seed, index))
            # DDP reads require_backward_grad_sync in the forward pass, so forward and backward
            # both stand inside no_sync().
            with self._gradient_sync(accumulation_step == num_microbatches - 1):
                with autocast(self.precision, self.process.device):
                    loss = self.parallel_model(token_ids, targets) / num_microbatches
                self.state.scaler.scale(loss).backward()
            step_loss += loss.detach()
        return step_loss

    def _gradient_sync(self, is_last: bool) -> AbstractContextManager[None]:
        if is_last or self.parallel_model is self.state.model:
            return nullcontext()
        return self.parallel_model.no_sync()
