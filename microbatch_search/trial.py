"""One try of a microbatch: three global steps on random tokens, in processes of their own.

Running out of memory leaves a process in a state that nothing can be trusted in: other ranks hang
in a collective, the allocator is fragmented, tracebacks hold tensors. So each rank starts a child
for each try. The children train together as a run does; the parents, who have no collective to
hang in, hear through torchrun's store when one child has failed, and then kill theirs.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import NoReturn

import torch
from torch.amp import GradScaler

from basics.memory_meters import CpuMeter, GpuMeter, map_every_tensor
from processes.launch import Process, join_process_group, share_cpu_cores
from processes.startup_agreement import AgreedError, Agreement, open_store
from run_config import Run
from tokens.batches import Microbatch
from trainer.precision import resolve_for_device
from trainer.step import TrainingStep, Wrap, build_training_state

STEPS_A_TRY = 3  # the second has the optimizer's state from its start, and DDP's final buckets
TRIAL_TIMEOUT = timedelta(minutes=20)  # of a collective: one rank may compile longer than another
POLL_SECONDS = 0.05
OUT_OF_MEMORY = (
    "out of memory",  # torch.OutOfMemoryError, CUDA and NCCL
    "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED",
    "can't allocate memory", "Cannot allocate memory", "bad_alloc",  # PyTorch and C++ on a CPU
    # Under an address-space limit: a library loaded late, oneDNN, OpenMP.
    "failed to map segment", "could not create a primitive", "Resource temporarily unavailable",
)


@dataclass(frozen=True)
class Trial:
    """What came of a try. Memory is that of the process that took most, in GiB."""

    microbatch_size: int
    fits: bool
    allocated_gib: float = math.nan  # peak of the tensors; on a CPU, of what was resident
    reserved_gib: float = math.nan  # peak of what the allocator held; on a CPU, address space
    demand_gib: float = math.nan  # the one of the two that must stay within `capacity_gib`
    capacity_gib: float = math.nan  # what the process with the least could have taken
    tokens_per_second: float = math.nan  # all processes, after the first step


@dataclass(frozen=True)
class Order:
    """What a child is told to try."""

    run: Run
    process: Process
    microbatch_size: int
    num_microbatches: int  # in each step of this process
    name: str
    memory_limit_gib: float | None
    wrap: Wrap  # as in training


class Trials:
    """Makes one try after another. Every rank calls the same, in the same order.

    Args:
        memory_limit_gib: what a process may take; needed on a CPU, where it counts what is mapped
            beyond the libraries, and optional on a GPU.
    """

    def __init__(self, run: Run, process: Process, agreement: Agreement, *,
                 memory_limit_gib: float | None, wrap: Wrap) -> None:
        self._run, self._process, self._agreement = run, process, agreement
        self._memory_limit_gib, self._wrap = memory_limit_gib, wrap
        self._count = 0
        # Without a GPU a server that has the modules loaded forks each child. CUDA does not
        # survive a fork once anything has touched it: there each child starts from nothing.
        on_gpu = process.device.type == "cuda"
        self._context = multiprocessing.get_context("spawn" if on_gpu else "forkserver")
        if not on_gpu:
            self._context.set_forkserver_preload(
                ["__main__", "microbatch_search.trial", "torch._dynamo"])

    def train(self, microbatch_size: int) -> Trial:
        """Train a microbatch on all processes, and agree on what came of it.

        Raises:
            AgreedError: on every rank, if a child failed for another reason than memory.
        """
        self._count += 1
        order = Order(
            run=self._run, process=self._process, microbatch_size=microbatch_size,
            num_microbatches=_microbatches_in_a_step(self._run, self._process.world_size),
            name=f"{self._agreement.name}/trial-{self._count}",
            memory_limit_gib=self._memory_limit_gib,
            wrap=self._wrap,
        )
        outcomes = self._run_children(order)
        found = [json.loads(outcome) for outcome in outcomes]
        if any(trial.get("out_of_memory") for trial in found):
            return Trial(microbatch_size, fits=False)
        errors = {rank: trial["error"] for rank, trial in enumerate(found) if "error" in trial}
        if errors:
            rank = min(errors, key=lambda rank: _is_of_a_peer(errors[rank]))
            raise AgreedError(f"microbatch {microbatch_size} failed on rank {rank}, not for want"
                              f" of memory: {errors[rank]}")
        return _worst([Trial(**trial) for trial in found])

    def _run_children(self, order: Order) -> list[str]:
        """Run one child on each rank; give all outcomes once every child is gone."""
        with tempfile.NamedTemporaryFile() as stderr:
            connection, child_end = self._context.Pipe()
            child = self._context.Process(target=_be_child, daemon=True,
                                          args=(order, child_end, stderr.name))
            child.start()
            child_end.close()
            try:
                outcome = self._outcome(order, connection, child.sentinel)
                if outcome == "":  # it died without a word
                    child.join()
                    outcome = _last_words(stderr.read().decode(errors="replace"), child.exitcode,
                                          on_gpu=order.process.device.type == "cuda")
                if "microbatch_size" not in json.loads(outcome):
                    self._agreement.raise_flag(order.name)
                # None goes before all have spoken: the others may still wait for its gradients.
                outcomes = self._agreement.gather(f"{order.name}/outcome", outcome)
            finally:
                child.kill()
                child.join()
        self._agreement.gather(f"{order.name}/gone", "")
        return outcomes

    def _outcome(self, order: Order, connection: Connection, sentinel: int) -> str:
        while not self._agreement.is_flagged(order.name):
            if wait([connection, sentinel], timeout=POLL_SECONDS):
                try:
                    return connection.recv()
                except EOFError:
                    return ""
        return json.dumps({"stopped": True})


def _microbatches_in_a_step(run: Run, world_size: int) -> int:
    """Give 2 where the run accumulates, else 1: more of them take no more memory than two.

    With a global batch 2 for every microbatch, also for one that makes it up at once: so what is
    smaller than one that fits, fits too.
    """
    wanted = run.train.gradient_accumulation_steps
    if run.train.global_batch_size is not None:
        wanted = run.train.global_batch_size // world_size
    return 2 if wanted > 1 else 1


def _worst(trials: list[Trial]) -> Trial:
    return Trial(
        microbatch_size=trials[0].microbatch_size,
        fits=True,
        allocated_gib=max(trial.allocated_gib for trial in trials),
        reserved_gib=max(trial.reserved_gib for trial in trials),
        demand_gib=max(trial.demand_gib for trial in trials),
        capacity_gib=min(trial.capacity_gib for trial in trials),
        tokens_per_second=min(trial.tokens_per_second for trial in trials),
    )


def _is_of_a_peer(error: str) -> bool:
    """Tell if an error may only be the echo of another process's end."""
    return any(sign in error.lower() for sign in ("peer", "connection", "remote"))


def is_out_of_memory(text: str) -> bool:
    """Tell if an error's text means that memory ran out."""
    return any(sign.lower() in text.lower() for sign in OUT_OF_MEMORY)


def _last_words(stderr: str, exitcode: int, *, on_gpu: bool) -> str:
    # Libraries that do not look whether they were given memory crash, or the kernel kills.
    crashed = not on_gpu and exitcode in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGKILL)
    if is_out_of_memory(stderr) or crashed:
        return json.dumps({"out_of_memory": True})
    last = next((line for line in reversed(stderr.splitlines()) if line.strip()), "no message")
    return json.dumps({"error": f"{last.strip()[:160]} (exit status {exitcode})"})


def _be_child(order: Order, connection: Connection, stderr_path: str) -> None:
    """Try it, say what came of it, and wait for the end."""
    os.dup2(os.open(stderr_path, os.O_WRONLY | os.O_APPEND), 2)  # the parent reads its last words
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    if order.process.device.type == "cpu":
        map_every_tensor()  # before there is a thread that could have a heap of its own
    watcher = threading.Thread(target=_end_with_parent, args=(connection,), daemon=True)
    watcher.start()
    try:
        outcome = asdict(_train_some_steps(order))
    except (RuntimeError, MemoryError) as error:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        outcome = {"out_of_memory": True}
        if not isinstance(error, MemoryError) and not is_out_of_memory(str(error)):
            outcome = {"error": str(error).splitlines()[0][:160]}
    connection.send(json.dumps(outcome))
    watcher.join()


def _end_with_parent(connection: Connection) -> NoReturn:
    try:
        connection.recv()  # nothing ever comes
    except (EOFError, OSError):
        pass
    os._exit(1)


def _train_some_steps(order: Order) -> Trial:
    process, run = order.process, order.run
    train = resolve_for_device(run.train, process.device).model_copy(
        update={"microbatch_size": order.microbatch_size})
    on_gpu = process.device.type == "cuda"
    if not on_gpu:
        share_cpu_cores(process)  # and so starts its threads before there is a limit
    # The store is there already, wherever torchrun has put it: not for a child to open anew.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    join_process_group(process, open_store(order.name), timeout=TRIAL_TIMEOUT)
    meter = (GpuMeter if on_gpu else CpuMeter)(process.device, order.memory_limit_gib)
    state = build_training_state(run.model, train, process.device)
    # A scale at which no step overflows and is skipped: else the optimizer would have no state yet.
    scaler = GradScaler(process.device.type, init_scale=1.0, enabled=state.scaler.is_enabled())
    step = TrainingStep(replace(state, scaler=scaler), train, process, wrap=order.wrap)
    microbatches = _random_microbatches(order)
    for _ in range(STEPS_A_TRY):
        began = time.perf_counter()
        loss, _ = step.take(microbatches, num_microbatches=order.num_microbatches,
                            learning_rate=train.learning_rate)
        loss.item()  # all of the step is done on the device
        seconds = time.perf_counter() - began
    tokens = (order.num_microbatches * order.microbatch_size * run.model.context_length
              * process.world_size)
    return Trial(order.microbatch_size, fits=True, tokens_per_second=tokens / seconds,
                 **asdict(meter.peak()))


def _random_microbatches(order: Order) -> Iterator[Microbatch]:
    model, device = order.run.model, order.process.device
    shape = (order.microbatch_size, model.context_length)
    while True:
        token_ids, targets = (torch.randint(model.vocab_size, shape, device=device)
                              for _ in range(2))
        yield Microbatch(0, token_ids, targets)
