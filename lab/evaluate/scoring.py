"""The loss of a model on held-out tokens, and its answers to the questions of a task, in float32.

Questions are split into tokens and scored as in the lm-eval harness: each choice follows its
context after a space; an empty context is the end-of-text token; what does not fit loses its
beginning.
"""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from basics.errors import UserError, one_line, print_error
from gpt import GPTModel
from lab.evaluate.tasks import Quiz
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
Z_95 = 1.959964  # of the normal distribution


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


def share(is_right: np.ndarray) -> Figure:
    """Return the share of right questions, (N,) bool, with its interval. Source: Wilson 1927."""
    found = float(is_right.mean())
    num_questions = len(is_right)
    z2 = Z_95**2
    scale = 1 + z2 / num_questions
    middle = (found + z2 / (2 * num_questions)) / scale
    variance = found * (1 - found) / num_questions + z2 / (4 * num_questions**2)
    half = Z_95 / scale * math.sqrt(variance)
    return Figure(found, (max(0.0, middle - half), min(1.0, middle + half)))


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


class Text(NamedTuple):
    """A context and a choice as tokens, of which the last `num_new` are the choice."""

    tokens: tuple[int, ...]
    num_new: int
    is_cut: bool  # it has lost its beginning


@torch.inference_mode()
def evaluate(target: LoadedModel, part: Slice, *, microbatch_size: int) -> Record:
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
    return _head_losses(model, x, token_ids[1:])[:, 0].cpu().numpy()


def _head_losses(model: GPTModel, x: Tensor, targets: Tensor) -> Tensor:
    """Return each token's loss, and 1 where another is likelier: (N, C), (N,) to (N, 2) float64."""
    found = []
    parts = model.final_norm(x).split(TOKENS_PER_CHUNK)
    for part, wanted in zip(parts, targets.split(TOKENS_PER_CHUNK), strict=True):
        logits = F.linear(part, model.head_weight)
        losses = F.cross_entropy(logits, wanted, reduction="none").double()
        is_missed = (logits.argmax(1) != wanted).double()
        found.append(torch.stack([losses, is_missed], 1))
    return torch.cat(found)


def encode_questions(target: LoadedModel, quiz: Quiz) -> list[list[Text]]:
    """Turn questions into tokens, a text for each choice. Raises: UserError: one is too long."""
    tokenizer = target.load_tokenizer()
    longest = target.model.config.context_length + 1  # the last token is only a target
    found: list[list[Text]] = []
    for question in quiz.questions:
        before = tokenizer.encode_ordinary(question.context.rstrip())
        start = [] if before else [tokenizer.eot_token]
        texts = []
        for choice in question.choices:
            tokens = start + tokenizer.encode_ordinary(f"{question.context} {choice}")
            num_new = len(tokens) - len(start or before)
            if num_new >= longest:
                raise UserError(
                    f"{quiz.name}, {quiz.source}: the choice {choice[:30]!r} has"
                    f" {num_new:,} tokens, but {target.name} has a context of"
                    f" {longest - 1:,}; leave the question out, or name another model"
                )
            texts.append(Text(tuple(tokens[-longest:]), num_new, len(tokens) > longest))
        found.append(texts)
    return found


@torch.inference_mode()
def score(target: LoadedModel, quiz: Quiz, texts: list[list[Text]], microbatch_size: int) -> Record:
    """Score a model on all questions of a task, whose texts are those of `encode_questions`.

    A text is scored once: two equal choices must have exactly equal log probabilities. A forward
    pass has as many tokens as `microbatch_size` sequences of the model's context length.
    """
    torch.set_float32_matmul_precision("highest")
    unique = list(dict.fromkeys(text for of_one in texts for text in of_one))
    unique.sort(key=lambda text: -len(text.tokens))
    batch_tokens = microbatch_size * target.model.config.context_length
    results: dict[Text, tuple[float, bool]] = {}
    with tqdm(
        total=len(unique), desc=one_line(target.name), unit="text", leave=False, disable=None
    ) as bar:
        while len(results) < len(unique):
            rest = unique[len(results) :]
            num_inputs = len(rest[0].tokens) - 1  # of the longest text of the batch
            batch = rest[: max(1, batch_tokens // max(1, num_inputs))]
            results.update(zip(batch, _score(target, batch), strict=True))
            bar.update(len(batch))
    has_choice = len(quiz.questions[0].choices) > 1  # else the task is to predict the last word
    is_right = []
    is_likeliest_per_character = []
    losses = []  # minus the log probability of the right choice
    for question, of_one in zip(quiz.questions, texts, strict=True):
        log_probabilities = np.array([results[text][0] for text in of_one])
        lengths = [len(choice) for choice in question.choices]
        log_probability, is_greedy = results[of_one[question.right]]
        is_likeliest = log_probabilities.argmax() == question.right
        is_right.append(is_likeliest if has_choice else is_greedy)
        likeliest_per_character = (log_probabilities / lengths).argmax()
        is_likeliest_per_character.append(likeliest_per_character == question.right)
        losses.append(-log_probability)
    figures = {
        "accuracy": share(np.array(is_right)),
        "normalised_accuracy": share(np.array(is_likeliest_per_character)),
        "perplexity": ratio(np.array(losses), np.ones(len(losses))).through(exp),
    }
    num_cut = sum(text.is_cut for of_one in texts for text in of_one)
    if num_cut:
        print_error(
            f"warning: {quiz.name}: {num_cut:,} texts are longer than the context of"
            f" {target.name} and lost their beginning, as in lm-eval"
        )
    record = {
        "benchmark": quiz.name,
        "questions": len(quiz.questions),
        "questions_from": quiz.source,
        "split": quiz.split,
        "cut_texts": num_cut,
    }
    for key in quiz.figures:
        record |= entries(key, figures[key])
    return record


def _score(target: LoadedModel, texts: list[Text]) -> list[tuple[float, bool]]:
    """Return the log probability of each choice, and whether all its tokens are the likeliest."""
    tokens = torch.zeros(len(texts), len(texts[0].tokens), dtype=torch.int64)  # (B, T + 1)
    is_new = torch.zeros(tokens[:, 1:].shape, dtype=torch.bool)  # (B, T), of the targets
    for row, text in enumerate(texts):
        length = len(text.tokens)
        tokens[row, :length] = torch.tensor(text.tokens)  # padding follows: causality hides it
        is_new[row, length - 1 - text.num_new : length - 1] = True
    tokens = tokens.to(target.device)
    is_new = is_new.to(target.device)
    model = target.model
    x = model.transform(model.embed(tokens[:, :-1]))[is_new]  # (new tokens, C)
    found = _head_losses(model, x, tokens[:, 1:][is_new])
    sums = torch.zeros(len(texts), 2, dtype=torch.float64, device=target.device)
    sums.index_add_(0, is_new.nonzero()[:, 0], found)
    return [(-loss, num_misses == 0) for loss, num_misses in sums.tolist()]
