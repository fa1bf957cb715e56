"""How long processes beside training are waited for at the end, and what a failure means."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from basics.errors import UserError
from processes.signals import Deadlines
from reporting.clock import PhaseClock
from run_config import TrainConfig
from tests.support.workplace import TINY_TRAIN
from trainer import side_processes
from trainer.reports import Reports
from trainer.side_processes import SideProcesses


class End:
    """The end of a launch, at second 1000 of a clock that only waiting moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **train: object) -> None:
        self.now, self.waited, self.warnings, self.failure = 1000.0, {}, [], ""
        self.started: list[str] = []
        self.stop_at = float("inf")
        self.watchdog = SimpleNamespace(stop_signal=0, stop_by=float("inf"), deadlines=Deadlines())
        clock = PhaseClock()
        clock.usd_per_hour = 3600.0
        self.beside = SideProcesses.__new__(SideProcesses)
        vars(self.beside).update(
            _watchdog=self.watchdog, _clock=clock,
            _train=TrainConfig(**TINY_TRAIN | train),
            _console=SimpleNamespace(warn=self.warn),
            _charts=self.process("charts"), _tracker=self.process("tracker"),
            after_checkpoint=self.process("command"))
        monkeypatch.setattr(side_processes.time, "monotonic", lambda: self.now)

    def warn(self, what: str, failure: str) -> None:
        if failure:
            self.warnings.append(f"{what}: {failure}")

    def process(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(
            start=lambda: self.started.append(name), hurry=lambda: None, tell_end=lambda: None,
            finish=lambda until: self.hang(name, until))

    def hang(self, name: str, until: Callable[[], float]) -> str:
        """Wait as long as it is allowed."""
        began = self.now
        while self.now < until():
            self.now += 0.25
            if self.now == self.stop_at:
                self.stop()
        self.waited[name] = self.now - began
        return self.failure

    def stop(self) -> None:
        """Receive a stop signal."""
        self.watchdog.stop_signal = 15
        self.watchdog.stop_by = self.now + self.watchdog.deadlines.stop


@pytest.fixture
def end(monkeypatch: pytest.MonkeyPatch) -> End:
    return End(monkeypatch)


def test_a_last_command_that_failed_is_told(end: End) -> None:
    end.failure = "no space"
    assert end.beside.finish() == "no space"
    assert end.started == ["command"]
    assert end.waited["command"] == 900 and not any("after" in line for line in end.warnings)


def test_after_a_stop_signal_all_end_within_one_grace_and_a_failure_is_a_warning(end: End) -> None:
    end.failure = "no time"
    end.stop()
    end.now += 5.0  # for the checkpoint
    assert end.beside.finish() == ""
    assert end.waited == {"command": 5.0, "charts": 2.0, "tracker": 0.0}
    assert end.now < end.watchdog.stop_by
    assert "--after-checkpoint: no time" in end.warnings


def test_a_signal_while_the_command_is_waited_for_shortens_that(end: End) -> None:
    end.stop_at = 1100.0
    assert end.beside.finish() == "" and end.waited["command"] == 110.0
    assert end.now < end.watchdog.stop_by


def test_a_longer_grace_is_the_commands(end: End) -> None:
    end.watchdog.deadlines = Deadlines(stop=120.0)
    end.stop()
    end.beside.finish()
    assert end.waited["command"] == 117.0


@pytest.mark.parametrize(("budget", "seconds"), [(1e6, 900), (300.0, 300), (1.0, 60)])
def test_the_budget_bounds_the_wait_for_the_command(
    monkeypatch: pytest.MonkeyPatch, budget: float, seconds: float
) -> None:
    end = End(monkeypatch, usd_per_hour=3600.0, max_cost_usd=budget)
    end.beside.finish()
    assert end.waited["command"] == pytest.approx(seconds, abs=5)


class Ending:
    """The reports of a run at the end of a launch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, failure: str, unwritten: str) -> None:
        self.statuses: list[str] = []
        self.reports = Reports.__new__(Reports)
        saver = SimpleNamespace(retry=lambda: None, is_behind=False, has_finite_loss=True,
                                facts=dict, take_failure=lambda: "", wait=lambda **_: None)
        console = SimpleNamespace(finish=lambda _: unwritten, say=lambda _: None,
                                  write_status=lambda *status: self.statuses.append(status[0]))
        vars(self.reports).update(
            prepared=SimpleNamespace(is_trained=False, first_step=0,
                                     data=SimpleNamespace(tokenizer_name=None)),
            run=SimpleNamespace(checkpoints_dir="none", run_dir="runs/tiny"), clock=PhaseClock(),
            plan=SimpleNamespace(num_steps=6),
            saver=saver, console=console, process=SimpleNamespace(is_main=True),
            watchdog=SimpleNamespace(stop_signal=0, deadlines=Deadlines()),
            _has_ended=False, code="1",
            meter=SimpleNamespace(stop=lambda: None, energy_kwh=None),
            losses=SimpleNamespace(train=TrainConfig(**TINY_TRAIN), facts=dict,
                                   model=SimpleNamespace(num_parameters=lambda: 1)),
            beside=SimpleNamespace(finish=lambda: failure, finish_charts=lambda: None))
        monkeypatch.setattr("trainer.reports.list_checkpoints", lambda _: [])
        monkeypatch.setattr("trainer.reports.machine_facts", lambda *_: {})

    def end(self) -> None:
        self.reports.end(5, stop_reason=None, lacks_validation=False)


def test_a_launch_whose_last_command_failed_ends_with_status_1_and_stays_finished(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    ending = Ending(monkeypatch, failure="no space", unwritten="")
    with pytest.raises(UserError, match="--after-checkpoint: no space; the check") as caught:
        ending.end()
    assert caught.value.status == 1
    ending.reports._before_exit("failed", "so the watchdog says")
    assert ending.statuses == []


def test_a_signal_after_the_summary_leaves_it_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = Ending(monkeypatch, failure="", unwritten="")
    ending.reports._before_exit("stopped", "SIGTERM")
    assert ending.statuses == ["stopped"]
    ending.end()
    ending.reports._before_exit("stopped", "SIGTERM")
    assert ending.statuses == ["stopped"]


def test_a_summary_that_could_not_be_written_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = Ending(monkeypatch, failure="no space", unwritten="summary.json: full")
    with pytest.raises(UserError, match="summary.json: full") as caught:
        ending.end()
    assert caught.value.status == 4
    ending.reports._before_exit("failed", "full")
    assert ending.statuses == ["failed"]
