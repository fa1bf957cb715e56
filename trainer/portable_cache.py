"""PyTorch's portable cache of compiled code in the run directory: it goes where the run goes."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from basics.errors import describe, print_line
from basics.files import read_regular_bytes, write_atomically
from processes.launch import Process, device_name
from run_config import TrainConfig

COMPILED = "compiled"  # the directory of the files
MAX_BYTES = 2**30
DIGEST_BYTES = 32  # SHA-256 of the rest, which each file begins with


@contextmanager
def compiled_code_of_run(run_dir: Path, train: TrainConfig, process: Process) -> Iterator[None]:
    """Load the code that a run directory has for this device; save it after compiling, inside.

    The first node's processes save, each for its own device. No failure of this ends the run:
    without a file, all is compiled here. A file is trusted as the rest of PyTorch's cache is: it is
    a program.
    """
    if not train.compile:
        yield
        return
    path = run_dir / COMPILED / f"{_key(process)}.bin"
    loaded = _load(path)
    yield
    if process.rank == process.local_rank:
        with suppress(Exception):  # nothing was compiled, PyTorch cannot, or the disk is full
            artifacts, info = torch.compiler.save_cache_artifacts()
            if not _parts(info) <= loaded:
                path.parent.mkdir(exist_ok=True)
                write_atomically(path, hashlib.sha256(artifacts).digest() + artifacts)


def _key(process: Process) -> str:
    """Name what compiled code depends on: versions, and the device with its number."""
    facts = [torch.__version__, platform.python_version(), platform.machine(),
             device_name(process), sorted(torch.cpu.get_capabilities().items())]
    return f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}-{process.local_rank}"


def _load(path: Path) -> set[str]:
    """Put a file's code into PyTorch's cache on this machine; return the names of its parts."""
    if not os.path.lexists(path):
        return set()
    try:
        content = read_regular_bytes(path, max_bytes=MAX_BYTES)
        artifacts = content[DIGEST_BYTES:]
        if hashlib.sha256(artifacts).digest() != content[:DIGEST_BYTES]:
            raise OSError("is damaged")
        return _parts(torch.compiler.load_cache_artifacts(artifacts))
    except Exception as error:  # PyTorch raises errors of any type
        print_line(f"warning: {path}: not used ({describe(error)}), all is compiled anew")
        return set()


def _parts(info: Any) -> set[str]:
    return {name for names in info.artifacts.values() for name in names}
