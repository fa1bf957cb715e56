"""Trials: which errors mean out of memory, and which do not."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import time
from dataclasses import asdict

import pytest
import torch

from basics.out_of_memory import says_out_of_memory
from ddp_train import wrap_in_ddp
from microbatch_search import trial
from microbatch_search.trial import Trial, Trials
from processes.launch import Process
from processes.startup_agreement import AgreedError
from run_config import load_run
from tests.support.one_process import AgreementOfOne
from tests.support.workplace import Workplace
from trainer.step import TrainingStep

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
    process = Process(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
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
    (raises(KeyError("x")), "KeyError"),
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


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_trial_includes_the_optimizers_state(
    workplace: Workplace, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # At fp16's usual initial scale, the three steps would overflow and be skipped.
    workplace.add_run(model={"init": "torch", "tie_weights": True}, train={"precision": precision})
    steps = []

    class RecordedStep(TrainingStep):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)
            steps.append(self)

    monkeypatch.setattr(trial, "TrainingStep", RecordedStep)
    monkeypatch.setattr(trial, "join_process_group", lambda *_, **__: None)
    monkeypatch.setattr(trial, "open_store", lambda name: None)
    monkeypatch.setattr("basics.memory_meters.resource.setrlimit", lambda *_: None)
    process = Process(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
    run = load_run(workplace.runs_dir, "tiny")
    trial._train(trial.TrialTask(run, process, 1, 1, "trial", 1.0, wrap_in_ddp))
    optimizer = steps[0].state.optimizer
    taken = {float(state["step"]) for state in optimizer.state.values()}
    assert taken == {3.0} and len(optimizer.state) == len(list(steps[0].state.model.parameters()))


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
