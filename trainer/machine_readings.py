"""Rank 0's machine: readings and the MFU in the records of steps, and facts in the summary."""

from basics.device import device_name
from basics.machine import machine_up_seconds
from checkpointing import TrainingState
from processes.distributed import gpu_uuids, machine_facts
from reporting.gpus import find_gpu
from reporting.machine_meter import MachineMeter
from reporting.run_log import Report, RunLog
from trainer.launch import Launch
from trainer.observer import Observer
from trainer.startup import OpenedDir


class MachineReadings(Observer):
    """Reads the machine while the run trains; `energy_kwh` is what earlier launches have used."""

    def __init__(
        self,
        launch: Launch,
        state: TrainingState,
        log: RunLog,
        *,
        attention_kernel: str,
        energy_kwh: float,
    ) -> None:
        self._launch, self._state, self._log = launch, state, log
        self._attention_kernel, self._energy_kwh = attention_kernel, energy_kwh
        self._gpu = find_gpu(device_name(launch.process.device))
        self.meter = MachineMeter(launch.run.run_dir, gpu_uuids(launch.process))

    def start(self, opened: OpenedDir) -> None:
        self.meter.start(self._energy_kwh)

    def report(self, report: Report) -> None:
        self._log.warn("a reading of the machine failed", self.meter.pop_failure())
        report.values |= self.meter.pop_reading()
        tokens_per_second = report.values["tokens_per_second"]
        if self._gpu is not None and tokens_per_second is not None:
            config, model = self._launch.config, self._state.model.config
            flops = tokens_per_second * config.flops_per_token(model)
            report.values["mfu"] = self._gpu.mfu(flops / self._launch.process.world_size)

    def end(self) -> dict[str, object]:
        self.meter.stop()
        config = self._launch.config
        machine = machine_facts(self._launch.process, config.precision) | {
            "compiled": config.compile,
            "attention": self._attention_kernel,
            "deterministic": config.deterministic,
            "up_seconds": machine_up_seconds(),
            "head_chunk_tokens": self._state.model.options.head_chunk_tokens,
        }
        return {"energy_kwh": self.meter.energy_kwh, "machine": machine}
