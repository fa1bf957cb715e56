"""A trial of a microbatch: a few global steps on random tokens, in processes of their own.

A process that ran out of memory cannot go on: other ranks hang in a collective, the allocator is
fragmented, tracebacks hold tensors. So each rank starts a child process for each trial. The
children train together as a run does. The parents use no collectives, so they cannot hang: they
learn from torchrun's store that a child has failed, and kill their own. They never initialise
CUDA, so they take no memory of the GPU.

Each size is compiled anew. A later trial of the same size, and a run that trains with it, find the
compiled code in the cache (`trainer.compilation.keep_compiled_code`), if their ranks have the same
GPUs: PyTorch keeps code by the index of the device.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import NoReturn

import torch
from torch.amp import GradScaler

from basics.errors import describe
from basics.memory_meters import CpuMeter, GpuMeter, lift_limit, map_every_tensor
from basics.out_of_memory import is_out_of_memory, says_out_of_memory
from microbatch_search.step_timer import StepTimer
from processes.launch import Process, join_process_group, share_cpu_cores
from processes.startup_agreement import AgreedError, Agreement, open_store
from run_config import Run, TrainConfig
from tokens.batches import Microbatch
from trainer.attention import check_attention
from trainer.precision import resolve_for_device
from trainer.step import TrainingStep, Wrap, build_training_state

WARM_UP_STEPS = 2  # the second has optimizer state from the start, and DDP's final buckets
TIMED_STEPS = {"cuda": 5, "cpu": 1}  # by device; on a CPU, large microbatches take seconds
TRIAL_TIMEOUT = timedelta(minutes=20)  # of a collective: ranks may compile for different times
POLL_SECONDS = 0.05
# Under an address-space limit, so only on a CPU: a library that is loaded late, oneDNN, OpenMP.
LIMIT_REACHED = ("failed to map segment", "could not create a primitive",
                 "Resource temporarily unavailable")


@dataclass(frozen=True)
class Trial:
    """The result of a trial. Memory is that of the process that used most, in GiB."""

    microbatch_size: int
    fits: bool
    allocated_gib: float = math.nan  # peak of the tensors; on a CPU, of resident memory
    reserved_gib: float = math.nan  # peak of the allocator; on a CPU, of the address space
    demand_gib: float = math.nan  # the one of the two that must stay within `capacity_gib`
    capacity_gib: float = math.nan  # of the process with the least
    tokens_per_second: float = math.nan  # all processes, by the median of the timed steps


@dataclass(frozen=True)
class TrialTask:
    """The arguments of a child process."""

    run: Run
    process: Process
    microbatch_size: int
    num_microbatches: int  # of this process, in each step
    name: str
    memory_limit_gib: float | None
    wrap: Wrap  # as in training


class Trials:
    """Runs one trial after another. Every rank makes the same calls in the same order.

    Args:
        memory_limit_gib: limit of a process; optional on a GPU. On a CPU it is needed, and counts
            the address space beyond the libraries.
    """

    def __init__(self, run: Run, process: Process, agreement: Agreement, *,
                 memory_limit_gib: float | None, wrap: Wrap) -> None:
        self._run, self._process, self._agreement = run, process, agreement
        self._memory_limit_gib, self._wrap = memory_limit_gib, wrap
        self._count = 0
        # Without a GPU, a server with the modules loaded forks the children. CUDA does not survive
        # a fork once it is initialised: with a GPU, each child is a fresh process.
        on_gpu = process.device.type == "cuda"
        self._context = multiprocessing.get_context("spawn" if on_gpu else "forkserver")
        if not on_gpu:
            self._context.set_forkserver_preload(
                ["__main__", "microbatch_search.trial", "torch._dynamo"])

    def train(self, microbatch_size: int) -> Trial:
        """Train a microbatch on all processes; return the same trial on all.

        Raises:
            AgreedError: on every rank, if a child failed for another reason than memory.
        """
        self._count += 1
        task = TrialTask(
            run=self._run, process=self._process, microbatch_size=microbatch_size,
            num_microbatches=_num_microbatches(self._run, self._process.world_size),
            name=f"{self._agreement.name}/trial-{self._count}",
            memory_limit_gib=self._memory_limit_gib,
            wrap=self._wrap,
        )
        outcomes = [json.loads(outcome) for outcome in self._run_children(task)]
        if any(outcome.get("out_of_memory") for outcome in outcomes):
            return Trial(microbatch_size, fits=False)
        errors = {rank: outcome["error"] for rank, outcome in enumerate(outcomes)
                  if "error" in outcome}
        if errors:
            rank = min(errors, key=lambda rank: _may_follow_from_a_peer(errors[rank]))
            raise AgreedError(f"microbatch {microbatch_size} failed on rank {rank}, not out of"
                              f" memory: {errors[rank]}")
        return _worst([Trial(**outcome) for outcome in outcomes])

    def _run_children(self, task: TrialTask) -> list[str]:
        """Run one child on each rank; return all outcomes once every child has exited."""
        with tempfile.NamedTemporaryFile() as stderr:
            connection, child_end = self._context.Pipe()
            child = self._context.Process(target=_run_child, daemon=True,
                                          args=(task, child_end, stderr.name))
            child.start()
            child_end.close()
            try:
                outcome = self._wait_for_outcome(task, connection, child.sentinel)
                if outcome == "":  # it exited without sending one
                    child.join()
                    outcome = _outcome_of_crash(
                        stderr.read().decode(errors="replace"), child.exitcode,
                        on_gpu=task.process.device.type == "cuda")
                if "microbatch_size" not in json.loads(outcome):
                    self._agreement.raise_flag(task.name)
                # No child exits before all are done: others may still wait for its gradients.
                outcomes = self._agreement.gather(f"{task.name}/outcome", outcome)
            finally:
                child.kill()
                child.join()
        self._agreement.gather(f"{task.name}/gone", "")
        return outcomes

    def _wait_for_outcome(self, task: TrialTask, connection: Connection, sentinel: int) -> str:
        """Return the child's outcome, "" if it exited without one; stop if a peer failed."""
        while not self._agreement.is_flagged(task.name):
            if wait([connection, sentinel], timeout=POLL_SECONDS):
                try:
                    return connection.recv()
                except EOFError:
                    return ""
        return json.dumps({"stopped": True})


def _num_microbatches(run: Run, world_size: int) -> int:
    """Return 2 if the run accumulates gradients, else 1: more take no more memory than two.

    With a global batch, it is 2 even for a microbatch that is the whole batch: so what is smaller
    than a microbatch that fits, fits too.
    """
    wanted = run.train.gradient_accumulation_steps
    if run.train.global_batch_size is not None:
        wanted = run.train.global_batch_size // world_size
    return 2 if wanted > 1 else 1


def _worst(trials: list[Trial]) -> Trial:
    """Combine the processes' trials: the most memory, the least capacity and speed."""
    return Trial(
        microbatch_size=trials[0].microbatch_size,
        fits=True,
        allocated_gib=max(trial.allocated_gib for trial in trials),
        reserved_gib=max(trial.reserved_gib for trial in trials),
        demand_gib=max(trial.demand_gib for trial in trials),
        capacity_gib=min(trial.capacity_gib for trial in trials),
        tokens_per_second=min(trial.tokens_per_second for trial in trials),
    )


def _may_follow_from_a_peer(error: str) -> bool:
    """Return whether the failure of another process may have caused this error."""
    return any(text in error.lower() for text in ("peer", "connection", "remote"))


def _says_limit_reached(text: str, *, on_gpu: bool) -> bool:
    """Return whether the text of an error means that memory ran out, or the limit was reached."""
    return says_out_of_memory(text) or (
        not on_gpu and any(known in text for known in LIMIT_REACHED))


def _outcome_of_crash(stderr: str, exitcode: int, *, on_gpu: bool) -> str:
    # Libraries that do not check for a failed allocation crash, or the kernel kills the process.
    crashed = not on_gpu and exitcode in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGKILL)
    if _says_limit_reached(stderr, on_gpu=on_gpu) or crashed:
        return json.dumps({"out_of_memory": True})
    last = next((line for line in reversed(stderr.splitlines()) if line.strip()), "no message")
    return json.dumps({"error": f"{last.strip()[:160]} (exit status {exitcode})"})


def _run_child(task: TrialTask, connection: Connection, stderr_path: str) -> None:
    """Run the trial, send its outcome, and wait to be killed."""
    os.dup2(os.open(stderr_path, os.O_WRONLY | os.O_APPEND), 2)  # the parent reads it
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    on_gpu = task.process.device.type == "cuda"
    if not on_gpu:
        map_every_tensor()  # before any other thread has allocated a heap
    watcher = threading.Thread(target=_exit_with_parent, args=(connection,), daemon=True)
    watcher.start()
    try:
        outcome = asdict(_train(task))
    except Exception as error:  # whatever it is: to exit now could wait for the other ranks
        lift_limit()
        outcome = {"out_of_memory": True}
        if not is_out_of_memory(error) and not _says_limit_reached(str(error), on_gpu=on_gpu):
            outcome = {"error": describe(error)}
    connection.send(json.dumps(outcome))
    watcher.join()


def _exit_with_parent(connection: Connection) -> NoReturn:
    try:
        connection.recv()  # the parent sends nothing: this returns when it has exited
    except (EOFError, OSError):
        pass
    os._exit(1)


def _train(task: TrialTask) -> Trial:
    process, run = task.process, task.run
    on_gpu = process.device.type == "cuda"
    if not on_gpu:
        share_cpu_cores(process)  # starts the threads, which must be before there is a limit
    # Connect to torchrun's store: a child must not create one.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    join_process_group(process, open_store(task.name), timeout=TRIAL_TIMEOUT)
    # Not to compile the validation saves time. It takes less memory than training, and its smaller
    # last microbatch, which is not compiled, is halved where it does not fit.
    train = resolve_for_device(run.train, process.device).model_copy(
        update={"microbatch_size": task.microbatch_size, "validation_interval": None})
    check_attention(run.model, train, process.device)
    meter = (GpuMeter if on_gpu else CpuMeter)(process.device, task.memory_limit_gib)
    step = _build_step(task, train)
    seconds = _seconds_per_step(step, _random_microbatches(task), task.num_microbatches)
    tokens = (task.num_microbatches * task.microbatch_size * run.model.context_length
              * process.world_size)
    return Trial(task.microbatch_size, fits=True, tokens_per_second=tokens / seconds,
                 **asdict(meter.peak()))


def _build_step(task: TrialTask, train: TrainConfig) -> TrainingStep:
    state = build_training_state(task.run.model, train, task.process)
    # At the usual scale, the first steps overflow and are skipped: no optimizer state yet.
    scaler = GradScaler(task.process.device.type, init_scale=1.0,
                        enabled=state.scaler.is_enabled())
    return TrainingStep(replace(state, scaler=scaler), train, task.process, wrap=task.wrap)


def _seconds_per_step(step: TrainingStep, microbatches: Iterator[Microbatch],
                      num_microbatches: int) -> float:
    timer = StepTimer(step.process.device)
    for number in range(WARM_UP_STEPS + TIMED_STEPS[step.process.device.type]):
        if number == WARM_UP_STEPS:
            timer.mark()
        step.take(microbatches, num_microbatches=num_microbatches,
                  learning_rate=step.train.learning_rate)
        if number >= WARM_UP_STEPS:
            timer.mark()
    return timer.median_seconds()


def _random_microbatches(task: TrialTask) -> Iterator[Microbatch]:
    model, device = task.run.model, task.process.device
    shape = (task.microbatch_size, model.context_length)
    while True:
        token_ids, targets = (torch.randint(model.vocab_size, shape, device=device)
                              for _ in range(2))
        yield Microbatch(0, token_ids, targets)
