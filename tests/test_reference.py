"""Random run configurations train three steps as a plain reference loop does.

20 configurations, or 500 with --thorough. A failure prints the configuration.
"""

import itertools
import json
import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from basics.failpoints import VARIABLE
from checkpointing import (
    OPTIMIZER,
    WEIGHTS,
    CheckpointMeta,
    Snapshot,
    SnapshotBuffers,
    list_checkpoints,
    save_checkpoint,
)
from ddp_train import TrainingStep, microbatch_indices
from ops.schedule import learning_rate_at
from processes.command_line import Options
from processes.startup_agreement import Agreement
from reporting.clock import PhaseClock
from settings.optimizer import GROUPS
from tests.support.models import ONE_PROCESS
from tests.support.reference_loop import (
    FLOAT32,
    LOSS_SCALE,
    SIXTEEN_BITS,
    ReferenceLoop,
    learning_rate,
)
from tests.support.workplace import Workplace, read_lines, succeeded, write_tokens
from tokens.batches import read_ahead
from trainer.startup import build_state, decide_for_device, prepare_run

NUM_CONFIGURATIONS, SAMPLE, STEPS = 500, 20, 3
# What rounding explains, relative, of the loss and of the gradient's norm. fp32 has 24 significant
# bits, fp16 and tf32 11, bf16 8.
LOSS = {"fp32": 1e-6, "tf32": 1e-3, "bf16": 4e-3, "fp16": 1e-3}
NORM = {"fp32": 5e-6, "tf32": 5e-3, "bf16": 2e-2, "fp16": 5e-3}
if not torch.cpu.get_capabilities().get("amx_fp16"):  # on other CPUs tf32 is fp32
    for limits in (LOSS, NORM):
        limits["tf32"] = limits["fp32"]
ROUNDED = 10 * FLOAT32  # at least this is the difference of a gradient's norm in 16 bits
Configuration = dict[str, dict[str, Any]]


def configuration(number):
    """Draw a run: its two files, and what happens in it. Each number is always the same run."""
    draw = random.Random(number)
    model = draw_model(draw)
    train = draw_batch(draw) | draw_precision(draw, model) | draw_optimizer(draw)
    sequences = train.get("global_batch_size") or (
        train["microbatch_size"] * train.get("gradient_accumulation_steps", 1)
    )
    step_tokens = sequences * model["context_length"]
    num_steps = draw.choice([3, 3, 3, 3, 4, 6, 12])
    start = draw.choice([0, 0, draw.randrange(200)])
    train |= {
        "dataset": "tiny",
        "checkpoint_interval": 1,
        "start_train_token": start,
        "random_seed": draw.choice([42, draw.randrange(2**63)]),
    }
    spare = draw.randrange(step_tokens)
    if draw.random() < 0.5:  # else the file's length decides
        train["min_train_tokens"] = num_steps * step_tokens - spare
        spare = draw.randrange(5 * step_tokens)
    return {
        "model": model,
        "train": train,
        "run": {
            "file_tokens": start + num_steps * step_tokens + 1 + spare,
            "saved_after": draw.choice([1, 2]),
            "skipped_step": draw.choice([None, None, None, 0, 1, 2]),
        },
    }


def draw_model(draw):
    n_heads = draw.choice([1, 2, 3, 4])
    return {
        "vocab_size": draw.choice([11, 61, 257, 300]),
        "context_length": draw.choice([2, 5, 8, 16, 33]),
        "n_heads": n_heads,
        "emb_dim": n_heads * draw.choice([8, 8, 12, 16]),
        "n_layers": draw.choice([1, 2, 3]),
        "drop_rate": draw.choice([0.0, 0.0, 0.1, 0.4]),
        "qkv_bias": draw.random() < 0.5,
        "tie_weights": draw.random() < 0.5,
        "init": draw.choice(["gpt2", "gpt2", "torch", "zero_projections"]),
    }


def draw_batch(draw):
    microbatch_size, accumulation = draw.choice([1, 2, 3]), draw.choice([1, 2, 3])
    if draw.random() < 0.3:
        return {
            "microbatch_size": microbatch_size,
            "global_batch_size": microbatch_size * accumulation,
        }
    return {"microbatch_size": microbatch_size, "gradient_accumulation_steps": accumulation}


def draw_precision(draw, model):
    options = draw.choice(
        [{"precision": "fp32"}] * 8
        + [
            {"use_amp": False},
            {"precision": "tf32"},
            {"precision": "tf32"},
            {"precision": "fp16"},
            {"precision": "fp16"},
            {"precision": "bf16"},
            {"precision": "bf16"},
            {"precision": "bf16", "residual_dtype": "bf16"},
        ]
    )
    # Without a GPU PyTorch has no flash kernel that can drop.
    kernels = ["auto", "math"] + ["flash"] * (not model["drop_rate"])
    return options | sometimes(
        draw,
        attention=draw.choice(kernels),
        head_chunks=draw.choice([1, 2, 3, 7]),
        activation_checkpointing=True,
    )


def draw_optimizer(draw):
    kind = draw.choice([None, "constant", "cosine", "linear", "wsd"])
    schedule = (
        {"schedule_learning_rate": draw.random() < 0.5} if kind is None else {"schedule": kind}
    )
    percent = draw.choice([10, 33.4, 50])
    rates = {f"{group}_learning_rate": 10 ** draw.uniform(-4, -2) for group in GROUPS}
    return (
        schedule
        | {"learning_rate": 10 ** draw.uniform(-4, -2)}
        | sometimes(
            draw,
            **rates,
            optimizer="muon",
            weight_decay=draw.choice([0.0, 0.5]),
            decay_norms_and_biases=True,
            beta1=draw.choice([0.0, 0.8]),
            beta2=draw.choice([0.9, 0.99]),
            epsilon=draw.choice([1e-6, 1e-10]),
            momentum=draw.choice([0.95, 0.0, 0.9]),
            clipping_max_norm=10 ** draw.uniform(-2, 0.5),
            warmup_period_percent=percent,
            decay_period_percent=draw.choice([20, 40, 50]),
            final_learning_rate_fraction=draw.choice([0.0, 0.2, 1.0]),
        )
    )


def sometimes(draw, **options):
    """Keep each option with a probability of 0.4."""
    return {key: value for key, value in options.items() if draw.random() < 0.4}


class Differences:
    """The largest differences from the reference, in what rounding explains."""

    def __init__(self):
        self.found: dict[str, float] = {}

    def add(self, what, found, wanted, slack):
        """Compare tensors of one shape; a difference up to `slack` is rounding."""
        difference = (found.double() - wanted).abs() / (slack + 1e-30)
        largest = torch.nan_to_num(difference, math.inf).max().item()
        self.found[what] = max(self.found.get(what, 0.0), largest)

    def report(self):
        """Return what differs by more than rounding, the worst first; empty if nothing does."""
        wrong = sorted((-value, what) for what, value in self.found.items() if value > 1)
        return ", ".join(
            f"{what} by {-value:.3g} times of what rounding explains" for value, what in wrong
        )


class Training:
    """A run in a folder, trained in this process."""

    def __init__(self, root, configuration):
        self.place, self.options = Workplace(root), configuration["run"]
        self.tokens = np.random.default_rng(0).integers(
            configuration["model"]["vocab_size"], size=self.options["file_tokens"], dtype=np.uint16
        )
        run_dir = self.place.runs_dir / "tiny"
        run_dir.mkdir(parents=True)
        for name in ("model", "train"):
            (run_dir / f"{name}.json").write_text(json.dumps(configuration[name]))
        for split in ("train", "validation"):
            write_tokens(self.place.datasets_dir / "tiny" / f"{split}.safetensors", self.tokens)
        self.prepared = self.prepare()
        self.config, self.plan = self.prepared.run.config, self.prepared.data.plan

    def prepare(self):
        """Read the run anew, and find its newest checkpoint."""
        options = Options(
            "tiny", runs_dir=self.place.runs_dir, datasets_dir=self.place.datasets_dir
        )
        prepared = prepare_run(options, ONE_PROCESS, PhaseClock(), Agreement.in_one_process())
        run, _ = decide_for_device(prepared.run, prepared.data.plan, ONE_PROCESS.device)
        return replace(prepared, run=run)

    def build(self):
        """Return a step with the state of the newest checkpoint; without one the initial state."""
        prepared = self.prepare()
        run, resume = prepared.run, prepared.resume
        state = build_state(run, prepared.data, resume, Options("tiny"), ONE_PROCESS)
        if state.scaler.is_enabled() and not resume.first_step:
            state.scaler.load_state_dict(state.scaler.state_dict() | {"scale": LOSS_SCALE})
        return TrainingStep(state, run.config, ONE_PROCESS)

    def train(self, step, *, first=0):
        """Take global steps as ddp_train.py does; yield each one, its loss and gradient norm."""
        indices = itertools.islice(
            microbatch_indices(self.plan, 0, first_step=first),
            (STEPS - first) * self.plan.gradient_accumulation_steps,
        )
        microbatches = read_ahead(self.prepared.data.training, indices, device=ONE_PROCESS.device)
        for global_step in range(first, STEPS):
            rate = learning_rate_at(self.config, global_step, num_steps=self.plan.num_steps)
            with pytest.MonkeyPatch.context() as patch:
                if self.skips(global_step):
                    patch.setenv(VARIABLE, "gradient:nan")
                loss, norm = step.take(
                    microbatches,
                    num_microbatches=self.plan.gradient_accumulation_steps,
                    learning_rate=rate,
                )
            yield global_step, loss, norm

    def skips(self, global_step):
        """Return whether the gradient of a step is to be NaN."""
        return global_step == self.options["skipped_step"]

    def save(self, step, global_step):
        run = self.prepared.run
        save_checkpoint(
            run.checkpoints_dir,
            SnapshotBuffers().take(step.state),
            CheckpointMeta(
                global_step=global_step,
                tokens=(global_step + 1) * self.plan.tokens_per_step,
                loss=None,
                train_loss=None,
                seconds={},
                optimizer=run.config.optimizer,
                tokenizer=None,
                loss_scale=step.state.loss_scale(),
                model=run.model,
                random_seed=run.config.random_seed,
                data=self.prepared.data.fingerprints,
            ),
        )

    def reference(self, step):
        """Return a reference that starts from the weights of a step."""
        train = self.config
        return ReferenceLoop(
            self.prepared.run.model,
            train,
            SnapshotBuffers().take(step.state).weights,
            tokens=torch.from_numpy(self.tokens.astype(np.int64)),
            sequences=train.global_batch_size
            or train.microbatch_size * train.gradient_accumulation_steps,
        )


def compare(configuration, root):
    """Train a configuration and its reference, and resume it.

    The reference goes on from the trainer's weights after they have been compared, so that what
    rounding decides in one step is no difference in the next.

    Raises:
        AssertionError: what must be equal is not, such as a bit of the resumed run.
    """
    training, differences = Training(root, configuration), Differences()
    step, buffers = training.build(), SnapshotBuffers()
    precision, reference = training.config.precision, training.reference(step)
    assert training.plan.num_steps == reference.num_steps
    assert step.state.scaler.is_enabled() == (precision == "fp16")
    compare_schedules(reference, differences)
    rounding = []
    for global_step, loss, norm in training.train(step):
        skips = training.skips(global_step)
        wanted_loss, wanted_norm = reference.take(global_step, skips=skips)
        if skips:
            assert loss.isnan() and not norm.isfinite()
        else:
            differences.add("loss", loss, wanted_loss, LOSS[precision] * wanted_loss)
            differences.add("norm", norm, wanted_norm, NORM[precision] * wanted_norm)
            rounding.append(abs(norm / wanted_norm - 1))
        compare_state(buffers.take(step.state), global_step, reference, differences)
        if step.state.scaler.is_enabled():
            assert step.state.scaler.get_scale() == LOSS_SCALE / 2**reference.num_skipped
        if global_step + 1 == training.options["saved_after"]:
            training.save(step, global_step)
    if precision in SIXTEEN_BITS:
        assert max(rounding) > ROUNDED, f"{precision} rounds no more than fp32"
    resumed = training.build()
    for _ in training.train(resumed, first=training.options["saved_after"]):
        pass
    assert_same_bits(step, resumed)
    return differences


def compare_schedules(reference, differences):
    train, num_steps = reference.train, reference.num_steps
    found = [learning_rate_at(train, step, num_steps=num_steps) for step in range(num_steps)]
    wanted = [learning_rate(train, step, num_steps) for step in range(num_steps)]
    differences.add(
        "learning rate",
        *(torch.tensor(values, dtype=torch.float64) for values in (found, wanted)),
        1e-12,
    )


def compare_state(found, global_step, reference, differences):
    """Compare a state after a step; let the reference go on from its weights."""
    assert found.weights.keys() == reference.weights.keys()
    for name, weight in found.weights.items():
        differences.add("weights", weight, reference.weights[name].detach(), reference.slack[name])
    for key, moment in found.moments.items():
        kind, name = key.split("/")
        if kind == "step":
            assert moment == reference.num_updates
        elif kind == "exp_avg_sq":
            wanted = reference.second[name]
            differences.add(kind, moment, wanted, reference.second_noise[name])
        else:
            wanted = reference.first[name]
            differences.add(kind, moment, wanted, reference.first_noise[name])
    reference.follow(found.weights)


def assert_same_bits(step, resumed):
    found, wanted = (SnapshotBuffers().take(each.state) for each in (resumed, step))
    for kind, tensors in vars(wanted).items():
        assert tensors.keys() == vars(found)[kind].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, vars(found)[kind][name]), f"resumed: {kind} {name}"
    assert resumed.state.loss_scale() == step.state.loss_scale()


def pytest_generate_tests(metafunc):
    if "number" in metafunc.fixturenames:
        is_thorough = metafunc.config.getoption("--thorough")
        metafunc.parametrize("number", range(NUM_CONFIGURATIONS if is_thorough else SAMPLE))


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Compute with one thread: tensors this small gain nothing from more."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr("trainer.loss_functions.share_cpu_cores", lambda process: None)
    yield
    torch.set_num_threads(num_threads)


def test_a_configuration_trains_and_resumes_as_the_reference(number, tmp_path):
    drawn = configuration(number)
    assert not compare(drawn, tmp_path).report(), json.dumps(drawn)


# The real command, in two launches. What the one of them has that the others lack stands beside it.
COMMANDS: dict[str, Configuration] = {
    "adamw": {  # clipping, dropout, a schedule with warm-up, decay
        "model": {"drop_rate": 0.1, "qkv_bias": True},
        "train": {
            "precision": "fp32",
            "clipping_max_norm": 0.3,
            "schedule": "linear",
            "warmup_period_percent": 34,
            "weight_decay": 0.5,
            "beta2": 0.95,
        },
    },
    "muon": {  # rates of the groups, a tied head, decay; matrices that 3 processes share unevenly
        "model": {"tie_weights": True, "init": "zero_projections"},
        "train": {
            "precision": "fp32",
            "optimizer": "muon",
            "attention": "math",
            "momentum": 0.9,
            "matrix_learning_rate": 0.02,
            "embedding_learning_rate": 0.05,
            "weight_decay": 0.1,
            "schedule": "wsd",
            "decay_period_percent": 100,
            "microbatch_size": 1,
            "global_batch_size": 6,
        },
    },
    "bf16": {  # the loss in chunks of the head
        "model": {"drop_rate": 0.1},
        "train": {"precision": "bf16", "head_chunks": 3, "activation_checkpointing": True},
    },
}


@pytest.mark.parametrize(
    ("name", "num_processes"), [("adamw", 1), ("adamw", 2), ("muon", 3), ("bf16", 2)]
)
def test_the_command_trains_as_the_reference(name, num_processes, tmp_path):
    """So a run's split into processes and launches changes nothing but rounding."""
    train, context_length = {"microbatch_size": 2, "global_batch_size": 8}, 8
    train |= COMMANDS[name]["train"]
    training, differences = (
        Training(
            tmp_path,
            {
                "model": {
                    "vocab_size": 61,
                    "context_length": context_length,
                    "n_heads": 2,
                    "emb_dim": 16,
                    "n_layers": 2,
                    "drop_rate": 0.0,
                    "qkv_bias": False,
                }
                | COMMANDS[name]["model"],
                "train": {
                    "dataset": "tiny",
                    "start_train_token": 5,
                    "checkpoint_interval": 1,
                    "learning_rate": 0.01,
                    "random_seed": 7,
                }
                | train,
                "run": {
                    "file_tokens": 5 + STEPS * train["global_batch_size"] * context_length + 1,
                    "skipped_step": None,
                },
            },
        ),
        Differences(),
    )
    reference = training.reference(training.build())
    for options in (["--max-steps", "2"], []):
        result = succeeded(training.place.torchrun(num_processes, "tiny", *options))
    # Without a GPU PyTorch has no other kernel that can drop.
    assert f"attention: {'blocks' if name == 'bf16' else 'math'}\n" in result.stdout
    checkpoints = list_checkpoints(training.prepared.run.checkpoints_dir)
    assert [checkpoint.meta.global_step for checkpoint in checkpoints] == list(range(STEPS))
    losses = read_lines(training.prepared.run.run_dir / "metrics.jsonl")
    for global_step, checkpoint in enumerate(checkpoints):
        wanted, _ = reference.take(global_step)
        (found,) = [
            each["train_loss"]
            for each in losses
            if each["global_step"] == global_step and "train_loss" in each
        ]
        differences.add(
            "loss",
            torch.tensor(found, dtype=torch.float64),
            wanted,
            LOSS[training.config.precision] * wanted,
        )
        compare_state(
            Snapshot(load_file(checkpoint.path / WEIGHTS), load_file(checkpoint.path / OPTIMIZER)),
            global_step,
            reference,
            differences,
        )
    assert not differences.report()
