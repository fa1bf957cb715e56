"""Random run configurations train three steps as a plain reference loop does.

20 configurations, or 500 with --thorough. One alone: `pytest --thorough
tests/trainer/test_against_reference.py -k "configuration and 137-"`.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from basics.errors import UserError
from basics.failpoints import VARIABLE
from checkpointing import CheckpointMeta, SnapshotBuffers, find_checkpoint, save_checkpoint
from ddp_train import microbatch_indices
from lab.publish.export import write_export
from processes.command_line import Options
from processes.startup_agreement import Agreement
from reporting.clock import PhaseClock
from tests.support.checkpoints import ONE_PROCESS
from tests.support.reference_loop import ReferenceLoop, forward, learning_rate, momentum
from tests.support.workplace import Workplace, succeeded, write_tokens
from tokens.batches import prefetch
from trainer.schedule import learning_rate_at, momentum_at
from trainer.startup import PreparedRun, build_state, prepare_run
from trainer.step import TrainingStep
from trainer.targets import load_target
from trainer.weight_average import update_average

NUM_CONFIGURATIONS, SAMPLE = 500, 20
STEPS = 3
# How far rounding moves an element of a gradient, relative to the largest of its tensor; and the
# loss and the gradient's norm, relative to themselves.
ROUNDING = {"fp32": 1e-5, "tf32": 1e-5, "bf16": 6e-2, "fp16": 1e-2}
Configuration = dict[str, dict[str, Any]]


def configuration(number: int) -> Configuration:
    """Draw a run: its two files, and what happens in it. Each number is always the same run."""
    draw = random.Random(number)
    model = draw_model(draw)
    train = draw_batch(draw) | draw_precision(draw, model) | draw_optimizer(draw)
    sequences = train.get("global_batch_size") or (
        train["microbatch_size"] * train.get("gradient_accumulation_steps", 1))
    step_tokens = sequences * model["context_length"]
    num_steps = draw.choice([3, 3, 3, 3, 4, 6, 12])
    start = draw.choice([0, 0, draw.randrange(200)])
    train |= {"dataset": "tiny", "checkpoint_interval": 1, "start_train_token": start,
              "random_seed": draw.choice([42, draw.randrange(2**63)])}
    spare = draw.randrange(step_tokens)
    if draw.random() < 0.5:  # else the file's length decides
        train["min_train_tokens"] = num_steps * step_tokens - spare
        spare = draw.randrange(5 * step_tokens)
    return {"model": model, "train": train, "run": {
        "file_tokens": start + num_steps * step_tokens + 1 + spare,
        "saved_after": draw.choice([1, 2]),
        "skipped_step": draw.choice([None, None, None, 0, 1, 2])}}


def draw_model(draw: random.Random) -> dict[str, Any]:
    n_heads = draw.choice([1, 2, 3, 4])
    return {
        "vocab_size": draw.choice([11, 61, 257, 300]),
        "context_length": draw.choice([2, 5, 8, 16, 33]),
        "n_heads": n_heads, "emb_dim": n_heads * draw.choice([8, 8, 12, 16]),
        "n_layers": draw.choice([1, 2, 3]),
        "drop_rate": draw.choice([0.0, 0.0, 0.1, 0.4]),
        "qkv_bias": draw.random() < 0.5, "tie_weights": draw.random() < 0.5,
        "init": draw.choice(["gpt2", "gpt2", "torch", "zero_projections"]),
    }


def draw_batch(draw: random.Random) -> dict[str, Any]:
    microbatch_size, accumulation = draw.choice([1, 2, 3]), draw.choice([1, 2, 3])
    if draw.random() < 0.3:
        return {"microbatch_size": microbatch_size,
                "global_batch_size": microbatch_size * accumulation}
    return {"microbatch_size": microbatch_size, "gradient_accumulation_steps": accumulation}


def draw_precision(draw: random.Random, model: dict[str, Any]) -> dict[str, Any]:
    options = draw.choice([{"precision": "fp32"}] * 8 + [
        {"use_amp": False}, {"precision": "tf32"}, {"precision": "tf32"}, {"precision": "fp16"},
        {"precision": "fp16"}, {"precision": "bf16"}, {"precision": "bf16"},
        {"precision": "bf16", "residual_dtype": "bf16"}])
    # Without a GPU PyTorch has no flash kernel that can drop.
    kernels = ["auto", "math"] + ["flash"] * (not model["drop_rate"])
    return options | sometimes(
        draw, attention=draw.choice(kernels), head_chunks=draw.choice([1, 2, 3, 7]),
        activation_checkpointing=True)


def draw_optimizer(draw: random.Random) -> dict[str, Any]:
    kind = draw.choice([None, "constant", "cosine", "linear", "wsd"])
    schedule = {"schedule_learning_rate": draw.random() < 0.5} if kind is None else {
        "schedule": kind}
    percent = draw.choice([10, 33.4, 50])
    groups = sometimes(draw, **{f"{group}_{key}": value for group in (
        "matrix", "embedding", "head", "vector") for key, value in (
            ("learning_rate", 10 ** draw.uniform(-4, -2)), ("weight_decay", draw.choice([0.0, 0.3])),
            ("beta1", draw.choice([0.0, 0.8])), ("beta2", draw.choice([0.9, 0.95])))})
    if draw.random() < 0.3:
        groups = {k: v for k, v in groups.items() if k != "vector_weight_decay"} | {
            "decay_norms_and_biases": True}
    return schedule | groups | {"learning_rate": 10 ** draw.uniform(-4, -2)} | sometimes(
        draw, optimizer="muon", weight_decay=draw.choice([0.0, 0.5]),
        cautious_weight_decay=True, beta1=draw.choice([0.0, 0.8]), beta2=draw.choice([0.9, 0.99]),
        epsilon=draw.choice([1e-6, 1e-10]), momentum=draw.choice([0.0, 0.5, 0.9]),
        momentum_warmup_percent=draw.choice([40, 70, 100]),
        clipping_max_norm=10 ** draw.uniform(-2, 0.5), warmup_period_percent=percent,
        decay_period_percent=draw.choice([20, 40, 50]),
        final_learning_rate_fraction=draw.choice([0.0, 0.2, 1.0]),
        weight_average=draw.choice([1, 2, 5]))


def sometimes(draw: random.Random, **options: Any) -> dict[str, Any]:
    """Keep each option with a probability of 0.4."""
    return {key: value for key, value in options.items() if draw.random() < 0.4}


@dataclass
class Differences:
    """The largest differences from the reference, in units of those that rounding explains."""

    found: dict[str, float] = field(default_factory=dict)

    def add(self, what: str, found: Tensor, wanted: Tensor, slack: Tensor | float) -> None:
        """Compare tensors of one shape; a difference up to `slack` is rounding."""
        difference = (found.double() - wanted).abs() / (slack + 1e-30)
        largest = difference.max().item()
        self.found[what] = max(self.found.get(what, 0.0), math.inf if math.isnan(largest)
                               else largest)


class Training:
    """A run in a folder, trained in this process."""

    def __init__(self, root: Path, configuration: Configuration) -> None:
        self.place, self.options = Workplace(root), configuration["run"]
        vocab_size = configuration["model"]["vocab_size"]
        self.tokens = np.random.default_rng(0).integers(
            vocab_size, size=self.options["file_tokens"], dtype=np.uint16)
        run_dir = self.place.runs_dir / "tiny"
        run_dir.mkdir(parents=True)
        for name in ("model", "train"):
            (run_dir / f"{name}.json").write_text(json.dumps(configuration[name]))
        for split in ("train", "validation"):
            write_tokens(self.place.datasets_dir / "tiny" / f"{split}.safetensors", self.tokens)
        self.prepared = self.prepare()

    def prepare(self) -> PreparedRun:
        """Read the run anew, and find its newest checkpoint."""
        options = Options("tiny", runs_dir=self.place.runs_dir,
                          datasets_dir=self.place.datasets_dir)
        prepared = prepare_run(options, ONE_PROCESS, PhaseClock(), Agreement.in_one_process())
        return prepared.for_device(ONE_PROCESS.device)

    def build(self) -> TrainingStep:
        """Return the newest checkpoint's state; without one the initial state.

        The loss scale of fp16 begins where nothing overflows: a reference without fp16 cannot tell
        which steps do.
        """
        prepared = self.prepare()
        state = build_state(prepared, ONE_PROCESS)
        if state.scaler.is_enabled() and not prepared.first_step:
            state.scaler.load_state_dict(state.scaler.state_dict() | {"scale": 2.0**10})
        return TrainingStep(state, prepared.train, ONE_PROCESS)

    def train(self, step: TrainingStep, first: int, stop: int) -> list[tuple[Tensor, Tensor]]:
        """Take global steps as ddp_train.py does; return each one's loss and gradient norm."""
        plan, train = self.prepared.plan, step.train
        microbatches = prefetch(
            self.prepared.data.train, itertools.islice(
                microbatch_indices(plan, 0, first_step=first),
                (stop - first) * plan.gradient_accumulation_steps), device=ONE_PROCESS.device)
        taken = []
        for global_step in range(first, stop):
            with not_finite(global_step == self.options["skipped_step"]):
                taken.append(step.take(
                    microbatches, num_microbatches=plan.gradient_accumulation_steps,
                    learning_rate=learning_rate_at(train, global_step, num_steps=plan.num_steps),
                    momentum=momentum_at(train, global_step, num_steps=plan.num_steps)))
            update_average(step.state, train, global_step, num_steps=plan.num_steps)
        return taken

    def save(self, step: TrainingStep, global_step: int) -> None:
        run, data = self.prepared.run, self.prepared.data
        save_checkpoint(run.checkpoints_dir, SnapshotBuffers().take(step.state), CheckpointMeta(
            global_step=global_step, tokens=(global_step + 1) * self.prepared.plan.tokens_per_step,
            loss=None, train_loss=None, seconds={}, optimizer=run.train.optimizer, tokenizer=None,
            loss_scale=step.state.loss_scale(), model=run.model, data=data.fingerprints,
            random_seed=run.train.random_seed))

    def reference(self, step: TrainingStep) -> ReferenceLoop:
        """Return a reference that starts with the weights of a step."""
        train = step.train
        return ReferenceLoop(
            self.prepared.run.model, train, dict(step.state.model.named_parameters()),
            torch.from_numpy(self.tokens.astype(np.int64)), rounding=ROUNDING[train.precision],
            sequences=train.global_batch_size
            or train.microbatch_size * train.gradient_accumulation_steps)


@contextmanager
def not_finite(is_skipped: bool) -> Iterator[None]:
    """Make the gradients of a step that is to be skipped NaN."""
    with pytest.MonkeyPatch.context() as patch:
        if is_skipped:
            patch.setenv(VARIABLE, "gradient:nan")
        yield


def compare(configuration: Configuration) -> Differences:
    """Train a configuration and its reference, resume it, export it.

    Raises:
        AssertionError: the resumed run or the export is not the same bit for bit.
    """
    with tempfile.TemporaryDirectory() as folder:
        training, differences = Training(Path(folder), configuration), Differences()
        step = training.build()
        reference = training.reference(step)
        assert training.prepared.plan.num_steps == reference.num_steps
        compare_schedules(reference, differences)
        saved_after = training.options["saved_after"]
        taken = training.train(step, 0, saved_after)
        training.save(step, saved_after - 1)
        resumed = training.build()
        taken += training.train(step, saved_after, STEPS)
        training.train(resumed, saved_after, STEPS)
        compare_bits(step, resumed)
        compare_steps(training, taken, reference, differences)
        compare_states(step, reference, differences)
        training.save(resumed, STEPS - 1)
        compare_export(training, step, differences)
    return differences


def compare_schedules(reference: ReferenceLoop, differences: Differences) -> None:
    train, num_steps = reference.train, reference.num_steps
    for ours, theirs in ((learning_rate_at, learning_rate), (momentum_at, momentum)):
        found, wanted = (torch.tensor(values, dtype=torch.float64) for values in (
            [ours(train, global_step, num_steps=num_steps) for global_step in range(num_steps)],
            [theirs(train, global_step, num_steps) for global_step in range(num_steps)]))
        differences.add(ours.__name__, found, wanted, 1e-12)


def compare_bits(step: TrainingStep, resumed: TrainingStep) -> None:
    """Check that weights, moments, average and loss scale are the same bit for bit."""
    found, wanted = (SnapshotBuffers().take(each.state) for each in (resumed, step))
    for kind, tensors in vars(wanted).items():
        assert tensors.keys() == vars(found)[kind].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, vars(found)[kind][name]), f"resumed: {kind} {name}"
    assert resumed.state.loss_scale() == step.state.loss_scale()


def compare_steps(training: Training, taken: list[tuple[Tensor, Tensor]],
                  reference: ReferenceLoop, differences: Differences) -> None:
    for global_step, (loss, norm) in enumerate(taken):
        skips = global_step == training.options["skipped_step"]
        wanted_loss, wanted_norm = reference.take(global_step, skips=skips)
        if skips:
            assert loss.isnan() and not norm.isfinite()
            continue
        differences.add("loss", loss, wanted_loss, reference.rounding * wanted_loss)
        differences.add("norm", norm, wanted_norm, reference.rounding * wanted_norm)


def compare_states(step: TrainingStep, reference: ReferenceLoop, differences: Differences) -> None:
    state, rounding = step.state, reference.rounding
    for name, parameter in state.model.named_parameters():
        slack = reference.slack[name] + 1e-6 * reference.weights[name].abs().max()
        differences.add("weights", parameter.detach(), reference.weights[name].detach(), slack)
        moments = state.optimizer.state[parameter]
        wanted = {"exp_avg": reference.first[name], "exp_avg_sq": reference.second[name],
                  "momentum": reference.first[name]}
        for key, moment in moments.items():
            if key == "step":
                assert moment == reference.num_updates
            else:
                differences.add(key, moment, wanted[key], rounding * wanted[key].abs().max())
        if reference.average:
            differences.add("average", state.average[name], reference.average[name], slack)
    assert state.average.keys() == reference.average.keys()
    if state.scaler.is_enabled():
        assert state.scaler.get_scale() == 2.0 ** (10 - STEPS + reference.num_updates)


@torch.no_grad()
def compare_export(training: Training, step: TrainingStep, differences: Differences) -> None:
    """Compare the logits of the exported weights with a plain forward pass of the trained ones."""
    runs_dir, model = training.place.runs_dir, training.prepared.run.model
    target = load_target("tiny", runs_dir=runs_dir, checkpoint_name="latest")
    directory = write_export(target, training.place.root / "export", "")
    exported = load_target(str(directory), runs_dir=runs_dir).model
    ids = torch.from_numpy(training.tokens[: model.context_length].astype(np.int64))[None]
    logits = exported(ids)
    assert torch.equal(logits, target.model(ids)), "exported: other logits"
    trained = step.state.average or dict(step.state.model.named_parameters())
    wanted = forward({name: weight.double() for name, weight in trained.items()}, model, ids)
    differences.add("logits", logits, wanted, 1e-5 * wanted.abs().max())
