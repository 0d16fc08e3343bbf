"""A rank of torchkv's or Gloo's job: a process that measures what it is told.

    python dist_rank.py CONTESTANT RANK PORT [SECURITY]

CONTESTANT is torchkv, torchkv-two-calls, gloo or gloo-views.

PORT is that of the job's TCPStore. See peers/serve.py for the commands' form.
"""

from __future__ import annotations

import math
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

import torchkv
from contestants import filled
from parameter_lists import Shape
from peers.pattern import replica_pattern, sum_pattern
from peers.serve import serve

RANKS = 2
TIMEOUT_S = 60.0
# Of DistributedDataParallel, by default; its first bucket is smaller.
BUCKET_BYTES = 25 << 20


class Case:
    """One value per shape and rank, and what every step makes of them."""

    def __init__(self, rank: int, shapes: Sequence[Shape], lr: float | None) -> None:
        """Makes the tensors; `lr` is None for plain sums."""
        self.lr, self.steps, self.shapes = lr, 0, shapes
        self.keys = list(range(len(shapes)))
        self.values = [
            filled(shape, torch.float32, replica_pattern(key, rank))
            for key, shape in enumerate(shapes)
        ]
        self.outs = [torch.zeros(shape) for shape in shapes]

    def barrier(self) -> None:
        """Waits for the other rank."""
        raise NotImplementedError

    def step(self) -> None:
        """Values in, results of both ranks out."""
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

    def check(self) -> dict[str, Any]:
        """Whether the outs are exactly those after all steps of both ranks."""
        self.barrier()
        self.fetch()
        factor = 1.0 if self.lr is None else -self.lr * self.steps
        agrees = True
        for key, out in enumerate(self.outs):
            expected = [factor * value for value in sum_pattern(key, RANKS)]
            agrees &= torch.equal(out, filled(out.shape, out.dtype, expected))
        self.barrier()
        return {"agrees": agrees}


class Torchkv(Case):
    """`pushpull`, of a list or of one key, with SGD on the servers or without."""

    def __init__(
        self,
        kv: torchkv.KVStore,
        shapes: Sequence[Shape],
        lr: float | None,
        two_calls: bool = False,
    ) -> None:
        """Initializes the keys with zeros."""
        super().__init__(kv.rank, shapes, lr)
        self.kv = kv
        if lr is not None:
            kv.set_optimizer("sgd", learning_rate=lr)
        kv.init(self.keys, self.outs)
        self.barrier = kv.barrier  # type: ignore[method-assign]
        keys, values, outs = self.keys, self.values, self.outs
        if len(shapes) == 1:
            keys, values, outs = keys[0], values[0], outs[0]  # type: ignore[assignment]
        if two_calls:

            def step() -> None:
                kv.push(keys, values)  # type: ignore[arg-type]
                kv.pull(keys, out=outs)  # type: ignore[arg-type]

        else:

            def step() -> None:
                kv.pushpull(keys, values, out=outs)  # type: ignore[arg-type]

        self.step = step  # type: ignore[method-assign]

    def fetch(self) -> None:
        """Of dist_async, a step's result may lack steps of the other rank."""
        self.kv.pull(self.keys, out=self.outs)

    def close(self) -> None:
        """Closes the store."""
        self.kv.close()


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
        expected = filled(self.outs[0].shape, torch.float32, sum_pattern(0, RANKS))
        return {"agrees": small and torch.equal(self.outs[0], expected)}


class Gloo(Case):
    """all_reduce, in buckets that values are copied into and sums out of; fused SGD."""

    def __init__(self, rank: int, shapes: Sequence[Shape], lr: float | None) -> None:
        """Makes the buckets, in DDP's order: the last values come first."""
        super().__init__(rank, shapes, lr)
        self.sums = [torch.zeros(shape) for shape in shapes]
        self.buckets = []
        for keys in in_buckets(shapes):
            flat = torch.zeros(sum(math.prod(shapes[key]) for key in keys))
            sizes = [math.prod(shapes[key]) for key in keys]
            parts = flat.split(sizes)
            views = [part.view(shapes[key]) for part, key in zip(parts, keys)]  # noqa: B905
            self.buckets.append(
                (
                    flat,
                    views,
                    [self.values[key] for key in keys],
                    [self.sums[key] for key in keys],
                )
            )
        self.optimizer = None
        if lr is not None:
            for out, total in zip(self.outs, self.sums, strict=True):
                out.grad = total
            self.optimizer = torch.optim.SGD(self.outs, lr=lr, fused=True)

    def barrier(self) -> None:
        """Waits for the other rank."""
        dist.barrier()

    def step(self) -> None:
        """Every bucket is on its way while the next is filled."""
        if self.optimizer is None:  # one small value, summed in place
            self.outs[0].copy_(self.values[0])
            dist.all_reduce(self.outs[0])
            return
        works = []
        for flat, views, values, _ in self.buckets:
            torch._foreach_copy_(views, values)
            works.append(dist.all_reduce(flat, async_op=True))
        for work, (_, views, _, sums) in zip(works, self.buckets, strict=True):
            work.wait()
            torch._foreach_copy_(sums, views)
        self.optimizer.step()


class GlooViews(Gloo):
    """Gradients are in the buckets, as with `gradient_as_bucket_view=True`."""

    def begin(self) -> None:
        """What backward writes."""
        for _, views, values, _ in self.buckets:
            torch._foreach_copy_(views, values)
        for _, views, _, sums in self.buckets:
            for view, total in zip(views, sums, strict=True):
                total.set_(view)  # type: ignore[call-overload]

    def step(self) -> None:
        """Every bucket is on its way while the next is."""
        works = [dist.all_reduce(flat, async_op=True) for flat, _, _, _ in self.buckets]
        for work in works:
            work.wait()
        assert self.optimizer is not None
        self.optimizer.step()


def in_buckets(shapes: Sequence[Shape]) -> Iterator[list[int]]:
    """The indices of shapes, from the last to the first, in lists of 25 MiB."""
    keys: list[int] = []
    num_bytes = 0
    for key in reversed(range(len(shapes))):
        keys.append(key)
        num_bytes += 4 * math.prod(shapes[key])
        if num_bytes >= BUCKET_BYTES:
            yield keys
            keys, num_bytes = [], 0
    if keys:
        yield keys


class Rank:
    """What the driver can tell a rank."""

    def __init__(self, contestant: str, rank: int, port: int, security: str) -> None:
        """Connects with the other rank."""
        self.rank, self.contestant = rank, contestant
        self.tcp_store = dist.TCPStore("127.0.0.1", port, is_master=False)
        self.options = {"security": security} if security else {}
        self.case: Case | None = None
        if contestant.startswith("gloo"):
            dist.init_process_group(
                "gloo", store=self.tcp_store, rank=rank, world_size=RANKS
            )

    def prepare(
        self, type: str, shapes: list[Shape], lr: float | None, behind: bool = False
    ) -> None:
        """Makes the tensors, and torchkv's store."""
        if self.contestant.startswith("gloo"):
            kind = GlooViews if self.contestant == "gloo-views" else Gloo
            self.case = kind(self.rank, shapes, lr)
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # security="none" warns
            kv = torchkv.create(
                type,
                rank=self.rank,
                world_size=RANKS,
                store=self.tcp_store,
                timeout=TIMEOUT_S,
                **self.options,
            )
            two_calls = self.contestant == "torchkv-two-calls"
            self.case = (Behind if behind else Torchkv)(kv, shapes, lr, two_calls)

    def run(self, steps: int, way: str) -> dict[str, Any]:
        """Makes steps; their seconds. There is one way only."""
        assert self.case is not None
        return self.case.run(steps)

    def check(self) -> dict[str, Any]:
        """Whether the results of all steps are right."""
        assert self.case is not None
        return self.case.check()

    def idle(self, seconds: float) -> dict[str, Any]:
        """The processor's time, of all threads, while this one sleeps."""
        start, used = time.perf_counter(), time.process_time()
        time.sleep(seconds)
        used = time.process_time() - used
        return {"share": used / (time.perf_counter() - start)}

    def drop(self) -> None:
        """Closes the store and frees the tensors."""
        assert self.case is not None
        self.case.barrier()
        self.case.close()
        self.case = None

    def namespace(self) -> dict[str, Any]:
        """What tells hosts apart, beside the boot: ranks of one host use ipc."""
        return {"namespace": os.readlink("/proc/self/ns/mnt")}


def main() -> None:
    """Does what stdin says."""
    contestant, rank, port, *security = sys.argv[1:]
    torch.set_num_threads(1)
    serve(Rank(contestant, int(rank), int(port), "".join(security)))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
