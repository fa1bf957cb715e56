"""The weights that a run starts from, if it does not start from random ones."""

from __future__ import annotations

from pathlib import Path

import torch

from basics.errors import UserError
from gpt import GPTModel
from run_config import Run
from tokens.tokenizer_file import short_name
from trainer.resuming import FREE_TO_CHANGE


def initial_model(run: Run, runs_dir: Path, *, tokenizer_name: str | None) -> GPTModel:
    """Load the model that `init_from` names, float32, on the CPU. May download it.

    Args:
        tokenizer_name: of the run's dataset; None if it is not known.

    Raises:
        UserError: there is no such model, or it has another shape than the run's, or it was
            trained with another tokenizer.
    """
    from trainer.targets import load_target  # imports the hub's client, which takes half a second

    source = run.train.init_from
    if source == run.name:
        raise UserError(f"{run.train_path}: init_from is this run itself; name another one")
    try:
        target = load_target(source, runs_dir=runs_dir, device=torch.device("cpu"))
    except UserError as error:
        raise UserError(f"{run.train_path}: init_from: {error}") from None
    for key, wanted in run.model.model_dump(exclude=FREE_TO_CHANGE).items():
        found = getattr(target.model.config, key)
        if found != wanted:
            raise UserError(f"{run.train_path}: init_from: {source} has {key} {found}, model.json"
                            f" has {wanted}; they must be equal")
    theirs = target.tokenizer_name
    if theirs and tokenizer_name and theirs != tokenizer_name:
        raise UserError(f"{run.train_path}: init_from: {source} was trained with the tokenizer"
                        f" {short_name(theirs)}, the dataset was made with"
                        f" {short_name(tokenizer_name)}; prepare the dataset with its tokenizer")
    return target.model
