"""Read a token file as a lazy sequence of microbatches."""

import hashlib
import itertools
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from basics.device import is_gpu
from basics.errors import UserError, one_line
from run_config import Run
from settings.data import token_file_name
from tokens.batch_plan import BatchPlan, plan_batches
from tokens.token_file import TokenFile, check_token_ids
from tokens.tokenizer import KNOWN_SIZES, FileTokenizer, byte_lengths, file_beside, load_tokenizer

TOKENIZERS_BY_VOCABULARY = {size: name for name, size in KNOWN_SIZES.items()}  # if none is named


class Microbatch(NamedTuple):
    """One microbatch on the device: its index in the run's data; ids and targets, (B, T) int64."""

    index: int  # type: ignore[assignment]
    token_ids: Tensor
    targets: Tensor


class Microbatches(Sequence[Tensor]):
    """A token file as a sequence of microbatches, from a start token on.

    Microbatch i is microbatch_size x context_length tokens and the one that follows them (the
    last target), as a flat uint16 vector: (B * T + 1,). Adjacent microbatches share that token.
    With `num_sequences` the data ends after so many sequences, and the last microbatch may be
    smaller; without, there are as many whole microbatches as the file has, or, if the plan has
    `epoch_tokens`, as the run: then the position of a token in the run, modulo that number, is the
    position in the file, however the run is split into microbatches.
    """

    def __init__(
        self,
        token_file: TokenFile,
        plan: BatchPlan,
        *,
        start_token: int,
        vocab_size: int,
        num_sequences: int | None = None,
    ) -> None:
        self.token_file, self.start_token, self.vocab_size = token_file, start_token, vocab_size
        self._context_length, self._stride = plan.context_length, plan.tokens_per_microbatch
        # The last target is one token beyond the last input.
        whole = max(0, token_file.num_tokens - start_token - 1) // self._stride
        self.num_tokens = whole * self._stride  # targets; one more token is read
        self._epoch_tokens = token_file.num_tokens
        if num_sequences is not None:
            self.num_tokens = num_sequences * plan.context_length
        elif plan.epoch_tokens is not None:
            self.num_tokens, self._epoch_tokens = plan.num_tokens, plan.epoch_tokens

    @property
    def num_sequences(self) -> int:
        return self.num_tokens // self._context_length

    def __len__(self) -> int:
        return -(-self.num_tokens // self._stride)

    def __getitem__(self, index: int) -> Tensor:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(f"microbatch {index} of {len(self)}")
        position = index * self._stride
        stop = min(position + self._stride, self.num_tokens) + 1
        pieces = []  # more than one where the data begins again
        while position < stop:
            offset = position % self._epoch_tokens
            length = min(stop - position, self._epoch_tokens - offset)
            first = self.start_token + offset
            pieces.append(self.token_file.read(first, first + length))
            check_token_ids(
                pieces[-1], self.token_file.path, first=first, vocab_size=self.vocab_size
            )
            position += length
        return torch.from_numpy(np.concatenate(pieces) if len(pieces) > 1 else pieces[0])

    def split(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Turn one flat microbatch into (token_ids, targets), each (B, T) int64, on its device."""
        wide = tokens.long()  # converted after the copy: uint16 is a quarter of the bytes
        shape = (-1, self._context_length)
        return wide[:-1].view(shape), wide[1:].view(shape)


@dataclass(frozen=True)
class RunData:
    """The opened token files of a run, and its batch plan."""

    plan: BatchPlan
    training: Microbatches
    validation_sets: dict[str, Microbatches]  # by name, the one that decides `best` first
    tokenizer_name: str | None
    tokenizer_path: Path | None = None  # of its file, beside the token files, if it has one
    tokenizer_file: bytes | None = None  # the content: each checkpoint gets a copy

    @property
    def validation(self) -> Microbatches | Any:
        """The set that decides `best`; None without validation."""
        return next(iter(self.validation_sets.values()), None)

    @property
    def bytes_per_token(self) -> float | None:
        """The mean length of a token of `validation`, as in `set_bytes_per_token`."""
        return next(iter(self.set_bytes_per_token.values()), None)

    @cached_property
    def set_bytes_per_token(self) -> dict[str, float | None]:
        """By validation set the mean bytes of text of a token; None if they are not known."""
        unknown = dict.fromkeys(self.validation_sets)
        if self.tokenizer_name is None:
            return unknown
        try:
            tokenizer = load_tokenizer(self.tokenizer_name, self.tokenizer_path)
        except UserError:  # of another project, or its file was deleted
            return unknown
        lengths = byte_lengths(tokenizer, num_ids=self.training.vocab_size)
        found: dict[str, float | None] = {}
        for name, part in self.validation_sets.items():
            num_bytes = sum(int(lengths.of(tokens.numpy()).sum()) for tokens in part)
            found[name] = num_bytes / part.num_tokens or None
        return found

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Identify the data: a fingerprint per split, and by key the part that the run reads."""
        found = {
            "train": self.training.token_file.fingerprint(),
            "start_train_token": str(self.training.start_token),
        }
        if self.validation is not None:
            found |= {
                "validation": self.validation.token_file.fingerprint(),
                "start_val_token": str(self.validation.start_token),
                "validation_sequences": str(self.validation.num_sequences),
            }
        for name, part in list(self.validation_sets.items())[1:]:
            found[f"validation/{name}"] = part.token_file.fingerprint()
        return found


def open_run_data(
    run: Run,
    dataset_dir: Path,
    *,
    world_size: int,
    validation_paths: Mapping[str, Path] | None = None,
) -> RunData:
    """Open a run's token files and plan its batches. Every rank; needs no process group.

    Args:
        validation_paths: of `TrainConfig.validation_paths`; if empty, the dataset's own file.

    Raises: UserError: a file is missing, damaged, of another layout or too short; the tokenizer
        beside it is not the one that it was made with, or has more entries than the model; a
        validation set has another tokenizer, or is there twice.
    """
    config, vocab_size = run.config, run.model.vocab_size
    train_file = TokenFile(dataset_dir / token_file_name("train"))
    plan = plan_batches(run, world_size=world_size, file_tokens=train_file.num_tokens)
    training = Microbatches(
        train_file, plan, start_token=config.start_train_token, vocab_size=vocab_size
    )
    validation_sets = {}
    if config.validates:
        own = {"": dataset_dir / token_file_name("validation")}
        validation_sets = {
            set_name: _open_validation_set(run, plan, set_name, path)
            for set_name, path in (validation_paths or own).items()
        }
    name = train_file.metadata.get("tokenizer") or TOKENIZERS_BY_VOCABULARY.get(vocab_size)
    _check_sets(run, name, validation_sets)
    for part in (training, *validation_sets.values()):  # ids are checked when they are read
        stated = part.token_file.metadata.get("max_token_id", "")
        if stated.isdecimal() and len(stated) <= 5 and int(stated) >= vocab_size:
            raise UserError(
                f"{part.token_file.path}: states ids up to {int(stated)}, outside the"
                f" model's vocabulary of {vocab_size:,}; set vocab_size above it"
            )
    path = file_beside(dataset_dir, name)
    tokenizer = load_tokenizer(name, path) if path and name else None  # of a file
    content = tokenizer.content if isinstance(tokenizer, FileTokenizer) else None
    num_ids = tokenizer.n_vocab if tokenizer else KNOWN_SIZES.get(name or "", 0)
    if num_ids > vocab_size:  # prompts could not be encoded
        raise UserError(
            f"{run.run_dir / 'model.json'}: vocab_size is {vocab_size:,}, but the"
            f" tokenizer of {dataset_dir} has {num_ids:,} entries; set it to at least"
            " that"
        )
    return RunData(
        plan=plan,
        training=training,
        validation_sets=validation_sets,
        tokenizer_name=name,
        tokenizer_path=path,
        tokenizer_file=content,
    )


def _open_validation_set(run: Run, plan: BatchPlan, name: str, path: Path) -> Microbatches:
    """Open a set's file; `name` is "" for the dataset's own. Raises: UserError."""
    config = run.config
    try:
        file = TokenFile(path)
    except UserError as error:
        if name:
            raise UserError(f"{run.train_path}: validation set {name}: {error}") from None
        raise
    wanted = config.num_validation_sequences
    found = max(0, file.num_tokens - config.start_val_token - 1) // run.model.context_length
    if found < wanted:
        settings = run.train_settings()
        key = "validation_sequences" if settings["validation_sequences"] else "validation_batches"
        raise UserError(
            f"{run.train_path}: {key} is {settings[key]:,}, which are"
            f" {wanted:,} sequences, but {file.path} has {found:,} from token"
            f" {config.start_val_token:,} on; lower it or start_val_token"
        )
    return Microbatches(
        file,
        plan,
        start_token=config.start_val_token,
        vocab_size=run.model.vocab_size,
        num_sequences=wanted,
    )


def _check_sets(run: Run, tokenizer: str | None, sets: dict[str, Microbatches]) -> None:
    """Refuse named validation sets with another tokenizer, and two of the same file.

    Files of other projects do not state their tokenizer: they are taken. Raises: UserError.
    """
    names: dict[Path, str] = {}
    for name, part in sets.items():
        path = part.token_file.path
        other = part.token_file.metadata.get("tokenizer")
        if name and tokenizer and other and other != tokenizer:
            raise UserError(
                f"{run.train_path}: validation set {name}: {path} has the tokenizer"
                f" {one_line(other)}, the run {one_line(tokenizer)}; prepare its documents with"
                " that one"
            )
        before = names.setdefault(path.resolve(), name)
        if before != name:
            raise UserError(
                f"{run.train_path}: validation sets {before} and {name} are the same file, {path};"
                " drop one"
            )


def read_ahead(
    microbatches: Microbatches, indices: Iterable[int], *, device: torch.device
) -> Generator[Microbatch]:
    """Yield microbatches on the device, in the order of their `indices`.

    A thread reads, checks and pins the next microbatch while the caller computes on this one.
    """

    def read(index: int) -> tuple[int, Tensor]:
        tokens = microbatches[index]
        return index, tokens.pin_memory() if is_gpu(device) else tokens

    # Exactly one microbatch ahead: reading one takes far less than computing on one.
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="read_ahead") as reader:
        remaining = iter(indices)
        upcoming = [reader.submit(read, index) for index in itertools.islice(remaining, 1)]
        while upcoming:
            index, tokens = upcoming.pop().result()
            upcoming = [reader.submit(read, index) for index in itertools.islice(remaining, 1)]
            yield Microbatch(index, *microbatches.split(tokens.to(device, non_blocking=True)))


def dropout_seed(random_seed: int, microbatch_index: int) -> int:
    """Return the seed of one microbatch's dropout.

    The random stream is, like the data, a function of the position in the run: each process has
    its own, a resumed run needs no saved state, and another split of the global batch into
    processes and accumulation steps draws the same masks.
    """
    digest = hashlib.blake2b(f"{random_seed}/{microbatch_index}".encode(), digest_size=7).digest()
    return int.from_bytes(digest)
