"""The learning-rate range test: on synthetic losses, in process, and with two processes."""

import errno
import json
import re
import signal
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

import ddp_train
from basics.errors import BAD_INPUT, DISK_FULL, NON_FINITE, STOP_SIGNALS, UserError
from basics.failpoints import VARIABLE
from ddp_train import TrainingStep
from optim import set_rates
from processes.command_line import Options
from processes.launch import Process
from processes.run_lock import lock_run, release_run
from processes.signals import DEADLINES
from processes.startup_agreement import AgreedError, Agreement
from reporting import charts
from run_config import load_run
from tests.support.runs import assert_refused, contents, run_in_process
from tests.support.workplace import succeeded
from trainer import learning_rate_search
from trainer.learning_rate_search import (
    CHART_NAME,
    RATES,
    run_range_test,
    suggest,
    suggested_rates,
)
from trainer.losses import build_training_state
from trainer.precision import resolve_for_device

CPU = Process(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
LONG_ENOUGH = {"min_train_tokens": -1, "gradient_accumulation_steps": 1}


@pytest.fixture
def tiny(workplace):
    """A run that has enough steps on two processes."""
    workplace.add_run(model={"n_layers": 1}, train=LONG_ENOUGH)
    workplace.add_dataset(num_tokens=64 * len(RATES) + 1)
    return load_run(workplace.runs_dir, "tiny")


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def curve(rate):
    """A loss that is lowest at 0.01, noisy, and diverges above 0.1."""
    noise = 0.1 * np.random.default_rng(0).standard_normal(len(RATES))
    fall = 2.5 + 0.8 * np.abs(np.log10(rate / 0.01)) + np.maximum(0, rate - 0.1) * 40
    return fall + noise[np.searchsorted(RATES, rate)]


def change_config(run, changes):
    values = json.loads(run.train_path.read_text())
    run.train_path.write_text(json.dumps(values | changes))


def test_only_a_loss_that_is_not_finite_or_a_lasting_rise_ends_the_test(one_process):
    def run_test(losses):
        """Run a test on a step that has these losses."""
        watchdog = SimpleNamespace(process=CPU, start_hang_detection=lambda _: None)
        remaining = iter(losses.tolist())
        return run_range_test(lambda _: torch.tensor(next(remaining)), watchdog, 1.0)

    for bad in (np.nan, np.inf):
        losses = run_test(np.array([*curve(RATES)[:250], bad]))
        assert losses == pytest.approx(curve(RATES)[:250].tolist())
    one_is_high = np.full(len(RATES), 3.0)
    one_is_high[100] = 20.0
    assert len(run_test(one_is_high)) == len(RATES)


def test_the_suggestion_follows_from_the_lowest_smoothed_loss():
    assert suggest(curve(RATES)) == pytest.approx(learning_rate_search.FRACTION * 0.01, rel=0.3)
    assert suggest(5 + 0.1 * np.random.default_rng(2).standard_normal(len(RATES))) is None  # noise
    assert suggest(5 + np.log10(RATES / RATES[0])) is None  # only rises


@pytest.mark.parametrize("options", [
    {}, {"embedding_learning_rate": 0.05, "matrix_learning_rate": 0.01},
    {"optimizer": "muon", "matrix_learning_rate": 0.07, "vector_learning_rate": 0.002}])
def test_the_suggested_keys_give_every_group_the_rate_that_was_tested(workplace, options):
    workplace.add_run(train=options)
    run = load_run(workplace.runs_dir, "tiny")
    optimizer = optimizer_of(run)
    set_rates(optimizer, 0.003)
    tested = [group["lr"] for group in optimizer.param_groups]
    rates = suggested_rates(run.train, 0.003)
    changed = replace(run, train=run.train.model_copy(update=rates))
    assert [group["lr"] for group in optimizer_of(changed).param_groups] == pytest.approx(tested)
    assert set(rates) >= {"learning_rate", *(key for key in options if key.endswith("_rate"))}


def optimizer_of(run):
    train = resolve_for_device(run.train, CPU.device)
    return build_training_state(run.model, train, CPU).optimizer


def find(workplace, rates):
    """Run the test in this process, with other rates."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    options = Options("tiny", datasets_dir=workplace.datasets_dir, runs_dir=workplace.runs_dir,
                      find_learning_rate=True)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(learning_rate_search, "RATES", rates)
            ddp_train.find_learning_rate(options, CPU, Agreement.in_one_process())
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if dist.is_initialized():
            dist.destroy_process_group()


def test_a_rate_is_suggested_from_the_runs_first_microbatches_and_weights(tiny, workplace,
                                                                          monkeypatch, capsys):
    """Also where it diverges, and where the chart, the only new file, cannot be written."""
    seen, take = [], TrainingStep.take

    def watched(step, microbatches, **options):
        microbatch = next(microbatches)
        seen.append((microbatch.index, options["learning_rate"],
                     step.state.model.token_embedding.weight.sum().item()))
        return take(step, iter([microbatch]), **options)

    def fail(path, _):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(TrainingStep, "take", watched)
    monkeypatch.setattr(charts, "draw_by_hand", fail)
    change_config(tiny, {"precision": "bf16", "optimizer": "muon"})
    before = contents(workplace.root)
    rates = np.geomspace(1e-3, 1e4, 150)
    with pytest.raises(UserError, match=f"{CHART_NAME}: cannot be written: No space") as error:
        find(workplace, rates)
    assert error.value.status == DISK_FULL and contents(workplace.root) == before
    output = capsys.readouterr().out
    assert int(re.search(r"it diverged after (\d+) steps", output)[1]) < 150
    assert float(re.search(r'"learning_rate": ([\d.e-]+)$', output, re.MULTILINE)[1]) < 1
    assert '"matrix_learning_rate": ' in output and "keep their ratio" in output
    assert [index for index, _, _ in seen] == list(range(len(seen)))
    assert [rate for _, rate, _ in seen] == pytest.approx(rates[: len(seen)].tolist())
    fresh = build_training_state(tiny.model, resolve_for_device(tiny.train, CPU.device), CPU)
    assert seen[0][2] == fresh.model.token_embedding.weight.sum().item()


def test_a_test_without_a_result_writes_nothing(tiny, workplace, monkeypatch):
    before = contents(workplace.root)
    for fault, status, message in (
        ("gradient:nan", NON_FINITE, "the loss of the first step is not finite"),
        ("no-place:nan", BAD_INPUT, "the loss fell at no learning rate"),
    ):
        monkeypatch.setenv(VARIABLE, fault)
        with pytest.raises(AgreedError, match=message) as error:
            find(workplace, np.geomspace(1e-12, 1e-11, 60))
        assert error.value.status == status and contents(workplace.root) == before


@pytest.mark.parametrize(("too_short", "message"), [
    (False, "another launch"), (True, "takes 300 steps, and the run has 299")])
def test_a_run_that_is_being_trained_or_has_too_few_steps_is_refused(tiny, workplace, monkeypatch,
                                                                     too_short, message):
    monkeypatch.setenv(DEADLINES, '{"orphans": 0}')  # it is refused at once
    if too_short:
        change_config(tiny, {"min_train_tokens": 32 * (len(RATES) - 1)})
    else:
        lock_run(tiny.run_dir)
    before = contents(workplace.root)
    try:
        result = run_in_process(*workplace.arguments("tiny", "--find-learning-rate"),
                                under_torchrun=too_short)
    finally:
        release_run()
    assert_refused(result)
    assert message in result.stderr and contents(workplace.root) == before


def test_two_processes_leave_a_trained_run_as_it_was(tiny, workplace):
    """Also one that was killed, which leaves its last heartbeat."""
    succeeded(workplace.torchrun(1, "tiny", "--max-steps", "2"))
    (tiny.run_dir / "heartbeat.json").write_text("{}")
    before = contents(workplace.root)
    result = succeeded(workplace.ddp_train("tiny", "--nproc-per-node", "2", "--find-learning-rate"))
    assert result.stdout.count("suggestion") == 1
    after, chart = contents(workplace.root), tiny.run_dir / CHART_NAME
    assert Image.open(chart).size[0] > 100
    assert after.pop(str(chart)) and after == before


def test_ctrl_c_ends_all_processes_at_once_with_its_status(tiny, workplace):
    before = contents(workplace.root)
    fault = "train:signal:rank=0:hit=7:number=2;train:slow:seconds=0.05"
    result = workplace.ddp_train("tiny", "--nproc-per-node", "2", "--find-learning-rate",
                                 **{VARIABLE: fault})
    assert result.returncode == 128 + 2, result.stdout + result.stderr
    assert "learning-rate test stopped: SIGINT" in result.stdout
    assert "Traceback" not in result.stderr
    assert contents(workplace.root) == before
