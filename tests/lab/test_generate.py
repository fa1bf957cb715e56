
import pytest
import torch

from gpt import GPTModel
from lab.generate import StreamedText, stream_texts
from reporting.sampling import SamplingOptions, generate_tokens, stream_tokens
from run_config import ModelConfig
from tests.support.lab_cli import error_line, run_lab, succeeded
from tests.support.workplace import TINY_MODEL
from trainer.models import LoadedModel


def generate(workplace, *arguments):
    return run_lab("generate", *arguments, "--runs-dir", str(workplace.runs_dir))


def tiny_model(**changes):
    torch.manual_seed(0)
    return GPTModel(ModelConfig(**TINY_MODEL | {"init": "torch"} | changes))


@pytest.mark.parametrize(("arguments", "message"), [
    (("nix",), "no such run"), (("new",), "no checkpoint yet; train the run first"),
    (("tiny", "--checkpoint", "nix"), "no checkpoint 'nix'"),
])
def test_a_user_error_is_one_line(trained, arguments, message):
    trained.add_run("new")
    assert message in error_line(generate(trained, *arguments))
    nan = generate(trained, "tiny", "--temperature", "nan")
    assert nan.exit_code == 2 and "'--temperature': nan is not a finite number" in nan.stderr


def test_temperature_zero_picks_the_most_likely_token():
    model = tiny_model()
    ids = generate_tokens(model, [5], SamplingOptions(max_new_tokens=5, temperature=0))
    context = [5]
    for token in ids:
        assert token == model(torch.tensor([context]))[0, -1].argmax().item()
        context.append(token)
    for same in (SamplingOptions(5, temperature=0.5, top_k=1),
                 SamplingOptions(5, temperature=1e-30, top_k=0)):  # tiny: it cannot overflow
        assert ids == generate_tokens(model, [5], same)


def test_top_k_draws_only_from_the_k_most_likely_tokens():
    model = tiny_model().eval()
    allowed = set(model(torch.tensor([[7]]))[0, -1].topk(3).indices.tolist())
    drawn = {generate_tokens(model, [7], SamplingOptions(1, temperature=5, top_k=3, seed=s))[0]
             for s in range(60)}
    assert drawn == allowed


def uncached(model, prompt, count, *, seed):
    """The same generation without a cache: one forward pass over the context per token."""
    generator, longest = torch.Generator().manual_seed(seed), model.config.context_length
    context, drawn = prompt[-longest:], []
    for _ in range(count):
        if len(context) > longest:
            context = context[-(longest // 2 + 1):]
        logits = model(torch.tensor([context]))[0, -1].float()
        smallest = logits.topk(40).values[-1]
        probabilities = (logits.masked_fill(logits < smallest, float("-inf")) / 0.8).softmax(dim=-1)
        drawn.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        context = [*context, drawn[-1]]
    return drawn


@torch.no_grad()
@pytest.mark.parametrize(("changes", "length"), [  # of the prompt, in a context of 16
    ({}, 1), ({}, 16), ({}, 40), ({"tie_weights": True, "qkv_bias": True}, 4),
    ({"context_length": 5}, 1), ({"context_length": 5}, 40), ({"context_length": 1}, 4),
], ids=str)
def test_the_cache_changes_no_token(changes, length):
    model = tiny_model(**changes).eval()
    prompt = [i * 7 % 257 for i in range(length)]
    options = SamplingOptions(max_new_tokens=50, seed=3)  # three times the context
    assert generate_tokens(model, prompt, options) == uncached(model, prompt, 50, seed=3)


def test_each_token_is_computed_once():
    model, lengths = tiny_model(context_length=64), []
    model.blocks[0].mlp.register_forward_pre_hook(lambda _, inputs: lengths.append(
        inputs[0].shape[1]))
    generate_tokens(model, [1, 2, 3], SamplingOptions(max_new_tokens=30))
    assert lengths == [3] + [1] * 29


def test_each_of_several_samples_equals_a_single_one():
    model, prompt = tiny_model(), [5, 6]
    before = torch.get_rng_state()
    together = list(stream_tokens(model, prompt, SamplingOptions(20, seed=7, num_samples=3)))
    for number in range(3):
        alone = generate_tokens(model, prompt, SamplingOptions(20, seed=7 + number))
        assert [step[number] for step in together] == alone
    assert torch.equal(torch.get_rng_state(), before)  # training draws from it


def test_a_sample_ends_at_its_stop_token_and_the_others_continue():
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
    ([b"ab"], ("bc",), ["a", "b"]),  # the stop string never completes
    ([b"aab", b"c"], ("abc", "zz"), ["a", "", ""]),
    ([b"one\n", b"\ntwo"], ("\n\n",), ["one", "", ""]),
    ([b"xbcya"], ("ya", "bc"), ["x", ""]),  # the first of two
    ([b"\xc3", b"\xa9t", b"\xc3"], (), ["", "ét", "", "\ufffd"]),
    ([b"a"], ("",), ["a", ""]),
])
def test_text_is_shown_once_it_cannot_be_a_stop_string(pieces, stops, wanted):
    text = StreamedText(stops)
    assert [*(text.add(piece) for piece in pieces), text.add(b"", is_last=True)] == wanted


def test_generation_ends_when_all_samples_are_stopped():
    target = LoadedModel("tiny", tiny_model(), "bytes")
    options = SamplingOptions(60, num_samples=2)
    whole = ["".join(parts) for parts in zip(*stream_texts(target, "a", options), strict=True)]
    stop = whole[0][10:12]
    steps = list(stream_texts(target, "a", options, stops=(stop,)))
    texts = ["".join(parts) for parts in zip(*steps, strict=True)]
    assert texts == [text.split(stop)[0] for text in whole]
    assert len(texts[0]) <= 10


def test_a_text_ends_at_the_end_of_text_token():
    target = LoadedModel("tiny", tiny_model(), "bytes")
    target.model.head.weight.data[256] = 0.0
    free = ["".join(parts) for parts in zip(*stream_texts(
        target, "a", SamplingOptions(300, seed=1, top_k=0, temperature=5.0)), strict=True)]
    assert len(free[0]) < 300 and "<|endoftext|>" not in free[0]


def test_samples_and_stops_on_the_command_line(trained):
    arguments = ("tiny", "--prompt", "import", "--max-new-tokens", "40", "--seed", "5")
    alone = [succeeded(generate(trained, *arguments[:-1], seed)).stdout for seed in ("5", "6")]
    assert alone[0] != alone[1] and alone[0].startswith("import")
    several = succeeded(generate(trained, *arguments, "--samples", "2")).stdout
    assert several == f"--- 1 of 2, seed 5\n{alone[0]}--- 2 of 2, seed 6\n{alone[1]}"
    stop = alone[0].rstrip("\n")[10]
    stopped = succeeded(generate(trained, *arguments, "--stop", stop)).stdout
    assert stopped == "import" + alone[0][6:].split(stop)[0] + "\n"
