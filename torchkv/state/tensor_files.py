"""Tensors in files of the safetensors format, written and read in one pass.

The format: 8 bytes with the length of the header; the header, JSON with each tensor's
dtype, shape and offsets; the tensors' bytes. The safetensors library reads these files;
docs/architecture.md says why it does not write or read them here.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import math
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchkv.arguments import shown
from torchkv.files import open_regular

MAX_HEADER_BYTES = 100_000_000  # what the library accepts
_CHUNK_BYTES = 16 << 20  # what is written, or read, at a time
# What is flushed to the disk, and then dropped from the page cache, at a time: pages
# that have just been freed are the fastest to write to, and others need the memory.
_FLUSH_BYTES = 32 << 20
_MAX_PENDING = 4
_SMALL_BYTES = 1 << 20  # tensors less than this are concatenated

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

# Dtypes that the safetensors library does not read into torch, and what their tensors
# are stored as.
_STORED_AS = {
    torch.complex128: torch.float64,
    torch.complex32: torch.float16,
    torch.float8_e8m0fnu: torch.uint8,
}
_STORED_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _STORED_AS}

_Groups: TypeAlias = Sequence[tuple[torch.dtype, list[tuple[str, Tensor]]]]
"""Tensors by name, in the order of the file: grouped by dtype."""


def header_bytes(name: str) -> int:
    """An upper bound of the bytes that a tensor of this name takes in a header."""
    # JSON may write a character as six, twice for those above 16 bits.
    return (6 if name.isascii() else 12) * len(name) + 300


class Writer:
    """Writes files one after another; one is flushed while the next is written.

    ``with`` waits until all are on the disk, or raises what failed.
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

    def write(
        self, path: Path, tensors: Iterable[tuple[str, Tensor]]
    ) -> dict[str, int]:
        """Writes a new file and returns its ``"size"`` and ``"crc32"``.

        The tensors are contiguous, in CPU memory and of dtypes that the format has.
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
            for chunk in _chunks(header, groups):
                # The checksum is computed while this thread writes.
                future = self._checksums.submit(zlib.crc32, chunk, crc)
                write_all(fd, chunk)
                size += len(chunk)
                crc = future.result()
                if size - flushed >= _FLUSH_BYTES:
                    self._submit(_flush, fd, flushed, size)
                    flushed = size
            self._submit(_flush, fd, flushed, size)
        finally:
            self._disk.submit(os.close, fd)  # after the pending flushes
        return {"size": size, "crc32": crc}

    def _submit(self, function: Callable[..., None], *arguments: int) -> None:
        self._pending.append(self._disk.submit(function, *arguments))
        while len(self._pending) > _MAX_PENDING:
            self._pending.popleft().result()


def read(path: Path, written_size: int, crc32: int) -> dict[str, Tensor]:
    """The tensors of a file that was written, which share one memory.

    Raises:
        ValueError: it is not the file that was written.
    """
    name = path.name
    with open_regular("load", path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != written_size:
            raise ValueError(
                f"load: expected {written_size} bytes in {name}, but got {size}"
            )
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) != 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(
                f"load: expected a safetensors file as {name}, but got another file"
            )
        header = file.read(length)
        flat = torch.empty(size - 8 - length, dtype=torch.uint8, device="cpu")
        crc = zlib.crc32(header, zlib.crc32(start))
        memory = memory_of(flat)
        for begin in range(0, len(memory), _CHUNK_BYTES):
            chunk = memory[begin : begin + _CHUNK_BYTES]
            if file.readinto(chunk) != len(chunk):
                raise ValueError(f"load: {name} became shorter while it was read")
            crc = zlib.crc32(chunk, crc)
    if crc != crc32:
        raise ValueError(
            f"load: {name} is damaged: its checksum differs from the manifest's"
        )
    try:
        return _tensors(json.loads(header, object_pairs_hook=distinct), flat)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"load: expected a safetensors file, but got an invalid header in {name}: "
            f"{error}"
        ) from error


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, for json.loads; ValueError for a repeated name."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("repeated name in an object")
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


def _flush(fd: int, begin: int, end: int) -> None:
    """Flushes a part of a file to the disk and drops it from the page cache."""
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


def _chunks(header: bytes, groups: _Groups) -> Iterator[memoryview]:
    yield memoryview(header)
    for _, named in groups:
        for tensor in _gathered([tensor for _, tensor in named]):
            memory = memory_of(tensor)
            for begin in range(0, len(memory), _CHUNK_BYTES):
                yield memory[begin : begin + _CHUNK_BYTES]


def _gathered(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors, all of one dtype, with small ones concatenated."""
    small: list[Tensor] = []
    size = 0
    for tensor in tensors:
        is_small = tensor.nbytes < _SMALL_BYTES
        if small and not (is_small and size + tensor.nbytes <= _CHUNK_BYTES):
            yield _concatenated(small)
            small, size = [], 0
        if is_small:
            small.append(tensor)
            size += tensor.nbytes
        else:
            yield tensor
    if small:
        yield _concatenated(small)


def _concatenated(tensors: list[Tensor]) -> Tensor:
    flat = [tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors]
    if flat[0].dtype != torch.float32:  # torch.cat does not take every dtype
        flat = [tensor.view(torch.uint8) for tensor in flat]
    return torch.cat(flat)


def _tensors(header: Any, flat: Tensor) -> dict[str, Tensor]:
    """The tensors of a header, as views of the bytes that follow it."""
    if not isinstance(header, dict):
        raise TypeError("it is not an object")
    header.pop("__metadata__", None)
    result: dict[str, Tensor] = {}
    begin = 0
    # Tensors of one dtype and shape are viewed together, in a fraction of the time.
    for (dtype_name, shape), items in itertools.groupby(
        header.items(), key=lambda item: (item[1]["dtype"], item[1]["shape"])
    ):
        dtype = _DTYPES[dtype_name]
        size = _numel(shape) * dtype.itemsize
        names, first = [], begin
        for name, item in items:
            if item["data_offsets"] != [begin, begin + size]:
                raise ValueError(f"a gap or an overlap before {name!r}")
            names.append(name)
            begin += size
        if begin > flat.nbytes:
            raise ValueError(f"{names[-1]!r} ends after the file")
        views = flat[first:begin].view(dtype).view(len(names), *shape).unbind()
        result.update(zip(names, views, strict=True))
    return result


def _numel(shape: list[int]) -> int:
    for size in shape:
        if type(size) is not int or size < 0:
            raise TypeError(f"{size!r} in the shape {shape}")
    # Strides are computed as if no size was 0.
    if math.prod(size or 1 for size in shape) >= 2**63:
        raise ValueError(f"the shape {shape} is too large")
    return math.prod(shape)


@dataclass
class Originals:
    """Strides and dtypes that the files cannot express, by the names of the tensors."""

    strides: dict[str, list[int]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)

    def to_stored(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor as the files hold it; notes what is lost."""
        if not tensor.is_cpu:
            tensor = tensor.cpu()
        if not tensor.is_contiguous():
            self.strides[name] = list(tensor.stride())
            tensor = tensor.contiguous()
        stored_as = _STORED_AS.get(tensor.dtype)
        if stored_as is not None:
            self.dtypes[name] = str(tensor.dtype).removeprefix("torch.")
            complex = tensor.is_complex()
            tensor = torch.view_as_real(tensor) if complex else tensor.view(stored_as)
        return tensor

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """The other way, in place; ValueError where a tensor does not fit."""
        for name in (*self.dtypes, *self.strides):
            if name not in tensors:
                raise ValueError(f"load: missing tensor {shown(name)}")
        for name, text in self.dtypes.items():
            tensors[name] = _with_dtype(name, tensors[name], text)
        for name, strides in self.strides.items():
            tensors[name] = _with_strides(name, tensors[name], strides)


def _with_dtype(name: str, tensor: Tensor, text: str) -> Tensor:
    dtype = _STORED_DTYPES.get(text)
    if dtype is None or tensor.dtype != _STORED_AS[dtype]:
        raise ValueError(f"load: {tensor.dtype} does not hold {text!r} ({shown(name)})")
    if not dtype.is_complex:
        return tensor.view(dtype)
    if tensor.shape[-1:] != (2,):
        raise ValueError(f"load: expected pairs of numbers ({shown(name)})")
    return torch.view_as_complex(tensor)


def _with_strides(name: str, tensor: Tensor, strides: list[int]) -> Tensor:
    """A copy of these strides, which fill its memory without gaps, as in a store."""
    fills = len(strides) == tensor.dim()
    step = 1
    for stride, size in sorted(zip(strides, tensor.shape, strict=False)):
        if size != 1:
            fills = fills and stride == step
            step *= size
    if not fills:
        raise ValueError(f"load: the strides {strides} do not fit ({shown(name)})")
    copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="cpu")
    return copy.copy_(tensor)
