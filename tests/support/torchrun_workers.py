"""Workers that tests start under torchrun to look inside several processes."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import ddp_train
from basics.errors import UserError
from benchmarks.memory_model import peak_of_training
from ddp_train import Trainer, TrainingStep
from processes.command_line import Options
from processes.launch import process_group, this_process
from processes.startup_agreement import Agreement, open_store
from processes.watchdog import Watchdog
from reporting import clock, loss_window
from reporting.clock import PhaseClock
from reporting.loss_window import LossWindow
from reporting.speed import find_gpu
from run_config import TrainConfig, load_run
from tests.support.fake_nvml import H100, FakeNvml
from tests.support.workplace import TINY_TRAIN
from trainer import background_saver, compilation, reports, stopping
from trainer.reports import Reports
from trainer.startup import build_state, prepare_run


def main() -> None:
    name, root = sys.argv[1], Path(sys.argv[2])
    if name == "train-in-fake-time":
        train_in_fake_time()
        return
    if name == "train-with-lag":
        train_with_lag()
        return
    if name == "train-with-gpus":
        train_with_gpus()
        return
    if name == "count-compilations":
        count_compilations()
        return
    process = this_process()
    print_result = print if process.is_main else (lambda *_: None)
    if name in AGREEMENTS:
        check_agreement(Agreement(process.rank, process.world_size), AGREEMENTS[name])
        return
    with process_group(process, open_store("test"), TrainConfig(**TINY_TRAIN)) as group:
        if name == "count-all-reduces":
            print_result(json.dumps(count_all_reduces(root, process, group)))
        elif name == "average-losses":
            print_result(json.dumps(average_losses(process)))
        elif name == "peak-memory":
            run = load_run(root / "runs", "tiny")
            print_result(peak_of_training(run.model, run.train, process))


def count_all_reduces(root: Path, process, group) -> dict[str, list]:
    """All-reduces after each microbatch of a global step; which steps keep their gradients."""
    options = Options("tiny", datasets_dir=root / "datasets", runs_dir=root / "runs")
    clock = PhaseClock()
    prepared = prepare_run(options, process, clock, Agreement.in_one_process()).for_device(
        process.device)
    watchdog = Watchdog(process, open_store("watch"), phase=lambda: clock.current)
    trainer = Trainer(prepared, build_state(prepared, process), watchdog,
                      clock=clock, group=group)
    trainer.step = TrainingStep(trainer.state, trainer.config, process)
    microbatches = ddp_train.read_microbatches(prepared, watchdog, clock)
    counted, after_each = [0], []

    def hook(group, bucket):
        counted[0] += 1
        return allreduce_hook(group, bucket)

    trainer.step.parallel_loss.register_comm_hook(dist.group.WORLD, hook)
    scale = trainer.step.state.scaler.scale

    def watched_scale(loss):
        after_each.append(counted[0])  # before this microbatch's backward
        return scale(loss)

    trainer.step.state.scaler.scale = watched_scale
    trainer.step.take(microbatches, learning_rate=0.01,
                      num_microbatches=trainer.plan.gradient_accumulation_steps)
    all_reduces, keeps_gradients = [*after_each[1:], counted[0]], []
    for num_microbatches in (2, 1):
        trainer.step.take(microbatches, learning_rate=0.01,
                          num_microbatches=num_microbatches)
        keeps_gradients.append(trainer.state.model.final_norm.weight.grad is not None)
    return {"all_reduces": all_reduces, "keeps_gradients": keeps_gradients}


def average_losses(process) -> dict[str, float]:
    window = LossWindow(process.device)
    for step in range(4):
        window.add(torch.tensor(float(step + 10 * process.rank)), torch.tensor(2.0 * step))
    window.add(torch.tensor(float("nan")), torch.tensor(float("inf")))
    window.close(4, 1e-3, PhaseClock())
    (closed,) = window.take(waits=False)
    summary = vars(window.summarise(closed))
    return summary | {"since_checkpoint": window.take_loss_since_checkpoint()}


def train_in_fake_time() -> None:
    """Be ddp_train.py with a clock that moves by a millisecond each time it is read."""
    ticks = itertools.count()
    clock.time = SimpleNamespace(perf_counter=lambda: next(ticks) / 1000)
    stopping.LAST_CHARTS_SECONDS = 0.0
    background_saver.time = SimpleNamespace(perf_counter=lambda: 0.0)
    PhaseClock.since_process_start = lambda: PhaseClock(since=0.0)
    del sys.argv[1:3]
    ddp_train.main()


def train_with_lag() -> None:
    """Be ddp_train.py with reports that are one window late, as on a GPU."""
    loss_window.LAG["cpu"] = 1
    del sys.argv[1:3]
    ddp_train.main()


def train_with_gpus() -> None:
    """Be ddp_train.py on a CPU with a stand-in's two GPUs; each reading adds 1 kWh to the first."""
    energy = itertools.count(0, 3_600_000_000)  # millijoules
    gpu = H100 | {"nvmlDeviceGetTotalEnergyConsumption": lambda: next(energy)}
    sys.modules["pynvml"] = FakeNvml({"GPU-0": gpu, "GPU-1": H100})
    reports.gpu_uuids = lambda _: ["GPU-0", "GPU-1"]
    reports.find_gpu = lambda _: find_gpu("H100")
    del sys.argv[1:3]
    ddp_train.main()


def count_compilations() -> None:
    """Be ddp_train.py with a fast backend; after each save rank 0 prints what was compiled."""
    compile_with = compilation.torch.compile
    compilation.torch.compile = lambda function, **options: compile_with(
        function, backend="aot_eager", **options)
    charts, end = Reports.draw_charts, Reports.end

    def charts_and_counts(reports: Reports) -> None:
        charts(reports)
        counts = {kind: dict(counters[kind]) for kind in ("frames", "stats", "graph_break")}
        reports.console.say(f"compiled: {json.dumps(counts)}")

    def end_and_counts(reports: Reports, *arguments: object, **keywords: object) -> None:
        end(reports, *arguments, **keywords)
        reports.console.say(f"graphs in the end: {counters['stats']['unique_graphs']}")

    Reports.draw_charts, Reports.end = charts_and_counts, end_and_counts
    del sys.argv[1:3]
    ddp_train.main()


def mistake(agreement: Agreement, rank: int) -> None:
    def find_mistake() -> None:
        if rank == 1:
            raise UserError("rank 1 lacks its file")

    agreement.run("second", find_mistake)


def crash(agreement: Agreement, rank: int) -> None:
    def fail() -> None:
        if rank == 1:
            raise MemoryError("no room")

    agreement.run("second", fail)


def difference(agreement: Agreement, rank: int) -> None:
    agreement.require_same("equal", "a")
    agreement.require_same("unequal", f"rank {rank}")


AGREEMENTS = {"mistake": mistake, "crash": crash, "difference": difference}


def check_agreement(agreement: Agreement, disagree) -> None:
    """Both ranks must stop, and one must tell."""
    rank = agreement._rank
    assert agreement.run("first", lambda: rank) == rank
    try:
        disagree(agreement, rank)
    except UserError as error:
        agreement.exit(error)


if __name__ == "__main__":
    main()
