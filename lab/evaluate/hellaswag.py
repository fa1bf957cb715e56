"""HellaSwag: whether a model gives the right one of four endings the highest probability.

Source: Zellers et al. 2019, "HellaSwag: Can a Machine Really Finish Your Sentence?". Texts are
cleaned and scored as in the lm-eval harness: by the sum of the log probabilities of an ending's
tokens after a space, and by that sum divided by the ending's length in characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from basics.errors import UserError
from lab.evaluate.sharing import Share
from preparation.hub import ask_hub
from tokens.tokenizer import Tokenizer
from trainer.targets import HUB_NAME, Target

LONGEST_LINE = 2**20


@dataclass(frozen=True)
class Question:
    """A context, its possible endings, and the index of the right one."""

    context: str
    endings: list[str]
    right: int


@dataclass(frozen=True)
class Score:
    """The fractions of questions answered correctly."""

    num_questions: int
    accuracy: float
    normalised_accuracy: float  # log probabilities divided by the length of the ending

    def standard_error(self, accuracy: float) -> float:
        return (accuracy * (1 - accuracy) / max(1, self.num_questions - 1)) ** 0.5


@torch.inference_mode()
def score(target: Target, questions: list[Question], *, microbatch_size: int,
          share: Share) -> Score:
    """Score a model on all questions. Every rank.

    Args:
        microbatch_size: questions in one forward pass.
    """
    tokenizer = share.run(target.load_tokenizer)
    own = [questions[index] for index in share.indices(len(questions))]

    def count_right() -> tuple[int, int]:
        num_right = num_right_normalised = 0
        for first in share.progress(range(0, len(own), microbatch_size), desc=target.name):
            batch = own[first : first + microbatch_size]
            sums = _log_probabilities(target, tokenizer, batch)
            for question, by_ending in zip(batch, sums.split([len(q.endings) for q in batch]),
                                           strict=True):
                lengths = torch.tensor([len(ending) for ending in question.endings])
                num_right += int(by_ending.argmax()) == question.right
                num_right_normalised += int((by_ending / lengths).argmax()) == question.right
        return num_right, num_right_normalised

    num_right, num_right_normalised = share.sum(*share.run(count_right))
    return Score(len(questions), num_right / len(questions), num_right_normalised / len(questions))


def read_questions(source: str) -> list[Question]:
    """Read a local file (JSON lines or parquet), or the validation file of a hub dataset.

    Raises:
        UserError: there is no such file, or it does not hold HellaSwag's questions.
    """
    path = Path(source)
    if not path.exists() and HUB_NAME.fullmatch(source):
        path = _download(source)
    try:
        questions = [_question(record) for record in _records(path)]
    except FileNotFoundError:
        raise UserError(f"{source}: no such file, and not the owner/name of a dataset on the hub;"
                        " give hellaswag_val.jsonl or Rowan/hellaswag") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: not HellaSwag's questions ({type(error).__name__}:"
                        f" {str(error)[:60]}); each needs activity_label, ctx_a, ctx_b, endings,"
                        " label") from None
    if not questions:
        raise UserError(f"{path}: has no questions; give HellaSwag's validation file")
    return questions


def _records(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        yield from pyarrow.parquet.read_table(path).to_pylist()
        return
    with path.open(encoding="utf-8") as file:
        while line := file.readline(LONGEST_LINE):
            if line.strip():
                yield json.loads(line)


def _question(record: dict[str, Any]) -> Question:
    context = f"{record['activity_label']}: {record['ctx_a']} {record['ctx_b'].capitalize()}"
    if not isinstance(record["endings"], list):
        raise TypeError("endings is not a list")
    endings = [_clean(ending) for ending in record["endings"]]
    right = int(record["label"])
    if not (0 <= right < len(endings) and all(endings)):
        raise ValueError(f"label {right} with {len(endings)} endings, or an empty one")
    return Question(_clean(context), endings, right)


def _clean(text: str) -> str:
    """Remove the markup that WikiHow's texts still contain."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _log_probabilities(target: Target, tokenizer: Tokenizer, questions: list[Question]) -> Tensor:
    """Return the log probability of each ending after its context: (all endings,) float64."""
    longest = target.model.config.context_length + 1  # the last token is only a target
    texts, num_new = [], []
    for question in questions:
        num_context = len(tokenizer.encode_ordinary(question.context.rstrip()))
        for ending in question.endings:
            text = tokenizer.encode_ordinary(f"{question.context} {ending}")
            num_new.append(min(len(text) - num_context, longest - 1))
            texts.append(text[-longest:])  # keep the end of a long text
    tokens = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int64)  # (B, T + 1)
    is_new = torch.zeros(tokens[:, 1:].shape, dtype=torch.bool)  # (B, T), of the targets
    for row, (text, new) in enumerate(zip(texts, num_new, strict=True)):
        tokens[row, : len(text)] = torch.tensor(text)  # padding follows: causality hides it
        is_new[row, len(text) - 1 - new : len(text) - 1] = True
    tokens, is_new = tokens.to(target.device), is_new.to(target.device)
    model = target.model
    x = model.transform(model.embed(tokens[:, :-1]))[is_new]  # (new tokens, C): only their logits
    logits = F.linear(model.final_norm(x), model.head_weight)
    losses = F.cross_entropy(logits, tokens[:, 1:][is_new], reduction="none").double()
    sums = torch.zeros(len(texts), dtype=torch.float64, device=target.device)
    return -sums.index_add_(0, is_new.nonzero()[:, 0], losses).cpu()


def _download(repository: str) -> Path:
    from huggingface_hub import HfApi, hf_hub_download

    names = ask_hub(repository, lambda: HfApi().list_repo_files(repository, repo_type="dataset"))
    wanted = [name for name in names if re.search(r"val.*\.(parquet|jsonl)$", name)]
    if not wanted:
        raise UserError(f"{repository} on the Hugging Face hub: has no validation file; give"
                        " Rowan/hellaswag or a local file")
    return Path(ask_hub(repository, lambda: hf_hub_download(
        repository, wanted[0], repo_type="dataset")))
