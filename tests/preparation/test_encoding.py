"""Encoding many documents in one call."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import preparation.encoding
from preparation.cutting import Piece
from preparation.encoding import encode_batch, encode_task
from preparation.reading import Texts
from tokens.tokenizer import END_OF_TEXT, load_tokenizer

PARTS = ["a", " ", "\n", "Don't", "é", "字", "\U0001f600",
         "<|", "|>", END_OF_TEXT[:-1], END_OF_TEXT]
documents = st.lists(st.lists(st.sampled_from(PARTS), max_size=6).map("".join), max_size=8)


def one_by_one(texts, name):
    return [load_tokenizer(name).encode_ordinary(text) for text in texts]


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
@settings(max_examples=200, deadline=None)
@given(texts=documents)
def test_a_batch_has_the_tokens_of_its_texts(texts, name):
    found = encode_batch(texts, load_tokenizer(name))
    assert [ids.tolist() for ids in found] == one_by_one(texts, name)
    assert all(ids.dtype == np.uint16 for ids in found)


@pytest.mark.parametrize("batch_characters", [1, 4, 2**20])
def test_a_task_is_the_same_in_batches_of_any_size(monkeypatch, batch_characters):
    monkeypatch.setattr(preparation.encoding, "BATCH_CHARACTERS", batch_characters)
    pieces = [Piece("one two", False), Piece(" three", True), Piece("", True), Piece("x é", True)]
    encoded = encode_task(Texts(pieces, 1), lambda: load_tokenizer("gpt2"))
    first, second, third, fourth = one_by_one([piece.text for piece in pieces], "gpt2")
    assert encoded.tokens.tolist() == [*first, *second, 50256, 50256, *third, *fourth, 50256]
    assert encoded.ends.tolist() == [[4, 13, 13], [5, 13, 13], [8, 17, 16]]
