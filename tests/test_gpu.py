"""Tests that need a GPU; skipped without one."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel

from checkpointing import SnapshotBuffers
from run_config import ModelConfig
from tests.support import models
from tests.support.workplace import read_lines, succeeded, write_tokens
from tokens.batch_plan import BatchPlan
from tokens.batches import Microbatch, Microbatches, read_ahead
from tokens.token_file import TokenFile
from trainer.diagnostics import Diagnostics
from trainer.loss_functions import ByLayer, compiler_options
from trainer.precision import attention_kernel, autocast

pytestmark = pytest.mark.gpu

MODEL = ModelConfig(
    vocab_size=50257,
    context_length=256,
    emb_dim=256,
    n_heads=4,
    n_layers=4,
    drop_rate=0.0,
    qkv_bias=False,
)


def test_microbatches_arrive_whole_on_the_device(tmp_path):
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
    device = torch.device("cuda", 0)
    for index, token_ids, targets in read_ahead(data, range(60), device=device):
        first = index * 1000
        assert token_ids.device == device and token_ids.dtype == torch.int64
        assert token_ids.flatten().tolist() == list(range(first, first + 1000))
        assert targets.flatten().tolist() == list(range(first + 1, first + 1001))


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_a_run_trains_stops_and_resumes(workplace, precision):
    """And its checkpoint has no padded rows."""
    workplace.add_dataset()
    changes = {"precision": precision, "gradient_accumulation_steps": 1, "min_train_tokens": 640}
    for name in ("whole", "parts"):
        workplace.add_run(name, model={"vocab_size": 1000}, train=changes)
    succeeded(workplace.real_torchrun(1, "whole"))
    succeeded(workplace.real_torchrun(1, "parts", "--max-steps", "7"))
    succeeded(workplace.real_torchrun(1, "parts"))
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


def step_of(**changes):
    return models.step_of(
        torch.device("cuda", 0),
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
def synchronizing_is_an_error():
    """Make PyTorch raise if the program waits for the device; check first that it does."""
    number = torch.ones((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            number.item()
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def rising_tokens():
    """Yield sequences that rise by 1 to 3, which a model can learn."""
    generator = torch.Generator().manual_seed(0)
    while True:
        steps = torch.randint(1, 4, (8, MODEL.context_length + 1), generator=generator)
        tokens = (steps.cumsum(1) % MODEL.vocab_size).cuda()
        yield Microbatch(0, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def losses_of(step, num_steps):
    batches = rising_tokens()
    return torch.stack(
        [step.take(batches, num_microbatches=1, learning_rate=4e-4)[0] for _ in range(num_steps)]
    ).cpu()


def test_the_default_is_the_fast_path_and_learns_like_float32():
    fast, plain = step_of(), step_of(precision="fp32", compile=False, residual_dtype="fp32")
    assert fast.config.compile and fast.config.precision == "bf16" and not plain.config.compile
    kernel = attention_kernel(fast.state.model, fast.config, fast.process.device)
    assert kernel in ("flash", "cudnn")  # PyTorch chooses by the card
    assert plain.state.model.options.head_multiple == 1 < fast.state.model.options.head_multiple
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
    ],
)
def test_a_step_with_its_data_never_waits_for_the_device(tmp_path, changes):
    write_tokens(tmp_path / "t.safetensors", np.arange(100_000, dtype=np.uint16) % 50257)
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
    step = step_of(**changes)
    step.diagnostics = Diagnostics(step.config.diagnostics_interval, step.config.precision)
    batches = read_ahead(data, range(16), device=step.process.device)
    losses, found = [], []

    def take(global_step):
        step.diagnostics.begin_step(global_step)
        losses.append(step.take(batches, num_microbatches=2, learning_rate=1e-3)[0])
        # Read as at a report: a step that the device has finished, or is about to.
        measured = step.diagnostics.pop_measured(up_to=global_step - 1)
        found.extend(one.numbers | {"seconds": one.seconds} for one in measured)

    take(0)
    with synchronizing_is_an_error():
        for global_step in range(1, 6):
            take(global_step)
    assert torch.stack(losses).isfinite().all()
    assert len(found) == (5 if changes.get("diagnostics_interval") else 0)
    assert all(one["seconds"] > 0 < one["layer_grad_norm"][0] for one in found)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_step_that_is_not_finite_leaves_weights_and_moments_alone(precision):
    step, batches = step_of(precision=precision), rising_tokens()
    step.take(batches, num_microbatches=1, learning_rate=1e-3)
    before = SnapshotBuffers().take(step.state)
    step.state.model.final_norm.weight.register_hook(lambda grad: grad * torch.nan)
    _, grad_norm = step.take(batches, num_microbatches=1, learning_rate=1e-3)
    assert not grad_norm.isfinite()
    after = SnapshotBuffers().take(step.state)
    torch.testing.assert_close(after.weights, before.weights, rtol=0, atol=0)
    torch.testing.assert_close(after.moments, before.moments, rtol=0, atol=0)


def test_a_snapshot_is_a_copy_in_pinned_memory():
    step, batches, buffers = step_of(), rising_tokens(), SnapshotBuffers()
    step.take(batches, num_microbatches=1, learning_rate=1e-3)
    snapshot = buffers.take(step.state)
    kept = {name: tensor.clone() for name, tensor in snapshot.weights.items()}
    assert all(tensor.is_pinned() for tensor in snapshot.weights.values())
    on_device = step.state.model.state_dict()
    assert all(torch.equal(tensor, on_device[name].cpu()) for name, tensor in kept.items())
    step.take(batches, num_microbatches=1, learning_rate=1e-3)
    torch.cuda.synchronize()
    assert all(torch.equal(snapshot.weights[name], tensor) for name, tensor in kept.items())


def test_compiled_validation_has_the_loss_of_eager_validation():
    validates = {"validation_interval": 1, "validation_batches": 1}
    compiled, eager = step_of(**validates), step_of(compile=False)
    assert compiled.losses._compiled_validation is not None
    assert eager.losses._compiled_validation is None
    _, token_ids, targets = next(rising_tokens())
    for step in (compiled, eager):
        step.state.model.eval()
    with torch.inference_mode():
        for size in (8, 3):
            part = token_ids[:size], targets[:size]
            torch.testing.assert_close(
                compiled.losses.validation(*part), eager.losses.validation(*part), rtol=2e-3, atol=0
            )


def test_layers_compiled_separately_have_eager_gradients_over_nccl():
    """One process: a second would need a second GPU."""
    step = step_of(compile=False)
    loss = ByLayer(step.state.model, compiler_options(MODEL, "bf16"))
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        shared = DistributedDataParallel(loss, device_ids=[0], gradient_as_bucket_view=True)
        _, token_ids, targets = next(rising_tokens())
        with autocast("bf16", step.process.device):
            found = shared(token_ids, targets)
            found.backward()
            gradients = {name: p.grad.clone() for name, p in step.state.model.named_parameters()}
            step.state.model.zero_grad()
            expected = step.state.model(token_ids, targets)
            expected.backward()
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=0)
        for name, parameter in step.state.model.named_parameters():
            off = (gradients[name] - parameter.grad).norm()
            assert off <= 0.03 * parameter.grad.norm(), name
    finally:
        del shared
        dist.destroy_process_group()
