"""Memory and files of this process."""

from __future__ import annotations

import ctypes
import os


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks"
        " fordblks keepcost".split()
    ]


def allocated_bytes() -> int:
    """What malloc gave out and has not got back.

    Other than the resident memory, it does not contain the free memory that malloc
    keeps, which depends on the order in which threads freed theirs.
    """
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def resident_bytes(kind: str = "VmRSS") -> int:
    """Of the physical memory; `RssShmem` is that which other processes share, too."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(f"{kind}:"):
                return int(line.split()[1]) << 10
    raise KeyError(kind)


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))
