"""Throughput of a push on a GPU, compared with ``copy_`` and torch's ways to add.

A push of n replicas moves n + 1 times their bytes: n are read, the sum is written. The
bound is ``copy_`` of as many bytes. Time is the GPU's, by events. Memory is rotated so
that no cache holds it.

    python benchmarks/cuda_reduce.py [--json PATH] [--plot PATH] [--rounds N] [--smoke]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

import contestants as ways
import gpu
import gpu_grid
from contestants import Arrays, Call
from gpu_grid import Case
from harness import Contestant
from report import collect, finish

OURS = "torchkv push"
STACK = "torch.stack().sum(0)"
FOREACH = "torch.add(out=), _foreach_add_"
PEERS: dict[str, Callable[[Arrays], Call]] = {
    STACK: ways.torch_stack,
    FOREACH: ways.torch_add_foreach,
}

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COPY_PERCENT = 95
PEER_TARGETS = {STACK: 2.3, FOREACH: 1.5}


def held_per_byte(replicas: int) -> float:
    """Replicas, torch.stack's copy of them, stored tensors, sums and pulled tensors."""
    return 2 * replicas + len(PEERS) + 4


def contestants_of(
    case: Case, dtype: torch.dtype, device: str
) -> dict[str, Contestant]:
    """All contestants on the same replicas, each with its own stored tensors."""
    shapes = [(case.replica_bytes // dtype.itemsize,)] * case.turns
    sums = ways.sums_of(shapes, dtype, case.replicas, device)
    arrays = Arrays(shapes, dtype, case.replicas, 0, device)
    store, keys = ways.store_for(arrays, "device")

    def contestant(calls: list[Call], stored: Callable[[], list[Tensor]]) -> Contestant:
        return Contestant(
            gpu.timed(calls, device), lambda: all(map(torch.equal, stored(), sums))
        )

    def push(key: int) -> Call:
        values = arrays.values[key]
        return lambda: store.push(key, values)

    contestants = {
        OURS: contestant([push(key) for key in keys], lambda: store.pull(keys))
    }
    for name, way in PEERS.items():
        own = arrays.with_own_results()
        contestants[name] = contestant(
            [way(own.only(key)) for key in keys], lambda own=own: own.stored
        )
    return contestants


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints tables, and writes JSON and a plot if requested."""
    options = gpu.parse(__doc__ or "", 11, arguments)
    sizes = gpu_grid.sizes_for(options)
    facts = gpu.facts(options.device)
    measured = (
        gpu_grid.measure_cases(
            name,
            sizes,
            options.device,
            lambda replicas: replicas + 1,
            held_per_byte,
            lambda case, dtype=dtype: contestants_of(case, dtype, options.device),
        )
        for name, dtype in DTYPES.items()
    )
    cases = collect(options, facts, "cases", itertools.chain.from_iterable(measured))
    # With one replica, every contestant copies.
    sums = [case for case in cases if case["replicas"] > 1]
    title = "Sums on a GPU: torchkv, and the others' time against it"
    finish(
        options,
        {**facts, "cases": cases},
        [gpu_grid.table(title, cases, OURS, list(PEERS))],
        [
            *gpu_grid.copy_targets(cases, sizes, OURS, COPY_PERCENT),
            *gpu_grid.peer_targets(sums, sizes, OURS, PEER_TARGETS),
        ],
        lambda figure: gpu_grid.draw(figure, cases, OURS),
    )


if __name__ == "__main__":
    main()
