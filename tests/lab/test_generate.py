from __future__ import annotations

from typing import Any

import pytest
import torch

from gpt import GPTModel
from lab.generate import GrowingText, stream_texts
from lab.targets import Target
from reporting.sampling import KeyValueCache, SamplingOptions, generate_tokens, stream_tokens
from run_config import ModelConfig
from tests.support.workplace import TINY_MODEL, Workplace, forked, succeeded, train_tiny


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return train_tiny(tmp_path_factory.mktemp("trained"))


def generate(workplace: Workplace, *arguments: str):
    return forked("lab/__main__.py", ["generate", *arguments, "--runs-dir",
                                      str(workplace.runs_dir)])


def tiny_model(**changes: Any) -> GPTModel:
    torch.manual_seed(0)
    return GPTModel(ModelConfig(**TINY_MODEL | {"init": "torch"} | changes))


def test_text_from_a_run_is_the_same_for_the_same_seed(trained: Workplace) -> None:
    arguments = ("tiny", "--prompt", "import os", "--max-new-tokens", "30", "--seed")
    first, again, other = (succeeded(generate(trained, *arguments, seed)).stdout
                           for seed in ("1", "1", "2"))
    assert first.startswith("import os")  # already longer than half of the model's context
    assert first == again != other


@pytest.mark.parametrize(("arguments", "message"), [
    (("nix",), "no such run"),
    (("tiny", "--checkpoint", "nix"), "no checkpoint 'nix'"),
    (("tiny", "--temperature", "nan"), "--temperature: nan is no number"),
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


def uncached(model: GPTModel, prompt: list[int], count: int, *, seed: int) -> list[int]:
    """The same texts the slow way: the whole context passes the model for every token."""
    generator, longest = torch.Generator().manual_seed(seed), model.config.context_length
    context, drawn = prompt[-longest:], []
    for _ in range(count):
        if len(context) > longest:
            context = context[-(longest // 2 + 1):]
        logits = model(torch.tensor([context]))[0, -1].float()
        kept = logits.topk(40).values[-1]
        probabilities = (logits.masked_fill(logits < kept, float("-inf")) / 0.8).softmax(dim=-1)
        drawn.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        context = [*context, drawn[-1]]
    return drawn


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"tie_weights": True, "qkv_bias": True},
                                     {"context_length": 5}, {"context_length": 1}], ids=str)
@pytest.mark.parametrize("length", [1, 4, 16, 40])  # of a prompt, in a context of 16
def test_a_cache_changes_no_token(changes: dict[str, Any], length: int) -> None:
    model = tiny_model(**changes).eval()
    prompt = [i * 7 % 257 for i in range(length)]
    options = SamplingOptions(max_new_tokens=50, seed=3)  # three contexts long
    assert generate_tokens(model, prompt, options) == uncached(model, prompt, 50, seed=3)


def test_a_token_passes_the_layers_once() -> None:
    model, passed = tiny_model(context_length=64), []
    model.blocks[0].mlp.register_forward_pre_hook(lambda _, inputs: passed.append(
        inputs[0].shape[1]))
    generate_tokens(model, [1, 2, 3], SamplingOptions(max_new_tokens=30))
    assert passed == [3] + [1] * 29


def test_several_samples_are_each_what_they_are_alone() -> None:
    model, prompt = tiny_model(), [5, 6]
    together = list(stream_tokens(model, prompt, SamplingOptions(20, seed=7, num_samples=3)))
    for number in range(3):
        alone = generate_tokens(model, prompt, SamplingOptions(20, seed=7 + number))
        assert [step[number] for step in together] == alone


def test_a_sample_ends_at_its_stop_token_and_the_others_go_on() -> None:
    model, prompt = tiny_model(), [5, 6]
    free = [generate_tokens(model, prompt, SamplingOptions(20, seed=seed)) for seed in (0, 1)]
    stop = free[0][4]
    assert stop not in free[0][:4]
    options = SamplingOptions(20, seed=0, stop_token=stop)
    assert generate_tokens(model, prompt, options) == free[0][:4]
    both = list(stream_tokens(model, prompt, SamplingOptions(20, 0.8, 40, 0, 2, stop)))
    kept = free[1][: free[1].index(stop)] if stop in free[1] else free[1]
    assert [step[0] for step in both if step[0] is not None] == free[0][:4]
    assert [step[1] for step in both if step[1] is not None] == kept


@pytest.mark.parametrize(("pieces", "stops", "wanted"), [
    ([b"abc", b"def"], (), ["abc", "def", ""]),
    ([b"ab", b"c", b"d"], ("bc",), ["a", "", "", ""]),
    ([b"ab", b"x", b"d"], ("bc",), ["a", "bx", "d", ""]),
    ([b"ab"], ("bc",), ["a", "b"]),  # it never came
    ([b"aab", b"c"], ("abc", "zz"), ["a", "", ""]),
    ([b"one\n", b"\ntwo"], ("\n\n",), ["one", "", ""]),
    ([b"xbcya"], ("ya", "bc"), ["x", ""]),  # the first of two
    ([b"\xc3", b"\xa9t", b"\xc3"], (), ["", "ét", "", "\ufffd"]),
    ([b"a"], ("",), ["a", ""]),
])
def test_text_is_shown_once_it_is_certain(pieces: list[bytes], stops: tuple[str, ...],
                                          wanted: list[str]) -> None:
    text = GrowingText(stops)
    assert [*(text.grow(piece) for piece in pieces), text.rest()] == wanted


def test_generating_ends_with_the_last_stop() -> None:
    target = Target("tiny", tiny_model(), "bytes")
    options = SamplingOptions(60, num_samples=2)
    whole = ["".join(parts) for parts in zip(*stream_texts(target, "a", options), strict=True)]
    stop = whole[0][10:12]
    steps = list(stream_texts(target, "a", options, stops=(stop,)))
    texts = ["".join(parts) for parts in zip(*steps, strict=True)]
    assert texts == [text.split(stop)[0] for text in whole]
    assert len(texts[0]) <= 10


def test_a_text_ends_with_its_document() -> None:
    target = Target("tiny", tiny_model(), "bytes")
    target.model.head.weight.data[256] = 0.0
    free = ["".join(parts) for parts in zip(*stream_texts(
        target, "a", SamplingOptions(300, seed=1, top_k=0, temperature=5.0)), strict=True)]
    assert len(free[0]) < 300 and "<|endoftext|>" not in free[0]


def test_next_to_no_temperature_takes_the_likeliest() -> None:
    model = tiny_model()
    greedy = generate_tokens(model, [5], SamplingOptions(20, temperature=0))
    assert generate_tokens(model, [5], SamplingOptions(20, temperature=1e-30, top_k=0)) == greedy


def test_a_cache_is_no_longer_than_it_has_to_be() -> None:
    cache = KeyValueCache(tiny_model(context_length=64).eval(), num_tokens=5)
    for token in range(5):
        cache.next_logits(torch.tensor([[token]]))
    assert {keys.shape[2] for keys, _ in cache._layers.values()} == {5}


def test_samples_and_stops_on_the_command_line(trained: Workplace) -> None:
    arguments = ("tiny", "--prompt", "import", "--max-new-tokens", "40", "--seed", "5")
    alone = [succeeded(generate(trained, *arguments[:-1], seed)).stdout for seed in ("5", "6")]
    several = succeeded(generate(trained, *arguments, "--samples", "2")).stdout
    assert several == f"--- 1 of 2, seed 5\n{alone[0]}--- 2 of 2, seed 6\n{alone[1]}"
    stop = alone[0].rstrip("\n")[10]
    stopped = succeeded(generate(trained, *arguments, "--stop", stop)).stdout
    assert stopped == "import" + alone[0][6:].split(stop)[0] + "\n"


def test_sampling_leaves_the_training_stream_alone() -> None:
    model = tiny_model()
    before = torch.get_rng_state()
    generate_tokens(model, [5], SamplingOptions(max_new_tokens=3))
    assert torch.equal(torch.get_rng_state(), before)
