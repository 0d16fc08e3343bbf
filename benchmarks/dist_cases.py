"""What a rank of torchkv's or Gloo's job measures: its tensors, and a step of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import torchkv
from contestants import filled
from parameter_lists import Shape
from peers.pattern import (
    ROWS_PUSHED,
    replica_pattern,
    row_ids,
    sign_pattern,
    sum_pattern,
)

# Of DistributedDataParallel, by default; its first bucket is smaller.
BUCKET_BYTES = 25 << 20


class Task(NamedTuple):
    """What all contestants of a row do."""

    rank: int
    num_ranks: int
    shapes: Sequence[Shape]
    optimizer: str | None  # of OPTIMIZERS; None for plain sums
    lr: float


# torchkv's, and torch's for these parameters.
OPTIMIZERS: dict[
    str,
    tuple[
        Callable[[float], torchkv.optim.Optimizer],
        Callable[[Sequence[torch.Tensor], float, bool], torch.optim.Optimizer],
    ],
] = {
    "sgd": (
        lambda lr: torchkv.optim.SGD(lr=lr),
        lambda params, lr, fused: torch.optim.SGD(params, lr=lr, fused=fused),
    ),
    "momentum": (
        lambda lr: torchkv.optim.SGD(lr=lr, momentum=0.9),
        lambda params, lr, fused: torch.optim.SGD(
            params, lr=lr, momentum=0.9, fused=fused
        ),
    ),
    "adamw": (
        lambda lr: torchkv.optim.AdamW(lr=lr, weight_decay=0.01),
        lambda params, lr, fused: torch.optim.AdamW(
            params, lr=lr, weight_decay=0.01, fused=fused
        ),
    ),
}


class Case:
    """One value per shape and rank, and what every step makes of them."""

    mean = False  # of the ranks' values; else their sum

    def __init__(self, task: Task) -> None:
        """Makes the tensors."""
        self.task, self.steps = task, 0
        self.keys = list(range(len(task.shapes)))
        self.values = [
            filled(shape, torch.float32, replica_pattern(key, task.rank))
            for key, shape in enumerate(task.shapes)
        ]
        self.outs = [torch.zeros(shape) for shape in task.shapes]

    def barrier(self) -> None:
        """Waits for the other ranks."""
        dist.barrier()

    def step(self) -> None:
        """Values in, results of all ranks out."""
        raise NotImplementedError

    def fetch(self) -> None:
        """Brings outs up to date, if a step has not."""

    def close(self) -> None:
        """Ends what the case has opened."""

    def begin(self) -> None:
        """What a step finds done, and is not measured."""

    def run(self, steps: int) -> dict[str, Any]:
        """Makes so many steps and one before; the seconds of each."""
        self.barrier()
        self.begin()
        self.step()
        seconds = []
        for _ in range(steps):
            self.begin()
            start = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - start)
        self.steps += 1 + steps
        return {"seconds": seconds}

    def total(self, key: int) -> list[float]:
        """What the sum of a step's values repeats."""
        return list(sum_pattern(key, self.task.num_ranks))

    def expected(self, key: int) -> list[float]:
        """What an out repeats after all steps of all ranks."""
        total = self.total(key)
        if self.task.optimizer is None:
            return total
        weight = torch.zeros(len(total))
        make = OPTIMIZERS[self.task.optimizer][1]
        optimizer = make([weight], self.task.lr, False)
        weight.grad = torch.tensor(total, dtype=torch.float32)
        if self.mean:
            weight.grad /= self.task.num_ranks
        for _ in range(self.steps):
            optimizer.step()
        return weight.tolist()  # type: ignore[no-any-return]

    def check(self) -> dict[str, Any]:
        """Whether the outs are those after all steps: exactly, but for roots."""
        self.barrier()
        self.fetch()
        exact = self.task.optimizer in (None, "sgd")
        agrees = True
        for key, out in enumerate(self.outs):
            expected = filled(out.shape, out.dtype, self.expected(key))
            agrees &= (
                torch.equal(out, expected)
                if exact
                else torch.allclose(out, expected, rtol=1e-5, atol=1e-6)
            )
        self.barrier()
        return {"agrees": agrees}


class Torchkv(Case):
    """`pushpull`, of a list or of one key, with an optimizer on the servers or not."""

    def __init__(self, task: Task, kv: torchkv.KVStore) -> None:
        """Initializes the keys."""
        super().__init__(task)
        self.kv = kv
        if task.optimizer is not None:
            kv.set_optimizer(OPTIMIZERS[task.optimizer][0](task.lr))
        self.init_keys()
        self.barrier = kv.barrier  # type: ignore[method-assign]
        # Of one key, without lists.
        self.call: tuple[Any, Any, Any] = (self.keys, self.values, self.outs)
        if len(self.keys) == 1:
            self.call = (self.keys[0], self.values[0], self.outs[0])

    def init_keys(self) -> None:
        """With zeros."""
        self.kv.init(self.keys, self.outs)

    def step(self) -> None:
        """One call."""
        keys, values, outs = self.call
        self.kv.pushpull(keys, values, out=outs)

    def fetch(self) -> None:
        """Of dist_async, a step's result may lack steps of other ranks."""
        self.kv.pull(self.keys, out=self.outs)

    def close(self) -> None:
        """Closes the store."""
        self.kv.close()


class TwoBit(Torchkv):
    """`pushpull` with gradient compression: 2 bits for each number."""

    def __init__(self, task: Task, kv: torchkv.KVStore) -> None:
        """With a threshold of 1."""
        super().__init__(task, kv)
        kv.set_gradient_compression({"type": "2bit", "threshold": 1.0})

    def total(self, key: int) -> list[float]:
        """That of the signs."""
        return list(sign_pattern(key, self.task.num_ranks))


class TwoCalls(Torchkv):
    """`push`, then `pull`."""

    def step(self) -> None:
        """Both."""
        keys, values, outs = self.call
        self.kv.push(keys, values)
        self.kv.pull(keys, out=outs)


class Rows(Torchkv):
    """`push` of some rows of a table, then `row_sparse_pull` of the same."""

    def __init__(self, task: Task, kv: torchkv.KVStore) -> None:
        """Each rank has its own rows."""
        super().__init__(task, kv)
        (self.table,) = self.values
        rows = len(self.table)
        self.ids = [
            torch.tensor(row_ids(rows, rows // ROWS_PUSHED, rank))
            for rank in range(task.num_ranks)
        ]
        own = self.ids[task.rank]
        self.value = torch.sparse_coo_tensor(
            own.unsqueeze(0),
            self.table[: len(own)],
            self.table.shape,
            is_coalesced=True,
            check_invariants=False,
        )
        self.outs = [torch.zeros(len(own), *self.table.shape[1:])]

    def step(self) -> None:
        """Both calls."""
        self.kv.push(0, self.value)
        self.fetch()

    def fetch(self) -> None:
        """The rows of this rank, of which others may push some, too."""
        self.kv.row_sparse_pull(0, self.outs[0], row_ids=self.ids[self.task.rank])

    def check(self) -> dict[str, Any]:
        """Whether the rows are those after all steps, exactly."""
        self.barrier()
        self.fetch()
        total = torch.zeros_like(self.table)
        for rank, ids in enumerate(self.ids):
            pushed = filled(self.table.shape, total.dtype, replica_pattern(0, rank))
            total.index_add_(0, ids, pushed[: len(ids)])
        expected = total[self.ids[self.task.rank]] * (-self.task.lr * self.steps)
        self.barrier()
        return {"agrees": torch.equal(self.outs[0], expected)}


class TableRows(Rows):
    """The same of a row-sparse key."""

    def init_keys(self) -> None:
        """Without rows."""
        self.kv.init_rows(0, self.task.shapes[0][1:])


class Behind(Torchkv):
    """A pull of small values while a large one is being pushed.

    The first key is the large one, the others are small; those are never pushed.
    """

    def step(self) -> None:
        """Not used: `run` is its own."""

    def run(self, steps: int) -> dict[str, Any]:
        """The seconds of the pulls, and those until the pushes were applied."""
        small, outs = self.keys[1:], self.outs[1:]
        for out in outs:
            out.fill_(1.0)
        pulls, pushes = [], []
        for _ in range(steps + 1):
            self.kv.barrier()
            start = time.perf_counter()
            pushed = self.kv.push(0, self.values[0], async_op=True)
            middle = time.perf_counter()
            self.kv.pull(small, out=outs, priority=1)
            pulls.append(time.perf_counter() - middle)
            assert pushed is not None
            pushed.wait()
            pushes.append(time.perf_counter() - start)
        self.steps += 1 + steps
        return {"seconds": pulls[1:], "pushes": pushes[1:]}

    def check(self) -> dict[str, Any]:
        """Whether the large value has the sum, and the small ones are still zero."""
        small = all(not out.any() for out in self.outs[1:])
        self.kv.pull(0, out=self.outs[0])
        expected = filled(
            self.outs[0].shape, torch.float32, sum_pattern(0, self.task.num_ranks)
        )
        return {"agrees": small and torch.equal(self.outs[0], expected)}


class Gloo(Case):
    """all_reduce, in buckets that values are copied into, and sums out of; a step."""

    bucket_bytes: float = BUCKET_BYTES

    def __init__(self, task: Task) -> None:
        """Makes the buckets, in DDP's order: the last values come first."""
        super().__init__(task)
        self.optimizer = None
        self.sums = self.outs
        if task.optimizer is not None:
            self.sums = [torch.zeros(shape) for shape in task.shapes]
            for out, total in zip(self.outs, self.sums, strict=True):
                out.grad = total
            make = OPTIMIZERS[task.optimizer][1]
            self.optimizer = make(self.outs, task.lr, True)
        self.buckets = []
        for keys in in_buckets(task.shapes, self.bucket_bytes):
            sizes = [math.prod(task.shapes[key]) for key in keys]
            flat = torch.zeros(sum(sizes))
            views = [
                part.view(task.shapes[key])
                for part, key in zip(flat.split(sizes), keys, strict=True)
            ]
            values = [self.values[key] for key in keys]
            self.buckets.append((flat, views, values, [self.sums[key] for key in keys]))

    def step(self) -> None:
        """Every bucket is on its way while the next is filled."""
        works = []
        for flat, views, values, _ in self.buckets:
            torch._foreach_copy_(views, values)
            works.append(dist.all_reduce(flat, async_op=True))
        for work, (_, views, _, sums) in zip(works, self.buckets, strict=True):
            work.wait()
            torch._foreach_copy_(sums, views)
        if self.optimizer is not None:
            self.optimizer.step()


class GlooSum(Case):
    """all_reduce of one small value, in place."""

    def step(self) -> None:
        """Without a bucket."""
        self.outs[0].copy_(self.values[0])
        dist.all_reduce(self.outs[0])


class GlooViews(Gloo):
    """Gradients are in the buckets, as with `gradient_as_bucket_view=True`."""

    def begin(self) -> None:
        """What backward writes."""
        for _, views, values, sums in self.buckets:
            torch._foreach_copy_(views, values)
            for view, total in zip(views, sums, strict=True):
                total.set_(view)  # type: ignore[call-overload]

    def step(self) -> None:
        """Every bucket is on its way while the next is."""
        works = [dist.all_reduce(flat, async_op=True) for flat, _, _, _ in self.buckets]
        for work in works:
            work.wait()
        assert self.optimizer is not None
        self.optimizer.step()


class GlooFlat(GlooViews):
    """All gradients are in one bucket."""

    bucket_bytes = math.inf


def in_buckets(shapes: Sequence[Shape], num_bytes: float) -> Iterator[list[int]]:
    """The indices of shapes, from the last to the first, in lists of so many bytes."""
    keys: list[int] = []
    used = 0
    for key in reversed(range(len(shapes))):
        keys.append(key)
        used += 4 * math.prod(shapes[key])
        if used >= num_bytes:
            yield keys
            keys, used = [], 0
    if keys:
        yield keys


class Copies(Case):
    """Each rank copies its values, and does nothing else: what memory allows."""

    def step(self) -> None:
        """One copy of the list."""
        torch._foreach_copy_(self.outs, self.values)

    def check(self) -> dict[str, Any]:
        """Of this rank's own values."""
        return {"agrees": all(map(torch.equal, self.outs, self.values))}


class _Given(torch.autograd.Function):
    """A loss whose gradients are given, so that backward costs little."""

    @staticmethod
    def forward(ctx: Any, values: Sequence[torch.Tensor], *weights: Any) -> Any:
        ctx.values = values
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:
        return None, *ctx.values


class _Weights(torch.nn.Module):
    """Parameters, and a loss of given gradients."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(weights)

    def forward(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        return _Given.apply(values, *self.weights)  # type: ignore[no-any-return]


class Trainer(Case):
    """torchkv's Trainer: backward, step, zero_grad."""

    mean = True

    def __init__(self, task: Task, kv: torchkv.KVStore) -> None:
        """A model of zeros."""
        super().__init__(task)
        assert task.optimizer is not None
        self.kv = kv
        self.model = _Weights(self.outs)
        self.outs = [weight.detach() for weight in self.model.parameters()]
        self.trainer = torchkv.Trainer(
            self.model, OPTIMIZERS[task.optimizer][0](task.lr), kvstore=kv
        )

    def step(self) -> None:
        """What a training loop does after the forward pass."""
        self.model(self.values).backward()
        self.trainer.step(self.task.num_ranks)
        self.trainer.zero_grad()

    def barrier(self) -> None:
        """Waits for the other ranks, once their stores have joined."""
        self.kv.barrier()

    def close(self) -> None:
        """Closes the store."""
        self.kv.close()


class Ddp(Case):
    """DistributedDataParallel with `gradient_as_bucket_view=True`, and fused steps."""

    mean = True

    def __init__(self, task: Task) -> None:
        """A model of zeros."""
        super().__init__(task)
        assert task.optimizer is not None
        model = _Weights(self.outs)
        self.outs = [weight.detach() for weight in model.parameters()]
        self.model = torch.nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True
        )
        make = OPTIMIZERS[task.optimizer][1]
        self.optimizer = make(list(model.parameters()), task.lr, True)

    def step(self) -> None:
        """What a training loop does after the forward pass, which it contains."""
        self.model(self.values).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
