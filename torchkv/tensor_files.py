"""Tensors in files of the safetensors format, written and read in one pass.

The format: 8 bytes with the length of the header; the header, JSON with each tensor's
dtype, shape and place; the tensors' bytes. safetensors' own package reads these files,
too. It is not used here because a checkpoint needs what it does not offer: a checksum
that is taken while the bytes are written, files that reach the disk while the next one
is made, and reading without a call per tensor.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_HEADER_BYTES = 100_000_000  # what safetensors' package takes
_PIECE_BYTES = 16 << 20  # what is written, or read, at a time
# So much of a file goes to the disk, and leaves memory, at a time: memory that has
# just become free is the fastest to write to, and the machine needs its own for other
# things.
_FLUSH_BYTES = 32 << 20
_MAX_PENDING = 4
_SMALL_BYTES = 1 << 20  # tensors less than this are gathered into pieces

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class Written(NamedTuple):
    """What is known of a file once it is written."""

    size: int
    crc32: int


class DamagedFileError(ValueError):
    """A file that is not what was written."""


def is_native(dtype: torch.dtype) -> bool:
    """Whether the format has a name for a dtype."""
    return dtype in _NAMES


def header_bytes(name: str) -> int:
    """About what a tensor of this name costs in a header, and at least that."""
    # JSON may write a character as six, twice for those above 16 bits.
    return 12 * len(name) + 300 if not name.isascii() else 6 * len(name) + 300


class Writer:
    """Writes files one after another; while one reaches the disk the next is made.

    ``with`` waits until all are on the disk, or raises what went wrong.
    """

    def __init__(self) -> None:
        """A writer with two threads: for checksums, and for the disk."""
        self._checksums = ThreadPoolExecutor(1)
        self._disk = ThreadPoolExecutor(1)
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> Writer:
        """The writer itself."""
        return self

    def __exit__(self, kind: object, *exc_info: object) -> None:
        """Waits for the disk."""
        self._checksums.shutdown()
        self._disk.shutdown()
        if kind is None:
            for future in self._pending:
                future.result()

    def write(self, path: Path, tensors: Iterable[tuple[str, Tensor]]) -> Written:
        """Writes a new file.

        Args:
            path: where no file is yet.
            tensors: contiguous ones in CPU memory, of native dtypes.
        """
        # The widest first, so that each is aligned.
        ordered = sorted(
            tensors, key=lambda item: (-item[1].itemsize, _NAMES[item[1].dtype])
        )
        header = _header(ordered)
        size, flushed, crc = 0, 0, 0
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            for piece in _pieces(header, (tensor for _, tensor in ordered)):
                # Adds up in the other thread while this one writes.
                future = self._checksums.submit(zlib.crc32, piece, crc)
                write_all(fd, piece)
                size += len(piece)
                crc = future.result()
                if size - flushed >= _FLUSH_BYTES:
                    self._submit(_flush, fd, flushed, size)
                    flushed = size
            self._submit(_flush, fd, flushed, size)
        finally:
            self._disk.submit(os.close, fd)  # after what is under way
        return Written(size, crc)

    def _submit(self, function: Callable[..., None], *arguments: int) -> None:
        self._pending.append(self._disk.submit(function, *arguments))
        while len(self._pending) > _MAX_PENDING:
            self._pending.popleft().result()


def read(path: Path, written: Written) -> dict[str, Tensor]:
    """The tensors of a file, which share one memory.

    Raises:
        DamagedFileError: it is not the file that was written.
    """
    name = path.name
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size != written.size:
            raise DamagedFileError(
                f"load: expected {written.size} bytes in {name}, but got {size}"
            )
        start = read_all(file.fileno(), 8)
        length = int.from_bytes(start, "little")
        if len(start) != 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise DamagedFileError(
                f"load: expected a safetensors file, but got another as {name}"
            )
        header = read_all(file.fileno(), length)
        flat = torch.empty(size - 8 - length, dtype=torch.uint8, device="cpu")
        crc = zlib.crc32(header, zlib.crc32(start))
        memory = memory_of(flat)
        for begin in range(0, len(memory), _PIECE_BYTES):
            piece = memory[begin : begin + _PIECE_BYTES]
            read_into(file.fileno(), piece, name)
            crc = zlib.crc32(piece, crc)
    if crc != written.crc32:
        raise DamagedFileError(
            f"load: expected {name} as it was written, but got one that differs "
            "(its checksum does not fit)"
        )
    try:
        return _tensors(json.loads(header), flat)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedFileError(
            f"load: expected a safetensors file, but got a wrong header in {name}: "
            f"{error}"
        ) from error


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in CPU memory, for as long as it lives."""
    if tensor.nbytes == 0:
        return memoryview(b"")
    array = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


def write_all(fd: int, data: memoryview | bytes) -> None:
    """os.write, which may write less than it is given."""
    rest = memoryview(data)
    while len(rest) > 0:
        rest = rest[os.write(fd, rest) :]


def read_all(fd: int, size: int) -> bytes:
    """os.read of so many bytes; less only at the end of the file."""
    parts = []
    while size > 0 and (part := os.read(fd, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def read_into(fd: int, memory: memoryview, name: str) -> None:
    """Fills the memory from a file."""
    while len(memory) > 0:
        count = os.readv(fd, [memory])
        if count == 0:
            raise DamagedFileError(f"load: {name} became shorter while it was read")
        memory = memory[count:]


def _flush(fd: int, begin: int, end: int) -> None:
    """Brings a part of a file to the disk, and frees the memory that it had."""
    os.fsync(fd)
    with contextlib.suppress(OSError):  # advice
        os.posix_fadvise(fd, begin, end - begin, os.POSIX_FADV_DONTNEED)


def _header(tensors: list[tuple[str, Tensor]]) -> bytes:
    quoted = json.encoder.encode_basestring_ascii
    begin = 0
    items = []
    for name, tensor in tensors:
        end = begin + tensor.nbytes
        # What json.dumps would write, in a fraction of its time.
        items.append(
            f'{quoted(name)}:{{"dtype":"{_NAMES[tensor.dtype]}",'
            f'"shape":{list(tensor.shape)},"data_offsets":[{begin},{end}]}}'
        )
        begin = end
    text = ("{" + ",".join(items) + "}").encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(
            f"save: expected names that fit into {MAX_HEADER_BYTES} bytes, but got a "
            f"key that needs {len(text)}"
        )
    return len(text).to_bytes(8, "little") + text


def _pieces(header: bytes, tensors: Iterator[Tensor]) -> Iterator[memoryview]:
    yield memoryview(header)
    small: list[Tensor] = []
    small_bytes = 0
    for tensor in tensors:
        if small and (
            tensor.dtype != small[0].dtype or small_bytes + tensor.nbytes > _PIECE_BYTES
        ):
            yield from _split(_gather(small))
            small, small_bytes = [], 0
        if tensor.nbytes < _SMALL_BYTES:
            small.append(tensor)
            small_bytes += tensor.nbytes
        else:
            yield from _split(tensor)
    if small:
        yield from _split(_gather(small))


def _gather(small: list[Tensor]) -> Tensor:
    flat = [tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in small]
    if flat[0].dtype != torch.float32:  # torch.cat does not take every dtype
        flat = [tensor.view(torch.uint8) for tensor in flat]
    return torch.cat(flat)


def _split(tensor: Tensor) -> Iterator[memoryview]:
    memory = memory_of(tensor)
    for begin in range(0, len(memory), _PIECE_BYTES):
        yield memory[begin : begin + _PIECE_BYTES]


def _tensors(header: Any, flat: Tensor) -> dict[str, Tensor]:
    if not isinstance(header, dict):
        raise TypeError("it is no object")
    header.pop("__metadata__", None)
    num_bytes = flat.nbytes
    bases: dict[torch.dtype, Tensor] = {}
    result = {}
    for name, item in header.items():
        dtype = _DTYPES[item["dtype"]]
        shape = item["shape"]
        begin, end = item["data_offsets"]
        for number in (*shape, begin, end):
            if type(number) is not int or number < 0:
                raise TypeError(f"{number!r} of {name!r} is no size")
        itemsize = dtype.itemsize
        if (
            end > num_bytes
            or begin + math.prod(shape) * itemsize != end
            or begin % itemsize != 0
        ):
            raise ValueError(f"{name!r} has no room at {begin}, {end}")
        if dtype not in bases:
            bases[dtype] = flat[: num_bytes // itemsize * itemsize].view(dtype)
        result[name] = bases[dtype].as_strided(
            shape, contiguous_strides(shape), begin // itemsize
        )
    return result


def contiguous_strides(shape: Iterable[int]) -> list[int]:
    """The strides of a contiguous tensor."""
    strides = []
    step = 1
    for size in reversed(list(shape)):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]
