"""The loss of models on held-out tokens, and which tokens these are."""

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from basics.errors import UserError, one_line
from basics.files import check_inside
from gpt import GPTModel
from lab.evaluate.intervals import exp, ratio
from lab.evaluate.results import Measurement
from preparation.ensure_dataset import provide_dataset
from run_config import DATASET_NAME, load_run
from tokens.batches import TOKENIZERS_BY_VOCABULARY, byte_lengths, check_token_ids
from tokens.token_file import TokenFile
from tokens.tokenizer import file_beside, load_tokenizer, short_name
from trainer.models import LoadedModel, is_run

DEFAULT_START_TOKEN = 50_000_000  # the slice of the original system's published results
DEFAULT_NUM_TOKENS = 19_660_800
# The unit of the intervals. Neighbouring sequences share documents, so that their losses are alike;
# blocks of many documents are close to independent.
BLOCK_TOKENS = 16_384
TOKENS_PER_CHUNK = 1024  # whose logits exist at a time: 0.2 GiB with a vocabulary of 50,257
TEXT_FACTS = ("source", "revision", "num_documents", "num_text_bytes")  # metadata of a text


@dataclass(frozen=True)
class Options:
    """The command line's options.

    Attributes:
        checkpoints: of runs: `all`, or names separated by commas.
        tasks: NAME or NAME=FILE each.
    """

    checkpoints: str
    tasks: tuple[str, ...]
    with_loss: bool
    microbatch_size: int
    dataset: str | None
    split: str
    start_token: int | None
    num_tokens: int | None
    runs_dir: Path
    datasets_dir: Path


@dataclass(frozen=True)
class Slice:
    """A part of a token file: `num_tokens` inputs from `start_token` on; one more token follows."""

    dataset: str
    file: TokenFile
    start_token: int
    num_tokens: int

    def text_identity(self) -> str | None:
        """Identify the text of a whole file, the same in all tokens; None for a part of a file."""
        facts = [self.file.metadata.get(key) for key in TEXT_FACTS]
        if None in facts or self.num_tokens != self.file.num_tokens - 1:
            return None
        return hashlib.blake2b(json.dumps([self.file.path.stem, *facts]).encode(),
                               digest_size=8).hexdigest()


def open_held_out(options: Options, names: list[str]) -> dict[str, Slice]:
    """Open the datasets and choose the tokens of each target, by the target's name.

    Runs whose datasets are the same text in other tokens are measured on all of it, each on its
    own dataset.

    Raises:
        UserError: a dataset is missing, too short, or of other text than another.
    """
    datasets = _datasets(options, names)
    files = {dataset: _open(options, dataset) for dataset in dict.fromkeys(datasets)}
    if len(files) == 1:
        slices = {dataset: choose_slice(file, dataset, options.start_token, options.num_tokens)
                  for dataset, file in files.items()}
    else:
        facts = [file.metadata for file in files.values()]
        texts = {tuple(fact.get(key) for key in TEXT_FACTS) for fact in facts}
        if len(texts) > 1 or len({fact.get("tokenizer") for fact in facts}) < len(facts):
            raise _different_datasets(list(files))
        if options.start_token is not None or options.num_tokens is not None:
            raise UserError("--start-token and --tokens would choose different text in the datasets"
                            " of these runs; leave them out, or name one with --dataset")
        slices = {dataset: choose_slice(file, dataset, 0, file.num_tokens - 1)
                  for dataset, file in files.items()}
    return {name: slices[dataset] for name, dataset in zip(names, datasets, strict=True)}


def _datasets(options: Options, names: list[str]) -> list[str]:
    """Return the dataset of each target: the one of its run, or of all runs. Raises: UserError."""
    if options.dataset:
        return [options.dataset] * len(names)
    own = [load_run(options.runs_dir, name).train.dataset if is_run(name, options.runs_dir)
           else None for name in names]
    found = sorted({dataset for dataset in own if dataset})
    if not found:
        raise UserError("--dataset: name the dataset to evaluate all targets on (no target is a"
                        " run)")
    if len(found) > 1 and None in own:
        raise _different_datasets(found)
    return [dataset or found[0] for dataset in own]


def _different_datasets(which: list[str]) -> UserError:
    return UserError("--dataset: name the dataset to evaluate all targets on (the targets were"
                     f" trained on different ones: {' and '.join(which)})")


def _open(options: Options, dataset: str) -> TokenFile:
    """Open the token file; download it or prepare the dataset first if it is missing."""
    if not re.fullmatch(DATASET_NAME, dataset):
        raise UserError(f"--dataset: {dataset[:60]!r} is not a plain name, or owner/name")
    dataset_dir = options.datasets_dir / dataset
    check_inside(dataset_dir, options.datasets_dir, "--datasets-dir")
    provide_dataset(dataset_dir, dataset, [options.split])
    return TokenFile(dataset_dir / f"{options.split}.safetensors")


def choose_slice(file: TokenFile, dataset: str, start_token: int | None = None,
                 num_tokens: int | None = None) -> Slice:
    """Choose the tokens that all models are evaluated on, whatever their context lengths.

    Raises:
        UserError: the file is too short.
    """
    if start_token is None:
        start_token = DEFAULT_START_TOKEN if file.num_tokens > DEFAULT_START_TOKEN else 0
    available = file.num_tokens - start_token - 1  # the last token is only a target
    wanted = min(DEFAULT_NUM_TOKENS, available) if num_tokens is None else num_tokens
    if wanted > available or wanted < 1:
        raise UserError(f"{file.path}: has {max(0, available):,} tokens to predict after token"
                        f" {start_token:,}, wanted {max(1, wanted):,}; change --start-token or"
                        " --tokens")
    return Slice(dataset, file, start_token, wanted)


@torch.inference_mode()
def evaluate(target: LoadedModel, part: Slice, *, microbatch_size: int) -> Measurement:
    """Measure a model's loss in nats per token, in sequences of its own context length.

    The last sequence may be shorter. All is computed in float32 and summed in float64, so that the
    microbatch size does not change the first six decimals. The intervals regard blocks of
    `BLOCK_TOKENS` as independent; there are none with a single block. Bits per byte are None if
    the tokenizer is not known.

    Raises:
        UserError: the tokens are of another tokenizer than the model's, or outside its vocabulary.
    """
    torch.set_float32_matmul_precision("highest")
    lengths, longest = _token_lengths(target, part.file), target.model.config.context_length
    blocks = np.zeros((3, -(-part.num_tokens // BLOCK_TOKENS)))  # losses, tokens, bytes
    for first, tokens in _microbatches(target, part, microbatch_size):
        losses = _losses(target.model, tokens)
        sequences = (first + np.arange(len(losses))) // longest
        # A sequence belongs to the block in which it begins.
        block = sequences * longest // BLOCK_TOKENS
        num_bytes = np.zeros(len(losses)) if lengths is None else lengths[tokens[1:]]
        for row, values in zip(blocks, (losses, np.ones(len(losses)), num_bytes), strict=True):
            row += np.bincount(block, values, minlength=len(row))
    nats, num_tokens, num_bytes = blocks[:, blocks[1] > 0]
    loss, bits = ratio(nats, num_tokens), None
    if num_bytes.any():
        bits = ratio(nats, num_bytes).through(lambda nats_per_byte: nats_per_byte / math.log(2))
    return Measurement(
        {"dataset": part.dataset, "split": part.file.path.stem, "start_token": part.start_token,
         "num_tokens": part.num_tokens, "sequences": -(-part.num_tokens // longest)},
        {"loss": loss, "perplexity": loss.through(exp), "bits_per_byte": bits})


def _losses(model: GPTModel, tokens: np.ndarray) -> np.ndarray:
    """Return each token's loss: (N + 1,) uint16, the first only an input, to (N,) float64."""
    token_ids = torch.from_numpy(tokens.astype(np.int64)).to(model.token_embedding.weight.device)
    num_tokens, longest = len(token_ids) - 1, model.config.context_length
    # Padding follows the last, shorter sequence: causality hides it.
    inputs = F.pad(token_ids[:-1], (0, -num_tokens % longest)).view(-1, longest)  # (B, T)
    x = model.transform(model.embed(inputs)).flatten(0, 1)[:num_tokens]  # (N, C)
    return torch.cat([losses for *_, losses in head_losses(model, x, token_ids[1:])]).cpu().numpy()


def head_losses(model: GPTModel, x: Tensor,
                targets: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield logits (n, V), targets (n,) and cross-entropies (n,) float64 of chunks of tokens.

    Args:
        x: (N, C), the output of the last layer.
        targets: (N,) int64.
    """
    for part, wanted in zip(model.final_norm(x).split(TOKENS_PER_CHUNK),
                            targets.split(TOKENS_PER_CHUNK), strict=True):
        logits = F.linear(part, model.head_weight)
        yield logits, wanted, F.cross_entropy(logits, wanted, reduction="none").double()


def _token_lengths(target: LoadedModel, file: TokenFile) -> np.ndarray | None:
    """Return the number of text bytes of each token id: (V,) int64; 0 for the end of text.

    None if neither the file nor the model names a tokenizer.

    Raises:
        UserError: they name different ones.
    """
    made_with, own = file.metadata.get("tokenizer"), target.tokenizer_name
    if made_with and own and made_with != own:
        raise UserError(f"{file.path}: the tokenizer is {short_name(made_with)}, but that of"
                        f" {target.name} is {short_name(own)}; name another --dataset")
    vocab_size = target.model.config.vocab_size
    if own is not None:
        return byte_lengths(target.load_tokenizer(), num_ids=vocab_size)
    name = made_with or TOKENIZERS_BY_VOCABULARY.get(vocab_size)
    if name is None:
        return None
    return byte_lengths(load_tokenizer(name, file_beside(file.path.parent, name)),
                        num_ids=vocab_size)


def _microbatches(target: LoadedModel, part: Slice,
                  microbatch_size: int) -> Iterator[tuple[int, np.ndarray]]:
    """Read the microbatches, (B * T + 1,) uint16 each; the last may be shorter.

    Before each is the place of its first token in the slice.
    """
    config = target.model.config
    stride = microbatch_size * config.context_length
    for place in tqdm(range(0, part.num_tokens, stride), unit="batch",
                      desc=one_line(target.name), leave=False, disable=None):
        first = part.start_token + place
        tokens = part.file.read(first, part.start_token + min(place + stride, part.num_tokens) + 1)
        check_token_ids(tokens, part.file.path, first=first, vocab_size=config.vocab_size)
        yield place, tokens
