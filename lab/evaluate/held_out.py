"""The loss of models on a stretch of tokens that none of them was trained on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from basics.errors import UserError
from gpt import GPTModel
from lab.evaluate.sharing import Share, speaks
from lab.targets import Target
from tokens.batches import TOKENIZERS_BY_VOCABULARY, check_token_ids
from tokens.token_file import TokenFile
from tokens.tokenizer import load_tokenizer

DEFAULT_START_TOKEN = 50_000_000  # the slice that the original system's figures are of
DEFAULT_NUM_TOKENS = 19_660_800
ROWS_OF_LOGITS = 1024  # made at a time: all of a vocabulary of 50,257 in 0.2 GiB


@dataclass(frozen=True)
class Slice:
    """A stretch of a token file: `num_tokens` from `start_token` on, and the one that follows."""

    dataset: str
    split: str
    start_token: int
    num_tokens: int


@dataclass(frozen=True)
class Evaluation:
    """What a model makes of a slice; the loss is in nats a token."""

    slice: Slice
    loss: float
    bits_per_byte: float | None  # none where the tokens' bytes are not known

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    def as_record(self) -> dict[str, object]:
        return asdict(self.slice) | {"loss": self.loss, "perplexity": self.perplexity,
                                     "bits_per_byte": self.bits_per_byte}


def choose_slice(file: TokenFile, dataset: str, *, start_token: int | None,
                 num_tokens: int | None) -> Slice:
    """Lay out what all models are evaluated on, however long their contexts are.

    Raises:
        UserError: the file has not so many tokens there.
    """
    if start_token is None:
        start_token = DEFAULT_START_TOKEN if file.num_tokens > DEFAULT_START_TOKEN else 0
    available = file.num_tokens - start_token - 1  # the last is only predicted
    wanted = min(DEFAULT_NUM_TOKENS, available) if num_tokens is None else num_tokens
    if wanted > available or wanted < 1:
        raise UserError(f"{file.path}: {max(1, wanted):,} tokens are wanted from token"
                        f" {start_token:,} on; it has {max(0, available):,} to be predicted there;"
                        " change --start-token or --tokens")
    return Slice(dataset, file.path.stem, start_token, wanted)


def check_tokenizer(target: Target, file: TokenFile) -> None:
    """Refuse a model that has learnt other tokens. Raises: UserError."""
    made_with = file.metadata.get("tokenizer")
    if made_with and target.tokenizer_name and made_with != target.tokenizer_name:
        raise UserError(f"{file.path}: holds tokens of {made_with}, {target.name} was trained on"
                        f" those of {target.tokenizer_name}; name another --dataset")


@torch.inference_mode()
def evaluate(target: Target, file: TokenFile, stretch: Slice, *, microbatch_size: int,
             share: Share) -> Evaluation:
    """Measure a model on a slice, in sequences of its own context. A collective: every rank.

    The last sequence may be shorter. In float32 throughout, summed in float64, so that neither the
    microbatch nor the number of processes shows in six decimals.

    Raises:
        UserError: a token is outside the model's vocabulary.
    """
    torch.set_float32_matmul_precision("highest")
    lengths = token_lengths(target, file)

    def own_part() -> tuple[float, int]:
        loss_sum, num_bytes = 0.0, 0
        for tokens in _microbatches(target, file, stretch, microbatch_size, share):
            loss_sum += _loss_of(target, tokens)
            num_bytes += 0 if lengths is None else int(lengths[tokens[1:]].sum())
        return loss_sum, num_bytes

    loss_sum, num_bytes = share.sum(*share.on(own_part))
    bits = loss_sum / math.log(2) / num_bytes if num_bytes else None
    return Evaluation(stretch, loss_sum / stretch.num_tokens, bits)


def _loss_of(target: Target, tokens: np.ndarray) -> float:
    """Add up the losses of all tokens but the first: whole sequences, and what is left over."""
    longest = target.model.config.context_length
    wide = torch.from_numpy(tokens.astype(np.int64)).to(target.device)
    token_ids, targets = wide[:-1], wide[1:]
    whole = len(token_ids) // longest * longest
    total = 0.0
    if whole:
        shape = (-1, longest)
        total += summed_loss(target.model, token_ids[:whole].view(shape),
                             targets[:whole].view(shape))
    if whole < len(token_ids):
        total += summed_loss(target.model, token_ids[None, whole:], targets[None, whole:])
    return total


def summed_loss(model: GPTModel, token_ids: Tensor, targets: Tensor) -> float:
    """Add up the cross-entropies of all targets, in nats: (B, T) int64 both."""
    x = model.final_norm(model.transform(model.embed(token_ids))).flatten(0, 1)  # (B * T, C)
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for rows, wanted in zip(x.split(ROWS_OF_LOGITS), targets.flatten().split(ROWS_OF_LOGITS),
                            strict=True):
        logits = F.linear(rows, model.head_weight)
        total += F.cross_entropy(logits, wanted, reduction="none").sum(dtype=torch.float64)
    return total.item()


def token_lengths(target: Target, file: TokenFile) -> np.ndarray | None:
    """Give how many bytes of text each token id stands for: (V,) int64; an end of text for none.

    None where the file does not tell its tokenizer and neither does the model.
    """
    name = (file.metadata.get("tokenizer") or target.tokenizer_name
            or TOKENIZERS_BY_VOCABULARY.get(target.model.config.vocab_size))
    if name is None:
        return None
    tokenizer = load_tokenizer(name)
    lengths = np.zeros(max(target.model.config.vocab_size, tokenizer.n_vocab), dtype=np.int64)
    for token_id in range(tokenizer.n_vocab):
        if token_id != tokenizer.eot_token:
            lengths[token_id] = len(tokenizer.decode_single_token_bytes(token_id))
    return lengths


def _microbatches(target: Target, file: TokenFile, stretch: Slice, microbatch_size: int,
                  share: Share) -> Iterator[np.ndarray]:
    """Read this process's microbatches, (B * T + 1,) uint16 each; the last may be of any length."""
    config = target.model.config
    stride = microbatch_size * config.context_length
    own = share.of(-(-stretch.num_tokens // stride))
    for index in tqdm(own, unit="batch", desc=target.name, leave=False,
                      disable=None if speaks() else True):
        first = stretch.start_token + index * stride
        stop = min(first + stride, stretch.start_token + stretch.num_tokens) + 1
        tokens = file.read(first, stop)
        check_token_ids(tokens, Path(file.path), first=first, vocab_size=config.vocab_size)
        yield tokens
