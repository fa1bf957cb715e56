"""The search for the largest microbatch: on simulated memory, and on this machine's."""

import json
import os
import re
import resource
import subprocess

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

from basics.errors import UserError
from ddp_train import TrainingStep, measure_microbatch
from lab.plan.length import measured_speed
from processes.command_line import Options
from processes.launch import Process
from processes.startup_agreement import Agreement
from run_config import load_run
from tests.support.json_schemas import checked
from tests.support.workplace import PROJECT_DIR, succeeded, torchrun_command
from trainer import microbatch_search, microbatch_trial
from trainer.microbatch_search import (
    MAX_TRIALS,
    by_size,
    document,
    find_max_microbatch,
    result_lines,
    save_result,
    search,
    try_microbatch,
)
from trainer.microbatch_trial import TRIAL_VARIABLE, MicrobatchTrial, Trial

CPU = Process(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
# A sequence takes 20 MiB in one chunk, or 30 with gradient accumulation.
LARGE_VOCABULARY = {"vocab_size": 20000, "context_length": 128, "emb_dim": 16, "n_layers": 1,
                    "drop_rate": 0.0}


def memory(fixed, slope, capacity, floor=0.0):
    """Memory as a line over the microbatch, with a floor for the optimizer's step."""
    def train(size):
        demand = max(floor, fixed + slope * size)
        if demand > capacity:
            return Trial(size, fits=False)
        return Trial(size, True, demand, demand, demand, capacity, 1000.0 - abs(size - 4))

    return train


@settings(max_examples=300)
@example(fixed=2.0, slope=1.0, sequences=248.99999999999997, floor=1.0)
@given(fixed=st.floats(0.5, 20), slope=st.floats(0.05, 4), sequences=st.floats(1.1, 250),
       floor=st.floats(0, 1))
def test_the_true_maximum_is_found_in_eight_trials(fixed, slope, sequences, floor):
    capacity, floor = fixed + slope * sequences, fixed + 2 * slope * floor
    if floor > capacity:
        return
    trials = find_max_microbatch(memory(fixed, slope, capacity, floor))
    sizes = [trial.microbatch_size for trial in trials]
    assert sizes[0] == 1 and len(set(sizes)) == len(sizes) <= MAX_TRIALS
    fitting, failure = by_size(trials)
    assert failure == fitting[-1].microbatch_size + 1, sizes


@settings(max_examples=300)
@given(fits_up_to=st.integers(1, 10_000), demand=st.sampled_from(["flat", "noisy", "falling"]))
def test_memory_that_is_no_line_still_ends_with_a_microbatch_that_fits(fits_up_to, demand):
    trials = find_max_microbatch(lambda size: Trial(
        size, size <= fits_up_to, capacity_gib=80.0,
        demand_gib={"flat": 1.0, "noisy": 1.0 + hash(size) % 7, "falling": 10.0 / size}[demand]))
    assert len(trials) <= MAX_TRIALS and trials[0].fits


def test_the_memory_line_predicts_other_cards_and_on_a_cpu_none(workplace):
    workplace.add_run()

    def printed(trials, *, on_gpu=True):
        run = load_run(workplace.runs_dir, "tiny")
        return "\n".join(result_lines(document(run, trials, 1), on_gpu=on_gpu))

    trials = find_max_microbatch(memory(2.0, 0.5, 20.2))
    text = printed(trials)
    assert text.startswith("largest microbatch: 36\nfastest microbatch: 4 (1,000 tokens/s)\n"
                           "memory: 2.00 GiB + 512 MiB a sequence\n")
    assert "12 GiB: 17, 16 GiB: 25, 24 GiB: 41, 40 GiB: 72, 80 GiB: 150, 141 GiB: 270," in text
    text = printed(trials, on_gpu=False)
    assert text.endswith("\nmapped memory: 2.00 GiB + 512 MiB a sequence")
    flat = [memory(10.0, 1e-5, 20.0)(size) for size in (1, 4, 16)]
    assert printed(flat).startswith("largest microbatch: 16 (larger ones were not tried")
    assert printed(flat).endswith("\nmemory hardly grows with these microbatches")
    assert "16 (40 did not fit; none between was tried" in printed([*flat, Trial(40, fits=False)])


@pytest.mark.parametrize(("train", "largest", "world_size", "size", "message"), [
    ({"global_batch_size": 96, "gradient_accumulation_steps": None}, 37, 1, 32,
     "microbatch_size 32; x accumulation 3 x 1 = global batch 96 (kept)"),
    ({"global_batch_size": 96, "gradient_accumulation_steps": None}, 200, 8, 12,
     "microbatch_size 12; x accumulation 1 x 8 = global batch 96 (kept)"),
    ({"microbatch_size": None, "minibatch_size": 3}, 5, 2, 5,  # an old name
     "microbatch_size 5; x accumulation 2 x 2 = global batch 20 (it follows the microbatch"),
])
def test_saving_keeps_the_global_batch_and_every_other_key(workplace, train, largest, world_size,
                                                           size, message):
    path = workplace.add_run(train=train) / "train.json"
    before = json.loads(path.read_text())
    trials = [Trial(1, True, tokens_per_second=100.0),
              Trial(largest, True, tokens_per_second=200.0)]
    assert message in save_result(load_run(workplace.runs_dir, "tiny"), trials, world_size)
    key = "minibatch_size" if "minibatch_size" in before else "microbatch_size"
    assert list(json.loads(path.read_text()).items()) == list((before | {key: size}).items())
    speed, processes, _ = measured_speed(load_run(workplace.runs_dir, "tiny"))
    assert speed == pytest.approx(100 + 100 * (size - 1) / (largest - 1))  # between the two
    assert processes == world_size


def simulated_search(workplace, monkeypatch, *, capacity, num_processes=1, **options):
    """Run `search` with simulated trials of 1 GiB + 0.5 GiB per sequence.

    It never initialises CUDA, whose context would take memory that the trials measure.
    """
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("CUDA was initialised"))
    monkeypatch.setattr(microbatch_search, "try_microbatch",
                        lambda command, size, *_, **__: memory(1.0, 0.5, capacity)(size))
    search("ddp_train.py", Options("tiny", runs_dir=workplace.runs_dir,
                                   **{"memory_limit_gib": 20.0} | options), num_processes)


def test_trials_and_result_are_printed_and_saved_or_a_json_document(workplace, monkeypatch, capsys):
    path = workplace.add_run(train={
        "global_batch_size": 12, "gradient_accumulation_steps": None, "microbatch_size": 5,
    }) / "train.json"  # 5 does not divide 12: the search corrects it
    simulated_search(workplace, monkeypatch, capacity=3.7, save=True)
    text = capsys.readouterr().out
    assert tried(text)[5] and not tried(text)[6]
    assert re.search(r"^ +5 +3\.50 GiB +3\.50 GiB +999$", text, re.MULTILINE)
    assert "\nlargest microbatch: 5\n" in text and "resident        mapped" in text  # on a CPU
    assert f"saved in {path}: microbatch_size 4; x accumulation 3 x 1" in text
    assert json.loads(path.read_text())["microbatch_size"] == 4
    simulated_search(workplace, monkeypatch, capacity=3.7, json=True)
    output = capsys.readouterr()
    result = checked(output.out)
    assert result.largest == 5 and result.smallest_that_did_not_fit == 6 and result.fastest == 4
    assert dict(result.memory_gib) == pytest.approx({"fixed": 1.0, "a_sequence": 0.5})
    assert [trial.fits for trial in result.trials if trial.microbatch_size == 6] == [False]
    assert output.err in text


@pytest.mark.parametrize(("train", "options", "message"), [
    ({}, {"memory_limit_gib": None}, "without a GPU: give --memory-limit-gib"),
    ({}, {"capacity": 1.2}, "not even a microbatch of 1 fits"),
    ({"gradient_accumulation_steps": None, "global_batch_size": 9, "microbatch_size": 1},
     {"num_processes": 2}, "global_batch_size 9 is not divisible by 2 processes, so nothing"),
])
def test_a_search_that_is_impossible_says_why(workplace, monkeypatch, train, options, message):
    workplace.add_run(train=train)
    before = workplace.files()
    with pytest.raises(UserError, match=message):
        simulated_search(workplace, monkeypatch, **{"capacity": 3.7, "save": True} | options)
    assert workplace.files() == before


def tried(output):
    """Read the table of trials: whether each microbatch fitted."""
    rows = re.findall(r"^ +([\d,]+) +(\d|out of memory)", output, re.MULTILINE)
    return {int(size.replace(",", "")): result != "out of memory" for size, result in rows}


LOST_PEER = "RuntimeError: [gloo/pair.cc:534] Connection closed by peer"


@pytest.mark.parametrize(("on_gpu", "size", "errors", "stderr", "message"), [
    (True, 3, ["out of memory: RuntimeError: of the compiler", LOST_PEER], "", None),
    (True, 3, [], "torch.AcceleratorError: CUDA error: out of memory", None),
    (False, 3, [LOST_PEER], "", None),  # on a CPU libraries crash
    (False, 1, ["UserError: attention is"], "", "microbatch 1 failed: UserError: attention is"),
    (True, 3, ["KeyError: x", LOST_PEER], "", "microbatch 3 failed: KeyError: x"),
    (True, 3, [], "a line\nthe last line\n", "microbatch 3 failed: the last line"),
    (True, 3, [], "", "microbatch 3 failed: exit status 139"),
])
def test_a_failed_trial_does_not_fit_or_is_an_error_with_its_reason(monkeypatch, on_gpu, size,
                                                                    errors, stderr, message):
    def start(script, arguments, *, num_processes, logs_dir):
        logs_dir.mkdir()
        (logs_dir / "stderr.log").write_text(stderr)
        for rank, text in enumerate(errors):  # in the order in which they fail
            path = logs_dir.parent / f"result.rank{rank}"
            path.write_text(text)
            os.utime(path, (rank, rank))
        return 139

    monkeypatch.setattr(microbatch_search, "start_torchrun", start)
    if message is None:
        assert not try_microbatch(["ddp_train.py"], size, 2, on_gpu=on_gpu).fits
        return
    with pytest.raises(UserError, match=message):
        try_microbatch(["ddp_train.py"], size, 2, on_gpu=on_gpu)


@pytest.fixture
def trial_of(workplace, monkeypatch):
    """Build a trial of the run `tiny` in this process."""
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)

    def trial(microbatch_size, process=CPU):
        monkeypatch.setenv(TRIAL_VARIABLE, json.dumps({
            "microbatch_size": microbatch_size, "result_path": str(workplace.root / "result"),
            "prefetches": False}))
        options = Options("tiny", runs_dir=workplace.runs_dir, memory_limit_gib=1.0)
        return MicrobatchTrial(options, process, Agreement.in_one_process())

    yield trial
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_trial_includes_the_optimizers_state(workplace, monkeypatch, trial_of):
    # At fp16's usual initial scale, the steps would overflow and be skipped.
    workplace.add_run(model={"init": "torch", "tie_weights": True}, train={"precision": "fp16"})
    states, take = [], TrainingStep.take
    monkeypatch.setattr(TrainingStep, "take", lambda step, *args, **options: (
        states.append(step.state), take(step, *args, **options)))
    measure_microbatch(trial_of(2))
    assert len(states) > 1
    assert {float(each["step"]) for each in states[0].optimizer.state.values()} == {len(states)}
    found = Trial(**json.loads((workplace.root / "result").read_text()))
    assert found.fits and found.microbatch_size == 2 and found.device
    assert found.tokens_per_second > 0 and found.capacity_gib == 1.0


def test_a_process_that_fails_says_why_and_ends(workplace, monkeypatch, trial_of):
    workplace.add_run()
    statuses: list[int] = []
    monkeypatch.setattr(microbatch_trial, "leave", statuses.append)
    with trial_of(2).measuring():
        raise MemoryError("of the host")
    said = (workplace.root / "result.rank0").read_text()
    assert said == "out of memory: MemoryError: of the host" and statuses == [1]


@pytest.mark.parametrize(("keys", "world_size", "microbatches"), [
    ({"gradient_accumulation_steps": 1}, 2, 1), ({"gradient_accumulation_steps": 64}, 2, 2),
    ({"gradient_accumulation_steps": None, "global_batch_size": 8}, 2, 2),
    ({"gradient_accumulation_steps": None, "global_batch_size": 8}, 8, 1)])
def test_a_trial_accumulates_if_the_run_does(workplace, trial_of, keys, world_size, microbatches):
    workplace.add_run(train=keys)
    process = Process(0, 0, world_size, torch.device("cpu"))
    assert trial_of(1, process).num_microbatches == microbatches


def test_a_search_on_real_memory_with_two_processes(workplace):
    workplace.add_run(model=LARGE_VOCABULARY, train={"head_chunks": 1})
    before = workplace.files()
    result = succeeded(workplace.ddp_train("tiny", "--find-max-microbatch", "--memory-limit-gib",
                                           "0.12", "--nproc-per-node", "2"))
    results = tried(result.stdout)
    largest = max(size for size, fitted in results.items() if fitted)
    assert f"\nlargest microbatch: {largest}\n" in result.stdout and largest > 1
    assert results[largest + 1] is False
    assert workplace.files() == before


@pytest.mark.gpu
def test_the_largest_trains_on_a_gpu_and_the_next_does_not(workplace):
    """Two layers and 6 GiB: a sequence takes about 0.2 GiB, by its logits."""
    workplace.add_run(
        model={"vocab_size": 50257, "context_length": 1024, "emb_dim": 768, "n_heads": 12,
               "n_layers": 2, "drop_rate": 0.0},
        train={"precision": "bf16"})
    result = succeeded(subprocess.run(
        [*torchrun_command(1, "ddp_train.py"), *workplace.arguments(
            "tiny", "--find-max-microbatch", "--memory-limit-gib", "6")],
        capture_output=True, text=True, timeout=1200, cwd=PROJECT_DIR))  # up to 8 compilations
    results = tried(result.stdout)
    largest = max(size for size, fitted in results.items() if fitted)
    assert largest > 4 and results[largest + 1] is False
