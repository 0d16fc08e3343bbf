"""Optimizers fused with the sum, on a GPU, compared with ``copy_`` and torch.optim.

A push reads the replicas, and reads and writes weight and state; values of bf16 have an
fp32 master. The bound is ``copy_`` of as many bytes. torch sums into ``.grad`` and
makes a step of ``torch.optim`` with ``fused=True``, without a master.

    python benchmarks/cuda_optimizers.py [--json PATH] [--plot PATH] [--smoke]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import contestants as ways
import gpu
import gpu_grid
import torchkv
from contestants import Arrays, Call
from gpu_grid import Case
from harness import Contestant
from optimizers import Kind, all_close, stepped
from report import collect, finish

OURS = "torchkv push"
TORCH = "torch.add(out=), _foreach_add_, fused step"

MOMENTUM = Kind(
    "SGD with momentum",
    lambda: torchkv.optim.SGD(lr=1e-3, momentum=0.9),
    lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, fused=True),
    {},
)
ADAMW = Kind(
    "AdamW",
    lambda: torchkv.optim.AdamW(lr=1e-3),
    lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    {},
)
KINDS = [(ADAMW, 2), (MOMENTUM, 1)]  # with the number of states

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COPY_PERCENT = 92
TORCH_TARGET = 1.2


def moved_per_byte(replicas: int, num_states: int, dtype: torch.dtype) -> float:
    """Replicas are read; states and the weight are read and written.

    With a master, the stored weight is only written.
    """
    in_fp32 = num_states if dtype is torch.float32 else num_states + 1
    own = 2 if dtype is torch.float32 else 1
    return replicas + own + 2 * in_fp32 * 4 / dtype.itemsize


def held_per_byte(replicas: int, num_states: int, dtype: torch.dtype) -> float:
    """Replicas; weight, master and states of both sides; gradient, expected, pulled."""
    return replicas + 2 * (1 + (num_states + 1) * 4 / dtype.itemsize) + 4


def torch_push(kind: Kind, arrays: Arrays) -> tuple[Call, Tensor]:
    """A call that sums and steps, and its weight, which is zero at first.

    One replica is the gradient as it is.
    """
    weight = torch.nn.Parameter(torch.zeros_like(arrays.stored[0]))
    optimizer = kind.torchs([weight])
    if len(arrays.values[0]) == 1:
        weight.grad = arrays.values[0][0]
        return optimizer.step, weight.detach()
    weight.grad = arrays.stored[0]
    add = ways.torch_add_foreach(arrays)

    def call() -> None:
        add()
        optimizer.step()

    return call, weight.detach()


def contestants_of(
    kind: Kind, case: Case, dtype: torch.dtype, device: str
) -> dict[str, Contestant]:
    """All of them on the same replicas."""
    shapes = [(case.replica_bytes // dtype.itemsize,)] * case.turns
    expected = stepped(kind, shapes, dtype, case.replicas, device)
    arrays = Arrays(shapes, dtype, case.replicas, 0, device)
    store, keys = ways.store_for(arrays, "device")
    store.set_optimizer(kind.ours())

    def contestant(
        calls: list[Call], weights: Callable[[], Sequence[Tensor]]
    ) -> Contestant:
        return Contestant(
            gpu.timed(calls, device), lambda: all_close(weights(), expected)
        )

    def push(key: int) -> Call:
        values = arrays.values[key]
        return lambda: store.push(key, values)

    contestants = {
        OURS: contestant([push(key) for key in keys], lambda: store.pull(keys))
    }
    if dtype is torch.float32:
        pairs = [torch_push(kind, arrays.only(key)) for key in keys]
        contestants[TORCH] = contestant(
            [call for call, _ in pairs], lambda: [weight for _, weight in pairs]
        )
    return contestants


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints tables, and writes JSON and a plot if requested."""
    options = gpu.parse(__doc__ or "", 11, arguments)
    sizes = gpu_grid.sizes_for(options)
    facts = gpu.facts(options.device)
    measured = (
        gpu_grid.measure_cases(
            f"{kind.title}, {name}",
            sizes,
            options.device,
            lambda n, d=dtype, s=num_states: moved_per_byte(n, s, d),
            lambda n, d=dtype, s=num_states: held_per_byte(n, s, d),
            lambda case, d=dtype, k=kind: contestants_of(k, case, d, options.device),
        )
        for kind, num_states in KINDS
        for name, dtype in DTYPES.items()
    )
    cases = collect(options, facts, "cases", itertools.chain.from_iterable(measured))
    adamw = [case for case in cases if case["name"].startswith(ADAMW.title)]
    title = "Optimizers on a GPU: torchkv, and torch's time against it"
    finish(
        options,
        {**facts, "cases": cases},
        [gpu_grid.table(title, cases, OURS, [TORCH])],
        [
            *gpu_grid.copy_targets(adamw, sizes, OURS, COPY_PERCENT),
            *gpu_grid.peer_targets(adamw, sizes, OURS, {TORCH: TORCH_TARGET}),
        ],
        lambda figure: gpu_grid.draw(figure, cases, OURS),
    )


if __name__ == "__main__":
    main()
