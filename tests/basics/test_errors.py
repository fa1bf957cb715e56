"""Errors as one line."""

from __future__ import annotations

import errno
import os

import pytest
from safetensors import SafetensorError

from basics.errors import as_os_error, describe, why_not_written

NCCL = """NCCL error in: /torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled system error
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
Error while creating shared memory segment /dev/shm/nccl-1 (size 9637888), error: No space left"""


NCCL2 = NCCL.replace("Last error:\n", "NCCL Last Error: ")  # PyTorch's new implementation


@pytest.mark.parametrize("text", [NCCL, NCCL2])
def test_of_an_nccl_error_the_reason_is_kept(text: str) -> None:
    assert describe(RuntimeError(text)) == (
        "RuntimeError: Error while creating shared memory segment /dev/shm/nccl-1"
        " (size 9637888), error: No space left")
    assert describe(RuntimeError("first\nsecond")) == "RuntimeError: first"
    assert describe(RuntimeError("Last error:")) == "RuntimeError: Last error:"


@pytest.mark.parametrize(("number", "advice"), [
    (errno.ENOSPC, "; make room"), (errno.EDQUOT, "; make room"), (errno.EIO, "; look at the disk"),
    (errno.EFBIG, "; raise the limit on the size of files (ulimit -f)"),
    (errno.ENOENT, "; its directory was deleted or unmounted"), (errno.EACCES, ""),
])
def test_only_a_full_disk_wants_room(number: int, advice: str) -> None:
    assert why_not_written(OSError(number, os.strerror(number))) == os.strerror(number) + advice
    for text in (f"I/O error: x (os error {number})", f"IoError(Os {{ code: {number}, kind: K }})"):
        of_a_library = as_os_error(SafetensorError(f"Error while serializing: {text}"))
        assert why_not_written(of_a_library) == os.strerror(number) + advice
