"""The loss of a model on held-out tokens in float32, and its interval."""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from basics.errors import UserError, one_line
from gpt import GPTModel
from lab.runs import Record
from lab.stats import t_95
from tokens.token_file import TokenFile, check_token_ids
from tokens.tokenizer import ByteLengths, byte_lengths, file_beside, load_tokenizer, short_name
from trainer.models import LoadedModel

# The unit of the intervals. Neighbouring sequences share documents, so that their losses are alike;
# blocks of many documents are close to independent. A short text has smaller blocks, down to a few
# documents each. With fewer than `MIN_BLOCKS` their spread says next to nothing.
BLOCK_TOKENS = 16_384
MIN_BLOCKS = 8
MIN_BLOCK_DOCUMENTS = 4
TEXT_FACTS = ("source", "revision", "num_documents", "num_text_bytes")  # metadata of a text
TOKENS_PER_CHUNK = 1024  # whose logits exist at a time: 0.2 GiB with a vocabulary of 50,257


class Figure(NamedTuple):
    """A result and its 95% interval, which tells how far off it may be by sampling; or None."""

    value: float | None
    interval: tuple[float, float] | None

    def through(self, function: Callable[[float], float]) -> Self:
        """Return a rising function of the figure and of both bounds."""
        bounds = None
        if self.interval is not None:
            bounds = function(self.interval[0]), function(self.interval[1])
        return self._replace(value=function(self.value), interval=bounds)


def ratio(x: np.ndarray, y: np.ndarray) -> Figure:
    """Return sum(x) / sum(y) with its interval; x and y, (N,), such as losses and tokens of blocks.

    The interval is None with fewer than two pairs, or if an x is not finite. With equal y it is
    mean +- t x standard error of x / y, with Student's t for N - 1 degrees of freedom. No x is
    negative, so the lower bound is not either.

    Source: Cochran 1977, "Sampling Techniques", section 6.4 (the variance of a ratio).
    """
    n = len(x)
    total = float(y.sum())
    found = float(x.sum()) / total
    if n < 2 or not math.isfinite(found):
        return Figure(found, None)
    deviations = x - found * y
    variance = n / (n - 1) * float((deviations**2).sum())  # of sum(x)
    half = t_95(n - 1) * math.sqrt(variance) / total
    return Figure(found, (max(0.0, found - half), found + half))


def exp(exponent: float) -> float:
    """Return e to a power, at most 1e304: the perplexity of a very large loss."""
    return math.exp(min(exponent, 700.0))


def entries(key: str, figure: Figure) -> Record:
    """Return a figure as evaluations.jsonl has it; further decimals depend on the microbatch."""
    bounds = figure.interval and [round(bound, 6) for bound in figure.interval]
    return {key: figure.value, f"{key}_interval": bounds}


@dataclass(frozen=True)
class Slice:
    """A part of a token file: `num_tokens` inputs from `start_token` on; one more token follows."""

    dataset: str
    file: TokenFile
    start_token: int
    num_tokens: int

    def block_tokens(self) -> int:
        """Return the tokens of a block of the intervals: fewer in a short text."""
        fitting = self.num_tokens // MIN_BLOCKS
        num_documents = int(self.file.metadata.get("num_documents", 0))
        if fitting >= BLOCK_TOKENS or not num_documents:
            return BLOCK_TOKENS
        few_documents = -(-MIN_BLOCK_DOCUMENTS * self.file.num_tokens // num_documents)
        return min(BLOCK_TOKENS, max(fitting, few_documents))

    def text_identity(self) -> str | None:
        """Identify the text of a whole file, the same in all tokens; None for a part of a file."""
        facts = [self.file.metadata.get(key) for key in TEXT_FACTS]
        if None in facts or self.num_tokens != self.file.num_tokens - 1:
            return None
        identity = json.dumps([self.file.path.stem, *facts])
        return hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()


@torch.inference_mode()
def evaluate(target: LoadedModel, part: Slice, microbatch_size: int) -> Record:
    """Measure a model's loss in nats per token, in sequences of its own context length.

    All is computed in float32 and summed in float64: the microbatch size does not change the first
    six decimals. The intervals regard blocks of tokens as independent, and are None for fewer than
    `MIN_BLOCKS`. Bits per byte are None if the tokenizer is not known. Raises: UserError: the
    dataset has another tokenizer than the model, or ids outside of its vocabulary.
    """
    torch.set_float32_matmul_precision("highest")
    lengths = _token_lengths(target, part.file)
    config = target.model.config
    longest = config.context_length
    block_tokens = part.block_tokens()
    num_blocks = -(-part.num_tokens // block_tokens)
    sums = np.zeros((3, num_blocks))  # of each block's nats, tokens and bytes
    stride = microbatch_size * longest
    for place in tqdm(
        range(0, part.num_tokens, stride),
        unit="batch",
        desc=one_line(target.name),
        leave=False,
        disable=None,
    ):
        first = part.start_token + place
        count = min(stride, part.num_tokens - place)
        tokens = part.file.read(first, first + count + 1)
        check_token_ids(tokens, part.file.path, first=first, vocab_size=config.vocab_size)
        losses = _losses(target.model, tokens)
        # A sequence belongs to the block in which it begins.
        sequence = (place + np.arange(len(losses))) // longest
        block = sequence * longest // block_tokens
        sums[0] += np.bincount(block, losses, num_blocks)
        sums[1] += np.bincount(block, minlength=num_blocks)
        if lengths is not None:
            sums[2] += np.bincount(block, lengths.of(tokens), num_blocks)
    # Sequences that are longer than blocks leave some blocks empty.
    nats, num_tokens, num_bytes = sums[:, sums[1] > 0]
    loss = ratio(nats, num_tokens)
    bits = Figure(None, None)
    if num_bytes.any():
        bits = ratio(nats, num_bytes).through(lambda nats_per_byte: nats_per_byte / math.log(2))
    if len(nats) < MIN_BLOCKS:
        loss = loss._replace(interval=None)
        bits = bits._replace(interval=None)
    return {
        "dataset": part.dataset,
        "split": part.file.path.stem,
        "start_token": part.start_token,
        "num_tokens": part.num_tokens,
        "blocks": len(nats),
        "sequences": -(-part.num_tokens // longest),
        "tokenizer": target.tokenizer_name,
        "text": part.text_identity(),
        **entries("loss", loss),
        **entries("perplexity", loss.through(exp)),
        **entries("bits_per_byte", bits),
    }


def _token_lengths(target: LoadedModel, file: TokenFile) -> ByteLengths | None:
    """Return the text bytes of each token id; None if no tokenizer is known."""
    made_with = file.metadata.get("tokenizer")
    own = target.tokenizer_name
    if made_with and own and made_with != own:
        raise UserError(
            f"{file.path}: the tokenizer is {short_name(made_with)}, but that of"
            f" {target.name} is {short_name(own)}; name another --dataset"
        )
    if own:
        tokenizer = target.load_tokenizer()
    elif made_with:
        tokenizer = load_tokenizer(made_with, file_beside(file.path.parent, made_with))
    else:
        return None
    return byte_lengths(tokenizer, num_ids=target.model.config.vocab_size)


def _losses(model: GPTModel, tokens: np.ndarray) -> np.ndarray:
    """Return each token's loss: (N + 1,) uint16, the first only an input, to (N,) float64."""
    token_ids = torch.from_numpy(tokens.astype(np.int64)).to(model.token_embedding.weight.device)
    num_tokens = len(token_ids) - 1
    longest = model.config.context_length
    num_missing = -num_tokens % longest
    # Padding follows the last, shorter sequence: causality hides it.
    inputs = F.pad(token_ids[:-1], (0, num_missing)).view(-1, longest)  # (B, T)
    x = model.transform(model.embed(inputs)).flatten(0, 1)[:num_tokens]  # (N, C)
    losses = []
    parts = model.final_norm(x).split(TOKENS_PER_CHUNK)
    for part, targets in zip(parts, token_ids[1:].split(TOKENS_PER_CHUNK), strict=True):
        logits = F.linear(part, model.head_weight)
        losses.append(F.cross_entropy(logits, targets, reduction="none").double())
    return torch.cat(losses).cpu().numpy()
