"""A thread beside training: stop signals, hangs, failures of other ranks, the heartbeat file."""

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import NoReturn, Self

import torch
import torch.distributed as dist

from basics.errors import (
    FAILED,
    HANG,
    STOP_SIGNALS,
    UserError,
    describe,
    exit_status,
    is_out_of_gpu_memory,
    one_line,
    print_error,
    print_stacks,
    print_traceback,
)
from basics.failpoints import failpoint
from processes.distributed import Process, end_torchrun, spans_nodes
from processes.run_lock import write_heartbeat
from processes.signals import (
    NEVER,
    Deadlines,
    Peers,
    Period,
    is_caused_by_others,
    is_timeout,
    stop_signals,
)
from processes.startup_agreement import AgreedError

SMALLER = (
    "; set a smaller microbatch_size (global_batch_size keeps the batch), or head_chunks 8"
    " (--find-max-microbatch measures what fits)"
)


class Watchdog(AbstractContextManager):
    """Watches one process of a run, from `start` to `stop`. Every rank has one.

    Args:
        phase: returns the name of what the process does now.
        seconds: returns those of all launches until now, for the heartbeat file.

    Attributes:
        stop_signal: the number of the stop signal that any process has received; 0 if none has.
        stop_by: the latest end of this process after a stop signal, by `time.monotonic`.
        before_exit: called with a status and a reason before the process is ended early.
    """

    def __init__(
        self,
        process: Process,
        store: dist.Store,
        *,
        phase: Callable[[], str],
        seconds: Callable[[], float] = float,
    ) -> None:
        self.process, self.deadlines = process, Deadlines.read()
        self.stop_signal = 0
        self.before_exit: Callable[[str, str], None] = lambda status, reason: None
        self._peers = Peers(
            store,
            rank=process.rank,
            local_rank=process.local_rank,
            world_size=process.world_size,
            timeout_seconds=self.deadlines.store,
        )
        self._phase, self._seconds = phase, seconds
        self._heartbeat_path: Path | None = None
        # How far the launch and this process are. Each is set alone: several threads do that.
        self._period, self._hang_timeout_seconds = Period.STARTUP, NEVER
        self._step: int | None = None  # once it trains
        self._num_heartbeats, self._last_heartbeat = 0, time.monotonic()  # in this step
        self._waits_for_others = False
        # What happens, or is done, only once.
        self._terminal_is_gone = self._has_dumped_stacks = self._has_printed_failure = False
        # Moments, by `time.monotonic`.
        self._stopped_at = -NEVER  # the stop signal came
        self.stop_by = NEVER  # this process ends because of the stop signal
        self._fail_by = NEVER  # this process ends because another one has failed
        self._exchange_at = 0.0  # it exchanges heartbeats next
        self._exiting, self._done = threading.Lock(), threading.Event()

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        """Stop watching; after an error that the other ranks do not share, end this process."""
        if error is None or isinstance(error, AgreedError):
            self.stop()
        else:
            self.fail(error)

    def start(self) -> Self:
        """Start watching the others, and handle stop signals. Call it in the main thread.

        Python's handlers run in the main thread, and wait there for the end of what it does in C++.
        So the numbers of signals come through a socket.
        """
        self._peers.publish("pid", os.getpid())
        # A socket, since the thread can wait for it with a timeout; an event cannot be set from C.
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in stop_signals():
            # Without a handler of Python's the signal would end the process, or be ignored.
            signal.signal(number, lambda *_: None)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def write_heartbeats(self, path: Path) -> None:
        """Write the heartbeat file from now on, if this is rank 0, until `stop` removes it."""
        self._heartbeat_path, self._exchange_at = path, 0.0

    def expect_steps(self, hang_timeout_seconds: float) -> None:
        """Detect hangs from now on; the first step, which compiles, may take an hour or longer."""
        self.heartbeat()
        self._hang_timeout_seconds = hang_timeout_seconds  # first: the limits of the period need it
        self._period = Period.FIRST_STEP
        self._exchange_at = 0.0

    def start_hang_detection(self) -> None:
        """Allow the hang timeout between heartbeats from now on: the first step is done."""
        self.heartbeat()
        self._period = Period.TRAINING

    def heartbeat(self, global_step: int | None = None) -> None:
        """Record that this process makes progress, in a new step if one is named."""
        self._num_heartbeats += 1
        self._last_heartbeat = time.monotonic()
        if global_step is not None:
            self._step, self._num_heartbeats = global_step, 0

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspend hang detection inside: this process waits for others, which are watched."""
        self._waits_for_others = True
        yield
        self.heartbeat()  # first: the watchdog's thread must not take the wait for a hang
        self._waits_for_others = False

    def stop(self) -> None:
        """Stop watching: this process is done. Call it in the main thread."""
        # Published first: another process that looks for dead ones must not find this one.
        self._peers.publish("done")
        while (
            self.stop_signal
            and spans_nodes()
            and self._peers.is_up
            and (not self._peers.get("done/0"))
        ):
            time.sleep(self.deadlines.tick)  # until rank 0 has saved, or the deadline
        self._done.set()
        self._writer.send(b"\0")  # the thread need not wait for its next tick
        self._thread.join()
        signal.set_wakeup_fd(-1)
        for number in stop_signals():
            signal.signal(number, signal.SIG_DFL)
        self._writer.close()
        with self._reader:
            for number in STOP_SIGNALS.keys() & self._reader.recv(64):  # since the thread's end
                self.note_stop(number)
        self._peers.close()
        self.before_exit = lambda status, reason: None  # else it would keep the model in memory
        if self.process.is_main and self._heartbeat_path:
            self._heartbeat_path.unlink(missing_ok=True)

    def fail(self, error: BaseException) -> NoReturn:
        """Exit because of an error; one rank prints one line for the whole run."""
        if self.process.world_size == 1 or not is_caused_by_others(error):
            # Decided by the type: other errors can have the same text, since CUDA also allocates
            # memory of the machine.
            if not isinstance(error, UserError | torch.OutOfMemoryError):
                print_traceback(error)
            advice = SMALLER if is_out_of_gpu_memory(error) else ""
            self._exit(exit_status(error), f"failed {self._position()}: {describe(error)}{advice}")
        if is_timeout(error):
            self._waits_for_others = True  # the rank that hangs is another one
            self._diagnose_hang(f"no answer within the collective timeout: {describe(error)}")
        for _ in range(40):  # for 8 ticks: the rank with the cause records it
            if self._peers.is_up and not self._peers.get("failure"):
                time.sleep(self.deadlines.tick / 5)
        # Where none has ended for it, the signal is of a torchrun that starts the processes again.
        if self.stop_signal and self._peers.having("done") and not self._peers.get("failure"):
            self._exit_for_signal()
        self._exit(FAILED, f"lost the others {self._position()}: {describe(error)}")

    def _exit(self, status: int, event: str) -> NoReturn:
        """End the process now, with the status and reason that the first failed rank recorded."""
        status, reason = self._record_failure(status, f"rank {self.process.rank} {event}")
        self._end(status, "failed", reason)

    def _exit_for_signal(self) -> NoReturn:
        self._peers.publish("done")
        self._end(128 + self.stop_signal, "stopped", STOP_SIGNALS[self.stop_signal])

    def _end(self, status: int, outcome: str, reason: str) -> NoReturn:
        self._exiting.acquire(timeout=self.deadlines.failure_grace)  # both threads may come here
        try:
            self.before_exit(outcome, reason)
        finally:
            # In the start-up the signal may come from a torchrun that starts the processes again,
            # because one on another node has died, which nobody here has seen.
            if outcome == "stopped" and (self._period != Period.STARTUP or not spans_nodes()):
                end_torchrun(self.process)
            os._exit(status)

    def _record_failure(self, status: int, reason: str) -> tuple[int, str]:
        """Record and print why the run fails; the first recorded failure wins and is returned."""
        own = f"{status} {self.process.rank} {reason}"
        first = self._peers.set_if_missing("failure", own)  # its own again if the store is down
        if first == own and not self._has_printed_failure:
            self._has_printed_failure = True
            print_error(f"Error: {one_line(reason)}")
        first_status, _, first_reason = first.split(" ", 2)
        return int(first_status), first_reason

    def _watch(self) -> None:
        try:
            while not self._done.is_set():
                failpoint("watch")
                ready, _, _ = select.select([self._reader], [], [], self.deadlines.tick)
                for number in self._reader.recv(64) if ready else b"":
                    self._receive(number)
                self._check()
        except BaseException as error:  # without this thread nothing would end a hang
            print_traceback(error)
            self._exit(FAILED, f"failed in its watchdog {self._position()}: {describe(error)}")

    def _receive(self, number: int) -> None:
        """Handle a signal: the first stops the run after this step, a second one at once."""
        is_second = bool(self.stop_signal)  # read first: the main thread may set both meanwhile
        self._terminal_is_gone |= number == signal.SIGHUP
        is_repeated = time.monotonic() < self._stopped_at + self.deadlines.repeated_signal
        # Where the terminal is gone, no second signal is meant by a person.
        if number not in STOP_SIGNALS or is_second and (is_repeated or self._terminal_is_gone):
            return
        if is_second:  # the person does not want to wait for a checkpoint
            os._exit(128 + number)
        if self._step is None:
            self._check_others()  # where one has died, torchrun ends the rest with this signal
        if self._peers.get("failure"):
            self._exit(FAILED, "was stopped")
        self._request_stop(number)

    def note_stop(self, number: int) -> None:
        """Note a stop signal that any process has received, if this one does not know of it."""
        if not self.stop_signal:
            self._stopped_at, self.stop_signal = time.monotonic(), number
            self.stop_by = self._stopped_at + (
                self.deadlines.stop if self.process.is_main else self.deadlines.others_stop
            )

    def _request_stop(self, number: int) -> None:
        self.note_stop(number)
        self._peers.set("stop", str(number))
        if self._step is None:  # nothing is trained yet, so there is nothing to save
            self._exit_for_signal()

    def _check_others(self) -> None:
        """Look for a stop signal that another process has received, and for those that are gone."""
        dead = self._peers.find_dead()  # first: one that tells of a signal may end at once
        if not self.stop_signal and (number := self._peers.get("stop")):
            self._request_stop(int(number))
        for rank in dead:
            self._record_failure(
                FAILED, f"rank {rank} is gone {self._position()}: killed, or crashed"
            )

    def _check(self) -> None:
        """Find a reason to end this process, or the run. The watchdog's thread calls it each tick.

        Reasons that come from others are first: they may be the cause of a silence here.
        """
        self._check_others()
        if self._peers.get("hang"):  # of a rank that waits for the progress of all
            self._dump_stacks()
        now = time.monotonic()  # after the requests, which may take long

        # A rank that fails records it and ends; the others get some time to end by themselves.
        if self._fail_by == NEVER and self._peers.get("failure"):
            self._fail_by = now + self.deadlines.failure_grace
        if now > self._fail_by:
            self._exit(FAILED, "exits because another rank has failed")
        if now > self.stop_by:
            self._exit_for_signal()

        limits = self.deadlines.limits(self._period, self._hang_timeout_seconds)
        silence = now - self._last_heartbeat
        if silence > limits.store and not self._peers.is_up:  # do the others still work?
            self._exit(FAILED, f"lost the others {self._position()}: torchrun's store is down")
        is_silent = silence > limits.hang
        if is_silent and not self._waits_for_others:
            self._diagnose_hang(f"no heartbeat for {silence:.0f} s")

        if now < self._exchange_at:
            return
        self._exchange_at = now + self.deadlines.heartbeat
        self._exchange_heartbeats(now, is_silent, limits.machine)
        # Only ranks that wait for others come here in silence. If all do, it is a deadlock.
        if is_silent and len(self._peers.having("silent")) == self.process.world_size:
            self._diagnose_hang(f"every rank has waited for the others for {silence:.0f} s")

    def _exchange_heartbeats(self, now: float, is_silent: bool, timeout_seconds: float) -> None:
        """Publish that this process is alive, find lost ones, and write the heartbeat file."""
        self._peers.publish("heartbeat", now)
        self._peers.publish("silent", "yes" if is_silent else "")
        for rank in self._peers.find_lost(now, timeout_seconds):
            self._record_failure(
                FAILED,
                f"rank {rank} is lost {self._position()}: its machine has"
                f" not answered for {timeout_seconds:.0f} s",
            )
        if self.process.is_main and self._heartbeat_path:
            with suppress(OSError):  # a full disk is reported by what needs it more
                write_heartbeat(
                    self._heartbeat_path,
                    phase=self._phase(),
                    step=self._step,
                    seconds=self._seconds(),
                    parent=self.process.torchrun_pid,
                )

    def _diagnose_hang(self, symptom: str) -> NoReturn:
        """Find the hung ranks: every rank publishes its progress and dumps its stacks."""
        self._peers.set("hang", "1")
        self._dump_stacks()
        # Until the others have seen it and published how far they are.
        time.sleep(4 * self.deadlines.tick)
        ranks = " and ".join(map(str, self._peers.find_hung()))
        self._record_failure(HANG, f"rank {ranks} hung {self._position()}: {symptom}")
        self._exit(HANG, "hung")

    def _dump_stacks(self) -> None:
        """Print this process's stacks and publish its progress, once."""
        if self._has_dumped_stacks:
            return
        self._has_dumped_stacks = True
        with suppress(OSError):  # stderr may be a log on a full disk
            print_stacks(f"rank {self.process.rank} {self._position()}, its stacks:\n")
        step = -1 if self._step is None else self._step  # before the first step
        progress = f"{step} {self._num_heartbeats}"
        self._peers.publish("progress", "" if self._waits_for_others else progress)

    def _position(self) -> str:
        step = "" if self._step is None else f" at step {self._step + 1}"
        return f"in {self._phase()}{step}"
