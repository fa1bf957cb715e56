"""Whether an error means that memory ran out, of a GPU or of the machine. Needs no torch."""

from __future__ import annotations

TEXTS = (
    "out of memory",  # torch.OutOfMemoryError, AcceleratorError, Triton and NCCL
    "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED",
    "can't allocate memory", "Cannot allocate memory", "bad_alloc",  # PyTorch and C++ on a CPU
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one that it was raised from, means that memory ran out.

    The compiler wraps errors of the code that it runs; their text is then part of its own.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if says_out_of_memory(str(error)):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


def says_out_of_memory(text: str) -> bool:
    """Return whether the text of an error means that memory ran out."""
    return any(known.lower() in text.lower() for known in TEXTS)
