"""Whether an error means that memory ran out, of a GPU or of the machine. Needs no torch."""

from __future__ import annotations

import re

GPU_TEXTS = (
    "out of memory",  # torch.OutOfMemoryError, AcceleratorError, Triton and NCCL
    "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "CUDA_ERROR_OUT_OF_MEMORY", "cudaErrorMemoryAllocation", "Failed to CUDA calloc",
)
HOST_TEXTS = ("can't allocate memory", "Cannot allocate memory", "bad_alloc")  # PyTorch and C++
# Without memory for its workspace, cuBLAS cannot start; elsewhere this text is another error's.
NO_HANDLE = re.compile(r"CUBLAS_STATUS_NOT_INITIALIZED when calling .?cublasCreate", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one that led to it, means that memory ran out.

    The compiler wraps errors of the code that it runs; their text is then part of its own.
    """
    return any(isinstance(cause, MemoryError) or _is_torchs(cause) or says_out_of_memory(str(cause))
               for cause in _causes(error))


def is_out_of_gpu_memory(error: BaseException) -> bool:
    """Return whether an error, or one that led to it, means that a GPU's memory ran out.

    Not if the machine's memory did, though it may be CUDA that could not allocate it.
    """
    return any(_is_torchs(cause) or (not isinstance(cause, OSError | MemoryError)
                                     and _says_out_of_gpu_memory(str(cause)))
               for cause in _causes(error))


def says_out_of_memory(text: str) -> bool:
    """Return whether the text of an error means that memory ran out."""
    return _says_out_of_gpu_memory(text) or _contains(text, HOST_TEXTS)


def _causes(error: BaseException | None) -> list[BaseException]:
    """Return an error, and those that it was raised from, or while they were handled."""
    causes = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return causes


def _is_torchs(error: BaseException) -> bool:
    return type(error).__name__ == "OutOfMemoryError"


def _says_out_of_gpu_memory(text: str) -> bool:
    return _contains(text, GPU_TEXTS) or NO_HANDLE.search(text) is not None


def _contains(text: str, known: tuple[str, ...]) -> bool:
    return any(part.lower() in text.lower() for part in known)
