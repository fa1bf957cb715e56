"""Trackers: which records they get, their own packages without a network, and what goes wrong."""

import importlib.util
import os
import subprocess
import sys
import time
from dataclasses import replace
from importlib.machinery import ModuleSpec

import pytest

from basics.errors import UserError
from processes import background
from processes.run_lock import lock_run, release_run
from processes.signals import DEADLINES
from reporting import tracker
from reporting.metrics_file import remove_metrics_from
from reporting.tracker import TrackedRun, begin_tracking, check_tracker, send_records
from tests.support.lab_cli import error_line, run_lab, succeeded
from tests.support.runs import thorough_but, wait_for
from tests.support.stand_ins import environment_of_refusal
from tests.support.trackers import (
    add_records,
    add_summary,
    end,
    in_tensorboard,
    in_trackio,
    in_wandb,
    started,
    track,
    tracked_run,
)
from tests.support.workplace import PROJECT_DIR, run_command
from tests.support.workplace import succeeded as process_succeeded

pytestmark = pytest.mark.processes

REMEDY = "; `lab export-metrics tiny --to trackio` adds what is missing"


# Which records a tracker gets


class Launches:
    """Launches of one run, with a tracker that keeps the steps that it gets over all of them."""

    def __init__(self, run, monkeypatch):
        self.run, self.status = run, ""
        self.steps, self.last_steps = [], []  # the last ones that it had when it was opened
        monkeypatch.setattr(tracker, "open_tracker", self.open)

    def open(self, run, id, last_step, note):
        self.last_steps.append(last_step)
        return self

    def send(self, points):
        self.steps += [step for step, _ in points]

    def finish(self, step, figures):
        self.status = figures.get("final/status", "")

    def resume(self, first_step):
        """Begin a launch, whose tracker does not come as far as to its first record."""
        remove_metrics_from(self.run.metrics_path, first_step)
        begin_tracking(self.run, starts_over=False)

    def work(self, *steps):
        """Have the tracker work while this happens, one thing after another."""
        left = list(steps)

        def is_over():
            if left:
                left.pop(0)()
            return not left

        return send_records(
            self.run, TrackedRun.load(self.run.run_dir), note=print, is_over=is_over
        )

    def add(self, *steps):
        return lambda: add_records(self.run, *steps)

    @property
    def sent(self):
        return TrackedRun.load(self.run.run_dir).sent


@pytest.fixture(autouse=True)
def as_fast_as_other_tests(monkeypatch):
    """At the lowest priority, beside tests that use all cores, a tracker may take minutes."""
    monkeypatch.setattr(background, "LOWEST", [])


@pytest.fixture
def launches(workplace, monkeypatch):
    return Launches(tracked_run(workplace, "trackio"), monkeypatch)


def test_each_record_is_passed_on_once_as_it_comes(launches):
    def begin_a_record():
        file.write('nonsense\n{"global_step": -1}\n{"global_step": 2, ')
        file.flush()

    def end_it():
        assert launches.steps == [1, 2]
        file.write('"train_loss": 1.0}\n')
        file.flush()

    add_summary(launches.run, 2)
    with launches.run.metrics_path.open("a") as file:
        assert launches.work(launches.add(0, 1), begin_a_record, end_it) == 3
    assert launches.steps == [1, 2, 3] and launches.status == "finished"
    assert launches.sent == {"trackio": 3}


def test_steps_that_a_kill_has_undone_are_passed_on_again(launches):
    launches.work(launches.add(0, 1, 2, 3))
    launches.resume(2)  # the checkpoint holds the state after step 1; this tracker fails at once
    add_records(launches.run, 2, 3, 4)
    launches.resume(4)
    launches.work(launches.add(4, 5))
    assert launches.steps == [1, 2, 3, 4, 3, 4, 5, 6]
    assert launches.last_steps == [0, 2] and launches.sent == {"trackio": 6}


def test_a_kill_of_the_tracker_repeats_its_last_records_and_loses_nothing(launches):
    def kill():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launches.work(*(launches.add(step) for step in range(3)), kill)
    assert launches.sent == {"trackio": 2}  # has the third one arrived?
    launches.work(launches.add(3))
    assert launches.steps == [1, 2, 3, 3, 4]


def test_a_damaged_state_of_a_tracker_is_begun_anew(tmp_path):
    for content in ("", "{", "[]", '{"id": "../../x"}', '{"id": "a", "sent": {"wandb": -1}}'):
        (tmp_path / "tracker.json").write_text(content)
        found = TrackedRun.load(tmp_path)
        assert len(found.id) > 10 and not found.sent


# The packages


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """An environment without accounts, in which connections are refused and recorded."""
    for name in (
        "WANDB_API_KEY",
        "WANDB_MODE",
        "WANDB_BASE_URL",
        "WANDB_DIR",
        "WANDB_PROJECT",
        "TRACKIO_SPACE_ID",
        "TRACKIO_SERVER_URL",
        "HF_HUB_OFFLINE",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_TOKEN", "hf_marker0123456789")  # whose it is must not be asked
    for name, value in environment_of_refusal(tmp_path / "site", tmp_path / "log").items():
        monkeypatch.setenv(name, value)
    yield
    assert not (tmp_path / "log").exists(), (tmp_path / "log").read_text()


def kept(run, tmp_path):
    """Return what the tracker has of the run."""
    id = TrackedRun.load(run.run_dir).id
    if run.config.tracker == "trackio":
        return in_trackio(tmp_path / "trackio")
    if run.config.tracker == "wandb":
        ids, values, _, _ = in_wandb(run.run_dir / "wandb")
        assert ids == {f"tiny-{id}"}
        return values
    return in_tensorboard(run.run_dir / "tensorboard" / id)


@pytest.mark.parametrize("kind", thorough_but(["tensorboard"], ["tensorboard", "wandb", "trackio"]))
def test_a_resumed_run_goes_on_in_the_same_tracked_run_and_asks_no_other_machine(
    offline, workplace, tmp_path, kind
):
    run = tracked_run(workplace, kind)
    add_records(
        run,
        0,
        1,
        2,
        layer_grad_norm=[0.5, 0.25],
        gpu_power_w=[250, None],
        gpu_throttling=["", "hw thermal slowdown"],
        another=1.0,
    )
    assert ("records offline: UsageError: No API key" in track(run)) == (kind == "wandb")
    remove_metrics_from(run.metrics_path, 2)  # killed, and resumed after the second step
    process = started(run)
    add_records(run, 2, 3)
    add_summary(run, 3)
    assert bool(end(run, process)) == (kind == "wandb")  # the same note
    values = kept(run, tmp_path)
    undone = [] if kind == "tensorboard" else [(3, 8.0)]
    assert values["train/loss"] == [(1, 10.0), (2, 9.0), *undone, (3, 8.0), (4, 7.0)]
    for name, value in {
        "layers/2/grad_norm": 0.25,
        "machine/gpu_0/power_w": 250.0,
        "machine/gpu_1/is_throttled": 1.0,
    }.items():
        assert values[name][:2] == [(1, value), (2, value)]
    assert not {"machine/gpu_1/power_w", "another"} & values.keys()
    if kind == "wandb":
        _, _, config, final = in_wandb(run.run_dir / "wandb")
        assert config["train"]["tracker"] == "wandb" and config["model"]["n_layers"] == 2
        assert (final["final/best_loss"], final["final/status"]) == (1.25, "finished")
    else:
        for name, value in {"best_loss": 1.25, "steps": 4.0, "seconds": 3.0}.items():
            assert values[f"final/{name}"] == [(4, value)]


def test_without_a_key_wandb_does_not_ask_in_a_terminal(offline, workplace):
    add_records(tracked_run(workplace, "wandb"), 0)
    terminal, its_end = os.openpty()
    try:
        exported = subprocess.run(
            [
                sys.executable,
                "-m",
                "lab",
                "export-metrics",
                "tiny",
                "--to",
                "wandb",
                "--runs-dir",
                str(workplace.runs_dir),
            ],
            cwd=PROJECT_DIR,
            stdin=its_end,
            stderr=its_end,
            stdout=subprocess.PIPE,
            text=True,
            timeout=200,
        )
    finally:
        os.close(its_end)
        os.close(terminal)
    assert exported.returncode == 0 and exported.stdout == "wandb: 1 record added\n"


@pytest.mark.thorough
def test_a_server_of_wandb_that_cannot_be_reached_is_a_note(
    offline, workplace, tmp_path, monkeypatch
):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    run = tracked_run(workplace, "wandb")
    add_records(run, 0)
    assert "so it records offline" in track(run)
    assert kept(run, tmp_path)["train/loss"] == [(1, 10.0)]


# What goes wrong


@pytest.fixture
def run(workplace):
    run = tracked_run(workplace, "trackio")
    add_records(run, 0, 1)
    return run


@pytest.fixture
def write_package(tmp_path, monkeypatch):
    """What writes a package of a tracker's name, for the process that would import the real one."""
    package = tmp_path / "stand-in" / "trackio"
    package.mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))

    def write(*, init="pass", log="pass"):
        (package / "__init__.py").write_text(
            "import sys, time, warnings\n"
            f"class Run:\n    def log(self, metrics, step):\n        {log}\n"
            f"def finish():\n    pass\n"
            f"def init(**_):\n    {init}\n    return Run()\n"
        )

    return write


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ({"init": "raise ValueError('no\\x1b[2J good')"}, "ValueError: no\\x1b[2J good"),
        ({"log": "warnings.warn('trackio.log() failed')"}, "RuntimeError: trackio.log() failed"),
    ],
)
def test_a_tracker_that_fails_is_told_once(run, write_package, code, failure):
    write_package(**code)
    assert track(run) == failure + REMEDY


def test_a_tracker_that_fails_is_started_again_and_gets_what_it_lacks(run, write_package, tmp_path):
    steps = tmp_path / "steps"
    log = f"open({str(steps)!r}, 'a').write(f'{{step}} ')"
    write_package(log=f"{log}; step == 1 or sys.exit(3)")
    process = started(run)
    wait_for(steps)
    while not (failure := process.pop_failure()):
        time.sleep(0.05)
    assert failure == "SystemExit: 3" + REMEDY
    write_package(log=log)
    add_records(run, 2)
    process.start()  # as at the next checkpoint
    while not steps.read_text().endswith("1 2 3 "):
        time.sleep(0.05)
    assert end(run, process) == "" and steps.read_text() == "1 2 1 2 3 "


def test_a_missing_package_is_one_line_that_says_how_to_install_it(run, monkeypatch):
    for spec in (None, ModuleSpec("trackio", None)):  # none, and a directory of that name
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, spec=spec: spec)
        with pytest.raises(UserError) as caught:
            check_tracker("trackio")
        assert str(caught.value) == (
            'tracker "trackio" needs the package trackio: run `uv sync --extra trackio` (or pip'
            " install trackio)"
        )
    run = replace(run, config=run.config.model_copy(update={"tracker": "none"}))
    check_tracker("none")
    assert track(run) == ""


# lab export-metrics


def export(run, *arguments):
    return run_lab(
        "export-metrics",
        "tiny",
        "--to",
        "tensorboard",
        *arguments,
        "--runs-dir",
        str(run.run_dir.parent),
    )


def test_an_export_adds_what_is_new_and_a_fresh_one_everything(workplace):
    run = tracked_run(workplace, "none")
    add_records(run, 0, 1)
    assert succeeded(export(run)).output == "tensorboard: 2 records added\n"
    assert succeeded(export(run)).output == "tensorboard: 0 records added\n"
    add_records(run, 2)
    add_summary(run, 2)
    assert succeeded(export(run)).output == "tensorboard: 1 record added\n"
    first = TrackedRun.load(run.run_dir).id
    values = in_tensorboard(run.run_dir / "tensorboard" / first)
    assert values["train/loss"] == [(1, 10.0), (2, 9.0), (3, 8.0)]
    assert values["final/train_loss"] == [(3, 1.5)]
    assert succeeded(export(run, "--fresh")).output == "tensorboard: 3 records added\n"
    assert TrackedRun.load(run.run_dir).id != first
    assert len(list((run.run_dir / "tensorboard").iterdir())) == 2


def test_trackio_prints_nothing_itself(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    result = process_succeeded(
        run_command(
            sys.executable,
            "-m",
            "lab",
            "export-metrics",
            "tiny",
            "--to",
            "trackio",
            "--runs-dir",
            str(run.run_dir.parent),
        )
    )  # a process: the package would print when Python exits
    assert (result.stdout, result.stderr) == ("trackio: 2 records added\n", "")


def test_what_cannot_be_exported_is_one_line(run, monkeypatch):
    def fail(*_):
        raise OSError("full")

    with monkeypatch.context() as patch:
        patch.setattr(tracker, "open_tracker", fail)
        assert "tensorboard has failed: OSError: full; the same command" in error_line(
            export(run), status=1
        )
    lock_run(run.run_dir)
    monkeypatch.setenv(DEADLINES, '{"orphans": 0}')
    try:
        assert "another launch is training this run" in error_line(export(run), status=2)
    finally:
        release_run()
    run.metrics_path.unlink()
    assert "metrics.jsonl: no such file; train the run first" in error_line(export(run), status=2)
