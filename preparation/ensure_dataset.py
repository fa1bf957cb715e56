"""Make sure that the dataset of a run is on this machine: prepare or download it if needed."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

import psutil

from basics.errors import UserError, cannot_be_written
from basics.failpoints import failpoint

STDLIB_DATASET = "python-stdlib"  # every machine has this text: prepared when it is first used
SPLITS = ("train", "validation")


def provide_dataset(dataset_dir: Path, name: str, splits: Sequence[str] = SPLITS) -> None:
    """Prepare or download a dataset if it is not on this machine. One process of each node.

    Args:
        splits: that are needed; others are not downloaded.

    Raises:
        UserError: there is no such dataset, or it cannot be downloaded or written.
    """
    if is_complete(dataset_dir, splits):
        return
    if name == STDLIB_DATASET:
        _prepare_stdlib(dataset_dir)
    elif "/" in name:
        from preparation.hub import fetch_dataset

        fetch_dataset(dataset_dir, name, splits)
    else:
        raise UserError(f"{dataset_dir}: no dataset there; make it with prepare_dataset.py SOURCE"
                        f" {dataset_dir}, or name a dataset on the hub (owner/name) in train.json")


def is_complete(dataset_dir: Path, splits: Sequence[str] = SPLITS) -> bool:
    """Return whether token files exist under their final names."""
    return all((dataset_dir / f"{split}.safetensors").is_file() for split in splits)


def _prepare_stdlib(dataset_dir: Path) -> None:
    from preparation.pipeline import PrepareOptions, prepare_dataset
    from preparation.standard_library import python_stdlib

    # In a directory of this process: nodes may share the parent directory and prepare at once.
    prefix = f".{dataset_dir.name}.{socket.gethostname()}-"
    _remove_leftovers(dataset_dir.parent, prefix)
    own_dir = dataset_dir.parent / f"{prefix}{os.getpid()}"
    try:
        prepare_dataset(python_stdlib(), own_dir, PrepareOptions(tokenizer="bytes"))
        failpoint("provide")
        own_dir.rename(dataset_dir)  # replaces an empty directory, never one with files
    except OSError as error:
        if not is_complete(dataset_dir):  # else another node was first, with the same result
            raise cannot_be_written(dataset_dir, error) from None
    finally:
        shutil.rmtree(own_dir, ignore_errors=True)


def _remove_leftovers(parent: Path, prefix: str) -> None:
    """Remove unfinished directories of processes of this machine that were killed."""
    for path in parent.glob(f".*{prefix.removeprefix('.')}*"):
        found = re.search(r"-(\d+)(\.partial)?$", path.name)
        if found and not psutil.pid_exists(int(found[1])):
            shutil.rmtree(path, ignore_errors=True)
