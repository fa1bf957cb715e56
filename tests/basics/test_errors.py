"""Errors as one line."""

from __future__ import annotations

import pytest

from basics.errors import describe

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
