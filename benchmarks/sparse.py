"""Sparse gradients: pushes of four replicas' rows of an embedding table, with a step.

torch adds up the sparse tensors and steps by ``torch.optim``, MXNet pushes row-sparse
arrays. A push of all rows is compared with torchkv's own push of dense tensors.

    python benchmarks/sparse.py [--json PATH] [--plot PATH] [--rounds N] [--smoke]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torchkv
from contestants import filled
from harness import Contestant, Plan, Times, measure, median_ratio, timed
from mxnet_peer import NAME as MXNET
from mxnet_peer import Case, MXNet, measure_beside
from peers.pattern import replica_pattern, row_ids
from report import (
    Target,
    contestants_table,
    draw_times,
    environment,
    finish,
    parser,
    plan_for,
    start_mxnet,
)

REPLICAS = 4
OURS = "torchkv push"
TORCH = "torch sum, step"
DENSE = "torchkv push of dense tensors"
ROW_SPARSE = "torchkv push, row-sparse key"
BESIDE_MXNET = "SGD, some rows, beside MXNet"

ADAGRAD_TARGET = 3.0
DENSE_TARGET = 1.3
MXNET_TARGET = 5.0


class Sizes(NamedTuple):
    """Of the tables: one of which some rows are pushed, and one pushed whole."""

    rows: int
    pushed: int  # rows of each replica
    whole: int
    dim: int


FULL = Sizes(rows=10_000_000, pushed=50_000, whole=1_000_000, dim=64)
SMOKE = Sizes(rows=500, pushed=40, whole=200, dim=8)


class Kind(NamedTuple):
    """An optimizer by its names in both libraries."""

    title: str
    ours: Callable[[], Any]
    torchs: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
    target: float | None  # how many times as fast as torch


KINDS = [
    Kind(
        "SGD",
        lambda: torchkv.optim.SGD(lr=0.125),
        lambda p: torch.optim.SGD(p, lr=0.125),
        None,
    ),
    Kind(
        "Adagrad",
        lambda: torchkv.optim.Adagrad(lr=0.125),
        lambda p: torch.optim.Adagrad(p, lr=0.125),
        ADAGRAD_TARGET,
    ),
]


def rows_of(sizes: Sizes, pushed: int, of: int, coalesced: bool) -> list[Tensor]:
    """The replicas' sparse gradients; uncoalesced ones are in random order."""
    values = []
    for _ in range(REPLICAS):
        ids = torch.randint(of, (pushed,)) if not coalesced else torch.arange(of)
        if coalesced and pushed < of:
            ids = torch.randperm(of)[:pushed].sort().values
        rows = torch.randn(len(ids), sizes.dim)
        value = torch.sparse_coo_tensor(
            ids[None],
            rows,
            (of, sizes.dim),
            is_coalesced=coalesced,
            check_invariants=False,
        )
        values.append(value)
    return values


class Torch:
    """With torch: the sum of the sparse tensors in ``.grad``, and a step."""

    def __init__(self, kind: Kind, values: Sequence[Tensor]) -> None:
        """Makes the table, which is zero."""
        self.values = values
        self.table = torch.nn.Parameter(torch.zeros(values[0].shape))
        self.optimizer = kind.torchs([self.table])

    def push(self) -> None:
        """Sums and steps."""
        total, *others = self.values
        for value in others:
            total = total + value
        self.table.grad = total
        self.optimizer.step()


def store_with(kind: Kind | None, shape: Sequence[int]) -> torchkv.KVStore:
    """A store with a table of zeros, and the optimizer."""
    store = torchkv.create("local")
    store.init("table", torch.zeros(*shape))
    if kind is not None:
        store.set_optimizer(kind.ours())
    return store


def first_step(kind: Kind, values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The ids that are pushed, and their rows after a step of torch's, from zero."""
    ids, index = torch.cat([v._indices()[0] for v in values]).unique(
        return_inverse=True
    )
    rows = torch.cat([v._values() for v in values])
    table = torch.nn.Parameter(torch.zeros(len(ids), rows.shape[1]))
    table.grad = torch.zeros_like(table).index_add_(0, index, rows)
    kind.torchs([table]).step()
    return ids, table.detach()


def contestant(
    call: Callable[[], object],
    found: Callable[[], Tensor],
    expected: tuple[Tensor, Tensor],
) -> Contestant:
    """A contestant whose first call must step the expected rows, and no others."""

    def agrees() -> bool:
        ids, rows = expected
        table = found().detach()
        others = int(table.count_nonzero()) - int(table[ids].count_nonzero())
        # Not bitwise: torch adds up in another order.
        return others == 0 and torch.allclose(table[ids], rows, rtol=1e-3, atol=1e-5)

    return Contestant(timed(call), agrees)


def measure_some_rows(
    kind: Kind, sizes: Sizes, coalesced: bool, plan: Plan
) -> dict[str, Any]:
    """Some rows of each replica, against torch."""
    values = rows_of(sizes, sizes.pushed, sizes.rows, coalesced)
    expected = first_step(kind, values)
    store = store_with(kind, values[0].shape)
    torchs = Torch(kind, values)
    seconds = measure(
        {
            OURS: contestant(
                lambda: store.push("table", values),
                lambda: store.pull("table"),
                expected,
            ),
            TORCH: contestant(torchs.push, lambda: torchs.table, expected),
        },
        plan,
    )
    return {"optimizer": kind.title, "coalesced": coalesced, "seconds": seconds}


def measure_all_rows(kind: Kind, sizes: Sizes, plan: Plan) -> dict[str, Any]:
    """All rows of each replica, against a push of dense tensors."""
    values = rows_of(sizes, sizes.whole, sizes.whole, coalesced=True)
    expected = first_step(kind, values)
    dense = [value._values() for value in values]
    contestants = {}
    for name, pushed in ((OURS, values), (DENSE, dense)):
        store = store_with(kind, values[0].shape)
        contestants[name] = contestant(
            lambda store=store, pushed=pushed: store.push("table", pushed),
            lambda store=store: store.pull("table"),
            expected,
        )
    return {"optimizer": kind.title, "seconds": measure(contestants, plan)}


def measure_mxnet(sizes: Sizes, plan: Plan, mxnet: MXNet | None) -> dict[str, Any]:
    """Some rows of each replica with SGD, to a dense and a row-sparse key, and MXNet's.

    MXNet's stored value is dense, to which it pushes row-sparse arrays fastest.
    """
    shape = (sizes.rows, sizes.dim)
    values = [
        torch.sparse_coo_tensor(
            torch.tensor(row_ids(sizes.rows, sizes.pushed, replica))[None],
            filled(
                (sizes.pushed, sizes.dim), torch.float32, replica_pattern(0, replica)
            ),
            shape,
            is_coalesced=True,
            check_invariants=False,
        )
        for replica in range(REPLICAS)
    ]
    kind = KINDS[0]
    expected = first_step(kind, values)
    stores = {OURS: store_with(kind, shape), ROW_SPARSE: torchkv.create("local")}
    stores[ROW_SPARSE].init_rows("table", (sizes.dim,), num_rows=sizes.rows)
    stores[ROW_SPARSE].set_optimizer(kind.ours())
    contestants = {
        name: contestant(
            lambda store=store: store.push("table", values),
            lambda store=store: store.pull("table").to_dense(),
            expected,
        )
        for name, store in stores.items()
    }
    ids, rows = expected
    case = Case(
        [shape],
        "float32",
        REPLICAS,
        outs=0,
        optimizer={"name": "sgd", "learning_rate": 0.125},
        first_step=[rows[ids == 0][0][:8].tolist()],
        pushed=sizes.pushed,
    )
    return {"optimizer": kind.title, **measure_beside(mxnet, case, contestants, plan)}


def some_rows_title(kind: Kind, coalesced: bool) -> str:
    """The title of a table."""
    return f"{kind.title}, some rows, {'' if coalesced else 'un'}coalesced"


def targets_of(seconds: dict[str, Times]) -> list[Target]:
    """Of all tables."""
    targets = []
    for kind in KINDS:
        for coalesced in (True, False):
            title = some_rows_title(kind, coalesced)
            times = seconds[title]
            if kind.target is not None:
                ratio = median_ratio(times[TORCH], times[OURS])
                targets.append(
                    Target(f"{title}, faster than torch", ratio, kind.target)
                )
        times = seconds[f"{kind.title}, all rows"]
        targets.append(
            Target(
                f"{kind.title}, all rows, time against a dense push",
                median_ratio(times[OURS], times[DENSE]),
                DENSE_TARGET,
                at_least=False,
            )
        )
    times = seconds[BESIDE_MXNET]
    for name, what in ((OURS, "dense"), (ROW_SPARSE, "row-sparse")):
        ratio = median_ratio(times[MXNET], times[name]) if MXNET in times else None
        targets.append(
            Target(f"SGD, {what} key, faster than MXNet", ratio, MXNET_TARGET)
        )
    return targets


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints tables, and writes JSON and a plot if requested."""
    options = parser(__doc__ or "", rounds=25).parse_args(arguments)
    plan = plan_for(options, rounds=25, turn_s=0.1, budget_s=10)
    sizes = SMOKE if options.smoke else FULL
    torch.sparse.check_sparse_tensor_invariants.disable()  # or Adagrad warns
    torch.manual_seed(0)
    measured = {}
    with start_mxnet(options) as mxnet:
        facts = environment(mxnet)
        measured[BESIDE_MXNET] = measure_mxnet(sizes, plan, mxnet)
    for kind in KINDS:
        for coalesced in (True, False):
            title = some_rows_title(kind, coalesced)
            measured[title] = measure_some_rows(kind, sizes, coalesced, plan)
        measured[f"{kind.title}, all rows"] = measure_all_rows(kind, sizes, plan)

    seconds = {title: each["seconds"] for title, each in measured.items()}
    finish(
        options,
        {**facts, **sizes._asdict(), "cases": list(measured.values())},
        [contestants_table(title, each, OURS) for title, each in measured.items()],
        targets_of(seconds),
        lambda figure: draw_times(figure, seconds, OURS),
    )


if __name__ == "__main__":
    main()
