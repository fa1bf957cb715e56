"""One global step: forward, backward, accumulation, averaged gradients, updated weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

from basics.failpoints import failpoint
from basics.out_of_memory import is_out_of_memory
from checkpointing import TrainingState
from gpt import GPTModel
from processes.launch import Process, long_waits, share_cpu_cores
from run_config import ModelConfig, TrainConfig
from tokens.batches import Microbatch
from trainer.attention import cudnn_version, kernel_name
from trainer.compilation import (
    ByLayer,
    Whole,
    choose_forward_options,
    compile_now,
    compiled_validation_loss,
    keep_compiled_code,
)
from trainer.diagnostics import NO_PROBE, Probe
from trainer.muon import Muon
from trainer.optimization import (
    build_optimizer,
    clip_gradients,
    set_rates,
    skip_unless_finite,
)
from trainer.precision import autocast, set_matmul_precision

Wrap = Callable[[nn.Module, Process, TrainConfig], nn.Module]


def build_training_state(
    model_config: ModelConfig, train: TrainConfig, process: Process
) -> TrainingState:
    """Build a model, the same on every rank, and its optimizer, as they are before step 0.

    Args:
        train: after `resolve_for_device`.
    """
    keep_compiled_code()
    device = process.device
    torch.manual_seed(train.random_seed)
    model = GPTModel(model_config, choose_forward_options(model_config, train, device)).to(device)
    scaler = GradScaler(device.type, enabled=train.precision == "fp16")
    return TrainingState(model, build_optimizer(model, train, process), scaler)


class TrainingStep:
    """Takes the global steps of one process. Building one compiles the model. Every rank.

    Args:
        train: after `resolve_for_device`.
        wrap: makes the training loss average its gradients over the processes.

    Attributes:
        sharing: how the ranks share Muon's work, as a line; empty if they do not have to.

    Raises:
        UserError: it cannot be compiled.
    """

    def __init__(self, state: TrainingState, train: TrainConfig, process: Process, *,
                 wrap: Wrap = lambda loss, *_: loss) -> None:
        share_cpu_cores(process)
        self.state, self.train, self.process = state, train, process
        self._parameters = list(state.model.parameters())  # finding them takes 1 ms of each step
        self.precision = train.precision
        set_matmul_precision(self.precision)
        self.is_compiled = train.compile
        self._compiled_validation: Callable[..., Tensor] | None = None
        loss: nn.Module = state.model
        with long_waits(process) as group:  # the ranks compile for different times
            failpoint("compile")  # every rank has begun, so rank 0 has said what it resumes from
            if train.compile:
                loss = (Whole if process.world_size == 1 else ByLayer)(state.model)
                compile_now(lambda: self._try(loss), process.device)
            validates_here = train.validates and (process.is_main or train.validate_on == "all")
            if train.compile and validates_here:
                self._compile_validation()
            if group is not None:
                dist.barrier(group)
        self.parallel_model = wrap(loss, process, train)
        self.sharing = ""
        if isinstance(state.optimizer, Muon) and process.world_size > 1:
            self.sharing = state.optimizer.choose_sharing()

    def unwrap(self) -> None:
        """Drop DDP, whose threads must be gone before its process group; no step follows."""
        del self.parallel_model

    def _try(self, loss: nn.Module) -> None:
        """Compile the training loss by running it once, before DDP wraps it."""
        tokens = torch.zeros(self._shape(), dtype=torch.int64, device=self.process.device)
        try:
            with autocast(self.precision, self.process.device):
                value = loss(*tokens)
            value.backward()
        finally:
            self.state.model.zero_grad()

    def _compile_validation(self) -> None:
        """Compile the validation loss now: signals wait while something compiles."""
        compiled, shape = compiled_validation_loss(self.state.model), self._shape()
        self._compiled_validation = compiled
        self.state.model.eval()
        with torch.inference_mode():
            tokens = torch.zeros(shape, dtype=torch.int64, device=self.process.device)
            compile_now(lambda: self.validation_loss(*tokens), self.process.device)
        self.state.model.train()

    def _shape(self) -> tuple[int, int, int]:
        """The shape of a microbatch's token ids and targets, stacked."""
        return 2, self.train.microbatch_size, self.state.model.config.context_length

    def facts(self) -> dict[str, Any]:
        """Return what `summary.json` says of how the step is computed."""
        return {
            "compiled": self.is_compiled,
            "attention": self.attention_kernel(),
            "cudnn": cudnn_version(self.process.device),
            "deterministic": self.train.deterministic,
            "head_chunk_tokens": self.state.model.options.head_chunk_tokens,
        }

    def validation_loss(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of one microbatch, () float32; the last one may be smaller.

        Call it in evaluation mode, without gradients. Any rank.
        """
        with autocast(self.precision, self.process.device):
            if self._compiled_validation and len(token_ids) == self.train.microbatch_size:
                return self._compiled_validation(token_ids, targets)
            return mean_loss_in_parts(self.state.model, token_ids, targets)

    def attention_kernel(self) -> str:
        """Return the name of the kernel that computes this model's attention in training."""
        model = self.state.model
        return kernel_name(model.config, self.train, self.process.device, model.options)

    def take(self, microbatches: Iterator[Microbatch], *, num_microbatches: int,
             learning_rate: float, momentum: float = 0.95,
             probe: Probe = NO_PROBE) -> tuple[Tensor, Tensor]:
        """Take one global step. Every rank; nothing here waits for the device.

        Args:
            microbatches: the next `num_microbatches` of it are this process's part of the step.
            momentum: of Muon; AdamW has no use for it.
            probe: measures the step.

        Returns:
            This process's mean loss and the norm of the averaged gradient, each () float32.
        """
        failpoint("train")
        optimizer, scaler = self.state.optimizer, self.state.scaler
        set_rates(optimizer, learning_rate=learning_rate, momentum=momentum)
        loss = self._accumulate_gradients(microbatches, num_microbatches, probe)
        scaler.unscale_(optimizer)
        probe.before_update(self.state.model)
        grad_norm = clip_gradients(self._parameters, self.train.clipping_max_norm)
        skip_unless_finite(optimizer, grad_norm)
        scaler.step(optimizer)
        scaler.update()
        probe.after_update(self.state.model)
        # Where DDP accumulates, the gradients stay: they are views of its buckets, and would be
        # allocated twice. With one microbatch it is cheaper to copy new ones into the buckets.
        stays = self.process.world_size > 1 and num_microbatches > 1
        optimizer.zero_grad(set_to_none=not stays)
        return loss, grad_norm

    def _accumulate_gradients(
        self, microbatches: Iterator[Microbatch], num_microbatches: int, probe: Probe
    ) -> Tensor:
        step_loss = torch.zeros((), device=self.process.device)
        for accumulation_step in range(num_microbatches):
            microbatch = next(microbatches)
            probe.see(microbatch)
            index, token_ids, targets = microbatch
            if self.state.model.config.drop_rate:  # nothing else draws random numbers
                torch.manual_seed(dropout_seed(self.train.random_seed, index))
            # DDP reads require_backward_grad_sync in the forward pass, so forward and backward
            # must both be inside no_sync().
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


def mean_loss_in_parts(loss: Callable[[Tensor, Tensor], Tensor], token_ids: Tensor,
                       targets: Tensor) -> Tensor:
    """Return the mean loss of a microbatch, (), by halves if memory does not suffice for all.

    Code that is not compiled needs more memory than the compiled code of a whole microbatch.
    """
    try:
        return loss(token_ids, targets)
    except RuntimeError as error:
        if len(token_ids) == 1 or not is_out_of_memory(error):
            raise
    half = len(token_ids) // 2  # outside of the except clause, which holds the error's tensors
    parts = [mean_loss_in_parts(loss, *part) * len(part[0])
             for part in ((token_ids[:half], targets[:half]), (token_ids[half:], targets[half:]))]
    return sum(parts) / len(token_ids)


def dropout_seed(random_seed: int, microbatch_index: int) -> int:
    """Return the seed of one microbatch's dropout.

    The random stream is, like the data, a function of the position in the run: each process has
    its own, a resumed run needs no saved state, and another split of the global batch into
    processes and accumulation steps draws the same masks.
    """
    digest = hashlib.blake2b(f"{random_seed}/{microbatch_index}".encode(), digest_size=7).digest()
    return int.from_bytes(digest)
