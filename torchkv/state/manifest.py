"""The manifest of a folder with a store: everything but the tensors, as JSON.

It begins with a checksum of what follows, and has the size and checksum of each data
file. The numbers of the keys are lists in the order of ``keys``.
"""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

import torchkv
from torchkv.files import open_regular
from torchkv.state.content import Content
from torchkv.state.form import KEY_TYPES, check_distinct, parse, parse_kind
from torchkv.state.tensor_files import distinct

NAME = "manifest.json"
FORMAT = 1
PER_KEY = ("versions", "steps", "accumulated")
DATA_FILE = re.compile(r"data-[0-9a-f]{16}-[0-9]{5,}\.safetensors")

_FORM = {
    **{"format": int, "torchkv": str, "type": str, "key_kind": str, "keys": list},
    **dict.fromkeys(PER_KEY, list),
    **{"optimizer": object, "strides": {str: [int]}, "dtypes": {str: str}},
    "files": [{"name": str, "size": int, "crc32": int}],
}
_CHECKSUM = re.compile(rb'\{"crc32": "([0-9a-f]{8})",\n')


def manifest_of(content: Content) -> dict[str, Any]:
    """The manifest, without what is known only when the tensors are written."""
    keys = content.keys.values()
    return {
        "format": FORMAT,
        "torchkv": torchkv.__version__,
        **content.fields(),
        "keys": list(content.keys),
        "versions": [key.version for key in keys],
        "steps": [key.step for key in keys],
        "accumulated": [key.num_accumulated for key in keys],
    }


def to_bytes(manifest: dict[str, Any]) -> bytes:
    """The manifest as JSON that begins with the checksum of what follows it."""
    rest = json.dumps(manifest, allow_nan=False).encode()[1:]
    return b'{"crc32": "%08x",\n' % zlib.crc32(rest) + rest


def read_manifest(folder: Path) -> dict[str, Any]:
    """Reads a folder's manifest and checks its form and its files."""
    manifest = _read(folder / NAME)
    if parse(manifest, dict, "the manifest").get("format") != FORMAT:
        raise ValueError(
            f"load: expected a store saved in format {FORMAT}, but got format "
            f"{manifest.get('format')}; a newer torchkv may read it"
        )
    manifest = dict(parse(manifest, _FORM, "the manifest"))
    names = [item["name"] for item in manifest["files"]]
    for name in names:
        if not DATA_FILE.fullmatch(name):  # not a path that leads out of the folder
            raise ValueError(f"load: expected a data file, but got {name!r}")
    check_distinct(names, "file")
    return manifest


def check_keys(manifest: dict[str, Any]) -> None:
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


def _read(path: Path) -> dict[str, Any]:
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
