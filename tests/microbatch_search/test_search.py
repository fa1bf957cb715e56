"""The search for the largest microbatch: on simulated memory, and on this machine's."""

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
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from basics.errors import UserError
from ddp_train import wrap_in_ddp
from lab.plan.length import measured_speed
from microbatch_search import search
from microbatch_search.search import (
    MAX_TRIALS,
    Found,
    find_max_microbatch,
    fits,
    save_result,
    smallest_failure,
    table_head,
    table_row,
)
from microbatch_search.trial import Trial
from processes.command_line import Options, read_command_line
from processes.launch import Process
from run_config import load_run
from tests.support.json_schemas import checked
from tests.support.one_process import AgreementOfOne
from tests.support.workplace import (
    PROJECT_DIR,
    Workplace,
    forked,
    succeeded,
    torchrun_command,
)

# A sequence takes 20 MiB, or 30 with gradient accumulation. The limits lie between two
# microbatches, so that a few MiB of a thread do not decide.
LIMITS = ("0.12", "0.2", "0.29")
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
    assert Found(trials).largest.microbatch_size <= fits_up_to


def test_there_is_no_upper_bound() -> None:
    memory = Memory(1.0, 1e-4, 80.0)
    find_max_microbatch(memory.train)
    assert max(memory.tried) > 500_000


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


def test_memory_that_hardly_grows_gives_no_prediction() -> None:
    memory = Memory(10.0, 1e-5, 20.0)
    trials = [memory.train(size) for size in (1, 4, 16)]
    assert Found(trials).lines()[2:] == ["memory hardly grows with these microbatches: no"
                                         " prediction for other cards"]


def test_a_card_too_small_for_one_sequence_is_listed_as_none() -> None:
    memory = Memory(11.0, 0.5, 20.0)
    assert "on a card of 12 GiB: none, 16 GiB: 7" in Found(find_max_microbatch(
        memory.train)).lines()[3]


def test_the_result_says_what_was_not_tried() -> None:
    trials = [Trial(size, True, 1, 1, 1, 80, 1) for size in (1, 4, 16)]
    assert "larger ones were not tried" in Found(trials).lines()[0]
    for size, said in ((4567, "4,567 did not fit; 17 to 4,566 were not tried: limit of 8 trials"),
                       (18, "18 did not fit; 17 was not tried: limit of 8 trials")):
        line = Found([*trials, Trial(size, fits=False)]).lines()[0]
        assert line == f"largest microbatch: 16 ({said})"


def test_on_a_cpu_memory_is_named_for_what_it_is_and_no_card_is_predicted() -> None:
    trials = [Memory(0.07, 0.0005, 20.0).train(size) for size in (1, 1000, 4000)]
    lines = Found(trials, on_gpu=False).lines()
    assert lines[0].startswith("largest microbatch: 4,000 (")
    assert lines[2] == "mapped memory: 71.7 MiB + 524 KiB a sequence"
    assert lines[3].startswith("mapped: address space") and len(lines) == 4
    flat = [Memory(10.0, 1e-5, 20.0).train(size) for size in (1, 4, 16)]
    assert "card" not in "".join(Found(flat, on_gpu=False).lines())
    assert table_head(on_gpu=False).split() == ["microbatch", "resident", "mapped", "tokens/s"]
    assert table_head(on_gpu=True).split()[1:3] == ["allocated", "reserved"]
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
    process = Process(0, 0, world_size, torch.device("cpu"))
    assert message in save_result(run, found, process)
    after = json.loads(path.read_text())
    assert after == before | {"microbatch_size": size} and list(after) == list(before)
    assert sorted(p.name for p in path.parent.iterdir()) == [
        "microbatch-search.json", "model.json", "train.json"]
    speed, processes, _ = measured_speed(load_run(workplace.runs_dir, "tiny"))
    assert speed == pytest.approx(100 + 100 * (size - 1) / (largest - 1))  # between the two
    assert processes == world_size


def test_saving_keeps_the_old_name_of_the_key(workplace: Workplace) -> None:
    path = workplace.add_run(train={"microbatch_size": None, "minibatch_size": 3}) / "train.json"
    save_result(load_run(workplace.runs_dir, "tiny"), Found([Trial(7, True, tokens_per_second=1)]),
                Process(0, 0, 1, torch.device("cpu")))
    assert json.loads(path.read_text())["minibatch_size"] == 7
    assert load_run(workplace.runs_dir, "tiny").train.microbatch_size == 7


def simulated_search(workplace: Workplace, monkeypatch: pytest.MonkeyPatch, *, capacity: float,
                     memory: Memory | None = None, **options: object) -> None:
    """Run `search` in this process, with simulated trials of 1 GiB + 0.5 GiB per sequence."""
    memory = memory or Memory(1.0, 0.5, capacity)
    monkeypatch.setattr(search, "Trials", lambda *_, **__: memory)
    search.search(load_run(workplace.runs_dir, "tiny"), Process(0, 0, 1, torch.device("cpu")),
                  AgreementOfOne(), wrap=wrap_in_ddp,
                  options=Options("tiny", **{"memory_limit_gib": 20.0} | options))


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
])
def test_a_search_that_is_impossible_says_why(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, train: dict, options: dict, message: str
) -> None:
    workplace.add_run(train=train)
    before = workplace.files()
    with pytest.raises(UserError, match=message):
        simulated_search(workplace, monkeypatch, **{"capacity": 3.7, "save": True} | options)
    assert workplace.files() == before


@pytest.mark.parametrize(("arguments", "message"), [
    (["--find-max-microbatch", "--memory-limit-gib", "0"], "--memory-limit-gib"),
    (["--find-max-microbatch", "--fresh"], "--fresh .* --find-max-microbatch"),
    (["best", "--find-max-microbatch"], "CHECKPOINT .* --find-max-microbatch"),
    (["--usd-per-hour", "nan"], "'--usd-per-hour': nan is not a finite"),
    (["--usd-per-hour", "1e308"], "'--usd-per-hour': 1e\\+308 is not in the range 0<x<=1000000"),
    (["--memory-limit-gib", "inf"], "'--memory-limit-gib': inf is not a finite"),
    (["--save"], "--save .* --find-max-microbatch"),
    (["--memory-limit-gib", "3"], "--memory-limit-gib .* --find-max-microbatch"),
    (["--json"], "--json .* --find-max-microbatch"),
])
def test_options_that_contradict_each_other_are_refused(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr("sys.argv", ["ddp_train.py", "tiny", *arguments])
    with pytest.raises(UserError, match=message):
        read_command_line()


def run_search(workplace: Workplace, num_processes: int, *arguments: str):
    return workplace.torchrun(num_processes, "tiny", "--find-max-microbatch", *arguments)


def tried(output: str) -> dict[int, bool]:
    """Read the table of trials: whether each microbatch fitted."""
    rows = re.findall(r"^ +([\d,]+) +(\d|out of memory)", output, re.MULTILINE)
    return {int(size.replace(",", "")): result != "out of memory" for size, result in rows}


def test_an_error_is_printed_once_by_all_processes_together(workplace: Workplace) -> None:
    workplace.add_run(train={"global_batch_size": 9, "gradient_accumulation_steps": None})
    before = workplace.files()
    result = run_search(workplace, 2, "--memory-limit-gib", "1", "--save")
    lines = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1
    assert "global_batch_size 9 is not divisible by 2 processes, so nothing" in lines[0]
    assert "exitcode  : 2" in result.stderr and result.stdout == ""
    assert 'ddp_train.py", line' not in result.stderr, "a traceback"
    assert workplace.files() == before


@pytest.mark.thorough
def test_a_search_on_real_memory_ends_at_the_largest_that_fits(workplace: Workplace) -> None:
    path = workplace.add_run(model=LARGE_VOCABULARY, train=ONE_CHUNK) / "train.json"
    before = workplace.files().keys()
    output = succeeded(workplace.ddp_train(
        "tiny", "--find-max-microbatch", "--memory-limit-gib", LIMITS[0], "--save",
        "--nproc-per-node", "2")).stdout
    largest = json.loads(path.read_text())["microbatch_size"]
    assert f"\nlargest microbatch: {largest}\n" in output and largest > 1
    assert tried(output)[largest] and not tried(output)[largest + 1]
    assert workplace.files().keys() - before == {str(path.with_name("microbatch-search.json"))}


@pytest.fixture
def thorough(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--thorough"):
        pytest.skip("takes up to a minute: --thorough")


def search_and_try_all(workplace: Workplace, num_processes: int, limits: str) -> int:
    """Search, then try every microbatch up to two more; return the largest that fits.

    Args:
        limits: GiB that the processes may use, by rank.
    """
    result = succeeded(forked("tests/support/torchrun_workers.py", [
        "find-max-microbatch", str(workplace.root), limits], num_processes=num_processes))
    reports = [json.loads(line) for line in result.stdout.splitlines() if line[:1] == "{"]
    assert len(reports) == num_processes and all(report == reports[0] for report in reports)
    fitted = {int(size): fits for size, fits in reports[0]["tried"].items()}
    largest = max(size for size, fits in fitted.items() if fits)
    assert len(fitted) <= MAX_TRIALS and fitted[largest + 1] is False
    assert reports[0]["all"] == [True] * largest + [False, False]
    assert reports[0]["most_gib"] <= min(map(float, limits.split(","))) + 0.002
    assert reports[0]["random_state_kept"]
    return largest


def test_the_true_maximum_is_found_on_real_memory(workplace: Workplace, thorough: None) -> None:
    workplace.add_run(model=LARGE_VOCABULARY, train=ONE_CHUNK)  # it accumulates; there is no data
    before = workplace.files()
    found = {(num_processes, limit): search_and_try_all(workplace, num_processes, limit)
             for num_processes in (1, 2) for limit in LIMITS}
    for num_processes in (1, 2):
        sizes = [found[num_processes, limit] for limit in LIMITS]
        assert sizes == sorted(set(sizes)), "more memory, larger microbatch"
    assert workplace.files() == before


def test_the_limit_holds_without_gradient_accumulation(
    workplace: Workplace, thorough: None
) -> None:
    workplace.add_run(model=LARGE_VOCABULARY, train=ONE_CHUNK | {"gradient_accumulation_steps": 1})
    assert search_and_try_all(workplace, 2, "0.25,0.13") == search_and_try_all(
        workplace, 2, "0.13")


def test_the_process_with_the_least_memory_decides_and_none_hangs(
    workplace: Workplace, thorough: None
) -> None:
    workplace.add_run(model=LARGE_VOCABULARY, train=ONE_CHUNK)
    assert search_and_try_all(workplace, 2, "0.25,0.12") == search_and_try_all(
        workplace, 2, "0.12,0.25") == search_and_try_all(workplace, 2, "0.12")


def test_a_model_that_only_fails_in_the_optimizers_first_step_does_not_fit(
    workplace: Workplace, thorough: None
) -> None:
    # 50 MiB of weights, as much in gradients and 10 MiB of activations fit, but not AdamW's two
    # moments as well.
    workplace.add_run(model={"emb_dim": 1024, "context_length": 128, "n_heads": 4, "n_layers": 1,
                             "drop_rate": 0.0})
    result = run_search(workplace, 1, "--memory-limit-gib", "0.19")
    assert "not even a microbatch of 1 fits" in result.stderr
    assert tried(result.stdout) == {1: False}
    output = succeeded(run_search(workplace, 1, "--memory-limit-gib", "0.26")).stdout
    assert re.search(r"^largest microbatch: [1-9]$", output, re.MULTILINE)


@pytest.mark.thorough
def test_no_process_outlives_a_search_that_was_killed(workplace: Workplace) -> None:
    workplace.add_run(model=LARGE_VOCABULARY, train=ONE_CHUNK)
    mark = f"MARK_{uuid.uuid4().hex}"
    command = [*torchrun_command(2, "ddp_train.py"), *workplace.arguments(
        "tiny", "--find-max-microbatch", "--memory-limit-gib", "20")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                               env=os.environ | {mark: "1"}, text=True)
    try:
        assert process.stdout.readline() and process.stdout.readline()  # the first trial is done
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
    """List the processes that have inherited an environment variable and are not zombies."""
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
