"""What a GPU can tell about this trainer, in some minutes of a rented card.

    python benchmarks/gpu.py --parts facts,rows,kernels,rank --minutes 9.2
    python benchmarks/gpu.py --parts memory,ceilings,rows --minutes 2.3
    python benchmarks/gpu.py --parts curve,diagnostics,ladder --minutes 12
    python benchmarks/gpu.py --device cpu          # every part, with tiny shapes

Each part runs in a process of its own and has a time limit. Each figure is a line of OUTPUT as soon
as it exists, a failure with its reason. The page of all lines is printed at the end. A later call
with the same OUTPUT adds to it, and measures only rows of `rows` and `ladder` that it lacks.
"""

import itertools
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not benchmarks/
    from basics.entry_points import begin_command

    begin_command()  # OpenMP reads its limit when torch is imported

import click
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from basics.errors import one_line
from basics.files import append_whole
from basics.gpu_readings import read_gpus
from basics.machine import PROJECT_DIR, code_version
from benchmarks import throughput
from benchmarks.systems import NUM_BLOCKS, WARM_UP_STEPS, SystemTask, time_steps
from ddp_train import TrainingStep, wrap_in_ddp
from gpt import GPTModel, attend
from lab.plan.memory import GPT2_SMALL, Setting, peak_memory, size_name
from lab.table import Column, Table
from processes.distributed import Process
from reporting.loss_window import LAG, REPORT_INTERVAL
from run_config import ModelConfig, TrainConfig
from tokens.batches import Microbatch
from trainer.diagnostics import (
    Diagnostics,
    attention_statistics,
    forward_statistics,
    gradient_norms,
    head_statistics,
    parts_of,
    update_ratios,
)
from trainer.loss_functions import build_training_state
from trainer.microbatch_trial import random_microbatches
from trainer.precision import attention_kernel, autocast, choose_forward_options, resolve_for_device

Line = dict[str, Any]
TINY = ModelConfig(
    vocab_size=257,
    context_length=32,
    emb_dim=32,
    n_heads=2,
    n_layers=2,
    drop_rate=0.0,
    qkv_bias=False,
)
# Seconds that a part may take, the most decisive first. On an H100 (estimated): 20, 50, 330, 60,
# 50, 40, 15, 120, 230.
LIMITS = {
    "facts": 60,
    "curve": 120,
    "rows": 400,
    "rank": 120,
    "kernels": 100,
    "memory": 100,
    "ceilings": 60,
    "diagnostics": 180,
    "ladder": 400,
}
LEAST_SECONDS = 5.0  # that a part needs to begin
# Of a row, so that one cannot use up the part; a cold one takes 60 on a GPU. A CPU may be busy.
ROW_SECONDS = {"cuda": 100.0, "cpu": 300.0}
TINY_ROWS = ("ours", throughput.ORIGINAL, throughput.WHOLE_RUN)
TINY_STEPS, CURVE_STEPS = 40, 20
SHOWN_KERNELS = 40
CADENCES = (None, 100, 10, 1, None)  # of diagnostics; without them first and last
RANKS = 8  # of the machine that the part `rank` stands for


@dataclass(frozen=True)
class Place:
    """Where the parts measure: a device, and how large the shapes are there."""

    device: torch.device
    nanogpt: Path | None
    ends_at: float  # in time.monotonic(), of the part
    known: tuple[Line, ...] = ()  # of earlier calls

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def model(self) -> ModelConfig:
        return GPT2_SMALL if self.is_gpu else TINY

    def size(self, microbatch_size: int) -> int:
        return microbatch_size if self.is_gpu else 2

    def wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()


def config_for(device: torch.device, **keys: Any) -> TrainConfig:
    return resolve_for_device(TrainConfig(dataset="none", checkpoint_interval=1, **keys), device)


def build(
    place: Place, microbatch_size: int, *, world_size: int = 1, **changes: Any
) -> tuple[TrainingStep, Callable[[], Any]]:
    """Build a step of the place's model, and a function that takes it on random tokens."""
    config = config_for(place.device, microbatch_size=place.size(microbatch_size), **changes)
    process = Process(0, 0, world_size, place.device)
    step = TrainingStep(build_training_state(place.model, config, process), config, process)
    batches = random_microbatches(place.model, config.microbatch_size, place.device)
    return step, lambda: step.take(
        batches, learning_rate=1e-3, num_microbatches=config.gradient_accumulation_steps
    )


def attempt(row: Line, measure: Callable[[], Line]) -> Line:
    """Return a row with its figures, or why it has none: its error does not end the part."""
    try:
        return row | measure()
    # Whatever a GPU, its driver or a compiler raises: out of memory, no such kernel, and others.
    except Exception as error:
        return row | {"failed": one_line(f"{type(error).__name__}: {error}")}


def facts(place: Place) -> Iterator[Line]:
    versions = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
    }
    for name in ("triton", "transformers"):
        try:
            versions[name] = __import__(name).__version__
        except ModuleNotFoundError:
            versions[name] = "absent"
    yield {"code": code_version(), **versions}
    yield {"cpu_cores": os.cpu_count(), "host": socket.gethostname(), "gcc": shutil.which("gcc")}
    if place.is_gpu:
        drivers = {reading.driver_version for reading in read_gpus()}
        yield {
            "gpu": torch.cuda.get_device_name(place.device),
            "driver": ", ".join(drivers),
            "capability": torch.cuda.get_device_capability(place.device),
            "free_and_all_bytes": torch.cuda.mem_get_info(place.device),
        }
    config = config_for(place.device, microbatch_size=2)
    model = GPTModel(place.model, choose_forward_options(place.model, config, place.device))
    yield {
        "precision": config.precision,
        "attention": attention_kernel(model, config, place.device),
    }


def clocks_and_power() -> Line:
    """Read what limits a GPU's speed, as it works: its clocks in MHz, its power in watts."""
    import pynvml

    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    return {
        "sm_mhz": pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
        "sm_mhz_max": pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM),
        "memory_mhz": pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_MEM),
        "power_w": pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
        "power_limit_w": pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
    }


def curve(place: Place) -> Iterator[Line]:
    """Compare the losses of 20 steps with those of float32 on the CPU."""
    shape = {"vocab_size": 5000, "context_length": 128, "emb_dim": 256, "n_heads": 4, "n_layers": 4}
    model = ModelConfig(**TINY.model_dump() | (shape if place.is_gpu else {}))
    on_cpu = {"device": torch.device("cpu"), "precision": "fp32", "compile": False}
    rows: dict[str, Line] = {
        "cpu, fp32": on_cpu,
        "bf16": {"precision": "bf16"},
        "fp32": {"precision": "fp32", "compile": False},
    }
    if place.is_gpu:
        rows |= {"fp32, compiled": {"precision": "fp32"}, "fp16": {"precision": "fp16"}}
    reference = torch.empty(0)

    def measure(changes: Line) -> Line:
        nonlocal reference
        device = changes.pop("device", place.device)
        config = config_for(device, microbatch_size=8, **changes)
        process = Process(0, 0, 1, device)
        step = TrainingStep(build_training_state(model, config, process), config, process)
        batches = rising_tokens(model, device)
        losses = (
            torch.stack(
                [
                    # With 1e-3 the loss jumps, and then any rounding grows to tenths of a nat.
                    step.take(batches, num_microbatches=1, learning_rate=4e-4)[0]
                    for _ in range(CURVE_STEPS)
                ]
            )
            .float()
            .cpu()
        )
        if not len(reference):
            reference = losses
        return {
            "first_loss": losses[0].item(),
            "last_loss": losses[-1].item(),
            "largest_difference": (losses - reference).abs().max().item(),
        }

    for name, changes in rows.items():
        yield attempt({"row": name}, lambda changes=changes: measure(changes))  # type: ignore[misc]


def rising_tokens(model: ModelConfig, device: torch.device) -> Iterator[Microbatch]:
    """Yield microbatches of 8 sequences whose ids rise by 1 to 3."""
    generator = torch.Generator().manual_seed(0)
    while True:
        rises = torch.randint(1, 4, (8, model.context_length + 1), generator=generator)
        tokens = (rises.cumsum(1) % model.vocab_size).to(device)
        yield Microbatch(0, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def rows(place: Place) -> Iterator[Line]:
    """Measure rows of `benchmarks.throughput`, the most decisive first, while there is time."""
    tasks = throughput.tasks_of(place.device.type, place.nanogpt)
    if place.is_gpu:
        tasks = tasks[: len(throughput.FIRST_ON_GPU)]
        tasks.append(tasks[0])  # has the machine's speed changed meanwhile?
    else:
        chosen = [task for task in tasks if task.name in TINY_ROWS and task.model == tasks[0].model]
        tasks = [tiny_task(task) for task in chosen]
    yield from measure_tasks("rows", tasks, place)


def ladder(place: Place) -> Iterator[Line]:
    """Measure the rows of `benchmarks.throughput` that add one change at a time."""
    tasks = throughput.tasks_of(place.device.type)
    tasks = [task for task in tasks if task.name in throughput.LADDER]
    tasks = tasks if place.is_gpu else list(map(tiny_task, tasks))
    yield from measure_tasks("ladder", tasks, place)


def measure_tasks(part: str, tasks: list[SystemTask], place: Place) -> Iterator[Line]:
    """Measure tasks of one shape while there is time, each in processes of its own.

    A task that an earlier call has measured is left out.
    """
    done = Counter(
        line["row"]
        for line in place.known
        if line["part"] == part and "row" in line and not line.get("failed")
    )
    with tempfile.TemporaryDirectory(prefix="gpu-rows-") as folder:
        tokens_path = throughput.write_tokens(Path(folder) / "zipf", tasks[0])
        for task in tasks:
            if done[task.name]:
                done[task.name] -= 1
                continue
            left = place.ends_at - time.monotonic() - 5
            seconds = min(ROW_SECONDS[place.device.type], left)
            if seconds < 15:
                yield {"row": task.name, "failed": "no time was left"}
                continue
            line = throughput.measured(task, tokens_path, Path(folder), seconds)
            failed = {"failed": line["reason"]} if line["status"] == "failed" else {}
            yield {"row": task.name, "shape": task.shape} | line | failed


def tiny_task(task: SystemTask) -> SystemTask:
    return replace(
        task, shape=TINY.model_dump(), microbatch_size=2, global_batch_size=4, num_steps=TINY_STEPS
    )


def rank(place: Place) -> Iterator[Line]:
    """Time one process of eight: DDP, layers compiled separately, the others' work left out."""

    def gather(gathered: torch.Tensor, mine: torch.Tensor, **_: Any) -> MagicMock:
        gathered.view(RANKS, *mine.shape).copy_(mine)
        return MagicMock()

    def wrap(*arguments: Any) -> Any:
        dist.init_process_group(
            "nccl" if place.is_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1
        )
        return wrap_in_ddp(*arguments)

    def measure(changes: Line) -> Line:
        try:
            with (
                patch("torch.distributed.all_gather_into_tensor", gather),
                patch("ddp_train.wrap_in_ddp", wrap),
            ):
                step, take = build(place, 12, world_size=RANKS, **changes)
                tokens = (
                    step.config.microbatch_size
                    * place.model.context_length
                    * step.config.gradient_accumulation_steps
                )
                _, speed = time_steps(take, 40 if place.is_gpu else 7, tokens, place.device)
                seconds = [host_seconds(take, place) for _ in range(10)]
            del step.parallel_loss  # its threads must be gone before the process group
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        return {
            "step_ms": speed["step_ms"],
            "tokens_per_second": speed["tokens_per_second"],
            "host_ms": 1e3 * sorted(seconds)[5],
        }

    for changes in (
        {"optimizer": "adamw"},
        {"optimizer": "muon"},
        {"optimizer": "adamw", "gradient_accumulation_steps": 2},
    ):
        yield attempt(changes, lambda changes=changes: measure(changes))  # type: ignore[misc]


def host_seconds(take: Callable[[], Any], place: Place) -> float:
    """Return the seconds until the host has given a step's work to the idle device."""
    place.wait()
    started = time.perf_counter()
    take()
    return time.perf_counter() - started


def kernels(place: Place) -> Iterator[Line]:
    """Profile a step of one microbatch; beside each Triton kernel the bytes that it should move."""
    step, take = build(place, 64)
    for _ in range(3):
        take()
    place.wait()
    host = host_seconds(take, place)
    place.wait()
    started = time.perf_counter()
    take()
    place.wait()
    yield {
        "attention": attention_kernel(step.state.model, step.config, place.device),
        "step_ms": 1e3 * (time.perf_counter() - started),
        "host_ms": 1e3 * host,
    }
    activity = ProfilerActivity.CUDA if place.is_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        for _ in range(3):
            take()
        place.wait()
    spent = {}
    for event in profiler.key_averages():
        total = event.self_device_time_total if place.is_gpu else event.self_cpu_time_total
        if total:  # else it is a call of the host's, such as a launch
            spent[event.key] = {"calls": event.count // 3, "ms": total / 3e3}
    shown_first = sorted(spent, key=lambda name: -spent[name]["ms"])[:SHOWN_KERNELS]
    every = {key: sum(each[key] for each in spent.values()) for key in ("calls", "ms")}
    yield {"kernel": "all"} | every
    for name in shown_first:
        yield {"kernel": name} | spent[name]
    if place.is_gpu:  # the last, since it may take longer than all before
        for _ in range(10):
            take()
        yield attempt({}, clocks_and_power)  # the device is not done with these steps
        expected = expected_bytes(place.ends_at - time.monotonic() - 2)
        for name in shown_first:
            if gigabytes := expected.get(name):
                speed = gigabytes / spent[name]["ms"]  # GB a millisecond are TB a second
                yield {"counted for": name, "gb": gigabytes, "tb_per_s": speed}


def expected_bytes(seconds: float) -> dict[str, float]:
    """Return the GB that `benchmarks.gpu_code` counts for each kernel of that step, by name."""
    with suppress(subprocess.SubprocessError):
        printed = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu_code", "--json"],
            cwd=PROJECT_DIR,
            check=True,
            capture_output=True,
            text=True,
            timeout=max(0.1, seconds),
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        ).stdout
        return {
            one["name"]: one["num_bytes"] / 1e9 for one in map(json.loads, printed.splitlines())
        }
    return {}


def memory(place: Place) -> Iterator[Line]:
    """Compare the peak of a step, which accumulates two microbatches, with `lab plan`'s."""

    def measure(changes: Line) -> Line:
        keys = {key: value for key, value in changes.items() if key != "microbatch_size"}
        step, take = build(place, changes["microbatch_size"], gradient_accumulation_steps=2, **keys)
        config = step.config
        for _ in range(2):
            take()
        peak = None
        if place.is_gpu:
            torch.cuda.reset_peak_memory_stats()
            take()
            place.wait()
            peak = torch.cuda.max_memory_allocated() / 2**30
        setting = Setting(place.model, config, config.precision, 1, on_gpu=place.is_gpu)
        return {
            "microbatch_size": config.microbatch_size,
            "peak_gib": peak,
            "planned_gib": peak_memory(setting, config.microbatch_size).total / 2**30,
        }

    for changes in (
        {"microbatch_size": 64},
        {"microbatch_size": 64, "head_chunks": 4},
        {"microbatch_size": 64, "optimizer": "muon"},
        {"microbatch_size": 16, "compile": False},
    ):
        yield attempt(changes, lambda changes=changes: measure(changes))  # type: ignore[misc]
        if place.is_gpu:
            torch.cuda.empty_cache()


def ceilings(place: Place) -> Iterator[Line]:
    """Measure what the card reaches: copies, the model's matrix products, attention kernels."""
    dtype, model = torch.bfloat16, place.model
    tokens, C, T = place.size(64) * model.context_length, model.emb_dim, model.context_length

    def copy() -> Line:
        numbers = torch.ones(2**30 if place.is_gpu else 2**16, device=place.device, dtype=dtype)
        copied = torch.empty_like(numbers)
        seconds = median_seconds(lambda: copied.copy_(numbers), place, calls=10)
        return {"tb_per_s": 2 * numbers.nbytes / seconds / 1e12}

    yield attempt({"copy": "2 GiB"}, copy)
    head = -(-model.vocab_size // 128) * 128
    for name, inputs, outputs in (
        ("qkv", C, 3 * C),
        ("output", C, C),
        ("up", C, 4 * C),
        ("down", 4 * C, C),
        ("head", C, head),
    ):

        def products(inputs: int = inputs, outputs: int = outputs) -> Line:
            x, weight, grad = (
                torch.randn(shape, device=place.device, dtype=dtype)
                for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
            )

            def tflops(product: Callable[[], Any]) -> float:
                seconds = median_seconds(product, place, calls=10)
                return 2 * tokens * inputs * outputs / seconds / 1e12

            return {  # in the layouts of a linear layer
                "forward_tflops": tflops(lambda: F.linear(x, weight)),
                "input_gradient_tflops": tflops(lambda: grad @ weight),
                "weight_gradient_tflops": tflops(lambda: grad.T @ x),
            }

        yield attempt({"products": name}, products)
    shape = (place.size(64), T, 3, model.n_heads, C // model.n_heads)
    for kernel in ("auto", "flash", "cudnn") if place.is_gpu else ("auto",):

        def attention(kernel: str = kernel) -> Line:
            qkv = torch.randn(shape, device=place.device, dtype=dtype, requires_grad=True)
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
            out = attend(q, k, v, 0.0, kernel)
            grad = torch.randn_like(out)
            forward = median_seconds(lambda: attend(q, k, v, 0.0, kernel), place, calls=10)
            backward = median_seconds(  # without stacking the three gradients
                lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True),
                place,
                calls=10,
            )
            return {"forward_ms": 1e3 * forward, "backward_ms": 1e3 * backward}

        yield attempt({"attention": kernel}, attention)


def diagnostics(place: Place) -> Iterator[Line]:
    """Time steps by `diagnostics_interval`, read at reports as in a run, then what is measured."""
    step, take = build(place, 64)
    model, config = step.state.model, step.config

    def with_diagnostics(interval: int | None) -> Line:
        step.diagnostics = Diagnostics(interval, config.precision)
        lag = LAG[place.device.type] * REPORT_INTERVAL
        steps = itertools.count()

        def take_and_report() -> None:
            global_step = next(steps)
            step.diagnostics.begin_step(global_step)
            take()
            if (global_step + 1) % REPORT_INTERVAL == 0:
                for measured in step.diagnostics.pop_measured(up_to=global_step - lag):
                    measured.numbers  # noqa: B018

        num_steps = WARM_UP_STEPS + NUM_BLOCKS * max(shortest_block, interval or 0)
        tokens = config.microbatch_size * place.model.context_length
        _, speed = time_steps(take_and_report, num_steps, tokens, place.device)
        return {
            "step_ms": speed["step_ms"],
            "tokens_per_second": speed["tokens_per_second"],
        }

    shortest_block = 20 if place.is_gpu else 10
    for interval in CADENCES:
        if interval == 100 and not place.is_gpu:
            continue  # 500 steps take long without one
        yield attempt(
            {"every": interval or "none"},
            lambda interval=interval: with_diagnostics(interval),  # type: ignore[misc]
        )

    _, token_ids, targets = next(random_microbatches(place.model, 1, place.device))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    parts = parts_of(model)
    measuring = Diagnostics(1, config.precision)

    def everything() -> None:
        measuring.begin_step(0)
        measuring.before_update(model, token_ids, targets)
        measuring.after_update(model)

    def forward() -> None:
        with autocast(config.precision, place.device):
            forward_statistics(model, token_ids, targets)

    def head() -> None:
        with autocast(config.precision, place.device):
            head_statistics(model, x, targets.flatten())

    def copy() -> list[list[torch.Tensor]]:
        return [[weight.detach().clone() for weight in part] for part in parts]

    with torch.no_grad(), autocast(config.precision, place.device):
        x = model.embed(token_ids)
        q, k, _ = model.blocks[0].attention.project(model.blocks[0].attention_norm(x))
        x = model.final_norm(x).flatten(0, 1)
    before = copy()
    groups: dict[str, Callable[[], Any]] = {
        "all": everything,
        "forward pass with its statistics": forward,
        "of it attention": lambda: [attention_statistics(q, k) for _ in model.blocks],
        "of it logits and losses": head,
        "norms of gradients": partial(gradient_norms, parts),
        "copy of the weights": copy,
        "update ratios": partial(update_ratios, before, parts),
    }
    with torch.no_grad():
        for group, measure in groups.items():
            yield attempt(
                {"group": group},
                lambda measure=measure: {  # type: ignore[misc]
                    "ms": 1e3 * median_seconds(measure, place)
                },
            )


def median_seconds(
    work: Callable[[], Any], place: Place, *, calls: int = 1, repeats: int = 9
) -> float:
    """Return the median time of a call, after three warm-ups; waits for the device per `calls`."""
    times = []
    for _ in range(3 + repeats):
        place.wait()
        started = time.perf_counter()
        for _ in range(calls):
            work()
        place.wait()
        times.append((time.perf_counter() - started) / calls)
    return sorted(times[3:])[repeats // 2]


PARTS = {
    "facts": facts,
    "curve": curve,
    "rows": rows,
    "rank": rank,
    "kernels": kernels,
    "memory": memory,
    "ceilings": ceilings,
    "diagnostics": diagnostics,
    "ladder": ladder,
}


def run_part(name: str, seconds: float, output: Path, options: list[str]) -> None:
    """Run a part in a process of its own; write why it ended early, if it did."""
    command = [
        sys.executable,
        __file__,
        *options,
        "--only-part",
        name,
        "--output",
        str(output),
        "--ends-at",
        str(time.monotonic() + seconds),
    ]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
    )
    try:
        _, said = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        reason = f"ran out of time after {seconds:,.0f} s"
    else:
        if not process.returncode:
            return
        last = (said.strip().splitlines() or ["no message"])[-1]
        reason = f"status {process.returncode}: {one_line(last)}"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # with what it has started
            process.wait()
    append_whole(output, json.dumps({"part": name, "failed": reason}) + "\n")


def read_lines(output: Path) -> list[Line]:
    return list(map(json.loads, output.read_text().splitlines())) if output.exists() else []


def page(lines: list[Line]) -> str:
    """Format all lines as Markdown, a section for each part."""
    texts = []
    for part in dict.fromkeys(line["part"] for line in lines):
        found = [
            {key: value for key, value in line.items() if key != "part"}
            for line in lines
            if line["part"] == part
        ]
        texts.append(f"## {part}\n")
        if part in ("rows", "ladder"):
            texts += rows_page([line for line in found if "row" in line])
            found = [line for line in found if "row" not in line]
        # A table for each kind of line.
        for keys, group in itertools.groupby(found, key=lambda line: list(line)):
            cells = [[shown(line[key]) for key in keys] for line in group]
            texts += [Table([Column(key, "left") for key in keys], cells).markdown(), ""]
    return "\n".join(texts)


def rows_page(lines: list[Line]) -> list[str]:
    """Format measurements of speed: their table, curves that differ."""
    measured = [{"status": "failed", "reason": line.get("failed")} | line for line in lines]
    known = [line for line in measured if line.get("shape")]
    if not known:
        return []
    shape = ModelConfig(**known[0]["shape"])
    texts = [size_name(shape), "", *throughput.speed_table(measured, shape.flops_per_token), ""]
    references = throughput.REFERENCE, throughput.FIRST_OF_LADDER
    if any(line["row"] in references for line in known):
        texts += throughput.differences(known)
    return texts


def shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def parse_parts(_: Any, __: Any, text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PARTS:
            raise click.BadParameter(f"{name!r}: wanted some of {','.join(PARTS)}")
    return names


@click.command()
@click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    show_default=True,
    default="cuda" if torch.cuda.is_available() else "cpu",
)
@click.option("--parts", default=",".join(PARTS), show_default=True, callback=parse_parts)
@click.option("--minutes", type=float, default=20.0, show_default=True, help="Of all parts.")
@click.option(
    "--nanogpt",
    type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
    help="A copy of its repository.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False, resolve_path=True),
    default=Path("gpu.jsonl"),
    show_default=True,
    help="One file for each machine.",
)
@click.option("--only-part", hidden=True, help="Run this part in this process.")
@click.option("--ends-at", type=float, hidden=True, help="Its end, in time.monotonic().")
def main(
    device: str,
    parts: list[str],
    minutes: float,
    nanogpt: Path | None,
    output: Path,
    only_part: str | None,
    ends_at: float | None,
) -> None:
    """Measure what a GPU can tell, and print it as one page."""
    ends_at = ends_at or time.monotonic() + 60 * minutes
    known = read_lines(output)
    if only_part is not None:
        place = Place(
            torch.device("cuda", 0) if device == "cuda" else torch.device(device),
            nanogpt,
            ends_at,
            tuple(known),
        )
        for line in PARTS[only_part](place):
            append_whole(output, json.dumps({"part": only_part} | line) + "\n")
        return
    options = ["--device", device, *(["--nanogpt", str(nanogpt)] if nanogpt else [])]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    status = 0
    try:
        for name in parts:
            # A processor runs only the smallest shapes, but a busy one takes a minute to begin.
            limit = LIMITS[name] if device == "cuda" else max(300, LIMITS[name])
            seconds = min(limit, ends_at - time.monotonic())
            if seconds < LEAST_SECONDS:
                append_whole(
                    output, json.dumps({"part": name, "failed": "no time was left"}) + "\n"
                )
                continue
            run_part(name, seconds, output, options)
            click.echo(f"{name} done", err=True)
    except KeyboardInterrupt:  # the page is printed all the same
        status = 128 + signal.SIGINT
    lines = read_lines(output)
    click.echo(page(lines))
    if any(line.get("failed") for line in lines[len(known) :]):
        status = status or 1
    sys.exit(status)


if __name__ == "__main__":
    main()
