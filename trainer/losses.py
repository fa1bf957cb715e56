"""The training and the validation loss of a model, compiled if the run says so."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from tqdm import tqdm

from basics.failpoints import failpoint
from checkpointing import TrainingState
from gpt import GPTModel
from optim import build_optimizer
from processes.launch import Process, long_waits, share_cpu_cores
from processes.watchdog import Watchdog
from run_config import ModelConfig, TrainConfig
from tokens.batches import Microbatches, read_ahead
from trainer.compilation import (
    ByLayer,
    choose_forward_options,
    compile_now,
    compiled,
    keep_compiled_code,
)
from trainer.precision import autocast, kernel_name


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


class Losses:
    """A model's losses as a run computes them. Building it compiles them: every rank.

    Args:
        train: after `resolve_for_device`.

    Attributes:
        training: turns token ids and targets, (B, T) each, into the mean loss, (); not yet in DDP.

    Raises: UserError: it cannot be compiled.
    """

    def __init__(self, model: GPTModel, train: TrainConfig, process: Process) -> None:
        share_cpu_cores(process)
        torch.set_float32_matmul_precision("highest" if train.precision == "fp32" else "high")
        self.model, self.train, self.process = model, train, process
        self.training: nn.Module | Any = model
        self._compiled_validation: Callable[..., Tensor] | None = None
        with long_waits(process) as group:  # the ranks compile for different times
            failpoint("compile")  # every rank has begun, so rank 0 has said what it resumes from
            if train.compile:
                # Dynamo caches by code object: each of these functions has its own.
                self.training = (ByLayer(model) if process.world_size > 1
                                 else compiled(lambda *batch: model(*batch), model))
                compile_now(self._try_training, process.device)
                if train.validates and (process.is_main or train.validate_on == "all"):
                    compile_now(self._compile_validation, process.device)
            if group is not None:
                dist.barrier(group)

    def _zeros(self) -> Tensor:
        """Return the token ids and the targets of a microbatch, stacked."""
        shape = 2, self.train.microbatch_size, self.model.config.context_length
        return torch.zeros(shape, dtype=torch.int64, device=self.process.device)

    def _try_training(self) -> None:
        """Compile the training loss by running it once, before DDP wraps it."""
        try:
            with autocast(self.train.precision, self.process.device):
                value = self.training(*self._zeros())
            value.backward()
        finally:
            self.model.zero_grad()

    @torch.inference_mode()
    def _compile_validation(self) -> None:
        """Compile the validation loss now: signals wait while something compiles."""
        self._compiled_validation = compiled(lambda *batch: self.model(*batch), self.model)
        self.model.eval()
        self.validation(*self._zeros())
        self.model.train()

    def validation(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of one microbatch, () float32; the last one may be smaller.

        Call it in evaluation mode, without gradients. Any rank.
        """
        with autocast(self.train.precision, self.process.device):
            if self._compiled_validation is None:
                return self.model(token_ids, targets)
            if len(token_ids) == self.train.microbatch_size:
                return self._compiled_validation(token_ids, targets)
            # Not compiled, which needs more memory: one sequence at a time.
            sequences = zip(token_ids.split(1), targets.split(1), strict=True)
            return torch.stack([self.model(*sequence) for sequence in sequences]).mean()

    def attention_kernel(self) -> str:
        """Return the name of the kernel that computes this model's attention in training."""
        return kernel_name(self.model.config, self.train, self.process.device, self.model.options)

    def facts(self) -> dict[str, Any]:
        """Return what `summary.json` says of how the losses are computed."""
        return {
            "compiled": self.train.compile,
            "attention": self.attention_kernel(),
            "deterministic": self.train.deterministic,
            "head_chunk_tokens": self.model.options.head_chunk_tokens,
        }


@torch.inference_mode()
def validate(losses: Losses, data: Microbatches, watchdog: Watchdog, *,
             shares: bool) -> float | None:
    """Return the mean loss over all of `data`, in nats per token; None after a stop signal.

    The sum is in float64, so that neither the microbatch size nor the number of processes changes
    the result beyond rounding.

    Args:
        shares: whether the processes share the microbatches. If so a collective: every rank.
    """
    process = losses.process
    start, stride = (process.rank, process.world_size) if shares else (0, 1)
    indices = range(start, len(data), stride)
    total = torch.zeros(2, dtype=torch.float64, device=process.device)  # loss, sequences
    num_sequences = 0
    losses.model.eval()
    for _, token_ids, targets in tqdm(
            read_ahead(data, indices, device=process.device), total=len(indices), unit="batch",
            desc="validating", leave=False, disable=None if process.is_main else True,
            dynamic_ncols=True):
        watchdog.heartbeat()
        failpoint("validate")
        total[0] += losses.validation(token_ids, targets) * len(token_ids)
        num_sequences += len(token_ids)
        if watchdog.stop_signal:
            break
    losses.model.train()
    total[1] = num_sequences
    if shares:
        dist.all_reduce(total)
    loss_sum, num_sequences = total.tolist()
    return loss_sum / num_sequences if num_sequences == data.num_sequences else None
