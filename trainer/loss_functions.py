"""The training and the validation loss of a model, compiled if the run says so."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from basics.errors import UserError, is_out_of_memory, one_line
from basics.failpoints import failpoint
from basics.files import cache_dir
from checkpointing import TrainingState
from gpt import Block, GPTModel
from ops.sampled_cross_entropy import Candidates
from optim import build_optimizer
from processes.distributed import Process, share_cpu_cores, waiting_for_all
from processes.watchdog import Watchdog
from run_config import ModelConfig, TrainConfig
from settings.machine import Precision
from tokens.batches import Microbatches, read_ahead
from trainer.precision import autocast, choose_forward_options

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def build_training_state(
    model_config: ModelConfig, config: TrainConfig, process: Process
) -> TrainingState:
    """Build a model, the same on every rank, and its optimizer, as they are before step 0."""
    # PyTorch's default is a temporary directory, which a reboot clears. torch._dynamo reads the
    # variable when it is imported, which building an optimizer does.
    if CACHE_VARIABLE not in os.environ:
        os.environ[CACHE_VARIABLE] = str(cache_dir("inductor"))
    device = process.device
    torch.manual_seed(config.random_seed)
    model = GPTModel(model_config, choose_forward_options(model_config, config, device)).to(device)
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
    return TrainingState(model, build_optimizer(model, config, process), scaler)


def compiler_options(model: ModelConfig, precision: Precision | None) -> dict[str, Any]:
    """Return the settings of inductor for a model's losses; they are part of its cache's key."""
    return {
        # As eager code draws its masks: inductor's own depend on how graphs are cut.
        "fallback_random": model.drop_rate > 0,
        # PyTorch's own launcher of kernels holds Python's lock while it waits for a GPU that hangs:
        # the watchdog's thread would wait as well. Triton's launcher releases it.
        "use_static_cuda_launcher": False,
        # Do not measure which kernel is fastest.
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        # A GPU's exponential function, whose error is far below what 16 bits round.
        "use_fast_math": precision in ("bf16", "fp16"),
    }


def compiled(function: Callable, options: dict[str, Any]) -> Callable:
    """Compile for fixed shapes, with the options of `compiler_options`.

    They are set for the whole process: some are read when a kernel runs for the first time.
    """
    for name, value in options.items():
        setattr(torch._inductor.config, name, value)
    return torch.compile(function, dynamic=False, fullgraph=True)


class ByLayer(nn.Module):
    """A model's training loss for DistributedDataParallel, with each layer compiled separately.

    One compilation serves all layers. A layer's gradients are complete when its own backward pass
    ends, so they are all-reduced while the backward pass goes on. With one graph for the whole
    model, all gradients would become available only at the end of the backward pass.
    """

    def __init__(self, model: GPTModel, options: dict[str, Any]) -> None:
        super().__init__()
        torch._dynamo.config.optimize_ddp = False  # do not cut a layer's graph at DDP's buckets
        self.model = model
        parts = GPTModel.embed, Block.forward, GPTModel.loss
        self._embed, self._run_block, self._loss = (compiled(part, options) for part in parts)

    def forward(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        x = self.model.transform(self._embed(self.model, token_ids), self._run_block)
        return self._loss(self.model, x, targets)


def compile_now(work: Callable[[], object]) -> None:
    """Run something that compiles. Raises: UserError: it failed, not for lack of memory."""
    try:
        work()
    # Dynamo, inductor, Triton, the C++ compiler and the cache raise errors of many types.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        lines = [
            line.strip()
            for line in str(error).splitlines()
            if line.strip() and not line.endswith("raised:")
        ]
        reason = one_line((lines or [type(error).__name__])[0])
        # A process that was killed while it compiled may have left a truncated file.
        cache = os.environ.get(CACHE_VARIABLE, "PyTorch's cache of compiled code")
        raise UserError(
            f"compiling failed: {reason}; install gcc, g++ and python3-dev, remove"
            f" {cache}, set {CACHE_VARIABLE} to a directory whose files may be"
            ' executed, or set "compile": false'
        ) from None


class LossFunctions:
    """A model's losses as a run computes them. Building it compiles them: every rank.

    `training` turns token ids and targets, (B, T) each, into the mean loss, (); not yet in DDP.
    """

    def __init__(self, model: GPTModel, config: TrainConfig, process: Process) -> None:
        share_cpu_cores(process)
        torch.set_float32_matmul_precision("highest" if config.precision == "fp32" else "high")
        self.model, self.config, self.process = model, config, process
        self.training: nn.Module | Any = model
        self._candidates: Candidates | Any = None
        if config.sampled_softmax is not None:
            self._candidates = Candidates(
                model.config.vocab_size,
                config.sampled_softmax,
                seed=config.random_seed,
                device=process.device,
            )
        self._compiled_validation: Callable[..., Tensor] | None = None
        with waiting_for_all(process):  # the ranks compile for different times
            failpoint("compile")  # every rank has begun, so rank 0 has said what it resumes from
            if config.compile:
                compile_now(self._compile)

    def _compile(self) -> None:
        """Compile now, by computing losses of zeros: signals wait while it compiles."""
        config, model = self.config, self.model
        options = compiler_options(model.config, config.precision)
        zeros = torch.zeros(
            2,
            config.microbatch_size,
            model.config.context_length,
            dtype=torch.int64,
            device=self.process.device,
        )
        # Dynamo caches by code object: each of these functions has its own.
        self.training = (
            ByLayer(model, options)
            if self.process.world_size > 1
            else compiled(lambda *batch: model(*batch), options)
        )
        for candidates in {self._candidates, None}:  # both forms of the loss
            model.candidates = candidates
            with autocast(config.precision, self.process.device):
                loss = self.training(*zeros)
            loss.backward()
            model.zero_grad()
        model.candidates = None
        if config.validates and (self.process.is_main or config.validate_on == "all"):
            self._compiled_validation = compiled(lambda *batch: model(*batch), options)
            model.eval()
            with torch.inference_mode():
                self.validation(*zeros.clone())  # as made in a validation: in this mode
            model.train()

    def choose_candidates(self, global_step: int) -> None:
        """Set the entries of the vocabulary that the training loss of a step has."""
        number = self.config.softmax_draw(global_step)
        if number is not None:
            self._candidates.draw(number)
        self.model.candidates = None if number is None else self._candidates

    def validation(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a microbatch, () float32, in evaluation mode and no_grad."""
        with autocast(self.config.precision, self.process.device):
            if self._compiled_validation is None:
                return self.model(token_ids, targets)
            if len(token_ids) == self.config.microbatch_size:
                return self._compiled_validation(token_ids, targets)
            # Not compiled, which needs more memory: one sequence at a time.
            sequences = zip(token_ids.split(1), targets.split(1), strict=True)
            return torch.stack([self.model(*sequence) for sequence in sequences]).mean()


@torch.inference_mode()
def validate(
    losses: LossFunctions, data: Microbatches, watchdog: Watchdog, show: Callable[[float], None]
) -> float | None:
    """Return the mean loss over all of `data`, in nats per token; None after a stop signal.

    `show` is called with the share that is done, a fraction, before each microbatch.

    With `validate_on` "all" it is a collective, for which the processes share the microbatches;
    else None on ranks other than 0. The sum is in float64, so that neither the microbatch size nor
    the number of processes changes the result beyond rounding.
    """
    process, shares = losses.process, losses.config.validate_on == "all"
    if not (process.is_main or shares):
        return None
    start, stride = (process.rank, process.world_size) if shares else (0, 1)
    indices = range(start, len(data), stride)
    total = torch.zeros(2, dtype=torch.float64, device=process.device)  # loss, sequences
    losses.model.eval()  # no dropout
    microbatches = read_ahead(data, indices, device=process.device)
    for num_done, (_, token_ids, targets) in enumerate(microbatches):
        show(num_done / len(indices))
        watchdog.heartbeat()
        failpoint("validate")
        total[0] += losses.validation(token_ids, targets) * len(token_ids)
        total[1] += len(token_ids)
        if watchdog.stop_signal:  # time may be short; the checkpoint is saved already
            break
    losses.model.train()
    if shares:
        dist.all_reduce(total)
    loss_sum, num_sequences = total.tolist()
    return loss_sum / num_sequences if num_sequences == data.num_sequences else None
