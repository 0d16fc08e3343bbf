"""Speed of ``save`` relative to ``safetensors.torch.save_file`` followed by fsync.

Both write the values and the optimizer's state of one store, or the rows of a large
row-sparse key and their ids, from memory to the disk. ``save`` takes a snapshot first,
computes checksums, and keeps the last save until the new one is complete. Also prints
the time of ``load``, and both for very many keys.

    python benchmarks/checkpoint.py [--json PATH] [--plot PATH] [--rounds N] [--smoke]
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import torchkv
from harness import Contestant, Plan, Times, interleave, measure, median_ratio, timed
from report import (
    Table,
    Target,
    environment,
    finish,
    min_and_median,
    parser,
)

SAVE, SAVE_FILE = "store.save", "save_file, fsync"
TARGET = 0.7
MANY_LIMIT_S = 10.0

TENSORS = 16
ROW_ELEMENTS = 16
KEY_ELEMENTS = 100


def trained_store(num_bytes: int) -> torchkv.KVStore:
    """A store whose values and Adam's state have this many bytes in total."""
    keys = list(range(TENSORS))
    elements = num_bytes // (4 * 3 * TENSORS)
    store = torchkv.create()
    store.init(keys, [torch.randn(elements) for _ in keys])
    store.set_optimizer("adam", lr=0.01)
    store.push(keys, [torch.randn(elements) for _ in keys])
    return store


def row_store(num_rows: int) -> torchkv.KVStore:
    """A store of one row-sparse key, with so many rows in no order."""
    store = torchkv.create()
    store.init_rows("table", (ROW_ELEMENTS,), torch.float32)
    ids = torch.randperm(num_rows)[None]
    rows = torch.randn(num_rows, ROW_ELEMENTS)
    store.push(
        "table", torch.sparse_coo_tensor(ids, rows, rows.shape, check_invariants=False)
    )
    return store


def tensors_of(store: torchkv.KVStore) -> dict[str, Tensor]:
    """All tensors, by their names in the store's files."""
    tensors = {}
    for key, item in store.state_dict()["keys"].items():
        tensors[f"value/{key}"] = item["value"]
        if rows := item.get("rows"):
            tensors[f"row_ids/{key}"] = rows["ids"]
        for name, tensor in item["state"].items():
            tensors[f"{name}/{key}"] = tensor
    return tensors


def contestants(
    store: torchkv.KVStore, tensors: dict[str, Tensor], folder: Path
) -> dict[str, Contestant]:
    """The two ways to write the same tensors."""
    checkpoint, file = folder / "store", folder / "file.safetensors"

    def save_and_sync() -> None:
        file.unlink(missing_ok=True)
        save_file(tensors, file)
        fd = os.open(file, os.O_RDWR)
        os.fsync(fd)
        os.close(fd)

    def equals(found: dict[str, Tensor]) -> bool:
        return found.keys() == tensors.keys() and all(
            torch.equal(found[name], tensor) for name, tensor in tensors.items()
        )

    return {
        SAVE: Contestant(
            timed(lambda: store.save(checkpoint)),
            lambda: equals(tensors_of(torchkv.load(checkpoint))),
        ),
        SAVE_FILE: Contestant(timed(save_and_sync), lambda: equals(load_file(file))),
    }


def measure_large(store: torchkv.KVStore, plan: Plan, folder: Path) -> dict[str, Any]:
    """Seconds to save, and to load, a few large tensors."""
    tensors = tensors_of(store)
    seconds = measure(contestants(store, tensors, folder), plan)
    runs = {"store.load": timed(lambda: store.load(folder / "store"))}
    return {
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "seconds": seconds | interleave(runs, dict.fromkeys(runs, 1), 3),
    }


def measure_many(count: int, folder: Path) -> Times:
    """Seconds to save, and to load, many small keys."""
    store = torchkv.create()
    store.init(list(range(count)), list(torch.randn(count, KEY_ELEMENTS)))
    runs = {
        SAVE: timed(lambda: store.save(folder / "many")),
        "store.load": timed(lambda: store.load(folder / "many")),
    }
    return interleave(runs, dict.fromkeys(runs, 1), 3)


def table(title: str, num_bytes: int, seconds: Times) -> Table:
    """Times and rates."""
    rows = [
        [name, *min_and_median(times), f"{num_bytes / min(times) / 1e9:.2f}"]
        for name, times in seconds.items()
    ]
    return Table(title, ["", "min", "median", "GB/s"], rows)


def draw(figure: Any, large: dict[str, dict[str, Any]]) -> None:
    """Plots all rounds of both, for each store."""
    plots = figure.subplots(len(large), sharex=True, squeeze=False)[:, 0]
    for axes, (title, of_store) in zip(plots, large.items(), strict=True):
        for name, times in of_store["seconds"].items():
            rates = [of_store["bytes"] / time / 1e9 for time in times]
            axes.plot(rates, "o-", label=name)
        axes.set_title(title)
        axes.set_ylabel("GB/s")
        axes.legend()
    plots[-1].set_xlabel("round")


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints tables, and writes JSON and a plot if requested."""
    options = parser(__doc__ or "", rounds=9).parse_args(arguments)
    rounds = options.rounds or (3 if options.smoke else 9)
    num_bytes, num_rows, count = (
        (1 << 20, 1000, 1000) if options.smoke else (10**9, 10_000_000, 1_000_000)
    )
    plan = Plan(rounds, turn_s=0, budget_s=120)
    large = {}
    # Next to the results: the temporary folder may be in memory.
    with tempfile.TemporaryDirectory(dir=options.json and options.json.parent) as name:
        folder = Path(name)
        for title, make, size in (
            ("values and Adam's state", trained_store, num_bytes),
            (f"{num_rows:,} rows of {ROW_ELEMENTS} floats", row_store, num_rows),
        ):
            large[title] = measure_large(make(size), plan, folder)
        many = measure_many(count, folder)

    targets = [
        *(
            Target(
                f"{SAVE} of {title}, of {SAVE_FILE}",
                median_ratio(of_store["seconds"][SAVE_FILE], of_store["seconds"][SAVE]),
                TARGET,
            )
            for title, of_store in large.items()
        ),
        *(
            Target(f"{name} of {count:,} keys", min(times), MANY_LIMIT_S, False, "s")
            for name, times in many.items()
        ),
    ]
    figures = {
        **environment(None),
        "large": large,
        "many": {"keys": count, "seconds": many},
    }
    many_bytes = count * KEY_ELEMENTS * 4
    tables = [
        *(
            table(
                f"{title}, {of_store['bytes'] / 1e9:.2f} GB",
                of_store["bytes"],
                of_store["seconds"],
            )
            for title, of_store in large.items()
        ),
        table(f"{count:,} keys of {KEY_ELEMENTS} floats", many_bytes, many),
    ]
    finish(options, figures, tables, targets, lambda figure: draw(figure, large))


if __name__ == "__main__":
    main()
