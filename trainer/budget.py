"""Ends a launch before it exceeds `max_hours` or `max_cost_usd`."""

from reporting.clock import nearest_limit
from reporting.estimate import Pace
from reporting.loss_window import REPORT_INTERVAL
from reporting.summary import BUDGET, StopReason
from trainer.launch import Launch
from trainer.observer import Observer

SAFETY_MARGIN = 0.25  # of the time ahead: steps may take longer than measured
LAST_CHARTS_SECONDS = 2.0  # an estimate; they are not waited for beyond the budget


class Budget(Observer):
    """Looks at each report whether the steps up to the next one still fit."""

    def __init__(self, launch: Launch, pace: Pace) -> None:
        self._launch, self._pace = launch, pace

    def step(self, global_step: int, *, is_report_due: bool) -> None:
        launch = self._launch
        config, num_steps = launch.config, launch.plan.num_steps
        is_save_due = config.is_save_due(global_step, num_steps=num_steps)
        if global_step >= launch.last_step or not (is_report_due or is_save_due):
            return
        stop = min(global_step + REPORT_INTERVAL, launch.last_step) + 1
        seconds = self._pace.most_seconds(global_step, stop=stop) + LAST_CHARTS_SECONDS
        left, spent = nearest_limit(config, launch.clock)
        if seconds * (1 + SAFETY_MARGIN) > left:
            reserve = "; the rest is a reserve, too small for the next steps and a checkpoint"
            self.stop_reason = StopReason(BUDGET, spent + (reserve if left > 0 else ""))
