"""The search for a microbatch, and --prefetch."""

import json
import os
import re
import resource
import sys
import threading
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.numpy import save

from basics.errors import UserError
from basics.files import lock_directory
from ddp_train import TrainingStep, measure_microbatch
from gpt import GPTModel
from lab.plan.speed_sources import measured_speed
from processes.command_line import Options
from processes.distributed import Process
from processes.startup_agreement import Agreement
from reporting.machine_time import read_uses
from run_config import ModelConfig, load_run
from tests.support.hub_server import Hub, serving
from tests.support.models import ONE_PROCESS, add_dataset_with_tokenizer, export, write_tokenizer
from tests.support.optional import example, given, settings, st
from tests.support.runs import run_in_process, tried
from tests.support.workplace import TINY_MODEL, run_command, succeeded
from trainer import commands, microbatch_trial
from trainer.microbatch_trial import TOO_SLOW, TRIAL_VARIABLE, MicrobatchTrial, Trial, check_idle

# A sequence takes 20 MiB in one chunk, or 30 with gradient accumulation.
LARGE_VOCABULARY = {
    "vocab_size": 20000,
    "context_length": 128,
    "emb_dim": 16,
    "n_layers": 1,
    "drop_rate": 0.0,
}


def memory(fixed, slope, capacity, floor=0.0):
    """Memory as a line over the microbatch, with a floor for the optimizer's step."""

    def train(size):
        demand = max(floor, fixed + slope * size)
        if demand > capacity:
            return Trial(size, fits=False)
        return Trial(size, True, demand, capacity, 1000.0 - abs(size - 4))

    return train


@settings(max_examples=300)
@example(fixed=2.0, slope=1.0, sequences=248.99999999999997, floor=1.0)
@given(
    fixed=st.floats(0.5, 20),
    slope=st.floats(0.05, 4),
    sequences=st.floats(1.1, 250),
    floor=st.floats(0, 1),
)
def test_the_true_maximum_is_found_in_eight_trials(fixed, slope, sequences, floor):
    capacity, floor = fixed + slope * sequences, fixed + 2 * slope * floor
    if floor > capacity:
        return
    trials = commands.find_max_microbatch(memory(fixed, slope, capacity, floor))
    sizes = [trial.microbatch_size for trial in trials]
    assert sizes[0] == 1 and len(set(sizes)) == len(sizes) <= commands.MAX_TRIALS
    fitting, failure = commands.by_size(trials)
    assert failure == fitting[-1].microbatch_size + 1, sizes


@settings(max_examples=300)
@given(fits_up_to=st.integers(1, 10_000), demand=st.sampled_from(["flat", "noisy", "falling"]))
def test_memory_that_is_no_line_still_ends_with_a_microbatch_that_fits(fits_up_to, demand):
    trials = commands.find_max_microbatch(
        lambda size: Trial(
            size,
            size <= fits_up_to,
            capacity_gib=80.0,
            demand_gib={"flat": 1.0, "noisy": 1.0 + hash(size) % 7, "falling": 10.0 / size}[demand],
        )
    )
    assert len(trials) <= commands.MAX_TRIALS and trials[0].fits


@pytest.mark.parametrize(
    ("train", "largest", "world_size", "size", "message"),
    [
        (
            {"global_batch_size": 96, "gradient_accumulation_steps": None},
            37,
            1,
            32,
            "microbatch_size 32; x accumulation 3 x 1 = global batch 96 (kept)",
        ),
        (
            {"global_batch_size": 96, "gradient_accumulation_steps": None},
            200,
            8,
            12,
            "microbatch_size 12; x accumulation 1 x 8 = global batch 96 (kept)",
        ),
        (
            {"microbatch_size": None, "minibatch_size": 3},
            5,
            2,
            5,  # an old name
            "microbatch_size 5; x accumulation 2 x 2 = global batch 20 (it follows the microbatch",
        ),
    ],
)
def test_saving_keeps_the_global_batch_and_every_other_key(
    workplace, train, largest, world_size, size, message
):
    path = workplace.add_run(train=train) / "train.json"
    before = json.loads(path.read_text())
    trials = [
        Trial(1, True, tokens_per_second=100.0),
        Trial(largest, True, tokens_per_second=200.0),
    ]
    assert message in commands.save_result(load_run(workplace.runs_dir, "tiny"), trials, world_size)
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
    monkeypatch.setattr(
        commands, "try_microbatch", lambda size, *_, **__: memory(1.0, 0.5, capacity)(size)
    )
    options = {"memory_limit_gib": 20.0} | options
    options = Options("tiny", runs_dir=workplace.runs_dir, **options)
    commands.search(commands.run_to_search(options, num_processes), options, num_processes)


def test_trials_and_result_are_printed_and_saved(workplace, monkeypatch, capsys):
    batch = {"global_batch_size": 12, "gradient_accumulation_steps": None}
    # 5 does not divide 12: the search corrects it.
    path = workplace.add_run(train=batch | {"microbatch_size": 5}) / "train.json"
    simulated_search(workplace, monkeypatch, capacity=3.7, save=True, usd_per_hour=36.0)
    text = capsys.readouterr().out
    assert text.startswith("estimate: at most 0:03:52, US$2.32, for 8 launches of 29 s: ")
    assert tried(text)[5] and not tried(text)[6]
    assert "\nlargest microbatch: 5\nfastest microbatch: 4 (1,000 tokens/s)\n" in text
    assert f"saved in {path}: microbatch_size 4; x accumulation 3 x 1" in text
    assert json.loads(path.read_text())["microbatch_size"] == 4
    trials = json.loads(path.with_name("microbatch-search.json").read_text())["trials"]
    assert [trial["fits"] for trial in trials if trial["microbatch_size"] == 6] == [False]


def test_a_search_on_a_gpu_says_what_fits_on_other_cards(workplace, monkeypatch, capsys):
    """1 GiB + 0.5 GiB a sequence, of 23.5 GiB less what CUDA and the allocator need: 42."""
    workplace.add_run()
    simulated_search(workplace, monkeypatch, capacity=3.7)
    assert "other cards" not in capsys.readouterr().out  # a CPU's address space tells nothing
    monkeypatch.setattr(commands, "num_gpus", lambda: 1)
    simulated_search(workplace, monkeypatch, capacity=3.7)
    *_, line = capsys.readouterr().out.splitlines()
    assert line.startswith("other cards, by the line 1 GiB + 0.5 GiB a sequence through the two")
    sizes = dict(re.findall(r"(\d+) GiB (\d+)", line))
    assert (sizes["24"], sizes["80"]) == ("42", "151")


def test_a_trial_that_fails_ends_the_search_and_keeps_what_it_has_found(
    workplace, monkeypatch, capsys
):
    path = workplace.add_run() / "train.json"
    train = memory(0.5, 0.1, 1000.0)

    def try_microbatch(size, *_, **__):
        if size > 4:
            raise UserError(f"microbatch {size} failed: {TOO_SLOW}", 1)
        return train(size)

    monkeypatch.setattr(commands, "try_microbatch", try_microbatch)
    options = Options("tiny", runs_dir=workplace.runs_dir, memory_limit_gib=1.0, save=True)
    commands.search(load_run(workplace.runs_dir, "tiny"), options, 1)
    text = capsys.readouterr().out
    assert "warning: the search ends here: microbatch 256 failed: took longer than 20 min" in text
    assert "\nlargest microbatch: 4 (more may fit)\n" in text
    assert json.loads(path.read_text())["microbatch_size"] == 4


@pytest.mark.parametrize(
    ("train", "options", "message"),
    [
        ({}, {"memory_limit_gib": None}, "without a GPU: give --memory-limit-gib"),
        ({}, {"capacity": 1.2}, "not even a microbatch of 1 fits"),
        (
            {"gradient_accumulation_steps": None, "global_batch_size": 9, "microbatch_size": 1},
            {"num_processes": 2},
            "global_batch_size 9 is not divisible by 2 processes",
        ),
    ],
)
def test_a_search_that_is_impossible_says_why(workplace, monkeypatch, train, options, message):
    workplace.add_run(train=train)
    before = workplace.files()
    with pytest.raises(UserError, match=message):
        simulated_search(workplace, monkeypatch, **{"capacity": 3.7, "save": True} | options)
    assert workplace.files() == before


LOST_PEER = "RuntimeError: [gloo/pair.cc:534] Connection closed by peer"


@pytest.mark.parametrize(
    ("on_gpu", "size", "errors", "stderr", "message"),
    [
        (True, 3, ["out of memory: RuntimeError: of the compiler", LOST_PEER], "", None),
        (True, 3, [], "torch.AcceleratorError: CUDA error: out of memory", None),
        (False, 3, [LOST_PEER], "", None),  # on a CPU libraries crash
        (False, 1, ["UserError: attention is"], "", "microbatch 1 failed: UserError: attention is"),
        (True, 3, ["KeyError: x", LOST_PEER], "", "microbatch 3 failed: KeyError: x"),
        (True, 3, [], "a line\nthe last line\n", "microbatch 3 failed: the last line"),
        (True, 3, [], "", "microbatch 3 failed: exit status 139"),
        (False, 3, [TOO_SLOW, LOST_PEER], "", "microbatch 3 failed: took longer than 20 minutes"),
    ],
)
def test_a_failed_trial_does_not_fit_or_is_an_error_with_its_reason(
    monkeypatch, on_gpu, size, errors, stderr, message
):
    def start(num_processes, logs_dir):
        logs_dir.mkdir()
        (logs_dir / "stderr.log").write_text(stderr)
        for rank, text in enumerate(errors):  # in the order in which they fail
            path = logs_dir.parent / f"result.rank{rank}"
            path.write_text(text)
            os.utime(path, (rank, rank))
        return 139

    monkeypatch.setattr(commands, "start_torchrun", start)
    if message is None:
        assert not commands.try_microbatch(size, 2, on_gpu=on_gpu).fits
        return
    with pytest.raises(UserError, match=message):
        commands.try_microbatch(size, 2, on_gpu=on_gpu)


@pytest.fixture
def trial_of(workplace, monkeypatch):
    """Build a trial of the run `tiny` in this process."""
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)

    def trial(microbatch_size, process=ONE_PROCESS):
        monkeypatch.setenv(
            TRIAL_VARIABLE,
            json.dumps(
                {
                    "microbatch_size": microbatch_size,
                    "path": str(workplace.root / "result"),
                    "prefetches": False,
                    "n_layers": None,
                }
            ),
        )
        options = Options("tiny", runs_dir=workplace.runs_dir, memory_limit_gib=1.0)
        return MicrobatchTrial(options, process, Agreement.in_one_process())

    yield trial
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_trial_includes_the_optimizers_state(workplace, monkeypatch, trial_of):
    # At fp16's usual initial scale, the steps would overflow and be skipped.
    workplace.add_run(model={"init": "torch", "tie_weights": True}, train={"precision": "fp16"})
    states, take = [], TrainingStep.take

    def recorded(step, *arguments, **options):
        states.append(step.state)
        return take(step, *arguments, **options)

    monkeypatch.setattr(TrainingStep, "take", recorded)
    measure_microbatch(trial_of(2))
    taken = {float(each["step"]) for each in states[0].optimizer.state.values()}
    assert taken == {len(states)} and len(states) > 1
    found = Trial(**json.loads((workplace.root / "result").read_text()))
    assert found.fits and found.microbatch_size == 2 and found.device
    assert found.tokens_per_second > 0 and found.capacity_gib == 1.0


def test_a_trial_of_sampled_softmax_times_one_step_in_five_with_all_entries(
    workplace, monkeypatch, trial_of
):
    workplace.add_run(train={"sampled_softmax": 100})
    are_sampled, take = [], TrainingStep.take

    def recorded(step, *arguments, **options):
        taken = take(step, *arguments, **options)
        are_sampled.append(step.state.model.candidates is not None)
        return taken

    monkeypatch.setattr(TrainingStep, "take", recorded)
    measure_microbatch(trial_of(2))
    warm_up_steps, _ = microbatch_trial.STEPS["cpu"]
    assert sorted(are_sampled[warm_up_steps:]) == [False, True, True, True, True]


@pytest.mark.parametrize("fails", [True, False])
def test_a_trial_that_fails_or_takes_too_long_says_why_and_ends(
    workplace, monkeypatch, trial_of, fails
):
    workplace.add_run()
    left = threading.Event()
    monkeypatch.setattr(microbatch_trial, "leave", lambda status: left.set())
    if not fails:
        monkeypatch.setattr(microbatch_trial, "TRIAL_TIMEOUT", timedelta(seconds=2))
    with trial_of(2).measuring():
        if fails:
            raise MemoryError("of the host")
        assert left.wait(60)
    said = (workplace.root / "result.rank0").read_text()
    assert said == ("out of memory: MemoryError: of the host" if fails else TOO_SLOW)
    assert left.is_set()


@pytest.mark.parametrize(
    ("keys", "world_size", "microbatches"),
    [
        ({"gradient_accumulation_steps": 1}, 2, 1),
        ({"gradient_accumulation_steps": 64}, 2, 2),
        ({"gradient_accumulation_steps": None, "global_batch_size": 8}, 2, 2),
        ({"gradient_accumulation_steps": None, "global_batch_size": 8}, 8, 1),
    ],
)
def test_a_trial_accumulates_if_the_run_does(workplace, trial_of, keys, world_size, microbatches):
    workplace.add_run(train=keys)
    process = Process(0, 0, world_size, torch.device("cpu"))
    assert trial_of(1, process).num_microbatches == microbatches


def test_no_microbatch_is_tried_that_the_global_batch_has_no_use_for():
    trials = commands.find_max_microbatch(memory(1.0, 0.1, 1000.0), 12)
    assert max(trial.microbatch_size for trial in trials) == 12 and len(trials) <= 4
    trials = commands.find_max_microbatch(memory(1.0, 0.1, 1.9), 12)
    assert [trial.microbatch_size for trial in trials if trial.fits][-1] == 9  # as without


def test_a_search_on_real_memory_with_two_processes(workplace):
    workplace.add_run(model=LARGE_VOCABULARY, train={"head_chunks": 1})
    before = workplace.files()
    result = succeeded(
        workplace.ddp_train(
            "tiny", "--find-max-microbatch", "--memory-limit-gib", "0.12", "--nproc-per-node", "2"
        )
    )
    results = tried(result.stdout)
    largest = max(size for size, fitted in results.items() if fitted)
    assert f"\nlargest microbatch: {largest}\n" in result.stdout and largest > 1
    assert results[largest + 1] is False
    (use,) = read_uses(workplace.runs_dir / "tiny")  # the machine's time, and nothing else
    assert use.kind == "search" and use.until > use.began
    (workplace.runs_dir / "tiny/machine-time.jsonl").unlink()
    assert workplace.files() == before


SHORT = {"gradient_accumulation_steps": 1, "min_train_tokens": 128, "validation_batches": 1}


def test_all_that_is_there_is_verified_and_nothing_is_written(workplace):
    source, _ = add_dataset_with_tokenizer(workplace)
    write_tokenizer(source, vocab_size=257)
    run_dir = workplace.add_run(train={"init_from": str(source)})
    dataset_dir, before = workplace.datasets_dir / "tiny", workplace.files()
    descriptor = lock_directory(run_dir)  # as while it trains
    try:
        result = succeeded(run_in_process(*workplace.arguments("tiny", "--prefetch")))
    finally:
        os.close(descriptor)
    for line in (
        f"dataset: {dataset_dir}: ",
        "token ids: all are in the vocabulary of 257",
        f"tokenizer: {dataset_dir / 'tokenizer.json'}",
        f"initial weights: {source}: ",
        "compiled code: none, the run is not compiled here",
    ):
        assert f"\n{line}" in f"\n{result.stdout}"
    assert workplace.files() == before


@pytest.fixture
def hub(tmp_path):
    """A hub with a dataset and a model of the same name."""
    tokens = (np.cumsum(np.random.default_rng(0).integers(1, 4, size=4000)) % 257).astype(np.uint16)
    torch.manual_seed(0)
    weights = export(GPTModel(ModelConfig(**TINY_MODEL)), tmp_path / "exported")
    files = {
        "train.safetensors": save({"tokens": tokens}),
        "validation.safetensors": save({"tokens": tokens[:500]}),
        **{path.name: path.read_bytes() for path in weights.iterdir()},
    }
    with serving(Hub(files, repository="someone/tiny", kind="any")) as hub:
        yield hub


def test_what_is_downloaded_is_verified(workplace, hub):
    """In another process: the hub's client reads its settings when it is imported."""
    home = workplace.root / "home"
    workplace.add_run(train=SHORT | {"dataset": "someone/tiny", "init_from": "someone/tiny"})
    result = workplace.ddp_train("tiny", "--prefetch", **hub.environment(home))
    lines = succeeded(result).stdout.splitlines()
    assert ", 2 of 2 files compared" in lines[0]
    assert lines[3].startswith(f"initial weights: {home}/hub/models--someone--tiny/snapshots/")
    assert ", 1 of 1 files compared" in lines[3]


@pytest.mark.parametrize(("grow", "depths"), [({}, [2]), ({"grow": {"at": 0.5}}, [1, 2])])
def test_the_step_is_compiled_by_as_many_processes_as_train_at_each_depth(
    workplace, monkeypatch, capsys, grow, depths
):
    run_dir, asked, fits = workplace.add_run(train={"compile": True} | grow), [], True
    workplace.add_dataset()

    def try_microbatch(*task, **options):
        asked.append((*task, options))
        return Trial(2, fits)

    monkeypatch.setattr(commands, "try_microbatch", try_microbatch)
    options = Options("tiny", datasets_dir=workplace.datasets_dir, runs_dir=workplace.runs_dir)
    commands.prefetch_run(options, replace(ONE_PROCESS, world_size=4))
    assert "compiled code: of 4 processes\n" in capsys.readouterr().out
    assert asked == [(2, 4, {"prefetches": True, "n_layers": depth}) for depth in depths]
    fits = False
    with pytest.raises(UserError, match=f"{run_dir}/train.json: microbatch_size 2 does not fit"):
        commands.prefetch_run(options, replace(ONE_PROCESS, world_size=4))


def test_a_gpu_in_use_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 * 2**30, 80 * 2**30))
    with pytest.raises(UserError, match="GPU 0 is in use, 10.0 of 80.0 GiB are free"):
        check_idle(torch.device("cuda", 0))


@pytest.mark.thorough
@pytest.mark.parametrize("grow", [None, {"at": 0.5}])
def test_a_run_compiles_nothing_afterwards(workplace, grow):
    workplace.add_run(train=SHORT | {"compile": True, "grow": grow})
    workplace.add_dataset()
    kept = []
    for options in (["--prefetch"], []):
        arguments = workplace.arguments("tiny", "--nproc-per-node", "2", *options)
        cache = workplace.root / "cache"
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
        succeeded(run_command(sys.executable, "ddp_train.py", *arguments, **environment))
        kept.append(set(cache.glob("fxgraph/*/*")))
    assert kept[0] and kept[0] == kept[1]
