"""Splitting documents and files into tasks: no text is lost, and the tokens stay the same."""

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from basics.errors import UserError
from preparation import cutting, reading
from preparation.cutting import BadShard, cut_document
from preparation.encoding import encode_task
from preparation.reading import (
    JsonLines,
    Texts,
    json_tasks,
    parquet_tasks,
    text_tasks,
)
from preparation.sources import find_documents
from tokens.tokenizer import load_tokenizer

# Text for which GPT-2's pattern and the cuts could disagree: white space of every kind,
# apostrophes, digits, and characters of several UTF-8 bytes.
SPACES = [" ", "\n", "\t", "\r", "\u00a0", "\u2003", "\u3000", "\u2028", "\u0085", "\u1680"]
TEXT = st.lists(st.one_of(
    st.sampled_from([*SPACES, " ", "\n", "a", "'s", "7", "é", "中", "🎉", ".", "ⴿ"]),
    st.characters(exclude_categories=["Cs"]),
), max_size=100).map("".join)


def documents(tasks):
    """Join the pieces of tasks to documents."""
    found, parts = [], []
    for task in tasks:
        for text, ends_document, *_ in task.pieces():
            parts.append(text)
            if ends_document:
                found.append("".join(parts))
                parts = []
    assert not parts, "a document has no end"
    return found


@settings(max_examples=60, deadline=None)
@example(text="abcdefg\n\n\nh")  # the first two line ends are one token
@given(text=TEXT)
def test_a_cut_document_has_the_tokens_of_the_whole(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "LARGE_DOCUMENT", 8)
        pieces = list(cut_document(text.encode()))
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    tokenizer = load_tokenizer("gpt2")
    # Safe cuts do not change the tokens; forced cuts elsewhere still keep the text.
    whole = tokenizer.encode(text, disallowed_special=())
    apart = [id for piece in pieces for id in tokenizer.encode(piece.text, disallowed_special=())]
    if all(piece.ends_safely for piece in pieces):
        assert apart == whole
    assert tokenizer.decode(apart) == text


def test_a_long_document_is_cut_only_before_white_space():
    text = "It is the reader's 1st naïve word — 中文 too.\n\n" * 50_000
    pieces = [piece.text for piece in cut_document(text.encode())]
    assert len(pieces) == len(text.encode()) // 2**18 + 1
    assert all(piece[0] in " \n" for piece in pieces[1:])
    assert "".join(pieces) == text


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=200))
def test_bytes_that_are_not_text_are_read_to_the_end(data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "LARGE_DOCUMENT", 8)
        pieces = list(cut_document(data))
    assert pieces[-1].ends_document and (data == b"") == ("".join(p.text for p in pieces) == "")


@settings(max_examples=40, deadline=None)
@given(texts=st.lists(TEXT, min_size=1, max_size=3), task_bytes=st.integers(1, 60),
       whole_bytes=st.sampled_from([1, 50, 10**6]))
def test_each_text_file_is_one_document(tmp_path_factory, texts, task_bytes, whole_bytes):
    folder = tmp_path_factory.mktemp("texts")
    for i, text in enumerate(texts):
        (folder / f"{i}.txt").write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "TASK_BYTES", task_bytes)
        patch.setattr(reading, "WHOLE_BYTES", whole_bytes)
        patch.setattr(cutting, "LARGE_DOCUMENT", 8)
        tasks = list(text_tasks(sorted(folder.iterdir()), folder))
        assert documents(tasks) == texts
        streamed = [piece for task in tasks for piece in task.pieces()]
        assert streamed == [piece for text in texts for piece in cut_document(text.encode())]


@settings(max_examples=25, deadline=None)
@given(texts=st.lists(st.one_of(st.none(), st.text(max_size=60)), max_size=40),
       task_bytes=st.integers(1, 200), group_rows=st.integers(1, 10),
       whole_group=st.sampled_from([1, 10**6]))
def test_the_documents_of_a_file_do_not_depend_on_the_size_of_tasks(tmp_path_factory, texts,
                                                                    task_bytes, group_rows,
                                                                    whole_group):
    folder = tmp_path_factory.mktemp("files")
    wanted = [text or "" for text in texts]
    lines = "".join(json.dumps({"text": text}) + "\n\n" for text in texts).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    with pyarrow.output_stream(folder / "a.jsonl.zst", compression="zstd") as file:
        file.write(lines)
    table = pyarrow.table({"id": list(range(len(texts))),
                           "text": pyarrow.array(texts, pyarrow.string())})
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=group_rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "TASK_BYTES", task_bytes)
        patch.setattr(reading, "WHOLE_BYTES", whole_group)
        patch.setattr(cutting, "LARGE_DOCUMENT", 20)
        for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst"):
            assert documents(json_tasks(folder / name, "text")) == wanted
        assert documents(parquet_tasks(folder / "a.parquet", "text")) == wanted


@pytest.mark.parametrize("kind", [
    pyarrow.string(), pyarrow.large_string(), pyarrow.string_view(),
    pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
])
def test_columns_of_every_text_type(tmp_path, kind):
    column = pyarrow.array(["naïve", None, "b" * 10], pyarrow.string()).cast(kind)
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    assert documents(parquet_tasks(tmp_path / "a.parquet", "text")) == ["naïve", "", "b" * 10]


def test_a_column_of_nulls(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": [None, None]}), tmp_path / "a.parquet")
    assert documents(parquet_tasks(tmp_path / "a.parquet", "text")) == ["", ""]


def test_numbers_are_not_text(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="a.parquet: column 'text' is of type int64; name a column"):
        documents(parquet_tasks(tmp_path / "a.parquet", "text"))
    with pytest.raises(UserError, match="has no column 'body'; name one of its columns .*: text"):
        list(parquet_tasks(tmp_path / "a.parquet", "body"))


@pytest.mark.parametrize("other", ["small", "large " * 2**17])
def test_bytes_that_are_not_utf8_are_replaced_in_every_format(tmp_path, other):
    broken = pyarrow.array([b"a\xffb", other.encode()], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": broken}), tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_bytes(b"a\xffb")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a\xffb"}')
    assert documents(parquet_tasks(tmp_path / "a.parquet", "text")) == ["a\ufffdb", other]
    assert documents(text_tasks([tmp_path / "a.txt"], tmp_path)) == ["a\ufffdb"]
    assert documents(json_tasks(tmp_path / "a.jsonl", "text")) == ["a\ufffdb"]


@pytest.mark.parametrize("character", [" ", "\n", "x", "🎉", "中"])
def test_a_long_run_of_one_character_is_encoded(character):
    text = character * 600_000 + "a"  # more than the largest piece, 2 * LARGE_DOCUMENT
    encoded = encode_task(Texts(list(cut_document(text.encode())), 99),
                          lambda: load_tokenizer("gpt2"))
    assert load_tokenizer("gpt2").decode(encoded.tokens[:-1].tolist()) == text


def test_half_of_a_surrogate_pair_becomes_a_question_mark():
    task = JsonLines(Path("a.jsonl"), 1, b'{"text": "half \\ud800 pair"}\n', "text")
    assert documents([task]) == ["half ? pair"]


@pytest.mark.parametrize("line", [
    b'{"text": 7}', b'{"other": "x"}', b'["text"]', b'{"text": "a', b"\xff", b'{"text": ["a"]}',
    b"[" * 100_000,
])
def test_the_error_for_a_malformed_line_names_its_number(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    message = 'a.jsonl: line 3 is not a JSON object with a text in "text"'
    with pytest.raises(BadShard, match=message):
        documents(json_tasks(path, "text"))


def test_a_byte_order_mark_and_capital_suffixes_are_accepted(tmp_path):
    lines = "\ufeff".encode() + b'{"text": "a"}\n{"text": "b"}\n'
    (tmp_path / "A.JSONL.GZ").write_bytes(gzip.compress(lines))
    (tmp_path / "B.JSONL").write_bytes(lines)
    for shard in find_documents(tmp_path).shards:
        assert documents(shard.tasks()) == ["a", "b"]


@pytest.mark.parametrize("whole_bytes", [1, 10**6])
def test_a_byte_order_mark_of_a_text_file_is_no_text(tmp_path, monkeypatch, whole_bytes):
    monkeypatch.setattr(reading, "WHOLE_BYTES", whole_bytes)
    (tmp_path / "a.txt").write_bytes("\ufeffnaïve".encode())
    assert documents(text_tasks([tmp_path / "a.txt"], tmp_path)) == ["naïve"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_truncated_compressed_file_is_an_error(tmp_path, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    numbers = np.random.default_rng(0).integers(2**60, size=5000)
    lines = b"".join(b'{"text": "%x"}\n' % number for number in numbers)
    if suffix == ".gz":
        whole = gzip.compress(lines)
    else:
        whole = pyarrow.compress(lines, "zstd", asbytes=True)
    path.write_bytes(whole[:len(whole) // 2])
    with pytest.raises(BadShard, match=f"a.jsonl{suffix}: damaged or cannot be read"):
        list(json_tasks(path, "text"))


def test_the_tasks_of_a_large_text_file_say_how_much_of_it_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "WHOLE_BYTES", 100)
    monkeypatch.setattr(reading, "TASK_BYTES", 1000)
    monkeypatch.setattr(cutting, "LARGE_DOCUMENT", 64)
    path = tmp_path / "a.txt"
    path.write_text("naïve words, " * 999)
    sizes = [task.source_bytes for task in text_tasks([path], tmp_path)]
    assert sum(sizes) == path.stat().st_size and max(sizes) < path.stat().st_size / 5
