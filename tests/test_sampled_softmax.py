"""Sampled softmax: the estimate, its gradients, and runs that train with it."""

import json
import shutil
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from basics.checkpoint_files import directory_of
from basics.device import CPU
from basics.errors import UserError
from lab.plan.estimate import flops_per_token
from ops.sampled_cross_entropy import Candidates, sampled_cross_entropy
from run_config import load_run
from tests.support.models import microbatches, step_of
from tests.support.runs import metrics_of, validations_of, weights_of
from tests.support.workplace import Workplace, succeeded

V, C, N = 500, 16, 64


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, C, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(V, C, generator=generator) / 2).requires_grad_()
    return x, weight, torch.randint(V, (N,), generator=generator)


def candidates_of(count, *, draw=0, seed=1):
    candidates = Candidates(V, count, seed=seed, device=CPU)
    candidates.draw(draw)
    return candidates


def with_gradients(loss, *tensors):
    return [loss.detach(), *torch.autograd.grad(loss * 3, tensors)]


def plain(x, weight, targets, candidates):
    """Compute the estimate as its definition says, in float64."""
    x, weight = x.double(), weight.double()
    losses = []
    for token, target in zip(x, targets.tolist(), strict=True):
        total = (token @ weight[target]).exp()
        for place, entry in enumerate(candidates.ids.tolist()):
            if entry != target:
                total = total + candidates.log_weights[place].exp() * (token @ weight[entry]).exp()
        losses.append(total.log() - token @ weight[target])
    return torch.stack(losses).mean()


@pytest.mark.parametrize(
    ("chunk_tokens", "dtype", "tolerance"),
    [
        (None, None, 1e-6),
        (24, None, 1e-6),
        (1, torch.bfloat16, 2e-2),
        (24, torch.float16, 2e-3),
    ],
)
def test_loss_and_gradients_are_those_of_the_definition(chunk_tokens, dtype, tolerance):
    x, weight, targets = inputs()
    candidates = candidates_of(100, draw=3)
    assert 5 < (candidates.columns[targets] >= 0).sum() < N - 5  # both kinds of targets
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = sampled_cross_entropy(x, weight, targets, candidates, chunk_tokens=chunk_tokens)
        values = with_gradients(loss, x, weight)
    assert [value.dtype for value in values] == [torch.float32] * 3
    for value, wanted in zip(
        values, with_gradients(plain(x, weight, targets, candidates), x, weight), strict=True
    ):
        assert (value - wanted).norm() <= tolerance * wanted.norm()


def test_with_all_entries_it_is_the_cross_entropy():
    x, weight, targets = inputs()
    found = sampled_cross_entropy(x, weight, targets, candidates_of(V, draw=7))
    wanted = F.cross_entropy(x @ weight.T, targets)
    for value, other in zip(
        with_gradients(found, x, weight), with_gradients(wanted, x, weight), strict=True
    ):
        torch.testing.assert_close(value, other)


def test_every_entry_takes_part_as_often_as_its_weight_says():
    """The first half of the candidates in each draw, each other entry in as many as any other."""
    count, first = 100, 50
    num_draws = V - first  # after which all turns have come round
    candidates, times = candidates_of(count), torch.zeros(V, dtype=torch.int64)
    for number in range(num_draws):
        candidates.draw(number)
        assert len(candidates.ids.unique()) == count
        assert torch.equal(candidates.columns[candidates.ids], torch.arange(count))
        assert (candidates.columns >= 0).sum() == count
        times[candidates.ids] += 1
    assert (times[:first] == num_draws).all() and (times[first:] == first).all()
    share = torch.ones(count)
    share[first:] = first / num_draws
    torch.testing.assert_close(candidates.log_weights, -share.log())


def test_the_candidates_of_two_draws_have_no_others_in_common():
    first, second = (set(candidates_of(100, draw=number).ids.tolist()) for number in (3, 4))
    assert first & second == set(range(50))


def test_the_estimate_is_about_the_loss_of_all_entries():
    x, weight, targets = inputs()
    losses = [
        sampled_cross_entropy(x, weight, targets, candidates_of(100, draw=number)).item()
        for number in range(45)
    ]
    wanted = F.cross_entropy(x @ weight.T, targets).item()
    # Below it, since the logarithm of a mean is above the mean of the logarithms.
    assert wanted - 0.25 < sum(losses) / len(losses) < wanted


def test_the_candidates_are_a_function_of_the_seed_and_the_draw():
    again, other = candidates_of(100, draw=5), candidates_of(100, draw=5, seed=2)
    candidates = candidates_of(100, draw=9)
    ids = candidates.ids
    candidates.draw(5)
    assert candidates.ids is ids and torch.equal(ids, again.ids)  # compiled code reads it
    assert not torch.equal(ids, other.ids)


@pytest.mark.thorough
def test_compiled_code_reads_the_candidates_of_each_draw_and_computes_the_same():
    x, weight, targets = inputs()
    candidates = candidates_of(100)
    torch.compiler.reset()
    function = torch.compile(
        lambda: sampled_cross_entropy(x, weight, targets, candidates),
        fullgraph=True,
        dynamic=False,
    )
    for number in range(3):
        candidates.draw(number)
        wanted = sampled_cross_entropy(x, weight, targets, candidates_of(100, draw=number))
        torch.testing.assert_close(
            with_gradients(function(), x, weight), with_gradients(wanted, x, weight)
        )


# --- runs

TRAIN = {
    "sampled_softmax": 100,
    "gradient_accumulation_steps": None,
    "global_batch_size": 8,
    "schedule": "linear",
    "sample_prompts": [],
}


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """A run of 12 steps on two processes."""
    workplace = Workplace(tmp_path_factory.mktemp("sampled"))
    workplace.add_dataset()
    workplace.add_run("sampled", train=TRAIN)
    return workplace, succeeded(workplace.torchrun(2, "sampled")).stdout


def test_a_launch_says_what_its_loss_has_and_reports_that_of_all_entries(sampled):
    workplace, said = sampled
    assert (
        "\nsampled softmax: the loss has 100 of 257 entries of the vocabulary; in each 5th step it"
        " has all and is reported\n" in said
    )
    records = metrics_of(workplace.runs_dir / "sampled")
    found = [record for record in records if "train_loss" in record]
    assert [record["global_step"] for record in found] == [4, 9]  # of steps 2 and 7
    assert all(record["train_loss_min"] == record["train_loss_max"] for record in found)
    validated = [record["validation_loss"] for record in records if "validation_loss" in record]
    assert found[0]["train_loss"] == pytest.approx(validated[0], abs=0.1)  # of all entries, too
    last = records[-2]  # of steps 10 and 11
    assert last["global_step"] == 11 and "train_loss" not in last and last["grad_norm"] > 0
    summary = json.loads((workplace.runs_dir / "sampled/summary.json").read_text())
    assert summary["train_loss"] == found[1]["train_loss"]
    assert "nan" not in said
    assert [record["skipped_steps"] for record in found] == [0, 0]
    assert found[0]["grad_norm"] != found[0]["grad_norm_max"]  # of all steps


def test_stopped_anywhere_it_ends_bit_for_bit_the_same(sampled):
    workplace = sampled[0]
    run_dir, whole = workplace.add_run("parts", train=TRAIN), workplace.runs_dir / "sampled"
    for num_steps in ("3", "2"):
        succeeded(workplace.torchrun(2, "parts", "--max-steps", num_steps))
    succeeded(workplace.torchrun(2, "parts"))
    assert weights_of(run_dir) == weights_of(whole)
    assert validations_of(run_dir) == validations_of(whole)


def test_the_number_of_processes_changes_no_candidates(sampled):
    workplace = sampled[0]
    run_dir = workplace.add_run("alone", train=TRAIN)
    succeeded(workplace.torchrun(1, "alone"))
    found, wanted = (
        load_file(directory_of(each / "checkpoints/latest") / "model.safetensors")
        for each in (run_dir, workplace.runs_dir / "sampled")
    )
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-4)


def test_made_longer_after_a_report_without_a_loss_it_warns_of_the_rate_that_rises(sampled):
    workplace = sampled[0]
    run_dir = workplace.runs_dir / "longer"
    shutil.copytree(workplace.runs_dir / "sampled", run_dir, symlinks=True)
    settings = json.loads((run_dir / "train.json").read_text())
    settings["min_train_tokens"] *= 2
    (run_dir / "train.json").write_text(json.dumps(settings))
    said = succeeded(workplace.torchrun(1, "longer", "--max-steps", "1")).stdout
    assert "the learning rate rises" in said


@pytest.mark.parametrize("tie_weights", [False, True])
def test_each_fifth_step_has_all_entries_and_the_others_turn_by_turn(tie_weights):
    step, source, draws = step_of(sampled_softmax=50, tie_weights=tie_weights), microbatches(), []
    before = step.state.model.head_weight.clone()
    with patch.object(Candidates, "draw", lambda _, number: draws.append(number)):
        losses = [
            step.take(source, num_microbatches=2, learning_rate=0.01, global_step=number)[0]
            for number in range(11)
        ]
    assert [number for number, loss in enumerate(losses) if loss.isfinite()] == [2, 7]
    assert draws == [*range(9)]
    assert (step.state.model.head_weight != before).any(1).all()


def test_the_training_loss_has_candidates_and_the_validation_loss_all_entries():
    model, (_, *batch) = step_of(drop_rate=0.0).state.model, next(microbatches())
    with torch.no_grad():
        wanted = model(*batch)
        model.candidates = Candidates(257, 50, seed=1, device=CPU)
        assert model(*batch) != wanted
        assert torch.equal(model.eval()(*batch), wanted)


def test_compiled_training_follows_the_candidates_and_their_absence():
    model, (_, *batch) = step_of(drop_rate=0.0).state.model, next(microbatches())
    function = torch.compile(lambda: model(*batch), backend="eager", fullgraph=True, dynamic=False)
    candidates, parameters = Candidates(257, 50, seed=1, device=CPU), list(model.parameters())
    for number, present in enumerate((candidates, None, candidates, None)):
        candidates.draw(number)
        model.candidates = present
        with torch._dynamo.config.patch(error_on_recompile=number >= 2):
            found = with_gradients(function(), *parameters)
        torch.testing.assert_close(found, with_gradients(model(*batch), *parameters))


def test_its_flops_lack_most_of_the_head_in_four_of_five_steps(workplace):
    workplace.add_run(train={"sampled_softmax": 57})
    run = load_run(workplace.runs_dir, "tiny")
    left_out = 6 * 200 * run.model.emb_dim * 4 / 5
    assert run.config.flops_per_token(run.model) == run.model.flops_per_token - left_out
    assert flops_per_token(run, 10) == run.model.flops_per_token - left_out


@pytest.mark.parametrize(
    ("sampled_softmax", "message"),
    [
        (257, "sampled_softmax is 257, and model.json has vocab_size 257; make"),
        (1, "sampled_softmax should be greater than or equal to 2"),
        ("8", "sampled_softmax"),
    ],
)
def test_candidates_that_cannot_be_are_refused(workplace, sampled_softmax, message):
    workplace.add_run(train={"sampled_softmax": sampled_softmax})
    with pytest.raises(UserError) as caught:
        load_run(workplace.runs_dir, "tiny")
    assert message in str(caught.value) and "train.json" in str(caught.value)
    assert "\n" not in str(caught.value)
