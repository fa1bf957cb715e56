"""When a launch ends: its last step, --max-steps, a signal, a budget or a better reference."""

import torch
import torch.distributed as dist

from basics.errors import STOP_SIGNALS
from processes.command_line import Options
from processes.watchdog import Watchdog
from reporting.clock import (
    CHART,
    CHECKPOINT,
    COMPILE,
    DIAGNOSTICS,
    TRAINING,
    VALIDATION,
    WAITING,
    PhaseClock,
    nearest_limit,
)
from reporting.loss_window import REPORT_INTERVAL
from reporting.reference import ReferenceComparison
from reporting.speed import SLOW_DISK_BYTES_PER_SECOND, checkpoint_bytes
from reporting.summary import BEHIND, BUDGET, MAX_STEPS, SIGNAL, StopReason
from reporting.time_left import NO_GROWTH, Growth, estimated_validation_seconds
from run_config import Run
from tokens.batch_plan import BatchPlan
from trainer.background_saver import BackgroundSaver

SAFETY_MARGIN = 0.25  # of the time ahead: steps may take longer than measured
LAST_CHARTS_SECONDS = 2.0  # an estimate; they are not waited for beyond the budget


class Stop:
    """Decides after which global step a launch ends. Its methods are collectives: every rank.

    `group` is a gloo group, for numbers in host memory. `last_step` is the launch's last step if
    nothing ends it earlier. An earlier launch, or this one before a restart by torchrun, may have
    taken that step already. If the launch ends before the run, `reason` says why.
    """

    def __init__(
        self,
        run: Run,
        plan: BatchPlan,
        *,
        first_step: int,
        options: Options,
        clock: PhaseClock,
        watchdog: Watchdog,
        group: dist.ProcessGroup,
        saver: BackgroundSaver,
        comparison: ReferenceComparison,
        growth: Growth = NO_GROWTH,
    ) -> None:
        self._config, self._plan = run.config, plan
        self._clock, self._watchdog, self._group, self._saver = clock, watchdog, group, saver
        self._comparison, self._growth = comparison, NO_GROWTH
        self.start(first_step, growth)
        self._checkpoint_bytes = checkpoint_bytes(run.model, run.config)
        began_at = first_step if options.began_at is None else options.began_at
        num_steps = plan.num_steps
        self.last_step = min(num_steps, began_at + (options.max_steps or num_steps)) - 1
        self.reason = StopReason(MAX_STEPS, MAX_STEPS) if options.max_steps else None

    def start(self, first_step: int, growth: Growth = NO_GROWTH) -> None:
        """Begin a launch, or go on with all layers: the first step compiles and is not measured."""
        # Until a checkpoint with all layers is measured: as those before, by its size.
        factor = self._growth.checkpoint_factor
        self._least_save_seconds = factor * self._clock.longest[CHECKPOINT]
        self._least_write_seconds = factor * self._saver.longest_write_seconds
        self._first_step, self._growth = first_step, growth

    def after(self, global_step: int, *, is_report_due: bool) -> bool:
        """Return whether the launch ends with this step: a collective, every rank.

        Budgets are checked at reports.
        """
        is_checked = is_report_due or self._config.is_save_due(
            global_step, num_steps=self._plan.num_steps
        )
        is_spent = (
            is_checked
            and global_step < self.last_step
            and self._watchdog.process.is_main
            and self._is_spent_after(global_step)
        )
        return self.agree(is_spent=is_spent) or global_step >= self.last_step

    def agree(self, *, is_spent: bool = False) -> bool:
        """Return whether a signal to any process, rank 0's budget or its reference ends the launch.

        A collective: every rank.
        """
        is_behind = self._comparison.stops and bool(self._comparison.failure)
        # A signal may have reached only some ranks: all must end after the same step.
        shared = torch.tensor([self._watchdog.stop_signal, int(is_spent), int(is_behind)])
        with self._watchdog.suspended():
            dist.all_reduce(shared, dist.ReduceOp.MAX, self._group)
        number, is_spent, is_behind = shared.tolist()
        if number:
            self.reason = StopReason(SIGNAL, STOP_SIGNALS[number])
            self._watchdog.note_stop(number)  # it may not have heard of it yet
        elif is_spent:
            left, spent = nearest_limit(self._config, self._clock)
            reserve = "; the rest is a reserve, too small for the next steps and a checkpoint"
            self.reason = StopReason(BUDGET, spent + (reserve if left > 0 else ""))
        elif is_behind and not (self.reason and self.reason.kind == BEHIND):
            self.reason = StopReason(BEHIND, self._comparison.failure)
        return bool(number or is_spent or is_behind)

    def _is_spent_after(self, global_step: int) -> bool:
        """Return whether the steps up to the next report would exceed the budget. Rank 0.

        Uses the times measured in this launch at its present depth. What has not happened yet is
        estimated: a validation as its forward passes; a checkpoint by the speed of a slow disk; the
        growth as what was compiled so far, and a checkpoint after it by its bytes.
        """
        clock, config, plan = self._clock, self._config, self._plan
        spent, growth = clock.read_measured(), self._growth
        trained = spent[TRAINING] + spent[DIAGNOSTICS] + spent[WAITING]
        num_measured = global_step - self._first_step  # all but the first one
        step = trained / num_measured if num_measured else spent[COMPILE]

        validation = clock.longest[VALIDATION]
        if not validation:
            validation = estimated_validation_seconds(step, config, plan)
        save = max(clock.longest[CHECKPOINT], self._least_save_seconds)
        write = max(self._saver.longest_write_seconds, self._least_write_seconds)

        stop = min(global_step + REPORT_INTERVAL, self.last_step) + 1
        num_validations = num_saves = 0
        # From this step on, whose own validation and checkpoint come after its report.
        for each in range(global_step, stop):
            num_validations += config.is_validation_due(each, num_steps=plan.num_steps)
            if each != self.last_step:  # its checkpoint ends the launch, and is counted below
                num_saves += config.is_save_due(each, num_steps=plan.num_steps)
        grows = global_step < growth.step < stop
        if grows:
            validation *= growth.factor
            save *= growth.checkpoint_factor
            write *= growth.checkpoint_factor
        if not save:
            save = self._checkpoint_bytes / SLOW_DISK_BYTES_PER_SECOND
        seconds = (
            growth.as_steps_now(global_step + 1, stop) * step
            + grows * spent[COMPILE]
            + num_validations * validation
            + (num_saves + 1) * (save + clock.longest[CHART])  # a launch ends with one
            + 2 * write  # it may wait for the write before
            + LAST_CHARTS_SECONDS
        )
        return seconds * (1 + SAFETY_MARGIN) > nearest_limit(config, clock)[0]
