"""Where the time of a training step goes, by kind of kernel.

Run it with `uv run python -m benchmarks.kernel_profile`. This trainer with its defaults on random
tokens: steps without the profiler for the step time, then steps under it. On a GPU the kernels, on
a CPU the operations without the ones they call. Writes OUTPUT.json and OUTPUT.md.
"""

from __future__ import annotations

import itertools
import json
import re
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from tabulate import tabulate
from torch.profiler import ProfilerActivity, profile

from basics.files import write_atomically
from basics.json_files import to_json
from benchmarks.memory_model import GPT2_SMALL, MANY_TOKENS
from ddp_train import TrainingStep
from processes.launch import Process, machine_facts
from run_config import ModelConfig, TrainConfig
from tokens.batches import Microbatch
from trainer.losses import build_training_state
from trainer.precision import resolve_for_device

WARM_UP_STEPS = 3
NUM_LARGEST = 20  # kernels that are listed by name
KERNEL_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}  # of a trace, on the device

# The first pattern that a name matches decides. Inductor names a kernel after the operations that
# it fuses, so that its names are tested first; cuBLAS's kernels for Hopper are called nvjet.
MATMUL, ATTENTION, CROSS_ENTROPY, NORMS, OPTIMIZER, COPIES, REST = GROUPS = (
    "matmul", "attention", "cross-entropy", "norms and elementwise", "optimizer", "copies", "rest")
PATTERNS = (
    (CROSS_ENTROPY, r"log_?softmax|nll_loss|cross_entropy|softmax_online"),
    (MATMUL, r"^triton_(tem|mm)_"),
    (COPIES, r"^triton_poi_fused_(_?(to_copy|copy_?|clone|view|t|transpose)_)+\d+$"),
    (NORMS, r"^triton_"),
    (ATTENTION, r"flash|fmha|sdpa|attention|aten::_softmax"),
    (OPTIMIZER, r"multi_tensor_apply|fused_adam|_foreach|addcmul|addcdiv|lerp"),
    (MATMUL, r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitk|mkldnn|aten::(addmm|b?mm|baddbmm)"),
    (COPIES, r"memcpy|memset|copy|CatArray|FillFunctor|aten::(fill_|zero_|clone|cat|stack)"),
    (NORMS, r"layer_?norm|gelu|elementwise|reduce_kernel|embedding|index|dropout|"
            r"aten::(add|sub|mul|div|sum|mean|pow|native_|where|_to_copy|gather|scatter)"),
)


@dataclass(frozen=True)
class Kernel:
    """All executions of one kernel in the profiled steps."""

    name: str
    milliseconds: float
    count: int


@click.command()
@click.option("--device", type=click.Choice(["cuda", "cpu"]),
              default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
@click.option("--microbatch-size", type=click.IntRange(min=1), default=None,
              help="Sequences.  [default: 64 on a GPU, 2 on a CPU]")
@click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=Path("kernel-profile"),
              show_default=True, help="Where OUTPUT.json and OUTPUT.md are written.")
def main(device: str, microbatch_size: int | None, steps: int, output: Path) -> None:
    """Profile GPT-2 small on a GPU, a small model on a CPU."""
    on_gpu = device == "cuda"
    process = Process(0, 0, 1, torch.device("cuda", 0) if on_gpu else torch.device("cpu"))
    model = ModelConfig(**(GPT2_SMALL if on_gpu else MANY_TOKENS), drop_rate=0.0, qkv_bias=False)
    train = resolve_for_device(
        TrainConfig(dataset="none", checkpoint_interval=1,
                    microbatch_size=microbatch_size or (64 if on_gpu else 2)), process.device)
    found = measure(model, train, process, num_steps=steps)
    write_atomically(output.with_name(f"{output.name}.json"), to_json(found, indent=1) + "\n")
    page = "\n".join(table(found)) + "\n"
    write_atomically(output.with_name(f"{output.name}.md"), page)
    click.echo(page)


def measure(model: ModelConfig, train: TrainConfig, process: Process, *,
            num_steps: int) -> dict[str, Any]:
    """Take steps without the profiler, then as many with it; return times by group and kernel."""
    step = TrainingStep(build_training_state(model, train, process), train, process)
    shape = (train.microbatch_size, model.context_length)
    batches = itertools.repeat(Microbatch(0, *(
        torch.randint(model.vocab_size, shape, device=process.device) for _ in range(2))))

    def take(count: int) -> float:
        """Return the milliseconds of each of some steps."""
        _synchronize(process)
        started = time.perf_counter()
        for _ in range(count):
            step.take(batches, num_microbatches=1, learning_rate=1e-3)
        _synchronize(process)
        return (time.perf_counter() - started) * 1e3 / count

    take(WARM_UP_STEPS)
    step_ms = take(num_steps)
    activities = [ProfilerActivity.CPU]
    if process.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        profiled_ms = take(num_steps)
    kernels = (_kernels_on_gpu if process.device.type == "cuda" else _kernels_on_cpu)(profiler)
    tokens = train.microbatch_size * model.context_length
    return {"microbatch_size": train.microbatch_size, "step_ms": step_ms,
            "tokens_per_second": tokens / step_ms * 1e3, "profiled_step_ms": profiled_ms,
            "attention_kernel": step.losses.attention_kernel(), "is_compiled": train.compile,
            **by_group(kernels, num_steps), "machine": machine_facts(process, train.precision)}


def by_group(kernels: list[Kernel], num_steps: int) -> dict[str, Any]:
    """Add up kernels by group, in milliseconds of a step, and list the largest by name."""
    kernel_ms = sum(kernel.milliseconds for kernel in kernels) / num_steps
    groups = []
    for group in GROUPS:
        members = [kernel for kernel in kernels if group_of(kernel.name) == group]
        milliseconds = sum(kernel.milliseconds for kernel in members) / num_steps
        groups.append({"group": group, "ms": milliseconds, "share": milliseconds / kernel_ms,
                       "launches": sum(kernel.count for kernel in members) / num_steps})
    largest = sorted(kernels, key=lambda kernel: -kernel.milliseconds)[:NUM_LARGEST]
    return {"kernel_ms": kernel_ms, "groups": groups,
            "kernels": [{"name": kernel.name, "group": group_of(kernel.name),
                         "ms": kernel.milliseconds / num_steps,
                         "launches": kernel.count / num_steps} for kernel in largest]}


def group_of(name: str) -> str:
    """Return the group of a kernel, by its name."""
    return next((group for group, pattern in PATTERNS
                 if re.search(pattern, name, re.IGNORECASE)), REST)


def kernels_of_trace(trace: dict[str, Any]) -> list[Kernel]:
    """Add up the executions on the device in a trace in Chrome's format."""
    found = defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("cat") in KERNEL_CATEGORIES:
            found[event["name"]].append(event["dur"] / 1e3)  # microseconds
    return [Kernel(name, sum(times), len(times)) for name, times in found.items()]


def _kernels_on_gpu(profiler: profile) -> list[Kernel]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return kernels_of_trace(json.loads(path.read_text()))


def _kernels_on_cpu(profiler: profile) -> list[Kernel]:
    return [Kernel(event.key, event.self_cpu_time_total / 1e3, event.count)
            for event in profiler.key_averages()]


def _synchronize(process: Process) -> None:
    if process.device.type == "cuda":
        torch.cuda.synchronize()


def table(found: dict[str, Any]) -> list[str]:
    """Format a profile as Markdown: a table of groups, one of the largest kernels."""
    machine = found["machine"]
    groups = [[one["group"], f"{one['ms']:,.2f}", f"{one['share']:.1%}", f"{one['launches']:,.0f}"]
              for one in found["groups"]]
    largest = [[f"`{one['name'][:80].replace('|', '/')}`", one["group"], f"{one['ms']:,.2f}",
                f"{one['launches']:,.0f}"] for one in found["kernels"]]
    return [
        f"{machine['device']}, PyTorch {machine['torch']}, {machine['precision']}, microbatch"
        f" {found['microbatch_size']}, attention: {found['attention_kernel']},"
        f" {'compiled' if found['is_compiled'] else 'not compiled'}. A step takes"
        f" {found['step_ms']:,.2f} ms ({found['tokens_per_second']:,.0f} tokens/s), under the"
        f" profiler {found['profiled_step_ms']:,.2f} ms; its kernels {found['kernel_ms']:,.2f} ms.",
        "", *pipe(groups, ["kernels", "ms a step", "share", "launches a step"]),
        "", *pipe(largest, ["largest kernels", "group", "ms a step", "launches a step"]),
    ]


def pipe(rows: list[list[str]], heads: list[str]) -> list[str]:
    return tabulate(rows, heads, tablefmt="pipe", disable_numparse=True).splitlines()


if __name__ == "__main__":
    main()
