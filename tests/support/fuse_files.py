"""Mount a directory without what mounts of object stores lack: `fuse_files SOURCE PLACE`."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any, NoReturn

import mfusepy


class ObjectStore(mfusepy.Operations):
    """The files of a directory, without links, renames, appending and files open to read and write.

    A file that is written to anew is empty first, and can be read by others while it is written.
    """

    use_ns = True

    def __init__(self, root: str) -> None:
        self._root = root

    def _at(self, path: str) -> str:
        return self._root + path

    def _refuse(self, *_: Any) -> NoReturn:
        raise mfusepy.FuseOSError(errno.ENOSYS)

    symlink = link = rename = readlink = _refuse

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = os.lstat(self._at(path))
        return {key: getattr(found, key) for key in (
            "st_mode", "st_nlink", "st_size", "st_uid", "st_gid")} | {
            "st_mtime": found.st_mtime_ns}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._at(path))]

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._at(path), mode)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._at(path))
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self._at(path))
        return 0

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self._at(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def open(self, path: str, flags: int) -> int:
        if flags & os.O_APPEND:
            raise mfusepy.FuseOSError(errno.EOPNOTSUPP)
        return os.open(self._at(path), flags)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        if length:
            raise mfusepy.FuseOSError(errno.EOPNOTSUPP)
        os.truncate(self._at(path), 0)
        return 0

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        os.fsync(fh)
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        raise mfusepy.FuseOSError(errno.EINVAL)

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0


if __name__ == "__main__":
    mfusepy.FUSE(ObjectStore(sys.argv[1]), sys.argv[2], foreground=True, nothreads=False)
