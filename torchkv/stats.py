"""What a store shows of itself: statistics of its keys, and a table of the largest."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypedDict, cast

if TYPE_CHECKING:
    from torchkv.kvstore import KVStore

_SHOWN = 10
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class KeyStats(TypedDict):
    """What the calls of this process have done with a key since its ``init``.

    Seconds are those of the host: on accelerators, the time to enqueue work. A call of
    several keys divides its time among them by their bytes.
    """

    pushes: int
    """How many pushes, ``pushpull`` included; a repeated key of a call counts once on
    one machine."""
    pulls: int
    """How many pulls, those of ``pushpull`` and ``broadcast`` included."""
    bytes_pushed: int
    """Bytes of the pushed tensors of all replicas."""
    bytes_pulled: int
    """Bytes of the outs, except those that are the shared value itself."""
    sum_seconds: float
    """Adding up the values. 0 in a ``dist`` store, whose servers do that."""
    update_seconds: float
    """In the updater. Built-in optimizers add up the values in the same pass, and this
    is the time of both. 0 in a ``dist`` store."""
    copy_seconds: float
    """Copying values to outs. 0 in a ``dist`` store."""


def stats_of(store: KVStore) -> dict[int | str, KeyStats]:
    """The statistics of all keys, in order of ``init``."""
    keys: list[int | str] = [*store.keys()]
    names = KeyStats.__annotations__
    rows = store._impl.stats(keys) if keys else []
    return {
        key: cast("KeyStats", dict(zip(names, row, strict=True)))
        for key, row in zip(keys, rows, strict=True)
    }


def table_of(store: KVStore) -> str:
    """The largest keys, one to a line, below the store's ``repr``."""
    lines = [repr(store)]
    try:
        keys: list[int | str] = [*store.keys()]
    except RuntimeError:  # closed
        return lines[0]
    shapes = {key: [*store.shape(key)] for key in keys}
    row_sparse = {key for key in keys if store._impl.is_row_sparse(key)}
    # The rows of several machines are on servers, which are not asked.
    elsewhere = row_sparse if store.type.startswith("dist") else set()
    for key in row_sparse:
        shapes[key][0] = 0 if key in elsewhere else store.num_rows(key)
    sizes = {key: math.prod(shapes[key]) * store.dtype(key).itemsize for key in keys}
    largest = sorted(keys, key=lambda key: -sizes[key])[:_SHOWN]
    if not largest:
        return lines[0]
    rows = [("key", "shape", "dtype", "size", "updates")]
    rows += [
        (
            repr(key),
            " x ".join(
                "?" if key in elsewhere and i == 0 else str(size)
                for i, size in enumerate(shapes[key])
            )
            or "scalar",
            str(store.dtype(key)).removeprefix("torch."),
            "?" if key in elsewhere else readable(sizes[key]),
            str(store.version(key)),
        )
        for key in largest
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for key, shape, dtype, size, updates in rows:
        line = f"{key:{widths[0]}}  {shape:{widths[1]}}  {dtype:{widths[2]}}"
        lines.append(f"  {line}  {size:>{widths[3]}}  {updates:>{widths[4]}}")
    if len(keys) > _SHOWN:
        lines.append(f"  and {len(keys) - _SHOWN} smaller ones")
    return "\n".join(lines)


def readable(num_bytes: float) -> str:
    """``"12.5 MiB"``."""
    for unit in _UNITS:
        if num_bytes < 1024 or unit == _UNITS[-1]:
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
