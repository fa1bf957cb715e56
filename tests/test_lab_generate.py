from __future__ import annotations

import pytest
import torch
from support import TINY_MODEL, Workplace, forked, succeeded

from gpt import GPTModel
from run_config import ModelConfig
from sampling import SamplingOptions, generate_tokens


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    workplace = Workplace(tmp_path_factory.mktemp("trained"))
    workplace.add_run(train={"gradient_accumulation_steps": 1, "min_train_tokens": 320})
    workplace.add_dataset()
    succeeded(workplace.torchrun(1, "tiny"))
    return workplace


def generate(workplace: Workplace, *arguments: str):
    return forked("lab/__main__.py", ["generate", *arguments, "--runs-dir",
                                      str(workplace.runs_dir)])


def tiny_model() -> GPTModel:
    torch.manual_seed(0)
    return GPTModel(ModelConfig(**TINY_MODEL | {"init": "torch"}))


def test_text_from_a_run_is_the_same_for_the_same_seed(trained: Workplace) -> None:
    arguments = ("tiny", "--prompt", "import os", "--max-new-tokens", "30", "--seed")
    first, again, other = (succeeded(generate(trained, *arguments, seed)).stdout
                           for seed in ("1", "1", "2"))
    assert first.startswith("import os")  # already longer than half of the model's context
    assert first == again != other


@pytest.mark.parametrize(("arguments", "message"), [
    (("nix",), "no such run"),
    (("tiny", "--checkpoint", "nix"), "no checkpoint 'nix'"),
])
def test_what_is_not_there_is_one_line(
    trained: Workplace, arguments: tuple[str, ...], message: str
) -> None:
    result = generate(trained, *arguments)
    assert result.returncode == 2 and message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_run_without_checkpoint_is_one_line(workplace: Workplace) -> None:
    workplace.add_run()
    result = generate(workplace, "tiny")
    assert result.returncode == 2 and "no checkpoint yet; train the run first" in result.stderr


def test_temperature_zero_takes_the_likeliest() -> None:
    model = tiny_model()
    ids = generate_tokens(model, [5], SamplingOptions(max_new_tokens=5, temperature=0))
    context = [5]
    for token in ids:
        assert token == model(torch.tensor([context]))[0, -1].argmax().item()
        context.append(token)
    assert ids == generate_tokens(model, [5], SamplingOptions(5, temperature=0.5, top_k=1))


def test_only_the_likeliest_k_are_drawn() -> None:
    model = tiny_model().eval()
    allowed = set(model(torch.tensor([[7]]))[0, -1].topk(3).indices.tolist())
    drawn = {generate_tokens(model, [7], SamplingOptions(1, temperature=5, top_k=3, seed=s))[0]
             for s in range(60)}
    assert drawn == allowed


def test_long_contexts_are_cut_from_the_left() -> None:
    model = tiny_model()
    prompt = [i * 7 % 257 for i in range(40)]
    options = SamplingOptions(max_new_tokens=1, temperature=0)
    assert generate_tokens(model, prompt, options) == generate_tokens(model, prompt[-16:], options)


def test_sampling_leaves_the_training_stream_alone() -> None:
    model = tiny_model()
    before = torch.get_rng_state()
    generate_tokens(model, [5], SamplingOptions(max_new_tokens=3))
    assert torch.equal(torch.get_rng_state(), before)
