"""What is measured of a run as it trains: losses, diagnostics, the machine and its speed."""

from typing import Any

from basics.machine import machine_up_seconds
from gpt import GPTModel
from processes.distributed import Process, device_name, gpu_uuids, machine_facts
from reporting.clock import TRAINING, WAITING, PhaseClock
from reporting.gpus import find_gpu
from reporting.loss_window import LossWindow, Window
from reporting.machine_meter import MachineMeter
from reporting.speed import Speed
from run_config import Run
from tokens.batch_plan import BatchPlan
from trainer.diagnostics import Diagnostics
from trainer.precision import attention_kernel


class Measurements:
    """Measures a run; every rank has one. Only rank 0 measures diagnostics and its machine.

    `loss_window` takes the loss of each step. `attention_kernel` is the one that training uses.
    """

    def __init__(self, run: Run, plan: BatchPlan, model: GPTModel, process: Process) -> None:
        self._run, self._plan, self._process = run, plan, process
        self.model = model  # that is trained now
        is_main = process.is_main
        self.loss_window = LossWindow(process.device)
        self.diagnostics = Diagnostics(
            run.config.diagnostics_interval if is_main else None, run.config.precision
        )
        self.meter = MachineMeter(run.run_dir, gpu_uuids(process) if is_main else [])
        self.attention_kernel = attention_kernel(model, run.config, process.device)
        self._gpu = find_gpu(device_name(process))

    def machine(self, window: Window) -> dict[str, Any]:
        """Return what the record of a window has of the machine: a new reading, and the MFU."""
        reading, steps_per_second = self.meter.pop_reading(), window.steps_per_second
        if self._gpu is None or steps_per_second is None:
            return reading
        tokens_per_second = steps_per_second * self._plan.tokens_per_step
        flops = tokens_per_second * self.model.config.flops_per_token / self._process.world_size
        return reading | {"mfu": self._gpu.mfu(flops)}

    def speed(self, num_steps: int, clock: PhaseClock) -> Speed:
        """Return the speed of the last `num_steps`, all at this depth, and what may explain it."""
        spent = clock.read_measured()
        seconds = spent[TRAINING] + spent[WAITING]
        return Speed(
            tokens_per_second=num_steps * self._plan.tokens_per_step / seconds,
            num_processes=self._process.world_size,
            flops_per_token=self.model.config.flops_per_token,
            device_name=device_name(self._process),
            precision=self._run.config.precision,
            attention_kernel=self.attention_kernel,
            is_compiled=self._run.config.compile,
            waiting_share=spent[WAITING] / seconds,
            microbatch_tokens=self._plan.tokens_per_microbatch,
            throttling=self.meter.throttling(),
            drop_rate=self._run.model.drop_rate,
        )

    def machine_facts(self) -> dict[str, Any]:
        """Return what `summary.json` says of the machine and of how it has trained. Rank 0."""
        config = self._run.config
        return machine_facts(self._process, config.precision) | {
            "compiled": config.compile,
            "attention": self.attention_kernel,
            "deterministic": config.deterministic,
            "up_seconds": machine_up_seconds(),
            "head_chunk_tokens": self.model.options.head_chunk_tokens,
        }
