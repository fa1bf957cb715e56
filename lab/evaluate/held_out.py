"""The loss of models on held-out tokens."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from basics.errors import UserError, one_line
from gpt import GPTModel
from lab.evaluate.intervals import Interval, exp, of_ratio, pair_sums, rounded
from tokens.batches import TOKENIZERS_BY_VOCABULARY, byte_lengths, check_token_ids
from tokens.token_file import TokenFile
from tokens.tokenizer import file_beside, load_tokenizer, short_name
from trainer.models import LoadedModel

DEFAULT_START_TOKEN = 50_000_000  # the slice of the original system's published results
DEFAULT_NUM_TOKENS = 19_660_800
# The unit of the intervals. Neighbouring sequences share documents, so that their losses are alike;
# blocks of many documents are close to independent.
BLOCK_TOKENS = 16_384
TOKENS_PER_CHUNK = 1024  # whose logits exist at a time: 0.2 GiB with a vocabulary of 50,257


@dataclass(frozen=True)
class Slice:
    """A part of a token file: `num_tokens` inputs from `start_token` on; one more token follows."""

    dataset: str
    split: str
    start_token: int
    num_tokens: int


@dataclass(frozen=True)
class Evaluation:
    """A model's results on a slice; the loss is in nats per token.

    The intervals regard blocks of `BLOCK_TOKENS` as independent; they are None with a single one.
    """

    slice: Slice
    loss: float
    bits_per_byte: float | None  # None if the tokenizer is not known
    num_sequences: int = 0
    loss_interval: Interval | None = None
    bits_interval: Interval | None = None

    @property
    def perplexity(self) -> float:
        return exp(self.loss)

    @property
    def perplexity_interval(self) -> Interval | None:
        found = self.loss_interval
        return found and (exp(found[0]), exp(found[1]))

    def as_record(self) -> dict[str, object]:
        return asdict(self.slice) | {
            "loss": self.loss, "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte,
            "sequences": self.num_sequences, "loss_interval": rounded(self.loss_interval),
            "perplexity_interval": rounded(self.perplexity_interval),
            "bits_per_byte_interval": rounded(self.bits_interval)}


def choose_slice(file: TokenFile, dataset: str, *, start_token: int | None,
                 num_tokens: int | None) -> Slice:
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
    return Slice(dataset, file.path.stem, start_token, wanted)


def text_identity(file: TokenFile, token_slice: Slice) -> str | None:
    """Identify the text of a whole file, the same in all tokens; None for a part of a file."""
    facts = [file.metadata.get(key) for key in (
        "source", "revision", "num_documents", "num_text_bytes")]
    if None in facts or token_slice.num_tokens != file.num_tokens - 1:
        return None
    return hashlib.blake2b(json.dumps([token_slice.split, *facts]).encode(),
                           digest_size=8).hexdigest()


def check_tokenizer(target: LoadedModel, file: TokenFile) -> None:
    """Check that a model was trained with the file's tokenizer. Raises: UserError."""
    made_with = file.metadata.get("tokenizer")
    if made_with and target.tokenizer_name and made_with != target.tokenizer_name:
        raise UserError(f"{file.path}: the tokenizer is {short_name(made_with)}, but that of"
                        f" {target.name} is {short_name(target.tokenizer_name)}; name another"
                        " --dataset")


@torch.inference_mode()
def evaluate(target: LoadedModel, file: TokenFile, token_slice: Slice, *,
             microbatch_size: int) -> Evaluation:
    """Measure a model on a slice, in sequences of its own context length.

    The last sequence may be shorter. All is computed in float32 and summed in float64, so that the
    microbatch size does not change the first six decimals. The intervals are of the ratio of the
    blocks' losses to their tokens, or bytes.

    Raises:
        UserError: a token is outside the model's vocabulary.
    """
    torch.set_float32_matmul_precision("highest")
    lengths = token_lengths(target, file)
    num_sequences, loss_sum, num_bytes = 0, 0.0, 0
    blocks = np.zeros((-(-token_slice.num_tokens // BLOCK_TOKENS), 3))  # losses, tokens, bytes
    for first, tokens in _microbatches(target, file, token_slice, microbatch_size):
        losses = _losses(target, tokens)
        starts = np.arange(len(losses)) * target.model.config.context_length
        counts = np.diff(starts, append=len(tokens) - 1)
        of_bytes = 0 * counts if lengths is None else np.add.reduceat(lengths[tokens[1:]], starts)
        num_sequences += len(losses)
        loss_sum += losses.sum()
        num_bytes += of_bytes.sum()
        # A sequence belongs to the block in which it begins.
        np.add.at(blocks, (first + starts) // BLOCK_TOKENS,
                  np.stack([losses, counts, of_bytes], axis=1).astype(np.float64))
    blocks = blocks[blocks[:, 1] > 0]
    bits = float(loss_sum / math.log(2) / num_bytes) if num_bytes else None
    nats_interval = of_ratio(pair_sums(blocks[:, 0], blocks[:, 2]))
    return Evaluation(
        token_slice, float(loss_sum / token_slice.num_tokens), bits, num_sequences,
        of_ratio(pair_sums(blocks[:, 0], blocks[:, 1])),
        nats_interval and tuple(bound / math.log(2) for bound in nats_interval))


def _losses(target: LoadedModel, tokens: np.ndarray) -> np.ndarray:
    """Add up each sequence's losses: (N,) uint16 to (N / T rounded up,) float64.

    The first token is only an input; the last sequence may be shorter.
    """
    longest = target.model.config.context_length
    token_ids = torch.from_numpy(tokens.astype(np.int64)).to(target.device)
    inputs, targets = token_ids[:-1], token_ids[1:]
    num_full = len(inputs) // longest * longest  # tokens in full sequences
    found = []
    if num_full:
        shape = (-1, longest)
        found.append(summed_losses(target.model, inputs[:num_full].view(shape),
                                   targets[:num_full].view(shape)))
    if num_full < len(inputs):
        found.append(summed_losses(target.model, inputs[None, num_full:],
                                   targets[None, num_full:]))
    return torch.cat(found).cpu().numpy()


def summed_losses(model: GPTModel, token_ids: Tensor, targets: Tensor) -> Tensor:
    """Add up each sequence's cross-entropies, in nats: (B, T) int64 both, to (B,) float64."""
    x = model.final_norm(model.transform(model.embed(token_ids))).flatten(0, 1)  # (B * T, C)
    losses = [F.cross_entropy(F.linear(chunk, model.head_weight), chunk_targets,
                              reduction="none").double()
              for chunk, chunk_targets in zip(x.split(TOKENS_PER_CHUNK),
                                              targets.flatten().split(TOKENS_PER_CHUNK),
                                              strict=True)]
    return torch.cat(losses).view(targets.shape).sum(1)


def token_lengths(target: LoadedModel, file: TokenFile) -> np.ndarray | None:
    """Return the number of text bytes of each token id: (V,) int64; 0 for the end of text.

    None if neither the file nor the model names a tokenizer.
    """
    name = (file.metadata.get("tokenizer") or target.tokenizer_name
            or TOKENIZERS_BY_VOCABULARY.get(target.model.config.vocab_size))
    if name is None:
        return None
    if name == target.tokenizer_name:
        tokenizer = target.load_tokenizer()
    else:
        tokenizer = load_tokenizer(name, file_beside(Path(file.path).parent, name))
    return byte_lengths(tokenizer, num_ids=target.model.config.vocab_size)


def _microbatches(target: LoadedModel, file: TokenFile, token_slice: Slice,
                  microbatch_size: int) -> Iterator[tuple[int, np.ndarray]]:
    """Read the microbatches, (B * T + 1,) uint16 each; the last may be shorter.

    Before each is the place of its first token in the slice.
    """
    config = target.model.config
    stride = microbatch_size * config.context_length
    for index in tqdm(range(math.ceil(token_slice.num_tokens / stride)), unit="batch",
                      desc=one_line(target.name), leave=False, disable=None):
        first = token_slice.start_token + index * stride
        stop = min(first + stride, token_slice.start_token + token_slice.num_tokens) + 1
        tokens = file.read(first, stop)
        check_token_ids(tokens, Path(file.path), first=first, vocab_size=config.vocab_size)
        yield index * stride, tokens
