"""Files that are written completely or not at all, and checked when read."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import zipfile
from collections.abc import Callable, Iterator
from io import BufferedReader
from typing import IO, Any

import torch


def check_path(op: str, path: str | os.PathLike[str]) -> None:
    """ValueError for an empty path, which pathlib takes for the current folder."""
    if not os.fspath(path):
        raise ValueError(f"{op}: expected a path, but got an empty one")


def open_regular(op: str, path: str | os.PathLike[str]) -> BufferedReader:
    """Opens a file to be read.

    Raises:
        ValueError: it is a pipe, a socket or a device, reading which may never end.
        OSError: opening failed.
    """

    def opener(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NONBLOCK)  # as a pipe may have no writer

    file = open(path, "rb", opener=opener)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError(
            f"{op}: expected a regular file, but got a pipe, a socket or a device "
            f"as {os.fspath(path)!r}"
        )
    return file


@contextlib.contextmanager
def opened(folder: str | os.PathLike[str]) -> Iterator[int]:
    """Opens a folder."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def lock(fd: int, operation: int = fcntl.LOCK_EX) -> bool:
    """Locks a folder until it is closed, if its file system has locks."""
    try:
        fcntl.flock(fd, operation)
    except OSError:
        return False
    return True


def write_whole(
    op: str, path: str | os.PathLike[str], write: Callable[[IO[bytes]], object]
) -> None:
    """Writes a file next to `path`, flushes it to the disk and renames it.

    A temporary file that a killed write has left is removed by the next one.
    """
    check_path(op, path)
    folder, name = os.path.split(os.path.realpath(path))  # a link is kept
    with opened(folder) as folder_fd:
        if lock(folder_fd):
            for other in os.listdir(folder):
                if re.fullmatch(rf"\.{re.escape(name)}\.[0-9a-f]{{16}}\.tmp", other):
                    os.unlink(os.path.join(folder, other))
        temporary = os.path.join(folder, f".{name}.{secrets.token_hex(8)}.tmp")
        try:
            with open(temporary, "xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, os.path.join(folder, name))
        except BaseException:
            os.unlink(temporary)
            raise
        os.fsync(folder_fd)


def read_state(op: str, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a dict that ``torch.save`` wrote, to the CPU.

    Raises:
        ValueError: the file is damaged or of another kind.
        OSError: reading failed.
    """
    check_path(op, path)
    with open_regular(op, path) as file:
        try:
            _check_sums(file)
            file.seek(0)
            state = torch.load(file, map_location="cpu", weights_only=True)
            if not isinstance(state, dict):
                raise ValueError(f"expected a dict, but got {type(state).__name__}")
        except Exception as error:  # of many kinds, as damages are
            # A damaged offset may be outside the file.
            if isinstance(error, OSError) and error.errno != errno.EINVAL:
                raise
            raise ValueError(
                f"{op}: expected a file that holds the state of an optimizer, but got "
                f"{os.fspath(path)!r}, which is damaged or of another kind ({error})"
            ) from error
    return state


def _check_sums(file: IO[bytes]) -> None:
    """Compares all bytes with their checksums, which torch.load does not."""
    with zipfile.ZipFile(file) as archive:
        items = archive.infolist()
        # torch.serialization.set_crc32_options(False) writes zeros.
        has_sums = any(item.CRC for item in items)
        # With the attribute of a folder torch.load would read nothing.
        if (has_sums and archive.testzip()) or any(x.external_attr for x in items):
            raise ValueError("a checksum differs")
