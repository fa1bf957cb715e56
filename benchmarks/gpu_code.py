"""What PyTorch's compiler writes for a GPU, counted on a machine that has none.

    uv run python -m benchmarks.gpu_code --gpu H100 --microbatch 64

The training loss of GPT-2 small is traced on tensors without data, its graphs are moved to a GPU
that does not exist, inductor generates their Triton kernels, and Triton compiles these for the
GPU's architecture. Nothing runs and nothing is timed. The table has the bytes that each kernel
moves, the FLOPs of each matrix product, and a floor for the time of a step.

This uses private parts of PyTorch. It runs with PyTorch 2.11 and 2.15.
"""

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

import click
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

import gpt
from basics.device import CPU
from gpt import GPTModel
from lab.plan.memory import GPT2_SMALL, size_name
from lab.table import Column, Table
from ops.sampled_cross_entropy import Candidates
from reporting.gpus import find_gpu
from run_config import ModelConfig, TrainConfig
from trainer.loss_functions import compiler_options
from trainer.precision import choose_forward_options

DEVICE = torch.device("cuda", 0)
PRECISION: Literal["bf16"] = "bf16"
# A step of AdamW reads weight, gradient and two moments of each parameter, and writes all but the
# gradient; the norm of the gradient reads it once more. All are float32.
UPDATE_BYTES = 4 * (4 + 3 + 1)
BANDWIDTH_SHARE = 0.9  # of the data sheet's, that a plain copy reaches
NAME_WIDTH = 76  # characters of a kernel's name in the table
# Of the peak, counting the half of attention's FLOPs that are not masked: high and low estimates.
# FlashAttention-3's paper has 27 to 30% for both passes, with heads of 64 and 1,024 tokens.
ATTENTION_SHARE, LOW_ATTENTION_SHARE = 0.35, 0.27


@dataclass(frozen=True)
class AbsentGpu:
    """What the compiler asks of a GPU, and the speeds that are assumed.

    Source: NVIDIA's data sheets and table of compute capabilities. `product_share` is what matrix
    products of such shapes are assumed to reach of the peak: see `benchmarks/README.md`.
    """

    name: str  # in `reporting/gpus.json`
    capability: tuple[int, int]
    num_multiprocessors: int
    threads_per_multiprocessor: int
    shared_memory: int  # bytes that a block may have
    cache: int  # bytes of L2
    product_share: float
    attention: str  # the kernel that PyTorch is expected to choose

    @property
    def bandwidth(self) -> float:
        """The bytes per second of its memory, by its data sheet."""
        return find_gpu(self.name).memory_tb_per_second * 1e12

    def properties(self) -> SimpleNamespace:
        """Return what `torch.cuda.get_device_properties` would."""
        major, minor = self.capability
        return SimpleNamespace(
            name=self.name,
            major=major,
            minor=minor,
            gcnArchName="",
            warp_size=32,
            multi_processor_count=self.num_multiprocessors,
            L2_cache_size=self.cache,
            total_memory=int(find_gpu(self.name).memory_gib * 2**30),
            regs_per_multiprocessor=65536,
            max_threads_per_block=1024,
            max_threads_per_multi_processor=self.threads_per_multiprocessor,
            shared_memory_per_block=49152,
            shared_memory_per_block_optin=self.shared_memory,
            shared_memory_per_multiprocessor=self.shared_memory + 1024,
        )


GPUS = {
    gpu.name: gpu
    for gpu in (
        AbsentGpu("H100", (9, 0), 132, 2048, 232448, 50 * 2**20, 0.62, "cudnn"),
        AbsentGpu("H200", (9, 0), 132, 2048, 232448, 50 * 2**20, 0.62, "cudnn"),
        AbsentGpu("RTX-4090", (8, 9), 128, 1536, 101376, 72 * 2**20, 0.80, "flash"),
    )
}


@dataclass(frozen=True)
class Work:
    """A kernel, matrix product or attention of one step, with the figures of all its calls."""

    name: str
    kind: str  # "kernel", "product", "attention" or "update"
    calls: int
    num_bytes: float  # read and written
    flops: float = 0.0  # of attention as if it were not causal
    load_bytes: int = 0  # that a thread of a kernel loads at a time, at most

    def floor_seconds(self, gpu: AbsentGpu, attention_share: float = ATTENTION_SHARE) -> float:
        """Return the least time that this takes, without launching it."""
        peak = find_gpu(gpu.name).peak(PRECISION)
        moving = self.num_bytes / (BANDWIDTH_SHARE * gpu.bandwidth)
        if self.kind == "product":
            return max(moving, self.flops / (gpu.product_share * peak))
        if self.kind == "attention":
            return max(moving, self.flops / 2 / (attention_share * peak))
        return moving


def step_work(model: ModelConfig, config: TrainConfig, gpu: AbsentGpu) -> list[Work]:
    """Return the work of a step of one microbatch, with AdamW, the slowest first.

    With sampled softmax it is a step without the other entries of the vocabulary.
    """
    graphs = trace(model, config, gpu)
    found: dict[str, Work] = {}
    for graph, _ in graphs:
        for one in products_of(graph):
            same = found.get(one.name, replace(one, calls=0, num_bytes=0.0, flops=0.0))
            found[one.name] = replace(
                same,
                calls=same.calls + 1,
                num_bytes=same.num_bytes + one.num_bytes,
                flops=same.flops + one.flops,
            )
    update = Work("AdamW and the gradient's norm", "update", 1, UPDATE_BYTES * model.num_parameters)
    work = [*found.values(), *kernels_of(graphs, gpu), update]
    return sorted(work, key=lambda one: -one.floor_seconds(gpu))


def trace(
    model: ModelConfig, config: TrainConfig, gpu: AbsentGpu
) -> list[tuple[fx.GraphModule, dict[str, Any]]]:
    """Trace the training loss on fake CPU tensors, since autograd on CUDA tensors needs a GPU.

    Return the graphs of the forward and the backward pass, each with the keyword arguments of
    inductor's `compile_fx_inner`.
    """
    from torch._inductor.compile_fx import compile_fx

    graphs = []

    def record(graph: fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        graphs.append((graph, options))

        def run(arguments: list[Any]) -> Any:
            return graph(*arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        patch.object(gpt, "attend", attend_with(gpu.attention)),
        patch.object(nn.LayerNorm, "forward", norm_as_on_a_gpu),
    ):
        network = GPTModel(model, choose_forward_options(model, config, DEVICE))
        if config.sampled_softmax:
            network.candidates = Candidates(
                model.vocab_size, config.sampled_softmax, seed=config.random_seed, device=CPU
            )
        loss_of = torch.compile(
            lambda *batch: network(*batch),
            dynamic=False,
            fullgraph=True,
            backend=lambda graph, inputs: compile_fx(graph, inputs, inner_compile=record),
        )
        batch = torch.zeros(2, config.microbatch_size, model.context_length, dtype=torch.int64)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(*batch)
        loss.backward()
    return graphs


def attend_with(kernel: str) -> Callable[..., Tensor]:
    """Return `gpt.attend` with a kernel that is named: PyTorch would ask the GPU to choose one."""

    def attend(q: Tensor, k: Tensor, v: Tensor, drop_rate: float, attention: str) -> Tensor:
        if kernel == "flash":
            return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, drop_rate, True)[0]
        return torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, drop_rate, True
        )[0]

    return attend


def norm_as_on_a_gpu(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """Normalise in float32, as autocast does on a GPU and not on a CPU."""
    return F.layer_norm(x.float(), norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def products_of(graph: fx.GraphModule) -> Iterator[Work]:
    """Yield a graph's matrix products and attention, call by call."""
    for node in graph.graph.nodes:
        operator = getattr(node.target, "overloadpacket", None)
        if operator not in flop_registry:
            continue
        values = [each.meta["val"] if isinstance(each, fx.Node) else each for each in node.args]
        results = node.meta["val"]
        tensors = [each for each in [*values, *tree_leaves(results)] if isinstance(each, Tensor)]
        is_product = isinstance(results, Tensor)
        name = operator.__name__
        if is_product:
            *_, left, right = (tuple(each.shape) for each in values if isinstance(each, Tensor))
            name = f"{left[0]} x {left[1]} x {right[1]}"
        yield Work(
            name,
            "product" if is_product else "attention",
            1,
            sum(each.numel() * each.element_size() for each in tensors),
            flop_registry[operator](*values, **node.kwargs, out_val=results),
        )


def kernels_of(
    graphs: list[tuple[fx.GraphModule, dict[str, Any]]], gpu: AbsentGpu
) -> Iterator[Work]:
    """Generate the Triton kernels of graphs and compile them; yield each with all its calls."""
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    # Inductor prints the place of each file in this mode.
    with pretending(gpu) as written, contextlib.redirect_stderr(io.StringIO()):
        for graph, options in graphs:
            inputs = move_to_gpu(graph)
            with V.set_fake_mode(inputs[0].fake_mode):
                compile_fx_inner(graph, inputs, **options)
        # Each graph's module calls its kernels; their own modules call themselves once, to test.
        callers = "".join(text for text in written.modules if "class Runner" in text)
        for name, source in written.kernels.items():
            kernel = getattr(PyCodeCache.load(source), name)
            kernel.precompile(warm_cache_only=True)
            calls = len(re.findall(rf"\b{name}\.run\((?!\*args)", callers))
            widths = [widest_load(one.kernel.asm["ptx"]) for one in kernel.compile_results]
            yield Work(
                name,
                "kernel",
                calls,
                calls * 1e9 * kernel.inductor_meta["kernel_num_gb"],
                load_bytes=max(widths),
            )


def move_to_gpu(graph: fx.GraphModule) -> list[FakeTensor]:
    """Move a graph of fake CPU tensors to the GPU that does not exist; return its inputs."""

    def moved(value: Any) -> Any:
        if isinstance(value, torch.device):
            return DEVICE
        if not isinstance(value, FakeTensor):
            return value
        with torch.utils._python_dispatch._disable_current_modes():
            shape = torch.empty_strided(
                value.size(), value.stride(), dtype=value.dtype, device="meta"
            )
        return FakeTensor(value.fake_mode, shape, DEVICE)

    for node in graph.graph.nodes:
        node.args, node.kwargs = tree_map(moved, node.args), tree_map(moved, node.kwargs)
        if "val" in node.meta:
            node.meta["val"] = tree_map(moved, node.meta["val"])
    return [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]


def widest_load(ptx: str) -> int:
    """Return the bytes of a kernel's widest load, from its code in PTX."""
    loads = re.findall(r"ld\.global[\w:.]*?(?:\.v(\d))?\.[bfus](\d+)\s", ptx)
    # Copies to shared memory: "cp.async.cg.shared.global [...], [...], 0x10, ..."
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[\w:.]* \[.*?\], \[.*?\], (\w+)", ptx)
    widths = [int(count or 1) * int(bits) // 8 for count, bits in loads]
    widths += [int(size, 0) for size in copies]
    return max(widths, default=0)


@contextmanager
def pretending(gpu: AbsentGpu) -> Iterator[SimpleNamespace]:
    """Answer what PyTorch and Triton ask of a GPU; yield the modules and kernels that they write.

    `modules` are the texts of Python files, `kernels` those of Triton kernels by name.
    """
    import torch._inductor.runtime.triton_helpers
    import torch._inductor.scheduler
    import torch._inductor.utils
    import torch.utils._triton
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache
    from triton.backends.compiler import GPUTarget

    properties = gpu.properties()
    capability = 10 * properties.major + properties.minor
    written = SimpleNamespace(modules=[], kernels={})
    write_module = PyCodeCache.write

    def keep_module(source: str, *arguments: Any, **options: Any) -> Any:
        written.modules.append(source)
        return write_module(source, *arguments, **options)

    def keep_kernel(self: Any, name: str, source: str, *_: Any, **__: Any) -> None:
        written.kernels[name] = source

    def always(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    answers: list[tuple[Any, dict[str, Any]]] = [
        (
            torch.cuda,
            {
                "is_available": True,
                "device_count": 1,
                "current_device": 0,
                "_lazy_init": None,
                "get_device_properties": properties,
                "get_device_capability": gpu.capability,
                "get_device_name": gpu.name,
                "is_bf16_supported": True,
                "synchronize": None,
                "get_rng_state": torch.zeros(16, dtype=torch.uint8),
                "set_rng_state": None,
                "_exchange_device": 0,
                "_maybe_exchange_device": 0,
            },
        ),
        (torch._C, {"_cuda_getCurrentRawStream": 0}),
        (torch._subclasses.fake_tensor, {"init_gpu_context": None}),
        (torch._inductor.runtime.triton_helpers, {"set_driver_to_gpu": None}),
        (torch.utils._triton, {"has_triton": True}),
        (torch._inductor.scheduler, {"has_triton": True}),
        (torch._inductor.utils, {"has_triton": True}),
        (
            CudaInterface,
            {
                "is_available": True,
                "device_count": 1,
                "current_device": 0,
                "get_raw_stream": 0,
                "get_compute_capability": capability,
                "get_device_properties": properties,
            },
        ),
        (CudaInterface.Worker, {"get_device_properties": properties, "current_device": 0}),
    ]
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=always(GPUTarget("cuda", capability, 32)),
            get_current_device=always(0),
            get_current_stream=always(0),
        )
    )
    with ExitStack() as stack:
        for owner, values in answers:
            for name, value in values.items():
                answer = always(value)
                stack.enter_context(
                    patch.object(
                        owner,
                        name,
                        staticmethod(answer) if isinstance(owner, type) else answer,
                        create=True,
                    )
                )
        stack.enter_context(patch.object(AsyncCompile, "triton", keep_kernel))
        stack.enter_context(patch.object(PyCodeCache, "write", keep_module))
        stack.enter_context(
            torch._inductor.config.patch(
                compiler_options(GPT2_SMALL, PRECISION)
                | {"force_disable_caches": True, "compile_threads": 1, "benchmark_kernel": True}
            )
        )  # each kernel then says how many bytes it moves
        yield written


def table_of(work: list[Work], gpu: AbsentGpu, tokens: int) -> Table:
    """Format a step's work as a table; what takes less than a hundredth of a ms is one row."""
    columns = [
        Column("", "left"),
        *map(Column, ("calls", "GB", "TFLOP", "bytes a load", "floor, ms")),
    ]
    shown = [one for one in work if one.floor_seconds(gpu) >= 1e-5]
    rest = [one for one in work if one.floor_seconds(gpu) < 1e-5]
    rows = [
        [
            one.name[:NAME_WIDTH],
            str(one.calls),
            f"{one.num_bytes / 1e9:.2f}",
            f"{one.flops / 1e12:.2f}" if one.flops else "",
            str(one.load_bytes or ""),
            f"{1e3 * one.floor_seconds(gpu):.2f}",
        ]
        for one in shown
    ]
    rows.append(
        [
            f"{len(rest)} others",
            str(sum(one.calls for one in rest)),
            f"{sum(one.num_bytes for one in rest) / 1e9:.2f}",
            "",
            "",
            f"{1e3 * sum(one.floor_seconds(gpu) for one in rest):.2f}",
        ]
    )
    seconds = sum(one.floor_seconds(gpu) for one in work)
    longer = sum(one.floor_seconds(gpu, LOW_ATTENTION_SHARE) for one in work)
    rows.append(
        [
            "all",
            str(sum(one.calls for one in work)),
            f"{sum(one.num_bytes for one in work) / 1e9:.2f}",
            f"{sum(one.flops for one in work) / 1e12:.2f}",
            "",
            f"{1e3 * seconds:.1f}",
        ]
    )
    return Table(
        columns,
        rows,
        [
            f"A floor, not a measurement: {tokens / seconds:,.0f} tokens/s at most, if memory"
            " reaches"
            f" {BANDWIDTH_SHARE:.0%} of its data sheet's {gpu.bandwidth / 1e12:.2f} TB/s, products"
            f" {gpu.product_share:.0%} and attention {ATTENTION_SHARE:.0%} of"
            f" {find_gpu(gpu.name).peak(PRECISION) / 1e12:.0f} TFLOP/s, and nothing else takes"
            f" time. With attention at {LOW_ATTENTION_SHARE:.0%}: {1e3 * longer:.1f} ms,"
            f" {tokens / longer:,.0f} tokens/s."
        ],
    )


@click.command()
@click.option("--gpu", "gpu_name", type=click.Choice(list(GPUS)), default="H100", show_default=True)
@click.option("--microbatch", default=64, show_default=True, help="Sequences.")
@click.option("--layers", default=GPT2_SMALL.n_layers, show_default=True)
@click.option("--candidates", type=int, help="Of sampled softmax.")
@click.option("--json", "as_json", is_flag=True, help="Print each row as a JSON object.")
def main(
    gpu_name: str, microbatch: int, layers: int, candidates: int | None, as_json: bool
) -> None:
    """Count the work of a step of GPT-2 small in bf16, with AdamW and one microbatch."""
    gpu, model = GPUS[gpu_name], GPT2_SMALL.model_copy(update={"n_layers": layers})
    config = TrainConfig(
        dataset="none",
        checkpoint_interval=1,
        microbatch_size=microbatch,
        precision=PRECISION,
        residual_dtype=PRECISION,
        compile=True,
        sampled_softmax=candidates,
    )
    work = step_work(model, config, gpu)
    if as_json:
        for one in work:
            click.echo(json.dumps(asdict(one) | {"floor_ms": 1e3 * one.floor_seconds(gpu)}))
        return
    click.echo(
        f"{size_name(model)}, {microbatch} sequences of {model.context_length:,} tokens,"
        f" {gpu.name}, PyTorch {torch.__version__}\n"
    )
    click.echo(table_of(work, gpu, microbatch * model.context_length).terminal())


if __name__ == "__main__":
    sys.exit(main())
