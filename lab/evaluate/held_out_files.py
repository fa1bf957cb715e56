"""Which tokens each target of `lab evaluate` is measured on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from basics.errors import UserError
from basics.files import check_inside
from lab.evaluate.held_out import Slice, choose_slice
from preparation.ensure_dataset import provide_dataset
from run_config import DATASET_NAME, load_run
from tokens.token_file import TokenFile
from trainer.models import is_run


@dataclass(frozen=True)
class Tokens:
    """The command line's options about tokens, and where runs and datasets are."""

    dataset: str | None
    split: str
    start_token: int | None
    num_tokens: int | None
    runs_dir: Path
    datasets_dir: Path


@dataclass(frozen=True)
class HeldOut:
    """The datasets of the targets, by the targets' names, and their files and slices."""

    datasets: dict[str, str]
    files: dict[str, TokenFile]
    slices: dict[str, Slice]

    @property
    def differ(self) -> bool:
        """Whether targets have different tokens, of the same text."""
        return len(self.files) > 1

    def of(self, name: str) -> tuple[TokenFile, Slice]:
        """Return the file and the slice of a target."""
        dataset = self.datasets[name]
        return self.files[dataset], self.slices[dataset]


def open_held_out(options: Tokens, names: list[str]) -> HeldOut:
    """Open the targets' datasets and choose the tokens.

    Runs whose datasets are the same text in other tokens are measured on all of it, each on its
    own dataset.

    Raises:
        UserError: a dataset is missing, too short, or of other text than another.
    """
    datasets = _datasets(options, names)
    files = {dataset: _open(options, dataset) for dataset in dict.fromkeys(datasets)}
    return HeldOut(dict(zip(names, datasets, strict=True)), files, _slices(options, files))


def _datasets(options: Tokens, names: list[str]) -> list[str]:
    """Return the dataset of each target: the one of its run, or of all runs. Raises: UserError."""
    if options.dataset:
        return [options.dataset] * len(names)
    own = [load_run(options.runs_dir, name).train.dataset if is_run(name, options.runs_dir)
           else None for name in names]
    found = set(own) - {None}
    if not found:
        raise UserError("--dataset: name the dataset to evaluate all targets on (no target is a"
                        " run)")
    if len(found) > 1 and None in own:
        raise _different_datasets(" and ".join(sorted(found)))
    return [dataset or next(iter(found)) for dataset in own]


def _slices(options: Tokens, files: dict[str, TokenFile]) -> dict[str, Slice]:
    """Choose the tokens of each dataset. Raises: UserError: they would not be the same text."""
    start_token, num_tokens = options.start_token, options.num_tokens
    if len(files) == 1:
        return {dataset: choose_slice(file, dataset, start_token=start_token,
                                      num_tokens=num_tokens) for dataset, file in files.items()}
    facts = [file.metadata for file in files.values()]
    if not _are_of_same_text(facts) or len({f.get("tokenizer") for f in facts}) < len(facts):
        raise _different_datasets(" and ".join(files))
    if start_token is not None or num_tokens is not None:
        raise UserError("--start-token and --tokens would choose different text in the datasets of"
                        " these runs; leave them out, or name one with --dataset")
    return {dataset: choose_slice(file, dataset, start_token=0, num_tokens=file.num_tokens - 1)
            for dataset, file in files.items()}


def _are_of_same_text(facts: list[dict[str, str]]) -> bool:
    """Return whether token files, by their metadata, are the same text in different tokens.

    Files that an earlier version wrote do not tell their bytes of text.
    """
    texts = {tuple(fact.get(key) for key in ("source", "revision", "num_documents"))
             for fact in facts}
    return len(texts) == 1 and len({fact["num_text_bytes"] for fact in facts
                                    if "num_text_bytes" in fact}) <= 1


def _different_datasets(which: str) -> UserError:
    return UserError("--dataset: name the dataset to evaluate all targets on (the targets were"
                     f" trained on different ones: {which})")


def _open(options: Tokens, dataset: str) -> TokenFile:
    """Open the token file; download it or prepare the dataset first if it is missing."""
    if not re.fullmatch(DATASET_NAME, dataset):
        raise UserError(f"--dataset: {dataset[:60]!r} is not a plain name, or owner/name")
    dataset_dir = options.datasets_dir / dataset
    check_inside(dataset_dir, options.datasets_dir, "--datasets-dir")
    provide_dataset(dataset_dir, dataset, [options.split])
    return TokenFile(dataset_dir / f"{options.split}.safetensors")
