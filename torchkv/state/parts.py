"""What several processes write of one store, and how it is joined.

A process that holds a part of a value, from element `begin` on, writes it, and what
the optimizer keeps of it, as tensors of one dimension named ``<role>@<begin>/<key>``.
Of a row-sparse key, whose parts are some of the rows each, `begin` counts the parts.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from torchkv.arguments import shown

FORM = {str: {"shape": [int], "begins": [int]}}
"""Of the dense keys that are in parts, by ``str(key)``."""
ROW_FORM = {str: int}
"""Of the row-sparse ones: how many parts there are."""


def tensor_name(role: str, key: int | str, begin: int) -> str:
    """The name of a tensor in the data files; `begin` is -1 for a whole one."""
    return f"{role}/{key}" if begin < 0 else f"{role}@{begin}/{key}"


@dataclass
class Written:
    """What one process has written."""

    keys: list[int | str]
    begins: list[int]
    sizes: list[int]  # of the values, or their parts, in elements
    numbers: dict[str, list[int]]  # by field of the manifest, in the order of the keys
    strides: dict[str, list[int]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    files: list[dict[str, Any]] = field(default_factory=list)
    # How many pushes the process has compressed, by str(key).
    compressed: dict[str, int] = field(default_factory=dict)
    # Of row-sparse keys: the key, and what the manifest has of it besides.
    row_sparse: list[list[Any]] = field(default_factory=list)

    def to_bytes(self) -> bytes:
        """For the process that joins all."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Written:
        """What :meth:`to_bytes` returned."""
        return Written(**json.loads(data))


def join_written(
    keys: list[int | str],
    shape_of: Callable[[int | str], tuple[int, ...]],
    written: list[Written],
) -> dict[str, Any]:
    """The fields of the manifest of what all processes have written.

    Args:
        keys: the store's keys, in their order; those of which nothing was written have
            come since.
        shape_of: of the whole value of a key.
        written: of all processes.

    Raises:
        RuntimeError: the processes have not written the same keys, or a key has gone.
    """
    numbers: dict[str, list[int]] = {name: [] for name in written[0].numbers}
    at: dict[int | str, list[tuple[int, Written, int]]] = {}
    for one in written:
        for i, (key, begin) in enumerate(zip(one.keys, one.begins, strict=True)):
            at.setdefault(key, []).append((begin, one, i))
    keys = [key for key in keys if key in at]
    if deleted := at.keys() - keys:
        _raise_changed(min(deleted, key=str))
    row_sparse = {row[0]: row for one in written for row in one.row_sparse}
    parts, row_parts = {}, {}
    for key in keys:
        of_key = sorted(at[key], key=lambda part: part[0])
        begin, first, i = of_key[0]
        for name, column in numbers.items():
            column.append(first.numbers[name][i])
        if begin >= 0 and key in row_sparse:
            if [begin for begin, *_ in of_key] != [*range(len(written))]:
                _raise_changed(key)
            row_parts[str(key)] = len(of_key)
        elif begin >= 0:
            begins, shape = [begin for begin, *_ in of_key], shape_of(key)
            ends = itertools.accumulate(one.sizes[i] for _, one, i in of_key)
            if [0, *ends] != [*begins, math.prod(shape)]:
                _raise_changed(key)
            parts[str(key)] = {"shape": list(shape), "begins": begins}
    return {
        "keys": keys,
        **numbers,
        **({"parts": parts} if parts else {}),
        **({"row_parts": row_parts} if row_parts else {}),
        # Without row-sparse keys the form is that of before there were any.
        **({"row_sparse": list(row_sparse.values())} if row_sparse else {}),
        "strides": {k: v for one in written for k, v in one.strides.items()},
        "dtypes": {k: v for one in written for k, v in one.dtypes.items()},
        "files": [file for one in written for file in one.files],
    }


def _raise_changed(key: int | str) -> NoReturn:
    raise RuntimeError(
        "save: expected the same keys on all ranks until it ends, but another thread "
        f"has initialised or deleted one (key {shown(key)})"
    )


def join_tensors(
    tensors: dict[str, Tensor], parts: dict[str, Any], row_parts: dict[str, int]
) -> None:
    """Replaces parts in `tensors` by whole tensors; ValueError unless they fit."""
    found: dict[tuple[str, str], dict[int, Tensor]] = {}
    if parts or row_parts:
        for name in list(tensors):
            role, _, key = name.partition("/")
            role, at, begin = role.partition("@")
            if at and begin.isdecimal() and (key in parts or key in row_parts):
                found.setdefault((role, key), {})[int(begin)] = tensors.pop(name)
    for (role, key), of_begin in found.items():
        if key in row_parts:
            tensors[f"{role}/{key}"] = _join_rows(role, key, of_begin, row_parts[key])
            continue
        begins, shape = parts[key]["begins"], parts[key]["shape"]
        ordered = [of_begin.get(begin) for begin in begins]
        flat = [part for part in ordered if part is not None and part.dim() == 1]
        ends = itertools.accumulate(part.numel() for part in flat)
        if (
            len(flat) != len(begins)
            or [0, *ends] != [*begins, math.prod(shape)]
            or len({part.dtype for part in flat}) != 1
        ):
            raise ValueError(
                f"load: expected parts of {role!r} that make a tensor of shape "
                f"{tuple(shape)}, but some are missing or of another size "
                f"(key {shown(key)})"
            )
        tensors[f"{role}/{key}"] = torch.cat(flat).view(shape)


def _join_rows(
    role: str, key: str, of_part: dict[int, Tensor], num_parts: int
) -> Tensor:
    rows = [of_part[i] for i in range(num_parts) if i in of_part]
    if (
        len(rows) != num_parts
        or len(of_part) != num_parts
        or any(part.dim() == 0 for part in rows)
        or len({(part.dtype, part.shape[1:]) for part in rows}) != 1
    ):
        raise ValueError(
            f"load: expected {num_parts} parts of {role!r} with rows of one shape, but "
            f"some are missing or of another shape (key {shown(key)})"
        )
    return torch.cat(rows)
