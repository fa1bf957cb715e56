"""Samples while a run trains; how tokens are drawn stands in test_lab_generate.py."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from basics.errors import UserError
from basics.failpoints import VARIABLE
from gpt import GPTModel
from reporting.sampling import Sampler
from run_config import ModelConfig, TrainConfig, load_config
from tests.support.workplace import TINY_MODEL, Workplace, read_lines, succeeded

PROMPTS = ["def ", ""]
SAMPLED = {"sample_prompts": PROMPTS, "min_train_tokens": 12 * 64}


def tiny_model() -> GPTModel:
    torch.manual_seed(0)
    return GPTModel(ModelConfig(**TINY_MODEL))


def test_each_validation_leaves_a_line_for_each_prompt(workplace: Workplace) -> None:
    run_dir = workplace.add_run(train=SAMPLED)
    plain_dir = workplace.add_run("plain", train=SAMPLED | {"sample_prompts": None})
    workplace.add_dataset()
    for name in ("tiny", "plain"):
        succeeded(workplace.torchrun(1, name))
    lines = read_lines(run_dir / "samples.jsonl")
    assert [(line["global_step"], line["prompt"]) for line in lines] == [
        (step, prompt) for step in (4, 9, 11) for prompt in PROMPTS]
    assert len({line["text"] for line in lines}) > 3  # the model learns between them
    weights = [(path / "checkpoints/latest/model.safetensors").read_bytes()
               for path in (run_dir, plain_dir)]
    assert weights[0] == weights[1]  # looking at it changes nothing
    assert not (plain_dir / "samples.jsonl").exists()


def test_a_killed_run_has_the_samples_of_each_step_once(workplace: Workplace) -> None:
    run_dir = workplace.add_run(train=SAMPLED)
    workplace.add_run("whole", train=SAMPLED)
    workplace.add_dataset()
    succeeded(workplace.torchrun(1, "whole"))
    assert workplace.torchrun(1, "tiny", **{VARIABLE: "save.rename:kill:hit=2"}).returncode
    steps = {line["global_step"] for line in read_lines(run_dir / "samples.jsonl")}
    assert {4} <= steps <= {4, 9}  # the second save may end before its samples or after
    succeeded(workplace.torchrun(1, "tiny"))
    whole = read_lines(workplace.runs_dir / "whole/samples.jsonl")
    assert read_lines(run_dir / "samples.jsonl") == whole


def test_samples_that_cannot_be_drawn_do_not_end_a_run(workplace: Workplace) -> None:
    workplace.add_run(train=SAMPLED, model={"vocab_size": 300})  # whose tokenizer nobody knows
    workplace.add_dataset()
    result = succeeded(workplace.torchrun(1, "tiny"))
    assert result.stdout.count("warning: no samples: UserError: tokenizer") == 3


def test_drawing_leaves_the_model_in_training_mode(tmp_path: Path) -> None:
    for tokenizer_name, went_wrong in (("bytes", False), (None, True)):
        model = tiny_model().eval()
        beats: list[None] = []
        sampler = Sampler(model, tokenizer_name, heartbeat=partial(beats.append, None))
        failure = sampler.try_to_write(tmp_path / "samples.jsonl", ["a"], 3)
        assert bool(failure) is went_wrong and model.training
        assert bool(beats) is not went_wrong  # else a slow sample would be taken for a hang
    line, = read_lines(tmp_path / "samples.jsonl")
    assert line["global_step"] == 3 and line["prompt"] == "a" and line["text"]


@pytest.mark.parametrize(("prompts", "message"), [
    ("def ", "sample_prompts"), ([], "sample_prompts"), ([1], "sample_prompts"),
    (["a"] * 65, "sample_prompts"), (["a" * 20_000], "sample_prompts"),
])
def test_prompts_that_are_no_list_of_texts_are_refused(
    tmp_path: Path, prompts: object, message: str
) -> None:
    values = {"dataset": "d", "microbatch_size": 1, "validation_interval": 1,
              "validation_batches": 1, "sample_prompts": prompts}
    path = tmp_path / "train.json"
    path.write_text(json.dumps(values))
    with pytest.raises(UserError, match=message):
        load_config(path, TrainConfig)
    path.write_text(json.dumps(values | {"sample_prompts": ["a", "b"]}))
    assert load_config(path, TrainConfig).sample_prompts == ("a", "b")
    path.write_text(json.dumps({"dataset": "d", "microbatch_size": 1, "checkpoint_interval": 1,
                                "sample_prompts": ["a"]}))
    with pytest.raises(UserError, match="continued at each validation, but there is none"):
        load_config(path, TrainConfig)
