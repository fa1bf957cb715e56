"""prepare_dataset.py --mix: shares of each stretch, order, kills, too little text, errors."""

import itertools
import json
import os
import random
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from basics import failpoints
from preparation.mixing import MAX_DATASETS, interleaved, mix_datasets, parse_mix
from tests.support.models import write_tokenizer
from tests.support.optional import given, settings, st
from tests.support.preparation import contents, documents_of, metadata_of, prepare, stopping_after
from tests.support.workplace import succeeded

STRETCH = 2000  # documents


class Tokens:
    """What `interleaved` needs of a token file: documents of these lengths that end with a 9."""

    def __init__(self, lengths, number=0):
        self.num_tokens = sum(lengths)
        self.tokens = np.full(self.num_tokens, number, np.uint16)
        self.tokens[np.cumsum(lengths) - 1] = 9

    def read(self, start, stop):
        return self.tokens[start:stop]


def lengths_like_web_pages(count, mean, seed):
    generator = random.Random(seed)
    return [max(1, int(generator.lognormvariate(0, 1) * mean / 1.65)) for _ in range(count)]


def test_every_stretch_has_the_shares_asked_for_in_tokens_not_in_documents():
    weights, means = [0.5, 0.3, 0.2], [100, 400, 30]
    files = [Tokens(lengths_like_web_pages(40_000, mean, mean)) for mean in means]
    tokens = np.zeros((30_000, 3))
    found = itertools.islice(interleaved(files, weights, 9, repeat=False), 30_000)
    for row, (number, document) in zip(tokens, found, strict=True):
        row[number] = document.size
    so_far, longest = np.cumsum(tokens, axis=0), tokens.max()
    surplus = so_far - so_far.sum(axis=1, keepdims=True) * weights
    assert surplus.max() <= longest, "a source is ahead by more than a document"
    in_stretches = so_far[STRETCH:] - so_far[:-STRETCH]
    errors = np.abs(in_stretches - in_stretches.sum(axis=1, keepdims=True) * weights)
    assert errors.max() <= 2 * longest


@settings(max_examples=60)
@given(
    sources=st.lists(
        st.tuples(
            st.sampled_from([1, 0.3, 7]),
            st.lists(st.integers(1, 9), min_size=1, max_size=20),
        ),
        min_size=2,
        max_size=4,
    ),
    repeat=st.booleans(),
    num_read=st.integers(1, 30),
)
def test_whole_documents_come_in_order_to_the_first_end_or_with_repeat_to_the_last_one(
    sources, repeat, num_read
):
    """However many tokens are read at once."""
    files = [Tokens(lengths, number) for number, (_, lengths) in enumerate(sources)]
    weights = [weight for weight, _ in sources]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("preparation.mixing.CHUNK_NUMBERS", num_read)
        found = list(interleaved(files, weights, 9, repeat=repeat))
    passes = []
    for number, file in enumerate(files):
        documents = [document for source, document in found if source == number]
        tokens = np.concatenate(documents or [file.tokens[:0]])
        assert all(document.tolist().index(9) == document.size - 1 for document in documents)
        assert tokens.tolist() == np.resize(file.tokens, tokens.size).tolist()
        passes.append(tokens.size / file.num_tokens)
    assert min(passes) >= 1 if repeat else max(passes) == 1
    assert 1 in passes, "the end is a file's end"


# --- the command


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """The documents of two datasets, of which the first has too little; 99% are for training."""
    monkeypatch.chdir(tmp_path)
    made = {}
    for name, count, length in (("edu", 600, 50), ("code", 400, 150)):
        generator = random.Random(name)
        made[name] = [
            f"{name} {number} " + "x" * int(generator.expovariate(1 / length)) + "é"
            for number in range(count)
        ]
        lines = [json.dumps({"text": text}) + "\n" for text in made[name]]
        Path(f"{name}.jsonl").write_text("".join(lines))
        succeeded(prepare(f"{name}.jsonl", name, "--tokenizer", "bytes"))
    return made


MIX = ("--mix", "edu=edu:0.7", "--mix", "code=code:0.3")


def of_dataset(documents, name):
    return [text for text in documents if text.startswith(f"{name} ")]


def test_a_mix_has_the_documents_of_its_datasets_in_their_order_and_says_how_many(
    texts, monkeypatch
):
    result = succeeded(prepare(*MIX, "out"))
    for split, documents in zip(("train", "validation"), documents_of(Path("out")), strict=True):
        metadata = metadata_of(Path("out"), split)
        sources = json.loads(metadata["sources"])
        for name, of_source in texts.items():
            cut = round(len(of_source) * 0.99)
            of_split = of_source[:cut] if split == "train" else of_source[cut:]
            found = of_dataset(documents, name)
            assert found == of_split[: len(found)] and found
            num_tokens = sum(len(text.encode()) + 1 for text in found)
            assert sources[name]["num_tokens"] == num_tokens
        assert metadata["source"] == "edu=edu:0.7, code=code:0.3"
    again = prepare(*MIX, "out")
    assert again.returncode == 2 and "replace what is there with --replace" in again.stderr
    with monkeypatch.context() as patched:
        patched.setenv(failpoints.VARIABLE, "replace:full")
        assert prepare(*MIX, "out", "--replace").returncode == 4
    found = documents_of(Path("out"))
    assert found[0]
    other = ("--mix", "edu=edu:0.2", "--mix", "code=code:0.8")
    succeeded(prepare(*other, "out", "--replace"))
    assert documents_of(Path("out")) != found
    itself = prepare("--mix", "a=out:1", "--mix", "b=code:1", "out", "--replace")
    assert itself.returncode == 2 and "out: is one of the datasets" in itself.stderr
    line = r"edu, weight 0.7: (69|70)\.\d\d% of the training tokens, \d+ documents, its"
    assert re.search(line, result.stdout)


def test_what_is_left_over_is_said_and_repeat_starts_over(texts):
    result = succeeded(prepare(*MIX, "out"))
    line = "the train split ends with the last document of edu, and 77% of code is left over"
    assert f"warning: {line}" in result.stdout
    result = succeeded(prepare(*MIX, "repeated", "--repeat"))
    assert "is left over" not in result.stdout
    train, validation = documents_of(Path("repeated"))
    assert of_dataset(train, "code") == texts["code"][:396]
    edu = of_dataset(train, "edu")
    assert len(edu) > 2 * 594 and edu == (texts["edu"][:594] * 9)[: len(edu)]
    assert set(validation) == {*texts["edu"][594:], *texts["code"][396:]}


def test_up_to_a_hundredth_of_a_dataset_may_be_left_over_and_doubles_are_said(texts):
    for weight, is_said in (("1", False), ("1.005", False), ("1.03", True)):
        result = succeeded(prepare("--mix", "a=edu:1", "--mix", f"b=edu:{weight}", weight))
        line = "the train split ends with the last document of b, and 3% of a is left over"
        assert (line in result.stdout) == is_said
    # The validation documents of `edu` are in the training split of a dataset of all its text.
    lines = Path("edu.jsonl").read_text()
    Path("more.jsonl").write_text(lines + '{"text": "the end"}\n' * 9)
    succeeded(prepare("more.jsonl", "more", "--tokenizer", "bytes"))
    result = succeeded(prepare("--mix", "a=edu:1", "--mix", "b=more:1", "both", "--repeat"))
    (number,) = re.findall(r"(\d+) of \1 validation documents are in the training", result.stdout)
    assert metadata_of(Path("both"))["num_validation_documents_in_training"] == number


def test_stopped_at_any_write_the_same_call_writes_the_same_bytes(texts, tmp_path):
    for name in texts:
        arguments = (f"{name}.jsonl", f"few-{name}", "--max-documents", "12")
        succeeded(prepare(*arguments, "--tokenizer", "bytes"))
    datasets = parse_mix(["a=few-edu:2", "b=few-code:1"])
    mix_datasets(datasets, tmp_path / "whole", repeat=True)
    num_stops = 0
    while not Path("out").exists():
        with stopping_after(3 * num_stops):
            mix_datasets(datasets, tmp_path / "out", repeat=True)
        num_stops += 1
    assert 20 < num_stops < 100
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not list(tmp_path.glob(".*"))


def test_the_metadata_of_the_most_and_longest_datasets_fit_into_the_header(texts, tmp_path):
    folder = Path("\U0001f600" * 60)
    folder.mkdir()
    arguments = []
    for number in range(MAX_DATASETS):
        (folder / f"{number}").symlink_to("../edu")
        name = f"{number}" + "n" * 23
        arguments += ["--mix", f"{name}={folder}/{number}:123456789.123456789"]
    succeeded(prepare(*arguments, "--repeat", "out"))
    assert len(json.loads(metadata_of(Path("out"))["sources"])) == MAX_DATASETS


TWO = ["--mix", "a=edu:1", "--mix", "b=code:1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            (["--mix", text], f"--mix {text}: wanted NAME=DATASET:WEIGHT")
            for text in (
                *("a=s", "s:1", "=s:1", "../x=s:1", "a=s:0", "a=s:0.0", "a=s:-1", "a=s:nan"),
                *("a=s:inf", "a=s:1e9", "a=s:", "a=s:1/3"),
            )
        ),
        (["--mix", "a=s:1"], "--mix: is given 1 time; wanted 2 to 10 datasets"),
        (["--mix", "a=s:1"] * 2, "--mix a=s:1: is the second of this name"),
        ([*TWO, "s"], "s: is a SOURCE; with --mix wanted only OUTPUT"),
        ([*TWO, "--tokenizer", "gpt2"], "--tokenizer: is not for --mix"),
        ([*TWO, "--max-documents", "9"], "--max-documents: is not for --mix"),
        ([*TWO[:3], "b=nowhere:1"], "nowhere/train.safetensors: no such token file"),
        ([*TWO[:3], "b=edu.jsonl:1"], "edu.jsonl/train.safetensors: no such token file"),
        ([*TWO[:3], "b=other:1"], "wanted documents in tokens of the first"),
        ([*TWO[:3], "b=cut:1"], "cut/train.safetensors: wanted documents in tokens of the first"),
    ],
)
def test_wrong_mixes_are_one_line_and_write_nothing(texts, arguments, message):
    write_tokenizer(Path("own"))
    succeeded(prepare("edu.jsonl", "other", "--tokenizer", "own"))
    Path("cut").mkdir()
    for split in ("train", "validation"):
        tokens = np.array([256, 1, 2], np.uint16)
        save_file({"tokens": tokens}, f"cut/{split}.safetensors", {"tokenizer": "bytes"})
    before = sorted(os.listdir())
    result = prepare(*arguments, "out")
    assert result.returncode == 2 and result.stderr.startswith("Error: "), result.stderr
    assert message in result.stderr and result.stderr.count("\n") == 1
    assert sorted(os.listdir()) == before
