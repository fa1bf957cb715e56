"""The search for the largest microbatch: on simulated memory, and on this machine's."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

from basics.errors import STOP_SIGNALS, UserError
from ddp_train import TrainingStep, measure_microbatch
from lab.plan.length import measured_speed
from processes.command_line import Options
from processes.launch import Process
from processes.startup_agreement import Agreement
from run_config import load_run
from tests.support.json_schemas import checked
from tests.support.workplace import PROJECT_DIR, Workplace, succeeded, torchrun_command
from trainer import microbatch_search, microbatch_trial
from trainer.losses import Losses, build_training_state
from trainer.microbatch_search import (
    MAX_TRIALS,
    Found,
    find_max_microbatch,
    fits,
    save_result,
    search,
    smallest_failure,
    table_row,
    try_microbatch,
)
from trainer.microbatch_trial import RESULT, TRIAL_VARIABLE, MicrobatchTrial, Trial
from trainer.precision import resolve_for_device

CPU = Process(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
# A sequence takes 20 MiB, or 30 with gradient accumulation.
LARGE_VOCABULARY = {"vocab_size": 20000, "context_length": 128, "emb_dim": 16, "n_layers": 1,
                    "drop_rate": 0.0}
ONE_CHUNK = {"head_chunks": 1}  # with more, a sequence would take almost nothing


class Memory:
    """Memory as a line over the microbatch, with a floor for the optimizer's step."""

    def __init__(self, fixed: float, slope: float, capacity: float, *, floor: float = 0.0) -> None:
        self.fixed, self.slope, self.capacity, self.floor = fixed, slope, capacity, floor
        self.tried: list[int] = []

    def train(self, microbatch_size: int) -> Trial:
        self.tried.append(microbatch_size)
        demand = max(self.floor, self.fixed + self.slope * microbatch_size)
        if demand > self.capacity:
            return Trial(microbatch_size, fits=False)
        return Trial(microbatch_size, True, demand, demand, demand, self.capacity,
                     tokens_per_second=1000.0 - abs(microbatch_size - 4))


@settings(max_examples=300)
@example(fixed=2.0, slope=1.0, sequences=248.99999999999997, floor=1.0)
@given(fixed=st.floats(0.5, 20), slope=st.floats(0.05, 4), sequences=st.floats(1.1, 250),
       floor=st.floats(0, 1))
def test_the_true_maximum_is_found_in_eight_trials(
    fixed: float, slope: float, sequences: float, floor: float
) -> None:
    capacity = fixed + slope * sequences
    memory = Memory(fixed, slope, capacity, floor=fixed + 2 * slope * floor)
    if memory.floor > capacity:
        return
    trials = find_max_microbatch(memory.train)
    assert memory.tried[0] == 1 and len(memory.tried) <= MAX_TRIALS
    assert len(set(memory.tried)) == len(memory.tried)
    largest = max(trial.microbatch_size for trial in fits(trials))
    assert smallest_failure(trials) == largest + 1, memory.tried


@settings(max_examples=300)
@given(fits_up_to=st.integers(1, 10_000), demand=st.sampled_from(["flat", "noisy", "falling"]))
def test_memory_that_is_no_line_still_ends_with_a_microbatch_that_fits(
    fits_up_to: int, demand: str
) -> None:
    def train(size: int) -> Trial:
        gib = {"flat": 1.0, "noisy": 1.0 + hash(size) % 7, "falling": 10.0 / size}[demand]
        return (Trial(size, True, gib, gib, gib, 80.0, 1.0) if size <= fits_up_to
                else Trial(size, fits=False))

    trials = find_max_microbatch(train)
    assert len(trials) <= MAX_TRIALS
    assert all(trial.fits == (trial.microbatch_size <= fits_up_to) for trial in trials)
    assert Found(trials).largest <= fits_up_to


def test_if_not_even_one_fits_nothing_else_is_tried() -> None:
    memory = Memory(10, 1, 5)
    assert not fits(find_max_microbatch(memory.train))
    assert memory.tried == [1]


def test_the_result_is_printed_with_its_memory_line() -> None:
    memory = Memory(2.0, 0.5, 20.2)
    lines = Found(find_max_microbatch(memory.train)).lines()
    assert lines[:2] == ["largest microbatch: 36", "fastest microbatch: 4 (1,000 tokens/s)"]
    assert lines[2] == "memory: 2.00 GiB + 512 MiB a sequence"
    assert "12 GiB: 17, 16 GiB: 25, 24 GiB: 41, 40 GiB: 72, 80 GiB: 150, 141 GiB: 270," in lines[3]


def test_on_a_cpu_memory_is_named_for_what_it_is_and_no_card_is_predicted() -> None:
    trials = [Memory(0.07, 0.0005, 20.0).train(size) for size in (1, 1000, 4000)]
    lines = Found(trials, on_gpu=False).lines()
    assert lines[0].startswith("largest microbatch: 4,000 (")
    assert lines[2] == "mapped memory: 71.7 MiB + 524 KiB a sequence"
    assert lines[3].startswith("mapped: address space") and len(lines) == 4
    flat = [Memory(10.0, 1e-5, 20.0).train(size) for size in (1, 4, 16)]
    assert "card" not in "".join(Found(flat, on_gpu=False).lines())
    assert table_row(trials[1]).split() == ["1,000", "584", "MiB", "584", "MiB", "4"]


@pytest.mark.parametrize(("train", "largest", "world_size", "size", "message"), [
    ({"global_batch_size": 96, "gradient_accumulation_steps": None}, 37, 1, 32,
     "microbatch_size 32; x accumulation 3 x 1 = global batch 96 (kept)"),
    ({"global_batch_size": 96, "gradient_accumulation_steps": None}, 200, 8, 12,
     "microbatch_size 12; x accumulation 1 x 8 = global batch 96 (kept)"),
    ({"gradient_accumulation_steps": 2}, 5, 2, 5,
     "microbatch_size 5; x accumulation 2 x 2 = global batch 20 (it follows the microbatch"),
])
def test_saving_keeps_the_global_batch_and_every_other_key(
    workplace: Workplace, train: dict, largest: int, world_size: int, size: int, message: str
) -> None:
    path = workplace.add_run(train=train) / "train.json"
    before = json.loads(path.read_text())
    run = load_run(workplace.runs_dir, "tiny")
    found = Found([Trial(1, True, tokens_per_second=100.0), Trial(largest, True,
                                                                  tokens_per_second=200.0)])
    assert message in save_result(run, found, world_size)
    after = json.loads(path.read_text())
    assert after == before | {"microbatch_size": size} and list(after) == list(before)
    assert sorted(p.name for p in path.parent.iterdir()) == [
        "microbatch-search.json", "model.json", "train.json"]
    speed, processes, _ = measured_speed(load_run(workplace.runs_dir, "tiny"))
    assert speed == pytest.approx(100 + 100 * (size - 1) / (largest - 1))  # between the two
    assert processes == world_size
    saved = json.loads((path.parent / "microbatch-search.json").read_text())
    assert [trial["microbatch_size"] for trial in saved["trials"]] == [1, largest]


def test_saving_keeps_the_old_name_of_the_key(workplace: Workplace) -> None:
    path = workplace.add_run(train={"microbatch_size": None, "minibatch_size": 3}) / "train.json"
    save_result(load_run(workplace.runs_dir, "tiny"), Found([Trial(7, True, tokens_per_second=1)]),
                1)
    assert json.loads(path.read_text())["minibatch_size"] == 7
    assert load_run(workplace.runs_dir, "tiny").train.microbatch_size == 7


def simulated_search(workplace: Workplace, monkeypatch: pytest.MonkeyPatch, *, capacity: float,
                     memory: Memory | None = None, **options: object) -> None:
    """Run `search` with simulated trials of 1 GiB + 0.5 GiB per sequence."""
    num_processes = options.pop("num_processes", 1)
    memory = memory or Memory(1.0, 0.5, capacity)
    monkeypatch.setattr(microbatch_search, "try_microbatch",
                        lambda command, size, *_, **__: memory.train(size))
    search("ddp_train.py", Options("tiny", runs_dir=workplace.runs_dir,
                                   **{"memory_limit_gib": 20.0} | options), num_processes)


def test_trials_and_result_are_printed_and_saved(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = workplace.add_run(train={
        "global_batch_size": 12, "gradient_accumulation_steps": None, "microbatch_size": 5,
    }) / "train.json"  # 5 does not divide 12: the search corrects it
    simulated_search(workplace, monkeypatch, capacity=3.7, save=True)
    output = capsys.readouterr().out
    assert tried(output)[5] and not tried(output)[6]
    assert "\nlargest microbatch: 5\n" in output
    assert "resident        mapped" in output and "on a card of" not in output  # on a CPU
    assert f"saved in {path}: microbatch_size 4; x accumulation 3 x 1" in output
    assert json.loads(path.read_text())["microbatch_size"] == 4


def test_the_result_is_a_json_document_and_all_else_goes_to_stderr(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workplace.add_run()
    simulated_search(workplace, monkeypatch, capacity=3.7, json=True)
    output = capsys.readouterr()
    document = checked(output.out)
    assert document.largest == 5 and document.smallest_that_did_not_fit == 6
    assert document.memory_gib == pytest.approx({"fixed": 1.0, "a_sequence": 0.5})
    assert [trial.fits for trial in document.trials if trial.microbatch_size == 6] == [False]
    assert "largest microbatch: 5\n" in output.err


@pytest.mark.parametrize(("train", "options", "message"), [
    ({}, {"memory_limit_gib": None}, "without a GPU: give --memory-limit-gib"),
    ({}, {"capacity": 1.2}, "not even a microbatch of 1 fits"),
    ({"gradient_accumulation_steps": None, "global_batch_size": 9, "microbatch_size": 1},
     {"num_processes": 2}, "global_batch_size 9 is not divisible by 2 processes, so nothing"),
])
def test_a_search_that_is_impossible_says_why(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, train: dict, options: dict, message: str
) -> None:
    workplace.add_run(train=train)
    before = workplace.files()
    with pytest.raises(UserError, match=message):
        simulated_search(workplace, monkeypatch, **{"capacity": 3.7, "save": True} | options)
    assert workplace.files() == before


def tried(output: str) -> dict[int, bool]:
    """Read the table of trials: whether each microbatch fitted."""
    rows = re.findall(r"^ +([\d,]+) +(\d|out of memory)", output, re.MULTILINE)
    return {int(size.replace(",", "")): result != "out of memory" for size, result in rows}


def simulated_torchrun(monkeypatch: pytest.MonkeyPatch, *, status: int = 1, stderr: str = "",
                       **files: dict) -> None:
    """Replace torchrun by one whose processes leave these files, this text and this status."""
    def start(script: str, arguments: list[str], *, num_processes: int, logs_dir: Path) -> int:
        folder = Path(json.loads(os.environ[TRIAL_VARIABLE])["folder"])
        (logs_dir / "attempt_0/0").mkdir(parents=True)
        (logs_dir / "attempt_0/0/stderr.log").write_text(stderr)
        for name, content in files.items():
            (folder / (RESULT if name == "result" else f"{name.replace('_', '-')}.json")
             ).write_text(json.dumps(content))
        return status

    monkeypatch.setattr(microbatch_search, "start_torchrun", start)


def failure(error: str, *, out_of_memory: bool = False) -> dict[str, object]:
    return {"out_of_memory": out_of_memory, "error": error}


LOST_PEER = failure("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")
NO_THREAD = "libgomp: Thread creation failed: Resource temporarily unavailable"


def test_a_trial_s_measurement_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Trial(3, True, 1.0, 2.0, 2.0, 4.0, 100.0, "GPU")
    simulated_torchrun(monkeypatch, status=0, result=asdict(found))
    assert try_microbatch(["ddp_train.py"], 3, 2, on_gpu=True) == found
    assert TRIAL_VARIABLE not in os.environ


@pytest.mark.parametrize(("on_gpu", "ended"), [
    (True, {"rank_1": failure("CUDA out of memory", out_of_memory=True), "rank_0": LOST_PEER}),
    (True, {"stderr": "torch.AcceleratorError: CUDA error: out of memory"}),
    (False, {"status": 128 + signal.SIGSEGV}),
    (False, {"status": 128 + signal.SIGKILL, "rank_0": LOST_PEER}),
    (False, {"rank_0": LOST_PEER}),  # the one that crashed was not the first that torchrun saw
    (False, {"stderr": NO_THREAD}),
    (False, {"status": 128 + signal.SIGABRT, "stderr": "std::bad_alloc"}),
], ids=["gpu", "driver", "crash", "killed", "peer", "openmp", "abort"])
def test_running_out_of_memory_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, on_gpu: bool, ended: dict
) -> None:
    simulated_torchrun(monkeypatch, **ended)
    assert try_microbatch(["ddp_train.py"], 3, 2, on_gpu=on_gpu) == Trial(3, fits=False)


@pytest.mark.parametrize(("on_gpu", "ended", "message"), [
    (False, {"rank_0": LOST_PEER, "rank_1": failure("shapes cannot be multiplied")}, "shapes"),
    (False, {"status": 3, "stderr": "the last line\n"}, r"the last line \(exit status 3\)"),
    (True, {"status": 139}, r"no message \(exit status 139\)"),
    (True, {"stderr": NO_THREAD}, "Thread creation failed"),
    (True, {"rank_0": failure("out of resource: shared memory, required 9")}, "out of resource"),
], ids=["error", "exit", "crash-on-gpu", "openmp-on-gpu", "resource"])
def test_another_error_is_reported_and_not_taken_for_it(
    monkeypatch: pytest.MonkeyPatch, on_gpu: bool, ended: dict, message: str
) -> None:
    simulated_torchrun(monkeypatch, **ended)
    with pytest.raises(UserError, match=f"microbatch 3 failed, not out of memory: .*{message}"):
        try_microbatch(["ddp_train.py"], 3, 2, on_gpu=on_gpu)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_signal_ends_the_search(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    simulated_torchrun(monkeypatch, status=128 + number)
    with pytest.raises(SystemExit) as ended:
        try_microbatch(["ddp_train.py"], 3, 2, on_gpu=False)
    assert ended.value.code == 128 + number


def test_the_search_never_initialises_cuda(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its context would take some of the memory that the trials measure."""
    def initialise() -> None:
        raise AssertionError("CUDA was initialised")

    monkeypatch.setattr(torch.cuda, "_lazy_init", initialise)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    workplace.add_run()
    simulated_search(workplace, monkeypatch, capacity=3.7, save=True, memory_limit_gib=None)
    with pytest.raises(AssertionError, match="CUDA was initialised"):
        torch.cuda.current_device()  # what the test would notice


@pytest.fixture
def trial_of(workplace: Workplace, monkeypatch: pytest.MonkeyPatch
             ) -> Iterator[Callable[[int], MicrobatchTrial]]:
    """Build a trial of the run `tiny` in this process."""
    folder = workplace.root / "trial"
    folder.mkdir()
    monkeypatch.setattr("basics.memory_meters.resource.setrlimit", lambda *_: None)

    def trial(microbatch_size: int) -> MicrobatchTrial:
        monkeypatch.setenv(TRIAL_VARIABLE, json.dumps(
            {"microbatch_size": microbatch_size, "folder": str(folder)}))
        options = Options("tiny", runs_dir=workplace.runs_dir, memory_limit_gib=1.0)
        return MicrobatchTrial(options, CPU, Agreement.in_one_process())

    yield trial
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(("precision", "num_timed"), [("fp32", 1), ("fp16", 5)])
def test_a_trial_includes_the_optimizers_state(
    workplace: Workplace, precision: str, num_timed: int, monkeypatch: pytest.MonkeyPatch,
    trial_of: Callable,
) -> None:
    # At fp16's usual initial scale, the steps would overflow and be skipped.
    workplace.add_run(model={"init": "torch", "tie_weights": True}, train={"precision": precision})
    monkeypatch.setitem(microbatch_trial.TIMED_STEPS, "cpu", num_timed)
    states, take = [], TrainingStep.take
    monkeypatch.setattr(TrainingStep, "take", lambda step, *args, **options: (
        states.append(step.state), take(step, *args, **options)))
    measure_microbatch(trial_of(2))
    assert {float(state["step"]) for state in states[0].optimizer.state.values()} == {
        2.0 + num_timed}
    found = Trial(**json.loads((workplace.root / "trial" / RESULT).read_text()))
    assert found.fits and found.microbatch_size == 2 and found.device
    assert found.tokens_per_second > 0 and found.capacity_gib == 1.0


@pytest.mark.parametrize(("error", "is_memory"), [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
    (RuntimeError("NCCL error: Cuda failure 2 'out of memory'"), True),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8"), True),
    (MemoryError(), True), (RuntimeError("could not create a primitive"), True),
    (KeyError("x"), False)])
def test_a_process_that_fails_says_why_and_ends(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, trial_of: Callable,
    error: Exception, is_memory: bool
) -> None:
    workplace.add_run()
    trial, statuses = trial_of(2), []
    monkeypatch.setattr(microbatch_trial, "leave", statuses.append)
    with trial.measuring():
        raise error
    said = json.loads((workplace.root / "trial/rank-0.json").read_text())
    assert said["out_of_memory"] == is_memory and type(error).__name__ in said["error"] or is_memory
    assert statuses == [1]


def test_a_run_compiles_what_a_trial_of_its_microbatch_has_compiled(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, trial_of: Callable
) -> None:
    """So that it finds the code in the cache. The validation is not compiled in a trial."""
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
    workplace.add_run(train={"compile": True, "precision": "bf16"})
    seen.append(set())
    measure_microbatch(trial_of(3))
    seen.append(set())
    run = load_run(workplace.runs_dir, "tiny")
    train = resolve_for_device(run.train, CPU.device).model_copy(
        update={"microbatch_size": 3, "validation_interval": None})
    Losses(build_training_state(run.model, train, CPU).model, train, CPU)
    assert len(seen[0]) == 1 and seen[0] == seen[1]


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
    assert microbatch_trial.num_microbatches(run, world_size) == microbatches


@pytest.mark.parametrize("starts", [
    "alone", pytest.param("under torchrun", marks=pytest.mark.thorough)])
def test_a_search_on_real_memory_with_two_processes(workplace: Workplace, starts: str) -> None:
    workplace.add_run(model=LARGE_VOCABULARY, train=ONE_CHUNK)
    before = workplace.files()
    arguments = ["tiny", "--find-max-microbatch", "--memory-limit-gib", "0.12"]
    result = succeeded(workplace.ddp_train(*arguments, "--nproc-per-node", "2")
                       if starts == "alone" else workplace.real_torchrun(2, *arguments))
    results = tried(result.stdout)
    largest = max(size for size, fitted in results.items() if fitted)
    assert f"\nlargest microbatch: {largest}\n" in result.stdout and largest > 1
    assert results[largest + 1] is False
    assert workplace.files() == before


@pytest.mark.thorough
def test_no_process_outlives_a_search_that_was_killed(workplace: Workplace) -> None:
    workplace.add_run(model=LARGE_VOCABULARY, train=ONE_CHUNK)
    mark = f"MARK_{uuid.uuid4().hex}"
    command = [sys.executable, "ddp_train.py", *workplace.arguments(
        "tiny", "--find-max-microbatch", "--memory-limit-gib", "20", "--nproc-per-node", "2")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                               cwd=PROJECT_DIR, env=os.environ | {mark: "1"}, text=True)
    try:
        assert process.stdout.readline() and process.stdout.readline()  # the first trial is done
        deadline = time.monotonic() + 30
        while len(marked(mark)) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.kill()
        while marked(mark) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not marked(mark)
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def marked(mark: str) -> list[int]:
    """List the processes that have inherited an environment variable and are not zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return found


@pytest.mark.gpu
def test_the_largest_trains_on_a_gpu_and_the_next_does_not(workplace: Workplace) -> None:
    """Two layers and 6 GiB: a sequence takes about 0.2 GiB, by its logits."""
    workplace.add_run(
        model={"vocab_size": 50257, "context_length": 1024, "emb_dim": 768, "n_heads": 12,
               "n_layers": 2, "drop_rate": 0.0},
        train={"precision": "bf16"})
    result = succeeded(subprocess.run(
        [*torchrun_command(1, "ddp_train.py"), *workplace.arguments(
            "tiny", "--find-max-microbatch", "--memory-limit-gib", "6")],
        capture_output=True, text=True, timeout=1200, cwd=PROJECT_DIR))  # up to 8 compilations
    print(result.stdout)
    results = tried(result.stdout)
    largest = max(size for size, fitted in results.items() if fitted)
    assert largest > 4 and results[largest + 1] is False
    assert "not compiled" not in result.stdout
    rows = re.findall(r"^ +\d+ +([\d.]+) +([\d.]+) +([\d,]+)$", result.stdout, re.MULTILINE)
    assert len(rows) == sum(results.values())
    for allocated, reserved, tokens_per_second in rows:
        assert 0 < float(allocated) <= float(reserved) <= 6.0
        assert int(tokens_per_second.replace(",", "")) > 0
