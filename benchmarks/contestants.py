"""The implementations of reduce and broadcast to compare: torchkv's and torch's.

All tensors are made and written to before anything is timed.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torchkv
from harness import Contestant, timed
from parameter_lists import Shape
from peers.pattern import replica_pattern, sum_pattern

Call = Callable[[], object]

# A group of keys that fits, with its sums, into a core's second-level cache.
GROUP_ELEMENTS = 1 << 17


def filled(
    shape: Shape, dtype: torch.dtype, pattern: Sequence[float], device: str = "cpu"
) -> Tensor:
    """A new tensor that repeats the pattern."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    tile = torch.tensor(pattern, dtype=dtype, device=device).repeat(1024)
    flat = tensor.view(-1)
    whole = flat.numel() // tile.numel() * tile.numel()
    flat[:whole].view(-1, tile.numel()).copy_(tile)
    flat[whole:].copy_(tile[: flat.numel() - whole])
    return tensor


def sums_of(
    shapes: Sequence[Shape], dtype: torch.dtype, replicas: int, device: str = "cpu"
) -> list[Tensor]:
    """The expected sum of each key's replicas."""
    return [
        filled(shape, dtype, sum_pattern(key, replicas), device)
        for key, shape in enumerate(shapes)
    ]


class Arrays:
    """A contestant's tensors: for each key replicas, a stored tensor and outs."""

    def __init__(
        self,
        shapes: Sequence[Shape],
        dtype: torch.dtype,
        replicas: int,
        outs: int,
        device: str = "cpu",
    ) -> None:
        """Makes all tensors; `outs` is 0 if nothing is pulled."""
        self.values = [
            [
                filled(shape, dtype, replica_pattern(key, r), device)
                for r in range(replicas)
            ]
            for key, shape in enumerate(shapes)
        ]
        self.stored = [filled(shape, dtype, [0], device) for shape in shapes]
        self.outs = [
            [filled(shape, dtype, [0], device) for _ in range(outs)] for shape in shapes
        ]

    def with_own_results(self) -> Arrays:
        """The same replicas, with another stored tensor and other outs."""
        other = copy.copy(self)
        other.stored = [torch.zeros_like(stored) for stored in self.stored]
        other.outs = [[torch.zeros_like(out) for out in outs] for outs in self.outs]
        return other

    def only(self, key: int) -> Arrays:
        """These tensors of one key."""
        one = copy.copy(self)
        one.values, one.stored = [self.values[key]], [self.stored[key]]
        one.outs = [self.outs[key]]
        return one

    def results(self) -> Iterator[Sequence[Tensor]]:
        """The lists that a call writes the sums to."""
        if self.outs[0]:
            yield from zip(*self.outs, strict=True)
        else:
            yield self.stored


def on(arrays: Arrays, call: Call, sums: Sequence[Tensor]) -> Contestant:
    """The contestant that makes this call, which must leave the sums in the arrays.

    Results are reset to zero after the check, because contestants may share arrays.
    """

    def agrees() -> bool:
        found = True
        for result in arrays.results():
            found &= all(map(torch.equal, result, sums))
            torch._foreach_zero_(list(result))
        return found

    return Contestant(timed(call), agrees)


# --- torchkv ------------------------------------------------------------------


def store_for(
    arrays: Arrays, store_type: str = "local"
) -> tuple[torchkv.KVStore, list[int]]:
    """A store with the keys initialized."""
    store = torchkv.create(store_type)
    keys = list(range(len(arrays.values)))
    store.init(keys, arrays.stored)
    return store, keys


def torchkv_push(arrays: Arrays, sums: Sequence[Tensor]) -> Contestant:
    """One push of all keys; the result is checked outside the timing."""
    store, keys = store_for(arrays)
    key, values = unwrapped(keys, arrays.values)

    def agrees() -> bool:
        return all(map(torch.equal, store.pull(keys), sums))

    return Contestant(timed(lambda: store.push(key, values)), agrees)


def torchkv_push_pull(arrays: Arrays) -> Call:
    """A push of all keys and a pull of all keys."""
    store, keys = store_for(arrays)
    key, values, outs = unwrapped(keys, arrays.values, arrays.outs)

    def call() -> None:
        store.push(key, values)
        store.pull(key, out=outs)

    return call


def torchkv_pushpull(arrays: Arrays) -> Call:
    """The same in one call."""
    store, keys = store_for(arrays)
    key, values, outs = unwrapped(keys, arrays.values, arrays.outs)
    return lambda: store.pushpull(key, values, out=outs)


def unwrapped(*lists: list[Any]) -> Sequence[Any]:
    """A single key and its values, not in a list."""
    return [each[0] for each in lists] if len(lists[0]) == 1 else lists


# --- torch --------------------------------------------------------------------


def torch_add(arrays: Arrays) -> Call:
    """Key by key: ``torch.add`` into the stored tensor, then ``copy_`` to the outs."""
    keys = list(zip(arrays.values, arrays.stored, arrays.outs, strict=True))

    def call() -> None:
        for (first, *others), stored, outs in keys:
            if not others:
                stored.copy_(first)
            for value in others:
                first = torch.add(first, value, out=stored)
            for out in outs:
                out.copy_(stored)

    return call


def torch_stack(arrays: Arrays) -> Call:
    """Key by key: ``torch.stack(values).sum(0)``, without its allocations."""
    stacks = [torch.stack(values) for values in arrays.values]
    keys = list(zip(arrays.values, stacks, arrays.stored, arrays.outs, strict=True))

    def call() -> None:
        for values, stacked, stored, outs in keys:
            torch.stack(values, out=stacked)
            torch.sum(stacked, 0, out=stored)
            for out in outs:
                out.copy_(stored)

    return call


def torch_foreach(arrays: Arrays, group_elements: float = math.inf) -> Call:
    """``_foreach_add_`` into the stored list, then ``_foreach_copy_`` to the outs.

    Of all keys at once or, so that sums are still in the cache when they are copied,
    of groups with at least so many elements.
    """
    groups = []
    first = elements = 0
    for key, stored in enumerate(arrays.stored):
        elements += stored.numel()
        if elements >= group_elements or key + 1 == len(arrays.stored):
            part = slice(first, key + 1)
            groups.append(
                (
                    arrays.stored[part],
                    [list(column) for column in zip(*arrays.values[part], strict=True)],
                    [list(column) for column in zip(*arrays.outs[part], strict=True)],
                )
            )
            first, elements = key + 1, 0

    def call() -> None:
        for stored, (first_values, *others), outs in groups:
            torch._foreach_copy_(stored, first_values)
            for values in others:
                torch._foreach_add_(stored, values)
            for out in outs:
                torch._foreach_copy_(out, stored)

    return call


def torch_foreach_grouped(arrays: Arrays) -> Call:
    """The same, group by group."""
    return torch_foreach(arrays, GROUP_ELEMENTS)


def torch_add_foreach(arrays: Arrays) -> Call:
    """``torch.add(out=)`` of the first two, which saves a pass, then ``_foreach_``.

    One replica is copied.
    """
    first, *others = (
        [v[r] for v in arrays.values] for r in range(len(arrays.values[0]))
    )
    second = others.pop(0) if others else None
    outs = [list(column) for column in zip(*arrays.outs, strict=True)]

    def call() -> None:
        if second is None:
            torch._foreach_copy_(arrays.stored, first)
        else:
            for a, b, stored in zip(first, second, arrays.stored, strict=True):
                torch.add(a, b, out=stored)
        for values in others:
            torch._foreach_add_(arrays.stored, values)
        for out in outs:
            torch._foreach_copy_(out, arrays.stored)

    return call


# --- the machine --------------------------------------------------------------


def bound(elements: int) -> Contestant:
    """The machine's memory bandwidth, by ``torch.add(a, b, out=c)`` in fp32."""
    a, b = (filled((elements,), torch.float32, replica_pattern(0, r)) for r in (0, 1))
    c = torch.zeros_like(a)
    return Contestant(
        timed(lambda: torch.add(a, b, out=c)), lambda: torch.equal(c, a + b)
    )


def available_bytes() -> int:
    """The available memory."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
