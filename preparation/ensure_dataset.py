"""A dataset that a run names: found, made or fetched."""

from __future__ import annotations

import os
import re
import shutil
import socket
from pathlib import Path

from basics.errors import UserError, cannot_be_written
from basics.failpoints import failpoint

STDLIB_DATASET = "python-stdlib"  # text that every machine has: prepared where it is first used


def provide_dataset(dataset_dir: Path, name: str) -> None:
    """Make sure that a dataset is on this machine. One process of each node.

    Raises:
        UserError: there is none, and it can be neither made nor fetched.
    """
    if is_complete(dataset_dir):
        return
    if name == STDLIB_DATASET:
        _prepare_stdlib(dataset_dir)
    elif "/" in name:
        from preparation.hub import fetch_dataset

        fetch_dataset(dataset_dir, name)
    else:
        raise UserError(f"{dataset_dir}: no dataset there; make it with prepare_dataset.py SOURCE"
                        f" {dataset_dir}, or name one on the hub as owner/name in train.json")


def is_complete(dataset_dir: Path) -> bool:
    """True if both token files are there under their final names."""
    return all((dataset_dir / f"{split}.safetensors").is_file()
               for split in ("train", "validation"))


def _prepare_stdlib(dataset_dir: Path) -> None:
    from preparation.documents import python_stdlib
    from preparation.pipeline import prepare_dataset
    from preparation.planning import PrepareOptions

    # In a place of its own: the nodes of a cluster may share the directory and come at once.
    places = f".{dataset_dir.name}.{socket.gethostname()}-"
    _remove_leftovers(dataset_dir.parent, places)
    own_dir = dataset_dir.parent / f"{places}{os.getpid()}"
    try:
        prepare_dataset(python_stdlib(), own_dir, PrepareOptions(tokenizer="bytes"))
        failpoint("provide")
        own_dir.rename(dataset_dir)  # takes the place of an empty directory, never of a full one
    except OSError as error:
        if not is_complete(dataset_dir):  # else another was first, with the same result
            raise cannot_be_written(dataset_dir, error) from None
    finally:
        shutil.rmtree(own_dir, ignore_errors=True)


def _remove_leftovers(parent: Path, places: str) -> None:
    """Remove what killed processes of this machine have left half done."""
    for path in parent.glob(f".*{places.removeprefix('.')}*"):
        found = re.search(r"-(\d+)(\.partial)?$", path.name)
        if found and not _is_alive(int(found[1])):
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        pass
    return True
