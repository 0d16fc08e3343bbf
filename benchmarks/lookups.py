"""Lookups of rows, in dense and in row-sparse keys, and pushes of rows to both.

A dense key is compared with ``torch.embedding`` of a table outside of a store; a
row-sparse key, whose rows come in random order, with it and with a dense key.

    python benchmarks/lookups.py [--json PATH] [--plot PATH] [--rounds N] [--smoke]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import torchkv
from harness import Contestant, Plan, Times, measure, median_ratio, timed
from report import (
    Target,
    contestants_table,
    draw_times,
    environment,
    finish,
    parser,
    plan_for,
)

REPLICAS = 4
TORCH = "torch.embedding"
DENSE = "torchkv, dense key"
ROW_SPARSE = "torchkv, row-sparse key"

LOOKUP = "lookup"
PUSH = f"push of {REPLICAS} replicas, SGD"

DENSE_TARGET = 1.0
ROW_SPARSE_TARGET = 2.0


class Sizes(NamedTuple):
    """Of the table, and how many of its rows a call reads or steps."""

    rows: int
    used: int
    dim: int


FULL = Sizes(rows=10_000_000, used=50_000, dim=64)
SMOKE = Sizes(rows=500, used=40, dim=8)


def stores_with(table: Tensor) -> dict[str, torchkv.KVStore]:
    """The table as a dense key, and as a row-sparse one that has all its rows."""
    stores = {DENSE: torchkv.create("local"), ROW_SPARSE: torchkv.create("local")}
    stores[DENSE].init("table", table)
    sparse = stores[ROW_SPARSE]
    sparse.init_rows("table", table.shape[1:], num_rows=len(table))
    for store in stores.values():
        store.set_optimizer(torchkv.optim.SGD(lr=1.0))
    # From zero, a step with the learning rate 1 gives a row the negative gradient.
    for ids in torch.randperm(len(table)).split(1_000_000):
        sparse.push("table", rows_of(ids, -table[ids], table.shape))
    return stores


def rows_of(ids: Tensor, rows: Tensor, shape: torch.Size) -> Tensor:
    """A sparse tensor."""
    return torch.sparse_coo_tensor(ids[None], rows, shape, check_invariants=False)


def measure_lookups(
    stores: dict[str, torchkv.KVStore], table: Tensor, ids: Tensor, plan: Plan
) -> Times:
    """Of the same random rows, into new tensors."""
    expected = table[ids]
    calls = {TORCH: lambda: torch.embedding(table, ids)}
    for name, store in stores.items():
        calls[name] = lambda store=store: store.row_sparse_pull("table", row_ids=ids)
    contestants = {
        name: Contestant(timed(call), lambda call=call: torch.equal(call(), expected))
        for name, call in calls.items()
    }
    return measure(contestants, plan)


def measure_pushes(
    stores: dict[str, torchkv.KVStore], table: Tensor, used: int, plan: Plan
) -> Times:
    """Of random rows; the first push must step them as torch does."""
    values = []
    expected = table.clone()
    for _ in range(REPLICAS):
        ids = torch.randint(len(table), (used,))
        rows = torch.randn(used, table.shape[1])
        values.append(rows_of(ids, rows, table.shape))
        expected.index_add_(0, ids, -rows)
    some = torch.cat([value._indices()[0] for value in values])
    wanted = expected[some]
    del expected

    def contestant(store: torchkv.KVStore) -> Contestant:
        def agrees() -> bool:
            found = store.row_sparse_pull("table", row_ids=some)
            # Not bitwise: torch adds to the table one row after another.
            return torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)

        return Contestant(timed(lambda: store.push("table", values)), agrees)

    return measure({name: contestant(store) for name, store in stores.items()}, plan)


def targets_of(seconds: dict[str, Times]) -> list[Target]:
    """Of lookups, against torch."""
    times = seconds[LOOKUP]
    return [
        Target(
            f"{name}: time of a lookup against {TORCH}",
            median_ratio(times[name], times[TORCH]),
            target,
            at_least=False,
        )
        for name, target in ((DENSE, DENSE_TARGET), (ROW_SPARSE, ROW_SPARSE_TARGET))
    ]


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints tables, and writes JSON and a plot if requested."""
    options = parser(__doc__ or "", rounds=25).parse_args(arguments)
    plan = plan_for(options, rounds=25, turn_s=0.1, budget_s=10)
    sizes = SMOKE if options.smoke else FULL
    facts = environment(None)
    torch.manual_seed(0)
    table = torch.randn(sizes.rows, sizes.dim)
    stores = stores_with(table)
    ids = torch.randint(sizes.rows, (sizes.used,))
    seconds = {
        LOOKUP: measure_lookups(stores, table, ids, plan),
        PUSH: measure_pushes(stores, table, sizes.used, plan),
    }
    finish(
        options,
        {**facts, **sizes._asdict(), "cases": seconds},
        [
            contestants_table(title, {"seconds": each}, ROW_SPARSE)
            for title, each in seconds.items()
        ],
        targets_of(seconds),
        lambda figure: draw_times(figure, seconds, ROW_SPARSE),
    )


if __name__ == "__main__":
    main()
