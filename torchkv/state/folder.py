"""Stores on disk: a folder of safetensors files and a manifest.

    manifest.json                      everything but the tensors, and which files
    data-<save>-00001.safetensors      "value/<key>", "<state>/<key>", "updater"

The manifest is JSON that begins with a checksum of what follows, and has the size and
checksum of each data file. The numbers of the keys are lists in the order of ``keys``.

The data files of a save have names that no other save has. They reach the disk before
the manifest that names them replaces the previous one in one step, and the files of the
previous one are removed after that. So the folder holds one whole store at any moment.
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

import torchkv
from torchkv import _C
from torchkv.arguments import shown
from torchkv.files import check_path, lock, open_regular, opened
from torchkv.progress import bar, check_tqdm
from torchkv.state import tensor_files
from torchkv.state.content import Content, KeyContent
from torchkv.state.form import KEY_TYPES, check_distinct, parse, parse_kind
from torchkv.state.tensor_files import Originals, distinct

_FILE_BYTES = 256 << 20  # of tensors; a larger tensor has its own file
_HEADER_BYTES = 48 << 20
_MANIFEST = "manifest.json"
_FORMAT = 1
_PER_KEY = ("versions", "steps", "accumulated")
_DATA_FILE = re.compile(r"data-[0-9a-f]{16}-[0-9]{5,}\.safetensors")

_FORM = {
    **{"format": int, "torchkv": str, "type": str, "key_kind": str, "keys": list},
    **dict.fromkeys(_PER_KEY, list),
    **{"optimizer": object, "strides": {str: [int]}, "dtypes": {str: str}},
    "files": [{"name": str, "size": int, "crc32": int}],
}
_CHECKSUM = re.compile(rb'\{"crc32": "([0-9a-f]{8})",\n')
_UNFINISHED = re.compile(r"manifest-[0-9a-f]{16}\.tmp")


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Disables garbage collection, which takes long among millions of new tensors."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_collections()
def save(
    impl: _C.KVStore, path: str | os.PathLike[str], progress: bool = False
) -> None:
    """Writes a store into a folder, which is created if needed; replaces its store."""
    check_path("save", path)
    check_tqdm("save", progress)
    content = Content.of(impl)  # throws before anything is written
    folder = Path(path)
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with opened(folder.parent) as parent_fd:
            os.fsync(parent_fd)
    with opened(folder) as folder_fd:
        lock(folder_fd)  # others neither save nor load meanwhile
        _remove_unused(folder)  # what a killed save has left
        with bar("save", _num_bytes(content), progress) as add:
            _write(content, folder, folder_fd, add)
        _remove_unused(folder)  # the previous store


@_no_collections()
def read(path: str | os.PathLike[str], progress: bool = False) -> Content:
    """Reads the store in a folder; raises what :func:`torchkv.load` documents."""
    check_path("load", path)
    check_tqdm("load", progress)
    folder = Path(path)
    if not folder.exists():
        raise FileNotFoundError(f"load: expected a saved store, but {folder} is absent")
    with contextlib.ExitStack() as stack:
        if folder.is_dir():
            lock(stack.enter_context(opened(folder)), fcntl.LOCK_SH)
        manifest = _read_manifest(folder)
        _check_keys(manifest)  # before anything large is read
        content = Content.parse(manifest)
        files = manifest["files"]
        with bar("load", sum(item["size"] for item in files), progress) as add:
            tensors = _read_files(folder, files, add)
        _fill(content, manifest, tensors)
    return content


def _remove_unused(folder: Path) -> None:
    """Removes data that the manifest does not name. REQUIRES: the lock."""
    used = set()
    if (folder / _MANIFEST).exists():
        try:
            used = {item["name"] for item in _read_manifest(folder)["files"]}
        except (OSError, ValueError):
            return  # damaged, but its files may still be of use
    for name in os.listdir(folder):
        if _UNFINISHED.fullmatch(name) or (
            _DATA_FILE.fullmatch(name) and name not in used
        ):
            with contextlib.suppress(OSError):
                (folder / name).unlink()


# -- writing


def _num_bytes(content: Content) -> int:
    """The bytes of the tensors."""
    tensors = [] if content.updater is None else [content.updater]
    for item in content.keys.values():
        tensors += [item.value, *item.state.values()]
    return sum(tensor.nbytes for tensor in tensors)


def _write(
    content: Content, folder: Path, folder_fd: int, add: Callable[[int], object]
) -> None:
    save_id = secrets.token_hex(8)
    originals = Originals()
    files: list[dict[str, Any]] = []
    manifest = _manifest_of(content)
    unfinished = folder / f"manifest-{save_id}.tmp"
    try:
        with tensor_files.Writer() as writer:
            for group in _grouped(_drained(content, originals)):
                name = f"data-{save_id}-{len(files) + 1:05}.safetensors"
                files.append({"name": name})
                num_bytes = sum(tensor.nbytes for _, tensor in group)
                files[-1] |= writer.write(folder / name, group)
                add(num_bytes)
        manifest |= {**vars(originals), "files": files}
        with open(unfinished, "wb") as file:
            file.write(_to_bytes(manifest))
            file.flush()
            os.fsync(file.fileno())
        os.fsync(folder_fd)  # the names of the files, before the manifest names them
        os.replace(unfinished, folder / _MANIFEST)
    except BaseException:
        for name in [unfinished.name, *(item["name"] for item in files)]:
            with contextlib.suppress(OSError):
                (folder / name).unlink()
        raise
    os.fsync(folder_fd)


def _drained(content: Content, originals: Originals) -> Iterator[tuple[str, Tensor]]:
    """Each tensor by name, as the files hold it; the content releases it."""
    if content.updater is not None:
        yield "updater", originals.to_stored("updater", content.updater)
    for key in list(content.keys):
        item = content.keys.pop(key)
        for role, tensor in {"value": item.value, **item.state}.items():
            name = f"{role}/{key}"
            yield name, originals.to_stored(name, tensor)


def _grouped(
    tensors: Iterator[tuple[str, Tensor]],
) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors of each file."""
    group: list[tuple[str, Tensor]] = []
    size = header = 0
    for name, tensor in tensors:
        size += tensor.nbytes
        header += tensor_files.header_bytes(name)
        if group and (size > _FILE_BYTES or header > _HEADER_BYTES):
            yield group
            group, size, header = [], tensor.nbytes, tensor_files.header_bytes(name)
        group.append((name, tensor))
    if group:
        yield group


def _manifest_of(content: Content) -> dict[str, Any]:
    """The manifest, without what is known only when the tensors are written."""
    keys = content.keys.values()
    return {
        "format": _FORMAT,
        "torchkv": torchkv.__version__,
        **content.fields(),
        "keys": list(content.keys),
        "versions": [key.version for key in keys],
        "steps": [key.step for key in keys],
        "accumulated": [key.num_accumulated for key in keys],
    }


def _to_bytes(manifest: dict[str, Any]) -> bytes:
    """The manifest as JSON that begins with the checksum of what follows it."""
    rest = json.dumps(manifest, allow_nan=False).encode()[1:]
    return b'{"crc32": "%08x",\n' % zlib.crc32(rest) + rest


# -- reading


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Reads a folder's manifest and checks its form and its files."""
    manifest = _read_json(folder / _MANIFEST)
    if parse(manifest, dict, "the manifest").get("format") != _FORMAT:
        raise ValueError(
            f"load: expected a store saved in format {_FORMAT}, but got format "
            f"{manifest.get('format')}; a newer torchkv may read it"
        )
    manifest = dict(parse(manifest, _FORM, "the manifest"))
    names = [item["name"] for item in manifest["files"]]
    for name in names:
        if not _DATA_FILE.fullmatch(name):  # not a path that leads out of the folder
            raise ValueError(f"load: expected a data file, but got {name!r}")
    check_distinct(names, "file")
    return manifest


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with open_regular("load", path) as file:
            data = file.read()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise ValueError(
            f"load: expected a folder with a saved store, but {path.parent} has no "
            f"{path.name}"
        ) from error
    checksum = _CHECKSUM.match(data)
    if checksum is None:
        raise ValueError(
            f"load: expected a saved store, but got another file as {path}"
        )
    rest = data[checksum.end() :]
    if zlib.crc32(rest) != int(checksum[1], 16):
        raise ValueError(f"load: {path.name} is damaged: its checksum differs")
    try:
        manifest: dict[str, Any] = json.loads(b"{" + rest, object_pairs_hook=distinct)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"load: {path.name} is not JSON: {error}") from error
    return manifest


def _check_keys(manifest: dict[str, Any]) -> None:
    """Checks a manifest's keys and their numbers."""
    key_type = KEY_TYPES[parse_kind(manifest["key_kind"])]
    keys = parse(manifest["keys"], [key_type], "'keys'")
    check_distinct(keys, "key")
    for field in _PER_KEY:
        numbers = parse(manifest[field], [int], repr(field))
        if len(numbers) != len(keys):
            raise ValueError(
                f"load: expected {len(keys)} {field}, one for each key, but got "
                f"{len(numbers)}"
            )


def _read_files(
    folder: Path, files: list[dict[str, Any]], add: Callable[[int], object]
) -> dict[str, Tensor]:
    def read_one(item: dict[str, Any]) -> dict[str, Tensor]:
        name = item["name"]
        try:
            return tensor_files.read(folder / name, item["size"], item["crc32"])
        except (FileNotFoundError, IsADirectoryError) as error:
            raise ValueError(f"load: {name} of the manifest is missing") from error

    tensors: dict[str, Tensor] = {}
    with ThreadPoolExecutor(2) as pool:  # one reads while the other adds up
        count = 0
        for item, read_tensors in zip(files, pool.map(read_one, files), strict=True):
            add(item["size"])
            count += len(read_tensors)
            tensors |= read_tensors
    if len(tensors) != count:
        raise ValueError("load: repeated tensor in the data files")
    return tensors


def _fill(
    content: Content, manifest: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    """Adds the keys and the updater of a manifest and its files to a content."""
    Originals(manifest["strides"], manifest["dtypes"]).restore(tensors)
    columns = [manifest[field] for field in _PER_KEY]
    for key, *numbers in zip(manifest["keys"], *columns, strict=True):
        value = tensors.pop(f"value/{key}", None)
        if value is None:
            raise ValueError(f"load: missing value (key {shown(key)})")
        content.keys[key] = KeyContent(value, *numbers)
    content.updater = tensors.pop("updater", None)
    by_text = {str(key): item for key, item in content.keys.items()}
    for name, tensor in tensors.items():
        role, _, text = name.partition("/")
        if text not in by_text:
            raise ValueError(f"load: unexpected tensor {shown(name)}")
        if content.optimizer is None:
            raise ValueError("load: unexpected state of a store without an optimizer")
        by_text[text].state[role] = tensor
