"""Errors: those that a person can correct, memory that ran out, exit statuses, failing output."""

from __future__ import annotations  # Python 3.9 gets its line, too

import errno
import faulthandler
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Exit statuses, beside 0 and 128 + n for a run that signal n stopped.
FAILED, BAD_INPUT, NON_FINITE, DISK_FULL, HANG, BEHIND_REFERENCE = 1, 2, 3, 4, 5, 6
STOP_SIGNALS = {
    int(number): number.name
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
}
# What a place answers that cannot be reached now: another launch may find it again.
TRANSIENT = {
    errno.EIO,
    errno.ESTALE,
    errno.ENOTCONN,
    errno.ETIMEDOUT,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.ECONNABORTED,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
}
FULL = {errno.ENOSPC, errno.EDQUOT}
ADVICE: dict[int | None, str] = {  # after a write that failed
    **dict.fromkeys(FULL, "; make room"),
    errno.EIO: "; look at the disk",
    errno.EFBIG: "; raise the limit on the size of files (ulimit -f)",
    errno.ENOENT: "; its directory was deleted or unmounted",
}
MAX_LINE_LENGTH = 190  # characters of a printed message, above which paths are shortened
MAX_CAUSE_LENGTH = 500  # of a cause that another program or a file gives, which may be endless
OBEYED = re.compile(  # controls but newline and tab, changes of direction, lone surrogates
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
LONG_PATH = re.compile(r"[^\s'\";,:]*/[^\s'\";,:]*([^\s'\";,:]{40})")
# Texts of errors that mean that memory ran out.
OF_GPU = re.compile(
    "|".join(
        (
            "out of memory",  # torch.OutOfMemoryError, AcceleratorError, Triton and NCCL
            "(CUBLAS|CUDNN|CUSOLVER)_STATUS_ALLOC_FAILED",
            "CUDNN_STATUS_INTERNAL_ERROR_(DEVICE|HOST)_ALLOCATION_FAILED",
            "CUDA_ERROR_OUT_OF_MEMORY",
            "cudaErrorMemoryAllocation",
            "Failed to CUDA calloc",
            # cuBLAS cannot start without memory for its workspace; elsewhere this is another error.
            "CUBLAS_STATUS_NOT_INITIALIZED when calling .?cublasCreate",
        )
    ),
    re.IGNORECASE,
)
OF_HOST = re.compile(
    "can't allocate memory|cannot allocate memory|bad_alloc",  # PyTorch and C++
    re.IGNORECASE,
)


class UserError(Exception):
    """An error that a person can correct: printed as one line, without a traceback."""

    def __init__(self, message: str, status: int = BAD_INPUT) -> None:
        super().__init__(message)
        self.status = status  # of the process

    def line(self) -> str:
        return f"Error: {one_line(str(self))}"


def cannot_be_written(place: Path, error: OSError) -> UserError:
    line = f"{place}: cannot be written: {why_not_written(error)}"
    return UserError(line, DISK_FULL if error.errno in FULL else status_of_place(error))


@contextmanager
def writing_to(place: Path) -> Iterator[None]:
    """Raise a UserError that names this place where something inside cannot be written."""
    try:
        yield
    except OSError as error:
        raise cannot_be_written(place, error) from None


def status_of_place(error: BaseException) -> int:
    """Return the status after a file that cannot be used: FAILED where a retry may help."""
    return FAILED if getattr(error, "errno", None) in TRANSIENT else BAD_INPUT


def why_not_written(error: OSError) -> str:
    return (error.strerror or first_line(error)) + ADVICE.get(error.errno, "")


def exit_status(error: BaseException) -> int:
    if isinstance(error, UserError):
        return error.status
    return DISK_FULL if isinstance(error, OSError) and error.errno in FULL else FAILED


def as_os_error(error: Exception) -> OSError:
    """Map a file writer's error to OSError; libraries in Rust say which one it was."""
    if isinstance(error, OSError):
        return error
    found = re.search(r"(?:\(os error |\bOs { code: )(\d+)", str(error))  # safetensors 0.8, 0.5
    code = int(found[1]) if found else errno.EIO
    return OSError(code, os.strerror(code) if found else str(error)[:120])


def print_line(line: str) -> None:
    """Print a line to stdout; a full disk or a closed pipe there is no failure."""
    with suppress(OSError):
        print(visible(line), flush=True)


def print_error(line: str) -> None:
    with suppress(OSError):
        print(visible(line), file=sys.stderr, flush=True)


def print_traceback(error: BaseException) -> None:
    print_error("".join(traceback.format_exception(error)).rstrip("\n"))


def print_stacks(head: str) -> None:
    """Print the stacks of this process's threads to stderr. Raises: OSError if that is full."""
    with tempfile.TemporaryFile() as stacks:  # written at once: other ranks print theirs too
        faulthandler.dump_traceback(file=stacks)
        stacks.seek(0)
        os.write(sys.stderr.fileno(), head.encode() + stacks.read())


def drop_unwritable_output() -> None:
    """Drop output that stdout or stderr cannot write, else Python exits with status 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def describe(error: BaseException) -> str:
    """Return an error's type and the first line of its message; of a UserError all of that."""
    is_ours = isinstance(error, UserError)
    return str(error) if is_ours else f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type.

    NCCL's messages begin with the place in its code: of these, what stands after "Last error:".
    """
    text = str(error).strip() or type(error).__name__
    told = re.split(r"Last [eE]rror:", text)[-1].strip() or text
    return told.splitlines()[0][:MAX_CAUSE_LENGTH]


def visible(text: str) -> str:
    """Escape what a terminal would obey instead of showing it; newlines and tabs stay."""
    return OBEYED.sub(lambda found: ascii(found[0])[1:-1], text)


def one_line(message: str) -> str:
    """Escape control characters, and shorten the paths of a long line; nothing else is cut."""
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)
    if len(line) > MAX_LINE_LENGTH:
        line = LONG_PATH.sub(r"...\1", line)
    return line


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one that led to it, means that memory ran out.

    The compiler wraps errors of the code that it runs; their text is then part of its own.
    """
    return is_out_of_gpu_memory(error) or any(
        isinstance(cause, MemoryError) or says_out_of_memory(str(cause)) for cause in _causes(error)
    )


def is_out_of_gpu_memory(error: BaseException) -> bool:
    """Return the same of a GPU's memory, not the machine's that CUDA could not allocate."""
    return any(
        type(cause).__name__ == "OutOfMemoryError"
        or (  # torch's
            not isinstance(cause, OSError | MemoryError) and OF_GPU.search(str(cause))
        )
        for cause in _causes(error)
    )


def says_out_of_memory(text: str) -> bool:
    return bool(OF_GPU.search(text) or OF_HOST.search(text))


def _causes(error: BaseException | None) -> list[BaseException]:
    """Return an error, and those that it was raised from, or while they were handled."""
    causes = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return causes
