"""`lab generate`; `lab tokenizer`, and the whole path with a tokenizer of one's own: a dataset, a
run, its text, its evaluation, its export.
"""

import json
import math
import shutil

import pytest
import torch
import torch.nn.functional as F

from basics.errors import UserError
from basics.files import aside_of
from gpt import GPTModel
from lab.generate import as_utf8
from lab.instruct.fine_tuning import Example, mean_loss
from preparation.pipeline import PrepareOptions, prepare_dataset
from reporting.sampling import SamplingOptions, decoded, stream_text, stream_tokens
from run_config import ModelConfig
from tests.support.json_schemas import checked
from tests.support.lab_cli import error_line, run_lab, succeeded
from tests.support.optional import package
from tests.support.preparation import find_source, write_parquet, write_source
from tests.support.runs import made_once, refused
from tests.support.workplace import TINY_MODEL, Workplace, read_lines
from tests.support.workplace import succeeded as process_succeeded
from tokens.tokenizer import choose_tokenizer, encode_prompt, load_tokenizer
from trainer.models import load_model

transformers = package("transformers")

WORDS = ["the cat sat", "on the mat", "naïve 🎉 café", "and the hat", "它是它的", "it's 1234"]


# lab generate


def generate(workplace, *arguments):
    return run_lab("generate", *arguments, "--runs-dir", str(workplace.runs_dir))


def tiny_model(**changes):
    torch.manual_seed(0)
    return GPTModel(ModelConfig(**TINY_MODEL | {"init": "torch"} | changes))


def generate_tokens(model, prompt, options):
    return list(stream_tokens(model, prompt, options))


def test_temperature_zero_picks_the_most_likely_token():
    model = tiny_model()
    ids = generate_tokens(model, [5], SamplingOptions(max_new_tokens=5, temperature=0))
    context = [5]
    for token in ids:
        assert token == model(torch.tensor([context]))[0, -1].argmax().item()
        context.append(token)
    for same in (
        SamplingOptions(5, temperature=0.5, top_k=1),
        SamplingOptions(5, temperature=1e-30, top_k=0),
    ):  # tiny: it cannot overflow
        assert ids == generate_tokens(model, [5], same)


def uncached(model, prompt, count, *, seed):
    """The same generation without a cache: one forward pass over the context per token."""
    generator, longest = torch.Generator().manual_seed(seed), model.config.context_length
    context, drawn = prompt[-longest:], []
    for _ in range(count):
        if len(context) > longest:
            context = context[-(longest // 2 + 1) :]
        logits = model(torch.tensor([context]))[0, -1].float()
        smallest = logits.topk(40).values[-1]
        probabilities = (logits.masked_fill(logits < smallest, float("-inf")) / 0.8).softmax(dim=-1)
        drawn.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        context = [*context, drawn[-1]]
    return drawn


@torch.no_grad()
@pytest.mark.parametrize(
    ("changes", "length"),
    [  # of the prompt, in a context of 16
        ({}, 1),
        ({}, 16),
        ({}, 40),
        ({"tie_weights": True, "qkv_bias": True}, 4),
        ({"context_length": 5}, 1),
        ({"context_length": 5}, 40),
        ({"context_length": 1}, 4),
    ],
    ids=str,
)
def test_the_cache_changes_no_token(changes, length):
    model = tiny_model(**changes).eval()
    prompt = [i * 7 % 257 for i in range(length)]
    options = SamplingOptions(max_new_tokens=50, seed=3)  # three times the context
    assert generate_tokens(model, prompt, options) == uncached(model, prompt, 50, seed=3)


def test_each_token_is_computed_once():
    model, lengths = tiny_model(context_length=64), []
    model.blocks[0].mlp.register_forward_pre_hook(
        lambda _, inputs: lengths.append(inputs[0].shape[1])
    )
    generate_tokens(model, [1, 2, 3], SamplingOptions(max_new_tokens=30))
    assert lengths == [3] + [1] * 29


def test_a_sample_ends_at_its_stop_token():
    model, options = tiny_model(), SamplingOptions(20, seed=0)
    free = generate_tokens(model, [5, 6], options)
    assert free[4] not in free[:4]
    assert list(stream_tokens(model, [5, 6], options, free[4])) == free[:4]


@pytest.mark.parametrize(
    ("pieces", "stops", "wanted"),
    [
        ([b"abc", b"def"], (), ["abc", "def", ""]),
        ([b"ab", b"c", b"d"], ("bc",), ["a", ""]),
        ([b"ab", b"x", b"d"], ("bc",), ["a", "bx", "d", ""]),
        ([b"ab"], ("bc",), ["a", "b"]),  # the stop string never completes
        ([b"aab", b"c"], ("abc", "zz"), ["a", ""]),
        ([b"one\n", b"\ntwo"], ("\n\n",), ["one", ""]),
        ([b"xbcya"], ("ya", "bc"), ["x"]),  # the first of two
        ([b"\xc3", b"\xa9t", b"\xc3"], (), ["", "ét", "", "\ufffd"]),
        ([b"a"], ("",), ["a", ""]),
    ],
)
def test_text_is_shown_once_it_cannot_be_a_stop_string(pieces, stops, wanted):
    assert list(decoded(pieces, stops)) == wanted


def test_ids_beyond_the_tokenizers_add_no_text():
    model, options, tokenizer = (
        tiny_model(vocab_size=300),
        SamplingOptions(60, 5.0, 0),
        load_tokenizer("bytes"),
    )
    drawn = list(stream_tokens(model, [*b"a"], options, tokenizer.eot_token))
    assert max(drawn) > 256
    text = "".join(stream_text(model, tokenizer, [*b"a"], options))
    assert text == tokenizer.decode([token for token in drawn if token < 256])


def test_the_end_of_text_in_a_prompt_is_that_token(trained):
    """So it begins a new document, as an empty prompt does; in data and files it is text."""
    tokenizer = load_tokenizer("bytes")
    for prompt, ids in {
        "": [256],
        "<|endoftext|>": [256],
        "a<|endoftext|>b": [97, 256, 98],
        "<|end": [*b"<|end"],
    }.items():
        assert encode_prompt(tokenizer, prompt) == ids
    arguments = ("tiny", "--max-new-tokens", "20")
    empty = succeeded(generate(trained, *arguments)).stdout
    marked = succeeded(generate(trained, *arguments, "--prompt", "<|endoftext|>")).stdout
    assert marked == f"<|endoftext|>{empty}"


def test_samples_and_stops_on_the_command_line(trained):
    arguments = ("tiny", "--prompt", "import", "--max-new-tokens", "40", "--seed", "5")
    alone = [succeeded(generate(trained, *arguments[:-1], seed)).stdout for seed in ("5", "6")]
    assert alone[0] != alone[1] and alone[0].startswith("import")
    several = succeeded(generate(trained, *arguments, "--samples", "2")).stdout
    assert several == f"--- 1 of 2, seed 5\n{alone[0]}--- 2 of 2, seed 6\n{alone[1]}"
    stop = alone[0].rstrip("\n")[10]
    stopped = succeeded(generate(trained, *arguments, "--stop", stop)).stdout
    assert stopped == "import" + alone[0][6:].split(stop)[0] + "\n"


def test_texts_are_printed_before_the_error_of_a_later_model(trained, tmp_path):
    result = generate(trained, "tiny", str(tmp_path), "--prompt", "import", "--max-new-tokens", "8")
    assert isinstance(result.exception, UserError) and str(tmp_path) in str(result.exception)
    assert result.stdout.startswith("tiny@best") and "import" in result.stdout


# lab tokenizer


def lab_tokenizer(source, output, *arguments):
    return run_lab("tokenizer", str(source), "--output", str(output), *arguments)


def test_a_tokenizer_is_trained_always_to_the_same_file(tmp_path):
    source = write_source("jsonl", tmp_path / "source")
    outputs = [tmp_path / "a", tmp_path / "b"]
    left = tmp_path / ".b.tokenizer-partial/tokenizer"  # by a command that was killed
    left.mkdir(parents=True)
    (left / "tokenizer.json").write_text("{")
    for output in outputs:
        result = succeeded(lab_tokenizer(source, output, "--vocab-size", "280"))
        assert "280 entries, from " in result.stdout
    first, second = ((output / "tokenizer.json").read_bytes() for output in outputs)
    assert first == second
    assert choose_tokenizer(str(outputs[0])).n_vocab == 280
    theirs = transformers.AutoTokenizer.from_pretrained(outputs[0])
    assert theirs.eos_token_id == 0 and theirs.decode(theirs.encode(WORDS[2])) == WORDS[2]
    assert {path.name for path in tmp_path.iterdir()} == {"source", "a", "b"}
    least_size = ("--vocab-size", "257")  # without merges
    assert "with --replace" in error_line(lab_tokenizer(source, tmp_path / "a", *least_size))
    assert choose_tokenizer(str(tmp_path / "a")).n_vocab == 280
    (tmp_path / "a").rename(aside_of(tmp_path / "a"))  # as a kill while it is replaced leaves it
    error_line(lab_tokenizer(tmp_path / "nix", tmp_path / "a", *least_size, "--replace"))
    assert choose_tokenizer(str(tmp_path / "a")).n_vocab == 280
    succeeded(lab_tokenizer(source, tmp_path / "a", *least_size, "--replace"))
    least = choose_tokenizer(str(tmp_path / "a"))
    assert {path.name for path in tmp_path.iterdir()} == {"source", "a", "b"}
    assert len(least.encode_ordinary("the cat")) == 7


def test_a_file_that_is_no_text_is_left_out_and_named(tmp_path):
    source = write_source("text", tmp_path / "source")
    (source / "picture.txt").write_bytes(b"\x89PNG\0" * 99)
    result = succeeded(lab_tokenizer(source, tmp_path / "a", "--vocab-size", "258"))
    assert "left out: picture.txt: is binary\n" in result.stderr


def test_only_so_much_text_is_read(tmp_path):
    write_parquet(tmp_path / "source", ["abcabc " * 100_000, "abcabc " * 100_000, "z" * 500_000])
    output = tmp_path / "a"
    result = succeeded(
        lab_tokenizer(tmp_path / "source", output, "--vocab-size", "260", "--max-megabytes", "1")
    )
    num_bytes = int(result.stdout.split("from ")[1].split(" ")[0].replace(",", ""))
    assert 10**6 <= num_bytes < 10**6 + 2**19  # it ends with a piece of a document
    assert b'"zz"' not in (output / "tokenizer.json").read_bytes()


def test_a_user_error_is_one_line_and_writes_nothing(tmp_path):
    source, output = write_source("txt", tmp_path / "source"), tmp_path / "out"
    for size in ("256", "65537", "-1"):
        result = lab_tokenizer(source, output, "--vocab-size", size)
        assert result.exit_code == 2 and f"{size} is not in the range 257<=x<=65536" in (
            result.stderr
        )
    line = error_line(lab_tokenizer(source, output, "--vocab-size", "4096"))
    assert "bytes of text give " in line and "entries, not 4,096; give more text, or a" in line
    assert "no such file or directory" in error_line(
        lab_tokenizer(tmp_path / "nix", output, "--vocab-size", "300")
    )
    assert "is not empty" in error_line(lab_tokenizer(source, source, "--vocab-size", "300"))
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_text_for_a_tokenizer_is_read_and_warned_of_as_for_a_dataset(tmp_path):
    (tmp_path / "a.txt").write_bytes(f"one{' ' * 300} é\n</s>\ntwo é\n".encode("latin-1") * 50)
    source, arguments = tmp_path / "a.txt", ("--vocab-size", "258")
    warned = succeeded(lab_tokenizer(source, tmp_path / "1", *arguments)).stderr
    assert "warning: there is </s> in the text" in warned and warned.count("\n") == 2
    assert "bytes that are not UTF-8: 100 characters became U+FFFD" in warned
    result = succeeded(
        lab_tokenizer(
            source,
            tmp_path / "2",
            *arguments,
            "--encoding",
            "latin-1",
            "--document-separator",
            "</s>",
        )
    )
    assert result.stderr == "" and "15,649 bytes of text" in result.stdout
    write_parquet(tmp_path / "rows", ["a", "b"])
    line = error_line(
        lab_tokenizer(tmp_path / "rows", tmp_path / "3", *arguments, "--text-column", "body")
    )
    assert "000.parquet: has no column 'body'; name one of its columns" in line


def train_both(root):
    """Train two tiny runs on the same text: one in tokens of its own, one in bytes."""
    workplace = Workplace(root)
    documents = workplace.root / "documents"
    documents.mkdir()
    for number in range(100):
        text = " ".join(WORDS[(number + i * i) % len(WORDS)] for i in range(60))
        (documents / f"{number:03}.txt").write_text(text)
    succeeded(lab_tokenizer(documents, workplace.root / "own", "--vocab-size", "300"))
    for name, tokenizer, size in (
        ("own", str(workplace.root / "own"), 304),
        ("bytes", "bytes", 257),
    ):
        prepare_dataset(
            find_source(documents),
            workplace.datasets_dir / name,
            PrepareOptions(tokenizer=tokenizer, validation_fraction=0.1),
        )
        workplace.add_run(
            name,
            model={"vocab_size": size},
            train={
                "dataset": name,
                "min_train_tokens": 20 * 64,
                "validation_interval": 10,
                "sample_prompts": ["the naïve"] if name == "own" else None,
            },
        )
        process_succeeded(workplace.torchrun(1, name))


@pytest.fixture
def both(tmp_path_factory, tmp_path):
    root = made_once(tmp_path_factory, "own-tokenizer", train_both)
    return Workplace(shutil.copytree(root, tmp_path / "workplace", symlinks=True))


def target_of(workplace, name="own"):
    return load_model(name, runs_dir=workplace.runs_dir, device=torch.device("cpu"))


def test_a_run_writes_text_of_its_tokenizer_and_bits_per_byte(both):
    samples = read_lines(both.runs_dir / "own/samples.jsonl")
    assert len(samples) == 2 and all(sample["text"] for sample in samples)
    for name in ("own", "bytes"):
        records = read_lines(both.runs_dir / name / "metrics.jsonl")
        validated = [record for record in records if "validation_loss" in record]
        summary = json.loads((both.runs_dir / name / "summary.json").read_text())
        assert summary["tokenizer"] == target_of(both, name).tokenizer_name
        assert summary["validation_bits_per_byte"] == validated[-1]["validation_bits_per_byte"]
    ratio = validated[-1]["validation_loss"] / validated[-1]["validation_bits_per_byte"]
    assert ratio == pytest.approx(math.log(2), rel=0.02)  # bytes; end-of-text tokens add none


def test_a_run_needs_no_dataset_to_write_text_and_to_be_exported(both, tmp_path):
    output = tmp_path / "export"
    shutil.rmtree(both.datasets_dir / "own")
    shutil.rmtree(both.root / "own")
    checkpoint = both.runs_dir / "own/checkpoints/best"
    assert "tokenizer.json" in json.loads((checkpoint / "manifest.json").read_text())["files"]
    where = ("--runs-dir", str(both.runs_dir))
    text = succeeded(run_lab("generate", "own", "--prompt", "the naïve", *where)).stdout
    assert text.startswith("the naïve")
    succeeded(run_lab("publish", "own", "--output", str(output), *where, HF_TOKEN=""))
    ours, theirs = target_of(both), transformers.GPT2LMHeadModel.from_pretrained(output).eval()
    tokenizer, automatic = ours.load_tokenizer(), transformers.AutoTokenizer.from_pretrained(output)
    prompt = "the cat's naïve 🎉 它\n\n hat"
    ids = tokenizer.encode_ordinary(prompt)
    assert automatic(prompt, add_special_tokens=False).input_ids == ids
    assert (automatic.eos_token_id, theirs.config.eos_token_id) == (0, 0)
    tokens = torch.tensor([ids[:16]])
    with torch.no_grad():
        assert (ours.model(tokens) - theirs(tokens).logits).abs().max() < 1e-4
    exported = load_model(str(output), runs_dir=both.runs_dir)
    assert exported.tokenizer_name == ours.tokenizer_name
    assert succeeded(run_lab("generate", str(output), "--prompt", "the naïve")).stdout == text
    assert "(tokenizer.json)" in (output / "README.md").read_text()


def test_bits_per_byte_compare_runs_with_different_tokenizers(both):
    compare = ("compare", "--runs-dir", str(both.runs_dir))
    assert "the bits are not of the same text" in succeeded(run_lab(*compare)).stdout
    result = succeeded(run_lab(*both.arguments("evaluate", "own", "bytes", "--json")))
    models = checked(result.stdout).models
    bits = [model.loss.bits_per_byte for model in models]
    assert bits == sorted(bits) and {model.name for model in models} == {"own", "bytes"}
    text_bytes = sum(
        path.stat().st_size for path in sorted((both.root / "documents").iterdir())[-10:]
    )
    for name in ("own", "bytes"):  # the first token is not predicted
        record = read_lines(both.runs_dir / name / "evaluations.jsonl")[-1]
        assert record["bits_per_byte"] == pytest.approx(
            record["loss"] * record["num_tokens"] / math.log(2) / text_bytes, rel=1e-3
        )
    table = succeeded(run_lab(*compare)).stdout
    assert "sorted by bits per byte of the test loss" in table
    assert "losses (nats per token) do not compare" in table and "not of the same text" not in table


def test_text_of_another_tokenizer_or_other_text_is_not_measured(both):
    assert "validation.safetensors: the tokenizer is bytes, but that of own is sha256:" in (
        error_line(run_lab(*both.arguments("evaluate", "own", "--dataset", "bytes")))
    )
    assert "--start-token and --tokens would choose different text" in error_line(
        run_lab(*both.arguments("evaluate", "own", "bytes", "--tokens", "100"))
    )
    documents = both.root / "documents"
    changed = documents / "099.txt"
    changed.write_text(changed.read_text() + "!")  # the number of documents stays the same
    shutil.rmtree(both.datasets_dir / "bytes")
    prepare_dataset(
        find_source(documents),
        both.datasets_dir / "bytes",
        PrepareOptions(tokenizer="bytes", validation_fraction=0.1),
    )
    assert "the targets were trained on different ones: own and bytes" in error_line(
        run_lab(*both.arguments("evaluate", "own", "bytes"))
    )


def test_a_changed_tokenizer_is_refused_by_the_trainer_and_damages_a_checkpoint(both):
    both.add_run("new", model={"vocab_size": 304}, train={"dataset": "own"})
    path = both.datasets_dir / "own/tokenizer.json"
    content = path.read_text().replace('"use_regex": true', '"use_regex": false', 1)
    path.write_text(content)
    assert "has changed: the tokens were made with the tokenizer sha256:" in refused(both, "new")
    path.unlink()
    assert "tokenizer.json: no such file" in refused(both, "new")
    for copy in (both.runs_dir / "own/checkpoints").glob("*/tokenizer.json"):
        copy.write_text(copy.read_text().replace("true", "True", 1))
    assert "tokenizer.json has changed since it was written" in error_line(
        run_lab(*both.arguments("evaluate", "own"))
    )


@pytest.mark.parametrize(
    ("argument", "wanted"),
    [
        (b"na\xc3\xafve".decode("ascii", "surrogateescape"), "naïve"),
        ("naïve", "naïve"),
        (b"na\xefve".decode("utf-8", "surrogateescape"), "na\udcefve"),
    ],
)
def test_a_prompt_is_utf_8_in_every_locale(argument, wanted):
    assert as_utf8(argument) == wanted


def test_cudnn_which_plans_for_each_length_computes_none_of_the_attention(monkeypatch):
    attention, is_allowed = F.scaled_dot_product_attention, []

    def attend(*arguments, **options):
        is_allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attention(*arguments, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    model = tiny_model()
    generate_tokens(model, [1, 2, 3], SamplingOptions(max_new_tokens=2))
    mean_loss(model, [Example([1, 2], [2, 3]), Example([4], [5])], 1)
    assert is_allowed == [False] * 4 * len(model.blocks)
    assert torch.backends.cuda.cudnn_sdp_enabled()  # again, as for all else
