"""Writes that survive a kill or a full disk, reads of untrusted files, locks of directories."""

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from basics.errors import UserError, cannot_be_written, print_error
from basics.failpoints import failpoint

MAX_BYTES = 2**20  # default limit of `read_regular_file`
POLL_SECONDS = 0.1  # between two tries to lock
LOCK_NAME = ".lock"  # a file, used where the file system cannot lock a directory, as NFS
# What a file system answers that has no locks, or no fsync of directories.
UNSUPPORTED = {
    errno.ENOLCK,
    errno.EOPNOTSUPP,
    errno.ENOTSUP,
    errno.ENOSYS,
    errno.EPERM,
    errno.EINVAL,
}


def read_regular_file(path: Path, *, max_bytes: int = MAX_BYTES) -> str:
    """Read an untrusted text file. Raises: OSError: a link, a pipe, a directory, or too large."""
    # Without O_NONBLOCK, a pipe that nobody writes to would block.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "is not a plain file")
        if found.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"has {found.st_size:,} bytes")
        return file.read(max_bytes).decode(errors="replace")


def sha256_of(path: Path) -> str:
    """Return a file's digest, about a second a GB."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def append_whole(path: Path, text: str) -> None:
    """Append all of a text to a file, or nothing. Raises: OSError if the disk is full."""
    content = text.encode()
    with path.open("ab", buffering=0) as file:
        length = file.tell()
        try:
            if file.write(content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(length)
            raise


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` if the block succeeds, and is removed if not.

    Readers see the old file or the new one, never a part; if `durable`, after a power loss too.
    """
    partial = partial_file(path)
    partial.unlink(missing_ok=True)  # a leftover, or a planted link to another file
    try:
        with partial.open("xb") as file:
            yield file
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if durable:
        fsync(partial)
    partial.replace(path)
    if durable:
        fsync(path.parent)


def replace_directory(new_dir: Path, place: Path) -> None:
    """Rename a directory to a place where an earlier one may be, which is deleted.

    An error puts the earlier one back; after a kill between the two renames `put_back` does.
    """
    put_back(place)
    aside = aside_of(place)
    if place.exists():
        place.rename(aside)
    try:
        failpoint("replace")
        new_dir.rename(place)
    except BaseException:
        put_back(place)
        raise
    fsync(place.parent)
    shutil.rmtree(aside, ignore_errors=True)


def aside_of(place: Path) -> Path:
    """Return where an earlier directory is while another one takes its place."""
    return place.with_name(f".{place.name}.ddp-train-replaced")


def put_back(place: Path) -> None:
    """Put back what a kill has left aside in `replace_directory`, or delete what is outdated."""
    aside = aside_of(place)
    if place.exists():
        shutil.rmtree(aside, ignore_errors=True)
    elif aside.exists():
        with suppress(OSError):  # another command was faster, or nothing can be written here
            aside.rename(place)
            print_error(f"{place}: is back; a command was killed while it replaced this directory")


def partial_file(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def write_atomically(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Replace a file's content in one step; see `replacing`."""
    with replacing(path, durable=durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def fsync(path: Path) -> None:
    """Wait until a file's content, or a directory's entries if possible, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (error.errno in UNSUPPORTED and path.is_dir()):
            raise
    finally:
        os.close(descriptor)


def lock_directory(directory: Path, *, is_shared: bool = False) -> int:
    """Lock a directory for this process; the lock ends when the returned descriptor is closed.

    A library such as filelock would have to create a file: a launch that is refused writes nothing.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the directory cannot be opened, or its file system has no locks (`UNSUPPORTED`).
    """
    kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    try:
        return _lock(os.open(directory, os.O_RDONLY), kind)
    except BlockingIOError:
        raise
    except OSError:
        return lock_file(directory / LOCK_NAME, kind)


def lock_file(path: Path, kind: int = fcntl.LOCK_EX) -> int:
    """Make a file if it is missing, and lock it, as `lock_directory` does."""
    return _lock(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), kind)


def share_lock(descriptor: int) -> int:
    """Let other processes share this lock. Raises: BlockingIOError: it is lost."""
    return _lock(descriptor, fcntl.LOCK_SH)


def _lock(descriptor: int, kind: int) -> int:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


held: set[int] = set()  # descriptors of locks; a forked process that outlives this one closes them


@contextmanager
def locked(directory: Path, *, busy: str, wait_seconds: float = 0.0) -> Iterator[None]:
    """Create a directory if it is missing, and lock it while the block runs.

    Raises: UserError: `busy`, if another process holds the lock for longer than `wait_seconds`; or
        the directory cannot be made.
    """
    deadline, descriptor = time.monotonic() + wait_seconds, None
    while descriptor is None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            descriptor = lock_directory(directory)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise UserError(busy) from None
            time.sleep(POLL_SECONDS)
        except OSError as error:
            raise cannot_be_written(directory, error) from None
    held.add(descriptor)
    try:
        yield
    finally:
        held.remove(descriptor)
        os.close(descriptor)


def existing(place: Path) -> Path:
    """Return the nearest directory that exists: this one, or one above it."""
    place = place.absolute()
    return next(path for path in (place, *place.parents) if path.is_dir())


def cache_dir(name: str) -> Path:
    """Return a directory of this user's for a cache, made if it is missing.

    It is below the home directory, or below a temporary one where that cannot be written, as with
    `docker run --user` or on a read-only disk. Raises: UserError: neither can be written.
    """
    if path := _cache_dir_of_home(name):
        return path
    own = Path(tempfile.gettempdir()) / f"ddp-train-{os.getuid()}"
    with suppress(OSError):
        own.mkdir(mode=0o700, exist_ok=True)
        # Others can make it too, and would then own the code that is kept there.
        found = own.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
            (own / name).mkdir(exist_ok=True)
            return own / name
    raise UserError(
        f"neither the home directory nor {own} can be written, where {name}'s cache"
        " goes; set HOME or TMPDIR to a directory of your own"
    )


def _cache_dir_of_home(name: str) -> Path | None:
    with suppress(OSError, RuntimeError):  # not writable; a user without a home directory
        path = Path.home() / ".cache/ddp-train" / name
        path.mkdir(parents=True, exist_ok=True)
        if os.access(path, os.W_OK | os.X_OK):
            return path
    return None


def give_libraries_a_cache() -> None:
    """Where the home directory cannot be written, let libraries keep their caches in `cache_dir`.

    Called before they are imported. Matplotlib has two directories, and would warn of each. Models
    of the Hugging Face hub that are there, as in an image, stay where they are.
    """
    if _cache_dir_of_home(""):
        return
    with suppress(UserError):  # raised later, by what needs a cache
        place = str(cache_dir("libraries"))
        os.environ.setdefault("MPLCONFIGDIR", place)
        if not os.path.isdir(os.path.expanduser("~/.cache/huggingface")):
            os.environ.setdefault("XDG_CACHE_HOME", place)
