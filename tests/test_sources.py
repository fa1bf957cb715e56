"""Sources of documents: finding, choosing and reading files, the hub, and hostile input."""

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import os
import random
import re
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import DatasetCard
from safetensors.numpy import save

from basics.errors import BAD_INPUT, UserError
from preparation import choosing, cutting, hub, reading
from preparation.choosing import SourceOptions, config_patterns, split_of, split_of_files, subset_of
from preparation.cutting import BadShard, cut_document, split_documents
from preparation.encoding import encode_task
from preparation.ensure_dataset import is_complete, provide_dataset
from preparation.journal import Journal
from preparation.pipeline import prepare_dataset
from preparation.reading import Reading, Task, csv_tasks, json_tasks, parquet_tasks, text_tasks
from preparation.sources import python_stdlib
from preparation.unpacking import PACKED_BYTES
from tests.support.hub_server import (
    Fault,
    Hub,
    serving,
    tokens_hub_fixture,  # noqa: F401
    used_in_this_process,
)
from tests.support.optional import example, given, settings, st
from tests.support.preparation import (
    BYTES,
    DOCUMENTS,
    decoded,
    find_documents,
    metadata_of,
    prepare,
    tokens_in,
    write_parquet,
    write_source,
)
from tests.support.workplace import PROJECT_DIR, small_disk, succeeded
from tokens.tokenizer import load_tokenizer
from trainer.models import load_model

PLAIN = SourceOptions("files")

# --- finding files


def test_a_source_can_be_a_pattern_or_a_file(tmp_path):
    source_dir = write_source("jsonl", tmp_path / "source")
    assert names_in(find_documents(f"{source_dir}/[ab].jsonl")) == ["a.jsonl", "b.jsonl"]
    assert names_in(find_documents(f"{tmp_path}/*/b*")) == ["source/b.jsonl"]
    prepare_dataset(find_documents(source_dir / "a.jsonl"), tmp_path / "out", BYTES)
    assert decoded(tmp_path / "out" / "train.safetensors") == DOCUMENTS[:50][:-1]


def names_in(source):
    return [shard.name for shard in source.shards]


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
        (folder / "x.txt").write_text("text " + folder.name)
    (source / "inner").symlink_to("a/b")
    (source / "outer").symlink_to(tmp_path / "elsewhere")
    (source / "a/loop").symlink_to("..")
    prepare_dataset(find_documents(source), tmp_path / "out", BYTES)
    assert [
        *decoded(tmp_path / "out/train.safetensors"),
        *decoded(tmp_path / "out/validation.safetensors"),
    ] == ["text b"] * 2
    warning = capsys.readouterr().err
    assert f"{source}/outer: leads out of the directory" in warning and "(1 such links)" in warning


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: None, "contains no documents; wanted .jsonl, .ndj"),
        (lambda d: (d / "one.jsonl").write_text('{"text": "x"}'), "1 document found; wanted at"),
        (lambda d: (d / "one.txt").write_text(""), "1 document found; wanted at least 2"),
        (
            lambda d: [(d / "a.txt").write_text("a"), (d / "b.txt").write_text("b", "utf-16")],
            r"1 document found; .*\(--validation-fraction\); left out 1 file: .*/b.txt: is UTF-16",
        ),
        (
            lambda d: (d / "a.txt").write_text("a", "utf-16"),
            r"0 documents found; .*\(--validation-fraction\); left out 1 file: .*/a.txt: is UTF-16",
        ),
        (
            lambda d: (d / "a.jsonl").write_text('{"text": null}\n' * 3),
            "no text: all of its 3 docu",
        ),
        (
            lambda d: [(d / "a.jsonl").write_text("{}"), (d / "b.parquet").write_bytes(b"")],
            "contains JSON lines and parquet; choose on",
        ),
    ],
)
def test_sources_that_cannot_be_used(tmp_path, make, message):
    source_dir = tmp_path / "source"
    source_dir.mkdir()
    make(source_dir)
    with pytest.raises(UserError, match=message) as caught:
        prepare_dataset(find_documents(source_dir), tmp_path / "out", BYTES)
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["source"], "files that were replaced could not be read"


def test_a_source_without_enough_documents_can_be_repaired(tmp_path):
    """Also if the downloads keep the directory of the preparation."""
    folder, out = tmp_path / "source", tmp_path / "out"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    (folder / "b.txt").write_text("b", "utf-16")
    source = find_documents(folder)
    with pytest.raises(UserError, match="1 document found"):
        prepare_dataset(replace(source, raw_dir=Journal(out).raw_dir), out, BYTES)
    (folder / "b.txt").write_text("repaired")
    prepare_dataset(find_documents(folder), out, BYTES)
    assert decoded(out / "validation.safetensors") == ["repaired"]


def test_the_suffixes_of_documents_are_those_in_the_documentation_and_the_help():
    for text in ((PROJECT_DIR / "docs/data.md").read_text(), prepare("--help").stdout):
        parts = {part for suffix in choosing.SUFFIXES for part in suffix[1:].split(".")}
        assert not [part for part in parts if f".{part}" not in text]


def test_the_documents_of_the_standard_library_are_always_the_same():
    first, second = (python_stdlib().shards[0] for _ in range(2))
    assert first.identity == second.identity
    text = "".join(documents(first.tasks("any")))
    assert len(text) > 5_000_000 and "def " in text
    assert 'The "if" statement' in text, "the reference documentation is missing"


# --- choosing: --subset and --split

NAMES = ["data/en/a", "data/de/a", "sample/10BT/a", "sample/10BT/b"]
CONFIGS = [
    {"config_name": "english", "data_files": "data/en/*"},
    "noise",
    {"config_name": "germanic", "data_dir": "data/de"},
    {"config_name": "odd", "data_files": 7},
    {"config_name": "10BT", "data_files": [["nothing/*", ["nothing"]], 7]},
]
# The splits of files whose names say none.
IN_CARD = [
    {
        "config_name": "english",
        "data_files": [
            {"split": "train", "path": ["en/a", "en/no"]},
            {"split": "test", "path": "en/b"},
        ],
    },
    {
        "config_name": "german",
        "data_dir": "de",
        "data_files": [
            {"split": "train", "path": "a"},
            {"split": "test", "path": "b"},
            {"split": "own", "path": "[c]"},
        ],
    },
]
LANGUAGES = ["en/a", "en/b", "de/a", "de/b", "de/c"]


def chosen(names, subset="", split="", configs=()):
    """Return the files that a hub dataset with this card has for --subset and --split."""
    options, patterns = (
        SourceOptions("x", subset=subset, split=split),
        config_patterns({"configs": configs}),
    )
    return split_of_files(subset_of(names, options, "here", patterns), options, "here", patterns)


@pytest.mark.parametrize(
    ("names", "options", "wanted"),
    [
        (NAMES, {}, NAMES),
        (NAMES, {"subset": "data"}, NAMES[:2]),
        (NAMES, {"subset": "data/en"}, NAMES[:1]),
        (NAMES, {"subset": "sample/*"}, NAMES[2:]),
        (NAMES, {"subset": "*/??"}, NAMES[:2]),
        (NAMES, {"subset": "data/[d]*"}, NAMES[1:2]),
        (NAMES, {"subset": "*BT", "configs": CONFIGS}, NAMES[2:]),  # the directory, not the config
        (NAMES, {"subset": "english", "configs": CONFIGS}, NAMES[:1]),
        (NAMES, {"subset": "*manic", "configs": CONFIGS}, NAMES[1:2]),
        (NAMES, {"configs": "noise"}, NAMES),
        (["train-0", "test-0"], {"split": "test"}, ["test-0"]),
        (["train", "valid"], {"split": "dev"}, ["valid"]),
        (["x/train-0", "x/test-0"], {"split": "*-0"}, ["x/train-0", "x/test-0"]),
        (["x/train-0", "y/train-1"], {"split": "train-1"}, ["y/train-1"]),
        (LANGUAGES, {"configs": IN_CARD}, ["en/a", "de/a"]),
        (LANGUAGES, {"configs": IN_CARD, "split": "test"}, ["en/b", "de/b"]),
        (LANGUAGES, {"configs": IN_CARD, "split": "own"}, ["de/c"]),
        (LANGUAGES, {"configs": IN_CARD, "subset": "english"}, ["en/a"]),
        (LANGUAGES, {"configs": IN_CARD, "subset": "en"}, ["en/a"]),
        (LANGUAGES, {"configs": IN_CARD, "subset": "german", "split": "test"}, ["de/b"]),
        (["en/test-named"], {"configs": IN_CARD, "split": "test"}, ["en/test-named"]),
    ],
)
def test_subset_and_split_are_found_by_names_and_by_the_card(names, options, wanted):
    assert chosen(names, **options) == wanted


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("data/train-00000-of-00004.parquet", "train"),
        ("test.jsonl", "test"),
        ("wiki_valid.jsonl", "validation"),
        ("dev/0.parquet", "validation"),
        ("TRAIN/0.parquet", "train"),
        ("test/train-0.parquet", "train"),
        ("train00.jsonl", "train"),
        ("contest.jsonl", ""),
        ("trains/a.jsonl", ""),
        ("latest-0.parquet", ""),
        ("eval_0.jsonl", "test"),
    ],
)
def test_the_split_that_a_name_says(path, split):
    assert split_of(path) == split


@pytest.mark.parametrize(
    ("names", "wanted", "line"),
    [
        (
            ["train-0", "train-1", "test-0"],
            ["train-0", "train-1"],
            "train (2 files), leaving out test (1 file); --split chooses others",
        ),
        (["train", "other", "dev"], ["train"], "leaving out validation (1 file), other (1 file)"),
        (["a", "b", "test"], ["a", "b"], "taking other (2 files), leaving out test (1 file)"),
        (["test-0", "test-1"], ["test-0", "test-1"], "taking test (2 files)"),
        (["a"], ["a"], ""),
    ],
)
def test_without_split_train_is_taken_and_a_line_says_what_is_left_out(names, wanted, line, capsys):
    assert chosen(names) == wanted
    printed = capsys.readouterr().err
    assert line in printed and printed.count("\n") == bool(line)


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (
            NAMES,
            {"subset": "fr"},
            "^here: --subset fr matches no directory; there are data, data/de,",
        ),
        (["dev", "test"], {}, "has files of test and validation, none of train; choose"),
        (["train-0", "a"], {"split": "test"}, r"--split test matches no file; there are train \(1"),
    ],
)
def test_what_matches_nothing_is_an_error_that_lists_what_there_is(names, options, message):
    with pytest.raises(UserError, match=message):
        chosen(names, **options)


def test_a_local_directory_has_subsets_and_splits(tmp_path, capsys):
    for name in ("en/train-0", "en/test-0", "de/train-0"):
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}\n")
    assert names_in(find_documents(tmp_path)) == ["de/train-0.jsonl", "en/train-0.jsonl"]
    assert "leaving out test (1 file)" in capsys.readouterr().err
    some = find_documents(tmp_path, subset="e*", split="test")
    assert names_in(some) == ["en/test-0.jsonl"]
    assert some.request.source == f"{tmp_path} e* split test"
    pattern = find_documents(f"{tmp_path}/en/*.jsonl")  # it names the files itself
    assert names_in(pattern) == ["test-0.jsonl", "train-0.jsonl"]
    with pytest.raises(UserError, match="--subset needs a directory"):
        find_documents(f"{tmp_path}/en/*.jsonl", subset="en")
    for name in ("train", "test"):  # text files are not taken for splits
        (tmp_path / f"en/{name}.txt").write_text("text")
    texts = f"{tmp_path}/en/*.txt"
    assert find_documents(texts).shards[0].num_files == 2
    assert find_documents(texts, split="test").shards[0].num_files == 1


def write_names(folder, *names):
    """Write files that hold as many documents as their names say: two texts, or rows."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            pyarrow.parquet.write_table(pyarrow.table({"text": [name, "b"]}), path)
        else:
            path.write_text(
                {"jsonl": '{"text": "a"}\n' * 2, "json": '[{"text": "a"}]', "csv": "text\na\n"}.get(
                    name.split(".")[-1], name
                )
            )


@pytest.mark.parametrize(
    ("names", "line", "taken"),
    [
        (
            ["a.jsonl", "b.txt", "c/d.txt", "e.pdf", "README.md", ".gitattributes"],
            "taking 1 .jsonl, leaving out 2 .txt, 1 .pdf; the pattern 'here/**/*' as SOURCE takes"
            " all",
            ["a.jsonl"],
        ),
        (
            ["a.parquet", "infos.json", "x.csv"],
            "taking 1 .parquet, leaving out 1 .json, 1 .csv; the p",
            ["a.parquet"],
        ),
        (["a.csv", "x.json"], "taking 1 .csv, leaving out 1 .json; ", ["a.csv"]),
        (["a.json", "x.txt"], "taking 1 .json, leaving out 1 .txt; ", ["a.json"]),
        (
            ["a.txt", "b.md", "x"],
            "taking 1 .txt, leaving out 1 .md, 1 other; the pattern '",
            ["a.txt"],
        ),
        (["a.txt", "b.html"], "taking 1 .txt, leaving out 1 .html\n", ["a.txt"]),
        (["a.txt", "b.txt", "README.md"], "", ["a.txt"]),
        (["a.ndjson", "b.jsonl"], "", ["a.ndjson", "b.jsonl"]),
    ],
)
def test_a_line_says_what_is_left_out_of_a_directory_and_how_to_take_it(
    tmp_path, monkeypatch, names, line, taken, capsys
):
    monkeypatch.chdir(tmp_path)
    write_names(tmp_path / "here", *names)
    assert names_in(find_documents("here")) == taken
    printed = capsys.readouterr().err
    assert line in printed and printed.count("\n") == bool(line)
    if "SOURCE" in line:
        pattern = printed.split("'")[1]
        assert names_in(find_documents(pattern)) == sorted(
            name for name in names if not name.endswith((".pdf", ".gitattributes", "d.txt"))
        )
        assert f"{pattern}: taking" in capsys.readouterr().err


def test_split_also_chooses_the_kind_of_files(tmp_path, capsys):
    write_names(tmp_path, "a.parquet", "b.jsonl", "c.txt", "d.txt")
    with pytest.raises(UserError, match="JSON lines and parquet; .*--split '.*.parquet'"):
        find_documents(tmp_path)
    assert names_in(find_documents(tmp_path, split="*.parquet")) == ["a.parquet"]
    assert find_documents(tmp_path, split="*.txt").shards[0].num_files == 2
    assert capsys.readouterr().err == ""


def test_files_of_several_kinds_that_a_pattern_names_are_one_dataset(tmp_path):
    write_names(tmp_path / "source", "a.parquet", "b.txt", "c.json", "d.txt", "e.txt", "f.csv")
    source = find_documents(f"{tmp_path}/source/*")
    assert [(shard.name, shard.num_files) for shard in source.shards] == [
        ("a.parquet", 1),
        ("b.txt", 1),
        ("c.json", 1),
        ("d.txt", 2),
        ("f.csv", 1),
    ]
    prepare_dataset(source, tmp_path / "out", BYTES)
    assert decoded(tmp_path / "out/train.safetensors") == [
        "a.parquet",
        "b",
        "b.txt",
        "a",
        "d.txt",
        "e.txt",
    ]


# --- reading: splitting files into tasks loses no text, and keeps the tokens

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


def documents(tasks):
    """Join the pieces of tasks to documents."""
    found, parts = [], []
    for task in tasks:
        for text, ends_document, _ in task.read(Reading("any", [])):
            parts.append(text)
            if ends_document:
                found.append("".join(parts))
                parts = []
    assert not parts, "a document has no end"
    return found


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
            assert "".join(piece.text for piece in pieces) == text
            assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
            ids = [
                token
                for piece in pieces
                for token in tokenizer.encode(piece.text, disallowed_special=())
            ]
            # Forced cuts may change the tokens, but keep the text.
            assert cuts == "any" or ids == tokenizer.encode(text, disallowed_special=())
            assert tokenizer.decode(ids) == text


def write_packed(folder, name, content):
    """Write a file as it is, and packed in every way."""
    (folder / name).write_bytes(content)
    for packed in choosing.PACKED:
        (folder / f"{name}{packed}").write_bytes(PACK[packed](content))


PACK = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pyarrow.compress(content, "zstd", asbytes=True),
}


@settings(max_examples=25)
@given(
    texts=st.lists(st.one_of(st.none(), TEXT), min_size=1, max_size=20),
    task_bytes=st.integers(4, 200),
    group_rows=st.integers(1, 10),
    is_whole=st.booleans(),
)
def test_the_documents_of_files_do_not_depend_on_the_size_of_tasks(
    tmp_path_factory, texts, task_bytes, group_rows, is_whole
):
    folder = tmp_path_factory.mktemp("files")
    wanted = [text or "" for text in texts]
    lines = "".join(json.dumps({"text": text}) + "\n\n" for text in texts).encode()
    rows = [{"other": [1], "text": text} for text in texts]
    table = io.StringIO()
    csv.writer(table).writerows([["id", "text"], *([i, text] for i, text in enumerate(texts))])
    marked = "\r\n<|sep|>\n".join(f"({text})" for text in wanted)
    for name, content in (
        ("jsonl", lines),
        ("array", json.dumps(rows, indent=1).encode()),
        ("line", json.dumps(rows, ensure_ascii=False).encode()),
        ("csv", table.getvalue().encode()),
        ("txt", marked.encode()),
    ):
        write_packed(folder, name, content)
    table = pyarrow.table(
        {"id": list(range(len(texts))), "text": pyarrow.array(texts, pyarrow.string())}
    )
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=group_rows)
    paths = [folder / f"{i:02}.txt" for i in range(len(texts))]
    for path, text in zip(paths, wanted, strict=True):
        path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "TASK_BYTES", task_bytes)
        patch.setattr(reading, "WHOLE_BYTES", 10**6 if is_whole else task_bytes)
        patch.setattr(cutting, "LARGE_DOCUMENT", 20)
        separated = SourceOptions("x", document_separator="<|sep|>")
        for packed in ("", *choosing.PACKED):
            for name in ("jsonl", "array", "line"):
                assert documents(json_tasks(folder / (name + packed), PLAIN, "any")) == wanted
            assert documents(csv_tasks(folder / f"csv{packed}", PLAIN, "any")) == wanted
            assert documents(text_tasks([folder / f"txt{packed}"], folder, separated, "any")) == [
                f"({text})" for text in wanted
            ]
        assert documents(parquet_tasks(folder / "a.parquet", PLAIN, "any")) == wanted
        assert documents(text_tasks(paths, folder, PLAIN, "any")) == wanted


@pytest.mark.parametrize(
    "kind",
    [
        pyarrow.string(),
        pyarrow.large_string(),
        pyarrow.string_view(),
        pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
    ],
)
def test_columns_of_every_text_type(tmp_path, kind):
    column = pyarrow.array(["naïve", None, "b" * 10], pyarrow.string()).cast(kind)
    pyarrow.parquet.write_table(
        pyarrow.table({"text": column, "no": [None] * 3}), tmp_path / "a.parquet"
    )
    path = tmp_path / "a.parquet"
    assert documents(parquet_tasks(path, PLAIN, "any")) == ["naïve", "", "b" * 10]
    assert documents(parquet_tasks(path, SourceOptions("x", text_column="no"), "any")) == [""] * 3
    with pytest.raises(UserError, match="has no column 'body'; name one of its columns .*: text"):
        list(parquet_tasks(path, SourceOptions("x", text_column="body"), "any"))


@pytest.mark.parametrize("num_zeros", [8, 2 * PACKED_BYTES, 2 * PACKED_BYTES + 8])
def test_packed_files_may_have_several_parts(tmp_path, num_zeros):
    lines = [json_lines([text]) for text in ("a", "b")]
    for packed, pack in PACK.items():
        padding = bytes(num_zeros) if packed == ".xz" else b""  # as the format allows
        path = tmp_path / f"a.jsonl{packed}"
        path.write_bytes(pack(lines[0]) + padding + pack(lines[1]) + padding)
        assert documents(json_tasks(path, PLAIN, "any")) == ["a", "b"]


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


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_a_text_can_be_inside_of_another_column(tmp_path, kind):
    rows = [
        {"a": {"b": "one", "c": {"d": "two"}}, "a.x": "three"},
        {"a": None, "a.x": None},
        {"a": {"b": None, "c": None}, "a.x": ""},
    ]
    path = tmp_path / f"x.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        rows[1]["a"] = {"b": None, "c": {"d": None}}  # as a table has it
        rows[2]["a"]["c"] = {"d": None}
        path.write_text(json.dumps(rows) if kind == "json" else "\n".join(map(json.dumps, rows)))
    for column, texts in (
        ("a.b", ["one", "", ""]),
        ("a.c.d", ["two", "", ""]),
        ("a.x", ["three", "", ""]),
    ):
        (shard,) = find_documents(path, text_column=column).shards
        assert documents(shard.tasks("any")) == texts
    for column in ("a.y", "a", "a.b.c"):
        (shard,) = find_documents(path, text_column=column).shards
        with pytest.raises(BadShard, match=f"no column '{column}'|with a text in \"{column}\""):
            list(documents(shard.tasks("any")))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_two_columns_of_one_name_are_one_line(tmp_path, kind):
    path = tmp_path / f"x.{kind}"
    if kind == "csv":
        path.write_text("text,text\na,b\nc,d\n")
    else:
        pyarrow.parquet.write_table(
            pyarrow.Table.from_arrays(
                [pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"]
            ),
            path,
        )
    result = prepare(str(path), str(tmp_path / "out"), "--tokenizer", "bytes")
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert f"x.{kind}: has 2 columns 'text'; rename all but one of them" in result.stderr


def test_other_keys_of_a_row_may_hold_anything(tmp_path):
    row = {"id": 10**5000, "n": [1e400, -3], "text": "a"}
    old = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        line = json.dumps(row)
    finally:
        sys.set_int_max_str_digits(old)
    (tmp_path / "a.jsonl").write_text(f"{line}\n{line}\n")
    (tmp_path / "b.json").write_text(f"[{line}, {line}]")
    for name in ("a.jsonl", "b.json"):
        assert documents(json_tasks(tmp_path / name, PLAIN, "any")) == ["a", "a"]


@pytest.mark.parametrize(
    ("encoding", "suffix"),
    [
        *itertools.product(["cp1252", "utf-16", "shift_jis"], ["jsonl", "json", "csv", "txt"]),
        ("utf-16-le", "jsonl.xz"),
        ("utf-16", "txt.gz"),
    ],
)
def test_files_of_another_encoding(tmp_path, encoding, suffix):
    text = "日本 x, 'y'" if encoding == "shift_jis" else "naïve, 'é'"
    rows = [{"id": 1, "text": text}] * 3
    content = {
        "jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
        "json": json.dumps(rows, ensure_ascii=False, indent=1),
        "txt": text,
        "csv": "id,text\n" + f'1,"{text}"\n' * 3,
    }[suffix.split(".")[0]].encode(encoding)
    pack = PACK.get(f".{suffix.split('.')[-1]}", bytes)
    for number in range(2):
        (tmp_path / f"{number}.{suffix}").write_bytes(pack(content))
    arguments = (str(tmp_path), str(tmp_path / "out"), "--tokenizer", "bytes")
    if encoding == "utf-16":  # recognised by its byte order mark
        assert "is UTF-16; wanted UTF-8, or --encoding utf-16" in prepare(*arguments).stderr
    succeeded(prepare(*arguments, "--encoding", encoding))
    found = [
        document
        for split in ("train", "validation")
        for document in decoded(tmp_path / f"out/{split}.safetensors")
    ]
    assert found == [text] * (2 if "txt" in suffix else 6)
    assert "num_replaced_characters" not in metadata_of(tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--encoding", "klingon"],
            "--encoding klingon: is no encoding that Python knows; wanted one",
        ),
        (["--encoding", "hex"], "--encoding hex: is no encoding"),
        (["--encoding", "utf-16"], "--encoding is not for parquet files, whose text is UTF-8"),
        (
            ["--document-separator", "x"],
            "--document-separator is for .txt files; these are parquet",
        ),
    ],
)
def test_options_that_do_not_fit_the_files_are_refused(tmp_path, arguments, message):
    folder = write_parquet(tmp_path / "source", ["a", "b"])
    assert message in refused(tmp_path, str(folder), str(tmp_path / "out"), *arguments)


@pytest.mark.parametrize("other", ["small", "large " * 2**17])
def test_bytes_that_are_not_utf8_are_replaced_in_every_format(tmp_path, other):
    broken = pyarrow.array([b"a\xffb", other.encode()], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": broken}), tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_bytes(b"a\xffb")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a\xffb"}\n{"text": "half \\ud800 pair"}')
    assert documents(parquet_tasks(tmp_path / "a.parquet", PLAIN, "any")) == ["a\ufffdb", other]
    assert documents(text_tasks([tmp_path / "a.txt"], tmp_path, PLAIN, "any")) == ["a\ufffdb"]
    assert documents(json_tasks(tmp_path / "a.jsonl", PLAIN, "any")) == [
        "a\ufffdb",
        "half \ufffd pair",
    ]
    (tmp_path / "a.json").write_bytes(b'[{"text": "a\xffb", "other": "\xff"}, {"text": "\\udcff"}]')
    (tmp_path / "a.csv").write_bytes(b'text,other\n"a\xffb",\xff\n"",""\n')
    assert documents(json_tasks(tmp_path / "a.json", PLAIN, "any")) == ["a\ufffdb", "\ufffd"]
    assert documents(csv_tasks(tmp_path / "a.csv", PLAIN, "any")) == ["a\ufffdb", ""]


@pytest.mark.parametrize("character", [*map(str.encode, [" ", "\n", "x", "🎉", "中"]), b"\x80"])
def test_a_long_run_of_one_character_is_encoded(character):
    data = character * 600_000 + b"a"  # more than the largest piece, 2 * LARGE_DOCUMENT
    text = data.decode("utf-8", "replace")
    task = Task(lambda reading: cut_document([data], reading.cuts, "text"), 1, 1)
    encoded = encode_task(task, load_tokenizer("gpt2"))
    assert load_tokenizer("gpt2").decode(encoded.tokens[:-1].tolist()) == text


@pytest.mark.parametrize("whole_bytes", [4, 10**6])
def test_a_byte_order_mark_is_no_text_and_capital_suffixes_are_accepted(
    tmp_path, monkeypatch, whole_bytes
):
    monkeypatch.setattr(reading, "WHOLE_BYTES", whole_bytes)
    lines = "\ufeff".encode() + b'{"text": "a"}\n{"text": "b"}\n'
    (tmp_path / "A.JSONL.GZ").write_bytes(gzip.compress(lines))
    (tmp_path / "B.JSONL").write_bytes(lines)
    for shard in find_documents(tmp_path).shards:
        assert documents(shard.tasks("any")) == ["a", "b"]
    (tmp_path / "a.txt").write_bytes("\ufeffnaïve".encode())
    assert documents(text_tasks([tmp_path / "a.txt"], tmp_path, PLAIN, "any")) == ["naïve"]


# --- the hub: the real client, with a local hub that fails in many ways

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
    files["README.md"] = b"---\nlicense: odc-by\n---\n"
    with serving(Hub(files, card={"license": "odc-by", "language": ["en"]})) as texts_hub:
        yield texts_hub


@pytest.fixture
def lines_hub():
    """A dataset of three JSON lines files, one of them compressed."""
    lines = list(map(json_lines, TEXTS))
    files = {"000.jsonl": lines[0], "001.json.gz": gzip.compress(lines[1]), "002.jsonl": lines[2]}
    with serving(Hub(files)) as lines_hub:
        yield lines_hub


def prepare_from(hub, tmp_path, *arguments, repository="", out="out"):
    """Prepare a dataset of documents on the hub, in this process."""
    with used_in_this_process(hub, tmp_path / "home"):
        return prepare(
            repository or hub.repository, str(tmp_path / out), "--tokenizer", "bytes", *arguments
        )


def fetch(hub, tmp_path):
    """Download a dataset of tokens, in this process."""
    with used_in_this_process(hub, tmp_path / "home"):
        provide_dataset(tmp_path / "data", hub.repository)


def assert_is_whole(tmp_path):
    """Check the tokens in tmp_path/out, and that nothing else is left."""
    texts = [text for part in TEXTS for text in part]
    wanted = [token for text in texts for token in [*text.encode(), 256]]
    assert np.concatenate([*tokens_in(tmp_path / "out").values()]).tolist() == wanted
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md",
        "train.safetensors",
        "validation.safetensors",
    ]
    assert not list(tmp_path.glob(".*"))


def test_a_subset_is_downloaded_shard_by_shard_and_deleted(texts_hub, tmp_path):
    result = succeeded(prepare_from(texts_hub, tmp_path, "--subset", "sample/10BT"))
    assert "downloading sample/10BT/000_00000.parquet, 0.00 GB" in result.stderr
    assert_is_whole(tmp_path)
    assert [len(texts_hub.downloads(f"10BT/00{i}_00000.parquet")) for i in range(3)] == [1, 1, 1]
    metadata = metadata_of(tmp_path / "out")
    assert metadata["source"] == "someone/texts sample/10BT"
    assert metadata["revision"] == texts_hub.sha
    card = DatasetCard.load(tmp_path / "out" / "README.md")
    assert card.data.license == "odc-by" and card.data.to_dict()["source_datasets"] == [
        "someone/texts"
    ]
    assert texts_hub.sha in card.text


def test_raw_files_can_be_kept_and_only_needed_shards_are_downloaded(texts_hub, tmp_path):
    succeeded(
        prepare_from(
            texts_hub,
            tmp_path,
            "--subset",
            "sample/10BT/",  # as shells complete
            "--keep-raw",
            str(tmp_path / "raw"),
            "--max-documents",
            "301",
        )
    )
    names = [f"sample/10BT/{i:03}_00000.parquet" for i in range(2)]
    assert all((tmp_path / "raw" / name).read_bytes() == texts_hub.files[name] for name in names)
    assert not texts_hub.downloads("002_00000.parquet")


@pytest.mark.parametrize("name", ["../outside.parquet", "/etc/x.parquet"])
def test_a_file_outside_of_its_repository_is_refused(texts_hub, tmp_path, name):
    texts_hub.files[name] = b""
    result = prepare_from(texts_hub, tmp_path)
    assert result.returncode == 2 and "is no name inside a repository" in result.stderr


@pytest.mark.parametrize(
    ("card", "licence", "languages"),
    [
        ({"license": ["mit", "cc0-1.0"], "language": ["en", False]}, ["mit", "cc0-1.0"], ["en"]),
        ({"license": ["mit"], "language": "de"}, "mit", ["de"]),
        ({"license": {"name": "own"}, "language": 7}, "{'name': 'own'}", ["7"]),
        ({"license": [], "language": None}, "unknown", ["en"]),
    ],
)
def test_a_card_may_list_licences_and_name_them_oddly(
    lines_hub, tmp_path, card, licence, languages
):
    lines_hub.card = card
    succeeded(prepare_from(lines_hub, tmp_path, "--max-documents", "9"))
    found = DatasetCard.load(tmp_path / "out/README.md").data
    assert (found.license, found.language) == (licence, languages)


def test_on_the_hub_train_is_taken_and_another_split_can_be_chosen(tmp_path):
    files = {
        f"{folder}/{split}-00000-of-00001.jsonl": json_lines(
            f"{folder} {split} {i}" for i in range(9)
        )
        for folder in ("en", "de", "fr")
        for split in ("train", "test")
    }
    card = {"configs": [{"config_name": "germanic", "data_files": ["en/*", "de/*"]}]}
    with serving(Hub(files, card=card)) as hub:
        result = succeeded(prepare_from(hub, tmp_path, "--subset", "[ef]*"))
        assert "taking train (2 files), leaving out test (2 files); --split cho" in result.stderr
        assert "18 documents" in result.stdout
        assert not hub.downloads("test-00000-of-00001.jsonl")
        hub.requests.clear()
        result = succeeded(
            prepare_from(hub, tmp_path, "--subset", "germanic", "--split", "test", out="1")
        )
        assert "18 documents" in result.stdout and "taking" not in result.stderr
        assert {path for _, path, _ in hub.requests if "/resolve/" in path} == {
            f"/datasets/{hub.repository}/resolve/{hub.sha}/{folder}/test-00000-of-00001.jsonl"
            for folder in ("en", "de")
        }


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_wrong_text_column_does_not_cost_one_download_in_a_hundred(tmp_path, kind):
    content = parquet(["a"] * 9) if kind == "parquet" else json_lines(["a"] * 9)
    with serving(Hub({f"{i:03}.{kind}": content for i in range(400)})) as hub:
        result = prepare_from(hub, tmp_path, "--text-column", "body")
        assert result.returncode == 2 and ": 1; replace them, or skip" in result.stderr
        assert sum(len(hub.downloads(name)) for name in hub.files) <= 2  # one is fetched ahead


def test_text_files_of_the_hub_are_taken_where_split_names_them(tmp_path):
    """As those of TinyStories, whose files hold many documents each."""
    files = {
        "data/train-0.parquet": parquet(["row"] * 9),
        "README.md": b"a card",
        "Stories-train.txt": b"one\n<|endoftext|>\ntwo\n<|endoftext|>\nthree\n<|endoftext|>\n",
    }
    with serving(Hub(files)) as hub:
        result = succeeded(prepare_from(hub, tmp_path))
        assert "9 documents" in result.stdout
        assert "leaving out 1 .txt; --split '*.txt' takes those" in result.stderr
        result = succeeded(
            prepare_from(
                hub, tmp_path, "--split", "*.txt", "--document-separator", "<|endoftext|>", out="1"
            )
        )
        assert "3 documents" in result.stdout and result.stderr.count("\n") == 1  # the download


def test_a_preparation_that_was_stopped_continues_with_the_commit_that_it_had(lines_hub, tmp_path):
    *first, last = sorted(lines_hub.files)
    lines_hub.sha, lines_hub.faults = "a" * 40, [Fault(last, times=-1, status=403)]
    assert prepare_from(lines_hub, tmp_path).returncode == 2
    lines_hub.sha, lines_hub.faults = "b" * 40, []
    newer = prepare_from(lines_hub, tmp_path)
    assert newer.returncode == 2 and f"revision was {'a' * 40}, is bbb" in newer.stderr
    lines_hub.requests.clear()
    succeeded(prepare_from(lines_hub, tmp_path, "--revision", "a" * 40))
    assert lines_hub.downloads(last) and not any(map(lines_hub.downloads, first))
    assert_is_whole(tmp_path)
    assert metadata_of(tmp_path / "out")["revision"] == "a" * 40


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


@pytest.mark.parametrize(
    ("repository", "status", "message"),
    [
        ("someone/else", 2, "there is no such"),
        ("someone/tokens", 2, "contains no documents; wanted"),
        ("someone/busy", 1, "then run the same command again"),
    ],
)
def test_a_hub_without_documents_is_one_line(tokens_hub, tmp_path, repository, status, message):
    tokens_hub.faults = [Fault("/someone/busy", times=-1, status=503)]
    result = prepare_from(tokens_hub, tmp_path, repository=repository)
    assert result.returncode == status and result.stderr.count("\n") == 1
    assert message in result.stderr and not list(tmp_path.glob("*out*"))


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
SOURCES: dict[str, tuple[str, bytes]] = {
    "empty": ("a.parquet", b""),
    "four bytes": ("a.parquet", b"PAR1"),
    "a footer longer than the file": ("a.parquet", WHOLE[:-8] + struct.pack("<I", 10**9) + b"PAR1"),
    "a footer of noise": ("a.parquet", WHOLE[:-600] + random.Random(0).randbytes(592) + WHOLE[-8:]),
    "cut in the middle": ("a.parquet", WHOLE[: len(WHOLE) // 2]),
    "encrypted": ("a.parquet", WHOLE[:-4] + b"PARE"),
    "pages of noise": ("a.parquet", WHOLE[:10] + b"\xff" * 400 + WHOLE[410:]),
    "a column of numbers": ("a.parquet", parquet([1, 2, 3])),
    "a column of lists": ("a.parquet", parquet([["a"], ["b"]])),
    "another column": ("a.parquet", parquet(name="t\x1b[31mext")),
    "an LFS pointer": ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
    "a page": ("a.parquet", b"<!DOCTYPE html><html>404</html>"),
    "deep": ("a.jsonl", LINES + b'{"text": ' + b"[" * 10**5),
    "text of an object": ("a.jsonl", LINES + b'{"text": {"text": "x"}}\n'),
    "a number": ("a.jsonl", LINES + b'{"text": 7}\n'),
    "a list": ("a.jsonl", LINES + b'["text"]\n'),
    "another key": ("a.jsonl", LINES + b'{"other": "x"}\n'),
    "a byte": ("a.jsonl", LINES + b"\xff\n"),
    "many digits": ("a.jsonl", LINES + b'{"text": ' + b"9" * 10**5 + b"}\n"),
    "noise": ("a.jsonl", random.Random(1).randbytes(10**5)),
    "cut": ("a.jsonl", LINES[:-10]),
    "UTF-16": ("a.jsonl", LINES.decode().encode("utf-16")),
    "a control character": ("a\x1b[31m.jsonl", b"{}\n"),
    "a new line": ("a\nb.jsonl", b"{}\n"),
    "no gzip": ("a.jsonl.gz", LINES),
    "half a gzip": ("a.jsonl.gz", gzip.compress(LINES)[:-12]),
    "a wrong checksum": ("a.jsonl.gz", gzip.compress(LINES)[:-8] + bytes(8)),
    "a line longer than memory": ("a.jsonl.gz", gzip.compress(bytes(2**21), 1)),
    "no zstandard": ("a.jsonl.zst", LINES),
    "nothing": ("a.jsonl.zst", b""),
    "half a zstandard": ("a.jsonl.zst", pyarrow.compress(LINES, "zstd", asbytes=True)[:-12]),
    "no bz2": ("a.jsonl.bz2", LINES),
    "half a bz2": ("a.jsonl.bz2", bz2.compress(LINES)[:-12]),
    "no xz": ("a.ndjson.xz", LINES),
    "half an xz": ("a.csv.xz", lzma.compress(LINES)[:-12]),
    "an xz that takes all memory": (
        "a.jsonl.xz",
        lzma.compress(LINES, filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 2**29}]),
    ),
    "half an array": ("a.json", b'[{"text": "a"}, {"text": "b"'),
    "an array of texts": ("a.json", b'["text", "text"]'),
    "an object": ("a.json", b'{\n"text": 1}'),
    "two arrays": ("a.json", b'[{"text": "a"}, {"text": "b"}]\n[{"text": "c"}]'),
    "an array with an endless text": ("a.json", b'[{"text": "' + b"x" * 2**22),
    "deep in an array": ("a.json", b'[{"text": "a"}, {"text": ' + b"[" * 10**5),
    "no header": ("a.csv", b"1,a\n2,b\n"),
    "no rows": ("a.csv", b""),
    "more fields than columns": ("a.csv", b"id,text\n1,a\n2,b, or c\n"),
    "a quote without end": ("a.csv", b'id,text\n1,a\n2,"b\n3,c\n'),
    "a field longer than memory": ("a.csv", b'text\n"' + b"x\n" * 2**20),
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
def test_a_malformed_source(tmp_path, monkeypatch, case):
    monkeypatch.setattr(reading, "LONGEST_LINE", 2**20)
    monkeypatch.setattr(reading, "TASK_BYTES", 2**18)
    name, content = SOURCES[case]
    source = tmp_path / "source"
    source.mkdir()
    (source / name).write_bytes(content)
    line = refused(tmp_path, str(source), str(tmp_path / "out"))
    assert name.split("\x1b")[0].split("\n")[0] in line or case == "nothing"
    if content.startswith(LINES) and name == "a.jsonl":
        assert 'a.jsonl: line 21 is not a JSON object with a text in "text"' in line


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
    result = succeeded(
        prepare(
            str(source),
            str(tmp_path / "out"),
            "--tokenizer",
            "bytes",
            *["--import"] * (kind == ".bin"),
        )
    )
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert f"{source}/{name}: leads out of" in line
    tokens = [token for part in tokens_in(tmp_path / "out").values() for token in part]
    assert tokens.count(ord("S")) == 2 and ord("s") not in tokens


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
