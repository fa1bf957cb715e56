"""Where a start of a run ends: its last step, --max-steps, a budget, a signal, bad numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from basics.errors import NUMBERS, STOP_SIGNALS
from processes.startup_agreement import AgreedError
from processes.watchdog import Watchdog
from reporting.clock import REPORT_INTERVAL, Budget, Pace, PhaseClock
from reporting.console import Console
from tokens.batch_plan import BatchPlan
from trainer.startup import Job


class Ending:
    """What all processes agree on about the end. Its methods are collectives: every rank.

    Args:
        group: of gloo, for numbers of the processes, not of their devices.
        pace: measures what the parts of the run take, after so many steps. Rank 0.

    Attributes:
        plan: the run's, with the steps that its schedule is laid out over.
        last_step: of this start.
        reason: why that is not the run's last one.
    """

    def __init__(self, job: Job, *, clock: PhaseClock, watchdog: Watchdog,
                 group: dist.ProcessGroup, pace: Callable[[int], Pace]) -> None:
        self._job, self._config, self.plan = job, job.run.train, job.plan
        self._watchdog, self._group, self._pace = watchdog, group, pace
        self._budget = Budget(self._config, clock)
        self.lays_out_next = self._config.fit_budget
        self.last_step = self._last_step()
        self.reason = "--max-steps" if job.options.max_steps else None

    def _last_step(self) -> int:
        max_steps = self._job.options.max_steps or self.plan.num_steps
        return min(self.plan.num_steps, self._job.first_step + max_steps) - 1

    def heed_signals(self, global_step: int) -> None:
        """End after this step if any process has been asked to stop."""
        asked = torch.tensor(self._watchdog.stop_signal)
        with self._watchdog.suspended():
            dist.all_reduce(asked, dist.ReduceOp.MAX, self._group)
        if asked:
            self.last_step, self.reason = global_step, STOP_SIGNALS[int(asked)]

    def check_numbers(self, global_step: int, num_skipped: int) -> None:
        """Stop a run that has gone astray, while its last checkpoint is good.

        Raises:
            AgreedError: too many steps in a row were skipped.
        """
        if num_skipped and num_skipped >= self._config.max_skipped_steps:
            reason = (f"{self._job.run.run_dir}: the gradient of {num_skipped} steps in a row, by"
                      f" step {global_step + 1:,}, was not finite; go on from an earlier checkpoint"
                      " with a lower learning_rate, or with precision bf16 or fp32")
            self._watchdog.before_exit("failed", reason)
            raise AgreedError(reason, status=NUMBERS)

    def keep_to_budget(self, global_step: int, log: Console) -> None:
        """Let rank 0's clock say where the run has to end."""
        if not self._budget.is_limited or global_step >= self.last_step:
            return
        pace = self._pace(global_step - self._job.first_step)
        if self._config.fit_budget:
            self._lay_out(self._from_main(self._fitting_steps(global_step, pace)), log)
        if self._from_main(int(self._is_spent_after(global_step, pace))):
            self.last_step, self.reason = global_step, self._budget.nearest_limit()

    def _from_main(self, number: int) -> int:
        decided = torch.tensor(number)
        dist.broadcast(decided, src=0, group=self._group)
        return int(decided)

    def _fitting_steps(self, global_step: int, pace: Pace) -> int:
        """Count the steps that the budget has room for, once they can be judged. Rank 0."""
        is_judged = global_step - self._job.first_step + 1 >= 2 * REPORT_INTERVAL
        if not (self.lays_out_next and is_judged):
            return self.plan.num_steps
        self.lays_out_next = False
        affordable = self._budget.affordable_steps(pace)
        return min(self._job.data.plan.num_steps, global_step + 1 + affordable)

    def _lay_out(self, num_steps: int, log: Console) -> None:
        """Let the schedule end after another number of steps."""
        if num_steps != self.plan.num_steps:
            self.plan: BatchPlan = replace(self.plan, num_steps=num_steps)
            self.last_step = self._last_step()
            log.lay_out(self.plan)

    def _is_spent_after(self, global_step: int, pace: Pace) -> bool:
        ahead = range(global_step + 1, min(global_step + REPORT_INTERVAL, self.last_step) + 1)
        due = [global_step, *ahead]  # what this step brings comes after its report
        saves_later = self.last_step not in ahead
        return not self._budget.affords(pace.seconds(
            len(ahead), num_validations=sum(map(self.validates_after, due)),
            num_savings=sum(map(self.saves_after, due)) + saves_later,
        ) + pace.last_write)

    def validates_after(self, global_step: int) -> bool:
        return self._config.validates and self.is_due(global_step, self._config.validation_interval)

    def saves_after(self, global_step: int) -> bool:
        return (
            self.validates_after(global_step)
            or self.is_due(global_step, self._config.checkpoint_interval)
            or global_step == self.last_step
        )

    def is_due(self, global_step: int, interval: int | None) -> bool:
        is_last = global_step == self.plan.num_steps - 1
        return is_last or (interval is not None and (global_step + 1) % interval == 0)
