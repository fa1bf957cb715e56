from __future__ import annotations

import pytest

from basics.errors import UserError
from tokens.tokenizer import END_OF_TEXT, decode, load_tokenizer

TEXT = "def naïve(x):\n\treturn '日本 🎉' + x  # \x00 and <|endoftext|>\r\n"


def test_gpt2_has_the_token_ids_that_openai_published() -> None:
    gpt2 = load_tokenizer("gpt2")
    assert gpt2.n_vocab == 50257 and gpt2.eot_token == 50256
    assert gpt2.encode_ordinary("Hello, world! It's 2026.") == [
        15496, 11, 995, 0, 632, 338, 1160, 2075, 13]


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_decoding_restores_the_text(name: str) -> None:
    tokenizer = load_tokenizer(name)
    ids = tokenizer.encode_ordinary(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.eot_token not in ids
    assert tokenizer.decode([tokenizer.eot_token]) == END_OF_TEXT


def test_the_ids_of_the_bytes_tokenizer_are_the_bytes() -> None:
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode_ordinary(TEXT) == list(TEXT.encode())
    assert tokenizer.n_vocab == 257 and tokenizer.eot_token == 256


def test_decoding_skips_ids_that_only_pad_a_vocabulary() -> None:
    assert decode(load_tokenizer("bytes"), [104, 300, 105]) == "hi"


def test_an_unknown_tokenizer_is_refused() -> None:
    with pytest.raises(UserError, match="tokenizer 'gpt3' is unknown; wanted gpt2 or bytes"):
        load_tokenizer("gpt3")
