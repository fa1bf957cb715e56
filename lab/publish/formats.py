"""The files from which transformers and llama.cpp load a tokenizer and a model. Imports no torch.

GGUF is llama.cpp's format. Source: its architecture `gpt2`, as the package `gguf` names it."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from basics.errors import UserError
from basics.json_files import read_json_object
from tokens.tokenizer import BYTE_LETTERS, END_OF_TEXT, TOKENIZER_FILE, gpt2_file, parse_tokenizer

if TYPE_CHECKING:
    from gguf import GGUFWriter

    from trainer.models import LoadedModel

SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE = "special_tokens_map.json", "tokenizer_config.json"
TOKENIZER_FILES = {TOKENIZER_FILE, SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE}
GGUF_FILES = {"model-F16.gguf": "F16", "model-Q8_0.gguf": "Q8_0"}  # by name, the weights' type
TRANSPOSED = re.compile(r"\.c_(attn|proj|fc)\.weight$")  # GPT-2 keeps (in, out), GGUF (out, in)
LARGEST_F16 = 65504.0
NO_MERGES = "<|endoftext|> <|endoftext|>"  # llama.cpp wants at least one; text never has these two
# Of a tokenizer's model: what llama.cpp would do differently.
NOT_IN_GGUF = ("ignore_merges", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix")


def write_tokenizer_files(directory: Path, tokenizer_name: str, *, context_length: int) -> None:
    """Write `gpt2` or `bytes` for `AutoTokenizer` and for the `tokenizers` library."""
    splits_words = tokenizer_name == "gpt2"
    if splits_words:
        vocabulary = json.loads(gpt2_file("encoder.json"))
        _, *merges = filter(None, gpt2_file("vocab.bpe").decode().split("\n"))
        write_json(directory / "vocab.json", vocabulary)
        (directory / "merges.txt").write_text(
            "\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8"
        )
    else:
        vocabulary = {letter: byte for byte, letter in enumerate(BYTE_LETTERS)}
        merges = []
    as_bytes = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": splits_words,
    }
    write_json(
        directory / TOKENIZER_FILE,
        {  # bytes as characters, merged by rank
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "normalizer": None,
            "added_tokens": [
                {
                    "id": vocabulary.get(END_OF_TEXT, len(vocabulary)),
                    "content": END_OF_TEXT,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
            ],
            "pre_tokenizer": as_bytes,
            "post_processor": None,
            "decoder": as_bytes,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": "",
                "end_of_word_suffix": "",
                "fuse_unk": False,
                "vocab": vocabulary,
                "merges": merges,
            },
        },
    )
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    write_json(directory / SPECIAL_TOKENS_FILE, special)
    write_json(
        directory / TOKENIZER_CONFIG_FILE,
        special
        | {
            "tokenizer_class": "GPT2Tokenizer" if splits_words else "PreTrainedTokenizerFast",
            "model_max_length": context_length,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
        },
    )


def write_own_tokenizer(directory: Path, content: bytes, context_length: int | None = None) -> None:
    """Write a tokenizer.json unchanged, and what `AutoTokenizer` needs beside it."""
    (directory / TOKENIZER_FILE).write_bytes(content)
    special = dict.fromkeys(("bos_token", "eos_token"), parse_tokenizer(content).eot_text)
    write_json(directory / SPECIAL_TOKENS_FILE, special)
    length = {} if context_length is None else {"model_max_length": context_length}
    write_json(
        directory / TOKENIZER_CONFIG_FILE,
        special
        | length
        | {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False},
    )


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")


def check_gguf(target: LoadedModel) -> None:
    """Check before the work that a model can be written. Raises: UserError."""
    if importlib.util.find_spec("gguf") is None:
        raise UserError("--gguf needs the package gguf: uv run --extra gguf lab publish ...")
    tokenizer = target.load_tokenizer()
    vocab_size = target.model.config.vocab_size
    largest = max(float(weight.abs().max()) for weight in target.model.state_dict().values())
    reason = ""
    if tokenizer.n_vocab > vocab_size:
        reason = f"its tokenizer has {tokenizer.n_vocab:,} entries, the model {vocab_size:,}"
    elif largest > LARGEST_F16:
        reason = f"it has numbers up to {largest:g}, too large for 16-bit floats"
    elif target.tokenizer_path is not None:
        content = target.tokenizer_path.read_bytes()
        model = json.loads(content)["model"]
        if (
            model.get("type", "BPE") != "BPE"
            or any(map(model.get, NOT_IN_GGUF))
            or set(BYTE_LETTERS) - model["vocab"].keys()
            or not parse_tokenizer(content).splits_like_gpt2
        ):
            reason = "its tokenizer is not a byte-level BPE that works as GPT-2's"
    if reason:
        raise UserError(f"{target.name}: {reason}, which GGUF cannot hold; leave out --gguf")


def write_gguf_files(target: LoadedModel, gpt2_weights: dict[str, Any], directory: Path) -> None:
    """Write the files of `GGUF_FILES` beside a model's exported card and tokenizer."""
    import gguf
    from gguf.quants import quantize
    from huggingface_hub import ModelCard

    config = target.model.config
    types = gguf.GGMLQuantizationType
    template = read_json_object(directory / TOKENIZER_CONFIG_FILE).get("chat_template")
    name = ModelCard.load(directory / "README.md").data.get("model_name")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, config.n_layers)
    for file, kind in GGUF_FILES.items():
        writer = gguf.GGUFWriter(directory / file, "gpt2")
        writer.add_name(name or Path(target.name).name)
        writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_context_length(config.context_length)
        writer.add_embedding_length(config.emb_dim)
        writer.add_feed_forward_length(4 * config.emb_dim)
        writer.add_block_count(config.n_layers)
        writer.add_head_count(config.n_heads)
        writer.add_layer_norm_eps(1e-5)
        _add_tokenizer(writer, target, directory / TOKENIZER_FILE)
        if template:
            writer.add_chat_template(template)
        for theirs, weight in gpt2_weights.items():
            tensor = names.get_name(theirs, (".weight", ".bias"))
            stored_as = types[kind]
            if weight.dim() == 1 or tensor == "position_embd.weight":
                stored_as = types.F32  # as llama.cpp expects
            matrix = (weight.T if TRANSPOSED.search(theirs) else weight).contiguous().numpy()
            if matrix.shape[-1] % gguf.GGML_QUANT_SIZES[stored_as][0]:
                stored_as = types.F16
            writer.add_tensor(tensor, quantize(matrix, stored_as), raw_dtype=stored_as)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _add_tokenizer(writer: GGUFWriter, target: LoadedModel, path: Path) -> None:
    """Add a byte-level BPE; ids that only pad the model's vocabulary become unused tokens."""
    from gguf import TokenType

    parts = json.loads(path.read_bytes())
    end_of_text = target.load_tokenizer().eot_token
    vocab_size = target.model.config.vocab_size
    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    kinds = [int(TokenType.UNUSED)] * vocab_size
    for token, number in parts["model"]["vocab"].items():
        tokens[number] = token
        kinds[number] = int(TokenType.NORMAL)
    for added in parts["added_tokens"]:
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = int(TokenType.CONTROL)
    merges = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in parts["model"]["merges"]
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges or [NO_MERGES])
    writer.add_bos_token_id(end_of_text)
    writer.add_eos_token_id(end_of_text)
    writer.add_add_bos_token(False)
