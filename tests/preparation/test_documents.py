"""Finding the documents of a source."""

import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from basics.errors import UserError
from preparation import reading
from preparation.pipeline import prepare_dataset
from preparation.sources import find_documents
from preparation.standard_library import python_stdlib
from tests.support.preparation import (
    BYTES,
    DOCUMENTS,
    decoded,
    stopping_after,
    tokens_in,
    write_parquet,
    write_source,
)


def test_a_source_can_be_a_pattern_or_a_file(tmp_path):
    source_dir = write_source("jsonl", tmp_path / "source")
    by_pattern = find_documents(f"{source_dir}/[ab].jsonl")
    assert [shard.name for shard in by_pattern.shards] == ["a.jsonl", "b.jsonl"]
    assert [shard.name for shard in find_documents(f"{tmp_path}/*/b*").shards] == ["source/b.jsonl"]
    prepare_dataset(find_documents(source_dir / "a.jsonl"), tmp_path / "out", BYTES)
    assert decoded(tmp_path / "out" / "train.safetensors") == DOCUMENTS[:50][:-1]


def test_the_identity_of_a_file_changes_with_its_size_or_time(tmp_path):
    folder = write_parquet(tmp_path / "source", ["a", "b"], ["c"])
    before = find_documents(folder)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x"]}), folder / "001.parquet")
    after = find_documents(folder)
    assert before.shards[0].identity == after.shards[0].identity
    assert before.shards[1].identity != after.shards[1].identity


def test_only_txt_files_outside_of_hidden_directories_and_token_datasets_are_documents(tmp_path):
    (tmp_path / ".git").mkdir()
    for path in ("a.txt", "b.TXT", ".git/c.txt", "README.md", "convert.py"):
        (tmp_path / path).write_text("text")
    prepare_dataset(find_documents(tmp_path), tmp_path / "out", BYTES)
    (tmp_path / "out/notes.txt").write_text("text")
    assert find_documents(tmp_path).shards[0].num_files == 2
    assert find_documents(f"{tmp_path}/*.py").shards[0].num_files == 1


def test_file_names_of_any_bytes_and_broken_links(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    for name in (b"\xff.jsonl", b"two\nlines.jsonl"):
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_text('{"text": "a"}\n')
    prepare_dataset(find_documents(folder), tmp_path / "out", BYTES)
    (folder / "z.jsonl").symlink_to("nothing")
    with pytest.raises(UserError, match="z.jsonl: is a broken link"):
        find_documents(folder)


def test_linked_directories_are_read_unless_they_lead_out(tmp_path, capsys):
    source = tmp_path / "source"
    for folder in (source / "a/b", tmp_path / "elsewhere"):
        folder.mkdir(parents=True)
        (folder / "x.txt").write_text("text")
    (source / "inner").symlink_to("a/b")
    (source / "outer").symlink_to(tmp_path / "elsewhere")
    (source / "a/loop").symlink_to("..")
    (shard,) = find_documents(source).shards
    assert [str(path.relative_to(source)) for path in shard.paths] == ["a/b/x.txt", "inner/x.txt"]
    warning = capsys.readouterr().err
    assert f"{source}/outer: leads out of the directory" in warning and "(1 such links)" in warning


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


@pytest.mark.parametrize(("make", "message"), [
    (lambda d: None, "no documents; wanted files ending in"),
    (lambda d: (d / "one.jsonl").write_text('{"text": "x"}'), "1 document found; wanted at"),
    (lambda d: (d / "one.txt").write_text(""), "1 document found; wanted at least 2"),
    (lambda d: (d / "a.jsonl").write_text('{"text": null}\n' * 3), "no text: all of its 3 docu"),
    (lambda d: [(d / "a.jsonl").write_text("{}"), (d / "b.parquet").write_bytes(b"")],
     "contains both JSON lines and parquet"),
])
def test_sources_that_cannot_be_used(tmp_path, make, message):
    source_dir = tmp_path / "source"
    source_dir.mkdir()
    make(source_dir)
    with pytest.raises(UserError, match=message) as caught:
        prepare_dataset(find_documents(source_dir), tmp_path / "out", BYTES)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_documents_of_the_standard_library_are_always_the_same():
    first, second = (python_stdlib().shards[0] for _ in range(2))
    assert first.identity == second.identity
    text = "".join(piece.text for task in first.tasks() for piece in task.pieces())
    assert len(text) > 5_000_000 and "def " in text
    assert "The \"if\" statement" in text, "the reference documentation is missing"
