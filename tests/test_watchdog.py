"""How the processes of a run watch each other: agreement at the start, signals, hangs, failures."""

import errno
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from basics.checkpoint_files import named_as_checkpoints
from basics.errors import UserError, describe
from basics.failpoints import MARKS, VARIABLE
from processes import signals, startup_agreement
from processes import watchdog as watchdog_module
from processes.distributed import Process
from processes.signals import Deadlines, Peers, is_caused_by_others, is_timeout, stop_signals
from processes.startup_agreement import AgreedError, Agreement
from processes.watchdog import SMALLER, Watchdog
from tests.support.runs import (
    last_line_of_ours,
    struck_by,
    summary_of,
    thorough_but,
    wait_until,
    with_deadlines,
    with_fault,
)
from tests.support.workplace import PROJECT_DIR, children_of, hold_port, start_forked, succeeded

CPU = torch.device("cpu")
NO_HANG = {"hang_timeout_seconds": 600.0, "collective_timeout_seconds": 600.0}
SOON = with_deadlines(stop=2, others_stop=4, last_write=1)


# --- The start: all go through it together, or all stop with the same error.


def on_each_rank(work, num_ranks=3):
    """Call a function on every rank, each in a thread; return the results or the errors."""

    def call(rank):
        try:
            return work(Agreement(rank, num_ranks), rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(call, range(num_ranks)))


@pytest.fixture
def store(monkeypatch):
    """One store for all ranks, as torchrun has it."""
    store = dist.HashStore()
    monkeypatch.setattr(startup_agreement, "open_torchrun_store", lambda: store)
    return store


def fail_with(error):
    raise error


@pytest.mark.parametrize(
    "text",
    [
        "client socket has timed out",
        (
            "The server socket has failed to listen on any local network address. port: 29577,"
            " useIpv6: false, code: -98, name: EADDRINUSE"
        ),
    ],
)
def test_without_torchruns_store_a_process_says_why(text):
    line = f"^rank 0 lost the others before it began: DistNetworkError: {text[:100]}"
    with pytest.raises(UserError, match=line):
        Agreement(0, 1, lambda: fail_with(dist.DistNetworkError(text)))


def test_every_rank_has_its_own_result_and_all_have_rank_0s(store):
    def work(agreement, rank):
        agreement.require_same("equal", "a")
        return (
            agreement.do("own", lambda: rank),
            agreement.from_rank_0("of rank 0", lambda: f"{rank}"),
            agreement.gather("all", f"rank {rank}"),
        )

    everything = ["rank 0", "rank 1", "rank 2"]
    assert on_each_rank(work) == [(rank, "0", everything) for rank in range(3)]


@pytest.mark.parametrize(
    ("error", "kinds", "told", "status"),
    [
        (
            lambda rank: UserError(f"rank {rank}: \udcff", 4),
            [AgreedError] * 3,
            r"rank 1: \udcff",
            4,
        ),
        (
            lambda rank: MemoryError("out"),
            [AgreedError, MemoryError, MemoryError],
            "rank 1 failed: MemoryError: out",
            1,
        ),
    ],
)
def test_the_error_of_the_lowest_rank_is_raised_on_all(store, error, kinds, told, status):
    """Where a rank crashes, the others end too."""
    found = on_each_rank(
        lambda agreement, rank: agreement.do(
            "step", lambda: fail_with(error(rank)) if rank else None
        )
    )
    assert [type(each) for each in found] == kinds
    assert (str(found[0]), found[0].status) == (told, status)


def test_a_value_that_differs_is_an_error_on_all_ranks(store):
    found = on_each_rank(lambda agreement, rank: agreement.require_same("value", rank == 2))
    assert all("rank 2 reads another run than rank 0" in str(error) for error in found)


@pytest.mark.parametrize(
    ("rank", "key", "value"),
    [
        (0, "", ""),  # rank 1 never begins
        (0, "nonce/1", "known"),  # it ended before all had begun
        (1, "", ""),
        (1, "echo", "name of-another-launch"),
    ],
)
def test_a_process_does_not_wait_for_long_for_one_that_never_begins(
    store, monkeypatch, rank, key, value
):
    assert startup_agreement.BEGIN_SECONDS == 1800  # the half hour of RELIABILITY.md
    monkeypatch.setattr(startup_agreement, "BEGIN_SECONDS", 0.3)
    if key:
        store.set(key, value)
    with pytest.raises(UserError, match=f"rank {rank} lost the others before it began: ") as caught:
        Agreement(rank, 2)
    assert caught.value.status == 1


# --- The others: what is known of them through torchrun's store.


class SlowStore:
    """Answers after a while."""

    def __init__(self, seconds):
        self.seconds, self.test_ends = seconds, threading.Event()

    def check(self, keys):
        return not self.test_ends.wait(self.seconds)

    def get(self, key):
        return b"value"


@pytest.fixture
def peers(monkeypatch):
    """Six processes that know of each other; the first four are of one node."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    store = dist.HashStore()
    peers = [
        Peers(store, rank=rank, local_rank=rank % 4, world_size=6, timeout_seconds=20)
        for rank in range(6)
    ]
    yield peers
    for each in peers:
        each.close()


@pytest.mark.parametrize(("answers_after", "is_up"), [(0.2, True), (3600.0, False)])
def test_a_store_that_does_not_answer_counts_as_down(monkeypatch, answers_after, is_up):
    """Not if the answer is there, and Python had no time to read it."""
    monkeypatch.setattr(signals, "MOMENT_SECONDS", 20.0 if is_up else 0.05)
    store = SlowStore(answers_after)
    peers = Peers(store, rank=0, local_rank=0, world_size=2, timeout_seconds=0.05)
    assert (peers.get("key") == "value") is peers.is_up is is_up
    if not is_up:
        assert peers.find_dead() == [] and peers.set_if_missing("key", "own") == "own"
    store.test_ends.set()
    peers.close()


def test_only_processes_of_this_node_are_found_dead(peers):
    """Process ids of another machine, or of another container, may be those of others here."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    for rank in (2, 3, 4):
        peers[rank].publish("pid", dead.pid)
    peers[1].publish("pid", os.getpid())  # alive
    peers[3].publish("done")
    assert peers[0].find_dead() == [2] and peers[5].find_dead() == [4]


def test_a_rank_without_heartbeats_is_lost(peers):
    for each in peers:
        each.publish("heartbeat", 0)
    assert peers[0].find_lost(0.0, 10.0) == []
    peers[2].publish("done")
    assert peers[0].find_lost(1.0, 10.0) == []
    for moment, found in ((9.0, []), (12.0, [1]), (23.0, [1])):
        for rank in (0, 3, 4, 5):
            peers[rank].publish("heartbeat", moment)
        assert peers[0].find_lost(moment, 10.0) == found


def test_the_rank_with_the_least_progress_hung(peers):
    assert peers[0].find_hung() == [0, 1, 2, 3, 4, 5]  # nothing is known
    peers[0].publish("progress", "")  # waits for others
    peers[1].publish("progress", "7 2")
    peers[2].publish("progress", "7 10")
    assert peers[0].find_hung() == [1]
    peers[3].publish("progress", "6 9")
    assert peers[0].find_hung() == [3]


LAUNCH = torch.AcceleratorError("CUDA error: the launch timed out and was terminated")
CLOSED = RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer [10.0.0.2]:3")
# Of PyTorch's second implementation of NCCL's backend.
NCCL2_TIMEOUTS = [
    "Operation timed out after 720000 ms",
    "NCCL operation timed out",
    "timeout - timeout watchdog detected operation timeout",
]
NCCL2_ERRORS = [
    "error - timeout watchdog detected operation error",
    "error - nccl hit async error: remote process exited or there was a network error",
    "NCCL communicator was aborted after a previous error",
]


@pytest.mark.parametrize(
    ("error", "is_caused"),
    [
        (LAUNCH, False),
        (CLOSED, True),
        (dist.DistBackendError("NCCL error: unhandled cuda error"), True),
        (RuntimeError("Timed out waiting 30000ms for recv operation to complete"), True),
        *((RuntimeError(text), True) for text in NCCL2_TIMEOUTS + NCCL2_ERRORS),
        (RuntimeError("NCCL error: out of memory"), False),
        (OSError("Connection reset"), False),
    ],
)
def test_what_other_processes_have_caused(error, is_caused):
    """A GPU's own error is reported as it is."""
    assert is_caused_by_others(error) is is_caused
    if str(error) in NCCL2_TIMEOUTS + NCCL2_ERRORS:
        assert is_timeout(error) is (str(error) in NCCL2_TIMEOUTS)


# --- One process: rank 0 of two, without its thread, at a time that a test sets.


class Ended(Exception):
    """What `os._exit` and the like raise in tests."""


@pytest.fixture
def seconds(monkeypatch):
    """The time that the watchdog reads; a test moves it."""
    now = [0.0]
    monkeypatch.setattr(
        watchdog_module, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: None)
    )
    return now


@pytest.fixture
def alone(seconds, monkeypatch):
    """The watchdog, which says how it ends its process."""

    def end(*arguments):
        raise Ended(*arguments)

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    watchdog = Watchdog(Process(0, 0, 2, CPU), dist.HashStore(), phase=lambda: "startup")
    monkeypatch.setattr(watchdog, "_exit", end)
    monkeypatch.setattr(watchdog_module, "end_torchrun", lambda _: end("end torchrun"))
    monkeypatch.setattr(watchdog_module.os, "_exit", end)
    yield watchdog
    watchdog._peers.close()


@pytest.mark.parametrize(
    ("error", "advises", "explains"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True, False),
        (torch.AcceleratorError("CUDA error: out of memory"), True, True),  # or pinned memory
        (torch.AcceleratorError("CUDA error: the launch timed out"), False, True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), False, True),
        (MemoryError("Unable to allocate 8 GiB for an array"), False, True),
        (UserError("out of order"), False, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_smaller_microbatch_is_advised_where_the_gpus_memory_ran_out(
    error, advises, explains, alone, capsys
):
    with pytest.raises(Ended) as caught:
        alone.fail(error)
    _, event = caught.value.args
    assert event.endswith(SMALLER) is advises and f": {describe(error)}" in event
    assert (str(error) in capsys.readouterr().err) == explains


def test_an_error_of_the_only_process_is_its_own(monkeypatch, alone):
    monkeypatch.setattr(alone, "process", Process(0, 0, 1, CPU))
    with pytest.raises(Ended, match="failed in startup: RuntimeError: .*Connection closed"):
        alone.fail(CLOSED)


@pytest.mark.parametrize(
    ("silence", "is_suspended", "hangs"), [(9, False, False), (11, False, True), (11, True, False)]
)
def test_a_process_without_heartbeats_hangs_unless_it_waits_for_others(
    silence, is_suspended, hangs, alone, seconds, monkeypatch
):
    def full_disk(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(watchdog_module, "print_stacks", full_disk)  # the log is on it
    alone.expect_steps(10.0)
    alone.start_hang_detection()
    seconds[0] = silence
    with alone.suspended() if is_suspended else nullcontext():
        with pytest.raises(Ended, match="hung") if hangs else nullcontext():
            alone._check()
    reason = "5 0 rank 0 hung in startup: no heartbeat for 11 s"
    assert alone._peers.get("failure") == (reason if hangs else "")


@pytest.mark.parametrize(("timeout_seconds", "found_after"), [(None, 600), (100.0, 100), (2.0, 15)])
def test_a_lost_machine_is_found_in_the_start_up_and_while_the_first_step_compiles(
    alone, seconds, timeout_seconds, found_after
):
    if timeout_seconds is not None:
        alone.expect_steps(timeout_seconds)
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
    assert caught.value.args == (
        1,
        "failed in its watchdog in startup: RuntimeError: failpoint watch",
    )


def test_a_start_up_whose_store_is_out_of_reach_ends(alone, seconds):
    alone._peers.is_up = False
    seconds[0] = 590.0
    alone._check()
    seconds[0] = 610.0
    with pytest.raises(Ended, match="lost the others in startup: torchrun's store is down"):
        alone._check()


def test_a_signal_in_the_start_up_on_several_nodes_leaves_torchrun(alone, monkeypatch):
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    with pytest.raises(Ended, match=f"^{128 + signal.SIGTERM}$"):  # torchrun may start it again
        alone._receive(signal.SIGTERM)
    assert alone._peers.get("stop") == str(int(signal.SIGTERM))  # for the other nodes
    alone._exiting.release()  # which only one thread takes
    alone.expect_steps(600.0)
    with pytest.raises(Ended, match="end torchrun"):
        alone._exit_for_signal()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGHUP, signal.SIGTERM),
        (signal.SIGINT, signal.SIGHUP),
    ],
)
def test_what_follows_a_closed_terminal_is_no_second_signal(alone, seconds, first, second):
    """One who presses Ctrl-C twice does not want to wait; a torchrun that ends says nothing."""
    alone.heartbeat(3)
    alone._receive(first)
    hung_up = signal.SIGHUP in (first, second)
    for seconds[0], number in ((2.0, second), (4.0, signal.SIGTERM)):  # of a torchrun that ends
        with nullcontext() if hung_up else pytest.raises(Ended, match="^143$"):
            alone._receive(number)
    assert alone.stop_signal == first


@pytest.mark.parametrize("has_told", [False, True])
def test_a_signal_after_the_death_of_another_process_is_no_stop(alone, has_told):
    """Unless that one has told of a stop signal before: torchrun ends the others in both cases."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    alone._peers.set("pid/1", str(dead.pid))
    if has_told:
        alone._peers.set("stop", str(int(signal.SIGTERM)))
    with pytest.raises(Ended, match="end torchrun" if has_told else "was stopped"):
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
    alone.expect_steps(600.0)
    with pytest.raises(Ended, match="end torchrun"):
        alone._check()


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_signal_of_a_torchrun_that_starts_its_processes_again_is_no_stop(alone, has_ended):
    """It comes after the death of a process of another node, which nobody here has seen."""
    alone.expect_steps(600.0)
    alone.heartbeat(3)
    alone._receive(signal.SIGTERM)
    if has_ended:  # another process, for the signal
        alone._peers.set("done/1", "yes")
    with pytest.raises(Ended, match="end torchrun" if has_ended else "lost the others in startup"):
        alone.fail(CLOSED)


@pytest.fixture
def handlers():
    """Leave the handlers of stop signals as they were."""
    before = {number: signal.getsignal(number) for number in (*stop_signals(), signal.SIGHUP)}
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_in_the_last_moment_is_noted(handlers, monkeypatch):
    """Else --when-done would run after it."""
    watchdog = Watchdog(Process(0, 0, 1, CPU), dist.HashStore(), phase=lambda: "training").start()
    join = watchdog._thread.join
    monkeypatch.setattr(
        watchdog._thread, "join", lambda: (join(), signal.raise_signal(signal.SIGTERM))
    )
    watchdog.stop()
    assert watchdog.stop_signal == signal.SIGTERM


@pytest.mark.parametrize("under_nohup", [True, False])
def test_sighup_stops_a_run_but_stays_ignored_under_nohup(handlers, under_nohup):
    signal.signal(signal.SIGHUP, signal.SIG_IGN if under_nohup else signal.SIG_DFL)
    watchdog = Watchdog(Process(0, 0, 1, CPU), dist.HashStore(), phase=lambda: "training")
    watchdog.heartbeat(3)
    watchdog.start()
    signal.raise_signal(signal.SIGHUP)
    wait_until(lambda: watchdog.stop_signal or under_nohup)
    assert (signal.SIGHUP in stop_signals()) is not under_nohup  # torchrun passes them on
    watchdog.stop()
    assert watchdog.stop_signal == (0 if under_nohup else signal.SIGHUP)
    assert (signal.getsignal(signal.SIGHUP) == signal.SIG_IGN) is under_nohup
    assert signal.set_wakeup_fd(-1) == -1  # nothing writes to a closed socket


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", f"from processes.signals import *; {code}"],
        cwd=PROJECT_DIR,
        timeout=60,
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )


@pytest.mark.parametrize(("is_up", "status"), [(True, 0), (False, 128 + signal.SIGTERM)])
def test_a_worker_that_starts_after_its_torchrun_died_ends(is_up, status):
    store, port = hold_port()  # torchrun's
    with store:
        if is_up:
            store.listen()
        result = run(
            "end_with_torchrun()",
            TORCHELASTIC_USE_AGENT_STORE="True",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
    assert (result.returncode, result.stdout, result.stderr) == (status, "", "")


def test_a_process_that_asks_after_its_parents_death_ends():
    for parent, status in ((2**22, -signal.SIGTERM), (os.getpid(), 0)):
        assert run(f"end_with_parent({parent})").returncode == status


# --- Whole runs on two processes, where a run's own ways to end do not help.


@pytest.fixture
def patient_dir(workplace):
    workplace.add_dataset()
    return workplace.add_run(train=NO_HANG)


def train(workplace, fault, environment):
    """Start a run on two processes by the script itself, which returns the exit status."""
    process, _ = start_forked(
        "ddp_train.py",
        workplace.arguments("tiny", "--nproc-per-node", "2"),
        environment={VARIABLE: fault} | environment,
    )
    return process


def assert_ends(process, run_dir, status):
    """Wait for the end of a run and of all processes that it has started."""
    process.join(timeout=200)
    assert process.exitcode == status  # None if it still runs
    with suppress(ProcessLookupError):
        wait_until(lambda: os.killpg(process.pid, 0))  # none of its group is left
    summary = summary_of(run_dir)
    assert (summary["status"], summary["reason"]) == ("stopped", "SIGTERM")


# Rank 0 is in the slow step, rank 1 waits for it; each has a deadline of its own.
@pytest.mark.parametrize("rank", thorough_but([1], [0, 1]))
def test_a_signal_in_a_slow_step_ends_all_at_the_deadline(workplace, patient_dir, rank):
    marks = workplace.root / "marks"
    process = train(workplace, "train:slow:seconds=300:hit=7:rank=0", SOON | {MARKS: str(marks)})
    slow = struck_by(marks)
    workers = sorted(children_of(process.pid), key=lambda pid: pid != slow)
    os.kill(workers[rank], signal.SIGTERM)
    assert_ends(process, patient_dir, 128 + signal.SIGTERM)


def test_a_signal_waits_for_a_checkpoint_in_flight_until_the_deadline(workplace, patient_dir):
    process = train(
        workplace,
        "save.optimizer:slow:rank=0:hit=1:seconds=300;train:signal:number=15:rank=1:hit=7",
        SOON,
    )
    assert_ends(process, patient_dir, 128 + signal.SIGTERM)
    assert not named_as_checkpoints(patient_dir / "checkpoints")
    succeeded(workplace.torchrun(2, "tiny"))


def test_a_hang_of_all_ranks_before_the_first_step_is_reported_with_status_5(workplace):
    """The limit is an hour; it is never shorter than for a later step."""
    assert Deadlines().first_step == 3600
    workplace.add_dataset()
    run_dir = workplace.add_run(train=NO_HANG | {"hang_timeout_seconds": 2.0})
    result = workplace.ddp_train(
        "tiny", "--nproc-per-node", "2", **{VARIABLE: "compile:hang"} | with_deadlines(first_step=4)
    )
    assert result.returncode == 5, result.stderr
    assert re.match(
        r"Error: rank 0 and 1 hung in compile: no heartbeat for \d+ s", last_line_of_ours(result)
    ), result.stderr
    assert summary_of(run_dir)["status"] == "failed"


def slow_save(hit):
    return ";".join(
        f"save.{place}:slow:hit={hit}:seconds=1.6"
        for place in ("meta", "weights", "optimizer", "manifest")
    )


# The first save, and the last one, which is tried again.
@pytest.mark.parametrize(
    "faults",
    thorough_but([slow_save(1)], [slow_save(1), slow_save(4) + ";save.manifest:full:hit=3"]),
)
def test_a_save_that_makes_progress_may_take_longer_than_the_hang_timeout(workplace, faults):
    workplace.add_dataset()
    settings = {"hang_timeout_seconds": 6.0, "collective_timeout_seconds": 6.0}
    run_dir = workplace.add_run(train=settings)
    succeeded(with_fault(workplace, faults))
    summary = summary_of(run_dir)
    assert summary["status"] == "finished"
    assert summary["checkpoints"]["longest_write_seconds"] > settings["hang_timeout_seconds"]
