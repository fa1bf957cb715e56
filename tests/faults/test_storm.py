"""Kills at random moments, machines that are taken away, and what long runs leave.

`pytest tests/faults/test_storm.py --storm 200 --relaunches 100 --exits 100`; `--thorough` for more
moves and for 2,000 steps.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from basics.checkpoint_files import find_damage, named_as_checkpoints, read_identity
from basics.failpoints import VARIABLE
from basics.json_files import found_object
from checkpointing import list_checkpoints
from processes.run_lock import read_heartbeat
from reporting.summary import FINISHED, read_summary
from run_config import load_run
from tests.support.runs import (
    SETTINGS,
    add_everything,
    files_of,
    metrics_of,
    not_kept,
    summary_of,
    train_undisturbed,
    validations_of,
    wait_until_gone,
    weights_of,
    with_deadlines,
)
from tests.support.workplace import (
    PROJECT_DIR,
    Workplace,
    children_of,
    ended,
    start_forked,
    succeeded,
)

# 40 steps, slowed down so that most kills hit training, validation and saving.
STORM = {"min_train_tokens": 40 * 128, "validation_interval": 4, "keep_checkpoints": 3}
LONGEST = 4.0  # seconds before a kill
LONGEST_LAUNCH = 9.0  # the same, for launches that import everything anew
VICTIMS = ("rank 0", "rank 1", "both", "torchrun", "all")
LONG_SECONDS = 3600  # the most that hundreds of kills or runs may take


@pytest.mark.timeout(LONG_SECONDS)
def test_kills_at_random_moments_change_no_result(workplace, pytestconfig):
    num_kills = pytestconfig.getoption("--storm")
    random.seed(num_kills)
    workplace.add_dataset(num_tokens=8000)
    undisturbed = workplace.add_run("undisturbed", train=STORM)
    succeeded(workplace.torchrun(2, "undisturbed"))
    killed, round_number, lost = 0, 0, 0
    while killed < num_kills:
        round_number += 1
        name, reached = f"round-{round_number}", -1
        run_dir = workplace.add_run(name, train=STORM)
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


def kill_once(
    workplace, name, *arguments, num_processes=2, fault="train:slow:seconds=0.05", soon=False
):
    """Start a run and kill a random part of it; return False if the run finished first.

    Args:
        soon: kill the workers while torchrun still starts them.
    """
    run = load_run(workplace.runs_dir, name)
    before = read_summary(run)
    process, _ = start_forked(
        "ddp_train.py",
        workplace.arguments(name, *arguments),
        num_processes=num_processes,
        environment={VARIABLE: fault},
    )
    while soon and process.is_alive() and not children_of(process.pid):
        time.sleep(0.001)
    if not soon:
        process.join(timeout=200 if ":kill" in fault else random.uniform(0.1, LONGEST))
    # A finished process waits inside PyTorch, which hangs if a process dies there: do not kill it.
    if (summary := read_summary(run)) != before and summary.get("status") == FINISHED:
        process.join(timeout=200)
    if not process.is_alive():
        return process.exitcode != 0
    workers = children_of(process.pid)
    victim = "both" if soon else random.choice(VICTIMS)
    chosen = {
        "rank 0": workers[:1],
        "rank 1": workers[1:],
        "both": workers,
        "torchrun": [process.pid],
        "all": [process.pid, *workers],
    }[victim]
    for pid in chosen or [process.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.join(timeout=200)
    if process.is_alive():  # else pytest would wait for it at its end
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        pytest.fail(f"still ran 200 s after a kill of {victim}")
    has_finished = process.exitcode == 0 and read_summary(run).get("status") == FINISHED
    assert has_finished or process.exitcode != 0, victim
    wait_until_gone(workers)
    return not has_finished


def test_workers_killed_while_torchrun_starts_them_end_the_launch(workplace):
    workplace.add_dataset()
    workplace.add_run()
    for _ in range(4):
        assert kill_once(workplace, "tiny", num_processes=4, soon=True)


# Where a launch can be killed, and the most times that it gets there.
MOMENTS = {
    "prepare": 1,
    "aside.copy": 12,
    "aside.copied": 1,
    "open.identity": 1,
    "open.records": 3,
    "open.reference": 1,
    "open.status": 1,
    "aside.move": 6,
    "aside.end": 1,
    "compile": 1,
    "train": 24,
    "record": 12,
    "save.meta": 6,
    "save.manifest": 6,
    "save.validation": 6,
    "save.links": 12,
    "validate": 6,
    "summary": 1,
}
STEPS, STEP_TOKENS = 24, 64


@pytest.mark.timeout(LONG_SECONDS)
def test_kills_lose_no_file_of_what_the_run_has_left(workplace, pytestconfig):
    """With --fresh, earlier checkpoints and longer runs in between; on one process."""
    num_kills = pytestconfig.getoption("--storm")
    random.seed(num_kills)
    settings = {"min_train_tokens": STEPS * STEP_TOKENS, "validation_interval": 4}
    run_dir = add_everything(workplace, **settings)
    succeeded(workplace.torchrun(1, "tiny"))
    undisturbed = shutil.copytree(run_dir, workplace.root / "undisturbed", symlinks=True)
    left, killed, num_launches = [], Counter(), 0
    while killed.total() < num_kills:
        num_launches += 1
        kind = random.choice(["as it is", "fresh", "an earlier one"])
        earlier = list_checkpoints(run_dir / "checkpoints")[:-1]
        arguments = ["--fresh"] if kind == "fresh" else []
        if kind == "an earlier one" and earlier:
            arguments = [random.choice(earlier).name]
        before = state_of(run_dir)
        if not arguments and before[1] == FINISHED:
            make_longer(run_dir)
        for path in named_as_checkpoints(run_dir / "checkpoints", partial=True):
            shutil.rmtree(path)  # a part of a checkpoint; else the launch removes it
        files = files_of(run_dir)
        # A kill has come while a state was left: some files are already of the next one.
        is_state = not list(run_dir.glob("set-aside/*/.unfinished"))
        place = random.choice(list(MOMENTS))
        fault = random.choice(
            [f"{place}:kill:hit={random.randint(1, MOMENTS[place])}", "train:slow:seconds=0.05"]
        )
        if kill_once(workplace, "tiny", *arguments, num_processes=1, fault=fault):
            killed["at a moment" if ":kill" in fault else "at a time"] += 1
        # Without a new identity the steps after the newest checkpoint may be taken again.
        identity, status = state_of(run_dir)
        is_left = identity != before[0] or (before[1] == FINISHED and status != FINISHED)
        if is_state and is_left:
            left.append(files)
            assert not_kept(files, run_dir) == [], (arguments, fault)
    for number, files in enumerate(left):
        assert not_kept(files, run_dir) == [], number
    change(run_dir, **settings)
    succeeded(workplace.torchrun(1, "tiny", "--fresh"))
    assert weights_of(run_dir) == weights_of(undisturbed)
    assert validations_of(run_dir) == validations_of(undisturbed)
    assert not list(run_dir.glob("set-aside/*/.*"))
    num_aside = len(list((run_dir / "set-aside").iterdir()))
    print(
        f"\n{killed.total()} kills {dict(killed)} in {num_launches} launches: {len(left)} states"
        f" were left, in {num_aside} directories, and no file of them is lost"
    )


def state_of(run_dir):
    return read_identity(run_dir), found_object(run_dir / "summary.json").get("status")


def make_longer(run_dir):
    tokens = found_object(run_dir / "train.json")["min_train_tokens"]
    change(run_dir, min_train_tokens=tokens + 4 * STEP_TOKENS)


def change(run_dir, **settings):
    path = run_dir / "train.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@pytest.mark.timeout(LONG_SECONDS)
def test_a_command_typed_again_after_a_kill_is_not_refused(workplace, pytestconfig):
    """The first kills come when torchrun has just started its processes: they are orphans then."""
    num_relaunches = pytestconfig.getoption("--relaunches")
    random.seed(num_relaunches)
    workplace.add_dataset(num_tokens=8000)
    undisturbed = workplace.add_run("undisturbed", train=STORM)
    succeeded(workplace.torchrun(2, "undisturbed"))
    killed, names = [], (f"round-{number}" for number in range(1, 10**6))
    with (workplace.root / "log").open("w+") as log:
        while len(killed) < num_relaunches:
            run_dir = workplace.add_run(name := next(names), train=STORM)
            while len(killed) < num_relaunches and (
                phase := kill_soon(workplace, name, len(killed), log)
            ):
                killed.append(phase)
                time.sleep(0.5)
            process = launch(workplace, name, log)
            assert process.wait(timeout=200) == 0, Path(log.name).read_text()[-2000:]
            assert_is_as_undisturbed(run_dir, undisturbed)
        said = Path(log.name).read_text()
    assert "another launch is training" not in said  # what a refused launch says
    print(
        f"\n{len(killed)} kills {dict(Counter(killed))}, {name}: 0 refused, 0 differing;"
        f" {said.count('waiting for another launch to end')} launches waited for orphans"
    )


def launch(workplace, name, log):
    return subprocess.Popen(
        [sys.executable, "ddp_train.py", *workplace.arguments(name, "--nproc-per-node", "2")],
        cwd=PROJECT_DIR,
        env=os.environ | {VARIABLE: "train:slow:seconds=0.05"},
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


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


# A checkpoint after every second of 12 steps. The fourth step of a launch lasts until it is killed:
# copies are made at the lowest priority, on a busy machine later than the steps are taken.
OFTEN = SETTINGS | {"validation_interval": 2, "keep_checkpoints": 2, "hang_timeout_seconds": 600.0}
SLOW = "train:slow:seconds=0.5;train:hang:hit=4"

RSYNC = "rsync -a --exclude '.*' {run_dir}/ %s/{run}/ || [ $? = 24 ]"  # 24: pruned meanwhile
needs_rsync = pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")


@needs_rsync
@pytest.mark.parametrize("num_moves", [2, pytest.param(5, marks=pytest.mark.thorough)])
def test_a_run_that_is_moved_again_and_again_ends_with_the_same_weights(tmp_path, num_moves):
    undisturbed = train_undisturbed(tmp_path / "undisturbed", OFTEN)
    copies, reached = tmp_path / "copies", -1
    copies.mkdir()
    for number in range(num_moves):
        machine = new_machine(tmp_path / f"machine-{number}", copies)
        output = train_until_copied(machine, copies, after=reached)
        assert ("resuming from" in output) == (number > 0)
        reached = newest_in(copies)
        shutil.rmtree(machine.root)
    machine = new_machine(tmp_path / "last", copies)
    result = succeeded(machine.torchrun(2, "tiny", "--after-checkpoint", RSYNC % copies))
    assert "resuming from" in result.stdout and "warning: --after" not in result.stdout
    for run_dir in (machine.runs_dir / "tiny", copies / "tiny"):
        assert weights_of(run_dir) == weights_of(undisturbed)
        assert validations_of(run_dir) == validations_of(undisturbed)
        assert summary_of(run_dir)["status"] == "finished"
        assert summary_of(run_dir)["best"]["loss"] == summary_of(undisturbed)["best"]["loss"]
    assert metrics_of(machine.runs_dir / "tiny") == metrics_of(copies / "tiny")
    result = succeeded(machine.ddp_train("tiny", "--nproc-per-node", "2"))
    assert "tiny is complete" in result.stdout


@needs_rsync
def test_the_checkpoint_of_a_stop_signal_is_copied(workplace):
    workplace.add_dataset()
    run_dir, copies = workplace.add_run(train=SETTINGS), workplace.root / "copies"
    copies.mkdir()
    result = workplace.torchrun(
        2,
        "tiny",
        "--after-checkpoint",
        RSYNC % copies,
        **with_deadlines(last_write=60, stop=90),
        **{VARIABLE: "train:signal:number=15:rank=0:hit=7"},
    )
    assert result.returncode == 1  # torchrun's
    assert "warning: --after" not in result.stdout
    assert newest_in(copies) == 6 and weights_of(copies / "tiny") == weights_of(run_dir)
    assert summary_of(copies / "tiny")["status"] == "stopped"


def new_machine(root, copies):
    """Return an empty machine, with what the copy has of the run, or else a new run."""
    machine = Workplace(root)
    machine.add_dataset()
    if (copies / "tiny/train.json").exists():
        machine.runs_dir.mkdir(exist_ok=True)
        subprocess.run(["cp", "-a", copies / "tiny", machine.runs_dir], check=True)
    else:
        machine.add_run(train=OFTEN)
    return machine


def train_until_copied(machine, copies, *, after):
    """Train until the copy has a newer checkpoint; kill everything. Return what was printed."""
    process, (stdout, _) = start_forked(
        "ddp_train.py",
        machine.arguments("tiny", "--after-checkpoint", RSYNC % copies),
        num_processes=2,
        environment={VARIABLE: SLOW},
        folder=machine.root,
    )
    until = time.monotonic() + 200
    while newest_in(copies) <= after:
        assert process.is_alive() and time.monotonic() < until, stdout.read_text()
        time.sleep(0.05)
    family = [process.pid, *(pid for pid in children_of(process.pid))]
    family += [pid for worker in family[1:] for pid in children_of(worker)]
    for pid in family:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.join(timeout=200)
    wait_until_gone(family)
    return stdout.read_text()


def newest_in(copies):
    found = list_checkpoints(copies / "tiny/checkpoints")
    return found[-1].meta.global_step if found else -1


WARM_UP_STEPS = 1000  # the allocator still grows by a few MiB in the first steps
EVENTFUL = {
    "validation_interval": 50,
    "keep_checkpoints": 2,
    "activation_checkpointing": True,
}  # leaves cycles, which each report has to collect
MIB = 2**20


def held_by(pid):
    """Return what a process holds now."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return {
        "private bytes": int(status["RssAnon"].split()[0]) * 1024,
        "threads": int(status["Threads"]),
        "files": len(list(Path(f"/proc/{pid}/fd").iterdir())),
    }


@pytest.mark.thorough
def test_steps_leak_no_memory_files_or_threads(workplace, tmp_path):
    """With validations, checkpoints and charts, after 1,000 steps of warm-up."""
    num_steps = 2000 + WARM_UP_STEPS
    workplace.add_dataset(num_tokens=num_steps * 128 + 1000)
    run_dir = workplace.add_run(train=EVENTFUL | {"min_train_tokens": num_steps * 128})
    metrics_path = run_dir / "metrics.jsonl"
    process, outputs = start_forked(
        "ddp_train.py", workplace.arguments("tiny"), num_processes=2, folder=tmp_path
    )
    samples: dict[int, list[dict[str, int]]] = {}  # by process
    while process.is_alive():
        reported = (
            metrics_path.read_text().count('"train_loss"') * 10 if (metrics_path.exists()) else 0
        )
        workers = children_of(process.pid)
        if WARM_UP_STEPS <= reported <= num_steps - 50 and len(workers) == 2:
            for pid in workers:
                samples.setdefault(pid, []).append(held_by(pid) | {"step": reported})
        time.sleep(0.05)
    succeeded(ended(process, outputs))
    assert len(samples) == 2
    for taken in samples.values():
        third = len(taken) // 3
        early, late = taken[:third], taken[-third:]
        assert third >= 10 and late[0]["step"] > early[-1]["step"]
        grown = max(s["private bytes"] for s in late) - max(s["private bytes"] for s in early)
        print(
            f"\n{grown / MIB:+.2f} MiB between the first and the last third of steps"
            f" {taken[0]['step']} to {taken[-1]['step']}"
        )
        assert grown < 1 * MIB
        for name in ("threads", "files"):  # compare minima: some are short-lived
            assert min(s[name] for s in late) <= min(s[name] for s in early)


@pytest.mark.timeout(LONG_SECONDS)
def test_runs_exit_cleanly(workplace, pytestconfig):
    num_exits = pytestconfig.getoption("--exits")
    workplace.add_dataset()
    for number in range(num_exits):
        workplace.add_run(f"run-{number}")
        result = succeeded(workplace.torchrun(2, f"run-{number}", "--max-steps", "2"))
        assert result.stderr == ""
    print(f"\n{num_exits} of {num_exits} runs ended cleanly")
