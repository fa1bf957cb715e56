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


PICTURE = b"\x89PNG\r\n\x1a\n\0\0" + random.Random(0).randbytes(3000)
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
NOT_UTF8 = (
    "of its bytes are not UTF-8; if it is text of an older Windows program: --encoding cp1252"
)
ZEROS = "about every second byte is 0; if it is UTF-16: --encoding utf-16"
LEFT_OUT = {
    "empty.txt": (b"", "is empty"),
    "latin.txt": ("Größe: schöne Übung\n".encode("latin-1") * 9, NOT_UTF8),
    "lfs.txt": (POINTER, "is a Git LFS pointer; fetch its content with: git lfs pull"),
    "picture.png": (PICTURE, "is binary"),
    "picture.txt": (PICTURE.replace(b"\0", b"\1"), NOT_UTF8),
    "wide-be.txt": ("hello".encode("utf-16-be"), f"{ZEROS}-be"),
    "wide-le.txt": ("hello".encode("utf-16-le"), f"{ZEROS}-le"),
    "wide.txt": ("hello".encode("utf-16"), "is UTF-16; read with --encoding utf-16"),
}


def test_a_folder_of_mixed_files_is_a_dataset_and_what_is_left_out_is_named(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("ru", "code.py", "page.1", "de.txt", "de2.txt", "de3.txt", "settings.json"):
        (source / name).write_text(f"Größe: Привет, 数据 {name}\n")
    (source / "damaged.txt").write_bytes(b"text " * 100 + b"\0\xff")
    (source / "zip.1.gz").write_bytes(gzip.compress(b".TH ZIP\n"))
    for name, (content, _) in LEFT_OUT.items():
        (source / name).write_bytes(content)
    os.mkfifo(source / "pipe")
    result = succeeded(prepare(str(source), str(tmp_path / "out")))
    assert "9 documents" in result.stdout
    assert "left out 9 files, all named in README.md:\n" in result.stdout
    # Of nine files five are printed; one that may hold text matters more than an empty one.
    assert "latin.txt (" in result.stdout and "empty.txt (" not in result.stdout
    assert (
        "warning: the validation split is only the last 1 document of the source" in result.stdout
    )
    assert metadata_of(tmp_path / "out")["num_files_left_out"] == "9"
    card = (tmp_path / "out/README.md").read_text().replace("\\", "")
    assert "- pipe: is not a regular file\n" in card
    for name, (_, reason) in LEFT_OUT.items():
        assert re.search(rf"- {name}: (\d+% )?{re.escape(reason)}\n", card), name


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


@pytest.mark.parametrize(("num_bad", "is_warned"), [(1, False), (20, True)])
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
        assert counted in result.stdout
        assert (f"warning: {counted}" in result.stderr) == is_warned
        assert metadata_of(out)["num_replaced_characters"] == str(num_bad)
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


def parquet(column=None, *, name="text", **options):
    content = io.BytesIO()
    table = pyarrow.table({name: column or [f"document {i}" for i in range(300)]})
    pyarrow.parquet.write_table(table, content, **options)
    return content.getvalue()


def archive(texts):
    """Return a tar file as of a WebDataset."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as file:
        for i, text in enumerate(texts):
            info = tarfile.TarInfo(f"{i}.txt")
            info.size = len(text)
            file.addfile(info, io.BytesIO(text))
    return content.getvalue()


STRINGS = pyarrow.array(["naïve", None, "b" * 10], pyarrow.string())
DICTIONARY = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
INSIDE = b'{"a": {"b": "x"}, "a.x": "y"}\n'
JAPANESE = "日本 x, 'y'"
MOSTLY_TEXT = {f"{i}.txt": b"text" for i in range(5)}
READ = {  # files, options, documents, what is left out
    "lines with other columns of any type": (
        {
            "a.jsonl": b'{"text": "a", "n": 1}\n{"text": "b", "n": [2]}\n',
            "b.jsonl": b'{"text": "c", "n": "x", "m": 2}\n{"n": {"x": 3}}\n',
        },
        {},
        ["a", "b", "c", ""],
        {},
    ),
    "arrays with other columns of any type": (
        {"a.json": b'[{"text": "a", "n": 1}]', "b.json": b'[{"n": {"x": 1}, "text": "b"}]'},
        {},
        ["a", "b"],
        {},
    ),
    "cells that look like numbers and none": (
        {
            "a.csv": b'n,text\n1,NA\n2,007\n3,null\n4,n/a\n5,None\n6,\n7,"a, b"\n',
            "b.csv": b"text,m\n8,x\n9,y\n",
        },
        {},
        ["NA", "007", "null", "n/a", "None", "", "a, b", "8", "9"],
        {},
    ),
    "large strings": (
        {"a.parquet": parquet(STRINGS.cast(pyarrow.large_string()))},
        {},
        ["naïve", "", "b" * 10],
        {},
    ),
    "a dictionary of strings": (
        {"a.parquet": parquet(STRINGS.cast(DICTIONARY))},
        {},
        ["naïve", "", "b" * 10],
        {},
    ),
    "a column inside of another": ({"a.jsonl": INSIDE}, {"text_column": "a.b"}, ["x"], {}),
    "a dot in a column's name": ({"a.jsonl": INSIDE}, {"text_column": "a.x"}, ["y"], {}),
    "a WebDataset": ({"a.tar": archive([b"x", b"y"])}, {"text_column": "txt"}, ["x", "y"], {}),
    "text files with a separator": (
        {"a.txt": b"story 1\n\nis long\n<|endoftext|>\nstory 2\n<|endoftext|>\n"},
        {"document_separator": "<|endoftext|>"},
        ["story 1\n\nis long", "story 2"],
        {},
    ),
    "the state of another program": (
        {"state.json": b"{}", "a.txt": b"text"},
        {},
        ["text", "{}"],
        {},
    ),
    "a folder that is mostly text": (
        MOSTLY_TEXT | {"page.md": b"page", "a.csv": b"text\nrow\n", "rows.jsonl": b"{}\n"},
        {},
        [*["text"] * 5, "text\nrow\n", "page"],
        {"rows.jsonl": "is a dataset among files of text"},
    ),
    **{
        f"{encoding}, {name}": ({name: content.encode(encoding)}, {"encoding": encoding}, found, {})
        for encoding in ("shift_jis", "utf-16")
        for name, content, found in (
            ("a.txt", JAPANESE, [JAPANESE]),
            ("a.csv", f'id,text\n1,"{JAPANESE}"\n', [JAPANESE]),
        )
    },
    "cp1252, packed": (
        {"a.txt.gz": gzip.compress("naïve".encode("cp1252"))},
        {"encoding": "cp1252"},
        ["naïve"],
        {},
    ),
    "cp1252, lines": (
        {"a.jsonl": '{"text": "naïve"}\n'.encode("cp1252")},
        {"encoding": "cp1252"},
        ["naïve"],
        {},
    ),
}


@pytest.mark.parametrize("case", READ)
def test_a_source_has_these_documents_and_leaves_out_these_files(tmp_path, case):
    files, options, texts, left_out = READ[case]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert documents(find_source(tmp_path, **options)) == (texts, left_out)


def test_a_directory_of_save_to_disk_is_read(tmp_path):
    texts = [f"text {i}" for i in range(20)]
    saved = datasets.Dataset.from_dict({"text": texts, "n": [0] * 20})
    saved.save_to_disk(tmp_path / "one", num_shards=3)
    both = datasets.DatasetDict({"train": saved, "test": saved.select(range(3))})
    both.save_to_disk(tmp_path / "both")
    assert documents(find_source(tmp_path / "one"))[0] == texts
    assert documents(find_source(tmp_path / "both"))[0] == texts
    assert documents(find_source(tmp_path / "both", split="test"))[0] == texts[:3]
    for option in ("config", "encoding", "split"):
        with pytest.raises(UserError, match=f"--{option} is not for this directory of save_to_di"):
            documents(find_source(tmp_path / "one", **{option: "cp1252"}))


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
    assert documents(find_source(f"{tmp_path}/[nt]*")) == (
        ["test-0", "train-0", "train-1"],
        {"notes.txt": "is no json file"},
    )


@pytest.mark.parametrize(
    ("name", "own", "content", "options"),
    [
        ("a.txt", ["b.txt", "c.txt"], b"secret", []),
        ("a.jsonl", ["b.jsonl", "c.jsonl"], b'{"text": "secret"}\n', []),
        ("train.bin", ["b_train.bin", "b_val.bin"], b"s\0e\0", ["--import"]),
    ],
)
def test_a_link_that_leads_out_of_the_source_is_skipped(tmp_path, name, own, content, options):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    (tmp_path / "secret").write_bytes(content)
    (source / name).symlink_to(tmp_path / "secret")
    (source / own[0]).write_bytes(content.replace(b"s", b"S"))
    (source / own[1]).symlink_to(source / own[0])
    result = succeeded(prepare(str(source), str(out), "--tokenizer", "bytes", *options))
    assert "leads out of the directory" in result.stdout + result.stderr
    tokens = [token for part in tokens_in(out).values() for token in part]
    assert tokens.count(ord("S")) == 2 and ord("s") not in tokens


# --- the hub: the real clients, with a local hub that fails in many ways

TEXTS = [[f"part {i} document {j} " + "x" * (j % 97) for j in range(300)] for i in range(3)]


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


def test_a_config_is_streamed_nothing_is_kept_and_a_second_call_goes_on(
    texts_hub, tmp_path, monkeypatch
):
    monkeypatch.setattr(datasets.config, "STREAMING_READ_MAX_RETRIES", 1)
    texts_hub.faults = [Fault("10BT/002_00000.parquet", times=-1, status=403)]
    with small_steps(5000):
        assert prepare_from(texts_hub, tmp_path, "--subset", "sample-10BT").returncode == 2
        texts_hub.faults = []
        result = succeeded(prepare_from(texts_hub, tmp_path, "--config", "sample-10BT"))
    assert int(re.search(r"continuing after document (\d+)", result.stderr)[1]) >= 500
    train, validation = documents_of(tmp_path / "out")
    assert train + validation == [text for part in TEXTS for text in part]
    assert not list(tmp_path.rglob("*.parquet")) and not list(tmp_path.glob(".*"))
    metadata = metadata_of(tmp_path / "out")
    assert metadata["source"] == "someone/texts sample-10BT"
    assert metadata["revision"] == texts_hub.sha
    card = DatasetCard.load(tmp_path / "out" / "README.md")
    assert (card.data.license, card.data.language) == ("odc-by", ["de"])


@pytest.mark.parametrize(
    ("pattern", "options", "num_documents"),
    [
        ("sample/10BT/00[01]*.parquet", [], 600),
        ("Stories-train.txt", ["--document-separator", "<|endoftext|>"], 3),
    ],
)
def test_files_of_the_hub_are_named_by_a_pattern(
    texts_hub, tmp_path, pattern, options, num_documents
):
    texts_hub.files["Stories-train.txt"] = b"one\n<|endoftext|>\ntwo\n<|endoftext|>\nthree"
    texts_hub.sha = "b" * 40  # the library remembers what is in a commit
    source = f"hf://datasets/{texts_hub.repository}/{pattern}"
    result = succeeded(prepare_from(texts_hub, tmp_path, *options, source=source))
    assert f"{num_documents} documents" in result.stdout


def test_the_revision_in_a_name_of_files_is_read(monkeypatch):
    def dataset_info(self, repository, *, revision):
        raise ValueError(f"asked for {revision}")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", dataset_info)
    for revision, asked in (("refs/convert/parquet", "refs/convert/parquet"), ("a%2F1", "a/1")):
        with pytest.raises(UserError, match=f"asked for {asked}"):
            find_source(f"hf://datasets/owner/name@{revision}/a/*.parquet")
    with pytest.raises(UserError, match="--revision main is another one; name one of them"):
        find_source("hf://datasets/owner/name@v1.0/a/*.parquet", revision="main")


@pytest.mark.parametrize(
    ("source", "options", "status", "message"),
    [
        ("", ["--config", "nix"], 2, "BuilderConfig 'nix' not found"),
        ("", ["--config", "sample-10BT", "--split", "nix"], 2, "has no split nix; .*: train"),
        ("", ["--config", "sample-10BT", "--text-column", "x"], 2, "has no column 'x'.*: text"),
        ("", ["--revision", "nix"], 2, "there is no such revision"),
        ("someone/else", [], 2, "there is no such repository"),
        ("someone/busy", [], 1, "check the network, then run the same command again"),
    ],
)
def test_what_the_hub_does_not_have_is_one_line(
    texts_hub, tmp_path, source, options, status, message
):
    texts_hub.faults = [
        Fault("/someone/busy", times=-1, status=503),
        Fault("/revision/nix", status=404, headers={"X-Error-Code": "RevisionNotFound"}),
    ]
    result = prepare_from(texts_hub, tmp_path, *options, source=source)
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
    def provide(_):  # as nodes that share the directory
        provide_dataset(tmp_path / "data", tokens_hub.repository)

    with used_in_this_process(tokens_hub, tmp_path / "home"), ThreadPoolExecutor(3) as pool:
        list(pool.map(provide, range(3)))
    names = ("train.safetensors", "validation.safetensors")
    assert [len(tokens_hub.downloads(name)) for name in (*names, "README.md")] == [1, 1, 0]
    assert tokens_hub.num_bytes == sum(len(tokens_hub.files[name]) for name in names)


def test_a_broken_download_continues_where_it_broke(tmp_path):
    """huggingface_hub writes 10 MB at a time."""
    tokens = save({"tokens": np.arange(9 * 10**6, dtype=np.uint16)})
    validation = save({"tokens": np.zeros(9, dtype=np.uint16)})
    files = {"train.safetensors": tokens, "validation.safetensors": validation}
    with serving(Hub(files)) as hub:
        hub.faults = [Fault("train.safetensors", cut_after=14 * 10**6)]
        fetch(hub, tmp_path)
        _, second = hub.downloads("train.safetensors")
    assert 10**7 <= int(second.removeprefix("bytes=").split("-")[0]) <= 14 * 10**6
    assert (tmp_path / "data" / "train.safetensors").read_bytes() == tokens


BUSY = {"Retry-After": "0"}


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("/api/datasets", {"status": 503}),
        ("/api/datasets", {"status": 429, "headers": BUSY}),
        ("train.safetensors", {"status": 503, "times": 2}),
        ("train.safetensors", {"status": 429, "headers": BUSY}),
        ("train.safetensors", {"status": 500, "method": "HEAD"}),
    ],
)
def test_transient_errors_are_retried(tokens_hub, tmp_path, path, options):
    tokens_hub.faults = [fault] = [Fault(path, **options)]
    fetch(tokens_hub, tmp_path)
    assert fault.times == 0
    train = (tmp_path / "data" / "train.safetensors").read_bytes()
    assert train == tokens_hub.files["train.safetensors"]


NETWORK = "check the network, then run the same command again"
LIMITS = "set HF_TOKEN, whose limits are higher, or"
API, TRAIN = "/api/datasets", "train.safetensors"


def absent(name):
    """Return the fault of a file that a repository does not have."""
    headers = {"X-Error-Code": "EntryNotFound"}
    return Fault(name, times=-1, status=404, method="HEAD", headers=headers)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault(API, times=-1, status=401), "no such repository, or it is private: check the name"),
        (
            Fault(API, times=-1, status=403, headers={"X-Error-Code": "GatedRepo"}),
            "you must accept its conditions on its web page first, then set HF_TOKEN",
        ),
        (Fault(API, times=-1, status=503), NETWORK),
        (Fault(TRAIN, times=-1, status=503), NETWORK),
        (Fault(TRAIN, times=-1, cut_after=1000), NETWORK),
        (Fault(API, times=-1, status=429), LIMITS),
        (Fault(TRAIN, times=-1, status=429, headers=BUSY), LIMITS),
        (absent(TRAIN), "there is no such file"),
    ],
)
def test_permanent_errors_are_one_line_that_says_what_to_do(tokens_hub, tmp_path, fault, message):
    tokens_hub.faults = [fault]
    with pytest.raises(UserError) as caught:
        fetch(tokens_hub, tmp_path)
    line = str(caught.value)
    assert caught.value.status == (1 if "run the same command again" in line else 2)
    assert "\n" not in line and message in line and tokens_hub.repository in line
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
        ("CAS service error : ReqwestMiddleware Error", 99, 1),
        ("IO Error: No space left on device (os error 28)", 99, 4),
    ],
)
def test_errors_of_hf_xet_are_retried_like_a_lost_connection(
    tokens_hub, tmp_path, monkeypatch, said, times, outcome
):
    failures, download = (
        [RuntimeError(f"Data processing error: {said}")] * times,
        hub.hf_hub_download,
    )

    def failing(*arguments, **keywords):
        if failures:
            raise failures.pop()
        return download(*arguments, **keywords)

    monkeypatch.setattr(hub, "hf_hub_download", failing)
    try:
        fetch(tokens_hub, tmp_path)
        assert outcome == "whole" and is_complete(tmp_path / "data")
    except UserError as error:
        assert error.status == outcome


def test_a_partly_downloaded_dataset_is_completed_later(tokens_hub, tmp_path):
    tokens_hub.faults = [absent("validation.safetensors")]
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
    "wildcards": ("x[1]/a.jsonl", LINES),
    "a footer longer than the file": ("a.parquet", WHOLE[:-8] + struct.pack("<I", 10**9) + b"PAR1"),
    "a footer of noise": ("a.parquet", WHOLE[:-600] + random.Random(0).randbytes(592) + WHOLE[-8:]),
    "cut in the middle": ("a.parquet", WHOLE[: len(WHOLE) // 2]),
    "pages of noise": ("a.parquet", WHOLE[:10] + b"\xff" * 400 + WHOLE[410:]),
    "a column of numbers": ("a.parquet", parquet([1, 2, 3])),
    "another column": ("a.parquet", parquet(name="t\x1b[31mext")),
    "an LFS pointer": ("a.parquet", POINTER),
    "a page": ("a.parquet", b"<!DOCTYPE html><html>404</html>"),
    "deep": ("a.jsonl", LINES + b'{"text": ' + b"[" * 10**5),
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
    "no file that is read": (".hidden", LINES),
    "one document": ("a.txt.gz", gzip.compress(b"")),
    "documents without text": ("a.jsonl", b'{"text": null}\n' * 3),
    "UTF-16 text": ("a.txt", "a".encode("utf-16")),
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


SAID = {
    "empty": "cannot be read: is empty",
    "wildcards": "takes '*', '?' and '[' in the path",
    "an LFS pointer": "Git LFS",
    "UTF-16": "--encoding utf-16",
    "UTF-16 text": "left out 1 file: a.txt: is UTF-16; read with --encoding utf-16",
    "no file that is read": "contains no files to read",
    "documents without text": "3 documents found; wanted",
}


@pytest.mark.parametrize("case", SOURCES)
def test_a_malformed_source(tmp_path, case):
    name, content = SOURCES[case]
    source = tmp_path / "source"
    (source / name).parent.mkdir(parents=True)
    (source / name).write_bytes(content)
    line = refused(tmp_path, str((source / name).parent), str(tmp_path / "out"))
    assert SAID.get(case, "source") in line


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
    (tmp_path / "source").mkdir()
    (tmp_path / "source/a.jsonl").write_bytes(LINES)
    (tmp_path / "a-file").write_bytes(b"mine")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refused(tmp_path, str(tmp_path / "source"), str(tmp_path / output) if output else "")
    assert (tmp_path / "a-file").read_bytes() == b"mine"


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


@pytest.mark.parametrize("size", ["4k", "100k"])
def test_a_full_disk_during_a_download_is_one_line(tokens_hub, tmp_path, size):
    (tmp_path / "data").mkdir()
    with small_disk(tmp_path / "data", size), pytest.raises(UserError) as caught:
        fetch(tokens_hub, tmp_path)
    assert caught.value.status == 4
    assert str(caught.value).startswith(
        f"{tmp_path / 'data'}: cannot be written: No space left on device; "
    )
