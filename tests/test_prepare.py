"""prepare_dataset.py: the tokens and their split, kills, parts, the command, memory."""

import bz2
import gzip
import json
import lzma
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest
from huggingface_hub import DatasetCard

from basics.errors import UserError
from benchmarks.prepare import build_corpus, peak_memory_of, prepare_as_the_original
from preparation import card, cutting, encoding, reading
from preparation.choosing import SourceOptions
from preparation.cutting import BadShard, cut_document
from preparation.encoding import cuts_of, encode_batch, encode_task
from preparation.findings import Findings
from preparation.hub import fetch_dataset
from preparation.journal import Journal
from preparation.parts import share_of
from preparation.pipeline import PrepareOptions, join_parts, prepare_dataset
from preparation.reading import Task, text_tasks
from preparation.sources import Request
from preparation.token_stream import num_training_documents
from prepare_dataset import MAX_DEFAULT_WORKERS
from tests.support.hub_server import Hub, serving, used_in_this_process
from tests.support.lab_cli import HOSTILE, active_parts
from tests.support.models import WITH_A_SPACE, write_tokenizer, write_tokenizer_with_a_space
from tests.support.optional import given, settings, st
from tests.support.preparation import (
    BYTES,
    DOCUMENTS,
    SLOW_COMMAND,
    Stopped,
    contents,
    corrupt,
    decoded,
    find_documents,
    leave_unfinished,
    metadata_of,
    prepare,
    stopping_after,
    texts_source,
    tokens_in,
    write_parquet,
    write_source,
)
from tests.support.runs import wait_until
from tests.support.workplace import PROJECT_DIR, run_command, small_disk, succeeded
from tokens.tokenizer import END_OF_TEXT, choose_tokenizer, load_tokenizer

COMMAND = [sys.executable, str(PROJECT_DIR / "prepare_dataset.py")]
SHARDS = [["a", "bb"], ["ccc"], ["d", "", "e"], ["f" * 9], ["g", "h"]]
PARTS = [
    "a",
    " ",
    "\n",
    "Don't",
    "é",
    "字",
    "\U0001f600",
    "<|",
    "|>",
    END_OF_TEXT[:-1],
    END_OF_TEXT,
]
LETTERS = {
    "pre_tokenizer": {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
}  # merges may go across spaces
PLAIN = SourceOptions("text files")
LONG = "the cat 它是 " * 60 + " " * 300 + "xyz" * 200 + "\n\n" + "café 12 " * 90


def documents_of(out):
    """Return the documents of both splits of a dataset in bytes."""
    return [decoded(out / f"{split}.safetensors") for split in ("train", "validation")]


# --- the tokens and their split


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "text"])
def test_the_first_99_percent_are_for_training(tmp_path, kind):
    source = find_documents(write_source(kind, tmp_path / "source"))
    dataset = prepare_dataset(source, tmp_path / "out", BYTES)
    texts = {"train": DOCUMENTS[:150], "validation": DOCUMENTS[150:]}
    assert documents_of(tmp_path / "out") == [*texts.values()]
    for split in ("validation", "train"):
        count, metadata = dataset.splits[split], metadata_of(tmp_path / "out", split)
        num_bytes = sum(len(text.encode()) for text in texts[split])
        assert metadata["num_text_bytes"] == str(num_bytes) == str(count.num_text_bytes)
        assert metadata["num_tokens"] == str(count.num_tokens)
    assert metadata["tokenizer"] == "bytes" and metadata["num_documents"] == "150"
    assert metadata["max_token_id"] == "256"
    assert not list(tmp_path.glob(".*")), "an unfinished directory was left behind"


@settings(max_examples=40)
@given(
    shards=st.lists(st.lists(st.text(max_size=30), max_size=10), min_size=1, max_size=6),
    fraction=st.sampled_from([0.01, 0.1, 0.5, 0.99]),
    total=st.integers(1, 4),
    max_documents=st.one_of(st.none(), st.integers(2, 30)),
)
def test_documents_stay_whole_and_in_order_on_one_machine_or_joined_from_parts(
    tmp_path_factory, shards, fraction, total, max_documents
):
    wanted = [text for shard in shards for text in shard][:max_documents]
    folder = tmp_path_factory.mktemp("any")
    options = replace(BYTES, validation_fraction=fraction, max_documents=max_documents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "LARGE_DOCUMENT", 8)
        patch.setattr(reading, "TASK_BYTES", 20)
        parts = (
            []
            if max_documents
            else prepare_parts(
                lambda: texts_source(*shards), folder, options, min(total, len(shards))
            )
        )
        if len(wanted) < 2 or not any(wanted):
            with pytest.raises(UserError, match="found; wanted at least 2|has no text: all"):
                if parts:
                    join_parts(parts, folder / "x")
                prepare_dataset(texts_source(*shards), folder / "x", options)
            return
        prepare_dataset(texts_source(*shards), folder / "out", options)
    train, validation = documents_of(folder / "out")
    assert train + validation == wanted
    assert len(train) == num_training_documents(len(wanted), fraction)
    if not parts:
        return
    dataset = join_parts(parts[::-1], folder / "joined")  # their order does not matter
    assert contents(folder / "joined") == contents(folder / "out")
    assert dataset.total.num_documents == len(wanted)
    assert dataset.findings.num_empty == wanted.count("")
    assert not list(folder.glob(".*"))


def test_the_split_is_that_of_a_percentage_slice():
    for n in (100, 150, 250, 350, 1000, 14_868_862):  # halves are rounded to the even number
        assert num_training_documents(n, 0.01) == round(99 * n / 100)
    assert num_training_documents(2, 0.01) == 1 == num_training_documents(3, 0.99)


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
@settings(max_examples=200)
@given(texts=st.lists(st.lists(st.sampled_from(PARTS), max_size=6).map("".join), max_size=8))
def test_a_batch_has_the_tokens_of_its_texts(texts, name):
    found, tokenizer = encode_batch(texts, load_tokenizer(name)), load_tokenizer(name)
    assert [ids.tolist() for ids in found] == [tokenizer.encode_ordinary(text) for text in texts]
    assert all(ids.dtype == np.uint16 for ids in found)


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_single_text_file_is_divided_by_its_tokens(tmp_path, monkeypatch, is_cut):
    text = "naïve words, " * 300
    (tmp_path / "one.txt").write_text(text)
    if is_cut:  # into several tasks, as a large file is; and killed before its end
        monkeypatch.setattr(reading, "WHOLE_BYTES", 100)
        monkeypatch.setattr(reading, "TASK_BYTES", 1000)
    for num_writes in [*range(12), None] if is_cut else [None]:
        if not (tmp_path / "out").exists():
            with stopping_after(num_writes):
                prepare_dataset(find_documents(tmp_path / "one.txt"), tmp_path / "out", BYTES)
    tokens = tokens_in(tmp_path / "out")
    together = [*text.encode(), 256]
    assert tokens["train"].tolist() + tokens["validation"].tolist() == together
    assert len(tokens["train"]) == round(len(together) * 0.99)


# --- a tokenizer of one's own


def test_each_document_has_the_ids_of_its_text_and_the_tokenizer_is_beside_them(tmp_path):
    own, out = write_tokenizer(tmp_path / "own"), tmp_path / "out"
    source = write_source("jsonl", tmp_path / "source")
    succeeded(prepare(str(source), str(out), "--tokenizer", str(own)))
    tokenizer = choose_tokenizer(str(own))
    wanted = [
        token
        for text in DOCUMENTS
        for token in [*tokenizer.encode_ordinary(text), tokenizer.eot_token]
    ]
    assert np.concatenate(list(tokens_in(out).values())).tolist() == wanted
    assert (out / "tokenizer.json").read_bytes() == (own / "tokenizer.json").read_bytes()
    assert metadata_of(out)["tokenizer"] == choose_tokenizer(str(own)).name
    text = (out / "README.md").read_text()
    assert "tokenizer `tokenizer.json`" in text and "with the id 0" in text
    assert "- sha256" not in text
    files = contents(out)
    with (
        serving(Hub(files, repository="someone/own")) as hub,
        used_in_this_process(hub, tmp_path / "home"),
    ):
        fetch_dataset(tmp_path / "downloaded", "someone/own", ["train", "validation"])
    for name in ("tokenizer.json", "train.safetensors", "validation.safetensors"):
        assert (tmp_path / "downloaded" / name).read_bytes() == files[name]
    order = [path for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path]
    assert order[0].endswith("tokenizer.json"), "with all token files, a dataset counts as complete"


@pytest.mark.parametrize("kind", WITH_A_SPACE)
def test_the_bytes_of_text_are_those_of_the_documents_also_where_a_space_is_added(tmp_path, kind):
    """Of both splits, of parts, and of the first documents."""
    own = str(write_tokenizer_with_a_space(tmp_path / "own", kind))
    documents = [f"{' ' * (i % 7 == 0)}the cat 它 {'at' * (i % 5)}" for i in range(200)]
    documents[150:152] = "", "\n"
    options = PrepareOptions(tokenizer=own, validation_fraction=0.3)
    shards = [documents[:60], documents[60:170], documents[170:]]
    prepare_dataset(texts_source(*shards), tmp_path / "out", options)
    prepare_dataset(texts_source(*shards), tmp_path / "some", replace(options, max_documents=100))
    for out, wanted in (
        ("out", (documents[:140], documents[140:])),
        ("some", (documents[:70], documents[70:100])),
    ):
        for split, texts in zip(("train", "validation"), wanted, strict=True):
            found = metadata_of(tmp_path / out, split)
            assert found["num_documents"] == str(len(texts))
            assert found["num_text_bytes"] == str(sum(len(text.encode()) for text in texts))
    parts = prepare_parts(lambda: texts_source(*shards), tmp_path, options, 3)
    join_parts(parts, tmp_path / "joined")
    assert contents(tmp_path / "joined") == contents(tmp_path / "out")


@pytest.fixture
def small_pieces(monkeypatch):
    """Cut documents after 64 bytes, and fill tasks with 200."""
    monkeypatch.setattr(cutting, "LARGE_DOCUMENT", 64)
    monkeypatch.setattr(reading, "TASK_BYTES", 200)
    monkeypatch.setattr(reading, "WHOLE_BYTES", 200)


@pytest.mark.parametrize("changes", [{}, LETTERS], ids=["as gpt2", "across spaces"])
def test_cutting_a_document_does_not_change_its_ids(changes, tmp_path, small_pieces):
    own = write_tokenizer(tmp_path / "own", texts=[LONG] * 2)
    if changes:
        model = json.loads((own / "tokenizer.json").read_text())["model"]
        model["vocab"]["eĠ"] = len(model["vocab"])
        model["merges"].insert(0, ["e", "Ġ"])
        write_tokenizer(own, texts=[LONG] * 2, model=model, **changes)
    tokenizer = choose_tokenizer(str(own))
    forced = list(cut_document([LONG.encode()], "any", "long"))
    naive = [token for piece in forced for token in tokenizer.encode_ordinary(piece.text)]
    wanted = [*tokenizer.encode_ordinary(LONG), tokenizer.eot_token]
    assert len(forced) > 20 and naive != wanted[:-1]
    pieces = list(cut_document([LONG.encode()], cuts_of(tokenizer), "long"))
    task = Task(lambda reading: iter(pieces), 1, 1)
    assert encode_task(task, tokenizer).tokens.tolist() == wanted
    path = tmp_path / "a.txt"
    path.write_text(LONG)
    tasks = list(text_tasks([path], tmp_path, PLAIN, cuts_of(tokenizer)))
    assert len(tasks) == 1 if changes else len(tasks) > 2
    found = [encode_task(task, tokenizer).tokens for task in tasks]
    assert np.concatenate(found).tolist() == wanted


def test_a_document_that_cannot_be_cut_is_refused_if_it_is_too_long(
    tmp_path, small_pieces, monkeypatch
):
    monkeypatch.setattr(cutting, "MAX_UNCUT", 2**20)
    path = tmp_path / "long.txt"
    path.write_text("x" * (2**20 + 1000))
    with pytest.raises(BadShard, match="long.txt: a document of more than 1 million characters"):
        list(text_tasks([path], tmp_path, PLAIN, "none"))


# --- files that cannot be read


@pytest.mark.parametrize("footer", [False, True])
def test_a_damaged_shard_is_an_error_or_skipped_and_counted_or_replaced(tmp_path, footer):
    generator = random.Random(0)
    parts = [[f"{i}-{j}-{generator.random()}" for j in range(50)] for i in range(4)]
    folder = write_parquet(tmp_path / "source", *parts)
    whole = (folder / "001.parquet").read_bytes()
    corrupt(folder / "001.parquet", footer=footer)
    options = replace(BYTES, validation_fraction=0.25)
    for out in ("out", "replaced"):
        with pytest.raises(UserError, match="001.parquet: not a complete parquet file.*--skip-ba"):
            prepare_dataset(find_documents(folder), tmp_path / out, options)
        assert not (tmp_path / out).exists()
    dataset = prepare_dataset(
        find_documents(folder), tmp_path / "out", replace(options, skip_bad_shards=True)
    )
    assert dataset.bad_files == ["001.parquet"]
    train, validation = documents_of(tmp_path / "out")
    assert train + validation == parts[0] + parts[2] + parts[3]
    assert len(validation) == 38  # of the 150 that could be read
    assert "could not be read: 1 (001.parquet)" in (tmp_path / "out" / "README.md").read_text()
    (folder / "001.parquet").write_bytes(whole)
    dataset = prepare_dataset(find_documents(folder), tmp_path / "replaced", options)
    assert dataset.bad_files == [] and dataset.total.num_documents == 200


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_files_without_the_column_are_refused_at_the_start_or_skipped(tmp_path, monkeypatch, kind):
    folder = tmp_path / "source"
    folder.mkdir()
    for name, column in (("a", "text"), ("b", "text"), ("c", "body")):
        table = pyarrow.table({column: [f"{name} {i}" for i in range(9)]})
        write = pyarrow.parquet.write_table if kind == "parquet" else pyarrow.csv.write_csv
        write(table, folder / f"{name}.{kind}")
    arguments = (str(folder), str(tmp_path / "out"), "--tokenizer", "bytes")
    with monkeypatch.context() as patch:
        patch.setattr(encoding, "encode_task", lambda *_: pytest.fail("was read before"))
        result = prepare(*arguments)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert f"c.{kind}: has no column 'text'; name one of its columns with --text-column: body" in (
        result.stderr
    )
    assert os.listdir(tmp_path) == ["source"]
    result = succeeded(prepare(*arguments, "--skip-bad-shards"))
    assert f"left out because they could not be read: 1 (c.{kind})" in result.stdout
    train, validation = documents_of(tmp_path / "out")
    assert train + validation == [f"{name} {i}" for name in "ab" for i in range(9)]


def write_damaged(path, num_good, num_bad, kind):
    """Write a file of documents of a hundred characters, some with two bytes of Latin-1."""
    texts = [b"x" * 100] * num_good + [b"na\xefve \xff" + b"x" * 91] * num_bad
    if kind == "csv":
        path.write_bytes(b"text\n" + b"\n".join(texts) + b"\n")
    elif kind == "txt":
        path.write_bytes(b"\n###\n".join(texts))
    elif kind == "parquet":
        column = pyarrow.array(texts, pyarrow.binary()).view(pyarrow.string())
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), path)
    else:
        rows = [b'{"text": "' + text + b'"}' for text in texts]
        path.write_bytes(b"[" + b",".join(rows) + b"]" if kind == "json" else b"\n".join(rows))


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "txt", "parquet"])
def test_text_that_is_not_utf8_is_counted_and_warned_of_from_a_thousandth_on(tmp_path, kind):
    arguments = ("--tokenizer", "bytes", *["--document-separator", "###"] * (kind == "txt"))
    for name, num_good, num_bad in (("none", 999, 0), ("few", 2999, 2), ("many", 999, 1)):
        source = tmp_path / f"{name}.{kind}"
        write_damaged(source, num_good, num_bad, kind)
        result = succeeded(prepare(str(source), str(tmp_path / name), *arguments))
        counted = f"with bytes that are not UTF-8: {2 * num_bad} characters became U+FFFD"
        assert (counted in result.stdout) == (num_bad > 0)
        assert (f"warning: 1 document {counted}" in result.stderr) == (name == "many")
        if name == "many":
            assert ("--encoding names another" in result.stderr) == (kind != "parquet")
        found = metadata_of(tmp_path / name).get("num_replaced_characters")
        assert found == (str(2 * num_bad) if num_bad else None)
        assert (counted in (tmp_path / name / "README.md").read_text()) == (num_bad > 0)
        wanted = ["x" * 100] * num_good + ["na\ufffdve \ufffd" + "x" * 91] * num_bad
        train, validation = documents_of(tmp_path / name)
        assert train + validation == wanted


def test_replaced_characters_of_parts_and_of_the_first_documents_are_counted(tmp_path):
    for name in "abc":
        write_damaged(tmp_path / f"{name}.jsonl", 2, 3, "jsonl")
    parts = prepare_parts(lambda: find_documents(tmp_path), tmp_path, BYTES, 3)
    joined = join_parts(parts, tmp_path / "joined")
    assert joined.findings == Findings(num_damaged=9, num_replaced=18)
    prepare_dataset(find_documents(tmp_path), tmp_path / "one", BYTES)
    assert contents(tmp_path / "joined") == contents(tmp_path / "one")
    some = prepare_dataset(
        find_documents(tmp_path), tmp_path / "some", replace(BYTES, max_documents=9)
    )
    assert some.findings == Findings(num_damaged=5, num_replaced=10)


def test_a_separator_divides_text_files_into_documents(tmp_path, capsys):
    stories = [f"story {i}\n\nis long" for i in range(50)]
    text = "".join(f"{story}\n<|endoftext|>\n" for story in stories)
    (tmp_path / "stories.txt").write_text(text)
    (tmp_path / "few.txt").write_text("no marker")
    arguments = (str(tmp_path / "stories.txt"), "--tokenizer", "bytes")
    warning = "there is <|endoftext|> in the text, where it is encoded as any other text; if it"
    assert warning in succeeded(prepare(*arguments, str(tmp_path / "one"))).stderr
    separator = ["--document-separator", "<|endoftext|>"]
    result = succeeded(prepare(*arguments, str(tmp_path / "out"), *separator))
    assert "50 documents" in result.stdout and result.stderr == ""
    train, validation = documents_of(tmp_path / "out")
    assert train + validation == stories and len(validation) == 1
    result = prepare(str(tmp_path / "few.txt"), *arguments[1:], str(tmp_path / "x"), *separator)
    assert "found; wanted at least 2; is '<|endoftext|>' between them? (--docu" in result.stderr


def test_nothing_is_left_of_a_file_that_is_damaged_after_some_tasks(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "TASK_BYTES", 100)
    folder, texts = tmp_path / "source", [f"text {i}" for i in range(40)]
    folder.mkdir()
    for name, end in (("a", ""), ("bb", "damage\n"), ("c", "")):
        lines = "".join(json.dumps({"text": f"{name} {text}"}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text(lines + end)
    prepare_dataset(find_documents(folder), tmp_path / "out", replace(BYTES, skip_bad_shards=True))
    train, validation = documents_of(tmp_path / "out")
    assert train + validation == [f"{name} {text}" for name in "ac" for text in texts]
    assert metadata_of(tmp_path / "out")["num_text_bytes"] == str(sum(map(len, train)))


@pytest.mark.parametrize("bad", [0, 7, 9])
def test_one_text_file_that_cannot_be_read_costs_only_that_file(tmp_path, bad, capsys):
    (tmp_path / "source").mkdir()
    texts = [f"text {i} " + "x" * i for i in range(10)]
    for i, text in enumerate(texts):
        (tmp_path / f"source/{i:03}.txt").write_text(text, "utf-16" if i == bad else "utf-8")
    dataset = prepare_dataset(
        find_documents(tmp_path / "source"),
        tmp_path / "out",
        replace(BYTES, validation_fraction=0.2),
    )
    line = capsys.readouterr().err
    assert line.startswith("left out: ") and f"/{bad:03}.txt: is UTF-16; wanted UTF-8" in line
    train, validation = documents_of(tmp_path / "out")
    assert train + validation == texts[:bad] + texts[bad + 1 :]
    assert len(train) == 7 == dataset.splits["train"].num_documents
    assert dataset.bad_files == [f"{bad:03}.txt"]
    metadata = metadata_of(tmp_path / "out")
    assert metadata["num_bad_files"] == "1"
    assert metadata["num_text_bytes"] == str(sum(len(text) for text in train))


# --- disks, outputs, progress and the card


def test_a_too_small_disk_is_reported_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3000))
    source = texts_source(["a" * 10_000, "b" * 10_000])
    with pytest.raises(UserError, match="3.00 kB free; tokens need 4.00 kB or more") as caught:
        prepare_dataset(source, tmp_path / "out", BYTES)
    assert caught.value.status == 4 and list(tmp_path.iterdir()) == []
    (tmp_path / "a.jsonl").write_text(  # such files may hold more than text
        json.dumps({"text": "a", "image": "x" * 99_000}) + '\n{"text": "b"}\n'
    )
    prepare_dataset(find_documents(tmp_path / "a.jsonl"), tmp_path / "out", BYTES)


def test_the_dataset_card_is_valid_and_its_code_works(tmp_path, monkeypatch):
    prepare_dataset(texts_source(["a" * 1200, "b"]), tmp_path / "out", BYTES)
    readme = DatasetCard.load(tmp_path / "out" / "README.md")
    data = readme.data.to_dict()
    assert data["license"] == "unknown" and data["language"] == ["en"]
    assert data["task_categories"] == ["text-generation"]
    assert "1,203 tokens, 1,201 bytes of text, 1.00 per token." in readme.text
    assert "| `train.safetensors` | 1 | 1,201 | 6,506 |" in readme.text
    code = readme.text.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path / "out")
    names: dict[str, object] = {}
    exec(code, names)
    assert len(names["tokens"]) == 1024


def test_hostile_names_stay_text(tmp_path):
    """Even if each character of a long path takes six bytes of the token files' headers."""
    folder = tmp_path / HOSTILE / ("\x01" * 250) / ("\x01" * 250)
    write_parquet(folder, DOCUMENTS[:50], DOCUMENTS[50:])
    (folder / f"002{HOSTILE}.parquet").write_bytes(b"")
    prepare_dataset(find_documents(folder), tmp_path / "out", replace(BYTES, skip_bad_shards=True))
    text = (tmp_path / "out" / "README.md").read_text()
    assert "could not be read: 1 (002a" in text and not active_parts(text)
    assert (tmp_path / "out/train.safetensors").read_bytes().index(b"}}  ") < 4104


def test_an_output_is_empty_or_new_and_can_be_replaced(tmp_path, monkeypatch):
    source = texts_source(["a", "b"])
    for name in ("disk", "full", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    prepare_dataset(source, tmp_path / "link", BYTES)
    assert documents_of(tmp_path / "disk") == [["a"], ["b"]]
    (tmp_path / "full/mine").write_text("mine")
    for output in ("full", "full/mine"):
        with pytest.raises(UserError, match="is not empty"):
            prepare_dataset(source, tmp_path / output, BYTES)
    assert (tmp_path / "full/mine").read_text() == "mine"
    monkeypatch.chdir(tmp_path / "here")
    for output in (Path("."), Path("/proc")):
        with pytest.raises(UserError, match="is a mount point or the current directory"):
            prepare_dataset(source, output, BYTES)
    assert not list(tmp_path.glob(".*"))


# --- kills and resuming


@settings(max_examples=30)
@given(stops=st.lists(st.integers(0, 35), min_size=1, max_size=8), total=st.integers(0, 3))
def test_stopped_at_any_write_it_continues_to_the_same_bytes(tmp_path_factory, stops, total):
    """The whole, or each of the parts, which are joined then."""
    folder = tmp_path_factory.mktemp("stops")
    prepare_dataset(texts_source(*SHARDS), folder / "undisturbed", BYTES)
    parts = [f"{number}/{total}" for number in range(1, total + 1)] or [""]
    outs = [folder / f"out{number}" for number in range(len(parts))]
    for out, part in zip(outs, parts, strict=True):
        for stop in [*stops, None]:
            with stopping_after(stop):
                if not out.exists():
                    prepare_dataset(texts_source(*SHARDS), out, replace(BYTES, part=part))
    if total:
        join_parts(outs, folder / "out0-joined")
    assert contents(folder / ("out0-joined" if total else "out0")) == contents(
        folder / "undisturbed"
    )


def fail_at(monkeypatch, owner, name, act):
    """Run something whose call of a function raises, as if it was killed there."""

    def stop(*_, **__):
        raise Stopped

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(owner, name, stop)
        act()


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        *(("journal.jsonl", size) for size in (0, 1, 10, -1, -30)),
        *(("dataset/train.safetensors", size) for size in (0, 4100, 4200, -1)),
        *(("document-ends.bin", size) for size in (0, 23)),
        (
            "dataset",
            None,
        ),  # was published, by a launch that was killed before it deleted the journal
    ],
)
def test_a_file_that_is_shorter_or_longer_than_it_should_be_is_written_again(
    tmp_path, monkeypatch, name, num_bytes
):
    def act(out):
        return prepare_dataset(texts_source(["a", "b"], ["c"], ["d"]), out, BYTES)

    act(tmp_path / "undisturbed")
    if num_bytes == 4200:  # not shorter: tokens of an unfinished shard
        leave_unfinished(texts_source(["a", "b"], ["c"], ["d"]), tmp_path / "out")
    else:
        fail_at(monkeypatch, Journal, "publish", lambda: act(tmp_path / "out"))
    path = tmp_path / ".out.partial" / name
    if num_bytes is None:
        shutil.rmtree(path)
    else:
        os.truncate(path, num_bytes if num_bytes >= 0 else path.stat().st_size + num_bytes)
    act(tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


def test_documents_that_were_divided_into_splits_are_not_read_again(tmp_path, monkeypatch):
    source = texts_source(["a", "b"], ["c"], ["d"])
    fail_at(
        monkeypatch, Journal, "publish", lambda: prepare_dataset(source, tmp_path / "out", BYTES)
    )
    monkeypatch.setattr(encoding, "encode_task", lambda *_: pytest.fail("was read again"))
    source = texts_source(["a", "b"], ["c"], ["d"], ["of a file that is new since then"])
    prepare_dataset(source, tmp_path / "out", BYTES)
    assert documents_of(tmp_path / "out") == [["a", "b", "c"], ["d"]]


@pytest.mark.parametrize(
    ("shards", "options", "message"),
    [
        (None, replace(BYTES, tokenizer="gpt2"), "tokenizer was bytes, is gpt2"),
        (None, replace(BYTES, tokenizer="own"), "tokenizer was bytes, is sha256:"),
        (None, replace(BYTES, validation_fraction=0.5), "validation fraction was 0.01, is 0.5"),
        (None, replace(BYTES, max_documents=3), "max documents was none, is 3"),
        ([["a", "B"], ["c"]], BYTES, "shard 0 has changed, or files before it were added"),
        ([["new"], ["a", "b"], ["c"]], BYTES, "shard 0 has changed"),
        ([], BYTES, "shard 0 has changed"),
    ],
)
def test_a_changed_option_or_source_is_refused(tmp_path, monkeypatch, shards, options, message):
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path / "own")
    source = texts_source(["a", "b"], ["c"])
    leave_unfinished(source, tmp_path / "out")
    with pytest.raises(UserError, match=f"differs: {message}") as caught:
        prepare_dataset(
            source if shards is None else texts_source(*shards), tmp_path / "out", options
        )
    assert str(tmp_path / ".out.partial") in str(caught.value)
    prepare_dataset(source, tmp_path / "out", BYTES)  # the first request can still be finished
    assert documents_of(tmp_path / "out") == [["a", "b"], ["c"]]


def test_options_may_change_before_a_shard_is_finished(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "a"}\n{"content": "b"}\n')
    with pytest.raises(UserError, match="its keys are content"):
        prepare_dataset(find_documents(tmp_path), tmp_path / "out", BYTES)
    prepare_dataset(find_documents(tmp_path, text_column="content"), tmp_path / "out", BYTES)
    assert documents_of(tmp_path / "out") == [["a"], ["b"]]


def test_two_preparations_of_one_output_are_refused(tmp_path):
    with Journal(tmp_path / "out").locked():
        with pytest.raises(UserError, match="another process is preparing this dataset"):
            prepare_dataset(texts_source(["a", "b"]), tmp_path / "out", BYTES)
        assert (tmp_path / ".out.partial").exists()


# --- parts


def prepare_parts(make, folder, options, total):
    """Prepare all parts, each from a source of its own, as on several machines."""
    parts = {folder / f"part{number}": f"{number}/{total}" for number in range(1, total + 1)}
    for path, part in parts.items():
        prepare_dataset(make(), path, replace(options, part=part))
    return list(parts)


def test_a_join_that_was_stopped_can_be_repeated(tmp_path, monkeypatch):
    options = PrepareOptions(tokenizer=str(write_tokenizer(tmp_path / "own")))
    prepare_dataset(texts_source(*SHARDS), tmp_path / "one", options)
    parts = prepare_parts(lambda: texts_source(*SHARDS), tmp_path, options, 2)
    partial = tmp_path / ".joined.partial" / "dataset"
    partial.mkdir(parents=True)  # as a kill leaves it
    (partial / "train.safetensors").write_bytes(b"x" * 10**5)
    (partial / "unknown").write_text("x")
    fail_at(monkeypatch, Journal, "publish", lambda: join_parts(parts, tmp_path / "joined"))
    assert not (tmp_path / "joined").exists()
    join_parts(parts, tmp_path / "joined")
    assert contents(tmp_path / "joined") == contents(tmp_path / "one")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_one_file_in_a_hundred_may_be_left_out_also_of_parts(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("preparation.sources.TEXT_FILES_PER_SHARD", 30)
    folder = tmp_path / "source"
    folder.mkdir()
    for i in range(102):
        (folder / f"{i:03}.{kind}").write_text(json.dumps({"text": "x" * i}) + "\n")
    for bad, name in ((["020"], "joined"), (["020", "090"], "two")):
        (folder / f"{bad[-1]}.{kind}").write_text("neither UTF-8 nor JSON", encoding="utf-16")
        parts = prepare_parts(lambda: find_documents(folder), tmp_path / f"{name}-parts", BYTES, 3)
        if len(bad) == 1:
            prepare_dataset(find_documents(folder), tmp_path / "one", BYTES)
            assert join_parts(parts, tmp_path / name).bad_files == [f"020.{kind}"]
            assert contents(tmp_path / name) == contents(tmp_path / "one")
            continue
        with pytest.raises(UserError, match=f"090.{kind}: .*; files that cannot be read so far: 2"):
            prepare_dataset(find_documents(folder), tmp_path / name, BYTES)
        with pytest.raises(UserError, match="files that cannot be read so far: 2; replace"):
            join_parts(parts, tmp_path / f"{name}-joined")
        assert not (tmp_path / name).exists()


def test_a_part_may_have_no_documents(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    for name, lines in (("a", ["a", "b"]), ("b", []), ("c", ["c"])):
        (folder / f"{name}.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in lines))
    parts = [tmp_path / f"part{number}" for number in (1, 2, 3)]
    for number, part in enumerate(parts, 1):
        result = succeeded(
            prepare(str(folder), str(part), "--tokenizer", "bytes", "--part", f"{number}/3")
        )
        assert ("\n0 documents, 0 tokens\n" in f"\n{result.stdout}") == (number == 2)
    join_parts(parts, tmp_path / "joined")
    prepare_dataset(find_documents(folder), tmp_path / "one", BYTES)
    assert contents(tmp_path / "joined") == contents(tmp_path / "one")


def test_what_was_left_out_is_said_where_too_few_documents_are_left(tmp_path, monkeypatch):
    monkeypatch.setattr("preparation.sources.TEXT_FILES_PER_SHARD", 1)
    folder = tmp_path / "source"
    folder.mkdir()
    for name, coding in (("a", "utf-8"), ("b", "utf-16"), ("c", "utf-16"), ("d", "utf-16")):
        (folder / f"{name}.txt").write_text("x", coding)
    options = replace(BYTES, skip_bad_shards=True)
    parts = prepare_parts(lambda: find_documents(folder), tmp_path, options, 2)
    message = "1 document found; wanted at least 2{}; left out 3 files, the first: {}"
    with pytest.raises(
        UserError,
        match=message.format(
            r", .* \(--validation-fraction\)", ".*/b.txt: is UTF-16; wanted UTF-8, or --enc"
        ),
    ):
        prepare_dataset(find_documents(folder), tmp_path / "out", options)
    with pytest.raises(UserError, match=message.format("", "b.txt of .*part1: could not be read$")):
        join_parts(parts, tmp_path / "joined", skip_bad_shards=True)


def edit(old, new):
    return lambda part: (part / "part.json").write_text(
        (part / "part.json").read_text().replace(old, new)
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda part: (part / "train.safetensors").open("r+b").write(b"x"),
        lambda part: (part / "train.safetensors").unlink(),
        lambda part: (part / "document-ends.bin").write_bytes(bytes(16)),
        lambda part: (part / "part.json").write_text("{}"),
        edit('"num_empty": ', '"num_empty": -1'),
        edit('"part": "2/3"', '"part": "9/3"'),
        shutil.rmtree,
    ],
)
def test_a_part_that_is_missing_or_damaged_is_refused(tmp_path, change):
    parts = prepare_parts(lambda: texts_source(*SHARDS), tmp_path, BYTES, 3)
    change(tmp_path / "part2")
    with pytest.raises(UserError, match="part2: is not a whole part.*; repeat its") as caught:
        join_parts(parts, tmp_path / "joined")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "joined").exists() and not (tmp_path / ".joined.partial").exists()


def test_missing_and_repeated_parts_are_refused(tmp_path):
    parts = prepare_parts(lambda: texts_source(*SHARDS), tmp_path, BYTES, 4)
    with pytest.raises(UserError, match="part 2, 4 of 4 missing; prepare it with --part 2/4"):
        join_parts([parts[0], parts[2]], tmp_path / "joined")
    with pytest.raises(UserError, match="part1 and .*part1 are both part 1/4"):
        join_parts([*parts, parts[0]], tmp_path / "joined")


@pytest.mark.parametrize(
    ("options", "source", "message"),
    [
        (replace(BYTES, tokenizer="gpt2"), texts_source(*SHARDS), "tokenizer was bytes, is gpt2"),
        (BYTES, texts_source(*SHARDS[:4], ["g", "hi"]), "names and sizes was"),
        (replace(BYTES, part="2/3"), texts_source(*SHARDS), "part was of 2, is of 3"),
        (
            BYTES,
            replace(texts_source(*SHARDS), request=Request(source="texts", revision="other")),
            "revision was none, is other",
        ),
    ],
)
def test_parts_of_different_preparations_are_refused(tmp_path, options, source, message):
    prepare_dataset(texts_source(*SHARDS), tmp_path / "a", replace(BYTES, part="1/2"))
    prepare_dataset(source, tmp_path / "b", replace(options, part=options.part or "2/2"))
    with pytest.raises(UserError, match=f"a and .*b do not belong together: {message}"):
        join_parts([tmp_path / "a", tmp_path / "b"], tmp_path / "joined")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            (
                replace(BYTES, part=text),
                f"--part {text}: wanted I/N with I from 1 to N, such as 2/4",
            )
            for text in ("0/2", "3/2", "1", "a/b", "1/2/3", "-1/2")
        ),
        (replace(BYTES, part="1/6"), "--part 1/6: texts has only 5 shards.*; use fewer parts"),
        (replace(BYTES, part="1/2", max_documents=9), "--max-documents: is not for a part"),
    ],
)
def test_a_part_that_there_cannot_be_is_refused(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        prepare_dataset(texts_source(*SHARDS), tmp_path / "out", options)
    assert not list(tmp_path.iterdir())


@given(num_shards=st.integers(1, 30), num_parts=st.integers(1, 30))
def test_parts_have_about_the_same_number_of_shards_and_together_all(num_shards, num_parts):
    num_parts, source = min(num_parts, num_shards), texts_source(*[["a"]] * num_shards)
    parts = [share_of(source, f"{number + 1}/{num_parts}").shards for number in range(num_parts)]
    assert [shard for part in parts for shard in part] == list(source.shards)
    assert {len(part) - num_shards // num_parts for part in parts} <= {0, 1}


def test_the_commands_of_several_machines_and_of_the_join(tmp_path):
    """JSON lines on the hub: each machine downloads its files, once, and counts no others."""
    files = {
        f"{i}.jsonl": "".join(
            json.dumps({"text": f"{i} {j}"}) + "\n" for j in range(30 + i)
        ).encode()
        for i in range(4)
    }
    with serving(Hub(files)) as hub, used_in_this_process(hub, tmp_path / "home"):
        arguments = ["--tokenizer", "bytes", "--validation-fraction", "0.3"]
        succeeded(prepare(hub.repository, str(tmp_path / "one"), *arguments))
        for number in (1, 2):
            hub.requests.clear()
            commit = ["--revision", hub.sha] if number == 2 else []
            result = succeeded(
                prepare(
                    hub.repository,
                    str(tmp_path / f"part{number}"),
                    *arguments,
                    "--part",
                    f"{number}/2",
                    *commit,
                )
            )
            advice = f"use --revision {hub.sha} on the other machines\n"
            assert (advice in result.stdout) == (number == 1)
            assert [len(hub.downloads(name)) for name in sorted(files)] == [
                int((i < 2) == (number == 1)) for i in range(4)
            ]
            assert f"{61 if number == 1 else 65} documents" in result.stdout
    command = [str(tmp_path / "part1"), str(tmp_path / "part2"), str(tmp_path / "joined"), "--join"]
    refused = prepare(*command, "--tokenizer", "bytes")
    assert refused.returncode == 2 and "--tokenizer: is not for --join" in refused.stderr
    assert "126 documents" in succeeded(prepare(*command)).stdout
    assert contents(tmp_path / "joined") == contents(tmp_path / "one")


# --- the command: worker processes, kills, Ctrl-C, errors and memory


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Eight parquet files with 1 MB of random words; a slow preparation uses workers for it."""
    generator = random.Random(0)
    words = [
        "".join(generator.choices("etaoinshrdlu", k=generator.randrange(2, 9))) for _ in range(2000)
    ]
    return write_parquet(
        tmp_path_factory.mktemp("corpus") / "source",
        *([" ".join(generator.choices(words, k=100)) for _ in range(220)] for _ in range(8)),
    )


@pytest.fixture
def kinds(tmp_path):
    """Files of every kind that is read in a stream, with 200 kB each."""
    generator, folder = random.Random(1), tmp_path / "kinds"
    folder.mkdir()
    texts = [
        " ".join(generator.choices(["naïve", '"quoted"', "a, b", "line\nline"], k=20))
        for _ in range(1300)
    ]
    rows = [{"id": i, "text": text} for i, text in enumerate(texts)]
    pyarrow.csv.write_csv(pyarrow.Table.from_pylist(rows), folder / "a.csv")
    (folder / "b.json").write_text(json.dumps(rows, indent=1))
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (folder / "c.ndjson.xz").write_bytes(lzma.compress(lines))
    (folder / "d.jsonl.bz2").write_bytes(bz2.compress(lines))
    (folder / "e.txt").write_text("\n###\n".join(texts))
    (folder / "f.txt.gz").write_bytes(gzip.compress("\n###\n".join(texts).encode()))
    return f"{folder}/*", texts


def test_kinds_that_are_read_in_a_stream_give_the_same_bytes_after_kills_and_by_workers(
    kinds, tmp_path
):
    source, texts = kinds
    arguments = (source, "--tokenizer", "bytes", "--document-separator", "###")
    succeeded(prepare(*arguments, str(tmp_path / "one")))
    train, validation = documents_of(tmp_path / "one")
    assert train + validation == texts * 6
    succeeded(run_command(*SLOW_COMMAND, *arguments, str(tmp_path / "two"), "--workers", "3"))
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    process = start([*SLOW_COMMAND, *arguments, str(tmp_path / "out"), "--workers", "2"])
    wait_for_lines(tmp_path / ".out.partial/journal.jsonl", 3)
    process.kill()
    process.wait()
    result = succeeded(prepare(*arguments, str(tmp_path / "out")))
    assert "continuing after document" in result.stderr
    assert contents(tmp_path / "out") == contents(tmp_path / "one")


@pytest.fixture(scope="module")
def prepared(corpus, tmp_path_factory):
    """The dataset of the corpus, prepared in this process."""
    out = tmp_path_factory.mktemp("prepared") / "out"
    prepare_dataset(find_documents(corpus), out, PrepareOptions())
    return out


def test_workers_write_the_bytes_of_one_process_and_the_tokens_of_the_original(
    corpus, prepared, tmp_path
):
    out = tmp_path / "out"
    succeeded(run_command(*SLOW_COMMAND, str(corpus), str(out), "--workers", "3"))
    assert contents(out) == contents(prepared)
    prepare_as_the_original(corpus, tmp_path / "reference")
    for split, tokens in tokens_in(tmp_path / "reference").items():
        assert np.array_equal(tokens_in(out)[split], tokens)


def test_workers_write_the_bytes_of_one_process_with_a_tokenizer_of_ones_own(corpus, tmp_path):
    arguments = (str(corpus), "--tokenizer", str(write_tokenizer(tmp_path / "own")))
    succeeded(run_command(*SLOW_COMMAND, *arguments, str(tmp_path / "two"), "--workers", "2"))
    succeeded(prepare(*arguments, str(tmp_path / "one")))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_after_kills_the_same_command_continues_to_the_same_bytes(
    corpus, prepared, tmp_path, request
):
    out, journal = tmp_path / "out", tmp_path / ".out.partial" / "journal.jsonl"
    kills = [4]  # so many lines of the journal are waited for: the request and finished shards
    if request.config.getoption("--thorough"):
        corpus, prepared, kills = tmp_path / "source", tmp_path / "whole", range(2, 12)
        build_corpus(corpus, 40 * 10**6, num_files=12)
        prepare_dataset(find_documents(corpus), prepared, PrepareOptions())
    for num_lines in kills:
        process = start([*SLOW_COMMAND, str(corpus), str(out), "--workers", "2"])
        wait_for_lines(journal, num_lines)
        time.sleep(random.uniform(0, 0.4))
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert not out.exists()
    result = succeeded(prepare(str(corpus), str(out)))
    assert re.match(r"continuing after document [\d,]+\n", result.stderr)
    assert contents(out) == contents(prepared)
    assert not list(tmp_path.glob(".*")), "an unfinished directory was left behind"


def start(command):
    """Start a slow preparation that can be interrupted with Ctrl-C."""
    return subprocess.Popen(
        command,
        cwd=PROJECT_DIR,
        env=os.environ | {"PAUSE_SECONDS": "0.3"},
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def wait_for_lines(path, num_lines):
    wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") >= num_lines)


def test_ctrl_c_is_one_line_and_leaves_no_process(corpus, tmp_path):
    process = start([*SLOW_COMMAND, str(corpus), str(tmp_path / "out"), "--workers", "2"])
    wait_for_lines(tmp_path / ".out.partial" / "journal.jsonl", 2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr.strip() == "Interrupted; run the same command again to continue"
    wait_until(
        lambda: not subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True).stdout
    )


def test_a_killed_worker_is_one_line(corpus, tmp_path):
    result = run_command(
        *SLOW_COMMAND, str(corpus), str(tmp_path / "out"), "--workers", "2", WORKER_DIES="1"
    )
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("\n") == 1 and "a worker process was killed" in result.stderr


def test_a_full_disk_has_its_own_exit_status(tmp_path):
    source_dir, disk = tmp_path / "source", tmp_path / "disk"
    write_parquet(source_dir, ["two words " * 100_000] * 4)
    disk.mkdir()
    with small_disk(disk, "500k"):
        result = prepare(str(source_dir), str(disk / "out"))
        assert result.returncode == 4 and result.stderr.count("\n") == 1, result.stderr
        assert "No space left on device; make room" in result.stderr
        assert not (disk / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere/x.jsonl"], "nowhere/x.jsonl: no such file"),
        (["a**b/*.jsonl"], "a**b/*.jsonl: not"),
        (["x" * 300], "x" * 40),
        (["s", "--revision", "x"], "need a dataset on the hub"),
        (["s", "--keep-raw", "x"], "need a dataset on the hub"),
        (["s", "--validation-fraction", "nan"], "nan is not a finite number"),
        (["s", "--tokenizer", "nowhere"], "nowhere"),
        (["s", "t"], "wanted one SOURCE and one OUTPUT"),
        (["--import", "s", "--max-documents", "9"], "--max-documents: is not for --import"),
        (["s", "my ü set"], "may have only a-z, A-Z, 0-9, '.', '-' and '_', a letter or digit"),
    ],
)
def test_wrong_arguments_are_one_line_and_write_nothing(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    write_source("jsonl", tmp_path / "s")
    result = prepare(*arguments, *["out"] * ("ü" not in arguments[-1]))
    assert result.returncode == 2 and result.stderr.startswith("Error: "), result.stderr
    assert message in result.stderr and result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_the_command_prints_its_progress_and_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(card, "LINE_INTERVAL", -1)
    source_dir = write_source("parquet", tmp_path / "source")
    result = succeeded(prepare(str(source_dir), str(tmp_path / "out"), "--tokenizer", "bytes"))
    assert re.search(r"\d+% [\d.]+k/[\d.]+k \[.*B/s, 0 M tokens\]\n", result.stderr)
    first, empty, train, validation, next_command = result.stdout.splitlines()
    assert next_command == (
        f"make a run for it: uv run lab new RUN --dataset out --datasets-dir {tmp_path}"
    )
    size = sum(len(text.encode()) for text in DOCUMENTS)
    assert first == (
        f"152 documents, {size + 152:,} tokens, {size:,} bytes of text, 0.97 per token"
    )
    assert empty == "documents without text: 2"
    assert "train.safetensors: 150 documents" in train and "2 documents, 2 tokens" in validation


def peak_of(source, out, *arguments):
    """Return the MiB of memory that a preparation takes at most."""
    return peak_memory_of([*COMMAND, source, out, *arguments])


@pytest.mark.thorough  # tokenises 100 MB and more
def test_memory_does_not_grow_with_the_input_or_the_largest_default_number_of_workers(tmp_path):
    peaks = []
    for copies, workers in ((1, 2), (6, 2), (4, MAX_DEFAULT_WORKERS)):
        folder = tmp_path / f"{copies}" / "sample" / "10BT"
        build_corpus(folder, copies * 24 * 10**6, num_files=8 * copies)
        peaks.append(peak_of(folder, tmp_path / f"out{copies}", "--workers", str(workers)))
    assert peaks[1] < peaks[0] + 60 and peaks[2] < 1024, peaks


@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        ("lines", 400),  # the peak is 290 MiB, and 510 MiB if all tokens stay in memory
        *(
            pytest.param(kind, 1024, marks=pytest.mark.thorough)
            for kind in (
                "longer lines",
                "escaped",
                "repeated",
                "groups",
                "array",
                "csv",
                "separated",
            )
        ),
    ],
)
def test_memory_stays_small_with_large_documents_in_every_form(tmp_path, kind, limit):
    folder, arguments = tmp_path / "source", []
    folder.mkdir()
    if "lines" in kind:  # of 13 or 100 MB
        length, count = (600_000, 10) if kind == "lines" else (4_500_000, 3)
        line = json.dumps({"text": "All work and no play. " * length})
        with (folder / "a.jsonl").open("w") as file:
            file.writelines(f"{line}\n" for _ in range(count))
    elif kind == "escaped":  # 33 MB of Cyrillic, each letter as six characters
        line = json.dumps({"text": "Работа без отдыха " * 1_030_000})
        (folder / "a.jsonl").write_text(f"{line}\n{line}\n")
    elif kind in ("array", "csv", "separated"):  # 90 MB in documents of 9 MB
        text = "All work and no play. " * 400_000
        row, between, around = {
            "array": (json.dumps({"text": text}), ",", "[{}]"),
            "csv": (f'"{text}"', "\n", "text\n{}\n"),
            "separated": (text, "###", "{}"),
        }[kind]
        (folder / "a").write_text(around.format(between.join([row] * 10)))
        (folder / "a").rename(folder / {"array": "a.json", "csv": "a.csv"}.get(kind, "a.txt"))
        arguments = ["--document-separator", "###"] if kind == "separated" else []
    elif kind == "repeated":  # 18 MB, stored once for all twelve rows
        write_parquet(folder, ["All work and no play. " * 820_000] * 12)
    else:  # large row groups
        texts = [f"{i} All work and no play. " * 2000 for i in range(4000)]
        pyarrow.parquet.write_table(
            pyarrow.table({"text": texts}),
            folder / "a.parquet",
            row_group_size=1000,
            use_dictionary=False,
        )
    workers = "2" if kind == "lines" else "4"
    arguments += ["--tokenizer", "bytes", "--workers", workers]
    assert peak_of(folder, tmp_path / "out", *arguments) < limit
