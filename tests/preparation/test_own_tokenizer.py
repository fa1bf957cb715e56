"""Preparations with a tokenizer that comes as a file: ids, cuts, resuming, and what is published.
"""

import json
import sys

import numpy as np
import pytest
from safetensors import safe_open

from basics.errors import UserError
from preparation import cutting, reading
from preparation.cutting import BadShard, cut_document
from preparation.encoding import cuts_of, encode_task
from preparation.ensure_dataset import SPLITS
from preparation.hub import fetch_dataset
from preparation.pipeline import PrepareOptions, prepare_dataset
from preparation.reading import Texts, text_tasks
from tests.support.hub_server import Hub, serving, used_in_this_process
from tests.support.models import write_tokenizer
from tests.support.preparation import (
    DOCUMENTS,
    SLOW_COMMAND,
    contents,
    leave_unfinished,
    prepare,
    texts_source,
    tokens_in,
    write_source,
)
from tests.support.workplace import run_command, succeeded
from tokens.tokenizer import choose_tokenizer

LETTERS = {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                             "use_regex": False}}  # merges may go across spaces
LONG = "the cat 它是 " * 60 + " " * 300 + "xyz" * 200 + "\n\n" + "café 12 " * 90


def place_of(directory):
    return choose_tokenizer(str(directory)).load


@pytest.fixture
def small_pieces(monkeypatch):
    """Cut documents after 64 bytes, and fill tasks with 200."""
    monkeypatch.setattr(cutting, "LARGE_DOCUMENT", 64)
    monkeypatch.setattr(reading, "TASK_BYTES", 200)
    monkeypatch.setattr(reading, "WHOLE_BYTES", 200)


def test_each_document_has_the_ids_of_its_text_and_the_tokenizer_is_beside_them(tmp_path):
    own, out = write_tokenizer(tmp_path / "own"), tmp_path / "out"
    source = write_source("jsonl", tmp_path / "source")
    assert prepare(str(source), str(out), "--tokenizer", str(own)).returncode == 0
    tokenizer = choose_tokenizer(str(own)).load()
    wanted = [token for text in DOCUMENTS
              for token in [*tokenizer.encode_ordinary(text), tokenizer.eot_token]]
    assert np.concatenate(list(tokens_in(out).values())).tolist() == wanted
    assert (out / "tokenizer.json").read_bytes() == (own / "tokenizer.json").read_bytes()
    for split in ("train", "validation"):
        with safe_open(out / f"{split}.safetensors", framework="numpy") as file:
            assert file.metadata()["tokenizer"] == choose_tokenizer(str(own)).name
    card = (out / "README.md").read_text()
    assert "tokenizer `tokenizer.json`" in card and "(id 0)" in card and "- sha256" not in card


def test_workers_write_the_same_bytes_as_one_process(tmp_path):
    own, source = write_tokenizer(tmp_path / "own"), tmp_path / "source"
    source.mkdir()
    for number in range(40):
        (source / f"{number:02}.txt").write_text(f"{number} " + "the cat, the hat 它 " * 200)
    arguments = (str(source), "--tokenizer", str(own))
    succeeded(run_command(sys.executable, *SLOW_COMMAND, *arguments,
                          str(tmp_path / "two"), "--workers", "2"))
    assert prepare(*arguments, str(tmp_path / "one")).returncode == 0
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.parametrize("changes", [{}, LETTERS], ids=["as gpt2", "across spaces"])
def test_cutting_a_document_does_not_change_its_ids(changes, tmp_path, small_pieces):
    own = write_tokenizer(tmp_path / "own", texts=[LONG] * 2)
    if changes:
        model = json.loads((own / "tokenizer.json").read_text())["model"]
        model["vocab"]["eĠ"] = len(model["vocab"])
        model["merges"].insert(0, ["e", "Ġ"])
        write_tokenizer(own, texts=[LONG] * 2, model=model, **changes)
    tokenizer = choose_tokenizer(str(own)).load()
    pieces = list(cut_document(LONG.encode()))
    assert len(pieces) > 20 and not all(piece.ends_safely for piece in pieces)
    naive = [token for piece in pieces for token in tokenizer.encode_ordinary(piece.text)]
    wanted = [*tokenizer.encode_ordinary(LONG), tokenizer.eot_token]
    assert naive != wanted[:-1]
    encoded = encode_task(Texts(pieces, 99), place_of(own))
    assert encoded.tokens.tolist() == wanted
    path = tmp_path / "a.txt"
    path.write_text(LONG)
    tasks = list(text_tasks([path], tmp_path, cuts_of(tokenizer)))
    assert len(tasks) <= 2 if changes else len(tasks) > 2
    tokens = np.concatenate([encode_task(task, place_of(own)).tokens for task in tasks])
    assert tokens.tolist() == wanted


def test_a_document_that_cannot_be_cut_is_refused_if_it_is_too_long(tmp_path, small_pieces,
                                                                    monkeypatch):
    monkeypatch.setattr(cutting, "MAX_UNCUT", 2**20)
    monkeypatch.setattr(reading, "WHOLE_BYTES", 2**19)
    path = tmp_path / "long.txt"
    path.write_text("x" * (2**20 + 1000))
    with pytest.raises(BadShard, match="long.txt: a document of more than 1 million characters"):
        list(text_tasks([path], tmp_path, "none"))


def test_an_unfinished_preparation_continues_only_with_the_same_tokenizer(tmp_path):
    own, out = write_tokenizer(tmp_path / "own"), tmp_path / "out"
    options = PrepareOptions(tokenizer=str(own))
    source = texts_source(["a b c", "the cat"], ["the hat", "naïve"])
    prepare_dataset(source, tmp_path / "whole", options)
    leave_unfinished(source, out, options)
    write_tokenizer(own, vocab_size=301)
    with pytest.raises(UserError, match="tokenizer was sha256:.*, is sha256:"):
        prepare_dataset(source, out, options)
    moved = write_tokenizer(tmp_path / "moved")  # the same file in another place
    prepare_dataset(source, out, PrepareOptions(tokenizer=str(moved)))
    assert contents(out) == contents(tmp_path / "whole")


def test_imported_tokens_may_be_those_of_a_tokenizer_of_ones_own(tmp_path):
    own, source = write_tokenizer(tmp_path / "own"), tmp_path / "source"
    source.mkdir()
    for name in ("train", "val"):
        np.array([5, 6, 0, 299], dtype="<u2").tofile(source / f"{name}.bin")
    arguments = ("--import", str(source), "--tokenizer", str(own))
    assert prepare(*arguments, str(tmp_path / "out")).returncode == 0
    assert (tmp_path / "out/tokenizer.json").exists()
    np.array([300], dtype="<u2").tofile(source / "val.bin")
    assert "id 300, outside the vocabulary of --tokenizer" in prepare(
        *arguments, str(tmp_path / "other")).stderr


def test_a_tokenizer_that_cannot_be_used_is_one_line_and_leaves_nothing(tmp_path):
    source = write_source("txt", tmp_path / "source")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/tokenizer.json").write_text(json.dumps({"model": None}))
    for choice in ("nowhere", str(tmp_path / "empty"), str(tmp_path / "bad")):
        result = prepare(str(source), str(tmp_path / "out"), "--tokenizer", choice)
        assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"source", "empty", "bad"}


def test_the_tokenizer_is_downloaded_with_its_dataset_before_it_counts_as_complete(tmp_path):
    own, out = write_tokenizer(tmp_path / "own"), tmp_path / "out"
    prepare_dataset(texts_source(["a", "b", "c"]), out, PrepareOptions(tokenizer=str(own)))
    files = contents(out)
    with serving(Hub(files, repository="someone/own")) as hub, used_in_this_process(
            hub, tmp_path / "home"):
        fetch_dataset(tmp_path / "downloaded", "someone/own", SPLITS)
    for name in ("tokenizer.json", "train.safetensors", "validation.safetensors"):
        assert (tmp_path / "downloaded" / name).read_bytes() == files[name]
    order = [path for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path]
    assert [path.split("/")[-1] for path in order][0] == "tokenizer.json"
