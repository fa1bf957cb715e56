"""Says once how fast a launch trains, and what may explain a low speed."""

from basics.device import device_name
from reporting.clock import DIAGNOSTICS, WAITING
from reporting.estimate import Pace, step_seconds
from reporting.machine_meter import MachineMeter
from reporting.run_log import Report, RunLog
from reporting.speed import SPEED_CHECK_STEPS, Speed
from trainer.launch import Launch
from trainer.observer import Observer


class SpeedCheck(Observer):
    """Prints the speed after `SPEED_CHECK_STEPS`, once for each number of layers."""

    def __init__(
        self,
        launch: Launch,
        pace: Pace,
        log: RunLog,
        meter: MachineMeter,
        *,
        attention_kernel: str,
    ) -> None:
        self._launch, self._pace, self._log, self._meter = launch, pace, log, meter
        self._attention_kernel = attention_kernel
        self._num_layers = 0  # of the steps that are counted
        self._num_steps, self._seconds = 0, 0.0
        self._has_said = False

    def report(self, report: Report) -> None:
        pace, launch, window = self._pace, self._launch, report.window
        assert window is not None
        if self._num_layers != pace.model.n_layers:
            self._num_layers, self._has_said = pace.model.n_layers, False
            self._num_steps, self._seconds = 0, 0.0
        self._num_steps += window.num_timed
        self._seconds += window.timed_seconds
        if self._has_said or self._num_steps + 1 < SPEED_CHECK_STEPS:
            return
        self._has_said = True
        spent = pace.measured()
        seconds = self._seconds - spent[DIAGNOSTICS]  # the device has worked for both
        speed = Speed(
            tokens_per_second=self._num_steps * launch.plan.tokens_per_step / seconds,
            num_processes=launch.process.world_size,
            flops_per_token=launch.config.flops_per_token(pace.model),
            device_name=device_name(launch.process.device),
            precision=launch.config.precision,
            attention_kernel=self._attention_kernel,
            is_compiled=launch.config.compile,
            waiting_share=spent[WAITING] / step_seconds(spent),
            microbatch_tokens=launch.plan.tokens_per_microbatch,
            throttling=self._meter.throttling(),
            drop_rate=launch.run.model.drop_rate,
        )
        self._log.say(speed.line())
