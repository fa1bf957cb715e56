"""What a launch of a run works with, once everything is checked."""

from dataclasses import dataclass

import torch.distributed as dist

from processes.command_line import Options
from processes.distributed import Process
from processes.startup_progress import StartupProgress
from processes.watchdog import Watchdog
from reporting.clock import PhaseClock
from reporting.reference import ReferenceCurve
from run_config import Run, Stage, TrainConfig
from tokens.batch_plan import BatchPlan
from tokens.batches import RunData
from trainer.resuming import ResumePoint, stages_left


@dataclass(frozen=True)
class Launch:
    """A launch of a run on this process; `group` is of gloo, for waits of any length."""

    run: Run  # with everything in its config decided
    data: RunData
    resume: ResumePoint
    reference: ReferenceCurve | None
    options: Options
    watchdog: Watchdog
    clock: PhaseClock
    progress: StartupProgress
    group: dist.ProcessGroup

    @property
    def config(self) -> TrainConfig:
        return self.run.config

    @property
    def plan(self) -> BatchPlan:
        return self.data.plan

    @property
    def process(self) -> Process:
        return self.watchdog.process

    @property
    def stages(self) -> list[Stage]:
        """The stages that are left to train; the first may want more layers than are loaded."""
        return stages_left(self.run, self.plan, self.resume)

    @property
    def last_step(self) -> int:
        """The launch's last step if nothing ends it earlier.

        An earlier launch, or this one before a restart by torchrun, may have taken it already.
        """
        began_at = self.options.began_at
        if began_at is None:
            began_at = self.resume.first_step
        num_steps = self.plan.num_steps
        return min(num_steps, began_at + (self.options.max_steps or num_steps)) - 1
