"""What is made once for all processes of pytest-xdist: a trained run takes seconds."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a directory that the first process fills; the others wait for it. Do not change it.
    """
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # of all workers
    place, whole = base / name, base / f"{name}.whole"
    with FileLock(base / f"{name}.lock"):
        if not whole.exists():
            shutil.rmtree(place, ignore_errors=True)  # of a worker that failed
            place.mkdir()
            make(place)
            whole.touch()
    return place
