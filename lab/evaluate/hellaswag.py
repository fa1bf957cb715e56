"""HellaSwag: which of four endings a model finds likeliest.

Source: Zellers et al. 2019, "HellaSwag: Can a Machine Really Finish Your Sentence?". Texts are
cleaned and scored as the lm-eval harness publishes it: the sum of the log probabilities of an
ending's tokens behind a space, and the same divided by the ending's length in characters.
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
from tiktoken import Encoding
from torch import Tensor
from tqdm import tqdm

from basics.errors import UserError
from lab.evaluate.sharing import Share, speaks
from lab.targets import HUB_NAME, Target
from preparation.hub import ask_hub
from tokens.tokenizer import load_tokenizer

LONGEST_LINE = 2**20


@dataclass(frozen=True)
class Question:
    """A beginning, its possible endings, and the number of the right one."""

    beginning: str
    endings: list[str]
    right: int


@dataclass(frozen=True)
class Score:
    """The shares of questions answered rightly."""

    num_questions: int
    accuracy: float
    normalised_accuracy: float  # by an ending's length in characters

    def error_of(self, share: float) -> float:
        """Give the standard error of a share: what another draw of questions would move it."""
        return (share * (1 - share) / max(1, self.num_questions - 1)) ** 0.5


@torch.inference_mode()
def score(target: Target, questions: list[Question], *, microbatch_size: int,
          share: Share) -> Score:
    """Put all questions to a model. A collective: every rank.

    Args:
        microbatch_size: questions at a time.
    """
    share.on(target.needs_tokenizer)
    tokenizer = load_tokenizer(target.needs_tokenizer())
    num_right = num_right_normalised = 0
    own = [questions[number] for number in share.of(len(questions))]
    for first in tqdm(range(0, len(own), microbatch_size), desc=target.name, leave=False,
                      unit="batch", disable=None if speaks() else True):
        asked = own[first : first + microbatch_size]
        found = _log_probabilities(target, tokenizer, asked).split([len(q.endings) for q in asked])
        for question, sums in zip(asked, found, strict=True):
            lengths = torch.tensor([len(ending) for ending in question.endings])
            num_right += int(sums.argmax()) == question.right
            num_right_normalised += int((sums / lengths).argmax()) == question.right
    num_right, num_right_normalised = share.sum(num_right, num_right_normalised)
    return Score(len(questions), num_right / len(questions), num_right_normalised / len(questions))


def read_questions(source: str) -> list[Question]:
    """Read a local file (JSON lines or parquet), or the validation file of a hub dataset.

    Raises:
        UserError: there is none, or it is not HellaSwag's.
    """
    path = Path(source)
    if not path.exists() and HUB_NAME.fullmatch(source):
        path = _fetched(source)
    try:
        questions = [_question(record) for record in _records(path)]
    except FileNotFoundError:
        raise UserError(f"{source}: no such file, and not owner/name of a dataset on the hub;"
                        " wanted hellaswag_val.jsonl or Rowan/hellaswag") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: not HellaSwag's questions ({type(error).__name__}:"
                        f" {str(error)[:60]}); wanted activity_label, ctx_a, ctx_b, endings, label"
                        ) from None
    if not questions:
        raise UserError(f"{path}: holds no question; wanted HellaSwag's validation file")
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
    beginning = f"{record['activity_label']}: {record['ctx_a']} {record['ctx_b'].capitalize()}"
    if not isinstance(record["endings"], list):
        raise TypeError("endings are no list")
    endings = [_clean(ending) for ending in record["endings"]]
    right = int(record["label"])
    if not (0 <= right < len(endings) and all(endings)):
        raise ValueError(f"label {right} with {len(endings)} endings, or an empty one")
    return Question(_clean(beginning), endings, right)


def _clean(text: str) -> str:
    """Take out the marks that the collection of WikiHow's texts has left."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _log_probabilities(target: Target, tokenizer: Encoding, questions: list[Question]) -> Tensor:
    """Give the log probability of each ending behind its beginning: (endings of all,) float64."""
    longest = target.model.config.context_length + 1  # the last token is only predicted
    texts, num_new = [], []
    for question in questions:
        num_known = len(tokenizer.encode_ordinary(question.beginning.rstrip()))
        for ending in question.endings:
            text = tokenizer.encode_ordinary(f"{question.beginning} {ending}")
            num_new.append(min(len(text) - num_known, longest - 1))
            texts.append(text[-longest:])  # of a long one the end
    tokens = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int64)  # (B, T + 1)
    is_new = torch.zeros(tokens[:, 1:].shape, dtype=torch.bool)  # (B, T), of the targets
    for row, (text, new) in enumerate(zip(texts, num_new, strict=True)):
        tokens[row, : len(text)] = torch.tensor(text)  # what pads comes after: nobody sees it
        is_new[row, len(text) - 1 - new : len(text) - 1] = True
    tokens, is_new = tokens.to(target.device), is_new.to(target.device)
    model = target.model
    x = model.transform(model.embed(tokens[:, :-1]))[is_new]  # (new tokens, C): no others' logits
    logits = F.linear(model.final_norm(x), model.head_weight)
    losses = F.cross_entropy(logits, tokens[:, 1:][is_new], reduction="none").double()
    sums = torch.zeros(len(texts), dtype=torch.float64, device=target.device)
    return -sums.index_add_(0, is_new.nonzero()[:, 0], losses).cpu()


def _fetched(repository: str) -> Path:
    from huggingface_hub import HfApi, hf_hub_download

    names = ask_hub(repository, lambda: HfApi().list_repo_files(repository, repo_type="dataset"))
    wanted = [name for name in names if re.search(r"val.*\.(parquet|jsonl)$", name)]
    if not wanted:
        raise UserError(f"{repository} on the Hugging Face hub: has no validation file; wanted"
                        " Rowan/hellaswag, or a local file")
    return Path(ask_hub(repository, lambda: hf_hub_download(
        repository, wanted[0], repo_type="dataset")))
