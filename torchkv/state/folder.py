"""Whole stores on disk: a folder of safetensors files and a manifest.

    manifest.json                      everything that is no tensor, and which files
    data-<save>-00001.safetensors      "value/<key>", "<state>/<key>", "updater"

The data files of a save have names that no other save has. They are on the disk before
the manifest that names them takes the place of the last one, in one step; the files of
the last one go after that. So whatever moment a save ends at, the folder holds one
whole store. The manifest has the sizes and checksums of the data files, and its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import re
import secrets
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torchkv
from torchkv import _C
from torchkv.files import check_path, open_regular
from torchkv.optim.built_in import BuiltIn
from torchkv.optim.groups import shown
from torchkv.state import tensor_files
from torchkv.state.content import (
    Content,
    KeyContent,
    expect,
    expect_fields,
    expect_key,
    expect_kind,
    expect_type,
    optimizer_as_dict,
    optimizer_from_dict,
    take,
)
from torchkv.state.tensor_files import DamagedFileError, Written

MANIFEST = "manifest.json"
FORMAT = 1

_FILE_BYTES = 256 << 20  # of tensors; a larger tensor has a file of its own
_HEADER_BYTES = 48 << 20
_PER_KEY = ("versions", "steps", "accumulated")
_FIELDS = (
    "format",
    "torchkv",
    "type",
    "key_kind",
    "keys",
    *_PER_KEY,
    "optimizer",
    "strides",
    "dtypes",
    "files",
)
_SEAL = re.compile(rb'\{"crc32": "([0-9a-f]{8})",\n')
_DATA_FILE = re.compile(r"data-[0-9a-f]{16}-[0-9]{5,}\.safetensors")
_UNFINISHED = re.compile(r"manifest-[0-9a-f]{16}\.tmp")

# Dtypes that the format does not know, and the one that stands for each.
_STAND_INS = {
    torch.complex128: torch.float64,
    torch.complex32: torch.float16,
    torch.float8_e8m0fnu: torch.uint8,
}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _STAND_INS}


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Python looks for no cycles: among millions of new tensors that takes long."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_collections()
def save(impl: _C.KVStore, path: str | os.PathLike[str]) -> None:
    """Writes a store into a folder, in place of the one that it holds.

    Args:
        impl: the store.
        path: the folder; it is made where there is none.
    """
    check_path("save", path)
    content = Content.of(impl)  # throws before anything is written
    folder = Path(path)
    _make_folder(folder)
    with _locked(folder, fcntl.LOCK_EX) as folder_fd:
        _remove_unused(folder)  # what a killed save has left
        _write(content, folder, folder_fd)
        _remove_unused(folder)  # the last store


@_no_collections()
def read(path: str | os.PathLike[str]) -> Content:
    """Reads the store in a folder.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it holds no store, or a damaged one.
    """
    check_path("load", path)
    folder = Path(path)
    if not folder.exists():
        raise FileNotFoundError(
            f"load: expected a saved store, but {folder} is not there"
        )
    with _locked(folder, fcntl.LOCK_SH) if folder.is_dir() else _unlocked():
        manifest = _read_manifest(folder / MANIFEST)
        _check_keys(manifest)  # before anything large is read
        return _content(manifest, _read_files(folder, manifest["files"]))


@_no_collections()
def load(impl: _C.KVStore, path: str | os.PathLike[str]) -> BuiltIn | None:
    """Replaces a store's content by what is in a folder; see :func:`read`.

    Returns:
        As :func:`torchkv.state.content.take`.
    """
    impl.barrier()  # a store that cannot be used says so before a long read
    return take(impl, read(path))


# -- the folder


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _locked(folder: Path, how: int) -> Iterator[int]:
    """Keeps others from saving (or, for a save, from loading) meanwhile."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # not every file system has locks
            fcntl.flock(fd, how)
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _unlocked() -> Iterator[int]:
    yield -1


def _remove_unused(folder: Path) -> None:
    """Removes the files of stores that are not the folder's. REQUIRES: the lock."""
    try:
        used = {item["name"] for item in _read_manifest(folder / MANIFEST)["files"]}
    except (OSError, ValueError):
        if (folder / MANIFEST).exists():
            return  # damaged, but perhaps not beyond repair: it is not ours to remove
        used = set()
    for name in os.listdir(folder):
        if _UNFINISHED.fullmatch(name) or (
            _DATA_FILE.fullmatch(name) and name not in used
        ):
            with contextlib.suppress(OSError):
                (folder / name).unlink()


# -- writing


def _write(content: Content, folder: Path, folder_fd: int) -> None:
    save_id = secrets.token_hex(8)
    strides: dict[str, list[int]] = {}
    dtypes: dict[str, str] = {}
    files: list[dict[str, Any]] = []
    manifest = _manifest(content)
    unfinished = folder / f"manifest-{save_id}.tmp"
    try:
        with tensor_files.Writer() as writer:
            for group in _grouped(_drained(content, strides, dtypes)):
                name = f"data-{save_id}-{len(files) + 1:05}.safetensors"
                files.append({"name": name})
                written = writer.write(folder / name, group)
                files[-1].update(written._asdict())
        manifest |= {"strides": strides, "dtypes": dtypes, "files": files}
        with open(unfinished, "wb") as file:
            file.write(_sealed(manifest))
            file.flush()
            os.fsync(file.fileno())
        os.fsync(folder_fd)  # the names of the files, before one names them
        os.replace(unfinished, folder / MANIFEST)
    except BaseException:
        for name in [unfinished.name, *(item["name"] for item in files)]:
            with contextlib.suppress(OSError):
                (folder / name).unlink()
        raise
    os.fsync(folder_fd)


def _manifest(content: Content) -> dict[str, Any]:
    keys = content.keys.values()
    return {
        "format": FORMAT,
        "torchkv": torchkv.__version__,
        "type": content.type,
        "key_kind": content.key_kind,
        "keys": list(content.keys),
        "versions": [key.version for key in keys],
        "steps": [key.step for key in keys],
        "accumulated": [key.num_accumulated for key in keys],
        "optimizer": optimizer_as_dict(content.optimizer),
    }


def _sealed(manifest: dict[str, Any]) -> bytes:
    """The manifest as JSON that begins with the checksum of what follows it."""
    rest = json.dumps(manifest, allow_nan=False).encode()[1:]
    return b'{"crc32": "%08x",\n' % zlib.crc32(rest) + rest


def _drained(
    content: Content, strides: dict[str, list[int]], dtypes: dict[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """Each tensor as the files hold it; the content lets go of it."""

    def plain(name: str, tensor: Tensor) -> tuple[str, Tensor]:
        if not tensor.is_cpu:
            tensor = tensor.cpu()
        if not tensor.is_contiguous():
            strides[name] = list(tensor.stride())
            tensor = tensor.contiguous()
        stand_in = _STAND_INS.get(tensor.dtype)
        if stand_in is not None:
            dtypes[name] = str(tensor.dtype).removeprefix("torch.")
            complex = tensor.is_complex()
            tensor = torch.view_as_real(tensor) if complex else tensor.view(stand_in)
        return name, tensor

    if content.updater is not None:
        yield plain("updater", content.updater)
    for key in list(content.keys):
        item = content.keys.pop(key)
        yield plain(f"value/{key}", item.value)
        for role, tensor in item.states.items():
            yield plain(f"{role}/{key}", tensor)


def _grouped(
    tensors: Iterator[tuple[str, Tensor]],
) -> Iterator[list[tuple[str, Tensor]]]:
    """What goes into each file."""
    group: list[tuple[str, Tensor]] = []
    size = header = 0
    for name, tensor in tensors:
        room = tensor_files.header_bytes(name)
        if group and (
            size + tensor.nbytes > _FILE_BYTES or header + room > _HEADER_BYTES
        ):
            yield group
            group, size, header = [], 0, 0
        group.append((name, tensor))
        size += tensor.nbytes
        header += room
    if group:
        yield group


# -- reading


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        with open_regular("load", path) as file:
            data = file.read()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise ValueError(
            f"load: expected a folder with a saved store, but {path.parent} has no "
            f"{path.name}"
        ) from error
    seal = _SEAL.match(data)
    if seal is None:
        raise ValueError(
            f"load: expected a saved store, but got another file as {path}"
        )
    rest = data[seal.end() :]
    if zlib.crc32(rest) != int(seal[1], 16):
        raise DamagedFileError(
            f"load: expected {path.name} as it was written, but got one that differs "
            "(its checksum does not fit)"
        )
    try:
        manifest: dict[str, Any] = json.loads(
            b"{" + rest, object_pairs_hook=tensor_files.distinct
        )
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"load: {path.name} is no JSON: {error}") from error
    if expect(manifest, dict, "the manifest").get("format") != FORMAT:
        raise ValueError(
            f"load: expected a store saved in format {FORMAT}, but got format "
            f"{manifest.get('format')}; a newer torchkv may read it"
        )
    expect_fields(manifest, _FIELDS, "the manifest")
    names = set()
    for item in expect(manifest["files"], list, "'files'"):
        expect_fields(item, ["name", *Written._fields], "a file of the manifest")
        # No path: nothing outside the folder is read.
        if not _DATA_FILE.fullmatch(expect(item["name"], str, "a file's name")):
            raise ValueError(f"load: expected a data file, but got {item['name']!r}")
        if item["name"] in names:
            raise ValueError(
                f"load: expected each file once, but got {item['name']} twice"
            )
        names.add(item["name"])
        for field in Written._fields:
            expect(item[field], int, f"a file's {field!r}")
    return manifest


def _check_keys(manifest: dict[str, Any]) -> None:
    kind = expect_kind(manifest["key_kind"])
    names = expect(manifest["keys"], list, "'keys'")
    for name in names:
        expect_key(name, kind)
    if len(set(names)) != len(names):
        raise ValueError("load: expected distinct keys, but got one twice")


def _read_files(folder: Path, files: list[dict[str, Any]]) -> dict[str, Tensor]:
    def read_one(item: dict[str, Any]) -> dict[str, Tensor]:
        name = item["name"]
        try:
            written = Written(item["size"], item["crc32"])
            return tensor_files.read(folder / name, written)
        except (FileNotFoundError, IsADirectoryError) as error:
            raise DamagedFileError(
                f"load: expected {name}, which the manifest names, but it is not there"
            ) from error

    tensors: dict[str, Tensor] = {}
    with ThreadPoolExecutor(2) as pool:  # one reads while the other adds up
        count = 0
        for read_tensors in pool.map(read_one, files):
            count += len(read_tensors)
            tensors |= read_tensors
    if len(tensors) != count:
        raise DamagedFileError("load: expected distinct tensors, but got one twice")
    return tensors


def _content(manifest: dict[str, Any], tensors: dict[str, Tensor]) -> Content:
    kind, names = manifest["key_kind"], manifest["keys"]
    numbers = [_numbers(manifest, field, len(names)) for field in _PER_KEY]
    _restore(tensors, manifest)

    keys: dict[int | str, KeyContent] = {}
    for name, version, step, accumulated in zip(names, *numbers, strict=True):
        value = tensors.pop(f"value/{name}", None)
        if value is None:
            raise ValueError(
                f"load: expected a value, but got none (key {shown(name)})"
            )
        keys[name] = KeyContent(value, version, step, accumulated)
    updater = tensors.pop("updater", None)
    by_text = {str(name): key for name, key in keys.items()}
    for name, tensor in tensors.items():
        role, _, text = name.partition("/")
        if text not in by_text:
            raise ValueError(f"load: expected no tensor {shown(name)}, but got one")
        by_text[text].states[role] = tensor
    optimizer = optimizer_from_dict(manifest["optimizer"], kind)
    if optimizer is None and any(key.states for key in keys.values()):
        raise ValueError("load: expected no state without an optimizer, but got some")
    type = expect_type(manifest["type"])
    return Content(type, kind, keys, updater, optimizer)


def _numbers(manifest: dict[str, Any], field: str, count: int) -> list[int]:
    numbers = expect(manifest[field], list, repr(field))
    if len(numbers) != count:
        raise ValueError(
            f"load: expected {count} {field}, one for each key, but got {len(numbers)}"
        )
    for number in numbers:
        if expect(number, int, f"a number of {field!r}") < 0:
            raise ValueError(f"load: expected no negative {field}, but got {number}")
    return numbers


def _restore(tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
    """Gives the tensors the dtypes and strides that the files could not hold."""

    def tensor_of(name: str) -> Tensor:
        if name not in tensors:
            raise ValueError(f"load: expected a tensor {shown(name)}, but got none")
        return tensors[name]

    for name, text in expect(manifest["dtypes"], dict, "'dtypes'").items():
        tensor = tensor_of(name)
        dtype = _DTYPES.get(expect(text, str, "a dtype"))
        if dtype is None or tensor.dtype != _STAND_INS[dtype]:
            raise ValueError(
                f"load: expected another dtype than {text!r} ({shown(name)})"
            )
        if not dtype.is_complex:
            tensors[name] = tensor.view(dtype)
        elif tensor.dim() > 0 and tensor.shape[-1] == 2:
            tensors[name] = torch.view_as_complex(tensor)
        else:
            raise ValueError(f"load: expected pairs of numbers ({shown(name)})")
    for name, strides in expect(manifest["strides"], dict, "'strides'").items():
        tensor = tensor_of(name)
        for stride in expect(strides, list, "strides"):
            expect(stride, int, "a stride")
        tensors[name] = _with_strides(name, tensor, strides)


def _with_strides(name: str, tensor: Tensor, strides: list[int]) -> Tensor:
    """A copy of these strides. They fill its memory without gaps, as a store's do."""
    by_stride = sorted(zip(strides, tensor.shape, strict=False))
    step = 1
    fills = len(strides) == tensor.dim()
    for stride, size in by_stride:
        if size != 1:
            fills = fills and stride == step
            step *= size
    if not fills:
        raise ValueError(f"load: expected other strides than {strides} ({shown(name)})")
    copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="cpu")
    return copy.copy_(tensor)
