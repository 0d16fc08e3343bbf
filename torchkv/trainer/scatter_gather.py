"""Splits nested batches into shards for several devices, and joins nested outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchkv.arguments import expect
from torchkv.trainer.nests import map_nests


def scatter(nest: Any, path: str, devices: Sequence[torch.device]) -> list[Any]:
    """A shard of each tensor for each device, nested as they are.

    `path` is what the nest is called in messages.
    """
    if num_rows(nest, path) is None:
        return [nest] * len(devices)

    def shard(i: int, _: str, x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        return x.tensor_split(len(devices))[i].to(devices[i], non_blocking=True)

    return [map_nests(partial(shard, i), [nest], path) for i in range(len(devices))]


def num_rows(nest: Any, path: str) -> int | None:
    """The length of all tensors, or None without tensors."""
    lengths: dict[int, str] = {}
    hint = "; pass what all replicas get as repeat={'name': value}"

    def check(path: str, x: Any) -> None:
        if x is None:
            return
        path = path.removeprefix(".")
        what = "tensors in dicts, lists, tuples and dataclasses"
        expect("scatter", x, Tensor, what, f" as {path}{hint}")
        if x.layout != torch.strided or x.is_nested:
            kind = "a nested tensor" if x.is_nested else f"one of {x.layout}"
            raise NotImplementedError(
                f"scatter: expected dense tensors, but got {kind} as {path}"
            )
        if x.dim() == 0:
            raise ValueError(
                "scatter: expected tensors with a dimension to split, but got one of "
                f"shape [] as {path}{hint}"
            )
        lengths.setdefault(len(x), path)

    map_nests(check, [nest], path)
    if len(lengths) > 1:
        listed = ", ".join(f"{n} as {path}" for n, path in sorted(lengths.items()))
        raise ValueError(f"scatter: expected tensors of one length, but got {listed}")
    return next(iter(lengths), None)


def repeat_on(
    repeat: Mapping[str, Any] | None, devices: Sequence[torch.device]
) -> list[dict[str, Any]]:
    """All arguments for each device, with tensors copied to it."""
    repeat = {} if repeat is None else repeat
    expect("repeat", repeat, Mapping, "a dict of arguments by name")

    def move(device: torch.device, _: str, x: Any) -> Any:
        return x.to(device) if isinstance(x, Tensor) else x

    nests = [dict(repeat)]
    return [map_nests(partial(move, device), nests, "repeat") for device in devices]


def gather(outputs: Sequence[Any], device: torch.device) -> Any:
    """Joins the tensors of nested outputs along dimension 0, on a device."""
    if not outputs:
        raise ValueError("gather: expected at least one tensor, but got none")

    def join(path: str, *leaves: Any) -> Tensor | None:
        if all(x is None for x in leaves):
            return None
        for x in leaves:
            expect("gather", x, Tensor, "tensors", f" as {path}")
        moved = [x.to(device) for x in leaves]
        if all(x.dim() == 0 for x in moved):
            return torch.stack(moved)
        return torch.cat(moved)

    return map_nests(join, outputs, "output")
