"""What a GPU can break. Without one the tests run on the CPU, with smaller shapes.

Type hints are complete here, unlike in other tests: so mypy finds a name that has gone in lines
that only a GPU runs.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel

from basics.errors import is_out_of_memory, says_out_of_memory
from basics.gpu_readings import read_gpus
from checkpointing import SnapshotBuffers
from ddp_train import TrainingStep
from lab.plan.memory import GPT2_SMALL, Setting, peak_memory
from processes.distributed import Process
from reporting.clock import PhaseClock
from reporting.loss_window import REPORT_INTERVAL, LossWindow
from run_config import ModelConfig, TrainConfig
from settings.machine import Precision
from tests.support import models
from tests.support.models import microbatches, ops_of
from tests.support.runs import tried
from tests.support.torchrun_workers import peak_of_training
from tests.support.workplace import (
    Workplace,
    read_lines,
    run_command,
    succeeded,
    torchrun_command,
    write_tokens,
)
from tokens.batch_plan import BatchPlan
from tokens.batches import Microbatch, Microbatches, read_ahead
from tokens.token_file import TokenFile
from trainer.diagnostics import Diagnostics
from trainer.loss_functions import ByLayer, compiler_options
from trainer.precision import attention_kernel, autocast

pytestmark = pytest.mark.gpu

HAS_GPU = torch.cuda.is_available()
only_on_a_gpu = partial(pytest.mark.skipif, not HAS_GPU)
MODEL = ModelConfig(
    vocab_size=50257 if HAS_GPU else 257,
    context_length=256 if HAS_GPU else 32,
    emb_dim=256 if HAS_GPU else 64,
    n_heads=4,
    n_layers=4 if HAS_GPU else 2,
    drop_rate=0.0,
    qkv_bias=False,
)


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what a deterministic step sets for the whole process."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with torch._inductor.config.patch(
        deterministic=False, use_fast_math=False, fallback_random=False
    ):
        yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, trace and write no code, which takes a minute: other tests compile there."""
    if not HAS_GPU:
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def test_microbatches_arrive_whole_on_the_device(tmp_path: Path, device: torch.device) -> None:
    tokens = np.arange(60_001, dtype=np.uint16)
    write_tokens(tmp_path / "t.safetensors", tokens)
    plan = BatchPlan(
        microbatch_size=10,
        gradient_accumulation_steps=1,
        world_size=1,
        context_length=100,
        num_steps=60,
    )
    data = Microbatches(
        TokenFile(tmp_path / "t.safetensors"), plan, start_token=0, vocab_size=65536
    )
    for index, token_ids, targets in read_ahead(data, range(60), device=device):
        first = index * 1000
        assert token_ids.device == device and token_ids.dtype == torch.int64
        assert token_ids.flatten().tolist() == list(range(first, first + 1000))
        assert targets.flatten().tolist() == list(range(first + 1, first + 1001))


def launch(workplace: Workplace, *arguments: str) -> None:
    """Train a run with one process. One that is forked cannot use CUDA for certain."""
    torchrun = workplace.real_torchrun if HAS_GPU else workplace.torchrun
    succeeded(torchrun(1, *arguments))


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"] if HAS_GPU else ["bf16"])
def test_a_run_trains_stops_and_resumes(workplace: Workplace, precision: Precision) -> None:
    """And its checkpoint has no padded rows."""
    workplace.add_dataset()
    changes = {"precision": precision, "gradient_accumulation_steps": 1, "min_train_tokens": 640}
    for name in ("whole", "parts"):
        workplace.add_run(name, model={"vocab_size": 1000}, train=changes)
    launch(workplace, "whole")
    launch(workplace, "parts", "--max-steps", "7")
    launch(workplace, "parts")
    losses = [
        [
            r["validation_loss"]
            for r in read_lines(workplace.runs_dir / n / "metrics.jsonl")
            if "validation_loss" in r
        ]
        for n in ("whole", "parts")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][-1] < losses[0][0]
    weights = load_file(workplace.runs_dir / "parts/checkpoints/latest/model.safetensors")
    assert weights["head.weight"].shape == weights["token_embedding.weight"].shape == (1000, 16)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_a_deterministic_run_that_grows_resumes_bit_for_bit(workplace: Workplace) -> None:
    """With Muon, accumulation and sampled softmax, compiled by default; stopped before it grows."""
    vocab_size, num_steps = min(MODEL.vocab_size, 5000), 20
    tokens_per_step = 2 * 8 * MODEL.context_length
    workplace.add_dataset(num_tokens=num_steps * tokens_per_step + 1, vocab_size=vocab_size)
    for name in ("whole", "parts"):
        workplace.add_run(
            name,
            model=MODEL.model_dump() | {"vocab_size": vocab_size},
            train={
                "microbatch_size": 8,
                "min_train_tokens": num_steps * tokens_per_step,
                "validation_interval": None,
                "validation_batches": None,
                "checkpoint_interval": num_steps,
                "precision": None,  # the default of the device
                "optimizer": "muon",
                "deterministic": True,
                "grow": {"from_layers": MODEL.n_layers // 2, "at": 0.5},
                "sampled_softmax": vocab_size // 5,
            },
        )
    launch(workplace, "whole")
    launch(workplace, "parts", "--max-steps", "7")
    launch(workplace, "parts")
    for file in ("model.safetensors", "optimizer.safetensors"):
        whole, parts = (
            load_file(workplace.runs_dir / name / "checkpoints/latest" / file)
            for name in ("whole", "parts")
        )
        torch.testing.assert_close(parts, whole, rtol=0, atol=0)


def step_of(device: torch.device, **changes: Any) -> TrainingStep:
    return models.step_of(
        device,
        **MODEL.model_dump()
        | {
            "microbatch_size": 8,
            "checkpoint_interval": 1,
            "validation_interval": None,
            "validation_batches": None,
            "precision": None,
        }
        | changes,
    )


@contextmanager
def synchronizing_is_an_error() -> Iterator[None]:
    """Make PyTorch raise if the program waits for the device; check first that it does."""
    number = torch.ones((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            number.item()
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def rising_tokens(device: torch.device) -> Iterator[Microbatch]:
    """Yield sequences that rise by 1 to 3, which a model can learn."""
    generator = torch.Generator().manual_seed(0)
    while True:
        steps = torch.randint(1, 4, (8, MODEL.context_length + 1), generator=generator)
        tokens = (steps.cumsum(1) % MODEL.vocab_size).to(device)
        yield Microbatch(0, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def losses_of(step: TrainingStep, num_steps: int) -> torch.Tensor:
    batches = rising_tokens(step.process.device)
    return torch.stack(
        [step.take(batches, num_microbatches=1, learning_rate=4e-4)[0] for _ in range(num_steps)]
    ).cpu()


def test_the_default_is_the_fast_path_and_learns_like_float32(device: torch.device) -> None:
    fast = step_of(device)
    plain = step_of(device, precision="fp32", compile=False, residual_dtype="fp32")
    kernel = attention_kernel(fast.state.model, fast.config, device)
    multiples = [step.state.model.options.head_multiple for step in (plain, fast)]
    if HAS_GPU:
        assert fast.config.compile and fast.config.precision == "bf16" and not plain.config.compile
        assert kernel in ("flash", "cudnn")  # PyTorch chooses by the card
        assert multiples[0] == 1 < multiples[1]
    losses, expected = losses_of(fast, 20), losses_of(plain, 20)
    assert expected[-1] < expected[0] - 0.5
    torch.testing.assert_close(losses, expected, rtol=0, atol=0.02)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"compile": False},
        {"precision": "fp16", "head_chunks": 4},
        {"activation_checkpointing": True},
        {"optimizer": "muon"},
        {"diagnostics_interval": 1},
        {"sampled_softmax": 50},
        {"sampled_softmax": 50, "precision": "fp16"},
    ],
)
def test_a_step_with_its_data_never_waits_for_the_device(
    tmp_path: Path, device: torch.device, changes: dict[str, Any]
) -> None:
    tokens = np.arange(100_000, dtype=np.uint16) % MODEL.vocab_size
    write_tokens(tmp_path / "t.safetensors", tokens)
    plan = BatchPlan(
        microbatch_size=8,
        gradient_accumulation_steps=2,
        world_size=1,
        context_length=MODEL.context_length,
        num_steps=8,
    )
    data = Microbatches(
        TokenFile(tmp_path / "t.safetensors"), plan, start_token=0, vocab_size=MODEL.vocab_size
    )
    step = step_of(device, **changes)
    step.diagnostics = Diagnostics(step.config.diagnostics_interval, step.config.precision)
    batches = read_ahead(data, range(16), device=device)
    losses: list[torch.Tensor] = []
    found: list[dict[str, Any]] = []

    def take(global_step: int) -> None:
        step.diagnostics.begin_step(global_step)
        loss, _ = step.take(
            batches, num_microbatches=2, learning_rate=1e-3, global_step=global_step
        )
        losses.append(loss)
        # Read as at a report: a step that the device has finished, or is about to.
        measured = step.diagnostics.pop_measured(up_to=global_step - 1)
        found.extend(one.numbers | {"seconds": one.seconds} for one in measured)

    take(0)
    with synchronizing_is_an_error() if HAS_GPU else nullcontext():
        for global_step in range(1, 6):
            take(global_step)
    num_reported = 1 if changes.get("sampled_softmax") else 6
    assert torch.stack(losses).isfinite().sum() == num_reported
    assert len(found) == (5 if changes.get("diagnostics_interval") else 0)
    assert all(one["seconds"] > 0 < one["layer_grad_norm"][0] for one in found)


@only_on_a_gpu(reason="a CPU has no queue of work: test_records.py has a stand-in")
def test_closing_and_reading_windows_never_waits_for_the_device(device: torch.device) -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        window = LossWindow(device)
        value = torch.tensor(3.0, device=device)
        for _ in range(REPORT_INTERVAL):
            window.add(value, value)
        window.close(1, 0.1, PhaseClock(), waits=True)  # NCCL starts
        torch.cuda._sleep(10**9)  # some tenths of a second
        window.add(value, value)
        assert window.close(2, 0.1, PhaseClock(), waits=False) == []
        ((_, values, _, ended),) = window._closed
        assert not ended._event.query() and values.is_pinned()  # the device is still asleep
        window.add(value, value)
        _, last = window.close(3, 0.1, PhaseClock(), waits=True)
        assert last.numbers["train_loss"] == 3.0
        assert last.steps_per_second is not None and last.steps_per_second > 0
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_step_that_is_not_finite_leaves_weights_and_moments_alone(
    device: torch.device, precision: Precision
) -> None:
    step, batches = step_of(device, precision=precision), rising_tokens(device)
    step.take(batches, num_microbatches=1, learning_rate=1e-3)
    before = SnapshotBuffers().take(step.state)
    step.state.model.final_norm.weight.register_hook(lambda grad: grad * torch.nan)
    _, grad_norm = step.take(batches, num_microbatches=1, learning_rate=1e-3)
    assert not grad_norm.isfinite()
    after = SnapshotBuffers().take(step.state)
    torch.testing.assert_close(after.weights, before.weights, rtol=0, atol=0)
    torch.testing.assert_close(after.moments, before.moments, rtol=0, atol=0)


def test_a_snapshot_is_a_copy_in_pinned_memory(device: torch.device) -> None:
    step, batches, buffers = step_of(device), rising_tokens(device), SnapshotBuffers()
    step.take(batches, num_microbatches=1, learning_rate=1e-3)
    snapshot = buffers.take(step.state)
    kept = {name: tensor.clone() for name, tensor in snapshot.weights.items()}
    assert all(tensor.is_pinned() == HAS_GPU for tensor in snapshot.weights.values())
    on_device = step.state.model.state_dict()
    assert all(torch.equal(tensor, on_device[name].cpu()) for name, tensor in kept.items())
    step.take(batches, num_microbatches=1, learning_rate=1e-3)
    if HAS_GPU:
        torch.cuda.synchronize()
    assert all(torch.equal(snapshot.weights[name], tensor) for name, tensor in kept.items())


@pytest.mark.usefixtures("compiler")
def test_compiled_validation_has_the_loss_of_eager_validation(device: torch.device) -> None:
    validates = {"validation_interval": 1, "validation_batches": 1}
    compiled, eager = step_of(device, compile=True, **validates), step_of(device, compile=False)
    assert compiled.loss_functions._compiled_validation is not None
    assert eager.loss_functions._compiled_validation is None
    _, token_ids, targets = next(rising_tokens(device))
    for step in (compiled, eager):
        step.state.model.eval()
    with torch.inference_mode():
        for size in (8, 3):
            found, expected = (
                step.loss_functions.validation(token_ids[:size], targets[:size])
                for step in (compiled, eager)
            )
            torch.testing.assert_close(found, expected, rtol=2e-3, atol=0)


@pytest.mark.usefixtures("compiler")
def test_layers_compiled_separately_have_eager_gradients_in_ddp(device: torch.device) -> None:
    """One process: a second would need a second GPU."""
    step = step_of(device, compile=False)
    loss = ByLayer(step.state.model, compiler_options(MODEL, "bf16"))
    backend = "nccl" if HAS_GPU else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        shared = DistributedDataParallel(
            loss, device_ids=[device] if HAS_GPU else None, gradient_as_bucket_view=True
        )
        _, token_ids, targets = next(rising_tokens(device))
        with autocast("bf16", device):
            found = shared(token_ids, targets)
            found.backward()
            gradients = {
                name: parameter.grad.clone()
                for name, parameter in step.state.model.named_parameters()
                if parameter.grad is not None
            }
            step.state.model.zero_grad()
            expected = step.state.model(token_ids, targets)
            expected.backward()
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=0)
        for name, parameter in step.state.model.named_parameters():
            assert parameter.grad is not None
            off = (gradients[name] - parameter.grad).norm()
            assert off <= 0.03 * parameter.grad.norm(), name
    finally:
        del shared
        dist.destroy_process_group()


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("compiles", [False, True] if HAS_GPU else [False])
def test_deterministic_steps_after_a_resumption_are_bit_for_bit_those_without_one(
    device: torch.device, precision: Precision, compiles: bool
) -> None:
    """With dropout. For CPUs test_reference.py has more."""
    whole, first, second = (
        models.step_of(
            device,
            precision=precision,
            compile=compiles,
            vocab_size=1000,
            drop_rate=0.1,
            deterministic=True,
            emb_dim=128,
        )
        for _ in range(3)
    )
    if HAS_GPU:
        kernel = attention_kernel(whole.state.model, whole.config, device)
        assert kernel == ("flash" if precision == "bf16" else "math")

    def train(step: TrainingStep, begin: int, end: int) -> None:
        batches = itertools.islice(microbatches(device), 2 * begin, None)
        for _ in range(begin, end):
            step.take(batches, num_microbatches=2, learning_rate=1e-2)

    train(whole, 0, 6)
    train(first, 0, 3)
    second.state.model.load_state_dict(first.state.model.state_dict())
    second.state.optimizer.load_state_dict(first.state.optimizer.state_dict())
    train(second, 3, 6)
    found, wanted = (vars(SnapshotBuffers().take(step.state)) for step in (second, whole))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("compiles", [False, True] if HAS_GPU else [False])
@pytest.mark.parametrize("attention", ["flash", "cudnn"] if HAS_GPU else ["flash"])
def test_the_kernel_of_the_run_computes_attention_on_the_device(
    device: torch.device, attention: str, compiles: bool
) -> None:
    step = models.step_of(
        device, precision="bf16", attention=attention, compile=compiles, drop_rate=0.0
    )
    assert step.config.compile == compiles
    assert attention_kernel(step.state.model, step.config, device) == attention
    assert any(
        f"{attention}_attention" in name and name.endswith("backward") for name in ops_of(step)
    )


@only_on_a_gpu(reason="the memory of CUDA's allocator; that of a CPU: lab/test_plan.py")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("microbatch_size", [1, 8, 24])
@pytest.mark.parametrize("drop_rate", [0.0, 0.1])
def test_planned_memory_is_within_10_percent(
    device: torch.device, precision: Precision, microbatch_size: int, drop_rate: float
) -> None:
    model = GPT2_SMALL.model_copy(update={"drop_rate": drop_rate})
    train = TrainConfig(
        dataset="tiny",
        microbatch_size=microbatch_size,
        gradient_accumulation_steps=2,
        precision=precision,
        compile=False,
        checkpoint_interval=1,
    )
    process = Process(rank=0, local_rank=0, world_size=1, device=device)
    measured = peak_of_training(model, train, process)
    predicted = peak_memory(Setting(model, train, precision, num_processes=1), microbatch_size)
    assert predicted.total == pytest.approx(measured, rel=0.1)


@only_on_a_gpu(reason="a search on a CPU's memory: test_search.py")
@pytest.mark.timeout(660)  # up to 8 trials, each of which starts a process and compiles
def test_the_largest_microbatch_trains_and_the_next_does_not(workplace: Workplace) -> None:
    """Two layers and 6 GiB: a sequence takes about 0.2 GiB, by its logits."""
    model = GPT2_SMALL.model_copy(update={"n_layers": 2})
    workplace.add_run(model=model.model_dump(), train={"precision": "bf16"})
    result = succeeded(
        run_command(
            *torchrun_command(1, "ddp_train.py"),
            *workplace.arguments("tiny", "--find-max-microbatch", "--memory-limit-gib", "6"),
            timeout=600,
        )
    )
    results = tried(result.stdout)
    largest = max(size for size, fitted in results.items() if fitted)
    assert largest > 4 and results[largest + 1] is False


@only_on_a_gpu(reason="the text of CUDA's driver")
def test_the_drivers_text_for_out_of_memory_is_recognised() -> None:
    torch.cuda.init()
    with pytest.raises(RuntimeError) as of_code:
        torch.cuda.check_error(2)  # cudaErrorMemoryAllocation
    with pytest.raises(torch.AcceleratorError) as of_call:
        torch.empty(2**50, dtype=torch.uint8, pin_memory=True)  # a petabyte
    for error in (of_code.value, of_call.value):
        assert says_out_of_memory(str(error)) and is_out_of_memory(error), error
    assert torch.ones(2, device="cuda").sum().item() == 2  # the context still works


@only_on_a_gpu(reason="the id of a GPU")
def test_pytorchs_id_is_the_drivers() -> None:
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    (gpu,) = read_gpus([uuid])
    assert gpu.uuid == uuid and gpu.name == torch.cuda.get_device_name(0)
    assert 0 < (gpu.memory_used_gib or 0) < (gpu.memory_total_gib or 0)
    assert (gpu.temperature_c or 0) > 0
