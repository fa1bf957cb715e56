"""One step: rates, clipping, precision, kernels, compilation, diagnostics, and its reports.

test_reference.py compares the numbers.
"""

import itertools
import math
import os
import subprocess
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args
from unittest.mock import MagicMock

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils._python_dispatch import TorchDispatchMode

import ddp_train
import optim
from basics.errors import UserError
from gpt import ForwardOptions, GPTModel
from optim import build_optimizer, decay_line, group_of, rates_line
from reporting.clock import PhaseClock
from reporting.metrics_file import METRICS, read_metrics
from run_config import ModelConfig, TrainConfig, load_run
from settings.optimizer import STEP
from tests.support.models import ONE_PROCESS, microbatches, ops_of, step_of
from tests.support.runs import metrics_of, refused, summary_of, weights_of
from tests.support.workplace import TINY_MODEL, TINY_TRAIN, forked, read_lines, succeeded
from tokens.batch_plan import BatchPlan
from tokens.batches import dropout_seed
from trainer import diagnostics
from trainer.diagnostics import Diagnostics, forward_statistics
from trainer.loss_functions import compile_now
from trainer.precision import attention_kernel, choose_forward_options, resolve_for_device
from trainer.startup import decide_for_device

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def config(**changes):
    return TrainConfig(**TINY_TRAIN | changes)


def test_the_rates_of_all_groups_are_named():
    tied = ModelConfig(**TINY_MODEL | {"tie_weights": True})
    assert rates_line(tied, config(learning_rate=0.01, embedding_learning_rate=0.3)) == (
        "matrix 0.01, embedding 0.3, vector 0.01"
    )


@pytest.mark.parametrize("weight_decay", [0.1, 0])
def test_tensors_with_and_without_decay_are_counted_also_where_it_is_0(weight_decay):
    network = GPTModel(ModelConfig(**TINY_MODEL))
    assert decay_line(network, config(weight_decay=weight_decay)) == (
        f"weight decay {weight_decay} on 11 tensors of matrix, embedding, head (14,624"
        " parameters), none on 16 tensors of vector (352"
        " parameters)"
    )
    line = decay_line(network, config(weight_decay=weight_decay, decay_norms_and_biases=True))
    assert line.endswith(
        "on 27 tensors of matrix, embedding, head, vector (14,976 parameters), none on 0"
        " tensors (0 parameters)"
    )

    with_muon = config(weight_decay=weight_decay, optimizer="muon", decay_norms_and_biases=True)
    assert decay_line(network, with_muon) == (
        f"weight decay {weight_decay} on 8 tensors of matrix (6,144 parameters), none on 19"
        " tensors of embedding, head, vector (8,832 parameters)"
    )


def test_each_process_orthogonalises_its_share(monkeypatch):
    """test_reference.py sees that the shares of three processes fit together."""
    sizes: list[int] = []
    monkeypatch.setattr(optim, "orthogonalise", lambda x: (sizes.append(len(x)), x)[1])
    monkeypatch.setattr(dist, "all_gather_into_tensor", MagicMock())
    network = GPTModel(ModelConfig(**TINY_MODEL))
    optimizer = build_optimizer(
        network, config(optimizer="muon"), replace(ONE_PROCESS, rank=1, world_size=3)
    )
    optimizer.found_inf = torch.zeros(())
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert sorted(sizes) == [2, 3]  # of 4 and 8 matrices


class CountReads(TorchDispatchMode):
    """Counts reads of numbers, each of which would wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.reads: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten.equal,
            torch.ops.aten.is_nonzero,
            torch.ops.aten.nonzero,
        ):
            self.reads.append(str(function))
        return function(*args, **kwargs or {})


@pytest.mark.parametrize(
    "changes",
    [
        {"clipping_max_norm": None},
        {"head_chunks": 3, "activation_checkpointing": True},
        {"optimizer": "muon"},
        {"diagnostics_interval": 1},
    ],
)
def test_a_step_reads_nothing_from_the_device(changes, monkeypatch):
    step, batches = step_of(precision="bf16", **changes), microbatches()
    step.diagnostics = Diagnostics(step.config.diagnostics_interval, step.config.precision)
    step.diagnostics.begin_step(0)
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


def test_diagnostics_are_sent_to_the_host_within_their_step_and_waited_for_when_read(monkeypatch):
    """So that reading them waits for their step alone, as the losses of a report are read."""
    events, to, tolist = [], torch.Tensor.to, torch.Tensor.tolist

    def send(tensor, *arguments, **options):
        if (arguments, options) == (("cpu",), {"non_blocking": True}):
            events.append("send")
        return to(tensor, *arguments, **options)

    time = MagicMock(**{"return_value.wait": lambda: events.append("wait")})
    monkeypatch.setattr(diagnostics, "DeviceTime", time)
    monkeypatch.setattr(torch.Tensor, "to", send)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: (events.append("read"), tolist(x))[1])
    step = step_of()
    step.diagnostics = Diagnostics(1)
    step.diagnostics.begin_step(0)
    step.take(microbatches(), num_microbatches=1, learning_rate=0.1)
    (measured,) = step.diagnostics.pop_measured(up_to=0)
    assert set(events) == {"send"}
    numbers = measured.numbers
    assert [name for name, _ in itertools.groupby(events)] == ["send", "wait", "read"]
    assert events.count("send") == events.count("read") == len(numbers)


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


@pytest.mark.parametrize("optimizer", get_args(TrainConfig.model_fields["optimizer"].annotation))
def test_an_optimizer_keeps_exactly_the_state_that_it_declares(optimizer):
    """Checkpoints, the plan's memory and the checks of disks go by the declaration."""
    step = step_of(optimizer=optimizer)
    step.take(microbatches(), num_microbatches=1, learning_rate=1e-3)
    num_bytes = 0
    for name, parameter in step.state.model.named_parameters():
        kept = step.state.optimizer.state[parameter]
        assert tuple(kept) == step.config.optimizer_state(group_of(name, parameter)), name
        for key, tensor in kept.items():
            assert tensor.dtype == torch.float32, (name, key)
            assert tensor.shape == (() if key == STEP else parameter.shape), (name, key)
            num_bytes += tensor.nbytes if key != STEP else 0
    assert num_bytes == step.config.optimizer_state_bytes(step.state.model.config)


def test_dropout_draws_from_a_seed_of_its_own_at_each_position_and_nothing_else_draws():
    seeds = {
        dropout_seed(seed, index) % 2**32  # a CPU generator reads 32 bits
        for seed in range(50)
        for index in range(200)
    }
    assert len(seeds) == 50 * 200
    for drop_rate in (0.0, 0.1):
        step = step_of(drop_rate=drop_rate)
        before = torch.get_rng_state()
        step.take(microbatches(), num_microbatches=1, learning_rate=0.1)
        assert torch.equal(before, torch.get_rng_state()) == (drop_rate == 0)


FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
DETERMINISTIC = {"compile": False, "deterministic": True}
STEPS = 6


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is restored
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    with torch._inductor.config.patch(
        deterministic=False, use_fast_math=False, fallback_random=False
    ):
        yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


def resolved(device, **keys):
    train = {key: value for key, value in TINY_TRAIN.items() if key != "precision"}
    return resolve_for_device(TrainConfig(**train | keys), device)


@pytest.mark.parametrize(
    ("device", "keys", "has_bf16", "expected"),
    [
        (CPU, {}, True, ("bf16", "fp32")),
        (CPU, {}, False, ("fp32", "fp32")),
        (CPU, {"use_amp": False}, True, ("fp32", "fp32")),
        (CPU, {"precision": "fp16"}, True, ("fp16", "fp32")),
        (CPU, {"precision": "tf32", "use_amp": False}, True, ("tf32", "fp32")),
        (GPU, {}, True, ("bf16", "bf16")),
        (GPU, {}, False, ("fp16", "fp32")),
        (GPU, {"use_amp": False}, True, ("fp32", "fp32")),
        (GPU, {"residual_dtype": "fp32"}, True, ("bf16", "fp32")),
    ],
)
def test_the_precision_is_the_fastest_safe_one_of_the_device(
    monkeypatch, device, keys, has_bf16, expected
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": has_bf16})
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: has_bf16)
    train = resolved(device, **keys)
    assert (train.precision, train.residual_dtype) == expected
    assert train.compile == (device == GPU)  # unless the run says otherwise
    assert not resolved(device, compile=False).compile and resolved(device, compile=True).compile


@pytest.mark.parametrize(("device", "lacking"), [(CPU, {"fp16", "tf32"}), (GPU, {"bf16", "tf32"})])
def test_a_precision_that_the_device_does_not_have_is_a_warning(
    monkeypatch, workplace, device, lacking
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))  # Turing
    for precision in ("fp32", "tf32", "bf16", "fp16"):
        workplace.add_run(precision, train={"precision": precision})
        run = load_run(workplace.runs_dir, precision)
        _, warnings = decide_for_device(run, BatchPlan(2, 1, 1, 16, num_steps=9), device)
        warned = sum(f'precision is "{precision}"' in warning for warning in warnings)
        assert warned == (precision in lacking), precision


def test_deterministic_kernels_are_set_before_cuda_is_initialised(monkeypatch):
    seen = []

    def has_bf16(**_: object) -> bool:  # the first thing that initialises CUDA
        seen.append(
            (
                os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
                torch.are_deterministic_algorithms_enabled(),
            )
        )
        return True

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", has_bf16)
    assert resolved(GPU, compile=False).attention == "auto"  # without the key nothing is chosen
    assert resolved(GPU, **DETERMINISTIC).attention == "flash"
    assert seen == [(None, False), (":4096:8", True)]
    for device, keys, attention in (
        (GPU, {"precision": "fp16"}, "flash"),
        (GPU, {"precision": "tf32"}, "math"),
        (GPU, {"precision": "bf16", "attention": "math"}, "math"),
        (CPU, {"precision": "bf16"}, "auto"),
    ):
        assert resolved(device, **DETERMINISTIC | keys).attention == attention


def test_the_compiler_lets_the_watchdog_run_and_measures_no_kernels_if_deterministic(monkeypatch):
    """And approximates functions in 16 bits only, and draws masks as eager code does."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for keys in ({"deterministic": True}, {"precision": "bf16"}, {"drop_rate": 0.1}):
        torch.use_deterministic_algorithms("deterministic" in keys)
        torch._inductor.config.use_static_cuda_launcher = True
        step_of(**{"precision": "fp32", "compile": True, "drop_rate": 0.0} | keys)
        found = torch._inductor.config
        assert found.deterministic == ("deterministic" in keys)
        assert found.use_fast_math == ("precision" in keys)
        assert found.fallback_random == ("drop_rate" in keys)
        assert not found.use_static_cuda_launcher


def kernel_of(step):
    return attention_kernel(step.state.model, step.config, step.process.device)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_kernel_of_the_run_computes_attention(precision):
    for attention, is_flash in (("flash", True), ("math", False)):
        step = step_of(precision=precision, attention=attention, drop_rate=0.0)
        assert kernel_of(step) == attention
        assert (f"{FLASH}_backward" in ops_of(step)) == is_flash


@pytest.mark.parametrize(
    ("model", "train", "message"),
    [
        ({}, {"attention": "flash"}, 'attention is "flash", which cannot run here'),  # and drop
        ({"drop_rate": 0.0}, {"attention": "cudnn"}, 'attention is "cudnn"'),
        (
            {},
            {"residual_dtype": "bf16"},
            'residual_dtype is "bf16", but the precision here is fp32',
        ),
    ],
)
def test_what_the_device_lacks_is_refused(workplace, model, train, message):
    workplace.add_dataset()
    workplace.add_run(model=model, train=train)
    assert message in refused(workplace, "tiny", under_torchrun=True)


CHUNK = 2**23 // 50257  # tokens of a chunk whose logits fit in a CPU's cache
ASKED = {"residual_dtype": "fp32", "head_chunks": 3, "activation_checkpointing": True}


@pytest.mark.parametrize(
    ("device", "keys", "options"),
    [
        (
            GPU,
            {"precision": "bf16"},
            {"residual_dtype": torch.bfloat16, "head_multiple": 128, "adds_bias_apart": True},
        ),
        (GPU, {"precision": "fp16"}, {"head_multiple": 128, "adds_bias_apart": True}),
        (GPU, {"precision": "fp32"}, {"adds_bias_apart": True}),
        (GPU, {"precision": "fp32", "compile": False}, {}),
        (CPU, {"precision": "bf16"}, {"head_chunk_tokens": CHUNK, "attention": "blocks"}),
        (CPU, {"precision": "fp32"}, {"head_chunk_tokens": CHUNK}),
        (CPU, {"precision": "bf16", "compile": True}, {"head_multiple": 128}),
        (
            GPU,
            {"precision": "bf16"} | ASKED,
            {  # 128 tokens in 3 chunks
                "head_chunk_tokens": 43,
                "activation_checkpointing": True,
                "head_multiple": 128,
                "adds_bias_apart": True,
            },
        ),
    ],
)
def test_the_defaults_are_the_fastest_of_the_device_and_keys_override_them(device, keys, options):
    train = resolve_for_device(TrainConfig(**TINY_TRAIN | keys), device)
    model = ModelConfig(**TINY_MODEL | {"vocab_size": 50257, "context_length": 64})
    assert choose_forward_options(model, train, device) == ForwardOptions(**options)


def raise_(error):
    raise error


@pytest.mark.parametrize("broken", [0, 1], ids=["training", "validation"])
def test_a_compile_error_ends_the_run_in_one_line(monkeypatch, tmp_path, broken):
    made = []

    def compile(function, **_):
        made.append(function)
        error = subprocess.CalledProcessError(1, "no compiler found\nsecond line")
        return function if len(made) - 1 != broken else lambda *_: raise_(error)

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(torch, "compile", compile)
    with pytest.raises(UserError, match="^compiling failed: .*no compiler found") as caught:
        step_of(compile=True, n_layers=1, validation_interval=1, validation_batches=1)
    assert "\n" not in str(caught.value) and caught.value.status == 2
    assert f"remove {tmp_path}/.cache/ddp-train/inductor" in str(caught.value)  # kept by reboots


@pytest.mark.parametrize(
    "failure",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        BackendCompilerFailed("inductor", RuntimeError("Triton Error [CUDA]: out of memory"), None),
    ],
    ids=["allocator", "dynamo"],
)
def test_out_of_memory_is_not_a_compile_error(failure):
    with pytest.raises(type(failure)) as caught:
        compile_now(lambda: raise_(failure))
    assert caught.value is failure


V, T = 257, 16


def measured_step(**changes):
    return step_of(
        **{
            "validation_interval": None,
            "validation_batches": None,
            "checkpoint_interval": 1,
            "diagnostics_interval": 1,
        }
        | changes
    )


def take(step, batches, num_steps=1):
    """Take steps, all of them measured; return what was measured."""
    step.diagnostics = Diagnostics(step.config.diagnostics_interval, step.config.precision)
    for global_step in range(num_steps):
        step.diagnostics.begin_step(global_step)
        step.take(batches, num_microbatches=2, learning_rate=0.01)
    return [found.numbers for found in step.diagnostics.pop_measured(up_to=10**6)]


def norm(tensors):
    return sum(tensor.double().square().sum() for tensor in tensors).sqrt().item()


def by_layer(named):
    """Tensors of each layer, then of the embeddings, then of final norm and head."""
    prefixes = (
        "blocks.0.",
        "blocks.1.",
        ("token_embedding", "position_embedding"),
        ("final_norm", "head"),
    )
    return [
        [tensor for name, tensor in named.items() if name.startswith(prefix)] for prefix in prefixes
    ]


@pytest.mark.parametrize("tie_weights", [False, True])
def test_gradients_and_updates_are_those_of_the_step(tie_weights):
    changes = {"drop_rate": 0.0, "clipping_max_norm": 0.01, "tie_weights": tie_weights}
    step, plain = measured_step(**changes), measured_step(**changes)
    model = plain.state.model
    for microbatch in (batch for batch, _ in zip(microbatches(), range(2), strict=False)):
        (model(*microbatch[1:]) / 2).backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    before = {name: weight.detach() for name, weight in model.named_parameters()}
    [found] = take(step, microbatches())
    lists = {name for name, value in found.items() if isinstance(value, list)}
    assert lists == {key for key in METRICS if key.startswith("layer_")}
    assert found.keys() <= METRICS.keys()  # so that the reader checks them
    with torch.no_grad():  # of the last microbatch, on the weights before the update
        loss = F.cross_entropy(model(microbatch[1])[0], microbatch[2][0], reduction="none")
    assert found["token_loss_max"] == pytest.approx(loss.max().item(), rel=1e-4)
    updates = {
        name: weight.detach() - before[name] for name, weight in step.state.model.named_parameters()
    }
    grad_norms = [norm(part) for part in by_layer(gradients)]  # before they are clipped
    ratios = [
        norm(update) / norm(weights)
        for update, weights in zip(by_layer(updates), by_layer(before), strict=True)
    ]
    for name, (*layers, embedding, head) in (("grad_norm", grad_norms), ("update_ratio", ratios)):
        assert found[f"layer_{name}"] == pytest.approx(layers, rel=1e-4)
        assert found[f"embedding_{name}"] == pytest.approx(embedding, rel=1e-4)
        assert found[f"head_{name}"] == pytest.approx(head, rel=1e-4)


@pytest.mark.parametrize(
    "changes",
    [{"precision": "bf16"}, {"optimizer": "muon"}, {"activation_checkpointing": True}],
    ids=str,
)
def test_the_training_is_the_same_bit_for_bit(changes):
    trained = []
    for interval in (None, 2):
        step, batches = measured_step(diagnostics_interval=interval, **changes), microbatches()
        assert len(take(step, batches, num_steps=5)) == (0 if interval is None else 2)
        trained.append(step.state)
    for a, b in zip(trained[0].model.parameters(), trained[1].model.parameters(), strict=True):
        assert torch.equal(a, b)
    states = [state.optimizer.state_dict()["state"] for state in trained]
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_a_run_records_its_diagnostics_stops_and_resumes(workplace):
    """Twelve steps on two processes, in two launches, all of them measured."""
    run_dir = workplace.add_run(train={"diagnostics_interval": 1})
    workplace.add_dataset()
    succeeded(workplace.torchrun(2, "tiny", "--max-steps", "7"))
    succeeded(workplace.torchrun(2, "tiny"))
    records = read_metrics(run_dir / "metrics.jsonl")
    measured = [record for record in records if "layer_grad_norm" in record]
    assert [record["global_step"] for record in measured] == list(range(12))
    grad_norms = [
        math.hypot(*one["layer_grad_norm"], one["embedding_grad_norm"], one["head_grad_norm"])
        for one in measured
    ]
    reports = {one["global_step"]: one for one in records if "train_loss" in one}
    assert list(reports) == [4, 6, 9, 11]
    for first, last in ((0, 4), (5, 6), (7, 9), (10, 11)):
        largest = max(grad_norms[first : last + 1])  # of the averaged gradients
        assert reports[last]["grad_norm_max"] == pytest.approx(largest, rel=1e-3)
    assert summary_of(run_dir)["seconds"]["diagnostics"] > 0
    assert (run_dir / "layers-chart.png").exists()


def direct_attention(q, k):
    """The largest logit and the mean entropy of causal attention, from all logits at once."""
    logits = q.double() @ k.double().transpose(-1, -2) / math.sqrt(q.shape[-1])
    allowed = torch.ones(logits.shape[-2:]).tril().bool()
    weights = logits.masked_fill(~allowed, -math.inf).softmax(dim=-1)
    entropy = -(weights * weights.clamp_min(1e-300).log()).sum(dim=-1).mean()
    return logits[..., allowed].max().float(), entropy.float()


@pytest.mark.parametrize("cached_logits", [2**23, 5 * V])
def test_the_statistics_are_those_of_a_forward_pass_without_dropout(cached_logits, monkeypatch):
    torch.manual_seed(0)
    model = GPTModel(ModelConfig(**TINY_MODEL | {"n_layers": 3}))
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight.mul_(20)  # attention that is far from uniform
    token_ids, targets = torch.randint(V, (2, 1, T), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(diagnostics, "CACHED_LOGITS", cached_logits)
    found = forward_statistics(model, token_ids, targets)
    monkeypatch.setattr(diagnostics, "MAX_SORTED", 4 * V)
    of_some = forward_statistics(model, token_ids, targets)
    assert all(module.training for module in model.modules())
    outputs, attention = [], []
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, output: outputs.append(output))
        block.attention.register_forward_hook(
            lambda module, inputs, _: attention.append(
                torch.stack(direct_attention(*module.project(inputs[0])[:2]))
            )
        )
    with torch.no_grad():
        logits = model.eval()(token_ids)[0]
        embedded = model.token_embedding(token_ids) + model.position_embedding.weight
    largest, entropies = torch.stack(attention).unbind(1)
    losses = F.cross_entropy(logits, targets[0], reduction="none").sort().values
    ordered, n = logits.flatten().sort().values, T * V - 1
    wanted = {
        "embedding_activation_norm": embedded.norm(dim=-1).mean(),
        "layer_activation_norm": torch.stack([each.norm(dim=-1).mean() for each in outputs]),
        "layer_max_attention_logit": largest,
        "layer_attention_entropy": entropies,
        "token_loss_p1": losses[0],
        "token_loss_p50": losses[8],
        "token_loss_p99": losses[15],
        "token_loss_max": losses[15],
        "logit_max": ordered[n],
        **{f"logit_p{percent}": ordered[round(percent / 100 * n)] for percent in (1, 50, 99)},
    }
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        of_some["logit_p50"],  # of many logits, those of some tokens
        logits[::4].flatten().sort().values[round((4 * V - 1) / 2)],
    )
    torch.testing.assert_close(of_some["logit_max"], ordered[n])  # of all


SETTINGS = {"min_train_tokens": 31 * 128, "validation_interval": 25, "diagnostics_interval": 10}


def with_lag(workplace, *arguments, **environment):
    return forked(
        "tests/support/torchrun_workers.py",
        ["train-with-lag", str(workplace.root), *workplace.arguments(*arguments)],
        num_processes=2,
        environment=environment,
    )


def test_late_reports_say_the_same_also_after_a_stop(workplace):
    workplace.add_dataset()
    prompt, late = (workplace.add_run(name, train=SETTINGS) for name in ("prompt", "late"))
    succeeded(workplace.torchrun(2, "prompt"))
    succeeded(with_lag(workplace, "late", "--max-steps", "25"))
    succeeded(with_lag(workplace, "late"))
    assert metrics_of(late) == metrics_of(prompt) and weights_of(late) == weights_of(prompt)
    assert summary_of(late)["train_loss"] == summary_of(prompt)["train_loss"]
    steps = [record for record in read_lines(late / "metrics.jsonl") if "train_loss" in record]
    seconds = [record["seconds"] for record in steps]
    assert seconds == sorted(set(seconds))  # each of its own moment
    assert all(record["tokens_per_second"] > 0 for record in steps)


def test_the_wait_for_a_microbatch_is_booked_as_waiting(monkeypatch, now):
    def slow(*_, **__):
        for item in range(5):
            now.seconds += 2
            yield item

    monkeypatch.setattr(ddp_train, "read_ahead", slow)
    data = SimpleNamespace(plan=None, training=None)
    watchdog, clock = MagicMock(process=ONE_PROCESS), PhaseClock()
    waiting = ddp_train.read_microbatches(data, 0, watchdog, clock)
    assert [next(waiting), next(waiting)] == [0, 1]
    now.seconds += 7
    assert clock.read()["waiting"] == 4 and clock.read()["startup"] == 7
    assert watchdog.heartbeat.call_count == 2 and list(waiting) == [2, 3, 4]
