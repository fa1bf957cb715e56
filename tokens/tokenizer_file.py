"""A tokenizer from a `tokenizer.json`, the file of Hugging Face's `tokenizers` library."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from basics.errors import UserError, first_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
NAME_PREFIX = "sha256:"  # of the name of such a tokenizer: its file's digest follows
MAX_ENTRIES = 2**16  # token files hold 16-bit ids
MAX_FILE_BYTES = 2**26  # many times what 65,536 entries need
MAX_TRIAL_BYTES, MAX_TRIAL_SECONDS = 2**31, 30  # to encode a short text with a file's tokenizer
END_OF_TEXT_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # one byte, where a vocabulary lacks a character


class FileTokenizer:
    """A tokenizer with the methods of tiktoken's `Encoding` that this project uses.

    Text is encoded as plain text: no text becomes a special token, and none is added. The ids are
    those of transformers' `AutoTokenizer` with `add_special_tokens=False, split_special_tokens=
    True`.

    Attributes:
        n_vocab: the largest id plus one.
        eot_token: the id of the end-of-text token; `eot_text` is its text.
        splits_like_gpt2: whether text may be cut wherever GPT-2's tokenizer is certain to split it.
    """

    def __init__(self, tokenizer: Tokenizer, eot_token: int) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # their text is encoded like any other
        self._tokenizer, self.eot_token = tokenizer, eot_token
        self.eot_text = tokenizer.id_to_token(eot_token)
        self.n_vocab = max(tokenizer.get_vocab().values()) + 1
        parts = json.loads(tokenizer.to_str())
        self._is_byte_level = _is_byte_level(parts["decoder"])
        self._added = {token["id"]: token["content"] for token in parts["added_tokens"]}
        self.splits_like_gpt2 = _splits_like_gpt2(parts)

    def encode_ordinary(self, text: str) -> list[int]:
        """Return the ids of a text."""
        whole = text if text.isascii() else _without_half_pairs(text)
        # Not as a batch: a batch starts threads, after which the process should not fork.
        return self._tokenizer.encode(whole, add_special_tokens=False).ids

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of ids."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def decode_single_token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text before it; none for an unused id."""
        if (token := self._tokenizer.id_to_token(token_id)) is None:
            return b""
        if token_id in self._added:
            return self._added[token_id].encode()
        if self._is_byte_level:
            return b"".join(_BYTES[letter] if letter in _BYTES else letter.encode()
                            for letter in token)
        if found := BYTE_TOKEN.fullmatch(token):
            return bytes([int(found[1], 16)])
        once, twice = self.decode([token_id]), self.decode([token_id] * 2)
        return twice[len(once):].encode()  # the first token of a text may lack its space


def name_of(content: bytes) -> str:
    """Return the name of the tokenizer whose file has this content."""
    return f"{NAME_PREFIX}{hashlib.sha256(content).hexdigest()}"


def read_tokenizer_file(path: Path) -> bytes:
    """Read a `tokenizer.json`, or the one in a directory.

    Raises:
        UserError: there is none, or it is no usable tokenizer.
    """
    path = path / TOKENIZER_FILE if path.is_dir() else path
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{path}: is not a file; name a directory with a {TOKENIZER_FILE}")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UserError(f"{path}: has more than {MAX_FILE_BYTES >> 20} MiB; wanted a tokenizer"
                            f" of at most {MAX_ENTRIES:,} entries")
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; make one with: uv run lab tokenizer") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        parse_tokenizer(content)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    return content


def read_named_tokenizer(path: Path, name: str) -> bytes:
    """Read a `tokenizer.json` that must be the one of this name. Raises: UserError if it is not."""
    if not path.exists():
        raise UserError(f"{path}: no such file, but the tokens were made with it"
                        f" ({short_name(name)}); restore it, or prepare the dataset again")
    content = read_tokenizer_file(path)
    if name_of(content) != name:
        raise UserError(f"{path}: has changed: the tokens were made with the tokenizer"
                        f" {short_name(name)}; restore it, or prepare the dataset again")
    return content


def short_name(name: str) -> str:
    """Return a tokenizer's name as it is shown to people."""
    return name[:len(NAME_PREFIX) + 12] if name.startswith(NAME_PREFIX) else name


@functools.lru_cache(maxsize=4)
def parse_tokenizer(content: bytes) -> FileTokenizer:
    """Return the tokenizer of a file's content, once another process has encoded a text with it.

    A file can make the library end its process, or need any memory and time.

    Raises:
        ValueError: it is damaged or unusable.
    """
    tried = subprocess.run([sys.executable, "-m", "tokens.tokenizer_file"], input=content,
                           capture_output=True, cwd=Path(__file__).parents[1])
    if tried.returncode == 1:
        raise ValueError(tried.stderr.decode(errors="replace").splitlines()[-1])
    if tried.returncode:
        raise ValueError("cannot encode a text: it ends the library, or takes more than"
                         f" {MAX_TRIAL_BYTES >> 30} GiB or {MAX_TRIAL_SECONDS} s of a processor")
    return _parse(content)


def _try_out(content: bytes) -> None:
    """Encode and decode texts that have characters of all kinds, and the file's own patterns."""
    tokenizer, parts = _parse(content), json.loads(content)
    patterns = [part for name, part in parts.items() if name not in ("model", "added_tokens")]
    points = [*range(128), *range(128, 0xd800, 97), *range(0xe000, 0x110000, 997)]
    every_kind = "".join(map(chr, points)) + "a" * 1000 + "!"
    texts = ["", "a", "é", "the cat", every_kind, json.dumps(patterns, ensure_ascii=False)[:20_000]]
    ids = [token for text in texts for token in tokenizer.encode_ordinary(text)]
    pieces = map(tokenizer.decode_single_token_bytes, range(tokenizer.n_vocab))
    if max(len(ids), len(tokenizer.decode(ids)), *map(len, pieces)) > 100 * len(every_kind):
        raise ValueError("makes a text a hundred times as long; make or download it again")


def _parse(content: bytes) -> FileTokenizer:
    from tokenizers import Tokenizer  # not for --help

    try:
        tokenizer = Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"not a whole {TOKENIZER_FILE} ({first_line(error)[:80]}); make or"
                         " download it again") from None
    ids = tokenizer.get_vocab().values()
    largest = max(ids, default=0)
    if len(ids) > MAX_ENTRIES or largest >= MAX_ENTRIES:
        raise ValueError(f"has {max(len(ids), largest + 1):,} entries; a token file can hold at"
                         f" most {MAX_ENTRIES:,}")
    found = (tokenizer.token_to_id(token) for token in END_OF_TEXT_TOKENS)
    end_of_text = next((token_id for token_id in found if token_id is not None), None)
    if json.loads(content)["model"].get("dropout"):
        raise ValueError('has a dropout, so that its ids are random; set "dropout" to null')
    if end_of_text is None:
        raise ValueError("has no end-of-text token; add one of"
                         f" {', '.join(END_OF_TEXT_TOKENS)}")
    return FileTokenizer(tokenizer, end_of_text)


def byte_letters() -> list[str]:
    """Return the character that stands for each of the 256 bytes in GPT-2's vocabulary files.

    Source: OpenAI's released GPT-2 code. Printable Latin-1 characters stand for themselves; the
    other bytes, in order, are written as the characters from 256 on.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1),
                 *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


_BYTES = {letter: bytes([byte]) for byte, letter in enumerate(byte_letters())}


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    """Return whether a decoder reads a token's characters as bytes, alone or as one of several."""
    decoder = decoder or {}
    return decoder.get("type") == "ByteLevel" or any(
        map(_is_byte_level, decoder.get("decoders", ())))


def _splits_like_gpt2(parts: dict[str, Any]) -> bool:
    splitter = parts["pre_tokenizer"] or {}
    return (splitter.get("type") == "ByteLevel" and splitter["use_regex"]
            and not splitter["add_prefix_space"] and parts["normalizer"] is None
            and all(token["special"] for token in parts["added_tokens"]))


def _without_half_pairs(text: str) -> str:
    """Replace halves of surrogate pairs, which are no characters, as tiktoken does."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def main() -> None:
    """Try out the content on stdin within limits of memory and time."""
    for kind, limit in ((resource.RLIMIT_AS, MAX_TRIAL_BYTES),
                        (resource.RLIMIT_CPU, MAX_TRIAL_SECONDS)):
        with suppress(ValueError):  # there is a lower one
            resource.setrlimit(kind, (limit, limit))
    try:
        _try_out(sys.stdin.buffer.read())
    except ValueError as error:
        sys.exit(str(error))
    except BaseException as error:  # a panic of the library is no Exception
        sys.exit(f"cannot encode a text ({first_line(error)[:80]}); make or download it again")


if __name__ == "__main__":
    main()
