import json
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from basics.json_files import to_json
from gpt import GPTModel
from processes.launch import Process
from reporting.metrics_file import METRICS, read_metrics
from run_config import ModelConfig, TrainConfig
from tests.support import models
from tests.support.models import microbatches
from tests.support.workplace import TINY_MODEL, TINY_TRAIN, succeeded
from trainer import diagnostics
from trainer.compilation import ByLayer
from trainer.diagnostics import (
    NO_PROBE,
    Diagnostics,
    attention_statistics,
    forward_statistics,
)

V, T = 257, 16
WITHOUT_VALIDATION = {"validation_interval": None, "validation_batches": None,
                      "checkpoint_interval": 1}


def step_of(**changes):
    return models.step_of(**WITHOUT_VALIDATION | {"diagnostics_interval": 1} | changes)


def take(step, batches, num_steps=1):
    """Take steps, all of them measured; return what was measured."""
    measuring = Diagnostics(step.train, step.process)
    for global_step in range(num_steps):
        step.take(batches, num_microbatches=2, learning_rate=0.01,
                  probe=measuring.probe(global_step))
    return [probe.numbers for probe in measuring.measured(up_to=10**6)]


def norm(tensors):
    return sum(tensor.double().square().sum() for tensor in tensors).sqrt().item()


def by_layer(named):
    """Tensors of each layer, then of the embeddings, then of final norm and head."""
    prefixes = ("blocks.0.", "blocks.1.", ("token_embedding", "position_embedding"),
                ("final_norm", "head"))
    return [[tensor for name, tensor in named.items() if name.startswith(prefix)]
            for prefix in prefixes]


@pytest.mark.parametrize("tie_weights", [False, True])
def test_gradients_and_updates_are_those_of_the_step(tie_weights):
    changes = {"drop_rate": 0.0, "clipping_max_norm": 0.01, "tie_weights": tie_weights}
    step, plain = step_of(**changes), step_of(**changes)
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
    updates = {name: weight.detach() - before[name]
               for name, weight in step.state.model.named_parameters()}
    grad_norms = [norm(part) for part in by_layer(gradients)]  # before they are clipped
    ratios = [norm(update) / norm(weights)
              for update, weights in zip(by_layer(updates), by_layer(before), strict=True)]
    for name, (*layers, embedding, head) in (("grad_norm", grad_norms), ("update_ratio", ratios)):
        assert found[f"layer_{name}"] == pytest.approx(layers, rel=1e-4)
        assert found[f"embedding_{name}"] == pytest.approx(embedding, rel=1e-4)
        assert found[f"head_{name}"] == pytest.approx(head, rel=1e-4)


@pytest.mark.parametrize("changes", [{"precision": "bf16"}, {"optimizer": "muon"},
                                     {"activation_checkpointing": True}], ids=str)
def test_the_training_is_the_same_bit_for_bit(changes):
    trained = []
    for interval in (None, 2):
        step, batches = step_of(diagnostics_interval=interval, **changes), microbatches()
        assert len(take(step, batches, num_steps=5)) == (0 if interval is None else 2)
        trained.append(step.state)
    for a, b in zip(trained[0].model.parameters(), trained[1].model.parameters(), strict=True):
        assert torch.equal(a, b)
    states = [state.optimizer.state_dict()["state"] for state in trained]
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_nothing_is_compiled_again(monkeypatch):
    """Dynamo decides what is compiled; a compiler that takes long is not needed for that."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    step, batches = step_of(compile=False), microbatches()
    step.parallel_loss = ByLayer(step.state.model)
    for _ in range(2):
        step.take(batches, num_microbatches=2, learning_rate=0.01)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert len(take(step, batches, num_steps=3)) == 3
        with pytest.raises(RuntimeError, match="fail_on_recompile"):  # it would have been seen
            step.parallel_loss(*torch.ones(2, 1, 8, dtype=torch.int64))


def test_a_step_that_is_not_finite_is_recorded_with_null():
    step = step_of()
    step.state.model.blocks[1].mlp.up.weight.register_hook(lambda grad: grad * float("inf"))
    [found] = take(step, microbatches())
    record = json.loads(to_json(found))
    assert record["layer_grad_norm"][1] is None and record["layer_grad_norm"][0] > 0
    assert record["layer_update_ratio"] == [0.0, 0.0]  # it was skipped


def test_only_every_so_many_steps_are_measured_and_only_on_rank_0():
    train = TrainConfig(**TINY_TRAIN | {"diagnostics_interval": 4})
    ranks = [Diagnostics(train, Process(rank, rank, 2, torch.device("cpu"))) for rank in range(2)]
    probes = [[rank.probe(global_step) for global_step in range(9)] for rank in ranks]
    assert [place for place, probe in enumerate(probes[0]) if probe is not NO_PROBE] == [3, 7]
    assert probes[1] == [NO_PROBE] * 9


def test_a_run_records_its_diagnostics_stops_and_resumes(workplace):
    """Twelve steps on two processes, in two launches, all of them measured."""
    run_dir = workplace.add_run(train={"diagnostics_interval": 1})
    workplace.add_dataset()
    succeeded(workplace.torchrun(2, "tiny", "--max-steps", "7"))
    succeeded(workplace.torchrun(2, "tiny"))
    records, grad_norms = read_metrics(run_dir / "metrics.jsonl"), []
    for record in records:
        if "layer_grad_norm" in record:
            assert len(record["layer_grad_norm"]) == 2
            assert record["global_step"] == len(grad_norms)  # in order, each step once
            parts = [*record["layer_grad_norm"], record["embedding_grad_norm"],
                     record["head_grad_norm"]]
            grad_norms.append(math.hypot(*parts))
    assert len(grad_norms) == 12
    reports = [record for record in records if "train_loss" in record]
    assert [record["global_step"] for record in reports] == [4, 6, 9, 11]
    for first, report in zip((0, 5, 7, 10), reports, strict=True):
        window = grad_norms[first : report["global_step"] + 1]  # of the averaged gradients
        assert report["grad_norm_max"] == pytest.approx(max(window), rel=1e-3)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert 0 < summary["seconds"]["diagnostics"] < sum(summary["seconds"].values())
    assert (run_dir / "layers-chart.png").read_bytes()[:4] == b"\x89PNG"


def direct_attention(q, k):
    """The largest logit and the mean entropy of causal attention, from all logits at once."""
    logits = q.double() @ k.double().transpose(-1, -2) / math.sqrt(q.shape[-1])
    allowed = torch.ones(logits.shape[-2:]).tril().bool()
    weights = logits.masked_fill(~allowed, -math.inf).softmax(dim=-1)
    entropy = -(weights * weights.clamp_min(1e-300).log()).sum(dim=-1).mean()
    return logits[..., allowed].max().float(), entropy.float()


def test_attention_in_blocks_is_that_of_all_logits():
    generator = torch.Generator().manual_seed(2)
    q, k = torch.randn(2, 2, 3, 300, 8, generator=generator)  # two whole blocks, and a part
    q[0, 0, 0], k[0, 0, 299] = 9.0, 9.0  # a query before its key: masked
    found = attention_statistics(q, k)
    torch.testing.assert_close(found, direct_attention(q, k))
    assert found[0] < 9 * 9 * 8**0.5


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
        block.attention.register_forward_hook(lambda module, inputs, _: attention.append(
            torch.stack(direct_attention(*module.project(inputs[0])[:2]))))
    with torch.no_grad():
        logits = model.eval()(token_ids)[0]
        embedded = model.token_embedding(token_ids) + model.position_embedding.weight
    largest, entropies = torch.stack(attention).unbind(1)
    losses = F.cross_entropy(logits, targets[0], reduction="none").sort().values
    ordered, n = logits.flatten().sort().values, T * V - 1
    wanted = {
        "embedding_activation_norm": embedded.norm(dim=-1).mean(),
        "layer_activation_norm": torch.stack([each.norm(dim=-1).mean() for each in outputs]),
        "layer_max_attention_logit": largest, "layer_attention_entropy": entropies,
        "token_loss_p1": losses[0], "token_loss_p50": losses[8], "token_loss_p99": losses[15],
        "token_loss_max": losses[15], "logit_max": ordered[n],
        **{f"logit_p{percent}": ordered[round(percent / 100 * n)] for percent in (1, 50, 99)}}
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(of_some["logit_p50"],  # of many logits, those of some tokens
                               logits[::4].flatten().sort().values[round((4 * V - 1) / 2)])
    torch.testing.assert_close(of_some["logit_max"], ordered[n])  # of all
