import copy
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ddp_train
from checkpointing import SnapshotBuffers
from processes.launch import Process
from reporting.clock import PhaseClock
from tests.support.models import ONE_PROCESS, microbatches, step_of
from tests.support.workplace import write_tokens
from tokens.batch_plan import BatchPlan
from tokens.batches import Microbatches, dropout_seed
from tokens.token_file import TokenFile
from trainer.losses import validate


class CountReads(TorchDispatchMode):
    """Counts reads of numbers, each of which would wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.reads: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.equal,
                                       torch.ops.aten.is_nonzero, torch.ops.aten.nonzero):
            self.reads.append(str(function))
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("changes", [{"clipping_max_norm": None},
                                     {"head_chunks": 3, "activation_checkpointing": True},
                                     {"optimizer": "muon"}])
def test_a_step_reads_nothing_from_the_device(changes, monkeypatch):
    step, batches = step_of(precision="bf16", **changes), microbatches()
    step.take(batches, num_microbatches=2, learning_rate=0.1)
    with CountReads() as count:
        for name in ("cpu", "numpy", "tolist"):  # on a CPU they are no operation
            monkeypatch.setattr(torch.Tensor, name, lambda _, name=name: count.reads.append(name))
        for _ in range(3):
            step.take(batches, num_microbatches=2, learning_rate=0.1)
        assert count.reads == []
        torch.ones(()).item()
        torch.ones(()).cpu()
    assert len(count.reads) == 2  # they would have been seen


def test_a_snapshot_is_a_copy_and_its_memory_is_used_again():
    step, batches, buffers = step_of(), microbatches(), SnapshotBuffers()
    step.take(batches, num_microbatches=1, learning_rate=0.1)
    snapshot = buffers.take(step.state)
    kept = copy.deepcopy(snapshot)
    step.take(batches, num_microbatches=1, learning_rate=0.1)
    torch.testing.assert_close(vars(snapshot), vars(kept), rtol=0, atol=0)
    again = buffers.take(step.state)
    name = "final_norm.weight"
    assert again.weights[name].data_ptr() == snapshot.weights[name].data_ptr()
    assert torch.equal(again.weights[name], step.state.model.final_norm.weight)
    assert again.moments[f"step/{name}"] == 2


def test_only_the_last_microbatch_sends_gradients_and_accumulated_ones_stay():
    step, sends = step_of(), []

    class Loss(nn.Module):
        sends = True

        def forward(self, *tokens):
            sends.append(self.sends)
            return step.state.model(*tokens)

        @contextmanager
        def no_sync(self):
            self.sends = False
            yield
            self.sends = True

    step.process, step.parallel_loss = replace(step.process, world_size=2), Loss()
    for num_microbatches, stays in ((3, True), (1, False)):
        step.take(microbatches(), num_microbatches=num_microbatches, learning_rate=0.1)
        assert (step.state.model.final_norm.weight.grad is not None) == stays
    assert sends == [False, False, True, True]


def test_the_seed_decides_the_initial_weights():
    first, again, other = (step_of(random_seed=seed).state.model.head_weight for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_a_partial_microbatch_of_a_compiled_run_is_validated_by_sequences():
    """Code that is not compiled needs more memory, and would be compiled for each size."""
    losses = step_of(drop_rate=0.0, precision="fp32", microbatch_size=8).losses
    tokens = torch.randint(0, 257, (2, 5, 16), generator=torch.Generator().manual_seed(0))
    wanted, sizes = losses.validation(*tokens), []
    losses._compiled_validation = None.__eq__  # anything: it is not called
    losses.model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    torch.testing.assert_close(losses.validation(*tokens), wanted)
    assert sizes == [1] * 5


def test_the_wait_for_a_microbatch_is_booked_as_waiting(monkeypatch, now):
    closed = []

    def slow(*_, **__):
        try:
            for item in range(5):
                now.seconds += 2
                yield item
        finally:
            closed.append(True)

    monkeypatch.setattr(ddp_train, "read_ahead", slow)
    clock, prepared = PhaseClock(), SimpleNamespace(
        plan=None, first_step=0, data=SimpleNamespace(train=None))
    heartbeats: list[None] = []
    watchdog = SimpleNamespace(process=Process(0, 0, 1, torch.device("cpu")),
                               heartbeat=lambda: heartbeats.append(None))
    waiting = ddp_train.read_microbatches(prepared, watchdog, clock)
    assert [next(waiting), next(waiting)] == [0, 1]
    now.seconds += 7
    assert clock.read()["waiting"] == 4 and clock.read()["startup"] == 7
    waiting.close()
    assert closed and len(heartbeats) == 2
    assert list(ddp_train.read_microbatches(prepared, watchdog, clock)) == [0, 1, 2, 3, 4]


def test_dropout_draws_from_a_seed_of_its_own_at_each_position_and_nothing_else_draws():
    seeds = {dropout_seed(seed, index) % 2**32  # a CPU generator reads 32 bits
             for seed in range(50) for index in range(200)}
    assert len(seeds) == 50 * 200
    for drop_rate in (0.0, 0.1):
        step = step_of(drop_rate=drop_rate)
        before = torch.get_rng_state()
        step.take(microbatches(), num_microbatches=1, learning_rate=0.1)
        assert torch.equal(before, torch.get_rng_state()) == (drop_rate == 0)


@pytest.mark.parametrize("microbatch_size", [1, 2, 5])
def test_the_validation_loss_does_not_depend_on_the_microbatch_size(tmp_path, microbatch_size):
    write_tokens(tmp_path / "t.safetensors", np.arange(41, dtype=np.uint16))
    plan = BatchPlan(microbatch_size, 1, 1, context_length=4, num_steps=1)
    data = Microbatches(TokenFile(tmp_path / "t.safetensors"), plan, start_token=0, vocab_size=100,
                        num_sequences=5)
    losses = SimpleNamespace(process=ONE_PROCESS, model=nn.Identity(),
                             validation=lambda token_ids, _: token_ids.float().mean())
    watchdog = SimpleNamespace(heartbeat=lambda: None, stop_signal=0)
    assert validate(losses, data, watchdog, shares=False) == np.arange(20).mean()
