from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file
from support import PROJECT_DIR, Workplace, run_command, succeeded

from dataset_preparation import TokenFileWriter, prepare_dataset, provide_dataset
from documents import DocumentSource, find_documents, python_stdlib
from run_config import UserError
from tokenizer import load_tokenizer

DOCUMENTS = [f"document {i}: naïve 🎉 <|endoftext|>" for i in range(150)] + [""] * 2


def decoded(path: Path) -> list[str]:
    tokens = load_file(path)["tokens"]
    assert tokens.dtype == np.uint16
    ends = np.flatnonzero(tokens == 256)
    assert ends[-1] == len(tokens) - 1, "the last document has no end-of-text token"
    return [bytes(d[:-1].astype(np.uint8)).decode() for d in np.split(tokens, ends + 1)[:-1]]


def write_source(kind: str, source_dir: Path) -> Path:
    source_dir.mkdir()
    if kind == "parquet":
        folder = source_dir / "sample" / "10BT"
        folder.mkdir(parents=True)
        for i, part in enumerate((DOCUMENTS[:100], DOCUMENTS[100:])):
            table = pyarrow.table({"id": [str(n) for n in range(len(part))],
                                   "text": [text or None for text in part]})
            pyarrow.parquet.write_table(table, folder / f"{i:03}.parquet")
        (source_dir / "README.md").write_text("not a document")
    elif kind == "jsonl":
        lines = [json.dumps({"text": text}) for text in DOCUMENTS]
        (source_dir / "a.jsonl").write_text("\n".join(lines[:50]) + "\n\n")
        (source_dir / "b.jsonl").write_text("\n".join(lines[50:]))
    else:
        for i, text in enumerate(DOCUMENTS):
            (source_dir / f"{i:04}.txt").write_text(text)
    return source_dir


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "text"])
def test_the_first_99_percent_train_and_the_rest_validates(tmp_path: Path, kind: str) -> None:
    source = find_documents(write_source(kind, tmp_path / "source"))
    splits = prepare_dataset(source, tmp_path / "out", tokenizer_name="bytes")
    assert [split.num_documents for split in splits] == [150, 2]
    assert decoded(tmp_path / "out" / "train.safetensors") == DOCUMENTS[:150]
    assert decoded(tmp_path / "out" / "validation.safetensors") == DOCUMENTS[150:]
    with safe_open(tmp_path / "out" / "train.safetensors", framework="numpy") as file:
        metadata = file.metadata()
    assert metadata["tokenizer"] == "bytes" and metadata["num_documents"] == "150"
    assert int(metadata["num_tokens"]) == splits[0].num_tokens
    assert [path.name for path in tmp_path.glob(".*")] == [], "something was left behind"


@settings(max_examples=50, deadline=None)
@given(documents=st.lists(st.text(max_size=30), min_size=2, max_size=30))
def test_any_documents_are_split_whole_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, documents: list[str]
) -> None:
    out = tmp_path_factory.mktemp("any") / "out"
    prepare_dataset(DocumentSource("any", len(documents), documents), out, tokenizer_name="bytes")
    train, validation = (decoded(out / f"{s}.safetensors") for s in ("train", "validation"))
    assert train + validation == documents
    assert len(validation) == max(1, len(documents) - round(0.99 * len(documents)))


def test_gpt2_tokens_with_a_literal_end_of_text_as_text(tmp_path: Path) -> None:
    source = DocumentSource("two", 2, ["a<|endoftext|>b", "c"])
    prepare_dataset(source, tmp_path / "out", tokenizer_name="gpt2")
    tokens = load_file(tmp_path / "out" / "train.safetensors")["tokens"]
    assert tokens.tolist() == [64, 27, 91, 437, 1659, 5239, 91, 29, 65, 50256]


@pytest.mark.parametrize("content", ["file", "directory"])
def test_an_output_that_is_not_empty_is_refused_and_kept(tmp_path: Path, content: str) -> None:
    out = tmp_path / "out"
    if content == "file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "mine").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        prepare_dataset(DocumentSource("two", 2, ["a", "b"]), out, tokenizer_name="bytes")
    assert (out if content == "file" else out / "mine").read_text() == "mine"


def test_an_empty_output_directory_is_used(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    prepare_dataset(DocumentSource("two", 2, ["a", "b"]), tmp_path / "out", tokenizer_name="bytes")
    assert decoded(tmp_path / "out" / "validation.safetensors") == ["b"]


def test_nothing_appears_when_a_document_cannot_be_read(tmp_path: Path) -> None:
    source_dir = write_source("jsonl", tmp_path / "source")
    with (source_dir / "b.jsonl").open("a") as file:
        file.write("\n{broken")
    with pytest.raises(UserError, match="b.jsonl: line 103 is no JSON object"):
        prepare_dataset(find_documents(source_dir), tmp_path / "out", tokenizer_name="bytes")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_odd_characters_in_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "half \\ud800 pair"}\n{"text": "b"}\n')
    prepare_dataset(find_documents(path), tmp_path / "out", tokenizer_name="bytes")
    assert decoded(tmp_path / "out" / "train.safetensors") == ["half ? pair"]
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(UserError, match="a.jsonl: line 2 is no JSON object"):
        prepare_dataset(find_documents(path), tmp_path / "out2", tokenizer_name="bytes")


def test_a_file_cut_short_is_not_a_token_file(tmp_path: Path) -> None:
    path = tmp_path / "train.safetensors"
    with pytest.raises(KeyboardInterrupt):
        with TokenFileWriter(path, tokenizer=load_tokenizer("bytes"), source="test") as writer:
            writer.add("text" * 10_000)
            raise KeyboardInterrupt
    with pytest.raises(Exception, match="Error|header"):
        load_file(path)


@pytest.mark.parametrize(("make", "message"), [
    (lambda d: None, "no documents; wanted files ending in"),
    (lambda d: (d / "one.txt").write_text("x"), "1 document in all; wanted at least 2"),
    (lambda d: (d / "a.parquet").write_bytes(b"PAR1 no"), "a.parquet: not a whole parquet file"),
    (lambda d: pyarrow.parquet.write_table(pyarrow.table({"body": ["a", "b"]}), d / "a.parquet"),
     "has no column 'text'; it has: body"),
    (lambda d: pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2]}), d / "a.parquet"),
     "a document is a int; wanted text"),
    (lambda d: [(d / "a.jsonl").write_text("{}"), (d / "b.parquet").write_bytes(b"")],
     "holds both .jsonl and .parquet"),
])
def test_sources_that_cannot_be_used(tmp_path: Path, make, message: str) -> None:
    source_dir = tmp_path / "source"
    source_dir.mkdir()
    make(source_dir)
    with pytest.raises(UserError, match=message) as caught:
        prepare_dataset(find_documents(source_dir), tmp_path / "out", tokenizer_name="bytes")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_command_prepares_and_counts(tmp_path: Path) -> None:
    source_dir = write_source("parquet", tmp_path / "source")
    command = [sys.executable, str(PROJECT_DIR / "prepare_dataset.py"), str(source_dir),
               str(tmp_path / "out"), "--tokenizer", "bytes"]
    result = succeeded(run_command(*command))
    assert "train.safetensors: 150 documents" in result.stdout
    again = run_command(*command)
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1 and "is not empty" in again.stderr


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    script = (
        "import resource, sys\n"
        "from dataset_preparation import prepare_dataset\n"
        "from documents import DocumentSource\n"
        "def peak(n, out):\n"
        "    texts = ('x' * 100_000 for _ in range(n))\n"
        "    prepare_dataset(DocumentSource('x', n, texts), out, tokenizer_name='bytes')\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "from pathlib import Path\n"
        "small = peak(20, Path(sys.argv[1]) / 'a')\n"
        "large = peak(1000, Path(sys.argv[1]) / 'b')\n"
        "print(large - small)\n"
    )
    result = succeeded(run_command(sys.executable, "-c", script, str(tmp_path),
                                   PYTHONPATH=str(PROJECT_DIR)))
    assert (tmp_path / "b" / "train.safetensors").stat().st_size > 190e6
    assert int(result.stdout) < 20_000, "kilobytes more for fifty times the text"


def test_the_standard_library_is_the_same_every_time() -> None:
    first, second = python_stdlib(), python_stdlib()
    assert list(first.documents) == list(second.documents)
    text = "".join(first.documents)
    assert len(text) > 5_000_000 and "def " in text
    assert "The \"if\" statement" in text, "the reference documentation is missing"


def test_a_dataset_that_nobody_has_is_refused(workplace: Workplace) -> None:
    with pytest.raises(UserError, match="no dataset there; make it with prepare_dataset.py"):
        provide_dataset(workplace.datasets_dir / "mine", "mine")
    workplace.add_dataset("mine")
    provide_dataset(workplace.datasets_dir / "mine", "mine")
