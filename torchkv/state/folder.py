"""Stores on disk: a folder of safetensors files and a manifest.

    manifest.json                      everything but the tensors, and which files
    data-<save>-00001.safetensors      "value/<key>", "<state>/<key>", "row_ids/<key>",
                                       "residual.<position>/<key>", "updater"
    data-<save>-1-00001.safetensors    what rank 1 holds, and its residuals

The manifest is JSON that begins with a checksum of what follows, and has the size and
checksum of each data file. The numbers of the keys are lists in the order of ``keys``.

All ranks of a store on several machines write the data that their servers hold, of a
large value a part each (``torchkv.state.parts``); rank 0 writes the manifest.

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
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchkv.arguments import shown
from torchkv.files import check_path, lock, open_regular, opened
from torchkv.progress import bar, check_tqdm
from torchkv.state import tensor_files
from torchkv.state.content import Content, KeyContent, Rows
from torchkv.state.form import KEY_TYPES, check_distinct, parse, parse_kind
from torchkv.state.parts import FORM, ROW_FORM, join_tensors
from torchkv.state.tensor_files import Originals, distinct

MANIFEST = "manifest.json"
FORMAT = 1
PER_KEY = ("versions", "steps", "accumulated", "compressed")
_DATA_FILE = re.compile(r"data-[0-9a-f]{16}-([0-9]+-)?[0-9]{5,}\.safetensors")

_FORM = {
    **{"format": int, "torchkv": str, "type": str, "key_kind": str, "keys": list},
    **dict.fromkeys(PER_KEY, list),
    **{"optimizer": object, "compression": object, "parts": FORM},
    "row_parts": ROW_FORM,
    **{"strides": {str: [int]}, "dtypes": {str: str}},
    # Key, number of rows, initial value with its numbers and seed.
    "row_sparse": [(int | str, int, str, {str: float}, int)],
    "files": [{"name": str, "size": int, "crc32": int}],
}
_RESIDUAL = re.compile(r"residual\.([0-9]{1,9})")
_MOST_ABSENT = 4096  # residuals of lower positions than the last
_CHECKSUM = re.compile(rb'\{"crc32": "([0-9a-f]{8})",\n')
_UNFINISHED = re.compile(r"manifest-[0-9a-f]{16}\.tmp")


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Disables garbage collection, which takes long among millions of new tensors."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@no_collections()
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


def remove_unused(folder: Path) -> None:
    """Removes data that the manifest does not name. REQUIRES: the lock."""
    used = set()
    if (folder / MANIFEST).exists():
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


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Reads a folder's manifest and checks its form and its files."""
    manifest = _read_json(folder / MANIFEST)
    if parse(manifest, dict, "the manifest").get("format") != FORMAT:
        raise ValueError(
            f"load: expected a store saved in format {FORMAT}, but got format "
            f"{manifest.get('format')}; a newer torchkv may read it"
        )
    # Stores without these write none, as earlier versions of torchkv.
    absent: dict[str, Any] = {"parts": {}, "compression": None, "compressed": []}
    absent |= {"row_sparse": [], "row_parts": {}}
    manifest = dict(parse({**absent, **manifest}, _FORM, "the manifest"))
    if not manifest["compressed"]:
        manifest["compressed"] = [0] * len(manifest["keys"])
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
    for field in PER_KEY:
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
    join_tensors(tensors, manifest["parts"], manifest["row_parts"])
    columns = [manifest[field] for field in PER_KEY]
    for key, *numbers in zip(manifest["keys"], *columns, strict=True):
        value = tensors.pop(f"value/{key}", None)
        if value is None:
            raise ValueError(f"load: missing value (key {shown(key)})")
        version, step, num_accumulated, num_compressed = numbers
        item = KeyContent(value, version, step, num_accumulated, {}, [], num_compressed)
        content.keys[key] = item
    _fill_residuals(content, tensors)
    for key, *rows in manifest["row_sparse"]:
        ids = tensors.pop(f"row_ids/{key}", None)
        if key not in content.keys or ids is None:
            raise ValueError(f"load: missing ids of rows (key {shown(key)})")
        content.keys[key].rows = Rows(ids, *rows)
    content.updater = tensors.pop("updater", None)
    by_text = {str(key): item for key, item in content.keys.items()}
    for name, tensor in tensors.items():
        role, _, text = name.partition("/")
        if text not in by_text:
            raise ValueError(f"load: unexpected tensor {shown(name)}")
        if content.optimizer is None:
            raise ValueError("load: unexpected state of a store without an optimizer")
        by_text[text].state[role] = tensor


def _fill_residuals(content: Content, tensors: dict[str, Tensor]) -> None:
    """Moves residuals to their keys; zeros for ranks that have not compressed."""
    found: dict[str, dict[int, Tensor]] = {}
    for name in [name for name in tensors if name.startswith("residual.")]:
        role, _, text = name.partition("/")
        if position := _RESIDUAL.fullmatch(role):
            found.setdefault(text, {})[int(position[1])] = tensors.pop(name)
    by_text = {str(key): item for key, item in content.keys.items()}
    for text, of_key in found.items():
        last = max(of_key)
        if text not in by_text or last - len(of_key) >= _MOST_ABSENT:
            name = f"residual.{last}/{text}"
            raise ValueError(f"load: unexpected tensor {shown(name)}")
        zeros = torch.zeros_like(of_key[last])
        by_text[text].residuals = [of_key.get(i, zeros) for i in range(last + 1)]
