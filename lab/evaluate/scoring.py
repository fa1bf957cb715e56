"""Score a model on questions, by the log probabilities that it gives to their choices.

Texts are split into tokens and scored as in the lm-eval harness: each choice follows its context
after a space; an empty context is the end-of-text token; what does not fit loses its beginning.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from basics.errors import UserError, one_line
from lab.evaluate.held_out import head_losses
from lab.evaluate.tasks import Answers, Question
from trainer.models import LoadedModel


class Text(NamedTuple):
    """A context and a choice as tokens, of which the last `num_new` are the choice."""

    tokens: tuple[int, ...]
    num_new: int
    is_cut: bool  # it has lost its beginning


def encode_questions(target: LoadedModel, questions: list[Question]) -> list[list[Text]]:
    """Turn questions into tokens: a text for each choice.

    Raises:
        UserError: a choice is longer than the model's context, or its tokenizer is not known.
    """
    tokenizer = target.load_tokenizer()
    longest = target.model.config.context_length + 1  # the last token is only a target
    found: list[list[Text]] = []
    for question in questions:
        before = tokenizer.encode_ordinary(question.context.rstrip())
        start = [] if before else [tokenizer.eot_token]
        texts: list[Text] = []
        for choice in question.choices:
            tokens = start + tokenizer.encode_ordinary(f"{question.context} {choice}")
            num_new = len(tokens) - len(start or before)
            if num_new >= longest:
                raise UserError(f"{question.place}: a choice has {num_new:,} tokens, but"
                                f" {target.name} has a context of {longest - 1:,}; leave the"
                                " question out, or name another model")
            texts.append(Text(tuple(tokens[-longest:]), num_new, len(tokens) > longest))
        found.append(texts)
    return found


@torch.inference_mode()
def score(target: LoadedModel, questions: list[Question], texts: list[list[Text]], *,
          microbatch_size: int) -> Answers:
    """Score a model on all questions.

    A text is scored once: two equal choices must have exactly equal log probabilities.

    Args:
        texts: of `encode_questions`.
        microbatch_size: sequences of the model's context length whose tokens go into one forward
            pass; of shorter texts, as many more.
    """
    torch.set_float32_matmul_precision("highest")
    unique = dict.fromkeys(text for of_one in texts for text in of_one)
    batches = list(_batches(sorted(unique, key=lambda text: -len(text.tokens)),
                            microbatch_size * target.model.config.context_length))
    results = {text: result for batch in tqdm(batches, desc=one_line(target.name), unit="batch",
                                              leave=False, disable=None)
               for text, result in zip(batch, _score(target, batch), strict=True)}
    answers = []
    for question, of_one in zip(questions, texts, strict=True):
        sums = np.array([results[text][0] for text in of_one])
        lengths = np.array([len(choice) for choice in question.choices])
        log_probability, is_greedy = results[of_one[question.right]]
        answers.append((sums.argmax() == question.right,
                        (sums / lengths).argmax() == question.right, is_greedy, log_probability))
    return Answers(*map(np.array, zip(*answers, strict=True)))


def _batches(texts: list[Text], budget: int) -> Iterator[list[Text]]:
    """Divide texts, the longest first, into batches of at most `budget` tokens."""
    first = 0
    while first < len(texts):
        size = max(1, budget // max(1, len(texts[first].tokens) - 1))
        yield texts[first : first + size]
        first += size


def _score(target: LoadedModel, texts: list[Text]) -> list[tuple[float, bool]]:
    """Return the log probability of each choice after its context, summed in float64.

    And whether each of its tokens is the likeliest of all.
    """
    tokens = torch.zeros(len(texts), len(texts[0].tokens), dtype=torch.int64)  # (B, T + 1)
    is_new = torch.zeros(tokens[:, 1:].shape, dtype=torch.bool)  # (B, T), of the targets
    for row, text in enumerate(texts):
        length = len(text.tokens)
        tokens[row, :length] = torch.tensor(text.tokens)  # padding follows: causality hides it
        is_new[row, length - 1 - text.num_new : length - 1] = True
    tokens, is_new = tokens.to(target.device), is_new.to(target.device)
    model = target.model
    x = model.transform(model.embed(tokens[:, :-1]))[is_new]  # (new tokens, C)
    found = torch.cat([torch.stack([losses, (logits.argmax(1) != wanted).double()], 1)
                       for logits, wanted, losses in head_losses(model, x, tokens[:, 1:][is_new])])
    sums = torch.zeros(len(texts), 2, dtype=torch.float64, device=target.device)
    sums.index_add_(0, is_new.nonzero()[:, 0], found)  # of losses, of misses
    return [(-loss, num_misses == 0) for loss, num_misses in sums.tolist()]
