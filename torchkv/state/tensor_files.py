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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchkv.files import open_regular

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

_Groups: TypeAlias = Sequence[tuple[torch.dtype, list[tuple[str, Tensor]]]]
"""Tensors by name, in the order of the file: those of one dtype stand together."""


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
        by_dtype: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
        for name, tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append((name, tensor))
        # The widest first, so that each is aligned.
        groups = sorted(by_dtype.items(), key=lambda x: (-x[0].itemsize, _NAMES[x[0]]))
        header = _header(groups)
        size, flushed, crc = 0, 0, 0
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            for piece in _pieces(header, groups):
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
    with open_regular("load", path) as file:
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
        return _tensors(json.loads(header, object_pairs_hook=distinct), flat)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedFileError(
            f"load: expected a safetensors file, but got a wrong header in {name}: "
            f"{error}"
        ) from error


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, for json.loads; ValueError where a name comes twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name comes twice in one object")
    return result


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


def _header(groups: _Groups) -> bytes:
    quoted = json.encoder.encode_basestring_ascii
    begin = 0
    items = []
    for dtype, tensors in groups:
        shapes: dict[torch.Size, str] = {}
        for name, tensor in tensors:
            end = begin + tensor.nbytes
            shape = tensor.shape
            if shape not in shapes:
                shapes[shape] = f'{{"dtype":"{_NAMES[dtype]}","shape":{list(shape)}'
            # What json.dumps would write, in a fraction of its time.
            items.append(
                f'{quoted(name)}:{shapes[shape]},"data_offsets":[{begin},{end}]}}'
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


def _pieces(header: bytes, groups: _Groups) -> Iterator[memoryview]:
    yield memoryview(header)
    for _, tensors in groups:
        small: list[Tensor] = []
        small_bytes = 0
        for _, tensor in tensors:
            num_bytes = tensor.nbytes
            is_small = num_bytes < _SMALL_BYTES
            if small and not (is_small and small_bytes + num_bytes <= _PIECE_BYTES):
                yield from _split(_gather(small))
                small, small_bytes = [], 0
            if is_small:
                small.append(tensor)
                small_bytes += num_bytes
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
    result: dict[str, Tensor] = {}
    for names, item in _runs(header):
        dtype = _DTYPES[item["dtype"]]
        shape = item["shape"]
        begin, end = item["data_offsets"]
        for number in (*shape, begin, end):
            if type(number) is not int or number < 0:
                raise TypeError(f"{number!r} of {names[0]!r} is no size")
        end_of_run = begin + len(names) * (end - begin)
        if (
            end_of_run > flat.nbytes
            or begin + math.prod(shape) * dtype.itemsize != end
            or begin % dtype.itemsize != 0
        ):
            raise ValueError(f"{names[0]!r} has no room at {begin}, {end}")
        run = flat[begin:end_of_run].view(dtype).view(len(names), *shape)
        result.update(zip(names, run.unbind(), strict=True))
    return result


def _runs(header: dict[str, Any]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """The names of tensors that are alike, one behind another, and the first item.

    They are cut out of the memory together, in a fraction of the time.
    """
    names: list[str] = []
    first: dict[str, Any] = {}
    size = next_begin = 0
    for name, item in header.items():
        if (
            names
            and item["data_offsets"] == [next_begin, next_begin + size]
            and item["shape"] == first["shape"]
            and item["dtype"] == first["dtype"]
        ):
            names.append(name)
            next_begin += size
            continue
        if names:
            yield names, first
        names, first = [name], item
        begin, next_begin = item["data_offsets"]
        size = next_begin - begin
    if names:
        yield names, first
