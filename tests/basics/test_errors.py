"""Errors as one line; sizes as text."""

import errno
import os

import pytest
from safetensors import SafetensorError

from basics.errors import as_os_error, describe, why_not_written
from basics.text import gb, gib

NCCL = """NCCL error in: /torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled system error
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
Error while creating shared memory segment /dev/shm/nccl-1 (size 9637888), error: No space left"""


def test_of_an_nccl_error_the_reason_is_kept():
    for text in (NCCL, NCCL.replace("Last error:\n", "NCCL Last Error: ")):  # old and new PyTorch
        assert describe(RuntimeError(text)) == (
            "RuntimeError: Error while creating shared memory segment /dev/shm/nccl-1"
            " (size 9637888), error: No space left")
    assert describe(RuntimeError("first\nsecond")) == "RuntimeError: first"
    assert describe(RuntimeError("Last error:")) == "RuntimeError: Last error:"


@pytest.mark.parametrize(("number", "advice"), [
    (errno.ENOSPC, "; make room"), (errno.EIO, "; look at the disk"), (errno.EACCES, "")])
def test_only_a_full_disk_wants_room(number, advice):
    assert why_not_written(OSError(number, os.strerror(number))) == os.strerror(number) + advice
    for text in (f"I/O error: x (os error {number})", f"IoError(Os {{ code: {number}, kind: K }})"):
        of_a_library = as_os_error(SafetensorError(f"Error while serializing: {text}"))
        assert why_not_written(of_a_library) == os.strerror(number) + advice


def test_sizes_have_three_digits():
    assert [gib(size) for size in (0, 0.00999 * 2**30, 1023 * 2**20, 31.25 * 2**30, -50 * 2**20)
            ] == ["0.00 KiB", "10.2 MiB", "1,023 MiB", "31.2 GiB", "-50.0 MiB"]
    assert [gb(size) for size in (48_000, 999.7e6, 9.996e9, 1.5e12)] == [
        "48.0 kB", "1,000 MB", "10.0 GB", "1,500 GB"]
