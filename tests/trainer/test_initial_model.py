import re

import pytest
import torch
from safetensors.torch import load_file

from gpt import GPTModel
from run_config import ModelConfig
from tests.support.models import add_dataset_with_tokenizer, export
from tests.support.runs import run_in_process
from tests.support.workplace import TINY_MODEL, succeeded

STANDING_STILL = {"learning_rate": 1e-12, "min_train_tokens": 64, "validation_interval": 1,
                  "gradient_accumulation_steps": 1}


def weights_of(run_dir):
    return load_file(run_dir / "checkpoints/latest/model.safetensors")


def test_a_run_starts_from_another_runs_weights(workplace):
    workplace.add_dataset()
    first = workplace.add_run("first", train={"min_train_tokens": 256})
    succeeded(workplace.torchrun(1, "first"))
    second = workplace.add_run("second", train=STANDING_STILL | {"init_from": "first"})
    succeeded(workplace.torchrun(2, "second"))
    torch.testing.assert_close(weights_of(second), weights_of(first), rtol=0, atol=1e-6)


def test_a_resumed_run_does_not_start_again(workplace):
    workplace.add_dataset()
    torch.manual_seed(0)
    source = export(GPTModel(ModelConfig(**TINY_MODEL)), workplace.root / "published")
    workplace.add_run(train={"init_from": str(source), "min_train_tokens": 512})
    succeeded(workplace.torchrun(1, "tiny", "--max-steps", "3"))
    (source / "model.safetensors").unlink()  # it is needed only once
    succeeded(workplace.torchrun(1, "tiny"))


@pytest.mark.parametrize(("init_from", "message"), [
    ("nowhere", "init_from: run 'nowhere'|init_from: .*nowhere: no such run"),
    ("tiny", "init_from is this run itself"),
    ("wider", "init_from: .*no checkpoint yet"),
    ("published", r"init_from: .*published has emb_dim 24, model.json has 16; they must be equal"),
    ("other tokens", "published was trained with the tokenizer.*; prepare the dataset with its"),
])
def test_weights_that_do_not_fit_are_one_line_before_anything_is_written(workplace, init_from,
                                                                         message):
    workplace.add_run("wider", model={"emb_dim": 32})
    if init_from == "other tokens":
        init_from = str(add_dataset_with_tokenizer(workplace)[0])
    else:
        workplace.add_dataset()
    if init_from == "published":
        init_from = str(export(GPTModel(ModelConfig(**TINY_MODEL | {"emb_dim": 24, "n_heads": 3})),
                               workplace.root / "published"))
    run_dir = workplace.add_run(train={"init_from": init_from})
    before = sorted(run_dir.iterdir())
    result = run_in_process(*workplace.arguments("tiny"), under_torchrun=True)
    assert result.returncode == 2
    line, = (line for line in result.stderr.splitlines() if line.startswith("Error: "))
    assert re.search(message, line), line
    assert sorted(run_dir.iterdir()) == before
