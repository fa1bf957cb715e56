"""Samples while a run trains; tests/lab/test_generate.py tests how tokens are sampled."""

import json
from functools import partial

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


def tiny_model():
    torch.manual_seed(0)
    return GPTModel(ModelConfig(**TINY_MODEL))


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """A trained run with samples."""
    workplace = Workplace(tmp_path_factory.mktemp("sampled"))
    workplace.add_run(train=SAMPLED)
    workplace.add_dataset()
    succeeded(workplace.torchrun(1, "tiny"))
    return workplace


def test_each_validation_writes_a_line_per_prompt(sampled):
    lines = read_lines(sampled.runs_dir / "tiny/samples.jsonl")
    assert [(line["global_step"], line["prompt"]) for line in lines] == [
        (step, prompt) for step in (4, 9, 11) for prompt in PROMPTS]
    assert len({line["text"] for line in lines}) > 3  # the model learns between them


def test_samples_do_not_change_training(sampled):
    sampled.add_run("plain", train=SAMPLED | {"sample_prompts": None})
    succeeded(sampled.torchrun(1, "plain"))
    weights = [(sampled.runs_dir / name / "checkpoints/latest/model.safetensors").read_bytes()
               for name in ("tiny", "plain")]
    assert weights[0] == weights[1]
    assert not (sampled.runs_dir / "plain/samples.jsonl").exists()


def test_a_killed_run_has_the_samples_of_each_step_once(sampled, workplace):
    run_dir = workplace.add_run(train=SAMPLED)
    workplace.add_dataset()
    assert workplace.torchrun(1, "tiny", **{VARIABLE: "save.validation:kill:hit=2"}).returncode
    steps = {line["global_step"] for line in read_lines(run_dir / "samples.jsonl")}
    assert steps == {4, 9}  # before the validation, without which both are repeated
    succeeded(workplace.torchrun(1, "tiny"))
    expected = read_lines(sampled.runs_dir / "tiny/samples.jsonl")
    assert read_lines(run_dir / "samples.jsonl") == expected


def test_samples_that_fail_do_not_stop_a_run(workplace):
    workplace.add_run(train=SAMPLED | {"min_train_tokens": 5 * 64},
                      model={"vocab_size": 300})  # with an unknown tokenizer
    workplace.add_dataset()
    result = succeeded(workplace.torchrun(1, "tiny"))
    assert result.stdout.count("warning: no samples: tokenizer") == 1


def test_the_model_is_left_in_training_mode(tmp_path):
    for tokenizer_name, fails in (("bytes", False), (None, True)):
        model = tiny_model().eval()
        beats: list[None] = []
        sampler = Sampler(model, tokenizer_name, heartbeat=partial(beats.append, None))
        failure = sampler.try_to_write(tmp_path / "samples.jsonl", ["a"], 3)
        assert bool(failure) is fails and model.training
        assert bool(beats) is not fails  # else slow sampling would look like a hang
    line, = read_lines(tmp_path / "samples.jsonl")
    assert line["global_step"] == 3 and line["prompt"] == "a" and line["text"]


def test_prompts_must_be_a_list_of_texts_and_need_a_validation(tmp_path):
    path = tmp_path / "train.json"
    values = {"dataset": "d", "microbatch_size": 1, "checkpoint_interval": 1}
    validated = values | {"validation_interval": 1, "validation_batches": 1}
    for config, message in (
            (values | {"sample_prompts": ["a"]}, "continued at each validation, but there is none"),
            *((validated | {"sample_prompts": prompts}, "sample_prompts")
              for prompts in ("def ", [], [1], ["a"] * 65, ["a" * 20_000]))):
        path.write_text(json.dumps(config))
        with pytest.raises(UserError, match=message):
            load_config(path, TrainConfig)
