"""The tokens that a run trains on."""

from typing import Self

from pydantic import Field, model_validator

from basics.json_files import FrozenConfig

DATASET_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?$"
SPLITS = ("train", "validation")  # of a dataset, each in a token file
TOKENS_SUFFIX = ".safetensors"  # of token files


class DataConfig(FrozenConfig):
    """The keys of `train.json` about the tokens to train on."""

    dataset: str = Field(pattern=DATASET_NAME)
    min_train_tokens: int = Field(default=-1, le=2**50)  # -1 for all
    repeat_data: bool = False  # from the start, where min_train_tokens is more than there are
    start_train_token: int = Field(default=0, ge=0, le=2**50)

    @model_validator(mode="after")
    def _length_is_known(self) -> Self:
        if self.min_train_tokens != -1 and self.min_train_tokens < 1:
            raise ValueError(f"min_train_tokens is {self.min_train_tokens}; wanted 1 or more or -1")
        if self.repeat_data and self.min_train_tokens == -1:
            raise ValueError("repeat_data needs min_train_tokens, the tokens to train on: set it")
        return self


def token_file_name(split: str) -> str:
    """Return the name of the token file of a split in the directory of a dataset."""
    return split + TOKENS_SUFFIX
