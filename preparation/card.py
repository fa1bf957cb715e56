"""What is said of a dataset: the progress, a summary, and its README.md, a card for the hub."""

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from basics.errors import one_line, print_error
from basics.text import counted, escaped
from preparation.encoding import Losses
from preparation.sources import Request, first_left_out
from preparation.token_stream import REPLACED, TEXT_BYTES, Counts
from settings.data import token_file_name
from tokens.tokenizer import TOKENIZER_FILE, file_beside, load_tokenizer

CARD_FILE = "README.md"
FEW_DOCUMENTS = 5  # whose loss may not stand for all text
LEFT_OVER = 0.01  # of a dataset's tokens in a mix, without a warning
LINE_INTERVAL = 30  # seconds between plain lines

CARD = """---
{front_matter}
---

# {name}, tokenised

{documents} of {source} as token ids of the tokenizer `{tokenizer}`: {amount}.

| file | documents | tokens | bytes |
|---|---|---|---|
{rows}

Each file holds one vector `tokens` of 16-bit unsigned integers; a token with the id {end_of_text}
ends each document. Counts, tokenizer and source are also in the metadata of the files.

## How to load it

```python
from safetensors import safe_open

with safe_open("train.safetensors", framework="numpy") as file:
    tokens = file.get_slice("tokens")[0:1024]  # reads only these
```

`ddp_train.py` trains on it if `dataset` in `train.json` is the name of this directory or of this
repository.
{notes}"""


class _Lines:
    """A file that prints what tqdm writes, its bar, as lines."""

    def write(self, text: str) -> None:
        if text.strip():
            print_error(text.strip())

    def flush(self) -> None:
        pass


def progress_bar(num_bytes: int) -> tqdm:
    """Return a bar on a terminal, which elsewhere prints a line every LINE_INTERVAL seconds.

    It counts bytes of text, from those of an earlier launch on.
    """
    where: dict[str, Any] = {"dynamic_ncols": True}
    if not sys.stderr.isatty():
        where = {
            "file": _Lines(),
            "ncols": 0,
            "mininterval": LINE_INTERVAL,
            "delay": LINE_INTERVAL,
            "miniters": 1,
        }
    return tqdm(initial=num_bytes, unit="B", unit_scale=True, leave=False, **where)


@dataclass(frozen=True)
class Findings:
    """Numbers of documents and characters."""

    num_empty: int = 0  # documents without text
    num_damaged: int = 0  # documents with bytes that were not in their encoding
    num_replaced: int = 0  # characters that stand for such bytes

    @classmethod
    def of(cls, documents: Iterable[np.ndarray]) -> "Findings":
        """Count what documents have, in blocks of rows of an index."""
        found = np.zeros(3, dtype=np.int64)
        for rows in documents:
            replaced = rows[:, REPLACED]
            found[0] += np.count_nonzero(rows[:, TEXT_BYTES] == 0)
            found[1] += np.count_nonzero(replaced)
            found[2] += int(replaced.sum())
        return cls(*found.tolist())


@dataclass(frozen=True)
class Portion:
    """What a split of a mix has of one source."""

    weight: str  # as it was given
    counts: Counts
    num_passes: float  # how often the source's documents for this split are in it


@dataclass
class Prepared:
    """A finished dataset."""

    request: Request
    splits: dict[str, Counts]
    findings: Findings = Findings()
    left_out: Mapping[str, str] = field(default_factory=dict)  # files and reasons
    num_repeated: int = 0  # validation documents that are in the training split too
    losses: Losses = Losses()
    has_last_for_validation: bool = False  # the last documents of the source
    # Of a mix: for each split, the sources by name.
    portions: dict[str, Mapping[str, Portion]] = field(default_factory=dict)

    @property
    def total(self) -> Counts:
        return sum(self.splits.values(), Counts())

    def metadata(self, split: str, max_token_id: int) -> dict[str, str]:
        """Return the metadata of a token file."""
        counts = self.splits[split]
        metadata = {
            "num_documents": counts.num_documents,
            "num_tokens": counts.num_tokens,
            "max_token_id": max_token_id,
            # Zero is a number of bytes, but of a mix it stands for one that is unknown.
            "num_text_bytes": counts.num_text_bytes or (None if self.portions else 0),
            "tokenizer": self.request.tokenizer,
            "source": self.request.source[:400],
            "revision": self.request.revision[:100],
            "num_files_left_out": len(self.left_out) or None,
            "num_replaced_characters": self.findings.num_replaced or None,
            "num_validation_documents_in_training": self.num_repeated or None,
        }
        if self.portions:
            metadata["sources"] = json.dumps(
                {
                    name: {
                        "weight": portion.weight,
                        "num_tokens": portion.counts.num_tokens,
                        "num_passes": round(portion.num_passes, 3),
                    }
                    for name, portion in self.portions[split].items()
                }
            )
        return {key: str(value) for key, value in metadata.items() if value is not None}

    def amount(self) -> str:
        """Return the tokens, and the bytes of text unless they are unknown or none."""
        num_tokens = self.total.num_tokens
        num_bytes = self.total.num_text_bytes
        tokens = f"{num_tokens:,} tokens"
        if not num_bytes:
            return tokens
        return f"{tokens}, {num_bytes:,} bytes of text, {num_bytes / num_tokens:.2f} per token"

    def warnings(self) -> list[str]:
        """Say what was found that makes the dataset less useful."""
        lines = []
        if self.findings.num_damaged:
            lines.append(
                f"{counted(self.findings.num_damaged, 'document')} with bytes that are not"
                f" {self.request.encoding or 'UTF-8'}:"
                f" {counted(self.findings.num_replaced, 'character')} became U+FFFD"
            )
        train, validation = self.splits["train"], self.splits["validation"]
        is_few = train.num_documents > 1 and validation.num_documents < FEW_DOCUMENTS
        if self.has_last_for_validation and is_few:
            lines.append(
                "the validation split is only the last"
                f" {counted(validation.num_documents, 'document')} of the source; a larger"
                " --validation-fraction takes more"
            )
        if self.num_repeated:
            lines.append(
                f"{self.num_repeated:,} of"
                f" {counted(self.splits['validation'].num_documents, 'validation document')}"
                f" {'is' if self.num_repeated == 1 else 'are'} in the training split too"
            )
        for split, portions in self.portions.items():
            passes = {portion.num_passes: name for name, portion in portions.items()}
            left = 1 - min(passes)
            if left > LEFT_OVER:
                name = passes[1]
                lines.append(
                    f"the {split} split ends with the last document of {name}, and {left:.0%} of"
                    f" {passes[min(passes)]} is left over: change the weights, or let {name} start"
                    " over (--repeat)"
                )
        if self.losses.num_changed:
            lines.append(
                f"the tokenizer loses text: {self.losses.num_changed:,} of"
                f" {self.losses.num_sampled:,} sampled texts do not come back"
                f" ({self.losses.example})"
            )
        return lines

    def summary(self, output_dir: Path) -> str:
        """Describe the finished dataset in a few lines."""
        lines = [f"{counted(self.total.num_documents, 'document')}, {self.amount()}"]
        if self.findings.num_empty:
            lines.append(f"documents without text: {self.findings.num_empty:,}")
        lines += [
            f"{output_dir / split}.safetensors:"
            f" {counted(part.num_documents, 'document')}, {part.num_tokens:,} tokens"
            for split, part in self.splits.items()
        ]
        num_train = self.splits["train"].num_tokens
        for name, portion in self.portions.get("train", {}).items():
            counts = portion.counts
            lines.append(
                f"{name}, weight {portion.weight}: {counts.num_tokens / num_train:.2%} of the"
                f" training tokens, {counted(counts.num_documents, 'document')}, its"
                f" training documents {portion.num_passes:.2f} times"
            )
        lines += [one_line(f"warning: {line}") for line in self.warnings()]
        if self.left_out:
            first = [f"{name} ({reason})" for name, reason in first_left_out(self.left_out)]
            lines.append(f"left out {counted(len(self.left_out), 'file')}, all named in README.md:")
            lines.append(one_line("  " + ", ".join(first)))
        return "\n".join(lines)


def write_card(dataset_dir: Path, dataset: Prepared) -> None:
    """Write README.md next to the token files, which must be complete."""
    from huggingface_hub import DatasetCardData  # slow to import

    request = dataset.request
    file = file_beside(dataset_dir, request.tokenizer)
    card_data = DatasetCardData(
        license=request.licence,
        language=request.languages or None,
        task_categories=["text-generation"],
        pretty_name=f"{request.title}, tokenised",
        source_datasets=[request.hub_name or "original"],
        tags=["tokens"] if file else ["tokens", request.tokenizer],
    )
    rows = [
        f"| `{token_file_name(split)}` | {counts.num_documents:,} | {counts.num_tokens:,} |"
        f" {(dataset_dir / token_file_name(split)).stat().st_size:,} |"
        for split, counts in dataset.splits.items()
    ]
    revision = f" (revision {request.revision})" if request.revision else ""
    notes = ""
    if dataset.portions:
        notes += (
            "\n| source | weight | share of the training tokens | tokens | documents | passes |\n"
            "|---|---|---|---|---|---|\n"
        )
        num_train = dataset.splits["train"].num_tokens
        for source, portion in dataset.portions["train"].items():
            counts = portion.counts
            notes += (
                f"| {source} | {portion.weight} | {counts.num_tokens / num_train:.2%} |"
                f" {counts.num_tokens:,} | {counts.num_documents:,} | {portion.num_passes:.2f} |\n"
            )
    if not request.hub_name:
        notes += (
            "\nBefore you publish this dataset, set the licence and the language above to those of"
            " the source.\n"
        )
    for line in dataset.warnings():
        notes += f"\n{escaped(line)}.\n"
    if dataset.left_out:
        notes += "\nFiles that were left out:\n\n"
        for name, reason in dataset.left_out.items():
            notes += f"- {escaped(one_line(name))}: {escaped(reason)}\n"
    card = CARD.format(
        front_matter=card_data.to_yaml(),
        name=escaped(request.title),
        rows="\n".join(rows),
        documents=counted(dataset.total.num_documents, "document"),
        amount=dataset.amount(),
        notes=notes,
        source=escaped(request.source + revision),
        tokenizer=TOKENIZER_FILE if file else request.tokenizer,
        end_of_text=load_tokenizer(request.tokenizer, file).eot_token,
    )
    (dataset_dir / CARD_FILE).write_text(card, encoding="utf-8")
