"""A thread beside each process's work: signals, hangs, the failures of others, a heartbeat."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from basics.errors import DISK, FAILED, HANG, STOP_SIGNALS, UserError, one_line, print_error
from basics.failpoints import failpoint
from basics.files import write_aside
from basics.json_files import to_json
from processes.launch import Process
from processes.peers import Peers, PeerStore
from reporting.clock import PhaseClock

TICK = 0.25  # seconds between two looks at the others and at the clock
HEARTBEAT_SECONDS = 5.0
SAME_SIGNAL_SECONDS = 1.0  # torchrun passes on what its processes may have got already
# Seconds from a signal to leaving, come what may. Rank 0 has a checkpoint to wait for: the others
# stay until it is gone, for with the first that ends torchrun ends all.
STOP_DEADLINE, OTHERS_STOP_DEADLINE = 13.0, 19.0
WAITS = "waits"
FAILURE_GRACE = 7.0  # seconds that others have to save what they are writing

Item = TypeVar("Item")


class Watchdog:
    """Watches over one process of a run. Every rank has one, from its start to its end.

    Attributes:
        stop_signal: the number of a signal that any process has got; 0 as long as none has.
        before_exit: called with a status and a reason where a process leaves in a hurry.
    """

    def __init__(self, process: Process, store: dist.Store, clock: PhaseClock,
                 heartbeat_path: Path) -> None:
        self.process, self.clock, self._store = process, clock, PeerStore(store)
        self._heartbeat_path, self._heartbeat_due = heartbeat_path, 0.0
        self.stop_signal = 0
        self.before_exit: Callable[[str, str], None] = lambda status, reason: None
        self._step: int | None = None  # once it trains
        self._hang_seconds = float("inf")
        self._signs, self._last_sign = 0, time.monotonic()
        self._may_wait, self._has_accused = False, False
        self._stopped_at, self._stop_at, self._leave_at = -float("inf"), float("inf"), float("inf")
        self._leaving = threading.Lock()
        self._left = threading.Event()
        self._peers = Peers(process.rank, process.world_size, self._store)

    def start(self) -> None:
        """Watch from here on. Needs the main thread."""
        self._peers.arrive()
        self._signals, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: None)  # the thread hears of it, wherever this one is
        self._beat()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def heartbeat(self, global_step: int | None = None) -> None:
        """Give a sign of life."""
        self._signs += 1
        self._last_sign = time.monotonic()
        if global_step is not None:
            self._step, self._signs = global_step, 0

    def start_hang_detection(self, every_seconds: float) -> None:
        """Take a longer silence than this for a hang, from here on."""
        self.heartbeat()
        self._hang_seconds = every_seconds

    def watching(self, items: Iterable[Item]) -> Generator[Item]:
        """Pass items on, with a sign of life for each."""
        for item in items:
            self.heartbeat()
            yield item

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, silence is no hang: somebody else is at work, and watched."""
        self._may_wait = True
        yield
        self.heartbeat()
        self._may_wait = False

    def leave(self) -> None:
        """End the watch: this process is done."""
        self._peers.take_leave()
        self._left.set()
        self._wakeup.send(b"\0")
        self._thread.join()
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)  # nobody else would heed it any more
        self._store.close()
        if self.process.is_main:
            self._heartbeat_path.unlink(missing_ok=True)

    def fail(self, error: BaseException) -> NoReturn:
        """End this process for an error of its own; let one line say so, once for all."""
        if _comes_from_others(error):  # somebody else's failure is the cause, and comes to light
            is_timeout = "imed out" in str(error) or "imeout" in str(error)
            if is_timeout:
                self._may_wait = True  # whoever has waited for so long is not who hangs
                self._diagnose_hang(f"no answer within the collective timeout: {_cause(error)}")
            self._wait_for_failure()
            if self.stop_signal and self._store.is_there and not self._has_failed_somewhere():
                self._leave_for_signal()  # as the others have
            self._end(FAILED, f"lost the others {self._position()}: {_cause(error)}")
        status = DISK if isinstance(error, OSError) and error.errno == 28 else FAILED
        if isinstance(error, UserError):
            status = error.status
        elif not isinstance(error, torch.OutOfMemoryError):
            _show(error)
        self._end(status, f"failed {self._position()}: {_cause(error)}")

    def _end(self, status: int, claim: str) -> NoReturn:
        """Leave at once. Whoever claims first has the word."""
        self._leaving.acquire(timeout=FAILURE_GRACE)  # one thread of the two, unless that hangs
        try:
            status, reason = self._claim(status, f"rank {self.process.rank} {claim}")
            self.before_exit("failed", reason)
        finally:
            os._exit(status)

    def _claim(self, status: int, reason: str) -> tuple[int, str]:
        """Say why the run fails, if nobody has yet; give the status and reason that hold."""
        mine = f"{status} {self.process.rank} {reason}"
        held = self._store.claim("failed", mine)
        if held == mine:
            print_error(f"Error: {one_line(reason)}")
        held_status, _, held_reason = held.split(" ", 2)
        return int(held_status), held_reason

    def _watch(self) -> None:
        try:
            while not self._left.is_set():
                failpoint("watch")
                ready, _, _ = select.select([self._signals], [], [], TICK)
                if ready:
                    for number in self._signals.recv(64):
                        self._heard(number)
                self._look_at_the_others()
                self._look_at_the_clock()
                self._beat()
        except BaseException as error:  # without this thread nothing would end a hang
            _show(error)
            self._end(FAILED, f"failed in its watch {self._position()}: {_cause(error)}")

    def _heard(self, number: int) -> None:
        now = time.monotonic()
        if number not in STOP_SIGNALS or now < self._stopped_at + SAME_SIGNAL_SECONDS:
            return
        if self.stop_signal:
            os._exit(128 + number)
        if self._has_failed_somewhere():
            self._end(FAILED, "was stopped")
        self._stop(number)

    def _stop(self, number: int) -> None:
        self._stopped_at, self.stop_signal = time.monotonic(), number
        self._stop_at = self._stopped_at + (
            STOP_DEADLINE if self.process.is_main else OTHERS_STOP_DEADLINE)
        self._store.tell("stop", str(number))
        if self._step is None:  # nothing is trained yet, so there is nothing to save
            self._leave_for_signal()

    def _leave_for_signal(self) -> NoReturn:
        self._leaving.acquire(timeout=FAILURE_GRACE)
        try:
            self.before_exit("stopped", STOP_SIGNALS[self.stop_signal])
        finally:
            os._exit(128 + self.stop_signal)

    def _look_at_the_others(self) -> None:
        if not self.stop_signal and self._store.knows("stop"):
            self._stop(int(self._store.read("stop") or signal.SIGTERM))
        if self._store.knows("accused"):
            self._dump_stacks()
        for rank in self._peers.gone():
            self._claim(FAILED, f"rank {rank} is gone {self._position()}: killed, or crashed")
        if self._leave_at == float("inf") and self._has_failed_somewhere():
            self._leave_at = time.monotonic() + FAILURE_GRACE

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        if now > self._leave_at:
            self._end(FAILED, "was left alone")
        if now > self._stop_at:
            self._leave_for_signal()
        silence = now - self._last_sign
        is_silent = silence > self._hang_seconds
        if is_silent and not self._may_wait:
            self._diagnose_hang(f"no sign of life for {silence:.0f} s")
        if is_silent and not self._store.is_there:  # so nobody can say that the others are at work
            self._end(FAILED, f"lost the others {self._position()}: torchrun's store is gone")
        if self._peers.all_wait(is_silent):
            self._diagnose_hang(f"each has waited for the others for {silence:.0f} s")

    def _diagnose_hang(self, what: str) -> NoReturn:
        """Find out who hangs: every process says how far it is, and shows its stacks."""
        self._store.tell("accused")
        self._dump_stacks()
        time.sleep(4 * TICK)
        signs = {}
        for rank in range(self.process.world_size):
            said = self._store.read(f"signs/{rank}") if self._store.knows(f"signs/{rank}") else ""
            if said and said != WAITS:
                signs[rank] = tuple(map(int, said.split()))
        hung = [rank for rank, place in signs.items() if place == min(signs.values())]
        ranks = " and ".join(map(str, hung or range(self.process.world_size)))
        self._claim(HANG, f"rank {ranks} hung {self._position()}: {what}")
        self._end(HANG, "hung")

    def _dump_stacks(self) -> None:
        if not self._has_accused:
            self._has_accused = True
            with suppress(OSError):  # a log on a full disk shows nothing
                self._show_stacks()
            step = -1 if self._step is None else self._step  # not a step yet
            self._store.tell(f"signs/{self.process.rank}",
                             WAITS if self._may_wait else f"{step} {self._signs}")

    def _show_stacks(self) -> None:
        with tempfile.TemporaryFile() as stacks:  # written at once: others write theirs now
            faulthandler.dump_traceback(file=stacks)
            stacks.seek(0)
            head = f"rank {self.process.rank} {self._position()}, its stacks:\n"
            os.write(sys.stderr.fileno(), head.encode() + stacks.read())

    def _beat(self) -> None:
        now = time.monotonic()
        if now < self._heartbeat_due:
            return
        self._heartbeat_due = now + HEARTBEAT_SECONDS
        self._peers.beat()
        if self._store.is_there and self.process.world_size > 1:
            patience = max(self._hang_seconds, 3 * HEARTBEAT_SECONDS)
            for rank in self._peers.silent(now, patience):
                self._claim(FAILED, f"rank {rank} is lost {self._position()}: its machine has not"
                                    f" answered for {patience:.0f} s")
        if self.process.is_main:
            try:
                write_aside(self._heartbeat_path, to_json({
                    "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                    "phase": self.clock.current, "global_step": self._step,
                    "pid": os.getpid(), "host": socket.gethostname()}) + "\n")
            except OSError:
                pass  # a full disk is told of by what needs it more

    def _position(self) -> str:
        step = "" if self._step is None else f" at step {self._step + 1}"
        return f"in {self.clock.current}{step}"

    def _has_failed_somewhere(self) -> bool:
        return self._store.knows("failed")

    def _wait_for_failure(self) -> None:
        for _ in range(40):  # two seconds, unless there is nobody to ask
            if self._store.is_there and not self._has_failed_somewhere():
                time.sleep(TICK / 5)


def _comes_from_others(error: BaseException) -> bool:
    """Tell if an error is what a collective gives when another process is gone, or silent."""
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, dist.DistError) or any(
        word in str(error) for word in ("onnection", "imed out", "imeout", "gloo", "NCCL"))


def _show(error: BaseException) -> None:
    with suppress(OSError):
        traceback.print_exception(error)


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:160]
