"""Rows of tables on a GPU: pushes of sparse gradients, and lookups.

Pushes of four replicas of a table, and of 26 tables, are compared with PyTorch's sum of
sparse tensors and its SGD; lookups of random rows, into new tensors, with
``torch.embedding``. Times are the host's, until the GPU is done: torchkv waits for it
in pushes, for the number of rows, and in lookups, to see whether all ids are rows; with
``torch.embedding``, its kernel does.

    python benchmarks/cuda_rows.py [--json PATH] [--plot PATH] [--rounds N] [--smoke]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import gpu
import torchkv
from contestants import Call
from harness import Contestant, Plan, Run, measure, median_ratio, timed
from report import Target

OURS, TORCH = "torchkv push", "torch's sum and SGD"
LOOKUP, EMBEDDING = "torchkv row_sparse_pull", "torch.embedding"
LOOKUPS = "lookup of 50,000 rows of a million"
ROW_ELEMENTS = 64


@dataclass
class Tables:
    """Of embeddings."""

    case: str
    number: int
    replicas: int
    rows: int
    ids: int  # of each gradient


SPARSE = [
    Tables("sparse SGD, one table", 1, 4, 1_000_000, 50_000),
    Tables("sparse SGD, 26 tables", 26, 1, 100_000, 2_048),
]
# PyTorch warns of the first sparse tensor in a process that has not chosen.
torch.sparse.check_sparse_tensor_invariants.disable()


def whole(call: Call, device: str) -> Run:
    """By the host's clock, until the GPU is done."""

    def run() -> None:
        call()
        if device == "cuda":
            torch.cuda.synchronize()

    return timed(run)


def row_sparse(tables: Tables, plan: Plan, smoke: bool, device: str) -> dict[str, Any]:
    """Steps of SGD with sums of sparse gradients: of whole numbers, so exact."""
    num_rows, count = (1 << 10, 64) if smoke else (tables.rows, tables.ids)
    shape = (num_rows, ROW_ELEMENTS)

    def gradient() -> Tensor:
        ids = torch.randint(num_rows, (1, count), device=device)
        rows = torch.randint(-9, 10, (count, ROW_ELEMENTS), device=device).float()
        return torch.sparse_coo_tensor(ids, rows, shape, check_invariants=False)

    keys = [*range(tables.number)]
    gradients = [[gradient() for _ in range(tables.replicas)] for _ in keys]
    store = torchkv.create("device")
    store.init(keys, [torch.zeros(shape, device=device) for _ in keys])
    store.set_optimizer(torchkv.optim.SGD(lr=1))
    weights = [torch.nn.Parameter(torch.zeros(shape, device=device)) for _ in keys]
    optimizer = torch.optim.SGD(weights, lr=1)

    def sums() -> list[Tensor]:
        return [sum(of_table[1:], of_table[0]) for of_table in gradients]

    def step() -> None:
        for weight, grad in zip(weights, sums(), strict=True):
            weight.grad = grad
        optimizer.step()

    expected = [-grad.to_dense() for grad in sums()]

    contestants = {
        OURS: Contestant(
            whole(lambda: store.push(keys, gradients), device),
            lambda: all(map(torch.equal, store.pull(keys), expected)),
        ),
        TORCH: Contestant(
            whole(step, device), lambda: all(map(torch.equal, weights, expected))
        ),
    }
    return {"case": tables.case, "seconds": measure(contestants, plan)}


def lookup(plan: Plan, smoke: bool, device: str) -> dict[str, Any]:
    """Of a dense key, with ids and rows on the device of its value."""
    num_rows, count = (1 << 10, 64) if smoke else (1_000_000, 50_000)
    table = torch.randn(num_rows, ROW_ELEMENTS, device=device)
    ids = torch.randint(num_rows, (count,), device=device)
    store = torchkv.create("device")
    store.init(0, table)
    calls: dict[str, Call] = {
        LOOKUP: lambda: store.row_sparse_pull(0, row_ids=ids),
        EMBEDDING: lambda: torch.embedding(table, ids),
    }
    contestants = {
        name: Contestant(
            whole(call, device), lambda call=call: torch.equal(call(), table[ids])
        )
        for name, call in calls.items()
    }
    return {"case": LOOKUPS, "seconds": measure(contestants, plan)}


def cases(plan: Plan, smoke: bool, device: str) -> Iterator[dict[str, Any]]:
    """All cases, one after the other."""
    for tables in SPARSE:
        yield row_sparse(tables, plan, smoke, device)
    yield lookup(plan, smoke, device)


def targets_of(figures: list[dict[str, Any]]) -> list[Target]:
    """Pushes as fast as PyTorch's."""
    targets = []
    for figure in figures:
        (ours, times), (other, others) = figure["seconds"].items()
        if ours != OURS:
            continue
        what = f"{figure['case']}: {ours}, faster than {other}"
        targets.append(Target(what, median_ratio(others, times), 1.0))
    return targets


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints a table, and writes JSON and a plot if requested."""
    gpu.measure_cases(__doc__ or "", "Rows of tables", cases, targets_of, arguments)


if __name__ == "__main__":
    main()
