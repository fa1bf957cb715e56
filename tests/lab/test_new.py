"""`lab new`, and the page about a first model, whose commands are run as they stand there."""

import json
import re
import shlex
from pydoc_data.topics import topics

import numpy as np
import pytest

from basics.text import dollars
from lab.new_run import first_words, made_run, read_settings
from lab.plan.estimate import Machine, estimate
from lab.size_rules import BASE, affordable_width, apply_rules, nearest_width
from run_config import load_run
from tests.support.lab_cli import error_line, run_lab, succeeded
from tests.support.models import add_dataset_with_tokenizer
from tests.support.preparation import prepare
from tests.support.workplace import PROJECT_DIR, TINY_TRAIN, write_tokens
from tests.support.workplace import succeeded as process_succeeded
from tokens.token_file import TokenFile

PAGE = PROJECT_DIR / "docs/first-model.md"
CARD = "1xRTX-4090@0.45"
BYTES = {"tokenizer": "bytes"}
TEXT_BYTES = 180_000  # enough for more than the 100 steps after which the page stops


def new(workplace, *arguments):
    return run_lab("new", *workplace.arguments(*arguments))


def settings_of(run_dir):
    return tuple(json.loads((run_dir / name).read_text()) for name in ("model.json", "train.json"))


def shape(line):
    """Return a line without its numbers, its spaces, and the words that go with one and many."""
    return re.sub(
        r"\W+",
        " ",
        re.sub(r"\b(documents?|[KMG]iB|k)\b", "", re.sub(r"[\d.,:Zk]*\d[\d.,:Zk]*", "#", line)),
    ).strip()


def test_the_commands_of_the_page_give_what_it_shows(workplace, monkeypatch):
    monkeypatch.chdir(workplace.root)
    texts = workplace.root / "my-texts"
    texts.mkdir()
    size = 0
    for place, text in enumerate(sorted(topics.values())):
        size += len(text)
        if size > TEXT_BYTES:
            break
        (texts / f"{place}.txt").write_text(text)
    run_of = {
        "lab": lambda *arguments: succeeded(run_lab(*arguments)).output,
        "prepare_dataset.py": lambda *arguments: process_succeeded(prepare(*arguments)).stdout,
        "ddp_train.py": lambda *arguments: (
            process_succeeded(workplace.torchrun(1, *arguments)).stdout
        ),
    }
    (tokens,) = set(re.findall(r"([\d,]+) training tokens", PAGE.read_text()))
    assert f"documents, {tokens} tokens\n" in PAGE.read_text()  # of one run of the page
    blocks = re.findall(r"```sh\n(.*?)```\n\n```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 8
    for commands, shown in blocks:
        printed = ""
        for line in commands.splitlines():
            uv, run, program, *arguments = shlex.split(line)
            assert (uv, run) == ("uv", "run")
            printed += run_of[program](*arguments)
        printed = printed.replace(f"{workplace.root}/", "")
        found = [*map(shape, printed.splitlines())]
        for line in shown.splitlines():
            begin, _, rest = line.partition("...")
            assert any(
                one.startswith(shape(begin))
                if not rest and line.endswith("...")
                else one == shape(line)
                for one in found
            ), (line, printed)
    assert (workplace.root / "mine-gpt2/model.safetensors").is_file()
    assert not (workplace.runs_dir / "mine-2/checkpoints").exists()


def test_a_run_for_a_dataset_can_be_trained_at_once(workplace):
    add_dataset_with_tokenizer(workplace)
    workplace.add_run(
        train={"dataset": "other", "start_train_token": 3, "start_val_token": 5}
        | {"min_train_tokens": 320}
    )
    output = succeeded(new(workplace, "mine", "--dataset", "tiny", "--like", "tiny")).output
    model, train = settings_of(workplace.runs_dir / "mine")
    assert train["dataset"] == "tiny" and "start_train_token" not in train
    assert "start_val_token" not in train and train["learning_rate"] == TINY_TRAIN["learning_rate"]
    assert model["vocab_size"] == 257 and "vocab_size" not in output  # as it was
    assert "\n  start_train_token dropped: it belongs to other\n" in output
    assert "are those of tiny, but for\n" in output
    again = succeeded(new(workplace, "mine-2", "--dataset", "tiny", "--like", "mine")).output
    assert again.splitlines()[0].endswith("model.json and train.json are those of mine")
    assert sorted(path.name for path in (workplace.runs_dir / "mine").iterdir()) == [
        "model.json",
        "train.json",
    ]
    process_succeeded(workplace.torchrun(1, "mine"))


@pytest.mark.parametrize(
    ("num_tokens", "wanted", "steps", "repeats"),
    [
        (100_000, 320, 5, False),  # as long as the other run
        (1000, 64_000, 62, True),  # four passes
        (100_000, -1, 1562, False),  # all
        (65, 64_000, 4, True),
    ],
)
def test_the_length_fits_the_dataset(workplace, num_tokens, wanted, steps, repeats):
    workplace.add_dataset(num_tokens=num_tokens)
    workplace.add_run(
        train={"dataset": "other", "min_train_tokens": wanted}
        | {"microbatch_size": None, "minibatch_size": 2}  # the original's name
    )
    output = succeeded(new(workplace, "mine", "--dataset", "tiny", "--like", "tiny")).output
    _, train = settings_of(workplace.runs_dir / "mine")
    assert train["min_train_tokens"] == 64 * steps and train.get("repeat_data", False) == repeats
    assert ("more passes help little" in output) == (steps in (62, 4))
    assert train["validation_interval"] == -(-steps // 10)
    assert (f"only {steps:,} steps" in output) == (steps < 100)


def test_a_run_like_one_of_the_same_dataset_is_a_copy_of_it_also_in_its_length(workplace):
    workplace.add_dataset()
    workplace.add_run(train={"min_train_tokens": 330, "start_train_token": 3})  # no whole steps
    succeeded(new(workplace, "mine", "--dataset", "tiny", "--like", "tiny"))
    assert settings_of(workplace.runs_dir / "mine") == settings_of(workplace.runs_dir / "tiny")


@pytest.mark.parametrize(
    ("like", "arguments", "train"),
    [
        ("demo", ["--params", "100k"], {"dataset": "tiny"}),  # one layer: it cannot grow
        ("original", ["--params", "1M"], {}),  # a microbatch of 6, which no power of two has
        ("demo", ["--params", "1M"], {"dataset": "tiny", "start_train_token": 7}),
        ("demo", ["--params", "300k"], {"start_train_token": 7, "validation": {"a": "b"}}),
        ("gpt2-small-1gpu", [], {}),
    ],
)
def test_each_change_is_said_once_and_the_run_can_be_loaded(workplace, like, arguments, train):
    workplace.add_dataset(num_tokens=1_500_000)
    validation = workplace.datasets_dir / "tiny/validation.safetensors"
    write_tokens(validation, np.arange(200, dtype=np.uint16) % 250)
    model, settings = read_settings(PROJECT_DIR / "runs", like)
    settings |= train
    workplace.add_run("base", model=model)
    (workplace.runs_dir / "base/train.json").write_text(json.dumps(settings))
    before = model | settings
    output = succeeded(new(workplace, "mine", "--dataset", "tiny", "--like", "base", *arguments))
    model, settings = settings_of(workplace.runs_dir / "mine")
    after = model | settings
    said = re.findall(r"^  (\w+) ", output.output, re.MULTILINE)
    assert sorted(said) == sorted(
        key for key in before | after if before.get(key) != after.get(key)
    )
    assert model["context_length"] == 128 and output.output.count("  context_length 128: ") == 1
    for key in ("start_train_token", "sample_prompts", "validation"):
        is_kept = before["dataset"] == "tiny"
        assert after.get(key) == (before.get(key) if is_kept else None)
    run = load_run(workplace.runs_dir, "mine")
    assert run.config.global_batch_size % run.config.microbatch_size == 0
    step = run.config.global_batch_size * 128
    assert (
        not arguments or "global_batch_size" not in said or f" {step:,} tokens a" in output.output
    )


def settings_for(width, *, vocab_size=50_257, most_tokens=2**60, base=BASE):
    model, train = read_settings(PROJECT_DIR / "runs", base)
    model["vocab_size"] = vocab_size
    reasons = apply_rules(width, model, train, most_tokens, 2**20)
    return model, train, reasons


@pytest.mark.parametrize(
    ("params", "vocab_size", "width", "heads", "context", "batch", "tokens", "beta2"),
    [
        ("1M", 257, 192, 6, 256, 32, 29_621_760, 0.9912),
        ("10M", 257, 384, 6, 1024, 32, 224_624_640, 0.9823),
        ("124M", 50_257, 640, 10, 1024, 256, 2_284_032_000, 0.95),
        ("163.0e6", 50_257, 768, 12, 1024, 256, 3_260_000_000, 0.95),  # GPT-2 small, untied
        ("1.5B", 50_257, 1920, 30, 1024, 1024, 30_452_736_000, 0.95),
    ],
)
def test_settings_follow_from_a_size(
    params, vocab_size, width, heads, context, batch, tokens, beta2
):
    model, _ = read_settings(PROJECT_DIR / "runs", BASE)
    assert nearest_width(params, model | {"vocab_size": vocab_size}, 2**20) == width
    model, train, _ = settings_for(width, vocab_size=vocab_size)
    assert (model["emb_dim"], model["n_layers"], model["n_heads"]) == (width, width // 64, heads)
    assert (model["context_length"], train["global_batch_size"]) == (context, batch)
    assert train["min_train_tokens"] == pytest.approx(tokens, rel=1e-3)
    assert train["microbatch_size"] == min(16, batch)
    ratio = (768 / width) ** 0.5
    assert train["beta2"] == beta2
    assert train["matrix_learning_rate"] == 0.02  # Muon's stays
    assert train["learning_rate"] == pytest.approx(0.008 * ratio, rel=0.01)
    assert train["embedding_learning_rate"] == pytest.approx(0.06 * ratio, rel=0.01)
    made_run(PROJECT_DIR / "runs/new", BASE, model, train)  # or an error


@pytest.mark.parametrize(
    ("like", "changes", "beta2"),
    [
        ("gpt2-small-1gpu", {}, 0.9956),  # 8 sequences of 256 tokens
        ("gpt2-small-1gpu", {"beta2": None}, 0.9956),  # Muon's default is 0.95
        ("gpt2-small-1gpu", {"beta2": 0.999}, 0.999),
        ("gpt2-small-adamw", {}, 0.9956),
        ("gpt2-small-adamw", {"beta2": None}, None),  # AdamW's default is 0.999
        ("demo", {"global_batch_size": None, "gradient_accumulation_steps": 2}, 0.9956),
    ],
)
def test_a_small_batch_has_a_beta2_nearer_to_1(like, changes, beta2):
    model, train = read_settings(PROJECT_DIR / "runs", like)
    model["vocab_size"] = 257
    train = {key: value for key, value in (train | changes).items() if value is not None}
    reasons = apply_rules(64, model, train, 2**60, 2**20)
    assert train.get("beta2") == beta2
    assert ("beta2" in reasons) == (beta2 == 0.9956)


def test_adamws_rate_of_matrices_falls_with_the_width_and_data_is_read_a_few_times_at_most():
    model, train, reasons = settings_for(1536, base="gpt2-small-adamw", most_tokens=2**30)
    assert (train["learning_rate"], train["head_learning_rate"]) == (0.0005, 0.00283)
    assert train["min_train_tokens"] == 2**30 and train["global_batch_size"] == 128
    assert reasons["learning_rate"].startswith("0.001 x 0.5^1, by")


@pytest.mark.parametrize(
    ("machine", "usd", "most_tokens", "width", "limit"),
    [
        (CARD, 5, 2**60, None, "the money; the next size costs US$"),
        (CARD, 5, 42_000_000, 192, "the dataset, which is worth training on 42,000,000 tokens"),
        (CARD, 5, 900_000_000, 576, "the dataset, which is worth"),
        (CARD, 10**5, 2**60, 1728, "the machine; the next size: does not fit in memory"),
        ("8xH100@20", 10**5, 2**60, 2048, "the largest width"),
    ],
)
def test_the_largest_size_that_dollars_and_dataset_allow(machine, usd, most_tokens, width, limit):
    """Each size has 20 tokens for each parameter."""
    machine = Machine.parse(machine)

    def run_of(width):
        settings = settings_for(width, vocab_size=257, most_tokens=most_tokens)
        return made_run(PROJECT_DIR / "runs/new", BASE, *settings[:2])

    def cost_of(width):
        return estimate(run_of(width), machine, tokens=None, measured={})["usd"]["expected"]

    found, microbatch, line = affordable_width(usd, machine, run_of, most_tokens)
    run = run_of(found)
    assert run.config.min_train_tokens == 20 * run.model.num_parameters
    assert f"; limit of the size: {limit}" in line and " hours, US$" in line
    assert run.config.global_batch_size % microbatch == 0 and microbatch > 1
    assert found == (width or found)
    if width is None:
        assert cost_of(found) <= usd < cost_of(found + 64)
    assert ("less than" in line) == (found == 192)  # too small for the formula
    if 192 < found < 2048:
        assert f"US${dollars(cost_of(found))}; " in line


def test_a_run_of_a_size_is_planned_and_no_longer_than_its_dataset_is_worth(workplace):
    workplace.add_dataset(num_tokens=1_000_000)
    workplace.add_run(train={"microbatch_size": 8})
    arguments = ("mine", "--dataset", "tiny", "--like", "tiny", "--usd", "5", "--machine", CARD)
    output = succeeded(new(workplace, *arguments)).output
    _, train = settings_of(workplace.runs_dir / "mine")
    assert "\nexpected on 1x RTX-4090: " in output
    assert train["min_train_tokens"] <= 4 * 1_000_000 and train["repeat_data"]


@pytest.mark.parametrize(
    ("num_tokens", "context_length", "sequences"), [(50, 16, 3), (12, 8, 1), (5, None, None)]
)
def test_a_short_validation_file_gives_fewer_or_shorter_sequences(
    workplace, num_tokens, context_length, sequences
):
    workplace.add_dataset()
    workplace.add_run(train={"dataset": "other", "validation_batches": 3})
    validation = workplace.datasets_dir / "tiny/validation.safetensors"
    write_tokens(validation, np.arange(num_tokens, dtype=np.uint16))
    result = new(workplace, "mine", "--dataset", "tiny", "--like", "tiny")
    if sequences is None:
        assert "has only 5 tokens; prepare more text" in error_line(result)
        assert not (workplace.runs_dir / "mine").exists()
        return
    model, train = settings_of(workplace.runs_dir / "mine")
    assert (model["context_length"], train["validation_sequences"]) == (context_length, sequences)


def test_the_prompt_is_from_the_validation_text_however_short_that_is(tmp_path):
    path = tmp_path / "validation.safetensors"
    for text, words in (("a b c d", "a b c"), ("a " * 500, "a a a"), ("", "")):
        write_tokens(path, np.array([*text.encode(), 256], dtype=np.uint16), BYTES)
        assert first_words(TokenFile(path)) == words


def test_a_dataset_that_names_no_tokenizer_has_the_vocabulary_of_its_ids(workplace):
    workplace.add_dataset(vocab_size=100)
    workplace.add_run(train={"dataset": "other", "sample_prompts": ["a"]})
    output = succeeded(new(workplace, "mine", "--dataset", "tiny", "--like", "tiny")).output
    model, train = settings_of(workplace.runs_dir / "mine")
    assert model["vocab_size"] == 100 and "sample_prompts" not in train
    assert "one more than the largest token id; the dataset names no tokenizer" in output


def test_what_cannot_be_made_is_one_line_and_nothing_is_written(workplace):
    workplace.add_dataset()
    workplace.add_run()
    workplace.add_run("shallow", train={"grow": {"from_layers": 9, "at": 0.5}})
    before = workplace.files()
    for arguments, line in (
        (("tiny", "--dataset", "tiny"), "runs/tiny: is there already; choose another name"),
        (("a b", "--dataset", "tiny"), "run 'a b' is not a plain name"),
        (
            ("new", "--dataset", "none"),
            "datasets/none: no dataset there (there are: tiny); make it: uv run prepare_dataset.py",
        ),
        (("new", "--dataset", "tine"), "datasets/tine: no dataset there (did you mean tiny?)"),
        (("new", "--dataset", "a/b/c"), "dataset 'a/b/c': wanted the name that"),
        (("new", "--dataset", "tiny", "--like", "none"), "--like none: no such run; there"),
        (("new", "--dataset", "tiny", "--like", ".."), "--like ..: no such run"),
        (
            ("new", "--dataset", "tiny", "--like", "shallow"),
            "grow has from_layers 9, and model.json",
        ),
        (("new", "--dataset", "tiny", "--params", "many"), "--params 'many': wanted a number"),
        (("new", "--dataset", "tiny", "--params", "100B"), "wanted a number from 99,200 to 1,612,"),
        (("new", "--dataset", "tiny", "--params", "99k"), "wanted a number from 99,200 to 1,612,"),
        (("new", "--dataset", "tiny", "--usd", "5"), "--usd needs --machine, such as"),
        (("new", "--dataset", "tiny", "--machine", CARD), "--machine needs --usd, the"),
        (("new", "--dataset", "tiny", "--usd", "5", "--params", "1M"), "are two sizes; drop one"),
        (
            ("new", "--dataset", "tiny", "--usd", "5", "--machine", "1xFOO@0.45"),
            "--machine '1xFOO@0.45': wanted [name=]COUNTxGPU@USD_PER_HOUR",
        ),
        (
            ("new", "--dataset", "tiny", "--usd", "0.001", "--machine", CARD),
            "cheapest size that lab plan can estimate has 17,236,352 parameters and costs US$0.0",
        ),
        (
            ("new", "--dataset", "tiny", "--usd", "5", "--machine", CARD),
            "--usd 5: tiny has too little text for the smallest size, 20 tokens for each",
        ),
    ):
        assert line in error_line(new(workplace, *arguments))
    assert workplace.files() == before


def test_a_dataset_may_be_named_by_its_path_and_a_vocabulary_that_is_too_large_is_said(
    workplace, tmp_path
):
    rng = np.random.default_rng(0)
    for split, length in (("train", 40_000), ("validation", 4_000)):
        path = workplace.datasets_dir / f"mine/{split}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        tokens = rng.integers(0, 50_257, size=length).astype(np.uint16)
        write_tokens(path, tokens, {"tokenizer": "gpt2"})
    places = ["--runs-dir", str(workplace.runs_dir), "--datasets-dir", str(workplace.datasets_dir)]
    result = run_lab("new", "mine", "--dataset", f"{workplace.datasets_dir}/mine/", *places)
    printed = succeeded(result).stdout
    assert "% of the parameters are the vocabulary's" in printed and "lab tokenizer" in printed
    assert load_run(workplace.runs_dir, "mine").config.dataset == "mine"
