"""Growth in depth: first the lowest layers alone, then all of them; the same however it is run."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from basics.checkpoint_files import directory_of
from basics.errors import UserError
from basics.failpoints import VARIABLE
from checkpointing import Checkpoint, list_checkpoints
from ddp_train import TrainingStep
from reporting.metrics_file import NUM_LAYERS
from run_config import Run, TrainConfig, load_run
from settings.weights import Grow
from tests.support.lab_cli import publish
from tests.support.lab_cli import succeeded as verb_succeeded
from tests.support.models import MODEL, ONE_PROCESS, describe, microbatches
from tests.support.runs import metrics_of, validations_of, weights_of
from tests.support.workplace import TINY_TRAIN, Workplace, forked, read_lines, succeeded
from trainer.growth import grown_state, shallow_state
from trainer.loss_functions import build_training_state
from trainer.models import load_model
from trainer.precision import resolve_for_device
from trainer.resuming import check_same_run

GROW = {"from_layers": 1, "at": 0.5}
DEEP = {"n_layers": 4}


def growing_run(tmp_path, *, init="gpt2", **train):
    config = TrainConfig(**TINY_TRAIN | {"grow": GROW} | train)
    model = MODEL.with_layers(4).model_copy(update={"init": init})
    return Run("tiny", tmp_path, model, resolve_for_device(config, torch.device("cpu")))


def take_steps(state, run, number):
    step, source = TrainingStep(state, run.config, ONE_PROCESS), microbatches()
    return [step.take(source, num_microbatches=2, learning_rate=0.01)[0] for _ in range(number)]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("init", ["gpt2", "torch", "zero_projections"])
def test_a_grown_model_computes_the_same_to_the_last_bit(tmp_path, init, optimizer):
    run = growing_run(tmp_path, init=init, optimizer=optimizer)
    small = shallow_state(run, 1, ONE_PROCESS)
    take_steps(small, run, 3)
    grown = grown_state(small, run, ONE_PROCESS)
    assert len(small.model.blocks) == 1 and len(grown.model.blocks) == 4
    assert any(parameter.any() for parameter in grown.model.blocks[3].attention.qkv.parameters())
    _, *batch = next(microbatches())
    small.model.eval(), grown.model.eval()
    assert torch.equal(small.model(batch[0]), grown.model(batch[0]))
    assert torch.equal(small.model(*batch), grown.model(*batch))
    before = [block.attention.output.weight.clone() for block in grown.model.blocks[1:]]
    take_steps(grown, run, 1)
    for old, block in zip(before, grown.model.blocks[1:], strict=True):  # and it learns
        assert not old.any() and block.attention.output.weight.any()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_what_was_trained_keeps_its_optimizer_state_and_new_layers_have_none(tmp_path, optimizer):
    run = growing_run(tmp_path, optimizer=optimizer)
    small = shallow_state(run, 1, ONE_PROCESS)
    take_steps(small, run, 3)
    grown = grown_state(small, run, ONE_PROCESS)
    old = dict(small.model.named_parameters())
    for name, parameter in grown.model.named_parameters():
        found = grown.optimizer.state.get(parameter, {})
        wanted = small.optimizer.state[old[name]] if name in old else {}
        assert found.keys() == wanted.keys()
        assert all(found[key] is wanted[key] for key in wanted)
    assert grown.scaler is small.scaler
    take_steps(grown, run, 1)
    if optimizer == "adamw":
        steps = [grown.optimizer.state[block.mlp.up.weight]["step"] for block in grown.model.blocks]
        assert [step.item() for step in steps] == [4, 1, 1, 1]


@pytest.mark.parametrize("init", ["gpt2", "zero_projections"])
def test_layers_begin_as_in_a_run_without_growth(tmp_path, init):
    run = growing_run(tmp_path, init=init)
    whole = build_training_state(run.model, run.config, ONE_PROCESS).model.state_dict()
    small = shallow_state(run, 2, ONE_PROCESS)
    grown = grown_state(small, run, ONE_PROCESS).model.state_dict()
    for name, value in small.model.state_dict().items():
        assert torch.equal(value, whole[name])
    for name, value in grown.items():
        is_new = name.startswith(("blocks.2.", "blocks.3."))
        assert torch.equal(
            value, torch.zeros_like(value) if is_new and "output" in name else whole[name]
        )


@pytest.mark.parametrize(
    ("at", "num_steps", "step"),
    [(0.5, 12, 6), (0.01, 12, 1), (0.99, 12, 11), (0.7, 10, 7), (0.5, 1, 0)],
)
def test_the_step_of_growth_is_a_share_of_the_steps(at, num_steps, step):
    config = TrainConfig(**TINY_TRAIN | {"grow": {"at": at}})
    assert config.grow == Grow(from_layers=1, at=at)
    assert config.growth_step(num_steps) == step
    assert TrainConfig(**TINY_TRAIN).growth_step(num_steps) == 0


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"grow": {"from_layers": 4, "at": 0.5}}, "from_layers 4, and model.json has n_layers 4"),
        (
            {"grow": {"from_layers": 0, "at": 0.5}},
            "grow.from_layers should be greater than or equal to 1, found 0",
        ),
        ({"grow": {"from_layers": 1, "at": 1}}, "grow.at should be less than 1, found 1"),
        ({"grow": {"from_layers": 1}}, "grow.at"),
        ({"grow": {"layers": 1, "at": 0.5}}, "grow.layers"),
        ({"grow": GROW, "init_from": "demo"}, "init_from has weights of all layers: drop one"),
    ],
)
def test_a_growth_that_cannot_be_is_refused(workplace, train, message):
    workplace.add_run(model=DEEP, train=train)
    with pytest.raises(UserError) as caught:
        load_run(workplace.runs_dir, "tiny")
    assert message in str(caught.value) and "train.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def saved_at_one_layer(run, settings):
    meta = describe(3).model_copy(update={"model": MODEL.with_layers(1), "settings": settings})
    return Checkpoint(run.run_dir / "checkpoint", meta)


def test_a_checkpoint_of_few_layers_belongs_to_the_run_whose_depth_it_names(tmp_path):
    run = growing_run(tmp_path)
    data = describe(3).data
    check_same_run(saved_at_one_layer(run, {"n_layers": 4}), run, data)
    ungrown = replace(run, config=run.config.model_copy(update={"grow": None}))
    check_same_run(saved_at_one_layer(run, {"n_layers": 4}), ungrown, data)  # it grows at once
    with pytest.raises(UserError, match="n_layers is 1, .* was trained with 4;"):
        only_first = replace(ungrown, model=MODEL.with_layers(1))
        check_same_run(saved_at_one_layer(run, {"n_layers": 4}), only_first, data)
    with pytest.raises(UserError, match="grow.from_layers is 2, .* was trained with 1;"):
        other = growing_run(tmp_path, grow={"from_layers": 2, "at": 0.5})
        check_same_run(saved_at_one_layer(run, {"n_layers": 4}), other, data)
    for settings, before in (({}, 1), ({"n_layers": 12}, 12), ({"n_layers": "4"}, "4")):
        with pytest.raises(UserError, match=f"n_layers is 4, .* was trained with {before};"):
            check_same_run(saved_at_one_layer(run, settings), run, data)
    with pytest.raises(UserError, match="n_layers is 1, .* was trained with 2;"):
        deeper = replace(run, model=MODEL.with_layers(1))
        meta = describe(3).model_copy(update={"settings": {"n_layers": 1}})
        check_same_run(Checkpoint(run.run_dir, meta), deeper, data)


SHARED = {
    "grow": GROW,
    "optimizer": "muon",
    "learning_rate": None,
    "gradient_accumulation_steps": None,
    "global_batch_size": 8,
    "checkpoint_interval": 1,
    "sample_prompts": [],
}


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """A run of 12 steps on two processes, with all of its four layers from its step 6 on."""
    workplace = Workplace(tmp_path_factory.mktemp("grown"))
    workplace.add_run("whole", model=DEEP, train=SHARED)
    workplace.add_dataset()
    return workplace, succeeded(workplace.torchrun(2, "whole")).stdout


def test_a_launch_says_when_it_grows_and_records_it(grown):
    workplace, said = grown
    run_dir = workplace.runs_dir / "whole"
    assert "\n1 layer, 11,744 parameters, until step 6; then 4 layers\n" in said
    assert (
        "step 7/12 | from here on 4 layers, 21,440 parameters; until now 1 layer, 11,744\n" in said
    )
    records = read_lines(run_dir / "metrics.jsonl")
    assert [(r["global_step"], r[NUM_LAYERS]) for r in records if NUM_LAYERS in r] == [(6, 4)]
    depths = [each.meta.model.n_layers for each in list_checkpoints(run_dir / "checkpoints")]
    assert depths == [1] * 6 + [4] * 6


def test_stopped_before_at_and_after_the_growth_it_ends_bit_for_bit_the_same(grown):
    workplace = grown[0]
    run_dir = workplace.add_run("parts", model=DEEP, train=SHARED)
    for num_steps in ("4", "2", "2"):
        succeeded(workplace.torchrun(2, "parts", "--max-steps", num_steps))
    succeeded(workplace.torchrun(2, "parts"))
    whole = workplace.runs_dir / "whole"
    assert weights_of(run_dir) == weights_of(whole)
    assert validations_of(run_dir) == validations_of(whole)
    assert [r for r in metrics_of(run_dir) if NUM_LAYERS in r] == [
        r for r in metrics_of(whole) if NUM_LAYERS in r
    ]
    for file in ("model.safetensors", "optimizer.safetensors"):
        parts, wanted = (
            load_file(directory_of(each / "checkpoints/latest") / file) for each in (run_dir, whole)
        )
        assert parts.keys() == wanted.keys()
        assert all(torch.equal(parts[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("num_processes", [1, 4])
def test_the_number_of_processes_does_not_change_a_grown_model(grown, num_processes):
    workplace = grown[0]
    name = f"on-{num_processes}"
    train, slow = SHARED | {"checkpoint_interval": None}, {}
    if num_processes == 1:  # all layers may take longer to compile than a hang is waited for
        train |= {"hang_timeout_seconds": 6.0}
        slow = {VARIABLE: "compile:slow:seconds=8:hit=2"}
    run_dir = workplace.add_run(name, model=DEEP, train=train)
    succeeded(workplace.torchrun(num_processes, name, **slow))
    reports = [r["global_step"] for r in metrics_of(run_dir) if "train_loss" in r]
    assert reports == [4, 5, 9, 11]  # at validations, and none is of two depths
    found, wanted = (
        load_file(directory_of(each / "checkpoints/latest") / "model.safetensors")
        for each in (run_dir, workplace.runs_dir / "whole")
    )
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-4)


def test_the_loss_scale_of_fp16_goes_on_over_the_growth(grown):
    workplace = grown[0]
    train = SHARED | {"precision": "fp16"}
    run_dir, parts_dir = (workplace.add_run(n, model=DEEP, train=train) for n in ("fp16", "fp16-2"))
    succeeded(workplace.torchrun(1, "fp16"))
    for num_steps in ("6", "1"):  # the second launch grows at its start
        succeeded(workplace.torchrun(1, "fp16-2", "--max-steps", num_steps))
    succeeded(workplace.torchrun(1, "fp16-2"))
    for each in (run_dir, parts_dir):
        scales = [found.meta.loss_scale for found in list_checkpoints(each / "checkpoints")]
        assert [scale.growth_tracker for scale in scales] == [*range(1, 13)]  # none is skipped
    assert weights_of(parts_dir) == weights_of(run_dir)


def test_a_checkpoint_is_saved_before_the_growth(grown):
    """A launch that is killed while all layers compile has lost no step."""
    workplace = grown[0]
    train = SHARED | {"checkpoint_interval": None, "keep_checkpoints": None}
    run_dir = workplace.add_run("saved", model=DEEP, train=train)
    killed = workplace.torchrun(1, "saved", **{VARIABLE: "compile:kill:hit=2"})
    assert killed.returncode != 0
    newest = list_checkpoints(run_dir / "checkpoints")[-1].meta
    assert (newest.global_step, newest.model.n_layers) == (5, 1)
    succeeded(workplace.torchrun(1, "saved"))
    steps = [each.meta.global_step for each in list_checkpoints(run_dir / "checkpoints")]
    assert steps == [4, 5, 9, 11]


def test_a_run_that_has_grown_has_one_model_in_memory(grown):
    """Neither an observer nor a frame of the loop keeps the first one."""
    workplace = grown[0]
    workplace.add_run("counted", model=DEEP, train=SHARED)
    arguments = ["count-models", str(workplace.root), *workplace.arguments("counted")]
    worker = "tests/support/torchrun_workers.py"
    said = succeeded(forked(worker, arguments, num_processes=1)).stdout
    assert "models after the growth: 1\n" in said and "models at the end: 1\n" in said


def test_a_validation_that_is_missing_before_the_growth_is_of_the_first_layers(grown):
    workplace = grown[0]
    train = SHARED | {"validation_interval": 3}
    run_dir = workplace.add_run("validated", model=DEEP, train=train)
    succeeded(workplace.torchrun(1, "validated", "--max-steps", "6"))
    (run_dir / "checkpoints/latest/validation.json").unlink()
    said = succeeded(workplace.torchrun(1, "validated")).stdout
    assert said.index("step 6/12 | validation loss") < said.index("step 7/12 | from here on 4")
    steps = [r["global_step"] for r in read_lines(run_dir / "metrics.jsonl") if NUM_LAYERS in r]
    records = read_lines(run_dir / "metrics.jsonl")
    assert steps == [6] and records == sorted(records, key=lambda record: record["global_step"])
    workplace.add_run("at-once", model=DEEP, train=train)
    succeeded(workplace.torchrun(1, "at-once"))
    assert validations_of(run_dir) == validations_of(workplace.runs_dir / "at-once")


def test_a_run_whose_growth_is_dropped_grows_at_once(grown):
    workplace = grown[0]
    run_dir = workplace.add_run("dropped", model=DEEP, train=SHARED)
    succeeded(workplace.torchrun(1, "dropped", "--max-steps", "3"))
    path = run_dir / "train.json"
    settings = json.loads(path.read_text())
    del settings["grow"]
    path.write_text(json.dumps(settings))
    said = succeeded(workplace.torchrun(1, "dropped", "--max-steps", "1")).stdout
    assert "grow was {'from_layers': 1, 'at': 0.5} until step 3 and is not set from here on" in said
    assert "step 4/12 | from here on 4 layers" in said


def test_any_checkpoint_of_a_growing_run_is_exported_with_its_own_layers(grown, tmp_path):
    workplace = grown[0]
    checkpoints = list_checkpoints(workplace.runs_dir / "whole/checkpoints")
    for checkpoint, num_layers in ((checkpoints[3], 1), (checkpoints[-1], 4)):
        loaded = load_model("whole", runs_dir=workplace.runs_dir, checkpoint_name=checkpoint.name)
        assert loaded.model.config.n_layers == num_layers
        out = tmp_path / checkpoint.name
        verb_succeeded(
            publish(workplace, "whole", "--checkpoint", checkpoint.name, "--output", str(out))
        )
        assert json.loads((out / "config.json").read_text())["n_layer"] == num_layers
        exported = load_model(str(out), runs_dir=workplace.runs_dir).model
        token_ids = torch.arange(8)[None]
        assert torch.equal(exported(token_ids), loaded.model(token_ids))
