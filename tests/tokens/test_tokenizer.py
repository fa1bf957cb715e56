from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from basics.errors import UserError
from tokens import tokenizer
from tokens.tokenizer import END_OF_TEXT, decode, load_tokenizer

TEXT = "def naïve(x):\n\treturn '日本 🎉' + x  # \x00 and <|endoftext|>\r\n"


def test_gpt2_has_the_token_ids_that_openai_published() -> None:
    gpt2 = load_tokenizer("gpt2")
    assert gpt2.n_vocab == 50257 and gpt2.eot_token == 50256
    assert gpt2.encode_ordinary("Hello, world! It's 2026.") == [
        15496, 11, 995, 0, 632, 338, 1160, 2075, 13]


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_decoding_restores_the_text(name: str) -> None:
    found = load_tokenizer(name)
    ids = found.encode_ordinary(TEXT)
    assert found.decode(ids) == TEXT
    assert found.eot_token not in ids
    assert found.decode([found.eot_token]) == END_OF_TEXT


def test_the_ids_of_the_bytes_tokenizer_are_the_bytes() -> None:
    found = load_tokenizer("bytes")
    assert found.encode_ordinary(TEXT) == list(TEXT.encode())
    assert found.n_vocab == 257 and found.eot_token == 256


def test_decoding_skips_ids_that_only_pad_a_vocabulary() -> None:
    assert decode(load_tokenizer("bytes"), [104, 300, 105]) == "hi"


def test_an_unknown_tokenizer_is_refused() -> None:
    with pytest.raises(UserError, match="tokenizer 'gpt3' is unknown; wanted gpt2 or bytes"):
        load_tokenizer("gpt3")


def test_gpt2_is_not_read_through_a_directory_that_all_users_share(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    shared = tmp_path / "data-gym-cache"
    shared.mkdir()
    assert tokenizer._gpt2().n_vocab == 50257 and not list(shared.iterdir())
