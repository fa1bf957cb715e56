"""Kills at random moments: `pytest tests/faults/test_storm.py --storm 200 --relaunches 100`."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from basics.checkpoint_files import find_damage
from basics.failpoints import VARIABLE
from checkpointing import list_checkpoints
from processes.run_lock import read_heartbeat
from reporting.summary import FINISHED, has_status
from run_config import load_run
from tests.support.runs import metrics_of, validations_of, weights_of
from tests.support.workplace import (
    PROJECT_DIR,
    children_of,
    start_forked,
    succeeded,
)

# 40 steps, slowed down so that most kills hit training, validation and saving.
SETTINGS = {"min_train_tokens": 40 * 128, "validation_interval": 4, "keep_checkpoints": 3}
LONGEST = 4.0  # seconds before a kill
LONGEST_LAUNCH = 9.0  # the same, for launches that import everything anew
VICTIMS = ("rank 0", "rank 1", "both", "torchrun", "all")


def test_kills_at_random_moments_change_no_result(workplace, num_kills):
    random.seed(num_kills)
    workplace.add_dataset(num_tokens=8000)
    undisturbed = workplace.add_run("undisturbed", train=SETTINGS)
    succeeded(workplace.torchrun(2, "undisturbed"))
    killed, round_number, lost = 0, 0, 0
    while killed < num_kills:
        round_number += 1
        name, reached = f"round-{round_number}", -1
        run_dir = workplace.add_run(name, train=SETTINGS)
        while killed < num_kills and kill_once(workplace, name):
            killed += 1
            found = list_checkpoints(run_dir / "checkpoints")
            newest = found[-1].meta.global_step if found else -1
            lost += newest < reached
            reached = newest
        succeeded(workplace.torchrun(2, name))
        assert_is_as_undisturbed(run_dir, undisturbed)
    assert lost == 0
    print(f"\n{killed} kills in {round_number} runs: 0 lost, 0 corrupt, 0 differing")


def assert_is_as_undisturbed(run_dir, undisturbed):
    assert weights_of(run_dir) == weights_of(undisturbed)
    assert validations_of(run_dir) == validations_of(undisturbed)
    steps = [r["global_step"] for r in metrics_of(run_dir) if "train_loss" in r]
    assert steps == sorted(set(steps)) and steps[-1] == 39
    for checkpoint in list_checkpoints(run_dir / "checkpoints"):
        assert find_damage(checkpoint.path, thoroughly=True) == ""


def kill_once(workplace, name):
    """Start a run and kill a random part of it; return False if the run finished first."""
    process, _ = start_forked("ddp_train.py", workplace.arguments(name), num_processes=2,
                              environment={VARIABLE: "train:slow:seconds=0.05"})
    process.join(timeout=random.uniform(0.1, LONGEST))
    # A finished process waits inside PyTorch, which hangs if a process dies there: do not kill it.
    if has_status(load_run(workplace.runs_dir, name), FINISHED):
        process.join(timeout=60)
    if not process.is_alive():
        return process.exitcode != 0
    workers = children_of(process.pid)
    victim = random.choice(VICTIMS)
    chosen = {"rank 0": workers[:1], "rank 1": workers[1:], "both": workers,
              "torchrun": [process.pid], "all": [process.pid, *workers]}[victim]
    for pid in chosen or [process.pid]:
        os.kill(pid, signal.SIGKILL)
    process.join(timeout=60)
    assert process.exitcode not in (None, 0), victim
    wait_until_gone(workers, victim)
    return True


def wait_until_gone(pids, victim):
    until = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < until, f"a process is still running after {victim} was killed"
        time.sleep(0.02)


def test_a_command_typed_again_after_a_kill_is_not_refused(workplace, num_relaunches):
    """The first kills come when torchrun has just started its processes: they are orphans then."""
    random.seed(num_relaunches)
    workplace.add_dataset(num_tokens=8000)
    undisturbed = workplace.add_run("undisturbed", train=SETTINGS)
    succeeded(workplace.torchrun(2, "undisturbed"))
    killed, names = [], (f"round-{number}" for number in range(1, 10**6))
    with (workplace.root / "log").open("w+") as log:
        while len(killed) < num_relaunches:
            run_dir = workplace.add_run(name := next(names), train=SETTINGS)
            while len(killed) < num_relaunches and (
                    phase := kill_soon(workplace, name, len(killed), log)):
                killed.append(phase)
                time.sleep(0.5)
            process = launch(workplace, name, log)
            assert process.wait(timeout=200) == 0, Path(log.name).read_text()[-2000:]
            assert_is_as_undisturbed(run_dir, undisturbed)
        said = Path(log.name).read_text()
    assert "another launch is training" not in said  # what a refused launch says
    print(f"\n{len(killed)} kills {dict(Counter(killed))}, {name}: 0 refused, 0 differing;"
          f" {said.count('waiting for another launch to end')} launches waited for orphans")


def launch(workplace, name, log):
    return subprocess.Popen(
        [sys.executable, "ddp_train.py", *workplace.arguments(name, "--nproc-per-node", "2")],
        cwd=PROJECT_DIR, env=os.environ | {VARIABLE: "train:slow:seconds=0.05"},
        stdout=log, stderr=log, start_new_session=True)


def kill_soon(workplace, name, number, log):
    """Launch a run, and kill its process group or all of it; return when, "" if it ended first."""
    run_dir = workplace.runs_dir / name
    (run_dir / "heartbeat.json").unlink(missing_ok=True)
    process = launch(workplace, name, log)
    if number < 2:
        while process.poll() is None and not children_of(process.pid):
            time.sleep(0.002)
    else:
        try:
            process.wait(timeout=random.uniform(0, LONGEST_LAUNCH))
        except subprocess.TimeoutExpired:
            pass
    if process.poll() is not None:
        assert process.returncode == 0, Path(log.name).read_text()[-2000:]
        return ""
    workers = children_of(process.pid)
    phase = read_heartbeat(run_dir).get("phase", "launching")
    for group in (process.pid, *(workers if number % 2 else [])):  # they have their own sessions
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    process.wait()
    return phase


@pytest.fixture
def num_relaunches(request):
    return request.config.getoption("--relaunches")


@pytest.fixture
def num_kills(request):
    return request.config.getoption("--storm")
