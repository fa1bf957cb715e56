"""What a run validates on, and what it shows after that."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from settings.batch import BatchConfig
from settings.data import DATASET_NAME, TOKENS_SUFFIX, DataConfig, token_file_name
from settings.keys import Count, SameLoss

SET_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}"  # of a validation set
MAX_SETS = 16
# A JSON list becomes a tuple: the config is frozen.
Prompts = Annotated[
    tuple[Annotated[str, Field(max_length=2**14)], ...], Field(strict=False, max_length=64)
]


class ValidationConfig(BatchConfig, DataConfig):
    """The keys of `train.json` about validations."""

    start_val_token: int = Field(default=0, ge=0, le=2**50)
    validation_interval: SameLoss[Count | None] = None  # global steps
    validation_batches: SameLoss[Count | None] = None  # microbatches
    validation_sequences: SameLoss[Count | None] = None
    validation: dict[str, str] | None = None  # sets by name: a token file, or a dataset
    validate_on: SameLoss[Literal["rank0", "all"]] = "rank0"
    validate_at_start: SameLoss[bool] = False  # also before the first step
    sample_prompts: SameLoss[Prompts | None] = None

    @model_validator(mode="after")
    def _validation_is_whole(self) -> Self:
        of_validation = self.validation_batches or self.validation_sequences
        if self.validation_batches and self.validation_sequences:
            raise ValueError(
                "validation_batches and validation_sequences exclude each other: drop one"
            )
        if self.validates != bool(of_validation):
            raise ValueError(
                "validation_interval goes together with"
                " validation_batches or validation_sequences: set both"
            )
        if self.validation is not None and not self.validates:
            raise ValueError(
                "validation names the sets to validate on: set validation_interval too, or drop it"
            )
        if self.validate_at_start and not self.validates:
            raise ValueError(
                "validate_at_start needs a validation: set validation_interval too, or drop it"
            )
        if self.sample_prompts and not self.validates:
            raise ValueError(
                "sample_prompts are continued at each"
                " validation, but there is none: set validation_interval, or drop them"
            )
        return self

    @model_validator(mode="after")
    def _sets_have_names_and_places(self) -> Self:
        if self.validation is not None and not 1 <= len(self.validation) <= MAX_SETS:
            raise ValueError(f"validation has {len(self.validation)} sets; wanted 1 to {MAX_SETS}")
        for name, place in (self.validation or {}).items():
            if not re.fullmatch(SET_NAME, name):
                raise ValueError(
                    f"validation has a set called {ascii(name)[:60]}; wanted at most 32 letters,"
                    " digits, '.', '_' and '-'"
                )
            if not _is_token_file(place) and not re.fullmatch(DATASET_NAME, place):
                raise ValueError(
                    f"validation set {name} is {ascii(place)[:60]}; wanted a dataset's name, or a"
                    f" token file, which ends in {TOKENS_SUFFIX}"
                )
        return self

    @property
    def validates(self) -> bool:
        """Whether the run validates, so that `best` means the lowest validation loss."""
        return self.validation_interval is not None

    def validation_paths(self, datasets_dir: Path) -> dict[str, Path]:
        """Return the token file of each set that `validation` names, in their order."""
        paths = {}
        for name, place in (self.validation or {}).items():
            path = datasets_dir / place
            paths[name] = path if _is_token_file(place) else path / token_file_name("validation")
        return paths

    @property
    def validation_datasets(self) -> list[str]:
        """The datasets whose validation files `validation` names."""
        return [place for place in (self.validation or {}).values() if not _is_token_file(place)]

    @property
    def deciding_set(self) -> str:
        """The name of the validation set that decides `best`, the first; "" if it has no name."""
        return next(iter(self.validation or {}), "")

    @property
    def num_validation_sets(self) -> int:
        """The number of sets in one validation; 0 without validation."""
        return len(self.validation or (self.dataset,)) if self.validates else 0

    @property
    def num_validation_sequences(self) -> int:
        """Sequences of each set in one validation, of all microbatches; 0 without validation."""
        return self.validation_sequences or (self.validation_batches or 0) * self.microbatch_size


def _is_token_file(place: str) -> bool:
    """Return whether a value of `validation` is a file; else it is the name of a dataset."""
    return place.endswith(TOKENS_SUFFIX)
