"""Optimizers on the store: ResNet-50's gradients in, its weights out, four of each.

Each push sums the replicas' gradients and makes a step. torch does the same by
``_foreach_`` sums and ``torch.optim`` with ``fused=True``, MXNet by its own optimizers.

    python benchmarks/optimizers.py [--json PATH] [--plot PATH] [--rounds N] [--smoke]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torchkv
from contestants import Arrays, Call, filled, store_for
from harness import Contestant, Plan, Times, median_ratio, timed
from mxnet_peer import NAME as MXNET
from mxnet_peer import Case, MXNet, measure_beside
from parameter_lists import Shape, resnet50, shrunk
from peers.pattern import sum_pattern
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
OURS = "torchkv push, pull"
OUR_PUSH = "torchkv push"
TORCH = "torch._foreach_add_, fused step, _foreach_copy_"
TORCH_PUSH = "torch._foreach_add_, fused step"

MXNET_TARGET = 4.0
PUSH_TARGET = 1.5
PUSH_PULL_TARGET = 1.3


class Kind(NamedTuple):
    """An optimizer by its names in all three libraries."""

    title: str
    ours: Callable[[], Any]
    torchs: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
    mxnets: dict[str, Any]


KINDS = [
    Kind(
        "SGD with momentum",
        lambda: torchkv.optim.SGD(lr=0.125, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.125, momentum=0.9, fused=True),
        {"name": "sgd", "learning_rate": 0.125, "momentum": 0.9},
    ),
    Kind(
        "Adam",
        lambda: torchkv.optim.Adam(lr=0.125),
        lambda p: torch.optim.Adam(p, lr=0.125, fused=True),
        {"name": "adam", "learning_rate": 0.125},
    ),
]


class Torch:
    """With torch: gradients summed into ``.grad``, a fused step, copies."""

    def __init__(self, kind: Kind, arrays: Arrays) -> None:
        """Makes the parameters, which are zero, and their gradients."""
        self.weights = [torch.nn.Parameter(stored) for stored in arrays.stored]
        for weight in self.weights:
            weight.grad = torch.zeros_like(weight)
        self.gradients = [weight.grad for weight in self.weights]
        self.optimizer = kind.torchs(self.weights)
        self.values = [list(column) for column in zip(*arrays.values, strict=True)]
        self.outs = [list(column) for column in zip(*arrays.outs, strict=True)]
        self.stored = arrays.stored

    def push(self) -> None:
        """Sums and steps."""
        first, *others = self.values
        torch._foreach_copy_(self.gradients, first)
        for values in others:
            torch._foreach_add_(self.gradients, values)
        self.optimizer.step()

    def push_pull(self) -> None:
        """Sums, steps and copies the weights to the replicas."""
        self.push()
        for out in self.outs:
            torch._foreach_copy_(out, self.stored)


def first_step(kind: Kind, sums: Sequence[Tensor]) -> list[Tensor]:
    """Weights that were zero, after one step by torch."""
    weights = [torch.nn.Parameter(torch.zeros_like(total)) for total in sums]
    for weight, total in zip(weights, sums, strict=True):
        weight.grad = total
    kind.torchs(weights).step()
    return [weight.detach() for weight in weights]


def stepped(
    kind: Kind,
    shapes: Sequence[Shape],
    dtype: torch.dtype,
    replicas: int,
    device: str = "cpu",
) -> list[Tensor]:
    """The expected weights of each key after a push, from zero."""
    sums = [
        torch.tensor(sum_pattern(key, replicas), dtype=torch.float32)
        for key in range(len(shapes))
    ]
    return [
        filled(shape, dtype, step.tolist(), device)
        for shape, step in zip(shapes, first_step(kind, sums), strict=True)
    ]


def all_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Not bitwise: MXNet adds eps at another point of the formula."""
    return all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-6)
        for a, b in zip(found, expected, strict=True)
    )


def contestant(call: Call, found: Call, expected: Sequence[Tensor]) -> Contestant:
    """A contestant whose first call must give the weights of a first step."""
    return Contestant(timed(call), lambda: all_close(found(), expected))


def measure_kind(
    kind: Kind, shapes: list[Shape], plan: Plan, mxnet: MXNet | None
) -> dict[str, Any]:
    """Push alone, and push and pull, of all keys."""
    expected = stepped(kind, shapes, torch.float32, REPLICAS)
    contestants = {}
    for ours, theirs, pulls in ((OUR_PUSH, TORCH_PUSH, False), (OURS, TORCH, True)):
        arrays = Arrays(shapes, torch.float32, REPLICAS, REPLICAS)
        store, keys = store_for(arrays)
        store.set_optimizer(kind.ours())

        def push_pull(
            store: torchkv.KVStore = store,
            keys: list[int] = keys,
            arrays: Arrays = arrays,
            pulls: bool = pulls,
        ) -> None:
            store.push(keys, arrays.values)
            if pulls:
                store.pull(keys, out=arrays.outs)

        contestants[ours] = contestant(
            push_pull, lambda store=store, keys=keys: store.pull(keys), expected
        )
        torchs_arrays = Arrays(shapes, torch.float32, REPLICAS, REPLICAS)
        torchs = Torch(kind, torchs_arrays)
        contestants[theirs] = contestant(
            torchs.push_pull if pulls else torchs.push,
            lambda torchs=torchs: torchs.stored,
            expected,
        )
    case = Case(
        shapes,
        "float32",
        REPLICAS,
        REPLICAS,
        kind.mxnets,
        [total.view(-1)[:8].tolist() for total in expected],
    )
    return {"optimizer": kind.title, **measure_beside(mxnet, case, contestants, plan)}


def targets_of(kind: Kind, times: Times) -> list[Target]:
    """The targets for an optimizer."""
    what = f"{kind.title} of ResNet-50"
    mxnet = median_ratio(times[MXNET], times[OURS]) if MXNET in times else None
    return [
        Target(f"{what}, push, pull, faster than MXNet", mxnet, MXNET_TARGET),
        Target(
            f"{what}, push, faster than torch",
            median_ratio(times[TORCH_PUSH], times[OUR_PUSH]),
            PUSH_TARGET,
        ),
        Target(
            f"{what}, push, pull, faster than torch",
            median_ratio(times[TORCH], times[OURS]),
            PUSH_PULL_TARGET,
        ),
    ]


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints tables, and writes JSON and a plot if requested."""
    options = parser(__doc__ or "", rounds=25).parse_args(arguments)
    plan = plan_for(options, rounds=25, turn_s=0.1, budget_s=20)
    shapes = shrunk(resnet50()) if options.smoke else resnet50()
    with start_mxnet(options) as mxnet:
        facts = environment(mxnet)
        measured = {
            f"{kind.title}, ResNet-50": measure_kind(kind, shapes, plan, mxnet)
            for kind in KINDS
        }

    seconds = {title: each["seconds"] for title, each in measured.items()}
    finish(
        options,
        {**facts, "optimizers": list(measured.values())},
        [contestants_table(title, each, OURS) for title, each in measured.items()],
        [
            target
            for kind, times in zip(KINDS, seconds.values(), strict=True)
            for target in targets_of(kind, times)
        ],
        lambda figure: draw_times(figure, seconds, OURS),
    )


if __name__ == "__main__":
    main()
