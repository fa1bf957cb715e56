"""Compares a run's losses with its reference, and ends one that is behind (`stop_if_behind`)."""

from reporting.loss_window import REPORT_INTERVAL
from reporting.reference import Kind, ReferenceComparison, ReferenceCurve
from reporting.run_log import Report
from reporting.summary import BEHIND, StopReason
from trainer.launch import Launch
from trainer.observer import Observer


class ReferenceCheck(Observer):
    """Adds the comparison to each report; warns once each time that the run falls behind."""

    def __init__(self, launch: Launch, reference: ReferenceCurve) -> None:
        self._comparison = ReferenceComparison(reference, launch.config)
        self._has_warned = False

    def report(self, report: Report) -> None:
        # A report of few steps is noisy: it is not one of the reports in a row.
        assert report.window is not None
        if "train_loss" in report.values:
            self._compare("train", report, counts=2 * report.window.num_steps >= REPORT_INTERVAL)

    def validation(self, report: Report) -> None:
        self._compare("validation", report, counts=True)

    def _compare(self, kind: Kind, report: Report, *, counts: bool) -> None:
        comparison = self._comparison
        numbers, text = comparison.compare(kind, report.tokens, report.loss, counts=counts)
        report.values |= numbers
        report.compared = text
        if comparison.failure and not self._has_warned:
            report.warnings.append(comparison.failure)
        self._has_warned = bool(comparison.failure)
        is_over = comparison.stops and bool(comparison.failure)
        self.stop_reason = StopReason(BEHIND, comparison.failure) if is_over else None
