"""The trackers' own packages, without a network; and stand-ins for what goes wrong."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import MagicMock

import psutil
import pytest

from basics.errors import UserError
from basics.failpoints import VARIABLE
from reporting import tracker_process
from reporting.metrics_file import remove_metrics_from
from reporting.tracked_run import TrackedRun
from reporting.tracker_backends import wandb_mode
from reporting.tracker_process import TrackerProcess, check_tracker
from run_config import Run
from tests.support.network import environment_of_refusal
from tests.support.trackers import (
    Values,
    add_records,
    add_summary,
    in_tensorboard,
    in_trackio,
    in_wandb,
    track,
    tracked_run,
)
from tests.support.workplace import PROJECT_DIR, Workplace

REMEDY = "; `lab export-metrics tiny --to trackio` adds what is missing"
AGAIN = "; until the launch ends, the tracker is started again every 10 minutes"


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An environment without accounts, in which connections are refused and recorded."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_DIR", "WANDB_PROJECT",
                 "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_TOKEN", "hf_marker0123456789")  # whose it is must not be asked
    for name, value in environment_of_refusal(tmp_path / "site", tmp_path / "log").items():
        monkeypatch.setenv(name, value)
    yield
    assert not (tmp_path / "log").exists(), (tmp_path / "log").read_text()


def kept(run: Run, tracker: str, tmp_path: Path) -> Values:
    """Return what a tracker has of the run."""
    if tracker == "trackio":
        return in_trackio(tmp_path / "trackio")
    if tracker == "wandb":
        ids, values, _, _ = in_wandb(run.run_dir / "wandb")
        assert ids == {TrackedRun.load(run.run_dir).name_of("tiny")}
        return values
    (place,) = (run.run_dir / "tensorboard").iterdir()
    assert place.name == TrackedRun.load(run.run_dir).id
    return in_tensorboard(place)


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "trackio"])
def test_a_resumed_run_goes_on_in_the_same_tracked_run_and_asks_no_other_machine(
    offline: None, workplace: Workplace, tmp_path: Path, tracker: str
) -> None:
    run = tracked_run(workplace, tracker)
    add_records(run, 0, 1, 2, layer_grad_norm=[0.5, 0.25])
    assert track(run) == ""
    remove_metrics_from(run.metrics_path, 2)  # killed, and resumed after the second step
    process = TrackerProcess(run)
    assert process.start(2, starts_over=False) == ""
    add_records(run, 2, 3)
    add_summary(run, 3)
    process.end()
    assert process.finish(lambda: 100.0) == ""
    values = kept(run, tracker, tmp_path)
    undone = [] if tracker == "tensorboard" else [(3, 8.0)]
    assert values["train/loss"] == [(1, 10.0), (2, 9.0), *undone, (3, 8.0), (4, 7.0)]
    assert values["layers/2/grad_norm"][:2] == [(1, 0.25), (2, 0.25)]
    if tracker == "wandb":
        _, _, config, final = in_wandb(run.run_dir / "wandb")
        assert config["train"]["tracker"] == "wandb" and config["model"]["n_layers"] == 2
        assert (final["final/best_loss"], final["final/status"]) == (1.25, "finished")
    else:
        assert values["final/best_loss"] == [(4, 1.25)]


def test_fresh_starts_a_new_tracked_run(offline: None, workplace: Workplace) -> None:
    run = tracked_run(workplace, "tensorboard")
    add_records(run, 0)
    assert track(run) == ""
    first = TrackedRun.load(run.run_dir).id
    assert track(run, starts_over=True) == ""
    second = TrackedRun.load(run.run_dir).id
    places = run.run_dir / "tensorboard"
    assert {path.name for path in places.iterdir()} == {first, second} and first != second
    assert in_tensorboard(places / first) == in_tensorboard(places / second)


def test_a_server_of_wandb_that_cannot_be_reached_is_a_note(
    offline: None, workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    run = tracked_run(workplace, "wandb")
    add_records(run, 0)
    assert "so it records offline" in track(run)
    assert kept(run, "wandb", tmp_path)["train/loss"] == [(1, 10.0)]


class StandIn:
    """A package of a tracker's name, for the process that would import the real one."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._package = folder / "stand-in" / "trackio"
        self._package.mkdir(parents=True)
        monkeypatch.setenv("PYTHONPATH", str(self._package.parent))

    def write(self, *, init: str = "pass", log: str = "pass", finish: str = "pass") -> None:
        (self._package / "__init__.py").write_text(
            "import os, sys, time, warnings\n"
            f"class Run:\n    def log(self, metrics, step):\n        {log}\n"
            f"    def finish(self):\n        {finish}\n"
            f"def init(**_):\n    {init}\n    return Run()\n")


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return StandIn(tmp_path, monkeypatch)


@pytest.fixture
def run(workplace: Workplace) -> Run:
    run = tracked_run(workplace, "trackio")
    add_records(run, 0, 1)
    return run


@pytest.mark.parametrize(("code", "failure"), [
    ({"init": "raise ValueError('no\\x1b[2J good')"}, "ValueError: no\\x1b[2J good"),
    ({"log": "1 / 0"}, "ZeroDivisionError: division by zero"),
    ({"log": "warnings.warn('trackio.log() failed')"}, "RuntimeError: trackio.log() failed"),
    ({"finish": "sys.exit(3)"}, "exit status 3"),
    ({"finish": "os.kill(os.getpid(), 11)"}, "the tracker process was ended by signal 11"
                                             " (Segmentation fault)"),
])
def test_a_tracker_that_fails_is_told_once(
    run: Run, stand_in: StandIn, code: dict[str, str], failure: str
) -> None:
    stand_in.write(**code)
    process = TrackerProcess(run)
    process.start(0, starts_over=False)
    process.end()
    assert process.finish(lambda: 100.0) == failure + REMEDY
    assert process.take_failure() == process.finish(lambda: 100.0) == ""


def test_a_tracker_that_fails_early_is_told_while_training_goes_on(
    run: Run, stand_in: StandIn
) -> None:
    stand_in.write(init="os._exit(0)")
    process = TrackerProcess(run)
    process.start(0, starts_over=False)
    process._process.wait(100)
    assert process.take_failure() == "it has ended" + REMEDY + AGAIN
    assert process.take_failure() == "" and process._process is None
    process.end()
    assert process.finish(lambda: 100.0) == ""


def test_a_tracker_that_fails_is_started_again_after_a_while(
    run: Run, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tracker_process, "RESTART_SECONDS", 0.0)
    monkeypatch.setenv(VARIABLE, "tracker:raise")
    process = TrackerProcess(run)
    assert process.start(0, starts_over=False)
    monkeypatch.delenv(VARIABLE)
    stand_in.write(init="raise ValueError('no')")
    failures = []
    for _ in range(2):
        assert process.take_failure() == ""  # starts it
        process._process.wait(100)
        failures.append(process.take_failure())
    assert failures[0].startswith("ValueError: no; ") and failures[1] == ""  # told once
    stand_in.write(log=f"open({str(tmp_path / 'steps')!r}, 'a').write(f'{{step}} ')")
    assert process.take_failure() == ""
    add_records(run, 2)
    process.end()
    assert process.finish(lambda: 100.0) == ""
    assert (tmp_path / "steps").read_text() == "1 2 3 "


def test_the_last_words_of_a_tracker_that_has_not_ended_yet_belong_to_its_end(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, child = TrackerProcess(run), MagicMock()
    child.poll.side_effect, child.stderr.read.side_effect = [None, 1], [b"ValueError: broken", b""]
    process._process, process._progress_at = child, time.monotonic()
    monkeypatch.setattr(tracker_process, "failure_of", lambda *_: "it ended with status 1")
    assert process.take_failure() == ""
    assert process.take_failure() == "ValueError: broken" + REMEDY + AGAIN


@pytest.mark.parametrize("place", ["init", "log", "finish"])
def test_a_tracker_that_hangs_is_ended_at_the_limit_and_nothing_is_lost(
    run: Run, stand_in: StandIn, tmp_path: Path, place: str
) -> None:
    stand_in.write(**{place: f"open({str(tmp_path / 'came')!r}, 'w'); time.sleep(3600)"})
    beats = []
    process = TrackerProcess(run, heartbeat=lambda: beats.append(1))
    process.start(0, starts_over=False)
    process.end()
    pid = process._process.pid
    failure = process.finish(lambda: 0.0 if (tmp_path / "came").exists() else 100.0)
    assert failure.startswith("it had not taken all records after ") and failure.endswith(REMEDY)
    assert beats and not psutil.pid_exists(pid)
    stand_in.write(log=f"open({str(tmp_path / 'steps')!r}, 'a').write(f'{{step}} ')")
    assert track(run, 2) == ""
    assert (tmp_path / "steps").read_text() == "1 2 "


def test_a_tracker_that_takes_nothing_is_told_once_while_training_goes_on(
    run: Run, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.write(init="time.sleep(3600)")
    process = TrackerProcess(run)
    process.start(0, starts_over=False)
    assert process.take_failure() == ""
    monkeypatch.setattr(tracker_process, "LAG_SECONDS", -1.0)
    assert "it has taken no records for " in process.take_failure()
    assert process.take_failure() == ""
    process.end()
    process._told_at -= 1000.0  # waiting for charts has taken this long
    assert "it had not taken all records after 999 s" in process.finish(lambda: 999.0)


def test_a_run_without_a_tracker_starts_nothing(workplace: Workplace) -> None:
    run = tracked_run(workplace, "none")
    process = TrackerProcess(run)
    assert process.start(0, starts_over=False) == process.take_failure() == ""
    process.end()
    assert process.finish(lambda: 100.0) == "" and process._process is None
    assert check_tracker(run) == []


@pytest.mark.parametrize("fault", ["raise", "full"])
def test_a_process_that_cannot_be_started_is_a_warning(
    run: Run, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setenv(VARIABLE, f"tracker:{fault}")
    process = TrackerProcess(run)
    assert process.start(0, starts_over=False)
    process.end()
    assert process.finish(lambda: 100.0) == ""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_tracker_ends_with_a_trainer_that_is_killed(
    run: Run, stand_in: StandIn, tmp_path: Path
) -> None:
    stand_in.write(init=f"open({str(tmp_path / 'pid')!r}, 'x').write(str(os.getpid()));"
                        " time.sleep(3600)")
    code = ("import sys, time\nfrom pathlib import Path\nfrom run_config import load_run\n"
            "from reporting.tracker_process import TrackerProcess\n"
            "process = TrackerProcess(load_run(Path(sys.argv[1]), 'tiny'))\n"
            "process.start(0, starts_over=False)\ntime.sleep(3600)")
    trainer = subprocess.Popen([sys.executable, "-c", code, str(run.run_dir.parent)],
                               cwd=PROJECT_DIR)
    until = time.monotonic() + 100
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
        assert time.monotonic() < until
        time.sleep(0.02)
    pid = int((tmp_path / "pid").read_text())
    assert psutil.Process(pid).nice() == 19 and os.getpgid(pid) == pid
    trainer.send_signal(signal.SIGKILL)
    trainer.wait(60)
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("spec", [None, ModuleSpec("trackio", None)], ids=["none", "a directory"])
def test_a_missing_package_is_one_line_that_says_how_to_install_it(
    run: Run, monkeypatch: pytest.MonkeyPatch, spec: ModuleSpec | None
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(UserError) as caught:
        check_tracker(run)
    assert str(caught.value) == (
        f'{run.train_path}: tracker "trackio" needs the package trackio: run `uv sync --extra'
        " trackio` (or pip install trackio)")


def test_links_out_of_the_run_directory_are_refused(workplace: Workplace, tmp_path: Path) -> None:
    run = tracked_run(workplace, "tensorboard")
    (run.run_dir / "tensorboard").symlink_to(tmp_path)
    with pytest.raises(UserError, match="tensorboard: leads out of"):
        check_tracker(run)
    (run.run_dir / "tensorboard").unlink()
    (run.run_dir / "tracker.json").symlink_to("train.json")
    with pytest.raises(UserError, match=r"tracker.json: cannot be read \("):
        check_tracker(run)


def test_wandb_records_offline_only_where_it_has_no_account(
    offline: None, workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tracked_run(workplace, "wandb")
    (notice,) = check_tracker(run)
    assert "no API key, so it records offline" in notice and wandb_mode() == "offline"
    netrc = Path(os.environ["NETRC"])
    for variables, logins in (({"WANDB_API_KEY": "x"}, ""), ({"WANDB_MODE": "offline"}, ""),
                              ({}, "machine api.wandb.ai login user password x"),
                              ({"WANDB_BASE_URL": "https://own.example"},
                               "machine own.example login user password x")):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            netrc.write_text(logins)
            assert check_tracker(run) == [] and wandb_mode() is None
    netrc.write_text("machine example.com login user password x")
    assert wandb_mode() == "offline"
    netrc.write_text("nonsense")
    assert wandb_mode() == "offline"
