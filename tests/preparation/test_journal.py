"""Continuing an unfinished preparation: after kills, damage and changes of the request."""

import os
import random
import shutil
from dataclasses import replace

import pytest

from basics.errors import UserError
from preparation import pipeline
from preparation.journal import Journal
from preparation.pipeline import prepare_dataset
from preparation.sources import TextsShard, find_documents
from tests.support.preparation import (
    BYTES,
    contents,
    corrupt,
    decoded,
    leave_unfinished,
    texts_source,
    write_parquet,
)


@pytest.mark.parametrize("num_bytes", [0, 1, 10, -1, -30])
def test_a_truncated_journal_is_read_up_to_its_last_whole_line(tmp_path, monkeypatch, num_bytes):
    shards = [["a", "b"], ["c"], ["d"]]
    prepare_dataset(texts_source(*shards), tmp_path / "undisturbed", BYTES)
    monkeypatch.setattr(Journal, "publish", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare_dataset(texts_source(*shards), tmp_path / "out", BYTES)
    monkeypatch.undo()
    path = tmp_path / ".out.partial" / "journal.jsonl"
    path.write_bytes(path.read_bytes()[:num_bytes])
    prepare_dataset(texts_source(*shards), tmp_path / "out", BYTES)
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


@pytest.mark.parametrize("num_bytes", [1, 100, 5000])
def test_token_files_shorter_than_the_journal_says_are_written_again(tmp_path, monkeypatch,
                                                                     num_bytes):
    shards = [["a", "b"], ["c"], ["d"]]
    monkeypatch.setattr(pipeline, "write_card", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare_dataset(texts_source(*shards), tmp_path / "out", BYTES)
    monkeypatch.undo()
    path = tmp_path / ".out.partial" / "dataset" / "train.safetensors"
    os.truncate(path, max(path.stat().st_size - num_bytes, 0))
    prepare_dataset(texts_source(*shards), tmp_path / "out", BYTES)
    assert decoded(tmp_path / "out" / "train.safetensors") == ["a", "b", "c"]


@pytest.mark.parametrize("num_documents", [1, 9])
def test_a_table_of_other_documents_than_the_journal_says_is_corrected(tmp_path, num_documents):
    source = texts_source(["a", "b"], ["c"], ["d"])
    leave_unfinished(source, tmp_path / "out")
    os.truncate(tmp_path / ".out.partial" / "documents.bin", 24 * num_documents)
    prepare_dataset(source, tmp_path / "out", BYTES)
    assert decoded(tmp_path / "out" / "train.safetensors") == ["a", "b", "c"]
    assert decoded(tmp_path / "out" / "validation.safetensors") == ["d"]


def test_documents_that_were_divided_into_splits_are_not_read_again(tmp_path, monkeypatch):
    source = texts_source(["a", "b"], ["c"], ["d"])
    monkeypatch.setattr(Journal, "publish", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare_dataset(source, tmp_path / "out", BYTES)
    monkeypatch.undo()
    monkeypatch.setattr(TextsShard, "tasks", lambda *_: pytest.fail("was read again"))
    source = texts_source(["a", "b"], ["c"], ["d"], ["of a file that is new since then"])
    prepare_dataset(source, tmp_path / "out", BYTES)
    assert decoded(tmp_path / "out" / "train.safetensors") == ["a", "b", "c"]
    assert decoded(tmp_path / "out" / "validation.safetensors") == ["d"]


def test_a_kill_before_the_journal_is_deleted_does_no_harm(tmp_path, monkeypatch):
    monkeypatch.setattr("preparation.journal.shutil.rmtree", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare_dataset(texts_source(["a", "b"]), tmp_path / "out", BYTES)
    monkeypatch.undo()
    assert decoded(tmp_path / "out" / "train.safetensors") == ["a"]
    shutil.rmtree(tmp_path / "out")
    prepare_dataset(texts_source(["a", "b"]), tmp_path / "out", BYTES)
    assert decoded(tmp_path / "out" / "train.safetensors") == ["a"]


def test_a_damaged_shard_can_be_replaced_before_continuing(tmp_path):
    parts = [[f"{i}-{j}-{random.Random(i * 99 + j).random()}" for j in range(50)] for i in range(3)]
    folder = write_parquet(tmp_path / "source", *parts)
    whole = (folder / "001.parquet").read_bytes()
    corrupt(folder / "001.parquet", footer=False)
    with pytest.raises(UserError, match="001.parquet: not a complete parquet file.*replace it"):
        prepare_dataset(find_documents(folder), tmp_path / "out", BYTES)
    (folder / "001.parquet").write_bytes(whole)
    progress = prepare_dataset(find_documents(folder), tmp_path / "out", BYTES)
    assert progress.bad_files == [] and progress.train.num_documents == 148


@pytest.mark.parametrize(("options", "message"), [
    (replace(BYTES, tokenizer="gpt2"), "tokenizer was bytes, is gpt2"),
    (replace(BYTES, validation_fraction=0.5), "validation fraction was 0.01, is 0.5"),
    (replace(BYTES, max_documents=3), "max documents was None, is 3"),
])
def test_a_changed_option_is_refused(tmp_path, options, message):
    source = texts_source(["a", "b"], ["c"])
    leave_unfinished(source, tmp_path / "out")
    with pytest.raises(UserError, match=message) as caught:
        prepare_dataset(source, tmp_path / "out", options)
    assert str(tmp_path / ".out.partial") in str(caught.value) and "\n" not in str(caught.value)
    prepare_dataset(source, tmp_path / "out", BYTES)  # the first request can still be finished
    assert decoded(tmp_path / "out" / "train.safetensors") == ["a", "b"]


def test_options_may_change_before_a_shard_is_finished(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"content": "a"}\n{"content": "b"}\n')
    with pytest.raises(UserError, match="its keys are content"):
        prepare_dataset(find_documents(folder), tmp_path / "out", BYTES)
    prepare_dataset(find_documents(folder, text_column="content"), tmp_path / "out", BYTES)
    assert decoded(tmp_path / "out" / "train.safetensors") == ["a"]


@pytest.mark.parametrize(("shards", "message"), [
    ([["a", "B"], ["c"]], "shard 0 has changed"),
    ([["new"], ["a", "b"], ["c"]], "shard 0 has changed"),
    ([], "shard 0 is missing, or there are new files before it"),
])
def test_a_changed_source_is_refused(tmp_path, shards, message):
    leave_unfinished(texts_source(["a", "b"], ["c"]), tmp_path / "out")
    with pytest.raises(UserError, match=f"differs: {message}"):
        prepare_dataset(texts_source(*shards), tmp_path / "out", BYTES)


def test_two_preparations_of_one_output_are_refused(tmp_path):
    with Journal(tmp_path / "out"):
        with pytest.raises(UserError, match="another process is preparing this dataset"):
            prepare_dataset(texts_source(["a", "b"]), tmp_path / "out", BYTES)
        assert (tmp_path / ".out.partial").exists()
