"""A trial of a microbatch: a few global steps on random tokens, under a torchrun of its own.

A process that ran out of memory cannot go on: other ranks hang in a collective, the allocator is
fragmented. So the search starts a torchrun for each size, and never initialises CUDA itself, which
would take memory of the GPU. A rank that fails says why in a file and ends; torchrun then ends the
others. Rank 0 writes the result. A run of that size finds the compiled code in the cache.
"""

import json
import math
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from basics.device import (
    CPU,
    GPU,
    DeviceTime,
    device_name,
    free_and_total_bytes,
    is_cpu,
    is_gpu,
    limit_bytes,
    peak_bytes,
    reserved_bytes,
    synchronize,
)
from basics.entry_points import map_every_tensor
from basics.errors import FAILED, UserError, describe, is_out_of_memory
from checkpointing import TrainingState
from processes.command_line import Options
from processes.distributed import Process, join_process_group, share_cpu_cores
from processes.startup_agreement import Agreement, leave
from run_config import ModelConfig, TrainConfig, load_run
from settings.machine import FULL_SOFTMAX_INTERVAL
from tokens.batches import Microbatch
from trainer.loss_functions import build_training_state
from trainer.precision import check_attention, resolve_for_device

TRIAL_VARIABLE = "DDP_TRAIN_TRIAL"  # JSON: microbatch_size, path of the result, prefetches
# The numbers of warm-up steps and of timed steps. From the second step on, the optimizer state
# exists and DDP's buckets are final; the third is the first that has all entries of the vocabulary
# with sampled softmax. On a CPU, where steps take seconds, only the second is timed, but with
# sampled softmax as many as contain one with all entries.
STEPS = {GPU: (3, 5), CPU.type: (1, 1)}
TRIAL_TIMEOUT = timedelta(minutes=20)  # of a trial with its compiling, and of each collective
TOO_SLOW = f"took longer than {TRIAL_TIMEOUT.total_seconds() / 60:.0f} minutes"
BUSY_BYTES = 2 * 2**30  # of a GPU's memory, in use beside this process


@dataclass(frozen=True)
class Trial:
    """The result of a trial. Memory is that of the process that used most, in GiB."""

    microbatch_size: int
    fits: bool
    demand_gib: float = math.nan  # peak of the tensors; on a CPU, of the address space
    capacity_gib: float = math.nan  # of the process with the least
    tokens_per_second: float = math.nan  # of all processes
    device: str = ""


class MicrobatchTrial:
    """This process's part in a trial. Every rank."""

    def __init__(self, options: Options, process: Process, agreement: Agreement) -> None:
        self.process, self._agreement = process, agreement
        self._limit_gib = options.memory_limit_gib or math.inf
        self._task = json.loads(os.environ[TRIAL_VARIABLE])
        self._size, self._result_path = self._task["microbatch_size"], Path(self._task["path"])
        self._run = agreement.do("configs", load_run, options.runs_dir, options.run)
        # Accumulating more than two microbatches takes no more memory. With a global batch, two are
        # taken even if one would be the whole batch: so all sizes below one that fits also fit.
        config = self._run.config
        accumulated = (
            config.gradient_accumulation_steps
            if config.global_batch_size is None
            else config.global_batch_size // process.world_size
        )
        self.num_microbatches = min(accumulated, 2) or 1

    @contextmanager
    def measuring(self) -> Iterator[tuple[TrainingState, TrainConfig, Iterator[Microbatch]]]:
        """Yield the state, the config and the microbatches of the trial. Every rank.

        Whatever fails inside ends this process, which says why in a file. So does a trial that
        takes too long: on a busy machine each step of a large microbatch may take minutes.
        """
        device, model = self.process.device, self._run.model
        if self._task["n_layers"]:
            model = model.with_layers(self._task["n_layers"])
        timer = threading.Timer(TRIAL_TIMEOUT.total_seconds(), self._fail, [TOO_SLOW])
        timer.daemon = True
        try:
            if is_cpu(device):
                map_every_tensor()  # before any other thread has allocated a heap
            if not self._task["prefetches"]:
                timer.start()
            if is_cpu(device):
                share_cpu_cores(self.process)  # starts threads: memory must not be limited yet
            join_process_group(
                self.process, self._agreement.connect("trial"), timeout=TRIAL_TIMEOUT
            )
            config = resolve_for_device(self._run.config, device).model_copy(
                update={"microbatch_size": self._size}
            )
            if self._task["prefetches"]:
                check_idle(device)
            else:  # the validation takes less memory than training, so it is not compiled
                config = config.model_copy(update={"validation_interval": None})
            check_attention(model, config, device)
            self._limit_memory()
            state = build_training_state(model, config, self.process)
            # At the usual scale, the first steps overflow and are skipped: no optimizer state yet.
            state.scaler.load_state_dict(state.scaler.state_dict() | {"scale": 1.0})
            yield state, config, random_microbatches(model, self._size, device)
        except Exception as error:  # whatever it is: to exit in order could wait for other ranks
            cause = "out of memory: " if is_out_of_memory(error) else ""
            self._fail(f"{cause}{describe(error)}")
        finally:
            timer.cancel()

    def _fail(self, reason: str) -> NoReturn:
        _limit_address_space(math.inf)
        self._result_path.with_suffix(f".rank{self.process.rank}").write_text(reason)
        leave(FAILED)

    def _limit_memory(self) -> None:
        """Limit the memory that the trial may take; on a CPU, what it adds to the address space."""
        device = self.process.device
        if is_cpu(device):
            torch.ones(512, 512).mm(torch.ones(512, 512))  # start threads, whose stacks count
            self._mapped_before = _mapped_gib("VmSize")
            _limit_address_space(self._mapped_before + self._limit_gib)
        else:
            limit_bytes(device, self._limit_gib * 2**30)

    def time_steps(self, take_step: Callable[[int], object]) -> None:
        """Measure steps that follow one another, and record the result. Every rank.

        `take_step` is called with the number of the global step.

        A wait after each step would leave the GPU idle while the CPU begins the next one, which
        training does not do. So the CPU waits once, for the last step.
        """
        warm_up_steps, timed_steps = STEPS[self.process.device.type]
        if self._run.config.sampled_softmax is not None:
            timed_steps = FULL_SOFTMAX_INTERVAL
        for global_step in range(warm_up_steps):
            take_step(global_step)
        began = DeviceTime(self.process.device)
        for global_step in range(warm_up_steps, warm_up_steps + timed_steps):
            take_step(global_step)
        seconds = DeviceTime(self.process.device).seconds_since(began) / timed_steps
        tokens = (
            self.num_microbatches
            * self._size
            * self._run.model.context_length
            * self.process.world_size
        )
        demand, capacity = self._peak_memory()
        _limit_address_space(math.inf)
        # The most memory, the least capacity and speed of the processes. Every rank reads them:
        # one that ended before would leave the others in the collective.
        worst = torch.tensor(
            [demand, -capacity, -tokens / seconds], dtype=torch.float64, device=self.process.device
        )
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        demand, capacity, speed = worst.tolist()
        if self.process.is_main:
            name = device_name(self.process.device)
            trial = Trial(self._size, True, demand, -capacity, -speed, name)
            self._result_path.write_text(json.dumps(asdict(trial)))

    def _peak_memory(self) -> tuple[float, float]:
        """Return the peak of the memory that the trial has taken, and how much there is, in GiB."""
        device = self.process.device
        if is_cpu(device):
            return _mapped_gib("VmPeak") - self._mapped_before, self._limit_gib
        synchronize(device)
        free, _ = free_and_total_bytes(device)
        available = (free + reserved_bytes(device)) / 2**30
        # Before it fails, the allocator frees what is only reserved: allocated memory decides.
        peak = peak_bytes(device) / 2**30
        return peak, min(self._limit_gib, available)


def random_microbatches(
    model: ModelConfig, size: int, device: torch.device
) -> Iterator[Microbatch]:
    while True:
        yield Microbatch(
            0, *torch.randint(model.vocab_size, (2, size, model.context_length), device=device)
        )


def check_idle(device: torch.device) -> None:
    """Refuse to take memory that another program may need. Raises: UserError: the GPU is in use."""
    if is_gpu(device):
        free, total = free_and_total_bytes(device)
        if total - free > BUSY_BYTES:
            raise UserError(
                f"GPU {device.index} is in use, {free / 2**30:.1f} of"
                f" {total / 2**30:.1f} GiB are free; all but the code is here"
            )


def _limit_address_space(gib: float) -> None:
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    limit = hard_limit if gib == math.inf else int(gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard_limit))


def _mapped_gib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 2**20 for line in lines if line.startswith(f"{name}:"))
