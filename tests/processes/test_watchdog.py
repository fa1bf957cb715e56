"""The watchdog where a run's own ways to end do not help: slow steps, hangs, full disks."""

import errno
import json
import os
import re
import signal
import subprocess
import time
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from basics.checkpoint_files import named_as_checkpoints
from basics.errors import UserError, describe
from basics.failpoints import MARKS, VARIABLE
from basics.machine import process_namespace
from processes import watchdog as watchdog_module
from processes.launch import Process
from processes.signals import Deadlines
from processes.watchdog import SMALLER, Watchdog
from tests.support.runs import (
    SETTINGS,
    last_line_of_ours,
    summary_of,
    wait_for,
    with_deadlines,
    with_fault,
)
from tests.support.thorough import thorough_but
from tests.support.workplace import children_of, start_forked, succeeded

NO_HANG = {"hang_timeout_seconds": 600.0, "collective_timeout_seconds": 600.0}
SOON = with_deadlines(stop=2, others_stop=4, last_write=1)


def train(workplace, fault, environment):
    """Start a run on two processes by the script itself, which returns the exit status."""
    process, _ = start_forked("ddp_train.py", workplace.arguments("tiny", "--nproc-per-node", "2"),
                              environment={VARIABLE: fault} | environment)
    return process


def assert_ends(process, run_dir, status):
    """Wait for the end of a run and of all processes that it has started."""
    process.join(timeout=90)
    assert process.exitcode == status  # None if it still runs
    until = time.monotonic() + 20
    with suppress(ProcessLookupError):
        while os.killpg(process.pid, 0) is None:
            assert time.monotonic() < until, "a process is still running"
            time.sleep(0.05)
    summary = summary_of(run_dir)
    assert (summary["status"], summary["reason"]) == ("stopped", "SIGTERM")


def workers_in_slow_step(process, marks):
    """Wait until step 7 has begun; return the workers, the one that is slow first."""
    wait_for(marks)
    until = time.monotonic() + 60
    while not (mark := marks.read_text()).endswith("\n"):
        assert time.monotonic() < until
        time.sleep(0.02)
    slow = int(mark.split()[3])
    return sorted(children_of(process.pid), key=lambda pid: pid != slow)


@pytest.mark.parametrize(("error", "advises", "explains"), [
    (torch.OutOfMemoryError("CUDA out of memory"), True, False),
    (torch.AcceleratorError("CUDA error: out of memory"), True, True),  # or pinned memory
    (torch.AcceleratorError("CUDA error: the launch timed out"), False, True),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), False, True),
    (MemoryError("Unable to allocate 8 GiB for an array"), False, True),
    (UserError("out of order"), False, False),
], ids=lambda value: type(value).__name__)
def test_a_smaller_microbatch_is_advised_where_the_gpus_memory_ran_out(error, advises, explains,
                                                                       alone, capsys):
    with pytest.raises(Ended) as caught:
        alone.fail(error)
    _, event = caught.value.args
    assert event.endswith(SMALLER) is advises and f": {describe(error)}" in event
    assert (str(error) in capsys.readouterr().err) == explains


@pytest.mark.parametrize(("silence", "is_suspended", "hangs"), [
    (9, False, False), (11, False, True), (11, True, False)])
def test_a_process_without_heartbeats_hangs_unless_it_waits_for_others(silence, is_suspended, hangs,
                                                                       alone, seconds, monkeypatch):
    def full_disk(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(watchdog_module, "print_stacks", full_disk)  # the log is on it
    alone.expect_steps(10.0, None)
    alone.start_hang_detection(10.0)
    seconds[0] = silence
    with alone.suspended() if is_suspended else nullcontext():
        with pytest.raises(Ended, match="hung") if hangs else nullcontext():
            alone._check()
    reason = "5 0 rank 0 hung in startup: no heartbeat for 11 s"
    assert alone._peers.get("failure") == (reason if hangs else "")


@pytest.fixture
def run_dir(workplace):
    workplace.add_dataset()
    return workplace.add_run(train=SETTINGS | {"collective_timeout_seconds": 5.0})


@pytest.fixture
def patient_dir(workplace):
    workplace.add_dataset()
    return workplace.add_run(train=NO_HANG)


def test_a_hang_of_all_ranks_before_the_first_step_is_reported_with_status_5(workplace):
    """The limit is an hour; it is never shorter than for a later step."""
    assert Deadlines().first_step == 3600
    workplace.add_dataset()
    run_dir = workplace.add_run(train=NO_HANG | {"hang_timeout_seconds": 2.0})
    result = workplace.ddp_train("tiny", "--nproc-per-node", "2",
                                 **{VARIABLE: "compile:hang"} | with_deadlines(first_step=4))
    assert result.returncode == 5, result.stderr
    assert re.match(r"Error: rank 0 and 1 hung in compile: no heartbeat for \d+ s",
                    last_line_of_ours(result)), result.stderr
    assert summary_of(run_dir)["status"] == "failed"


# Rank 0 is in the slow step, rank 1 waits for it; each has a deadline of its own.
@pytest.mark.parametrize("rank", thorough_but([1], [0, 1]))
def test_a_signal_in_a_slow_step_ends_all_at_the_deadline(workplace, patient_dir, rank):
    marks = workplace.root / "marks"
    process = train(workplace, "train:slow:seconds=300:hit=7:rank=0", SOON | {MARKS: str(marks)})
    os.kill(workers_in_slow_step(process, marks)[rank], signal.SIGTERM)
    assert_ends(process, patient_dir, 128 + signal.SIGTERM)


def test_a_signal_waits_for_a_checkpoint_in_flight_until_the_deadline(workplace, patient_dir):
    process = train(workplace, "save.optimizer:slow:rank=0:hit=1:seconds=300;"
                               "train:signal:number=15:rank=1:hit=7", SOON)
    assert_ends(process, patient_dir, 128 + signal.SIGTERM)
    assert not named_as_checkpoints(patient_dir / "checkpoints")
    succeeded(workplace.torchrun(2, "tiny"))


def slow_save(hit):
    return ";".join(f"save.{place}:slow:hit={hit}:seconds=1.2"
                    for place in ("meta", "weights", "optimizer", "manifest"))


# The first save, and the last one, which is tried again.
@pytest.mark.parametrize("faults", thorough_but(
    [slow_save(1)], [slow_save(1), slow_save(4) + ";save.manifest:full:hit=3"]))
def test_a_save_that_makes_progress_may_take_longer_than_the_hang_timeout(workplace, run_dir,
                                                                          faults):
    succeeded(with_fault(workplace, faults))
    summary = summary_of(run_dir)
    assert summary["status"] == "finished"
    assert summary["checkpoints"]["longest_write_seconds"] > SETTINGS["hang_timeout_seconds"]


class Ended(Exception):
    """What `os._exit` and the like raise in tests."""


@pytest.fixture
def seconds(monkeypatch):
    """The time that the watchdog reads; a test moves it."""
    now = [0.0]
    monkeypatch.setattr(watchdog_module, "time", SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda _: None))
    return now


@pytest.fixture
def alone(seconds, monkeypatch):
    """Rank 0 of two, without its thread; it says how it ends."""
    def end(*arguments):
        raise Ended(*arguments)

    watchdog = Watchdog(Process(0, 0, 2, torch.device("cpu")), dist.HashStore(),
                        phase=lambda: "startup")
    monkeypatch.setattr(watchdog, "_exit", end)
    monkeypatch.setattr(watchdog_module, "end_torchrun", lambda _: end("end torchrun"))
    monkeypatch.setattr(watchdog_module.os, "_exit", end)
    yield watchdog
    watchdog._peers.close()


@pytest.mark.parametrize(("timeout_seconds", "found_after"), [(None, 600), (100.0, 100),
                                                              (2.0, 15)])
def test_a_lost_machine_is_found_in_the_start_up_and_while_the_first_step_compiles(alone, seconds,
                                                                                   timeout_seconds,
                                                                                   found_after):
    if timeout_seconds is not None:
        alone.expect_steps(timeout_seconds, None)
    alone._check()
    for moment in (found_after - 6.0, found_after + 1.0):
        assert alone._peers.get("failure") == ""
        seconds[0] = moment
        alone._check()
    reason = f"rank 1 is lost in startup: its machine has not answered for {found_after} s"
    assert alone._peers.get("failure") == f"1 0 {reason}"


def test_an_error_in_the_watchdog_ends_the_run(alone, monkeypatch):
    monkeypatch.setenv(VARIABLE, "watch:raise")
    with pytest.raises(Ended) as caught:
        alone._watch()
    assert caught.value.args == (1, "failed in its watchdog in startup: RuntimeError: failpoint"
                                    " watch")


def test_a_start_up_whose_store_is_out_of_reach_ends(alone, seconds):
    alone._peers.is_up = False
    seconds[0] = 590.0
    alone._check()
    seconds[0] = 610.0
    with pytest.raises(Ended, match="lost the others in startup: torchrun's store is down"):
        alone._check()


def test_a_signal_in_the_start_up_ends_the_process_and_leaves_torchrun(alone):
    with pytest.raises(Ended, match=f"^{128 + signal.SIGTERM}$"):  # torchrun may start it again
        alone._receive(signal.SIGTERM)
    assert alone._peers.get("stop") == str(int(signal.SIGTERM))  # for the other nodes
    alone.expect_steps(600.0, None)
    with pytest.raises(Ended, match="end torchrun"):
        alone._exit_for_signal()


@pytest.mark.parametrize(("first", "second"), [
    (signal.SIGTERM, signal.SIGTERM), (signal.SIGHUP, signal.SIGTERM),
    (signal.SIGINT, signal.SIGHUP)])
def test_what_follows_a_closed_terminal_is_no_second_signal(alone, seconds, first, second):
    """One who presses Ctrl-C twice does not want to wait; a torchrun that ends says nothing."""
    alone.heartbeat(3)
    alone._receive(first)
    seconds[0] = 2.0
    hung_up = signal.SIGHUP in (first, second)
    with nullcontext() if hung_up else pytest.raises(Ended, match="^143$"):
        alone._receive(second)
    seconds[0] = 4.0
    with nullcontext() if hung_up else pytest.raises(Ended, match="^143$"):
        alone._receive(signal.SIGTERM)  # of a torchrun that ends
    assert alone.stop_signal == first


@pytest.mark.parametrize("has_told", [False, True])
def test_a_signal_after_the_death_of_another_process_is_no_stop(alone, has_told):
    """Unless that one has told of a stop signal before: torchrun ends the others in both cases."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    alone._peers.set("rank/1", json.dumps({"place": process_namespace(), "pid": dead.pid}))
    if has_told:
        alone._peers.set("stop", str(int(signal.SIGTERM)))
    with pytest.raises(Ended, match="143" if has_told else "was stopped"):
        alone._receive(signal.SIGTERM)
    assert ("rank 1 is gone in startup" in alone._peers.get("failure")) is not has_told
    assert bool(alone._peers.get("stop")) is has_told


def test_a_stop_that_the_others_tell_of_is_noted_once(alone, seconds):
    alone.heartbeat(3)
    alone.note_stop(signal.SIGTERM)
    seconds[0] = 12.0
    alone.note_stop(signal.SIGINT)
    assert alone.stop_signal == signal.SIGTERM
    alone._check()
    seconds[0] = 14.0  # the deadline of the first one is over
    alone.expect_steps(600.0, None)
    with pytest.raises(Ended, match="end torchrun"):
        alone._check()
