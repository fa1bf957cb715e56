"""The search for the largest microbatch: its choices on made-up memory, then on real memory."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import uuid
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from microbatch_search.search import (
    MAX_TRIES,
    Found,
    find_max_microbatch,
    fits,
    save_microbatch,
    smallest_failure,
)
from microbatch_search.trial import Trial
from run_config import load_run
from tests.support.workplace import TINY_MODEL, Workplace, forked, succeeded, torchrun_command

# A sequence takes 20 MiB here, or 30 where gradients are accumulated, and the limits lie between
# two microbatches: the odd megabyte of a thread does not decide.
LIMITS = ("0.12", "0.2", "0.29")  # the last with --thorough
WORDY_MODEL = {"vocab_size": 20000, "context_length": 128, "emb_dim": 16, "n_layers": 1,
               "drop_rate": 0.0}
IN_ONE = {"head_chunks": 1}  # in pieces they would take next to nothing


class Memory:
    """Memory as a line over the microbatch, but for what the optimizer's step takes anyway."""

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

    @property
    def largest(self) -> int:
        return int((self.capacity - self.fixed) / self.slope)


@settings(max_examples=300)
@example(fixed=2.0, slope=1.0, room=248.99999999999997, floor=1.0)
@given(fixed=st.floats(0.5, 20), slope=st.floats(0.05, 4), room=st.floats(1.1, 250),
       floor=st.floats(0, 1))
def test_the_true_maximum_is_found_in_eight_tries(
    fixed: float, slope: float, room: float, floor: float
) -> None:
    capacity = fixed + slope * room
    memory = Memory(fixed, slope, capacity, floor=fixed + 2 * slope * floor)
    if memory.floor > capacity:
        return
    trials = find_max_microbatch(memory.train)
    assert memory.tried[0] == 1 and len(memory.tried) <= MAX_TRIES
    assert len(set(memory.tried)) == len(memory.tried)
    largest = max(trial.microbatch_size for trial in fits(trials))
    assert smallest_failure(trials) == largest + 1, memory.tried


@settings(max_examples=300)
@given(fits_up_to=st.integers(1, 10_000), demand=st.sampled_from(["flat", "noisy", "falling"]))
def test_without_a_line_to_go_by_it_still_ends_with_what_was_trained(
    fits_up_to: int, demand: str
) -> None:
    def train(size: int) -> Trial:
        shown = {"flat": 1.0, "noisy": 1.0 + hash(size) % 7, "falling": 10.0 / size}[demand]
        return (Trial(size, True, shown, shown, shown, 80.0, 1.0) if size <= fits_up_to
                else Trial(size, fits=False))

    trials = find_max_microbatch(train)
    assert len(trials) <= MAX_TRIES
    assert all(trial.fits == (trial.microbatch_size <= fits_up_to) for trial in trials)
    assert Found(trials).largest.microbatch_size <= fits_up_to


def test_there_is_no_upper_bound() -> None:
    memory = Memory(1.0, 1e-4, 80.0)
    find_max_microbatch(memory.train)
    assert max(memory.tried) > 500_000


def test_where_not_even_one_fits_nothing_else_is_tried() -> None:
    memory = Memory(10, 1, 5)
    assert not fits(find_max_microbatch(memory.train))
    assert memory.tried == [1]


def test_what_was_found_is_told_with_its_line() -> None:
    memory = Memory(2.0, 0.5, 20.2)
    lines = Found(find_max_microbatch(memory.train)).lines()
    assert lines[:2] == ["largest microbatch: 36", "fastest microbatch: 4 (1,000 tokens/s)"]
    assert lines[2] == "memory: 2.00 GiB + 0.500 GiB a sequence"
    assert "12 GiB: 17, 16 GiB: 25, 24 GiB: 41, 40 GiB: 72, 80 GiB: 150, 141 GiB: 270," in lines[3]


def test_memory_that_hardly_grows_promises_nothing() -> None:
    memory = Memory(10.0, 1e-5, 20.0)
    trials = [memory.train(size) for size in (1, 4, 16)]
    assert Found(trials).lines()[2:] == ["memory hardly grows with these microbatches: no"
                                         " prediction for other cards"]


def test_a_card_too_small_for_one_sequence_says_none() -> None:
    memory = Memory(11.0, 0.5, 20.0)
    assert "on a card of 12 GiB: none, 16 GiB: 7" in Found(find_max_microbatch(
        memory.train)).lines()[3]


def test_what_was_not_tried_is_said() -> None:
    trials = [Trial(size, True, 1, 1, 1, 80, 1) for size in (1, 4, 16)]
    assert "larger ones were not tried" in Found(trials).lines()[0]
    assert "(20 did not fit; between them nothing was tried" in Found(
        [*trials, Trial(20, fits=False)]).lines()[0]


@pytest.mark.parametrize(("train", "largest", "world_size", "size", "said"), [
    ({"global_batch_size": 96, "gradient_accumulation_steps": None}, 37, 1, 32,
     "microbatch_size 32; x accumulation 3 x 1 = global batch 96 (kept)"),
    ({"global_batch_size": 96, "gradient_accumulation_steps": None}, 200, 8, 12,
     "microbatch_size 12; x accumulation 1 x 8 = global batch 96 (kept)"),
    ({"gradient_accumulation_steps": 2}, 5, 2, 5,
     "microbatch_size 5; x accumulation 2 x 2 = global batch 20 (it follows the microbatch"),
])
def test_saving_keeps_the_global_batch_and_every_other_key(
    workplace: Workplace, train: dict, largest: int, world_size: int, size: int, said: str
) -> None:
    path = workplace.add_run(train=train) / "train.json"
    before = json.loads(path.read_text())
    run = load_run(workplace.runs_dir, "tiny")
    assert said in save_microbatch(run, largest, world_size=world_size)
    after = json.loads(path.read_text())
    assert after == before | {"microbatch_size": size} and list(after) == list(before)
    assert sorted(p.name for p in path.parent.iterdir()) == ["model.json", "train.json"]


def test_saving_knows_the_keys_older_name(workplace: Workplace) -> None:
    path = workplace.add_run(train={"microbatch_size": None, "minibatch_size": 3}) / "train.json"
    save_microbatch(load_run(workplace.runs_dir, "tiny"), 7, world_size=1)
    assert json.loads(path.read_text())["minibatch_size"] == 7
    assert load_run(workplace.runs_dir, "tiny").train.microbatch_size == 7


def test_a_global_batch_that_the_processes_cannot_share_is_refused_before_the_search(
    workplace: Workplace
) -> None:
    workplace.add_run(train={"global_batch_size": 9, "gradient_accumulation_steps": None})
    before = workplace.files()
    result = search(workplace, 2, "--memory-limit-gib", "1", "--save")
    assert "global_batch_size 9 is not divisible by 2 processes, so nothing" in result.stderr
    assert result.stdout == ""
    assert workplace.files() == before


def search(workplace: Workplace, num_processes: int, *arguments: str):
    return workplace.torchrun(num_processes, "tiny", "--find-max-microbatch", *arguments)


def tried(output: str) -> dict[int, bool]:
    rows = re.findall(r"^ +(\d+) +(\d|out of memory)", output, re.MULTILINE)
    return {int(size): result != "out of memory" for size, result in rows}


def search_and_try_all(workplace: Workplace, num_processes: int, limits: str) -> int:
    """Search, then try every microbatch up to two more; give the largest that fits.

    Args:
        limits: GiB that the processes may take, by rank.
    """
    result = succeeded(forked("tests/support/torchrun_workers.py", [
        "find-max-microbatch", str(workplace.root), limits], num_processes=num_processes))
    reports = [json.loads(line) for line in result.stdout.splitlines() if line[:1] == "{"]
    assert len(reports) == num_processes and all(report == reports[0] for report in reports)
    tried = {int(size): fitted for size, fitted in reports[0]["tried"].items()}
    largest = max(size for size, fitted in tried.items() if fitted)
    assert len(tried) <= MAX_TRIES and tried[largest + 1] is False
    assert reports[0]["all"] == [True] * largest + [False, False]
    assert reports[0]["most_gib"] <= min(map(float, limits.split(","))) + 0.002
    assert reports[0]["random_state_kept"]
    return largest


def test_the_true_maximum_is_found_on_real_memory(
    workplace: Workplace, request: pytest.FixtureRequest
) -> None:
    limits = LIMITS if request.config.getoption("--thorough") else LIMITS[:-1]
    workplace.add_run(model=WORDY_MODEL, train=IN_ONE)  # it accumulates; there is no data
    before = workplace.files()
    found = {(num_processes, limit): search_and_try_all(workplace, num_processes, limit)
             for num_processes in (1, 2) for limit in limits}
    for num_processes in (1, 2):
        sizes = [found[num_processes, limit] for limit in limits]
        assert sizes == sorted(set(sizes)), "more memory, larger microbatch"
    assert workplace.files() == before


def test_the_limit_holds_where_gradients_are_not_accumulated(workplace: Workplace) -> None:
    workplace.add_run(model=WORDY_MODEL, train=IN_ONE | {"gradient_accumulation_steps": 1})
    assert search_and_try_all(workplace, 2, "0.25,0.13") == search_and_try_all(
        workplace, 2, "0.13")


def test_the_process_with_the_least_memory_decides_and_none_hangs(workplace: Workplace) -> None:
    workplace.add_run(model=WORDY_MODEL, train=IN_ONE)
    assert search_and_try_all(workplace, 2, "0.25,0.12") == search_and_try_all(
        workplace, 2, "0.12,0.25") == search_and_try_all(workplace, 2, "0.12")


def test_a_model_that_only_fails_in_the_optimizers_first_step_does_not_fit(
    workplace: Workplace
) -> None:
    # 50 MiB of weights, as much in gradients and 10 MiB of activations go in, but not AdamW's two
    # moments as well.
    workplace.add_run(model={"emb_dim": 1024, "context_length": 128, "n_heads": 4, "n_layers": 1,
                             "drop_rate": 0.0})
    result = search(workplace, 1, "--memory-limit-gib", "0.19")
    assert "not even a microbatch of 1 fits" in result.stderr
    assert tried(result.stdout) == {1: False}
    output = succeeded(search(workplace, 1, "--memory-limit-gib", "0.26")).stdout
    assert re.search(r"^largest microbatch: [1-9]$", output, re.MULTILINE)


def test_the_microbatch_found_is_saved(workplace: Workplace) -> None:
    path = workplace.add_run(model=WORDY_MODEL, train=IN_ONE | {
        "global_batch_size": 12, "gradient_accumulation_steps": None, "microbatch_size": 5,
    }) / "train.json"  # 5 does not divide 12: the search is there to mend it
    output = succeeded(search(workplace, 2, "--memory-limit-gib", "0.45", "--save")).stdout
    assert f"saved in {path}: microbatch_size" in output
    size = json.loads(path.read_text())["microbatch_size"]
    assert 6 % size == 0


@pytest.mark.parametrize(("arguments", "message"), [
    (["--find-max-microbatch"], "without a GPU: give --memory-limit-gib"),
    (["--find-max-microbatch", "--memory-limit-gib", "0.001"], "not even a microbatch of 1 fits"),
    (["--find-max-microbatch", "--memory-limit-gib", "0"], "--memory-limit-gib"),
    (["--find-max-microbatch", "--fresh"], "--fresh cannot be used with --find-max-microbatch"),
    (["best", "--find-max-microbatch"], "CHECKPOINT cannot be used with --find-max-microbatch"),
    (["--usd-per-hour", "nan"], "--usd-per-hour is nan; expected a finite number"),
    (["--save"], "--save needs --find-max-microbatch"),
    (["--memory-limit-gib", "3"], "--memory-limit-gib needs --find-max-microbatch"),
])
def test_a_search_that_cannot_be_made_is_one_line(
    workplace: Workplace, arguments: list[str], message: str
) -> None:
    workplace.add_run(model=WORDY_MODEL, train=IN_ONE)
    before = workplace.files()
    result = workplace.torchrun(2, "tiny", *arguments)
    lines = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1 and message in lines[0]
    assert "exitcode  : 2" in result.stderr
    assert 'ddp_train.py", line' not in result.stderr, "a traceback of ours"
    assert workplace.files() == before


def test_the_script_starts_torchrun_for_a_search_too(workplace: Workplace) -> None:
    workplace.add_run(model=TINY_MODEL | {"vocab_size": 20000})
    result = workplace.ddp_train("tiny", "--find-max-microbatch", "--memory-limit-gib", "0.12")
    assert "largest microbatch: " in succeeded(result).stdout


def test_no_process_outlives_a_search_that_was_killed(workplace: Workplace) -> None:
    workplace.add_run(model=WORDY_MODEL, train=IN_ONE)
    mark = f"MARK_{uuid.uuid4().hex}"
    command = [*torchrun_command(2, "ddp_train.py"), *workplace.arguments(
        "tiny", "--find-max-microbatch", "--memory-limit-gib", "20")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                               env=os.environ | {mark: "1"}, text=True)
    try:
        assert process.stdout.readline() and process.stdout.readline()  # the first try is done
        workers = [pid for pid in marked(mark) if "ddp_train.py" in command_of(pid)]
        assert len(workers) >= 3  # torchrun and two; their children have other command lines
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while marked(mark) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not marked(mark), [command_of(pid) for pid in marked(mark)]
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def marked(mark: str) -> list[int]:
    """Processes that have inherited an environment variable, and are not zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return found


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


@pytest.mark.gpu
def test_the_largest_trains_on_a_gpu_and_the_next_does_not(workplace: Workplace) -> None:
    workplace.add_run(model={"vocab_size": 50257, "context_length": 1024, "emb_dim": 768,
                             "n_heads": 12, "n_layers": 12}, train={"precision": "bf16"})
    began = time.monotonic()
    result = succeeded(workplace.typed_torchrun(
        1, "tiny", "--find-max-microbatch", "--memory-limit-gib", "20"))
    results = tried(result.stdout)
    print(result.stdout, f"{(time.monotonic() - began) / len(results):.1f} s a try")
    largest = max(size for size, fitted in results.items() if fitted)
    assert results[largest + 1] is False
