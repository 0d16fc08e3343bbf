"""Splits nested batches into shards for several devices, and joins nested outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchkv.optim.groups import expect
from torchkv.trainer.nests import map_nests


def scatter(nest: Any, path: str, devices: Sequence[torch.device]) -> list[Any]:
    """A shard of each tensor for each device, nested as they are.

    `path` is what the nest is called in messages.
    """
    if num_rows(nest, path) is None:
        return [nest] * len(devices)

    def shard_of(i: int) -> Any:
        def shard(_: str, leaves: Sequence[Any]) -> Tensor | None:
            (x,) = leaves
            if x is None:
                return None
            shards: Sequence[Tensor] = x.tensor_split(len(devices))
            return shards[i].to(devices[i], non_blocking=True)

        return map_nests(shard, [nest], path)

    return [shard_of(i) for i in range(len(devices))]


def num_rows(nest: Any, path: str) -> int | None:
    """The length of all tensors, or None without tensors."""
    lengths: dict[int, str] = {}

    def check(path: str, leaves: Sequence[Any]) -> None:
        (x,) = leaves
        if x is None:
            return
        path = path.removeprefix(".")
        if not isinstance(x, Tensor):
            raise TypeError(
                "scatter: expected tensors in dicts, lists, tuples and dataclasses, "
                f"but got {type(x).__name__} as {path}; pass what all replicas get as "
                "repeat={'name': value}"
            )
        if x.layout != torch.strided or x.is_nested:
            kind = "a nested tensor" if x.is_nested else f"one of {x.layout}"
            raise NotImplementedError(
                f"scatter: expected dense tensors, but got {kind} as {path}"
            )
        if x.dim() == 0:
            raise ValueError(
                "scatter: expected tensors with a dimension to split, but got one of "
                f"shape [] as {path}; pass what all replicas get as "
                "repeat={'name': value}"
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

    def repeated_on(device: torch.device) -> dict[str, Any]:
        def move(_: str, leaves: Sequence[Any]) -> Any:
            (x,) = leaves
            return x.to(device) if isinstance(x, Tensor) else x

        moved: dict[str, Any] = map_nests(move, [dict(repeat)], "repeat")
        return moved

    return [repeated_on(device) for device in devices]


def gather(outputs: Sequence[Any], device: torch.device) -> Any:
    """Joins the tensors of nested outputs along dimension 0, on a device."""
    if not outputs:
        raise ValueError("gather: expected at least one tensor, but got none")

    def join(path: str, leaves: Sequence[Any]) -> Tensor | None:
        if all(x is None for x in leaves):
            return None
        for x in leaves:
            if not isinstance(x, Tensor):
                raise TypeError(
                    f"gather: expected tensors, but got {type(x).__name__} as {path}"
                )
        moved = [x.to(device) for x in leaves]
        if all(x.dim() == 0 for x in moved):
            return torch.stack(moved)
        return torch.cat(moved)

    return map_nests(join, outputs, "output")
