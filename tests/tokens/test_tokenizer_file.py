"""Tokenizers from a tokenizer.json: their ids are those of transformers; hostile files."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from basics.errors import UserError
from tests.support.tokenizers import TEXTS, write_tokenizer
from tokens.tokenizer import byte_lengths, choose_tokenizer, load_tokenizer
from tokens.tokenizer_file import FileTokenizer, read_named_tokenizer

ODD = ["<|endoftext|>", "\ud83d", "\ufeff", "\u0085", "\u2028", "e\u0301", "\U0010ffff", "\x00",
       " \u3000\n", "🏳️\u200d🌈", "it'S", "ſ", "①²", "\u180e", "\r\n\r\n "]
texts = st.lists(st.one_of(st.sampled_from([*ODD, *TEXTS]), st.text()), max_size=8).map("".join)

METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
WORDS = {"type": "WordLevel", "unk_token": "?",
         "vocab": {"?": 0, "▁the": 1, "▁cat": 2, "</s>": 3, "<0xE2>": 4}}


@functools.cache
def loaded() -> tuple[FileTokenizer, PreTrainedTokenizerFast]:
    with tempfile.TemporaryDirectory() as folder:
        directory = write_tokenizer(Path(folder))
        (directory / "tokenizer_config.json").write_text(
            '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}')
        return (choose_tokenizer(folder).load(),
                AutoTokenizer.from_pretrained(directory, local_files_only=True))


@settings(max_examples=300, deadline=None)
@given(texts)
def test_the_ids_are_those_of_transformers_and_no_text_is_lost(text: str) -> None:
    ours, theirs = loaded()
    ids = ours.encode_ordinary(text)
    valid = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert ids == theirs(valid, add_special_tokens=False, split_special_tokens=True).input_ids
    if "<|endoftext|>" not in text:
        assert ids == theirs(valid, add_special_tokens=False).input_ids
    assert ours.decode(ids) == valid and ours.eot_token not in ids
    assert b"".join(map(ours.decode_single_token_bytes, ids)) == valid.encode()
    lengths = byte_lengths(ours, num_ids=400)
    assert lengths[ids].sum() == len(valid.encode()) and lengths[ours.eot_token] == 0
    assert len(lengths) == 400


def test_a_trained_tokenizer_has_the_ids_that_are_documented(tmp_path: Path) -> None:
    tokenizer = choose_tokenizer(str(write_tokenizer(tmp_path))).load()
    assert (tokenizer.n_vocab, tokenizer.eot_token, tokenizer.eot_text) == (
        300, 0, "<|endoftext|>")
    single = {tokenizer.decode_single_token_bytes(token) for token in range(1, 257)}
    assert single == {bytes([byte]) for byte in range(256)}
    assert tokenizer.splits_like_gpt2


def test_a_tokenizer_is_chosen_by_its_directory_or_its_file(tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path)
    chosen = choose_tokenizer(str(directory))
    assert choose_tokenizer(str(directory / "tokenizer.json")) == chosen
    assert chosen.name.startswith("sha256:") and len(chosen.name) == 7 + 64
    assert load_tokenizer(chosen.name, directory / "tokenizer.json").n_vocab == 300


@pytest.mark.parametrize("changes", [
    {"normalizer": {"type": "Lowercase"}},
    {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True,
                       "trim_offsets": True}},
    {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False,
                       "trim_offsets": True}},
    {"pre_tokenizer": None},
    {"added_tokens": [{"id": 0, "content": "<|endoftext|>", "single_word": False, "lstrip": False,
                       "rstrip": False, "normalized": False, "special": False}]},
])
def test_only_a_tokenizer_that_splits_as_gpt2_does_may_be_cut(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    assert not choose_tokenizer(str(write_tokenizer(tmp_path, **changes))).load().splits_like_gpt2


def test_truncation_padding_and_added_tokens_of_the_file_do_not_change_documents(
    tmp_path: Path
) -> None:
    plain = choose_tokenizer(str(write_tokenizer(tmp_path / "plain"))).load()
    changed = choose_tokenizer(str(write_tokenizer(
        tmp_path / "changed", truncation={"direction": "Right", "max_length": 3, "stride": 0,
                                          "strategy": "LongestFirst"},
        padding={"strategy": {"Fixed": 99}, "direction": "Right", "pad_to_multiple_of": None,
                 "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"},
        post_processor={"type": "TemplateProcessing", "pair": [], "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
            "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
                       {"Sequence": {"id": "A", "type_id": 0}}]}))).load()
    assert changed.encode_ordinary(TEXTS[0]) == plain.encode_ordinary(TEXTS[0])


def test_the_bytes_of_tokens_of_other_kinds_count_their_spaces(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "added_tokens": [], "post_processor": None, "pre_tokenizer": METASPACE,
        "decoder": METASPACE, "model": WORDS}))
    tokenizer = choose_tokenizer(str(tmp_path)).load()
    assert tokenizer.eot_token == 3 and not tokenizer.splits_like_gpt2
    assert tokenizer.encode_ordinary("the cat the") == [1, 2, 1]
    assert tokenizer.decode([1, 2, 1]) == "the cat the"
    assert [tokenizer.decode_single_token_bytes(token) for token in (1, 2, 4, 99)] == [
        b" the", b" cat", b"\xe2", b""]


def test_the_bytes_of_tokens_are_counted_if_byte_level_is_one_of_several_decoders(
    tmp_path: Path
) -> None:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": True}
    folder = write_tokenizer(tmp_path, decoder={"type": "Sequence", "decoders": [
        {"type": "Sequence", "decoders": [byte_level]}, {"type": "Fuse"}]})
    tokenizer, text = choose_tokenizer(str(folder)).load(), "naïve 🏳 Ωß"
    ids = tokenizer.encode_ordinary(text)
    assert b"".join(map(tokenizer.decode_single_token_bytes, ids)) == text.encode()


def refused(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        choose_tokenizer(str(path))
    assert "\n" not in caught.value.line() and len(caught.value.line()) < 200
    return str(caught.value)


@pytest.mark.parametrize("content", [
    b"", b"{}", b"[]", b"\xff\xfe", b"{" * 100_000, b'{"version": "1.0"}', b"null",
    b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}',
])
def test_a_damaged_file_is_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    assert refused(tmp_path).startswith(f"{tmp_path / 'tokenizer.json'}: ")


def replaced(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


CHAIN = {"normalizers": [replaced("Ω", "Ω" * 1000)] * 3,
         "decoders": [replaced("a", "a" * 1000)] * 3}
TRUE_WORDS = {"type": "WordLevel", "vocab": {"a": 1, "</s>": 0}, "unk_token": "?"}
HOSTILE = {  # parts of a tokenizer.json: panics, exceptions, aborts, and what takes all memory
    "an empty charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
    "a charsmap of 0xff": {"normalizer": {"type": "Precompiled",
                                          "precompiled_charsmap": "/" * 88}},
    "a replaced empty pattern": {"normalizer": replaced("", "x")},
    "a replaced end of a word": {"normalizer": replaced("", "x") | {"pattern": {"Regex": r"\b"}}},
    "a pattern without end": {"normalizer": replaced("", "x") | {"pattern": {"Regex": "(a+)+$"}}},
    "an empty split": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "a decoder that strips too much": {"decoder": {"type": "Strip", "content": "a", "start": 2,
                                                   "stop": 2}},
    "a processor of pairs": {"post_processor": {
        "type": "TemplateProcessing", "pair": [], "special_tokens": {},
        "single": [{"Sequence": {"id": "B", "type_id": 0}}]}},
    "words without an unknown one": {"model": TRUE_WORDS},
    "pieces of words without an unknown one": {"model": TRUE_WORDS | {
        "type": "WordPiece", "continuing_subword_prefix": "##", "max_input_chars_per_word": 9}},
    "pieces without an unknown one": {"model": {
        "type": "Unigram", "vocab": [["</s>", 0.0], ["a", -1.0]], "unk_id": None}},
    "a long prefix": {"normalizer": {"type": "Prepend", "prepend": "x" * 10**5}},
    "a bomb": {"normalizer": {"type": "Sequence"} | CHAIN},
    "a bomb in the decoder": {"decoder": {"type": "Sequence"} | CHAIN},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_one_line(case: str, tmp_path: Path) -> None:
    line = refused(write_tokenizer(tmp_path, **HOSTILE[case]))
    assert "tokenizer.json: cannot encode a text" in line or "a hundred times as long" in line


def test_a_file_cut_in_half_is_one_line(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path) / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:-1000])
    assert "not a whole tokenizer.json" in refused(tmp_path)


def test_a_tokenizer_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "tokenizer.json: no such file" in refused(tmp_path / "empty")
    assert "is unknown; wanted gpt2 or bytes" in refused(tmp_path / "nowhere")
    (tmp_path / "odd/tokenizer.json").mkdir(parents=True)
    assert "is not a file" in refused(tmp_path / "odd")
    parts = json.loads((write_tokenizer(tmp_path / "good") / "tokenizer.json").read_text())
    for changes, message in (
        ({"vocab": parts["model"]["vocab"] | {f"x{i}": i for i in range(300, 65_537)}},
         "has 65,537 entries; a token file can hold at most 65,536"),
        ({"vocab": parts["model"]["vocab"] | {"x": 70_000}}, "has 70,001 entries"),
        ({"dropout": 0.1}, "has a dropout"),
    ):
        folder = write_tokenizer(tmp_path / "bad", model=parts["model"] | changes)
        assert message in refused(folder)
    vocabulary = {k: v for k, v in parts["model"]["vocab"].items() if k != "<|endoftext|>"}
    folder = write_tokenizer(tmp_path / "bad", added_tokens=[],
                             model=parts["model"] | {"vocab": vocabulary})
    assert "has no end-of-text token; add one of <|endoftext|>" in refused(folder)


def test_a_file_that_was_replaced_is_not_taken_for_the_one_it_was(tmp_path: Path) -> None:
    name = choose_tokenizer(str(write_tokenizer(tmp_path))).name
    path = tmp_path / "tokenizer.json"
    load_tokenizer(name, path)
    write_tokenizer(tmp_path, vocab_size=301)
    for load in (load_tokenizer, lambda name, path: read_named_tokenizer(path, name)):
        with pytest.raises(UserError, match=f"has changed: .* tokenizer {name[:19]}; restore it"):
            load(name, path)
