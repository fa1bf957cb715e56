"""Workers that tests start under torchrun to look inside several processes; memory of a step."""

import gc
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

import ddp_train
from gpt import ForwardOptions, GPTModel
from processes.distributed import Process, process_group, this_process
from processes.startup_agreement import open_torchrun_store
from processes.watchdog import Watchdog
from reporting import clock, loss_window
from reporting.clock import PhaseClock
from reporting.gpus import find_gpu
from run_config import ModelConfig, Stage, TrainConfig, load_run
from tests.support.stand_ins import H100, FakeNvml
from tests.support.workplace import PROJECT_DIR, TINY_TRAIN
from trainer import background_saver, budget, loss_functions, machine_readings
from trainer.chart_drawing import ChartDrawing
from trainer.loss_functions import build_training_state
from trainer.microbatch_trial import random_microbatches
from trainer.precision import resolve_for_device

GPT2_SMALL = {
    "vocab_size": 50257,
    "context_length": 1024,
    "emb_dim": 768,
    "n_heads": 12,
    "n_layers": 12,
}
MANY_TOKENS = {
    "vocab_size": 257,
    "context_length": 256,
    "emb_dim": 128,
    "n_heads": 4,
    "n_layers": 2,
}
MANY_WORDS = {"vocab_size": 8192, "context_length": 128, "emb_dim": 64, "n_heads": 2, "n_layers": 2}
WIDE = {"vocab_size": 1000, "context_length": 16, "emb_dim": 256, "n_heads": 4, "n_layers": 1}


def stepping(
    model: ModelConfig, train: TrainConfig, process: Process
) -> tuple[ddp_train.TrainingStep, Callable[[], Any]]:
    """Build a step, and a function that takes it on random tokens. Every rank."""
    train = resolve_for_device(train, process.device)
    step = ddp_train.TrainingStep(build_training_state(model, train, process), train, process)
    batches = random_microbatches(model, train.microbatch_size, process.device)
    return step, lambda: step.take(
        batches, num_microbatches=train.gradient_accumulation_steps, learning_rate=1e-3
    )


def peak_of_training(model: ModelConfig, train: TrainConfig, process: Process) -> int:
    """Return the peak bytes of tensors in a step, from the second step on. Every rank.

    On a CPU, the bytes held between two steps and the peak that the profiler sees in the third: in
    the first two it would miss what gloo's threads free, the weights that DDP broadcasts and the
    buckets that it rebuilds.
    """
    if process.device.type == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(process.device)
        torch.cuda.reset_peak_memory_stats(process.device)
        _, take = stepping(model, train, process)
        for _ in range(3):
            take()
        return torch.cuda.max_memory_allocated(process.device) - before
    step, take = stepping(model, train, process)
    optimizer, buckets = step.state.optimizer, [{}]
    parameters = list(step.state.model.parameters())
    if process.world_size > 1:
        optimizer.register_step_pre_hook(
            lambda *_: buckets.append(_storages(p.grad for p in parameters))
        )
    take(), take()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    held = _storages([*parameters, *moments]) | buckets[-1]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        take()
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return sum(held.values()) + max(itertools.accumulate(changes))


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of each storage, by its address: views count once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def main() -> None:
    name = sys.argv[1]
    if name == "peak-memory":
        peak_memory(Path(sys.argv[2]))
        return
    del sys.argv[1:3]
    {
        "train-in-fake-time": train_in_fake_time,
        "train-with-lag": train_with_lag,
        "train-with-gpus": train_with_gpus,
        "count-compilations": count_compilations,
        "count-models": count_models,
        "files-of-a-step": name_files_of_a_step,
    }[name]()
    ddp_train.main()


def peak_memory(root: Path) -> None:
    """Print the peak memory of a step of the run `tiny`."""
    process, run = this_process(), load_run(root / "runs", "tiny")
    with process_group(process, open_torchrun_store(), TrainConfig(**TINY_TRAIN)):
        peak = peak_of_training(run.model, run.config, process)
        if process.is_main:
            print(peak)


def train_in_fake_time() -> None:
    """Be ddp_train.py with a clock that moves by four milliseconds each time it is read."""
    ticks = itertools.count()
    clock.time = SimpleNamespace(perf_counter=lambda: next(ticks) / 250)
    budget.LAST_CHARTS_SECONDS = 0.04  # the end of a launch reads the clock a few times
    background_saver.time = SimpleNamespace(perf_counter=lambda: 0.0, monotonic=time.monotonic)
    PhaseClock.since_process_start = lambda: PhaseClock(since=0.0)
    PhaseClock.total_seconds = lambda _: 0.0  # heartbeats come by real time


def train_with_lag() -> None:
    """Be ddp_train.py with reports that are one window late, as on a GPU."""
    loss_window.LAG["cpu"] = 1


def train_with_gpus() -> None:
    """Be ddp_train.py on a CPU with a stand-in's two GPUs; each reading adds 1 kWh to the first."""
    energy = itertools.count(0, 3_600_000_000)  # millijoules
    gpu = H100 | {"nvmlDeviceGetTotalEnergyConsumption": lambda: next(energy)}
    sys.modules["pynvml"] = FakeNvml({"GPU-0": gpu, "GPU-1": H100})
    machine_readings.gpu_uuids = lambda _: ["GPU-0", "GPU-1"]
    machine_readings.find_gpu = lambda _: find_gpu("H100")


def count_compilations() -> None:
    """Be ddp_train.py with a fast backend; after each save rank 0 prints what was compiled."""
    compile_with = loss_functions.torch.compile
    loss_functions.torch.compile = lambda function, **options: compile_with(
        function, backend="aot_eager", **options
    )
    checkpoint, end = ChartDrawing.checkpoint, ddp_train.Trainer.end

    def checkpoint_and_counts(drawing: ChartDrawing) -> None:
        checkpoint(drawing)
        counts = {kind: dict(counters[kind]) for kind in ("frames", "stats", "graph_break")}
        drawing.log.say(f"compiled: {json.dumps(counts)}")

    def end_and_counts(trainer: ddp_train.Trainer, global_step: int) -> None:
        end(trainer, global_step)
        trainer.log.say(f"graphs in the end: {counters['stats']['unique_graphs']}")

    ChartDrawing.checkpoint, ddp_train.Trainer.end = checkpoint_and_counts, end_and_counts


def count_models() -> None:
    """Be ddp_train.py; rank 0 prints how many models exist after a growth, and at the end."""
    add_layers, end = ddp_train.Trainer.add_layers, ddp_train.Trainer.end

    def say(trainer: ddp_train.Trainer, when: str) -> None:
        gc.unfreeze()  # else the frozen ones are not listed
        models = [each for each in gc.get_objects() if isinstance(each, GPTModel)]
        trainer.log.say(f"models {when}: {len(models)}")

    def add_and_count(trainer: ddp_train.Trainer, stage: Stage) -> None:
        add_layers(trainer, stage)
        say(trainer, "after the growth")

    def count_and_end(trainer: ddp_train.Trainer, global_step: int) -> None:
        say(trainer, "at the end")
        end(trainer, global_step)

    ddp_train.Trainer.add_layers, ddp_train.Trainer.end = add_and_count, count_and_end


def name_files_of_a_step() -> None:
    """Be ddp_train.py; at the end print the files whose functions the fourth step has called.

    The model takes the paths of a GPU, but nothing is compiled: that would hide the calls.
    """
    loss_functions.torch.compile = lambda function, **options: function
    choose = loss_functions.choose_forward_options

    def choose_as_on_a_gpu(*arguments: Any) -> ForwardOptions:
        return replace(choose(*arguments), attention="auto", adds_bias_apart=True)

    loss_functions.choose_forward_options = choose_as_on_a_gpu
    files: set[str] = set()
    step: list[int] = []

    def note_file(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and step == [3] and path.is_relative_to(PROJECT_DIR):
            files.add(str(path.relative_to(PROJECT_DIR)))

    heartbeat, train = Watchdog.heartbeat, ddp_train.Trainer.train

    def heartbeat_and_step(watchdog: Watchdog, global_step: int | None = None) -> None:
        if global_step is not None:
            step[:] = [global_step]
        heartbeat(watchdog, global_step)

    def train_and_name(trainer: ddp_train.Trainer, *arguments: Any) -> int:
        threading.setprofile(note_file)
        sys.setprofile(note_file)
        global_step = train(trainer, *arguments)
        sys.setprofile(None)
        ours = (file for file in files if not file.startswith((".venv", "tests/")))
        trainer.log.say(f"files of a step: {json.dumps(sorted(ours))}")
        return global_step

    Watchdog.heartbeat, ddp_train.Trainer.train = heartbeat_and_step, train_and_name


if __name__ == "__main__":
    main()
