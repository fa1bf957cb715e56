"""Sources of documents: files of text, what `datasets` reads, the hub, and hostile input."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import pickle
import random
import re
import struct
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import ANY

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import DatasetCard
from safetensors.numpy import save

from basics.errors import BAD_INPUT, UserError
from benchmarks.prepare import peak_memory_of
from preparation import cutting, dataset_source, hub
from preparation.cutting import cut_document, decoded, split_documents
from preparation.encoding import encode_task
from preparation.ensure_dataset import is_complete, provide_dataset
from preparation.text_files import LFS_POINTER
from tests.support.hub_server import (
    Fault,
    Hub,
    serving,
    tokens_hub_fixture,  # noqa: F401
    used_in_this_process,
)
from tests.support.optional import example, given, settings, st
from tests.support.preparation import (
    documents_of,
    find_source,
    metadata_of,
    prepare,
    small_steps,
    tokens_in,
)
from tests.support.workplace import run_command, small_disk, succeeded
from tokens.tokenizer import load_tokenizer
from trainer.models import load_model

# --- cutting text loses none, and keeps the tokens

# Text for which GPT-2's pattern and the cuts could disagree: white space of every kind,
# apostrophes, digits, and characters of several UTF-8 bytes.
SPACES = [" ", "\n", "\t", "\r", "\u00a0", "\u2003", "\u3000", "\u2028", "\u0085", "\u1680"]
TEXT = st.lists(
    st.one_of(
        st.sampled_from([*SPACES, " ", "\n", "a", "'s", "7", "é", "中", "🎉", ".", "ⴿ"]),
        st.characters(exclude_categories=["Cs"], exclude_characters="\ufeff"),
    ),
    max_size=100,
).map("".join)


@settings(max_examples=60)
@example(text="abcdefg\n\n\nh", block=99)  # the first two line ends are one token
@given(text=TEXT, block=st.integers(1, 99))
def test_a_cut_document_has_the_tokens_of_the_whole(text, block):
    data, tokenizer = text.encode(), load_tokenizer("gpt2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "LARGE_DOCUMENT", 8)
        for cuts in ("any", "safe", "none"):
            pieces = list(cut_document([data], cuts, "text"))
            blocks = (data[i : i + block] for i in range(0, len(data), block))
            assert list(cut_document(blocks, cuts, "text")) == pieces
            assert b"".join(piece.data for piece in pieces) == data
            assert [piece.ends for piece in pieces[:-1]] == [[]] * (len(pieces) - 1)
            assert pieces[-1].ends == [len(pieces[-1].data)]
            ids = [
                token
                for piece in pieces
                for token in tokenizer.encode(piece.data.decode(), disallowed_special=())
            ]
            # Forced cuts may change the tokens, but keep the text.
            assert cuts == "any" or ids == tokenizer.encode(text, disallowed_special=())
            assert tokenizer.decode(ids) == text


LINE_ENDS = ["\n", "\r\n", "\n\n\n", " "]


@settings(max_examples=200)
@given(
    parts=st.lists(st.sampled_from([*LINE_ENDS, "<|", "SEP", "SEP", "é"]), max_size=30),
    separator=st.sampled_from(["<|>", "#\n", "\n#"]),
    block=st.sampled_from([1, 2, 3, 7, 30]),
)
def test_documents_between_separators_do_not_depend_on_the_blocks(parts, separator, block):
    """Two line ends on each side belong to a separator; documents without text are left out."""
    text = "".join(parts).replace("SEP", separator)
    line_ends = r"(?:\r?\n){0,2}"
    *wanted, last = re.split(line_ends + re.escape(separator) + line_ends, text)
    wanted.append(re.sub(line_ends + r"\Z", "", last))
    data = text.encode()
    blocks = [data[start : start + block] for start in range(0, len(data), block)]
    documents = split_documents(blocks, separator.encode())
    found = [b"".join(document).decode() for document in documents]
    assert found == [document for document in wanted if document]


@pytest.mark.parametrize("character", [*map(str.encode, [" ", "\n", "x", "🎉", "中"]), b"\x80"])
def test_a_long_run_of_one_character_is_encoded(character):
    data = character * 600_000 + b"a"  # more than the largest piece, 2 * LARGE_DOCUMENT
    text = data.decode("utf-8", "replace")
    encoded = encode_task(list(cut_document([data], "any", "text")), load_tokenizer("gpt2"))
    assert load_tokenizer("gpt2").decode(encoded.tokens[:-1].tolist()) == text


# --- files of text


def documents(source, position=None):
    """Return the documents of a source from a position on, and the files that are left out."""
    found, parts, left_out = [], [], dict(source.left_out)
    for chunk in source.chunks(position, "any"):
        left_out |= chunk.left_out
        for piece in chunk.pieces:
            for part in piece.parts():
                parts.append(decoded(part)[0])
                if piece.ends:
                    found.append("".join(parts))
                    parts = []
    assert not parts, "a document has no end"
    return found, left_out


def write_mixed_files(folder):
    """Write 150 files of many kinds; return how many of them are text, and why others are not."""
    folder.mkdir()
    for i in range(67):
        (folder / f"de{i:03}.txt").write_text(f"Größe {i}: schöne Übung\n")
    for i in range(20):
        (folder / f"ru{i}").write_text(f"Привет, мир {i}\n")
        (folder / f"code{i}.py").write_text(f"def f():\n    return {i}\n")
        (folder / f"page{i}.1").write_text(f".TH PAGE {i}\n")
    (folder / "zip.1.gz").write_bytes(gzip.compress(b".TH ZIP\n"))
    for i in range(10):
        (folder / f"zh{i}.md").write_text(f"# 数据 {i}\n")
    (folder / "settings.json").write_text('{"a": 1}')
    (folder / "README.md").write_text("read me")
    (folder / "empty.txt").write_bytes(b"")
    (folder / "latin.txt").write_bytes("Größe: schöne Übung\n".encode("latin-1") * 9)
    (folder / "lfs.txt").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    picture = b"\x89PNG\r\n\x1a\n\0\0" + random.Random(0).randbytes(3000)
    (folder / "picture.png").write_bytes(picture)
    (folder / "picture.txt").write_bytes(picture.replace(b"\0", b"\1"))
    os.mkfifo(folder / "pipe")
    (folder / "wide.txt").write_text("hello", "utf-16")
    (folder / "wide-le.txt").write_text("hello", "utf-16-le")
    (folder / "wide-be.txt").write_text("hello", "utf-16-be")
    (folder / "damaged.txt").write_bytes(b"text " * 100 + b"\0\xff")
    return 141, {
        "pipe": "is not a regular file",
        "empty.txt": "is empty",
        "latin.txt": r"\d+% of its bytes are not UTF-8 \(--encoding\)",
        "lfs.txt": "is a Git LFS pointer; fetch its content with: git lfs pull",
        "picture.png": "is binary",
        "picture.txt": r"4\d% of its bytes are not UTF-8 \(--encoding\)",
        "wide-be.txt": "about every second byte is 0; if it is UTF-16: --encoding utf-16-be",
        "wide-le.txt": "about every second byte is 0; if it is UTF-16: --encoding utf-16-le",
        "wide.txt": "is UTF-16; read with --encoding utf-16",
    }


def test_a_folder_of_mixed_files_is_a_dataset_and_what_is_left_out_is_named(tmp_path):
    num_texts, left_out = write_mixed_files(tmp_path / "source")
    assert len(list((tmp_path / "source").iterdir())) == 150
    result = succeeded(prepare(str(tmp_path / "source"), str(tmp_path / "out")))
    assert f"{num_texts} documents" in result.stdout
    head, first = re.search("left out (.*)\n(.*)\n", result.stdout).groups()
    assert head == "9 files, all named in README.md:"
    assert [part.split(" (")[0].strip() for part in re.split(r"\), ", first)] == [*left_out][:5]
    card = (tmp_path / "out/README.md").read_text().replace("\\", "")
    for name, reason in left_out.items():
        assert re.search(rf"- {name}: {reason}\n", card), name
    assert metadata_of(tmp_path / "out")["num_files_left_out"] == "9"
    assert "language:" not in card


TEXT_BYTES = st.one_of(
    TEXT.map(str.encode), st.binary(max_size=40), st.sampled_from([b"", b"\0", b"\xef\xbb\xbf"])
)


@settings(max_examples=60)
@given(
    files=st.lists(st.tuples(TEXT_BYTES, st.sampled_from(["", ".gz", ".zst"])), max_size=12),
    step=st.integers(1, 200),
)
def test_every_file_of_text_is_a_document(tmp_path_factory, files, step):
    """However they are packed and read, and from whatever chunk reading begins again."""
    folder = tmp_path_factory.mktemp("files")
    wanted, not_wanted = [], set()
    for i, (content, packed) in enumerate(files):
        (folder / f"{i:02}.x{packed}").write_bytes(PACK[packed](content))
        text = content.removeprefix(b"\xef\xbb\xbf")
        shown = text.decode("utf-8", "replace")
        num_bad = shown.count("\ufffd") - text.count("\ufffd".encode())
        if text.startswith((b"\xff\xfe", b"\xfe\xff", LFS_POINTER)) or not text:
            not_wanted.add(f"{i:02}.x{packed}")
        elif num_bad + text.count(0) > 0.01 * len(text):
            not_wanted.add(f"{i:02}.x{packed}")
        else:
            wanted.append(shown)
    if not files:
        with pytest.raises(UserError, match="contains no files to read"):
            find_source(folder)
        return
    with small_steps(step), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "LARGE_DOCUMENT", 20)
        source = find_source(folder)
        assert documents(source) == (wanted, dict.fromkeys(not_wanted, ANY))
        chunks = [(chunk.position, len(list(chunk.pieces))) for chunk in source.chunks(None, "any")]
        for number, (position, _) in enumerate(chunks):
            again = [len(list(chunk.pieces)) for chunk in source.chunks(position, "any")]
            assert again == [length for _, length in chunks[number:]]


PACK = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pyarrow.compress(content, "zstd", asbytes=True),
}


def test_hidden_files_token_datasets_and_links_are_not_read(tmp_path):
    source = tmp_path / "source"
    for folder in ("a/b", ".git", "tokens", "../elsewhere"):
        (source / folder).mkdir(parents=True)
        (source / folder / "x.txt").write_text(f"text of {folder}")
    (source / "tokens/train.safetensors").write_bytes(b"")
    (source / "inner").symlink_to("a/b/x.txt")
    (source / "gone").symlink_to("nothing")
    (source / "folder").symlink_to("a")
    (source / "outer").symlink_to(tmp_path / "elsewhere/x.txt")
    name = os.fsdecode(b"\xff\n")
    (source / name).write_text("an odd name")
    assert documents(find_source(source)) == (
        ["text of a/b", "text of a/b", "an odd name"],
        {
            "gone": "is a broken link",
            "folder": "is a link to a directory",
            "outer": "leads out of the directory",
        },
    )
    assert documents(find_source(f"{source}/out*"))[0] == ["text of ../elsewhere"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: None, "contains no files to read"),
        (lambda d: (d / "one.jsonl").write_text('{"text": ""}'), "1 document found; wanted at"),
        (lambda d: (d / "one.txt").write_text(""), "0 documents found; .* one.txt: is empty"),
        (
            lambda d: (d / "a.txt").write_text("a", "utf-16"),
            "0 documents found; .* left out 1 file: a.txt: is UTF-16; read with --encoding utf-16",
        ),
        (
            lambda d: (d / "a.jsonl").write_text('{"text": null}\n' * 3),
            "3 documents found; .* all of them are empty",
        ),
        (
            lambda d: (d / "a.gz").write_bytes(gzip.compress(random.Random(0).randbytes(99))[:-9]),
            "a.gz: cannot be read: ",
        ),
    ],
)
def test_sources_that_cannot_be_used(tmp_path, make, message):
    (tmp_path / "source").mkdir()
    make(tmp_path / "source")
    assert re.search(message, refused(tmp_path, str(tmp_path / "source"), str(tmp_path / "out")))


def test_a_separator_divides_text_files_into_documents(tmp_path):
    stories = [f"story {i}\n\nis long" for i in range(50)]
    (tmp_path / "stories.txt").write_text("".join(f"{s}\n<|endoftext|>\n" for s in stories))
    arguments = (str(tmp_path / "stories.txt"), "--tokenizer", "bytes")
    warning = "there is <|endoftext|> in the text, where it is encoded as any other text: if it"
    assert warning in succeeded(prepare(*arguments, str(tmp_path / "one"))).stderr
    separator = ["--document-separator", "<|endoftext|>"]
    result = succeeded(prepare(*arguments, str(tmp_path / "out"), *separator))
    assert "50 documents" in result.stdout and result.stderr == ""
    train, validation = documents_of(tmp_path / "out")
    assert train + validation == stories and len(validation) == 1
    (tmp_path / "few.txt").write_text("no marker")
    line = refused(tmp_path, f"{tmp_path}/few.txt", str(tmp_path / "x"), *separator)
    assert "found; wanted at least 2, with text; is '<|endoftext|>' between them? (--docu" in line


@pytest.mark.parametrize(("num_bad", "is_warned"), [(0, False), (1, False), (5, True), (20, True)])
def test_a_few_bytes_that_are_not_utf8_are_replaced_counted_and_warned_of(
    tmp_path, num_bad, is_warned
):
    """In text and in JSON lines."""
    text = b"x" * 3000 + b"\xff" * num_bad
    (tmp_path / "a.txt").write_bytes(text)
    (tmp_path / "b.txt").write_bytes(b"b")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "' + text + b'"}\n{"text": "b"}\n')
    for source in ("*.txt", "a.jsonl"):
        out = tmp_path / source[-3:]
        result = succeeded(prepare(f"{tmp_path}/{source}", str(out), "--tokenizer", "bytes"))
        counted = f"bytes that are not UTF-8: {num_bad} character"
        assert (counted in result.stdout) == (num_bad > 0)
        assert (f"warning: {counted}" in result.stderr) == is_warned
        assert metadata_of(out).get("num_replaced_characters") == (
            str(num_bad) if num_bad else None
        )
        assert documents_of(out) == [[text.decode("utf-8", "replace")], ["b"]]


# --- what `datasets` reads

ROW_TEXT = st.one_of(st.none(), TEXT)


def write_rows(folder, name, texts, packed):
    """Write texts as rows of a file whose suffix is its name."""
    rows = [{"id": i, "text": text} for i, text in enumerate(texts)]
    path = folder / f"a.{name}{packed}"
    if name == "parquet":
        schema = pyarrow.schema({"id": pyarrow.int64(), "text": pyarrow.string()})
        table = pyarrow.Table.from_pylist(rows, schema)
        pyarrow.parquet.write_table(table, path, row_group_size=3)
        return
    table = io.StringIO()
    csv.writer(table).writerows(
        [["id", "text"], *([i, text or ""] for i, text in enumerate(texts))]
    )
    content = {
        "jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "json": json.dumps(rows, ensure_ascii=False),
        "csv": table.getvalue(),
    }[name]
    path.write_bytes(PACK[packed](content.encode()))


@settings(max_examples=40)
@given(
    texts=st.lists(ROW_TEXT, min_size=1, max_size=20).filter(any),
    kind=st.sampled_from(
        [
            ("parquet", ""),
            *(
                (name, packed)
                for name in ("jsonl", "json", "csv")
                for packed in ("", ".gz", ".zst")
            ),
            ("jsonl", ".bz2"),
            ("jsonl", ".xz"),
        ]
    ),
    rows=st.integers(1, 9),
)
def test_every_row_is_a_document_and_reading_begins_again_anywhere(
    tmp_path_factory, texts, kind, rows
):
    folder = tmp_path_factory.mktemp("rows")
    if kind[0] == "csv":  # whose lines pandas ends at some of these
        texts = [re.sub(r"[\s\0]", "x", text or "x") for text in texts]
    write_rows(folder, kind[0], texts, kind[1])
    wanted = [text or "" for text in texts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset_source, "ROWS", rows)
        patch.setattr(dataset_source, "LARGE_DOCUMENT", 20)
        patch.setattr(cutting, "LARGE_DOCUMENT", 20)
        assert documents(find_source(folder)) == (wanted, {})
        positions = [chunk.position for chunk in find_source(folder).chunks(None, "any")]
        for number, position in enumerate(positions):
            position = json.loads(json.dumps(position))
            assert documents(find_source(folder), position)[0] == wanted[number * rows :]
            again = [chunk.position for chunk in find_source(folder).chunks(position, "any")]
            assert again[:1] == [position], "where a second kill would begin again"


def test_short_rows_are_sent_together(tmp_path):
    write_rows(tmp_path, "jsonl", ["x", "é"] * 1000, "")
    (chunk,) = find_source(tmp_path).chunks(None, "any")
    pieces = list(chunk.pieces)
    assert len(pieces) <= 20, "one for each of some tables, not one for each row"
    assert [len(part) for piece in pieces for part in piece.parts()] == [1, 2] * 1000


@pytest.mark.parametrize(
    ("files", "texts"),
    [
        (
            {
                "a.jsonl": '{"text": "a", "n": 1}\n{"text": "b", "n": [2]}\n',
                "b.jsonl": '{"text": "c", "n": "x", "m": 2}\n{"n": {"x": 3}}\n',
            },
            ["a", "b", "c", ""],
        ),
        (
            {"a.json": '[{"text": "a", "n": 1}]', "b.json": '[{"n": {"x": 1}, "text": "b"}]'},
            ["a", "b"],
        ),
        (
            {
                "a.csv": 'n,text\n1,NA\n2,007\n3,null\n4,n/a\n5,None\n6,\n7,"a, b"\n',
                "b.csv": "text,m\n8,x\n9,y\n",
            },
            ["NA", "007", "null", "n/a", "None", "", "a, b", "8", "9"],
        ),
    ],
)
def test_other_columns_do_not_matter_and_every_cell_of_the_column_is_text(tmp_path, files, texts):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert documents(find_source(tmp_path)) == (texts, {})


@pytest.mark.parametrize("is_dict", [False, True])
def test_a_directory_of_save_to_disk_is_read(tmp_path, is_dict):
    saved = datasets.Dataset.from_dict({"text": [f"text {i}" for i in range(20)], "n": [0] * 20})
    if is_dict:
        saved = datasets.DatasetDict({"train": saved, "test": saved.select(range(3))})
    saved.save_to_disk(tmp_path / "saved", **({} if is_dict else {"num_shards": 3}))
    assert documents(find_source(tmp_path / "saved"))[0] == [f"text {i}" for i in range(20)]
    if is_dict:
        assert len(documents(find_source(tmp_path / "saved", split="test"))[0]) == 3
    for option in ("config", "encoding", *["split"] * (not is_dict)):
        with pytest.raises(UserError, match=f"--{option} is not for this directory of save_to_di"):
            documents(find_source(tmp_path / "saved", **{option: "cp1252"}))


def test_a_state_of_another_program_makes_no_saved_dataset(tmp_path):
    (tmp_path / "state.json").write_text("{}")
    (tmp_path / "a.txt").write_text("text")
    assert documents(find_source(tmp_path))[0] == ["text", "{}"]


def test_webdataset_and_columns_inside_of_others(tmp_path):
    (tmp_path / "w").mkdir()
    with tarfile.open(tmp_path / "w/a.tar", "w") as archive:
        for i in range(3):
            info = tarfile.TarInfo(f"{i}.txt")
            info.size = 6
            archive.addfile(info, io.BytesIO(f"text {i}".encode()))
    assert documents(find_source(tmp_path / "w", text_column="txt"))[0] == [
        f"text {i}" for i in range(3)
    ]
    (tmp_path / "a.jsonl").write_text('{"a": {"b": "x"}, "a.x": "y"}\n')
    for column, text in (("a.b", "x"), ("a.x", "y")):
        assert documents(find_source(tmp_path / "a.jsonl", text_column=column))[0] == [text]
    for column in ("a", "a.c", "b", "a.b.c"):
        source = find_source(tmp_path / "a.jsonl", text_column=column)
        with pytest.raises(UserError, match=rf"a.jsonl: (has no )?column '{column}'"):
            documents(source)


@pytest.mark.parametrize(
    "kind",
    [
        pyarrow.string(),
        pyarrow.large_string(),
        pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
    ],
)
def test_columns_of_every_text_type(tmp_path, kind):
    column = pyarrow.array(["naïve", None, "b" * 10], pyarrow.string()).cast(kind)
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    assert documents(find_source(tmp_path))[0] == ["naïve", "", "b" * 10]


def test_a_line_says_what_is_left_out_of_a_dataset_and_splits_are_chosen(tmp_path, capsys):
    for name in ("train-0", "train-1", "test-0", "more"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\n')
    for name in ("notes.txt", "more.txt", "README.md"):
        (tmp_path / name).write_text("text")
    left_out = {
        "more.jsonl": "is of no split",
        "more.txt": "is no json file",
        "notes.txt": "is no json file",
        "test-0.jsonl": "is of the split test",
    }
    assert documents(find_source(tmp_path)) == (["train-0", "train-1"], left_out)
    line = "leaving out 4 files: more.jsonl (is of no split), more.txt (is no json file), notes.txt"
    assert line in capsys.readouterr().err
    assert documents(find_source(tmp_path, split="test"))[0] == ["test-0"]
    assert documents(find_source(f"{tmp_path}/*.txt"))[0] == ["text"] * 2
    assert documents(find_source(f"{tmp_path}/t*.jsonl"))[0] == ["test-0", "train-0", "train-1"]
    assert documents(find_source(f"{tmp_path}/[nt]*")) == (
        ["test-0", "train-0", "train-1"],
        {"notes.txt": "is no json file"},
    )


def test_a_folder_that_is_mostly_text_is_read_as_text(tmp_path):
    """`datasets` decides by the most frequent suffix; every file that may be text is read then."""
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    (tmp_path / "page.md").write_text("page")
    (tmp_path / "rows.csv").write_text("text\nrow\n")
    (tmp_path / "rows.jsonl").write_text('{"text": "row"}\n')
    texts = [f"text {number}" for number in range(5)]
    left_out = {"rows.jsonl": "is a dataset among files of text"}
    source = find_source(tmp_path)
    for _ in range(2):
        assert documents(source) == ([*texts, "page", "text\nrow\n"], left_out)
    assert find_source(tmp_path, document_separator="x ").request.document_separator
    for options in ({"split": "train"}, {"config": "default"}, {"text_column": "x"}):
        with pytest.raises(UserError, match="--text-column are for datasets; these are text files"):
            documents(find_source(tmp_path, **options))
        with pytest.raises(UserError, match="--text-column are for datasets; these are text files"):
            find_source(tmp_path / "page.md", **options)
    result = succeeded(prepare(str(tmp_path), str(tmp_path / "out"), "--tokenizer", "bytes"))
    assert "rows.jsonl (is a dataset among files of text)" in result.stdout
    assert "- rows.jsonl: is a dataset" in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "train.bin"])
def test_a_link_that_leads_out_of_the_source_is_skipped(tmp_path, name):
    source, secret, kind = tmp_path / "source", tmp_path / "secret", Path(name).suffix
    source.mkdir()
    content = {".txt": b"secret", ".jsonl": b'{"text": "secret"}\n', ".bin": b"s\0e\0"}[kind]
    secret.write_bytes(content)
    (source / name).symlink_to(secret)
    own, inner = ("b_train.bin", "b_val.bin") if kind == ".bin" else (f"b{kind}", f"c{kind}")
    (source / own).write_bytes(content.replace(b"s", b"S"))
    (source / inner).symlink_to(source / own)
    arguments = ["--tokenizer", "bytes", *["--import"] * (kind == ".bin")]
    result = succeeded(prepare(str(source), str(tmp_path / "out"), *arguments))
    assert name in result.stdout + result.stderr
    assert "leads out of the directory" in result.stdout + result.stderr
    tokens = [token for part in tokens_in(tmp_path / "out").values() for token in part]
    assert tokens.count(ord("S")) == 2 and ord("s") not in tokens


@pytest.mark.parametrize("encoding", ["cp1252", "shift_jis", "utf-16"])
@pytest.mark.parametrize("suffix", ["txt", "txt.gz", "jsonl", "csv"])
def test_files_of_another_encoding(tmp_path, encoding, suffix):
    if encoding == "utf-16" and suffix == "jsonl":
        pytest.skip("datasets divides JSON lines before it decodes them")
    text = "日本 x, 'y'" if encoding == "shift_jis" else "naïve, 'é'"
    content = {
        "jsonl": json.dumps({"text": text}, ensure_ascii=False) + "\n",
        "txt": text,
        "csv": f'id,text\n1,"{text}"\n',
    }[suffix.split(".")[0]].encode(encoding)
    for number in range(2):
        (tmp_path / f"{number}.{suffix}").write_bytes(
            PACK[".gz" if "gz" in suffix else ""](content)
        )
    source = find_source(tmp_path, encoding=encoding)
    assert documents(source) == ([text] * 2, {})


# --- the hub: the real clients, with a local hub that fails in many ways

TEXTS = [[f"part {i} document {j} " + "x" * (j % 97) for j in range(300)] for i in range(3)]


def parquet(column=None, *, name="text", **options):
    content = io.BytesIO()
    table = pyarrow.table({name: column or [f"document {i}" for i in range(300)]})
    pyarrow.parquet.write_table(table, content, **options)
    return content.getvalue()


def json_lines(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


@pytest.fixture
def texts_hub():
    """A dataset of documents, in FineWeb's layout."""
    files = {
        f"sample/10BT/{i:03}_00000.parquet": parquet(part, row_group_size=100)
        for i, part in enumerate(TEXTS)
    }
    files["sample/100BT/000_00000.parquet"] = parquet(["not asked for"] * 10)
    configs = "- config_name: sample-10BT\n  data_files: sample/10BT/*\n"
    configs += "- config_name: sample-100BT\n  data_files: sample/100BT/*\n"
    files["README.md"] = f"---\nlicense: odc-by\nconfigs:\n{configs}---\n".encode()
    card = {"license": ["odc-by"], "language": ["de", False]}
    with serving(Hub(files, card=card)) as texts_hub:
        yield texts_hub


def prepare_from(hub, tmp_path, *arguments, source="", out="out"):
    """Prepare a dataset of documents on the hub, in this process."""
    with used_in_this_process(hub, tmp_path / "home"):
        return prepare(
            source or hub.repository, str(tmp_path / out), "--tokenizer", "bytes", *arguments
        )


def fetch(hub, tmp_path):
    """Download a dataset of tokens, in this process."""
    with used_in_this_process(hub, tmp_path / "home"):
        provide_dataset(tmp_path / "data", hub.repository)


@pytest.mark.parametrize("option", ["--config", "--subset"])
def test_a_config_is_streamed_and_nothing_is_kept(texts_hub, tmp_path, option):
    succeeded(prepare_from(texts_hub, tmp_path, option, "sample-10BT"))
    train, validation = documents_of(tmp_path / "out")
    assert train + validation == [text for part in TEXTS for text in part]
    assert not list(tmp_path.rglob("*.parquet")) and not list(tmp_path.glob(".*"))
    metadata = metadata_of(tmp_path / "out")
    assert metadata["source"] == "someone/texts sample-10BT"
    assert metadata["revision"] == texts_hub.sha
    card = DatasetCard.load(tmp_path / "out" / "README.md")
    assert (card.data.license, card.data.language) == ("odc-by", ["de"])
    assert card.data.to_dict()["source_datasets"] == ["someone/texts"]
    assert texts_hub.sha in card.text


def test_files_of_the_hub_are_named_by_a_pattern(texts_hub, tmp_path):
    texts_hub.files["Stories-train.txt"] = b"one\n<|endoftext|>\ntwo\n<|endoftext|>\nthree"
    texts_hub.sha = "b" * 40  # the library remembers what is in a commit
    place = f"hf://datasets/{texts_hub.repository}"
    result = prepare_from(texts_hub, tmp_path, source=f"{place}/sample/10BT/00[01]*.parquet")
    assert "600 documents" in succeeded(result).stdout
    separator = ("--document-separator", "<|endoftext|>")
    result = prepare_from(
        texts_hub, tmp_path, *separator, source=f"{place}/Stories-train.txt", out="1"
    )
    assert "3 documents" in succeeded(result).stdout
    assert documents_of(tmp_path / "1") == [["one", "two"], ["three"]]
    texts = (*separator, "--split", "train", "--config", "default")
    files = {"train.txt": texts_hub.files["Stories-train.txt"], "test.txt": b"a test"}
    with serving(Hub(files, repository="someone/stories")) as hub:
        succeeded(prepare_from(hub, tmp_path, *texts, out="2"))
    assert documents_of(tmp_path / "2") == documents_of(tmp_path / "1")


@pytest.mark.parametrize(
    ("revision", "option", "asked"),
    [
        ("v1.0", "", "v1.0"),
        ("v1.0", "v1.0", "v1.0"),
        ("refs/convert/parquet", "", "refs/convert/parquet"),
        ("refs%2Fpr%2F1", "", "refs/pr/1"),
        ("v1.0", "main", ""),
    ],
)
def test_the_revision_in_a_name_of_files_is_read(monkeypatch, revision, option, asked):
    seen = []

    def dataset_info(self, repository, *, revision):
        seen.append((repository, revision))
        raise ValueError("asked")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", dataset_info)
    message = "asked" if asked else "--revision main is another one; name one of them"
    with pytest.raises(UserError, match=message):
        find_source(f"hf://datasets/owner/name@{revision}/a/*.parquet", revision=option)
    assert seen == [("owner/name", asked)] * bool(asked)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("data/texts", "no such file or directory, and not the owner/name"),
        *((f"owner/a{suffix}", "no such file") for suffix in (".jsonl.gz", ".txt.zst", ".gz")),
        ("hf://datasets/name", "hf://datasets/name: wanted hf://datasets/owner/name/pattern"),
        ("hf://datasets/owner/name", "wanted hf://datasets/owner/name/pattern, or only owner/name"),
    ],
)
def test_a_mistyped_place_is_not_looked_up_on_the_hub(tmp_path, monkeypatch, source, message):
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    with pytest.raises(UserError, match=message):
        find_source(source)


def test_a_preparation_that_was_stopped_continues_at_its_place_on_the_hub(
    texts_hub, tmp_path, monkeypatch
):
    texts_hub.sha = "c" * 40
    last = "10BT/002_00000.parquet"
    monkeypatch.setattr(datasets.config, "STREAMING_READ_MAX_RETRIES", 1)
    texts_hub.faults = [Fault(last, times=-1, status=403)]
    with small_steps(5000):
        assert prepare_from(texts_hub, tmp_path, "--config", "sample-10BT").returncode == 2
        texts_hub.faults = []
        texts_hub.requests.clear()
        result = succeeded(prepare_from(texts_hub, tmp_path, "--config", "sample-10BT"))
    assert int(re.search(r"continuing after document (\d+)", result.stderr)[1]) >= 500
    train, validation = documents_of(tmp_path / "out")
    assert train + validation == [text for part in TEXTS for text in part]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--config", "nix"], 2, "BuilderConfig 'nix' not found"),
        (["--config", "sample-10BT", "--split", "nix"], 2, "has no split nix; .*--split: train"),
        (["--config", "sample-10BT", "--text-column", "body"], 2, "has no column 'body'.*: text"),
        (["--revision", "nix"], 2, "there is no such revision"),
        ("someone/else", 2, "there is no such repository"),
        ("someone/busy", 1, "check the network, then run the same command again"),
    ],
)
def test_what_the_hub_does_not_have_is_one_line(texts_hub, tmp_path, arguments, status, message):
    texts_hub.faults = [
        Fault("/someone/busy", times=-1, status=503),
        Fault("/revision/nix", status=404, headers={"X-Error-Code": "RevisionNotFound"}),
    ]
    source = arguments if isinstance(arguments, str) else ""
    result = prepare_from(texts_hub, tmp_path, *([] if source else arguments), source=source)
    assert result.returncode == status and result.stderr.count("\n") == 1, result.stderr
    assert re.search(message, result.stderr) and not list(tmp_path.glob("*out*"))


MARK = Path("/tmp") / f"code-of-a-dataset-was-run-{os.getpid()}"


class RunsCode:
    """A pickle of this runs a command when it is loaded."""

    def __reduce__(self):
        return os.system, (f"touch {MARK}",)


@pytest.mark.parametrize(
    "files",
    [
        {"texts.py": f"open({str(MARK)!r}, 'w')".encode(), "a.jsonl": json_lines(["a", "b"])},
        {"a.pkl": pickle.dumps(RunsCode())},
        {"a.pt": pickle.dumps(RunsCode())},
    ],
    ids=["script", "pickle", "checkpoint"],
)
def test_no_code_of_a_dataset_is_run(tmp_path, files):
    with serving(Hub(files, repository=f"someone/{next(iter(files))[:-3]}")) as hub:
        result = prepare_from(hub, tmp_path)
    assert result.returncode in (0, 2) and "Traceback" not in result.stderr
    assert not MARK.exists()


def test_only_the_two_token_files_are_downloaded_once_for_a_directory(tokens_hub, tmp_path):
    with used_in_this_process(tokens_hub, tmp_path / "home"), ThreadPoolExecutor(3) as pool:
        list(
            pool.map(
                lambda _: provide_dataset(  # as nodes that share the directory
                    tmp_path / "data", tokens_hub.repository
                ),
                range(3),
            )
        )
    assert [
        len(tokens_hub.downloads(name))
        for name in ("train.safetensors", "validation.safetensors", "README.md")
    ] == [1, 1, 0]
    assert tokens_hub.num_bytes == sum(
        len(tokens_hub.files[f"{split}.safetensors"]) for split in ("train", "validation")
    )


def test_a_broken_download_continues_where_it_broke(tmp_path):
    """huggingface_hub writes 10 MB at a time."""
    tokens = save({"tokens": np.arange(18 * 10**6, dtype=np.uint32).astype(np.uint16)})
    validation = save({"tokens": np.zeros(9, dtype=np.uint16)})
    files = {"train.safetensors": tokens, "validation.safetensors": validation}
    with serving(Hub(files)) as hub:
        hub.faults = [
            Fault("train.safetensors", cut_after=14 * 10**6),
            Fault("train.safetensors", cut_after=12 * 10**6),
        ]
        fetch(hub, tmp_path)
        starts = [
            int(part.removeprefix("bytes=").split("-")[0] or 0)
            for part in hub.downloads("train.safetensors")
        ]
    assert starts[0] == 0 and 10**7 <= starts[1] <= 14 * 10**6, starts
    assert starts[2] >= starts[1] + 10**7
    assert (tmp_path / "data" / "train.safetensors").read_bytes() == tokens


def test_partial_files_of_killed_downloads_are_removed(tokens_hub, tmp_path):
    folder = tmp_path / "data" / ".cache" / "huggingface" / "download"
    folder.mkdir(parents=True)
    (folder / "old.incomplete").write_bytes(b"half")
    os.utime(folder / "old.incomplete", (0, 0))
    (folder / "new.incomplete").write_bytes(b"half")  # another node may be writing it
    (folder / "gone.incomplete").symlink_to("nothing")  # as one that is finished meanwhile
    fetch(tokens_hub, tmp_path)
    assert {path.name for path in folder.glob("*.incomplete")} == {
        "gone.incomplete",
        "new.incomplete",
    }


BUSY = {"Retry-After": "0"}


@pytest.mark.parametrize(
    "fault",
    [
        Fault("/api/datasets", status=503),
        Fault("/api/datasets", status=500),
        Fault("/api/datasets", status=429, headers=BUSY),
        Fault("train.safetensors", status=502),
        Fault("train.safetensors", status=503, times=2),
        Fault("train.safetensors", status=429, headers=BUSY),
        Fault("train.safetensors", status=500, method="HEAD"),
    ],
)
def test_transient_errors_are_retried(tokens_hub, tmp_path, fault):
    tokens_hub.faults = [fault]
    fetch(tokens_hub, tmp_path)
    assert fault.times == 0
    assert (tmp_path / "data" / "train.safetensors").read_bytes() == tokens_hub.files[
        "train.safetensors"
    ]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            Fault("/api/datasets", times=-1, status=404, headers={"X-Error-Code": "RepoNotFound"}),
            "there is no such repository, or it is private: check the name, or set HF_TOKEN",
        ),
        (
            Fault("/api/datasets", times=-1, status=401),
            "there is no such repository, or it is private",
        ),
        (
            Fault("/api/datasets", times=-1, status=403, headers={"X-Error-Code": "GatedRepo"}),
            "you must accept its conditions on its web page first, then set HF_TOKEN",
        ),
        (
            Fault("/api/datasets", times=-1, status=503),
            "check the network, then run the same command",
        ),
        (Fault("train.safetensors", times=-1, status=503), "check the network, then run the same"),
        (Fault("/api/datasets", times=-1, status=429), "set HF_TOKEN, whose limits are higher, or"),
        (
            Fault("train.safetensors", times=-1, status=429, headers=BUSY),
            "set HF_TOKEN, whose limits are higher, or",
        ),
        (
            Fault("train.safetensors", times=-1, cut_after=1000),
            "check the network, then run the same",
        ),
        (
            Fault(
                "train.safetensors",
                times=-1,
                status=404,
                method="HEAD",
                headers={"X-Error-Code": "EntryNotFound"},
            ),
            "there is no such file",
        ),
    ],
)
def test_permanent_errors_are_one_line_that_says_what_to_do(tokens_hub, tmp_path, fault, message):
    tokens_hub.faults = [fault]
    with pytest.raises(UserError) as caught:
        fetch(tokens_hub, tmp_path)
    line = str(caught.value)
    assert caught.value.status == (1 if "run the same command again" in line else 2)
    assert "\n" not in line
    assert message in line and tokens_hub.repository in line
    assert not (tmp_path / "data" / "train.safetensors").exists()
    assert len(tokens_hub.requests) < 100


def test_what_is_not_here_is_bad_input_while_the_hub_is_switched_off(tmp_path, monkeypatch):
    """To start such a launch again would help nobody."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for action in (
        lambda: provide_dataset(tmp_path / "data", "owner/name"),
        lambda: load_model("owner/name", runs_dir=tmp_path),
    ):
        with pytest.raises(UserError, match="owner/name .*HF_HUB_OFFLINE .*: unset that") as caught:
            action()
        assert caught.value.status == BAD_INPUT


@pytest.mark.parametrize(
    ("said", "times", "outcome"),
    [
        ("CAS service error : ReqwestMiddleware Error", 2, "whole"),
        ("CAS service error : ReqwestMiddleware Error", 99, "check the network, then run the same"),
        (
            "IO Error: No space left on device (os error 28)",
            99,
            "No space left on device; make room",
        ),
    ],
)
def test_errors_of_hf_xet_are_retried_like_a_lost_connection(
    tokens_hub, tmp_path, monkeypatch, said, times, outcome
):
    failures, download = iter(range(times)), hub.hf_hub_download

    def failing(*arguments, **keywords):
        if next(failures, None) is not None:
            raise RuntimeError(f"Data processing error: {said}")
        return download(*arguments, **keywords)

    monkeypatch.setattr(hub, "hf_hub_download", failing)
    if outcome == "whole":
        fetch(tokens_hub, tmp_path)
        assert is_complete(tmp_path / "data")
    else:
        with pytest.raises(UserError, match=outcome) as caught:
            fetch(tokens_hub, tmp_path)
        assert caught.value.status == (4 if "space" in said else 1)


@pytest.mark.parametrize("size", ["4k", "100k"])
def test_a_full_disk_during_a_download_is_one_line(tokens_hub, tmp_path, size):
    (tmp_path / "data").mkdir()
    with small_disk(tmp_path / "data", size), pytest.raises(UserError) as caught:
        fetch(tokens_hub, tmp_path)
    assert caught.value.status == 4
    assert str(caught.value).startswith(
        f"{tmp_path / 'data'}: cannot be written: No space left on device; "
    )


def test_a_partly_downloaded_dataset_is_completed_later(tokens_hub, tmp_path):
    tokens_hub.faults = [
        Fault(
            "validation.safetensors",
            times=-1,
            status=404,
            method="HEAD",
            headers={"X-Error-Code": "EntryNotFound"},
        )
    ]
    with pytest.raises(UserError, match="validation.safetensors on the Hugging Face hub: there is"):
        fetch(tokens_hub, tmp_path)
    assert not is_complete(tmp_path / "data")
    tokens_hub.faults, tokens_hub.requests = [], []  # now the file exists
    fetch(tokens_hub, tmp_path)
    assert is_complete(tmp_path / "data")
    assert not tokens_hub.downloads("train.safetensors"), "a complete file was downloaded again"


# --- hostile sources and outputs: one line, exit status 2, and no dataset

LONGEST = 900  # characters of a message: a cause has at most 500
WHOLE = parquet()
LINES = b'{"text": "some text"}\n' * 20
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
SOURCES: dict[str, tuple[str, bytes]] = {
    "empty": ("a.parquet", b""),
    "empty JSON": ("a.jsonl", b""),
    "wildcards": ("x[1]/a.jsonl", LINES),
    "a footer longer than the file": ("a.parquet", WHOLE[:-8] + struct.pack("<I", 10**9) + b"PAR1"),
    "a footer of noise": ("a.parquet", WHOLE[:-600] + random.Random(0).randbytes(592) + WHOLE[-8:]),
    "cut in the middle": ("a.parquet", WHOLE[: len(WHOLE) // 2]),
    "pages of noise": ("a.parquet", WHOLE[:10] + b"\xff" * 400 + WHOLE[410:]),
    "a column of numbers": ("a.parquet", parquet([1, 2, 3])),
    "a column of lists": ("a.parquet", parquet([["a"], ["b"]])),
    "another column": ("a.parquet", parquet(name="t\x1b[31mext")),
    "an LFS pointer": ("a.parquet", POINTER),
    "an LFS pointer of JSON": ("a.jsonl", POINTER),
    "a page": ("a.parquet", b"<!DOCTYPE html><html>404</html>"),
    "deep": ("a.jsonl", LINES + b'{"text": ' + b"[" * 10**5),
    "a list": ("a.jsonl", LINES + b'["text"]\n'),
    "another key": ("a.jsonl", b'{"other": "x"}\n'),
    "noise": ("a.jsonl", random.Random(1).randbytes(10**5)),
    "cut": ("a.jsonl", LINES[:-10]),
    "UTF-16": ("a.jsonl", LINES.decode().encode("utf-16")),
    "a control character": ("a\x1b[31m.jsonl", b"{}\n"),
    "a new line": ("a\nb.jsonl", b"{}\n"),
    "no gzip": ("a.jsonl.gz", b"\x1f\x8b" + LINES),
    "half a gzip": ("a.jsonl.gz", gzip.compress(LINES)[:-12]),
    "half a zstandard": ("a.jsonl.zst", pyarrow.compress(LINES, "zstd", asbytes=True)[:-12]),
    "half a bz2": ("a.jsonl.bz2", bz2.compress(LINES)[:-12]),
    "half an xz": ("a.jsonl.xz", lzma.compress(LINES)[:-12]),
    "half an array": ("a.json", b'[{"text": "a"}, {"text": "b"'),
    "deep in an array": ("a.json", b'[{"text": "a"}, {"text": ' + b"[" * 10**5),
    "no rows": ("a.csv", b""),
    "a quote without end": ("a.csv", b'id,text\n1,a\n2,"b\n3,c\n'),
    "no archive": ("a.tar", LINES),
}
OUTPUTS = ["", "/proc/out", "/dev/null", "/dev/null/out", "x" * 300, "source", "a-file", "loop/out"]


def refused(folder, *arguments):
    """Run the command, which must fail and create nothing; return its error line."""
    before = {str(path) for path in folder.rglob("*")}
    result = prepare(*arguments, "--tokenizer", "bytes")
    assert result.returncode == 2, result.stdout + result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert "Traceback" not in result.stderr and len(line) <= LONGEST and line.isprintable()
    assert {str(path) for path in folder.rglob("*") if ".partial" not in str(path)} == before
    return line


@pytest.mark.parametrize("case", SOURCES)
def test_a_malformed_source(tmp_path, case):
    name, content = SOURCES[case]
    source = tmp_path / "source"
    (source / name).parent.mkdir(parents=True)
    (source / name).write_bytes(content)
    line = refused(tmp_path, str((source / name).parent), str(tmp_path / "out"))
    assert name.split("\x1b")[0].split("\n")[0].split("/")[0] in line
    assert line.endswith("cannot be read: is empty") == (content == b"")
    assert ("takes '*', '?' and '[' in the path" in line) == (case == "wildcards")
    assert ("Git LFS" in line) == ("LFS" in case)
    assert ("--encoding utf-16" in line) == (case == "UTF-16")


@pytest.mark.thorough  # unpacks 6 GB; of JSON as much as its parser would die of, without a line
@pytest.mark.parametrize("is_text", [False, True])
def test_a_file_that_unpacks_to_more_than_memory_is_read_in_pieces_or_one_line(tmp_path, is_text):
    path = tmp_path / ("a.txt.gz" if is_text else "a.jsonl.gz")
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"text": "')
        for _ in range(300 if is_text else 75):
            file.write(b"two words " * 2**21 if is_text else b"x y " * 2**22)
    command = [sys.executable, "prepare_dataset.py", path, tmp_path / "out"]
    if is_text:  # ends without its limit too
        assert peak_memory_of([*command, "--tokenizer", "bytes", "--max-documents", "2"]) < 512
    else:
        line = run_command(*map(str, command), "--tokenizer", "bytes").stderr
        assert "a.jsonl.gz: reading it needs more than 4 GiB of memory" in line


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda output: repr(output)[:20])
def test_an_output_that_cannot_be_created(tmp_path, output):
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.jsonl").write_bytes(LINES)
    (tmp_path / "a-file").write_bytes(b"mine")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refused(tmp_path, str(source), str(tmp_path / output) if output else "")
    assert (tmp_path / "a-file").read_bytes() == b"mine"
    assert os.listdir(source) == ["a.jsonl"]


@pytest.mark.parametrize("seed", range(20))
def test_real_parquet_with_random_damage(tmp_path, seed):
    """The damage is an error, or does not change the text: never a traceback, crash or hang."""
    rng, content = random.Random(seed), bytearray(parquet(use_dictionary=False))
    for _ in range(rng.randrange(1, 6)):
        content[rng.randrange(len(content))] = rng.randrange(256)
    (tmp_path / "a.parquet").write_bytes(content)
    result = prepare(str(tmp_path / "a.parquet"), str(tmp_path / "out"), "--tokenizer", "bytes")
    assert result.returncode in (0, 2) and "Traceback" not in result.stderr
    assert (result.returncode == 0) == (tmp_path / "out/train.safetensors").exists()
