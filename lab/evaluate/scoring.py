"""Score a model on questions, by the log probabilities that it gives to their choices.

Texts are split into tokens and scored as in the lm-eval harness: each choice follows its context
after a space; an empty context is the end-of-text token; what does not fit loses its beginning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from basics.errors import UserError, one_line
from lab.evaluate.held_out import TOKENS_PER_CHUNK
from lab.evaluate.intervals import Interval, exp, of_ratio, of_share, pair_sums
from tokens.tokenizer import Tokenizer
from trainer.models import LoadedModel


@dataclass(frozen=True)
class Question:
    """A context, texts that may follow it, and the index of the right one.

    Attributes:
        place: the task, the file and the number in it, for errors.
    """

    context: str
    choices: list[str]
    right: int
    place: str = field(default="a question", compare=False)


class Figure(NamedTuple):
    """A result and its 95% interval."""

    value: float
    interval: Interval | None


@dataclass(frozen=True)
class Score:
    """A model's results on all questions of a task.

    Attributes:
        num_right: questions whose right choice has the highest log probability of all.
        num_right_normalised: the same, of log probabilities divided by characters of the choice.
        num_greedy: questions each token of whose right choice is the likeliest of all tokens.
        log_probability_sums: `pair_sums` of the right choices' log probabilities, and ones.
        num_cut: texts that lost their beginning.
    """

    num_questions: int
    num_right: int
    num_right_normalised: int
    num_greedy: int
    log_probability_sums: np.ndarray
    num_cut: int

    def share(self, number: str) -> Figure:
        """Return one of the numbers as a share of the questions."""
        count = getattr(self, number)
        return Figure(count / self.num_questions, of_share(count, self.num_questions))

    def perplexity(self) -> Figure:
        """Return e to the mean negative log probability of the right choices (not of tokens)."""
        interval = of_ratio(self.log_probability_sums)
        mean = self.log_probability_sums[1] / self.num_questions
        return Figure(exp(-mean), interval and (exp(-interval[1]), exp(-interval[0])))


class _Text(NamedTuple):
    """A context and a choice as tokens, of which the last `num_new` are the choice."""

    tokens: tuple[int, ...]
    num_new: int


Texts = list[list[tuple[_Text, bool]]]  # of each question, each choice; whether it was cut


class _Result(NamedTuple):
    log_probability: float
    is_greedy: bool


def encode_questions(target: LoadedModel, questions: list[Question]) -> Texts:
    """Turn questions into tokens.

    Raises:
        UserError: a choice is longer than the model's context, or its tokenizer is not known.
    """
    tokenizer = target.load_tokenizer()
    return [_texts_of(target, tokenizer, question) for question in questions]


@torch.inference_mode()
def score(target: LoadedModel, questions: list[Question], texts: Texts, *,
          microbatch_size: int) -> Score:
    """Score a model on all questions.

    Args:
        texts: of `encode_questions`.
        microbatch_size: sequences of the model's context length whose tokens go into one forward
            pass; of shorter texts, as many more.
    """
    torch.set_float32_matmul_precision("highest")
    unique = list(dict.fromkeys(text for of_one in texts for text, _ in of_one))
    results = _results(target, unique, microbatch_size=microbatch_size)
    answers = np.array([_judge(question, [results[text] for text, _ in of_one])
                        for question, of_one in zip(questions, texts, strict=True)])
    right, normalised, greedy = map(int, answers[:, :3].sum(axis=0))
    return Score(len(questions), right, normalised, greedy,
                 pair_sums(answers[:, 3], np.ones(len(answers))),
                 num_cut=sum(is_cut for of_one in texts for _, is_cut in of_one))


def _judge(question: Question, results: list[_Result]) -> tuple[bool, bool, bool, float]:
    """Return whether the right choice wins, wins by length, is greedy; its log probability."""
    sums = np.array([result.log_probability for result in results])
    lengths = np.array([len(choice) for choice in question.choices])
    of_right = results[question.right]
    return (sums.argmax() == question.right, (sums / lengths).argmax() == question.right,
            of_right.is_greedy, of_right.log_probability)


def _texts_of(target: LoadedModel, tokenizer: Tokenizer,
              question: Question) -> list[tuple[_Text, bool]]:
    """Return each choice after the context, and whether it lost its beginning. Raises: UserError"""
    longest = target.model.config.context_length + 1  # the last token is only a target
    before = tokenizer.encode_ordinary(question.context.rstrip())
    start = [] if before else [tokenizer.eot_token]
    found = []
    for choice in question.choices:
        tokens = start + tokenizer.encode_ordinary(f"{question.context} {choice}")
        num_new = len(tokens) - len(start or before)
        if num_new >= longest:
            raise UserError(f"{question.place}: a choice has {num_new:,} tokens, but {target.name}"
                            f" has a context of {longest - 1:,}; leave the question out, or name"
                            " another model")
        found.append((_Text(tuple(tokens[-longest:]), num_new), len(tokens) > longest))
    return found


def _results(target: LoadedModel, texts: list[_Text], *,
             microbatch_size: int) -> dict[_Text, _Result]:
    """Score different texts, in batches of similar lengths, the longest first.

    A text is scored once: two equal choices must have exactly equal log probabilities.
    """
    by_length = sorted(texts, key=lambda text: -len(text.tokens))
    budget = microbatch_size * target.model.config.context_length
    batches = list(_batches(by_length, budget))
    return {text: result for batch in tqdm(batches, desc=one_line(target.name), unit="batch",
                                           leave=False, disable=None)
            for text, result in zip(batch, _score(target, batch), strict=True)}


def _batches(texts: list[_Text], budget: int) -> Iterator[list[_Text]]:
    first = 0
    while first < len(texts):
        size = max(1, budget // max(1, len(texts[first].tokens) - 1))
        yield texts[first : first + size]
        first += size


def _score(target: LoadedModel, texts: list[_Text]) -> list[_Result]:
    """Return the log probability of each choice after its context, summed in float64."""
    tokens = torch.zeros(len(texts), len(texts[0].tokens), dtype=torch.int64)  # (B, T + 1)
    is_new = torch.zeros(tokens[:, 1:].shape, dtype=torch.bool)  # (B, T), of the targets
    for row, text in enumerate(texts):
        length = len(text.tokens)
        tokens[row, :length] = torch.tensor(text.tokens)  # padding follows: causality hides it
        is_new[row, length - 1 - text.num_new : length - 1] = True
    tokens, is_new = tokens.to(target.device), is_new.to(target.device)
    model, targets = target.model, tokens[:, 1:][is_new]
    x = model.final_norm(model.transform(model.embed(tokens[:, :-1]))[is_new])  # (new tokens, C)
    losses, misses = [], []
    for chunk, wanted in zip(x.split(TOKENS_PER_CHUNK), targets.split(TOKENS_PER_CHUNK),
                             strict=True):
        logits = F.linear(chunk, model.head_weight)
        losses.append(F.cross_entropy(logits, wanted, reduction="none").double())
        misses.append((logits.argmax(1) != wanted).double())
    sums = torch.zeros(len(texts), 2, dtype=torch.float64, device=target.device)
    sums.index_add_(0, is_new.nonzero()[:, 0], torch.stack([torch.cat(losses),
                                                            torch.cat(misses)], 1))
    return [_Result(-loss, num_misses == 0) for loss, num_misses in sums.tolist()]
