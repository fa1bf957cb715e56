"""Documents to token datasets: the tokens, damaged shards, full disks, outputs and progress."""

import errno
import io
import json
import random
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import DatasetCard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from basics.errors import UserError
from preparation import pipeline, progress_display
from preparation.pipeline import PrepareOptions, prepare_dataset
from preparation.reading import Texts
from preparation.sources import find_documents
from preparation.token_stream import TokenFileWriter, num_training_documents
from tests.support.lab_cli import HOSTILE, active_parts
from tests.support.preparation import (
    BYTES,
    DOCUMENTS,
    contents,
    corrupt,
    decoded,
    leave_unfinished,
    stopping_after,
    texts_source,
    write_parquet,
    write_source,
)


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "text"])
def test_the_first_99_percent_are_for_training(tmp_path, kind):
    source = find_documents(write_source(kind, tmp_path / "source"))
    progress = prepare_dataset(source, tmp_path / "out", BYTES)
    assert (progress.train.num_documents, progress.validation.num_documents) == (150, 2)
    assert decoded(tmp_path / "out" / "train.safetensors") == DOCUMENTS[:150]
    assert decoded(tmp_path / "out" / "validation.safetensors") == DOCUMENTS[150:]
    assert progress.num_bytes == sum(len(text.encode()) for text in DOCUMENTS)
    assert progress.num_characters == sum(len(text) for text in DOCUMENTS)
    texts = {"train": DOCUMENTS[:150], "validation": DOCUMENTS[150:]}
    for split in ("validation", "train"):
        with safe_open(tmp_path / "out" / f"{split}.safetensors", framework="numpy") as file:
            metadata = file.metadata()
        assert metadata["num_text_bytes"] == str(sum(len(text.encode()) for text in texts[split]))
    assert metadata["tokenizer"] == "bytes" and metadata["num_documents"] == "150"
    assert int(metadata["num_tokens"]) == progress.train.num_tokens
    assert metadata["max_token_id"] == "256"
    assert not list(tmp_path.glob(".*")), "an unfinished directory was left behind"


@settings(max_examples=40, deadline=None)
@given(shards=st.lists(st.lists(st.text(max_size=30), max_size=10), min_size=1, max_size=6),
       fraction=st.sampled_from([0.01, 0.1, 0.5, 0.99]),
       max_documents=st.one_of(st.none(), st.integers(2, 30)))
def test_documents_stay_whole_and_in_order(tmp_path_factory, shards, fraction, max_documents):
    wanted = [text for shard in shards for text in shard][:max_documents]
    out = tmp_path_factory.mktemp("any") / "out"
    options = replace(BYTES, validation_fraction=fraction, max_documents=max_documents)
    if len(wanted) < 2 or not any(wanted):
        with pytest.raises(UserError, match="found; wanted at least 2|has no text: all of its"):
            prepare_dataset(texts_source(*shards), out, options)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("preparation.sources.TEXTS_PER_TASK", 3)
        patch.setattr("preparation.cutting.LARGE_DOCUMENT", 8)
        prepare_dataset(texts_source(*shards), out, options)
    train, validation = (decoded(out / f"{s}.safetensors") for s in ("train", "validation"))
    assert train + validation == wanted
    assert len(train) == num_training_documents(len(wanted), fraction)


def test_the_split_is_that_of_a_percentage_slice():
    for n in (100, 150, 250, 350, 1000, 14_868_862):  # halves are rounded to the even number
        assert num_training_documents(n, 0.01) == round(99 * n / 100)
    assert num_training_documents(2, 0.01) == 1 == num_training_documents(3, 0.99)


def test_a_literal_end_of_text_stays_text(tmp_path):
    prepare_dataset(texts_source(["a<|endoftext|>b", "c"]), tmp_path / "out", PrepareOptions())
    tokens = load_file(tmp_path / "out" / "train.safetensors")["tokens"]
    assert tokens.tolist() == [64, 27, 91, 437, 1659, 5239, 91, 29, 65, 50256]


@settings(max_examples=30, deadline=None)
@given(shards=st.lists(st.lists(st.text(max_size=20), max_size=6), min_size=1, max_size=6),
       stops=st.lists(st.integers(0, 35), max_size=6))
def test_stopped_at_any_write_it_continues_to_the_same_bytes(tmp_path_factory, shards, stops):
    if sum(map(len, shards)) < 2 or not any(map(any, shards)):
        return
    folder = tmp_path_factory.mktemp("stops")
    prepare_dataset(texts_source(*shards), folder / "undisturbed", BYTES)
    for stop in [*stops, None]:
        if (folder / "out").exists():
            break
        with stopping_after(stop):
            prepare_dataset(texts_source(*shards), folder / "out", BYTES)
    assert contents(folder / "out") == contents(folder / "undisturbed")


@pytest.mark.parametrize("footer", [False, True])
def test_a_damaged_shard_is_an_error_or_skipped_and_counted(tmp_path, footer):
    generator = random.Random(0)
    parts = [[f"{i}-{j}-{generator.random()}" for j in range(50)] for i in range(4)]
    folder = write_parquet(tmp_path / "source", *parts)
    corrupt(folder / "001.parquet", footer=footer)
    options = replace(BYTES, validation_fraction=0.25)
    with pytest.raises(UserError, match="001.parquet: not a complete parquet file.*--skip-ba") as e:
        prepare_dataset(find_documents(folder), tmp_path / "out", options)
    assert "\n" not in str(e.value) and not (tmp_path / "out").exists()
    progress = prepare_dataset(find_documents(folder), tmp_path / "out",
                               replace(options, skip_bad_shards=True))
    assert progress.bad_files == ["001.parquet"]
    train = decoded(tmp_path / "out" / "train.safetensors")
    validation = decoded(tmp_path / "out" / "validation.safetensors")
    assert train + validation == parts[0] + parts[2] + parts[3]
    assert len(validation) == 38  # of the 150 that could be read
    assert "could not be read: 1 (001.parquet)" in (tmp_path / "out" / "README.md").read_text()


def test_a_too_small_disk_is_reported_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3000))
    source = texts_source(["a" * 10_000, "b" * 10_000])
    with pytest.raises(UserError, match="3.00 kB free; tokens need 4.00 kB or more") as caught:
        prepare_dataset(source, tmp_path / "out", BYTES)
    assert caught.value.status == 4 and list(tmp_path.iterdir()) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4000))
    prepare_dataset(source, tmp_path / "out", BYTES)


def test_files_that_may_hold_more_than_text_are_not_refused_for_their_size(tmp_path, monkeypatch,
                                                                           capsys):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "a.jsonl").write_text(json.dumps({"text": "a", "image": "x" * 99_000}) + "\n"
                                    + json.dumps({"text": "b"}) + "\n")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3000))
    prepare_dataset(find_documents(folder), tmp_path / "out", BYTES)
    assert "warning: " in (line := capsys.readouterr().err) and line.count("\n") == 1
    assert "3.00 kB free; tokens need 19.8 kB or more" in line
    assert "(less if the files hold more than text)" in line


def test_after_a_full_disk_the_same_call_continues(tmp_path, monkeypatch):
    source = texts_source(["a", "b"], ["c"], ["d"])
    sync, syncs = TokenFileWriter.sync, []

    def full(writer):
        syncs.append(writer)
        if len(syncs) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(writer)

    monkeypatch.setattr(TokenFileWriter, "sync", full)
    with pytest.raises(UserError, match="the disk is full; .*: 1 shards are finished") as caught:
        prepare_dataset(source, tmp_path / "out", BYTES)
    assert caught.value.status == 4
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    prepare_dataset(source, tmp_path / "out", BYTES)
    assert decoded(tmp_path / "out" / "train.safetensors") == ["a", "b", "c"]


@pytest.mark.parametrize(("limit", "before", "after"), [
    (None, "2.00 kB of 3.00 kB", "3.00kB of 3.00kB"), (25, "20 of 25 doc", "25 documents of 25")])
def test_progress_is_a_bar_or_plain_lines(tmp_path, monkeypatch, capsys, limit, before, after):
    monkeypatch.setattr(progress_display, "LINE_INTERVAL", -1)
    source = texts_source(*[[letter * 100] * 10 for letter in "abc"])
    options = replace(BYTES, max_documents=limit)
    leave_unfinished(source, tmp_path / "out", options)
    assert re.search(rf"^{before}.*, 0 M tokens, \d+\.\d\d M tokens/s, 00:00 left$",
                     capsys.readouterr().err, re.MULTILINE)
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    prepare_dataset(source, tmp_path / "out", options)
    assert terminal.getvalue().startswith("continuing after document 20\n")
    assert re.search(rf"100%\|.*\| {after}.* \[.*<.*, 0 M tokens, \d+\.\d\d M tokens/s\]",
                     terminal.getvalue())


def test_without_progress_no_time_left_is_guessed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress_display, "LINE_INTERVAL", -1)
    monkeypatch.setattr("preparation.sources.Texts", lambda texts, *_: Texts(texts, 1))
    prepare_dataset(texts_source(["a" * 2000, "b"]), tmp_path / "out", BYTES)
    assert re.search(r"^0.00 kB of 2.00 kB, .* \? left$", capsys.readouterr().err, re.MULTILINE)


def test_documents_without_text_are_counted(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": null}\n{"text": "a"}\n{"text": ""}\n')
    progress = prepare_dataset(find_documents(tmp_path), tmp_path / "out", BYTES)
    assert progress.num_empty == 2
    assert "documents without text: 2" in progress_display.summary(tmp_path / "out", progress)


def test_the_dataset_card_is_valid_and_its_code_works(tmp_path, monkeypatch):
    prepare_dataset(texts_source(["a" * 1200, "b"]), tmp_path / "out", BYTES)
    card = DatasetCard.load(tmp_path / "out" / "README.md")
    data = card.data.to_dict()
    assert data["license"] == "unknown" and data["language"] == ["en"]
    assert data["task_categories"] == ["text-generation"] and data["size_categories"] == ["n<1K"]
    assert "1,203 tokens of the" in card.text and "(1.00 characters per\ntoken)" in card.text
    assert "| `train.safetensors` | 1 | 1,201 | 6,506 |" in card.text
    code = card.text.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path / "out")
    names: dict[str, object] = {}
    exec(code, names)
    assert len(names["tokens"]) == 1024


def test_hostile_names_stay_text_in_a_dataset_card(tmp_path):
    folder = write_parquet(tmp_path / HOSTILE, DOCUMENTS[:50], DOCUMENTS[50:])
    (folder / f"002{HOSTILE}.parquet").write_bytes(b"")
    prepare_dataset(find_documents(folder), tmp_path / "out", replace(BYTES, skip_bad_shards=True))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "could not be read: 1 (002a" in card and not active_parts(card)


@pytest.mark.parametrize("content", ["file", "directory"])
def test_an_output_that_is_not_empty_is_refused_and_unchanged(tmp_path, content):
    out = tmp_path / "out"
    if content == "file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "mine").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        prepare_dataset(texts_source(["a", "b"]), out, BYTES)
    assert (out if content == "file" else out / "mine").read_text() == "mine"


def test_an_output_that_is_a_link_and_one_that_cannot_be_replaced(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    prepare_dataset(texts_source(["a", "b"]), tmp_path / "link", BYTES)
    assert decoded(tmp_path / "disk" / "train.safetensors") == ["a"]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for output in (Path("."), Path("/proc")):
        with pytest.raises(UserError, match="is a mount point or the current directory"):
            prepare_dataset(texts_source(["a", "b"]), output, BYTES)
    assert not list(tmp_path.glob(".*"))


def test_reading_stops_after_max_documents(tmp_path):
    lines = [json.dumps({"text": "x" * 1000}) for _ in range(20_000)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "{broken"]))
    read = []
    with pytest.MonkeyPatch.context() as patch:
        original = pipeline.Encoder._submit
        patch.setattr(pipeline.Encoder, "_submit",
                      lambda *arguments: read.append(1) or original(*arguments))
        progress = prepare_dataset(find_documents(tmp_path / "a.jsonl"), tmp_path / "out",
                                   replace(BYTES, max_documents=10))
    assert progress.train.num_documents == 9 and len(read) < 3


def test_an_empty_output_directory_is_used(tmp_path):
    (tmp_path / "out").mkdir()
    prepare_dataset(texts_source(["a", "b"]), tmp_path / "out", BYTES)
    assert decoded(tmp_path / "out" / "validation.safetensors") == ["b"]


def text_files(folder, num_files, *bad):
    """Write text files, of which some are UTF-16; return the texts of the others."""
    folder.mkdir()
    texts = [f"text {i} " + "x" * i for i in range(num_files)]
    for i, text in enumerate(texts):
        (folder / f"{i:03}.txt").write_text(text, encoding="utf-16" if i in bad else "utf-8")
    return folder, [text for i, text in enumerate(texts) if i not in bad]


@pytest.mark.parametrize("bad", [0, 3, 7, 8, 9])
def test_one_text_file_that_cannot_be_read_costs_only_that_file(tmp_path, bad, capsys):
    folder, texts = text_files(tmp_path / "source", 10, bad)
    progress = prepare_dataset(find_documents(folder), tmp_path / "out",
                               replace(BYTES, validation_fraction=0.2))
    line = capsys.readouterr().err
    assert line.startswith("left out: ") and f"/{bad:03}.txt: is UTF-16" in line
    train = decoded(tmp_path / "out" / "train.safetensors")
    validation = decoded(tmp_path / "out" / "validation.safetensors")
    assert train + validation == texts and len(train) == 7
    assert (progress.train.num_documents, progress.validation.num_documents) == (
        len(train), len(validation))
    assert progress.num_bytes == sum(len(text) for text in texts)
    assert progress.bad_files == [f"{bad:03}.txt"] and progress.num_bad_files == 1
    assert f"could not be read: 1 ({bad:03}.txt)" in (tmp_path / "out/README.md").read_text()
    with safe_open(tmp_path / "out" / "train.safetensors", framework="numpy") as file:
        assert file.metadata()["num_bad_files"] == "1"
        assert file.metadata()["num_text_bytes"] == str(sum(len(text) for text in train))


@pytest.mark.parametrize("bad", [(0, 1), (1,)])
def test_text_files_too_few_of_which_can_be_read_are_an_error(tmp_path, bad, capsys):
    folder, _ = text_files(tmp_path / "source", 2, *bad)
    with pytest.raises(UserError, match=r"document.? found; wanted .*; left out: .*001.txt"):
        prepare_dataset(find_documents(folder), tmp_path / "out",
                        replace(BYTES, skip_bad_shards=True))
    assert "001.txt: is UTF-16; wanted UTF-8" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_one_damaged_file_in_a_hundred_is_left_out(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    for i in range(100):
        (folder / f"{i:03}.jsonl").write_text(f'{{"text": "{i}"}}\n')
    (folder / "040.jsonl").write_text("no JSON\n")
    progress = prepare_dataset(find_documents(folder), tmp_path / "out", BYTES)
    assert progress.bad_files == ["040.jsonl"] and progress.train.num_documents == 98
    (folder / "050.jsonl").write_text("no JSON\n")
    with pytest.raises(UserError, match="050.jsonl: line 1 is not .*; 2 files cannot be read"):
        prepare_dataset(find_documents(folder), tmp_path / "again", BYTES)
    assert not (tmp_path / "again").exists()
