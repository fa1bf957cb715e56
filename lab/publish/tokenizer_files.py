"""Write the files from which `transformers` loads this project's tokenizers."""

import json
from pathlib import Path
from typing import Any

from tokens.tokenizer import (
    BYTE_LETTERS,
    END_OF_TEXT,
    END_OF_TEXT_IDS,
    TOKENIZER_FILE,
    gpt2_file,
    parse_tokenizer,
)


def write_tokenizer_files(directory: Path, tokenizer_name: str, *, context_length: int) -> None:
    """Write a tokenizer for `AutoTokenizer` and for the `tokenizers` library.

    Args:
        tokenizer_name: `gpt2` or `bytes`.
        context_length: in tokens, of the model.
    """
    splits_words = tokenizer_name == "gpt2"
    if splits_words:
        vocabulary = json.loads(gpt2_file("encoder.json"))
        _, *merges = filter(None, gpt2_file("vocab.bpe").decode().split("\n"))
        write_json(directory / "vocab.json", vocabulary)
        (directory / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]),
                                              encoding="utf-8")
    else:
        vocabulary, merges = {letter: byte for byte, letter in enumerate(BYTE_LETTERS)}, []
    as_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                "use_regex": splits_words}
    write_json(directory / TOKENIZER_FILE, {  # bytes as characters, merged by rank
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "added_tokens": [{"id": END_OF_TEXT_IDS[tokenizer_name], "content": END_OF_TEXT,
                          "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": True}],
        "pre_tokenizer": as_bytes, "post_processor": None, "decoder": as_bytes,
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False,
                  "vocab": vocabulary, "merges": merges}})
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    write_json(directory / "special_tokens_map.json", special)
    write_json(directory / "tokenizer_config.json", special | {
        "tokenizer_class": "GPT2Tokenizer" if splits_words else "PreTrainedTokenizerFast",
        "model_max_length": context_length, "add_prefix_space": False,
        "clean_up_tokenization_spaces": False})


def write_own_tokenizer(directory: Path, content: bytes, *,
                        context_length: int | None = None) -> None:
    """Write a tokenizer that comes as a file, unchanged, with what `AutoTokenizer` needs beside it.

    Args:
        content: of its tokenizer.json.
        context_length: in tokens, of a model; None if there is none yet.
    """
    (directory / TOKENIZER_FILE).write_bytes(content)
    end_of_text = parse_tokenizer(content).eot_text
    special = dict.fromkeys(("bos_token", "eos_token"), end_of_text)
    write_json(directory / "special_tokens_map.json", special)
    length = {} if context_length is None else {"model_max_length": context_length}
    write_json(directory / "tokenizer_config.json", special | length | {
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False})


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a JSON file, non-ASCII characters as they are."""
    path.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
