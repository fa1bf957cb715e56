"""Trials: which errors mean out of memory, and which do not."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from basics.memory_meters import GpuMeter
from basics.out_of_memory import is_out_of_memory, says_out_of_memory
from ddp_train import wrap_in_ddp
from microbatch_search import trial
from microbatch_search.trial import Trial, Trials
from processes.launch import Process, this_process
from processes.startup_agreement import AgreedError
from run_config import load_run
from tests.support.one_process import AgreementOfOne
from tests.support.workplace import Workplace
from trainer.precision import resolve_for_device
from trainer.step import TrainingStep, build_training_state

CPU = torch.device("cpu")
FITS = Trial(3, True, 1.0, 2.0, 2.0, 4.0, 100.0)


def raises(error: BaseException):
    def train(task: object) -> Trial:
        raise error

    return train


def dies(message: str, status: int):
    def train(task: object) -> Trial:
        os.write(2, message.encode())
        os._exit(status)

    return train


def aborts(task: object) -> Trial:
    faulthandler.disable()  # pytest's would print a traceback
    os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n")
    os.abort()


def crashes(task: object) -> Trial:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def trials(workplace: Workplace) -> Trials:
    """Trials of one rank; its children are forked, so that they see what a test replaces."""
    workplace.add_run()
    process = Process(rank=0, local_rank=0, world_size=1, device=CPU)
    trials = Trials(load_run(workplace.runs_dir, "tiny"), process, AgreementOfOne(),
                    memory_limit_gib=1.0, wrap=wrap_in_ddp)
    trials._context = multiprocessing.get_context("fork")
    return trials


def test_a_child_s_measurement_is_returned(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_train", lambda task: FITS)
    assert trials.train(3) == FITS
    assert not trials._agreement.flags and not multiprocessing.active_children()


@pytest.mark.parametrize("train", [
    raises(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")),
    raises(RuntimeError("CUDA error: out of memory")),
    raises(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")),
    raises(RuntimeError("NCCL error: Cuda failure 2 'out of memory'")),
    raises(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8")),
    raises(MemoryError()),
    raises(RuntimeError("could not create a primitive")),
    dies("libgomp: Thread creation failed: Resource temporarily unavailable", 1),
    aborts, crashes,
], ids=["cuda", "driver", "cublas", "nccl", "cpu", "python", "onednn", "openmp", "abort", "crash"])
def test_running_out_of_memory_does_not_fit(
    trials: Trials, monkeypatch: pytest.MonkeyPatch, train
) -> None:
    monkeypatch.setattr(trial, "_train", train)
    found = trials.train(3)
    assert not found.fits and found.microbatch_size == 3
    assert trials._agreement.flags == {"test/trial-1"}  # the other ranks stop waiting
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(("train", "message"), [
    (raises(RuntimeError("mat1 and mat2 shapes cannot be multiplied")), "shapes cannot be mult"),
    (raises(RuntimeError("out of resource: shared memory, required 9")), "out of resource"),
    (raises(KeyError("x")), "KeyError: 'x'$"),  # sent: the child does not exit
    (dies("the last line on stderr\n", 3), r"the last line on stderr \(exit status 3\)"),
    (dies("", 0), r"no message \(exit status 0\)"),
], ids=["runtime", "resource", "key", "exit", "silent"])
def test_another_error_is_reported_and_not_taken_for_it(
    trials: Trials, monkeypatch: pytest.MonkeyPatch, train, message: str
) -> None:
    monkeypatch.setattr(trial, "_train", train)
    wanted = f"microbatch 3 failed on rank 0, not out of memory: .*{message}"
    with pytest.raises(AgreedError, match=wanted):
        trials.train(3)
    assert not multiprocessing.active_children()


def test_a_child_that_waits_for_a_failed_peer_is_killed(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_train", lambda task: time.sleep(1000))
    trials._agreement.raise_flag("test/trial-1")
    trials._agreement.gather = lambda step, text: [text, '{"out_of_memory": true}']
    assert trials.train(3) == Trial(3, fits=False)
    assert not multiprocessing.active_children()


def outcomes(*found: object) -> list[str]:
    return [json.dumps(asdict(one) if isinstance(one, Trial) else one) for one in found]


def test_the_process_with_the_least_memory_decides(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Trial(3, True, 0.5, 2.5, 2.5, 3.0, 90.0)
    monkeypatch.setattr(trials, "_run_children", lambda task: outcomes(FITS, other))
    assert trials.train(3) == Trial(3, True, 1.0, 2.5, 2.5, 3.0, 90.0)
    monkeypatch.setattr(trials, "_run_children",
                        lambda task: outcomes(FITS, {"out_of_memory": True}))
    assert not trials.train(3).fits


def test_the_first_cause_is_reported_and_not_a_process_that_lost_its_peer(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    echo = {"error": "[gloo/transport/tcp/pair.cc:534] Connection closed by peer"}
    monkeypatch.setattr(trials, "_run_children", lambda task: outcomes(
        echo, {"error": "a bug (exit status 3)"}, echo))
    with pytest.raises(AgreedError, match="failed on rank 1, not out of memory: a bug"):
        trials.train(3)


def test_the_speed_is_that_of_the_slowest_process() -> None:
    slow = replace(FITS, tokens_per_second=50.0)
    assert trial._worst([replace(slow, tokens_per_second=60.0), slow]) == slow


def test_texts_of_the_address_space_limit_mean_nothing_on_a_gpu() -> None:
    threads = "libgomp: Thread creation failed: Resource temporarily unavailable"
    driver = "torch.AcceleratorError: CUDA error: out of memory"
    for text, on_gpu, wanted in ((threads, False, True), (threads, True, False),
                                 (driver, True, True)):
        outcome = json.loads(trial._outcome_of_crash(text, 1, on_gpu=on_gpu))
        assert ("out_of_memory" in outcome) == wanted, text


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[TrainingStep]:
    """Let a trial train in this process or in one forked from it; return its steps."""
    steps = []

    class RecordedStep(TrainingStep):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)
            steps.append(self)

    monkeypatch.setattr(trial, "TrainingStep", RecordedStep)
    monkeypatch.setattr(trial, "join_process_group", lambda *_, **__: None)
    monkeypatch.setattr(trial, "open_store", lambda name: None)
    monkeypatch.setattr("basics.memory_meters.resource.setrlimit", lambda *_: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")  # one thread: others do not survive a fork
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return steps


def train_here(workplace: Workplace, microbatch_size: int = 1) -> Trial:
    """Train a trial of the run `tiny` in this process."""
    process = Process(rank=0, local_rank=0, world_size=1, device=CPU)
    run = load_run(workplace.runs_dir, "tiny")
    return trial._train(trial.TrialTask(run, process, microbatch_size, 1, "trial", 1.0,
                                        wrap_in_ddp))


@pytest.mark.parametrize(("precision", "num_timed"), [("fp32", 1), ("fp16", 1), ("fp32", 5)])
def test_a_trial_includes_the_optimizers_state(
    workplace: Workplace, precision: str, num_timed: int, monkeypatch: pytest.MonkeyPatch,
    in_this_process: list[TrainingStep],
) -> None:
    # At fp16's usual initial scale, the steps would overflow and be skipped.
    workplace.add_run(model={"init": "torch", "tie_weights": True}, train={"precision": precision})
    monkeypatch.setitem(trial.TIMED_STEPS, "cpu", num_timed)
    train_here(workplace)
    optimizer = in_this_process[0].state.optimizer
    taken = {float(state["step"]) for state in optimizer.state.values()}
    assert taken == {2.0 + num_timed}
    assert len(optimizer.state) == len(list(in_this_process[0].state.model.parameters()))


def test_a_trial_does_not_compile_the_validation(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, in_this_process: list[TrainingStep],
) -> None:
    """It takes less memory than training, and half of the time to compile."""
    workplace.add_run(train={"compile": True})
    monkeypatch.setattr(TrainingStep, "_compile_validation", lambda self: pytest.fail("compiled"))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    assert train_here(workplace, 3).fits and in_this_process[0].is_compiled


def fail_to_compile(message: str):
    def compiled(function: object, **_: object):
        def fail(*_: object) -> None:
            raise RuntimeError(message)
        return fail

    return compiled


def test_only_running_out_of_memory_while_compiling_does_not_fit(
    trials: Trials, workplace: Workplace, monkeypatch: pytest.MonkeyPatch,
    in_this_process: list[TrainingStep],
) -> None:
    workplace.add_run("compiled", train={"compile": True})
    trials._run = load_run(workplace.runs_dir, "compiled")
    monkeypatch.setattr(torch, "compile", fail_to_compile("Triton Error [CUDA]: out of memory"))
    assert not trials.train(3).fits
    monkeypatch.setattr(torch, "compile", fail_to_compile("no compiler found"))
    with pytest.raises(AgreedError, match="not out of memory: compiling failed: no compiler found"):
        trials.train(3)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("found", [FITS, {"out_of_memory": True}])
def test_the_parent_never_initialises_cuda(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, found: object
) -> None:
    """A parent's context would take some of the memory that its children measure."""
    def initialise() -> None:
        raise AssertionError("CUDA was initialised")

    monkeypatch.setattr(torch.cuda, "_lazy_init", initialise)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, number in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, number)
    workplace.add_run()
    trials = Trials(load_run(workplace.runs_dir, "tiny"), this_process(), AgreementOfOne(),
                    memory_limit_gib=None, wrap=wrap_in_ddp)
    assert trials._context.get_start_method() == "spawn"  # CUDA does not survive a fork
    trials._context = multiprocessing.get_context("fork")
    monkeypatch.setattr(trial, "_train", (lambda task: FITS) if found == FITS else raises(
        torch.AcceleratorError("CUDA error: out of memory")))
    assert trials.train(3) == (FITS if found == FITS else Trial(3, fits=False))
    with pytest.raises(AssertionError, match="CUDA was initialised"):
        torch.cuda.current_device()  # what the test would notice


def train_in_a_run(workplace: Workplace, microbatch_size: int) -> None:
    """Build the step of the run `tiny` as `ddp_train.py` does, with another microbatch."""
    run = load_run(workplace.runs_dir, "tiny")
    train = resolve_for_device(run.train, CPU).model_copy(
        update={"microbatch_size": microbatch_size, "validation_interval": None})
    process = Process(rank=0, local_rank=0, world_size=1, device=CPU)
    TrainingStep(build_training_state(run.model, train, process), train, process)


def test_a_run_compiles_what_a_trial_of_its_microbatch_has_compiled(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, in_this_process: list[TrainingStep],
) -> None:
    """So that it finds the code in the cache; with the cache, in the next test."""
    seen: list[set] = []

    def remember(function, **options):
        def call(model, *tensors):
            facts = [(one.shape, one.stride(), one.dtype, one.requires_grad) for one in tensors]
            seen[-1].add(repr((function, sorted(options.items()), model.options, model.training,
                               facts, torch.is_grad_enabled(), torch.get_num_threads(),
                               torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu"),
                               torch.get_float32_matmul_precision())))
            return function(model, *tensors)
        return call

    monkeypatch.setattr(torch, "compile", remember)
    for name, precision in (("fp32", "fp32"), ("bf16", "bf16")):
        workplace = Workplace(workplace.root / name)
        workplace.add_run(train={"compile": True, "precision": precision})
        for train in (train_here, train_in_a_run):
            seen.append(set())
            train(workplace, 3)
    assert seen[0] == seen[1] and seen[2] == seen[3]
    assert len(seen[0]) == 1 and seen[0] != seen[2]


@pytest.mark.thorough  # it compiles; the test above does not
def test_a_run_finds_the_code_that_a_trial_has_compiled(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, in_this_process: list[TrainingStep],
) -> None:
    from torch._inductor.utils import clear_caches

    def forget() -> None:
        torch.compiler.reset()
        clear_caches()
        counters.clear()

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(workplace.root / "kept"))
    workplace.add_run(model={"n_layers": 1, "drop_rate": 0.0}, train={"compile": True})
    forget()
    train_here(workplace, 3)
    compiled = counters["inductor"]["fxgraph_cache_miss"]
    assert compiled and in_this_process[0].is_compiled
    for train in (train_in_a_run, train_here):  # a run, and a second search
        forget()
        train(workplace, 3)
        assert counters["inductor"]["fxgraph_cache_hit"] == compiled
        assert not counters["inductor"]["fxgraph_cache_miss"]
    forget()


@pytest.fixture
def torchruns_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The store that a child of a single rank connects to."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(store.port)),
                        ("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    yield
    del store


@pytest.mark.parametrize("device", [
    pytest.param("cpu", marks=pytest.mark.thorough),  # others fork, which takes a tenth
    pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_a_fresh_process_trains_or_runs_out_of_memory(
    workplace: Workplace, torchruns_store: None, device: str
) -> None:
    workplace.add_run(train={"head_chunks": 1})
    trials = Trials(load_run(workplace.runs_dir, "tiny"), Process(0, 0, 1, torch.device(device)),
                    AgreementOfOne(), memory_limit_gib=0.5, wrap=wrap_in_ddp)
    trials._context = multiprocessing.get_context("spawn")
    found = trials.train(2)
    assert found.fits and found.tokens_per_second > 0
    assert 0 < found.demand_gib < found.capacity_gib <= 0.5
    assert found.reserved_gib >= found.allocated_gib > 0
    assert trials.train(2**18) == Trial(2**18, fits=False)  # 4 M tokens, 257 logits each
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(("train", "world_size", "microbatches"), [
    ({"gradient_accumulation_steps": 1}, 2, 1),
    ({"gradient_accumulation_steps": 64}, 2, 2),
    ({"gradient_accumulation_steps": None, "global_batch_size": 8}, 2, 2),
    ({"gradient_accumulation_steps": None, "global_batch_size": 8}, 8, 1),
])
def test_a_trial_accumulates_if_the_run_does(
    workplace: Workplace, train: dict, world_size: int, microbatches: int
) -> None:
    workplace.add_run("other", train=train)
    run = load_run(workplace.runs_dir, "other")
    assert trial._num_microbatches(run, world_size) == microbatches


def test_upper_case_messages_are_recognised() -> None:
    assert says_out_of_memory("RuntimeError: CUDNN_STATUS_ALLOC_FAILED")
    assert not says_out_of_memory("a path named /memory/out")


@pytest.mark.gpu
def test_the_limit_of_a_gpu_holds_and_its_error_is_recognised() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.empty_cache()
    limit_gib = torch.cuda.memory_reserved(device) / 2**30 + 0.5
    meter = GpuMeter(device, limit_gib)
    try:
        kept = torch.empty(2**28, dtype=torch.uint8, device=device)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(2**30, dtype=torch.uint8, device=device)
        peak = meter.peak()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert says_out_of_memory(str(caught.value)) and is_out_of_memory(caught.value)
    assert len(kept) == 2**28 and 0.25 <= peak.allocated_gib <= peak.reserved_gib
    assert peak.demand_gib == peak.allocated_gib and peak.capacity_gib <= limit_gib
    torch.empty(2**30, dtype=torch.uint8, device=device)  # the error was the limit's


@pytest.mark.gpu
def test_the_drivers_text_is_recognised() -> None:
    torch.cuda.init()
    with pytest.raises(RuntimeError) as of_code:
        torch.cuda.check_error(2)  # cudaErrorMemoryAllocation
    with pytest.raises(torch.AcceleratorError) as of_call:
        torch.empty(2**50, dtype=torch.uint8, pin_memory=True)  # a petabyte
    for caught in (of_code, of_call):
        assert says_out_of_memory(str(caught.value)) and is_out_of_memory(caught.value), caught
    assert torch.ones(2, device="cuda").sum().item() == 2  # the context still works
