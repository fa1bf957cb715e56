"""One global step: forward, backward, accumulation, gradients shared, weights updated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.attention import SDPBackend
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from basics.failpoints import failpoint
from gpt import GPTModel
from processes.launch import Process, share_cpu_cores
from run_config import ModelConfig, TrainConfig
from tokens.batches import Microbatch
from trainer.compilation import (
    ByLayer,
    Whole,
    choose_forward_options,
    chooses_compile,
    compile_error,
    compiled_validation_loss,
    keep_compiled_code,
)
from trainer.optimization import (
    build_optimizer,
    clip_gradients,
    set_learning_rate,
    skip_unless_finite,
)
from trainer.precision import autocast, choose_precision, seed_for, set_matmul_precision


@dataclass(frozen=True)
class TrainingState:
    """What a checkpoint holds of the training: the unwrapped model, the optimizer, the scaler.

    The schedule and the random streams are functions of the position in the run: nothing of them
    has to be kept.
    """

    model: GPTModel
    optimizer: Optimizer
    scaler: GradScaler


@dataclass(frozen=True)
class Snapshot:
    """A training state as it was at one moment, in host memory."""

    weights: dict[str, Tensor]
    trainer: dict[str, Any]  # the states of optimizer and scaler


class SnapshotBuffers:
    """Host memory that one snapshot after another is taken into: the last one is gone with it."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, state: TrainingState) -> Snapshot:
        """Copy a state. Waits for the device, as short as its connection allows."""
        weights = {name: self._copy(f"weights/{name}", tensor)
                   for name, tensor in state.model.state_dict().items()}
        optimizer = state.optimizer.state_dict()
        optimizer["state"] = {
            index: {name: self._copy(f"optimizer/{index}/{name}", tensor)
                    for name, tensor in of_parameter.items()}
            for index, of_parameter in optimizer["state"].items()
        }
        snapshot = Snapshot(weights, {"optimizer": optimizer, "scaler": state.scaler.state_dict()})
        if any(tensor.is_cuda for tensor in state.model.parameters()):
            torch.cuda.synchronize()
        return snapshot

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        """Copy one tensor; from a GPU into pages that stay where they are, at its full speed."""
        if name not in self._buffers:
            self._buffers[name] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return self._buffers[name].copy_(tensor.detach(), non_blocking=True)


def build_training_state(
    model_config: ModelConfig, train: TrainConfig, device: torch.device
) -> TrainingState:
    """Build a model, the same on every rank, and its optimizer, as they are before step 0."""
    keep_compiled_code()
    torch.manual_seed(train.random_seed)
    model = GPTModel(model_config, choose_forward_options(model_config, train, device)).to(device)
    scaler = GradScaler(device.type, enabled=choose_precision(train, device) == "fp16")
    return TrainingState(model, build_optimizer(model, train), scaler)


class TrainingStep:
    """Takes the global steps of one process. To build one compiles the model. Every rank.

    Attributes:
        is_compiled: whether it is.
        why_eager: what compiling tripped over, on the first rank where it did; else empty. Where
            `is_compiled`, only the validation has, and is not.
    """

    def __init__(self, state: TrainingState, train: TrainConfig, process: Process) -> None:
        share_cpu_cores(process)
        self.state, self.train, self.process = state, train, process
        self.precision = choose_precision(train, process.device)
        set_matmul_precision(self.precision)
        self.is_compiled, self.why_eager = False, ""
        loss: nn.Module = state.model
        self._full_validation_loss = loss
        if chooses_compile(train, process.device):
            loss = (Whole if process.world_size == 1 else ByLayer)(state.model, train)
            self.why_eager = self._agree(compile_error(lambda: self._try(loss)))
            self.is_compiled = not self.why_eager
            if not self.is_compiled:
                eager = train.model_copy(update={"compile": False})
                state.model.use(choose_forward_options(state.model.config, eager, process.device))
        validates_here = train.validates and (process.is_main or train.validate_on == "all")
        if self.is_compiled and validates_here:
            self._compile_validation()
        self.parallel_model = self._parallel(loss if self.is_compiled else state.model)

    def _try(self, loss: nn.Module) -> None:
        """Have the training loss compiled, before DDP counts its backward passes."""
        tokens = torch.zeros(self._shape(), dtype=torch.int64, device=self.process.device)
        try:
            with autocast(self.precision, self.process.device):
                value = loss(*tokens)
            value.backward()
        finally:
            self.state.model.zero_grad()

    def _compile_validation(self) -> None:
        """Do it now: a signal that comes while something is compiled waits for its end."""
        compiled, shape = compiled_validation_loss(self.state.model, self.train), self._shape()
        self._full_validation_loss = compiled
        self.state.model.eval()
        with torch.inference_mode():
            tokens = torch.zeros(shape, dtype=torch.int64, device=self.process.device)
            self.why_eager = compile_error(lambda: self.validation_loss(*tokens))
        if self.why_eager:
            self._full_validation_loss = self.state.model
        self.state.model.train()

    def _agree(self, reason: str) -> str:
        """Give the first rank's reason that has one: all go the same way."""
        reasons = [reason]
        if self.process.world_size > 1:
            reasons *= self.process.world_size
            dist.all_gather_object(reasons, reason)
        return next((reason for reason in reasons if reason), "")

    def _shape(self) -> tuple[int, int, int]:
        """Of the token ids and the targets of a microbatch, together."""
        return 2, self.train.microbatch_size, self.state.model.config.context_length

    def _parallel(self, loss: nn.Module) -> nn.Module:
        if self.process.world_size == 1:
            return loss  # nobody to share gradients with: DDP would only cost time
        device_ids = [self.process.device] if self.process.device.type == "cuda" else None
        return DistributedDataParallel(  # a model without buffers: there are none to broadcast
            loss, device_ids=device_ids, gradient_as_bucket_view=True
        )

    def validation_loss(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """Give the mean loss of one microbatch, () float32; the last one may be smaller.

        Call it in evaluation mode, without gradients. Any rank.
        """
        is_full = len(token_ids) == self.train.microbatch_size
        loss = self._full_validation_loss if is_full else self.state.model
        with autocast(self.precision, self.process.device):
            return loss(token_ids, targets)

    def attention_kernel(self) -> str:
        """Name the kernel that this model's attention has in training."""
        if self.state.model.options.attention_in_blocks:
            return "blocks"
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
        skip_unless_finite(optimizer, grad_norm)
        scaler.step(optimizer)
        scaler.update()
        # DDP's buckets hold the gradients: dropped, they would be made anew beside the buckets.
        optimizer.zero_grad(set_to_none=self.process.world_size == 1)
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
                if failpoint("gradient"):
                    loss = loss * torch.nan
                self.state.scaler.scale(loss).backward()
            step_loss += loss.detach()
        return step_loss

    def _gradient_sync(self, is_last: bool) -> AbstractContextManager[None]:
        if is_last or self.process.world_size == 1:
            return nullcontext()
        return self.parallel_model.no_sync()
