"""Whether an error means that memory ran out, of a GPU or of the machine. Needs no torch."""

import re

OF_GPU = re.compile("|".join((
    "out of memory",  # torch.OutOfMemoryError, AcceleratorError, Triton and NCCL
    "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_(DEVICE|HOST)_ALLOCATION_FAILED",
    "CUDA_ERROR_OUT_OF_MEMORY", "cudaErrorMemoryAllocation", "Failed to CUDA calloc",
    # Without memory for its workspace, cuBLAS cannot start; elsewhere this is another error's text.
    "CUBLAS_STATUS_NOT_INITIALIZED when calling .?cublasCreate",
)), re.IGNORECASE)
OF_HOST = re.compile("can't allocate memory|cannot allocate memory|bad_alloc",  # PyTorch and C++
                     re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one that led to it, means that memory ran out.

    The compiler wraps errors of the code that it runs; their text is then part of its own.
    """
    return is_out_of_gpu_memory(error) or any(
        isinstance(cause, MemoryError) or says_out_of_memory(str(cause))
        for cause in _causes(error))


def is_out_of_gpu_memory(error: BaseException) -> bool:
    """Return whether an error, or one that led to it, means that a GPU's memory ran out.

    Not if the machine's memory did, though it may be CUDA that could not allocate it.
    """
    return any(type(cause).__name__ == "OutOfMemoryError" or (  # torch's
                   not isinstance(cause, OSError | MemoryError) and OF_GPU.search(str(cause)))
               for cause in _causes(error))


def says_out_of_memory(text: str) -> bool:
    """Return whether the text of an error means that memory ran out."""
    return bool(OF_GPU.search(text) or OF_HOST.search(text))


def _causes(error: BaseException | None) -> list[BaseException]:
    """Return an error, and those that it was raised from, or while they were handled."""
    causes = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return causes
