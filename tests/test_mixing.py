"""prepare_dataset.py --source: shares of each stretch, order, kills, too little text, errors."""

import json
import os
import random
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from preparation import encoding
from preparation.choosing import SourceOptions
from preparation.mixing import (
    MAX_SOURCES,
    Documents,
    Supply,
    WeightedSource,
    documents_in,
    interleaved,
    mix_sources,
)
from preparation.pipeline import prepare_dataset
from tests.support.hub_server import Hub, serving, used_in_this_process
from tests.support.preparation import (
    BYTES,
    SLOW_COMMAND,
    contents,
    decoded,
    leave_unfinished,
    metadata_of,
    prepare,
    stopping_after,
    texts_source,
    tokens_in,
)
from tests.support.runs import wait_until
from tests.support.workplace import PROJECT_DIR, run_command, succeeded

STRETCH = 2000  # documents


def supplies_of(sources):
    """Return supplies of documents of these lengths, by weight; a token is its source's number."""
    supplies = []
    for number, (weight, lengths) in enumerate(sources):
        documents = [np.full(length, number, np.uint16) for length in lengths]
        read = Documents(lambda documents=documents: iter(documents), sum(lengths), None)
        supplies.append(Supply(WeightedSource(str(number), "", weight), read))
    return supplies


def lengths_like_web_pages(count, mean, seed):
    generator = random.Random(seed)
    return [max(1, int(generator.lognormvariate(0, 1) * mean / 1.65)) for _ in range(count)]


def test_every_stretch_has_the_shares_asked_for_in_tokens_not_in_documents():
    weights = [0.5, 0.3, 0.2]
    means = [100, 400, 30]
    sources = [
        (str(weight), lengths_like_web_pages(40_000, mean, seed))
        for seed, (weight, mean) in enumerate(zip(weights, means, strict=True))
    ]
    supplies = supplies_of(sources)
    numbers, lengths = [], []
    for document in interleaved(supplies, max_documents=30_000, repeat=False):
        numbers.append(document[0])
        lengths.append(document.size)
    tokens = np.zeros((30_000, 3))
    tokens[np.arange(30_000), numbers] = lengths
    so_far = np.cumsum(tokens, axis=0)
    total = so_far.sum(axis=1)
    surplus = so_far - total[:, None] * weights
    assert surplus.max() <= max(lengths), "a source is ahead by more than a document"
    in_stretches = so_far[STRETCH:] - so_far[:-STRETCH]
    errors = np.abs(in_stretches - in_stretches.sum(axis=1, keepdims=True) * weights)
    assert errors.max() <= 2 * max(lengths)
    assert (errors / in_stretches.sum(axis=1, keepdims=True)).max() < 0.05
    documents = np.bincount(numbers) / 30_000
    assert abs(documents[1] - 0.3) > 0.1, "shares of documents would be another thing"


def test_the_end_is_that_of_the_first_source_or_with_repeat_of_the_last_one():
    def mixed(*, repeat):
        supplies = supplies_of([("1", [5] * 10), ("1", [5] * 25)])
        documents = list(interleaved(supplies, max_documents=1000, repeat=repeat))
        return documents, [supply.num_documents for supply in supplies]

    documents, counts = mixed(repeat=False)
    assert [document[0] for document in documents] == [0, 1] * 10 and counts == [10, 10]
    _, counts = mixed(repeat=True)
    assert counts == [26, 25], "each document is there once or more often"


def test_documents_are_those_of_the_tokens_however_they_are_read():
    tokens = np.array([1, 2, 9, 9, 3, 9, 4, 5, 6, 7, 9], np.uint16)
    for size in range(1, 12):
        chunks = (tokens[start : start + size] for start in range(0, 11, size))
        found = [document.tolist() for document in documents_in(chunks, 9)]
        assert found == [[1, 2, 9], [9], [3, 9], [4, 5, 6, 7, 9]]


# --- the command


def write_texts(folder, name, count, length):
    """Write two JSON lines files of documents, each with its own number."""
    generator = random.Random(name)
    source = folder / name
    source.mkdir()
    texts = [
        f"{name} {number} " + "x" * int(generator.expovariate(1 / length)) + "é"
        for number in range(count)
    ]
    for part in range(2):
        lines = [
            json.dumps({"text": text}) + "\n" for text in texts[part * count // 2 :][: count // 2]
        ]
        (source / f"{part}.jsonl").write_text("".join(lines))
    return texts


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """The documents of two sources, of which the first has too little."""
    monkeypatch.chdir(tmp_path)
    return {
        "edu": write_texts(tmp_path, "edu", 600, 50),
        "code": write_texts(tmp_path, "code", 400, 150),
    }


TWO = ["--source", "a=s:1", "--source", "b=s:1"]
SOURCES = ("--source", "edu=edu:0.7", "--source", "code=code:0.3", "--tokenizer", "bytes")


def from_source(documents, name):
    return [text for text in documents if text.startswith(f"{name} ")]


def test_a_mix_has_the_documents_of_its_sources_in_their_order_and_says_how_many(texts):
    result = succeeded(prepare(*SOURCES, "out", "--max-documents", "500"))
    for split, number in (("train", 495), ("validation", 5)):
        documents = decoded(Path(f"out/{split}.safetensors"))
        assert len(documents) == number
        metadata = metadata_of(Path("out"), split)
        sources = json.loads(metadata["sources"])
        for name, of_source in texts.items():
            of_split = of_source[:495] if split == "train" else of_source[:500][495:]
            if name == "code":  # has no more than 400
                of_split = of_source[:396] if split == "train" else of_source[396:]
            found = from_source(documents, name)
            assert found == of_split[: len(found)] and found
            num_tokens = sum(len(text.encode()) + 1 for text in found)
            assert sources[name]["num_tokens"] == num_tokens
            whole = sum(len(text.encode()) + 1 for text in of_split)
            assert sources[name]["num_passes"] == round(num_tokens / whole, 3)
        assert sources["edu"]["weight"] == "0.7" and sources["code"]["weight"] == "0.3"
        num_bytes = sum(len(text.encode()) for text in documents)
        assert metadata["num_text_bytes"] == str(num_bytes)
        assert metadata["source"] == "edu=edu:0.7, code=code:0.3"
    line = r"edu, weight 0.7: (69|70)\.\d\d% of the training tokens, \d+ documents, its"
    assert re.search(line, result.stdout) and "500 documents" in result.stdout
    assert "| code | 0.3 | " in Path("out/README.md").read_text()
    assert sorted(os.listdir()) == ["code", "edu", "out"]


def test_too_little_text_is_named_and_what_the_line_advises_works_without_tokenising_again(
    texts, monkeypatch
):
    refused = prepare(*SOURCES, "out")
    assert refused.returncode == 2 and not os.path.exists("out")
    found = re.fullmatch(
        r"Error: edu: too little text for its weight: all of it is used after (\d+) training"
        r" documents of the mix, and \d\d% of code is left; --max-documents (\d+) ends there,"
        r" --repeat starts edu over; or change the weights \(nothing is tokenised again\)",
        refused.stderr.splitlines()[-1],
    )
    assert found, refused.stderr
    shutil.copytree(".out.partial", ".repeated.partial")
    limit = ("--max-documents", found[2])
    with monkeypatch.context() as patch:
        patch.setattr(encoding, "encode_task", lambda *_: pytest.fail("tokenised again"))
        succeeded(prepare(*SOURCES, "out", *limit))
        result = succeeded(prepare(*SOURCES, "repeated", "--repeat"))
    documents = decoded(Path("out/train.safetensors"))
    assert int(found[1]) - len(documents) in (0, 1)
    assert from_source(documents, "edu")[-1] in texts["edu"][590:594]
    succeeded(prepare(*SOURCES, "limited", *limit))
    assert contents(Path("out")) == contents(Path("limited"))

    assert re.search(r"edu, weight 0.7: .* training documents [2-9]\.\d\d times", result.stdout)
    train = decoded(Path("repeated/train.safetensors"))
    assert set(from_source(train, "code")) == set(texts["code"][:396])
    edu = from_source(train, "edu")
    assert len(edu) > 2 * 594 and edu == (texts["edu"][:594] * 9)[: len(edu)]
    validation = decoded(Path("repeated/validation.safetensors"))
    assert set(validation) == {*texts["edu"][594:], *texts["code"][396:]}
    for split, documents in (("train", train), ("validation", validation)):
        metadata = metadata_of(Path("repeated"), split)
        assert metadata["num_documents"] == str(len(documents))
        assert metadata["num_text_bytes"] == str(sum(len(text.encode()) for text in documents))
    num_passes = json.loads(metadata_of(Path("repeated"))["sources"])["edu"]["num_passes"]
    assert abs(num_passes - len(edu) / 594) < 0.05


def test_up_to_a_hundredth_of_a_source_may_be_left_over(texts):
    """Sources of the right sizes do not end with the same document."""
    arguments = ["--source", "a=edu:1", "--tokenizer", "bytes"]
    succeeded(prepare(*arguments, "--source", "b=edu:1", "out"))
    sources = json.loads(metadata_of(Path("out"))["sources"])
    assert 0.99 <= min(source["num_passes"] for source in sources.values()) <= 1
    refused = prepare(*arguments, "--source", "b=edu:1.03", "new")
    assert "b: too little text" in refused.stderr and "3% of a is left" in refused.stderr


def test_a_validation_split_that_ends_early_is_a_warning(tmp_path, monkeypatch):
    """The last documents of one source are short: training is even, validation is not."""
    monkeypatch.chdir(tmp_path)
    for name, lengths in (("even", [100] * 400), ("short", [100] * 396 + [5] * 4)):
        Path(name).mkdir()
        lines = [json.dumps({"text": "x" * length}) + "\n" for length in lengths]
        Path(name, "0.jsonl").write_text("".join(lines))
    two = ("--source", "even=even:1", "--source", "short=short:1")
    result = succeeded(prepare(*two, "out", "--tokenizer", "bytes"))
    assert re.search(
        r"warning: the validation split ends with the text of short, and leaves 75% of even: even"
        r" 101 tokens, short 24 tokens",
        result.stderr,
    )
    assert (
        "validation split ends"
        not in succeeded(prepare(*two, "again", "--tokenizer", "bytes", "--repeat")).stderr
    )


def test_stopped_at_any_write_the_same_call_writes_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, count in (("a", 12), ("b", 9)):
        write_texts(tmp_path, name, count, 9)
    sources = [WeightedSource("a", "a", "2"), WeightedSource("b", "b", "1")]

    def mix(out):
        mix_sources(sources, SourceOptions(""), tmp_path / out, BYTES, repeat=True)

    mix("whole")
    num_stops = 0
    for num_writes in (*range(100), None):
        if not Path("out").exists():
            with stopping_after(num_writes):
                mix("out")
            num_stops += 1
    assert 20 < num_stops < 100
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert sorted(os.listdir()) == ["a", "b", "out", "whole"]


def test_workers_and_a_kill_do_not_change_the_bytes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("edu", "code"):
        write_texts(tmp_path, name, 2000, 200)
    arguments = [*SOURCES, str(tmp_path / "out"), "--repeat", "--workers", "2"]
    arguments[1], arguments[3] = f"edu={tmp_path}/edu:0.7", f"code={tmp_path}/code:0.3"
    process = subprocess.Popen(
        [*SLOW_COMMAND, *arguments],
        cwd=PROJECT_DIR,
        env=os.environ | {"PAUSE_SECONDS": "2"},
        stderr=subprocess.DEVNULL,
    )
    journal = tmp_path / ".out.partial/sources/.code.partial/journal.jsonl"
    wait_until(lambda: journal.exists() and journal.read_bytes().count(b"\n") == 2)
    process.kill()
    process.wait()
    assert not Path("out").exists()
    result = succeeded(run_command(*SLOW_COMMAND, *arguments))
    assert "continuing after document 2,000\n" in result.stderr
    assert "continuing after document 1,000\n" in result.stderr
    arguments[4:7] = ["--tokenizer", "bytes", str(tmp_path / "one")]
    succeeded(prepare(*arguments[:-2]))
    assert contents(tmp_path / "out") == contents(tmp_path / "one")


def test_prepared_datasets_are_mixed_by_their_own_splits(texts):
    for name in texts:
        succeeded(prepare(name, f"{name}-tokens", "--tokenizer", "bytes"))
    tokens = ["--source", "edu=edu-tokens:0.7", "--source", "code=code-tokens:0.3"]
    arguments = [*tokens, "--tokenizer", "bytes", "--repeat"]
    succeeded(prepare(*arguments, "out"))
    succeeded(prepare(*SOURCES, "other", "--repeat"))
    for split, found in tokens_in(Path("out")).items():
        assert np.array_equal(found, tokens_in(Path("other"))[split])
    assert "num_text_bytes" not in metadata_of(Path("out")), "it is unknown"
    assert "num_text_bytes" in metadata_of(Path("other"))
    succeeded(prepare(*tokens[:2], *SOURCES[2:], "both", "--repeat"))
    assert (
        contents(Path("both"))["train.safetensors"][5000:]
        == (contents(Path("out"))["train.safetensors"][5000:])
    )
    for more, message in (
        (["--split", "test"], "--split: is not for a mix of prepared datasets"),
        (["--tokenizer", "gpt2"], "edu: edu-tokens/train.safetensors has tokens of the tokenizer"),
    ):
        refused = prepare(*arguments, *more, "new")
        assert refused.returncode == 2 and message in refused.stderr, refused.stderr
    save_file(
        {"tokens": np.array([256, 1, 2], np.uint16)},
        "edu-tokens/train.safetensors",
        {"tokenizer": "bytes"},
    )
    refused = prepare(*arguments, "new")
    assert "train.safetensors does not end with an end-of-text token" in refused.stderr
    assert not list(Path().glob(".new*"))


def test_a_limit_downloads_only_what_each_source_can_give(texts, tmp_path):
    files = {
        f"{i}.jsonl": "".join(
            json.dumps({"text": f"hub {i} {j}"}) + "\n" for j in range(100)
        ).encode()
        for i in range(4)
    }
    with serving(Hub(files)) as hub, used_in_this_process(hub, tmp_path / "home"):
        sources = ["--source", f"hub={hub.repository}:1", "--source", "edu=edu:1"]
        result = succeeded(
            prepare(*sources, "--tokenizer", "bytes", "--max-documents", "150", "out")
        )
        assert [len(hub.downloads(name)) for name in sorted(files)] == [1, 1, 0, 0]
    assert "150 documents" in result.stdout
    assert metadata_of(Path("out"))["revision"] == hub.sha


def test_the_metadata_of_the_most_and_longest_sources_fit_into_the_header(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / ("\U0001f600" * 60)
    folder.mkdir()
    arguments = []
    for number in range(MAX_SOURCES):
        write_texts(folder, f"{number}", 3, 5)
        name = f"{number}" + "n" * 23
        arguments += ["--source", f"{name}={folder.name}/{number}:123456789.123456789"]
    succeeded(prepare(*arguments, "--tokenizer", "bytes", "--repeat", "out"))
    sources = json.loads(metadata_of(Path("out"))["sources"])
    assert len(sources) == MAX_SOURCES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--source", "a=s"], "--source a=s: wanted NAME=PATH:WEIGHT, such as code=my-code:0.3"),
        (["--source", "s:1"], "--source s:1: wanted NAME=PATH:WEIGHT"),
        (["--source", "=s:1"], "--source =s:1: wanted NAME=PATH:WEIGHT"),
        (["--source", "../x=s:1"], "--source ../x=s:1: wanted NAME=PATH:WEIGHT"),
        *(
            (["--source", f"a=s:{weight}"], f"--source a=s:{weight}: wanted NAME=PATH:WEIGHT")
            for weight in ("0", "0.0", "-1", "nan", "inf", "1e9", "", "1/3")
        ),
        (["--source", "a=s:1"], "--source: is given 1 time; wanted 2 to 10 sources to mix"),
        (["--source", "a=s:1"] * 2, "--source a=s:1: is the second of this name"),
        ([*TWO, "s"], "s: is not for --source; give this SOURCE a name and a weight"),
        ([*TWO, "--import"], "--import: is not for --source; prepare that source on its own"),
        ([*TWO, "--part", "1/2"], "--part: is not for --source"),
        ([*TWO, "--revision", "main"], "--revision: is not for --source"),
        ([*TWO, "--keep-raw", "raw"], "--keep-raw: is not for --source"),
        ([*TWO[:3], "b=one.txt:1"], "b: is one text file, and so one document"),
        ([*TWO[:3], "b=few:1"], "b: 1 document with 1 bytes of text found in few; wanted at least"),
        ([*TWO[:3], "b=nowhere:1"], "nowhere: no such file or directory"),
        ([*TWO[:3], "b=bad.csv:1"], "bad.csv: has no column 'text'"),
        (["s", "--repeat"], "--repeat: is for a mix; name its sources with --source"),
        ([], "Missing argument 'SOURCE'. See"),
    ],
)
def test_wrong_sources_are_one_line_and_write_nothing(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path, "s", 4, 5)
    Path("one.txt").write_text("text")
    Path("few").mkdir()
    Path("few/a.jsonl").write_text('{"text": "a"}\n')
    Path("bad.csv").write_text("id,body\n1,a\n")
    before = sorted(os.listdir())
    result = prepare(*arguments, "out", "--tokenizer", "bytes")
    lines = result.stderr.splitlines()
    assert result.returncode == 2 and lines[-1].startswith("Error: "), result.stderr
    assert message in lines[-1]
    kept = [".out.partial"] if "few" in lines[-1] else []  # the other source stays tokenised
    assert sorted(os.listdir()) == kept + before


def test_a_mix_and_a_preparation_of_one_source_do_not_destroy_each_other(texts, tmp_path):
    refused = prepare(*SOURCES, "out")
    assert "too little" in refused.stderr
    refused = prepare("edu", "out", "--tokenizer", "bytes")
    assert refused.returncode == 2
    assert ".out.partial: an unfinished mix of sources; repeat its" in refused.stderr
    succeeded(prepare(*SOURCES, "out", "--repeat"))
    leave_unfinished(texts_source(["a"], ["b"]), tmp_path / "single")
    refused = prepare(*SOURCES, "single", "--repeat")
    assert ".single.partial: an unfinished preparation of one source" in refused.stderr
    prepare_dataset(texts_source(["a"], ["b"]), tmp_path / "single", BYTES)
