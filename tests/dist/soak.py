"""Four ranks that do random operations for long, and know what every pull must return.

    python tests/dist/soak.py --seconds 1800

Three stores: `sgd` and `sum` are dist_sync, with an optimizer and without; of them, the
ranks predict every pulled value exactly. `async` is dist_async: what a pull returns is
between the pushes that it must contain and those that it may, and after a barrier it is
exact. Most ranks compress what they push to `sgd` and `async`. Meanwhile ranks are
stopped for up to two heartbeats, and the memory and the open files of each must not
grow. Exits with 1 on any deviation.

All ranks draw the same plan (which keys are pushed how often in a phase, what is
deleted, the learning rate) and, from a generator of their own, the order of the pushes,
their lists, priorities and forms.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

import ranks
import torchkv
import usage
from soak_values import PERIOD, pair, tensor
from torchkv.compression import FP16, TopK

NUM_RANKS = 4
HEARTBEAT_S = 0.5
TIMEOUT_S = 60.0
# Less than 64 KiB is on one server; of the last as fp64, each has more than a piece.
SIZES = [(), (1,), (3, 5), (0, 2), (1000,), (16_383,), (40_000,), (560_000,)]
DTYPES = [torch.float32, torch.int64, torch.bfloat16, torch.float64]
# Of the ranks' gradients in `sgd` and `async`: they send these exactly.
COMPRESSIONS = [None, FP16(), TopK(ratio=1.0), FP16()]
RATES = [0.25, 0.5, 1.0, 2.0]
STORM = 8  # pushes of each key in the first phases, which use the most memory
PHASES_PER_CHECK = 4  # of whether to stop
NUM_PHASES_OF_EXTRA = 16  # between stores that live for a moment
LIMIT = 1 << 20  # of a value, so that fp32 is exact
# How much more of each a rank may use in the last quarter than in the third. Shared
# memory is kept for the next values, and grows to what the most values in flight have
# needed: in a minute by 30 MB after the start, of which 11 in the last quarter.
USES = {
    "bytes of memory": (usage.allocated_bytes, 2 << 20),
    "bytes of shared memory": (lambda: usage.resident_bytes("RssShmem"), 12 << 20),
    "open files": (usage.num_files, 8),
}


@dataclass
class Entry:
    """A key, and the value a + b * pattern after this rank's pushes."""

    store: str
    key: str
    dtype: torch.dtype = torch.float32
    size: tuple[int, ...] = ()
    life: int = 0  # the number of its inits
    num_pushes: int = 0
    a: float = 0.0
    b: float = 0.0

    def begin(self, size: tuple[int, ...], seed: int) -> None:
        self.size = size
        self.life += 1
        self.num_pushes = 0
        self.a, self.b = pair(seed, self.store, self.key, self.life)

    def gradient(self, seed: int, number: int, rank: int) -> tuple[int, int]:
        return pair(seed, self.store, self.key, self.life, number, rank)

    def add(self, a: float, b: float) -> None:
        self.a += a
        self.b += b
        assert abs(self.a) + PERIOD * abs(self.b) < LIMIT, "the test is inexact"

    def value(self) -> torch.Tensor:
        return tensor(self.size, self.a, self.b, self.dtype)


class Checked:
    """A store with a model of its values."""

    def __init__(self, name: str, type: str, seed: int, rank: int, own: Random):
        self.name, self.seed, self.rank, self.own = name, seed, rank, own
        self.kv = torchkv.create(
            type, name=name, heartbeat=HEARTBEAT_S, timeout=TIMEOUT_S
        )
        self.counts: Counter[str] = Counter()
        dtypes = DTYPES if name == "sum" else DTYPES[:1]
        self.entries = [
            Entry(name, f"{name}{i}", dtypes[i % len(dtypes)], size)
            for i, size in enumerate(SIZES)
        ]
        if name != "sum":
            self.kv.set_optimizer("sgd", learning_rate=1.0)
            self.kv.set_gradient_compression(COMPRESSIONS[rank])

    def init(self, plan: Random, entries: list[Entry]) -> None:
        """With shuffled sizes; how many bytes the keys have stays the same."""
        for dtype in DTYPES:
            some = [entry for entry in entries if entry.dtype == dtype]
            sizes = [entry.size for entry in some]
            plan.shuffle(sizes)
            for entry, size in zip(some, sizes, strict=True):
                entry.begin(size, self.seed)
        values = [entry.value() for entry in entries]
        if self.rank != 0:
            values = [torch.full_like(value, 99) for value in values]  # not used
        self.kv.init([entry.key for entry in entries], values)
        self.counts["inits"] += len(entries)

    def delete_some(self, plan: Random) -> None:
        """Deletes keys and initializes them with other shapes."""
        some = plan.sample(self.entries, plan.randint(1, 3))
        self.kv.delete([entry.key for entry in some])
        assert not any(entry.key in self.kv for entry in some)
        self.init(plan, some)

    def check(self, entry: Entry, actual: torch.Tensor, expected: torch.Tensor) -> None:
        self.counts["values"] += 1
        if torch.equal(actual, expected):
            return
        wrong = (actual != expected).reshape(-1).nonzero().reshape(-1)
        first = int(wrong[0])
        raise AssertionError(
            f"{entry} pulled {len(wrong)} wrong elements, from {first} to"
            f" {int(wrong[-1])}; the first is {actual.reshape(-1)[first].item()}, not"
            f" {expected.reshape(-1)[first].item()}"
        )

    def pull(self, entries: list[Entry]) -> list[torch.Tensor]:
        """In one of the forms of a pull."""
        keys = [entry.key for entry in entries]
        self.counts["pulls"] += 1
        if self.own.random() < 0.3:
            return self.kv.pull(keys, priority=self.own.randint(-2, 2))
        outs = [torch.empty(entry.size, dtype=entry.dtype) for entry in entries]
        if self.own.random() < 0.3:
            self.kv.pull(keys, out=outs, async_op=True).wait()
        else:
            self.kv.pull(keys, out=outs, priority=self.own.randint(-2, 2))
        return outs

    def push_values(self, entry: Entry, a: int, b: int) -> Any:
        """One tensor or, as of several devices, some that sum to it."""
        if self.own.random() < 0.2:
            first = self.own.randint(-3, 3)
            parts = [(first, b), (a - first, 0)]
            return [tensor(entry.size, *part, entry.dtype) for part in parts]
        return tensor(entry.size, a, b, entry.dtype)


def lists_of(entries: list[Entry], rng: Random) -> Iterable[list[Entry]]:
    """All entries, in another order, in lists without repetitions."""
    rest = rng.sample(entries, len(entries))
    while rest:
        chosen: dict[str, Entry] = {}
        for entry in rest[: rng.choice([1, 1, 2, 4, 8])]:
            chosen.setdefault(entry.key, entry)
        for entry in chosen.values():
            rest.remove(entry)
        yield list(chosen.values())


def zero(values: list[Any]) -> None:
    """A pushed tensor may be overwritten at once."""
    for value in values:
        for each in value if isinstance(value, list) else [value]:
            each.zero_()


class Sync(Checked):
    """dist_sync: the n-th update uses the n-th push of every rank."""

    rate = 1.0

    def push_all(self, entries: list[Entry]) -> list[Any]:
        values = []
        for entry in entries:
            pairs = [
                entry.gradient(self.seed, entry.num_pushes, rank)
                for rank in range(NUM_RANKS)
            ]
            values.append(self.push_values(entry, *pairs[self.rank]))
            a, b = (sum(numbers) for numbers in zip(*pairs, strict=True))
            if self.name == "sum":
                entry.a, entry.b = a, b
            else:
                entry.add(-self.rate * a, -self.rate * b)
            entry.num_pushes += 1
        return values

    def phase(self, plan: Random, is_storm: bool = False) -> None:
        if self.name != "sum" and plan.random() < 0.3:
            self.rate = self.kv.optimizer.lr = plan.choice(RATES)
            self.counts["rates"] += 1
        some = plan.choices(self.entries, k=plan.randint(1, 12))
        pushed = STORM * self.entries if is_storm else some
        # In the same order on all ranks, calls may wait for each other. Else the order
        # is each rank's own, and nothing is waited for until all is pushed.
        order = Random(plan.random())
        in_order = plan.random() < 0.5
        waiting: list[tuple[Any, list[Any]]] = []
        for some in lists_of(pushed, order if in_order else self.own):
            self.push_list(some, in_order, waiting)
        self.own.shuffle(waiting)
        for work, checks in waiting:
            work.wait()
            for check in checks:
                self.check(*check)
        self.check_pull(self.own.sample(self.entries, self.own.randint(1, 4)))
        if plan.random() < 0.2:
            self.kv.barrier()
            self.counts["barriers"] += 1
        if plan.random() < 0.15:
            self.delete_some(plan)

    def push_list(
        self, some: list[Entry], in_order: bool, waiting: list[tuple[Any, list[Any]]]
    ) -> None:
        own, keys = self.own, [entry.key for entry in some]
        values = self.push_all(some)
        priority = own.randint(-2, 2)
        self.counts["pushes"] += len(some)
        outs = [torch.empty(entry.size, dtype=entry.dtype) for entry in some]
        form = own.choice(["push", "push", "async push", "pushpull", "async pushpull"])
        if form == "pushpull" and not in_order:
            form = "async pushpull"
        if form == "push":
            self.kv.push(keys, values, priority=priority)
            zero(values)
        elif form == "async push":
            work = self.kv.push(keys, values, priority=priority, async_op=True)
            waiting.append((work, []))
        elif form == "pushpull":
            self.kv.pushpull(keys, values, out=outs, priority=priority)
            for check in self.checks(some, outs):
                self.check(*check)
        else:
            work = self.kv.pushpull(
                keys, values, out=outs, priority=priority, async_op=True
            )
            waiting.append((work, self.checks(some, outs)))
        if own.random() < 0.2:  # before the next push of these keys
            outs = [torch.empty(entry.size, dtype=entry.dtype) for entry in some]
            work = self.kv.pull(keys, out=outs, async_op=True)
            waiting.append((work, self.checks(some, outs)))
            self.counts["pulls"] += 1

    def checks(self, entries: list[Entry], outs: list[torch.Tensor]) -> list[Any]:
        values = [entry.value() for entry in entries]
        return list(zip(entries, outs, values, strict=True))

    def check_pull(self, entries: list[Entry]) -> None:
        for check in self.checks(entries, self.pull(entries)):
            self.check(*check)
        for entry in entries:
            version = self.kv.version(entry.key)
            assert version == entry.num_pushes, (entry, version)


class Async(Checked):
    """dist_async: sums that must add up at barriers."""

    num_phases = 0

    def phase(self, plan: Random, is_storm: bool = False) -> None:
        """Values only grow in a phase, or only fall, so pulls have bounds."""
        self.num_phases += 1
        sign = 1 if plan.random() < 0.5 else -1
        own_pushes: list[Entry] = []
        before = {entry.key: (entry.a, entry.b) for entry in self.entries}
        for entry in self.entries:
            for rank in range(NUM_RANKS):
                count = STORM if is_storm else plan.choice([0, 0, 1, 2, 3])
                for number in range(count):
                    a, b = self.growth(entry, number, rank)
                    entry.add(-sign * a, -sign * b)
                own_pushes += [entry] * count * (rank == self.rank)
        done: Counter[str] = Counter()
        for some in lists_of(own_pushes, self.own):
            values = []
            for entry in some:
                a, b = self.growth(entry, done[entry.key], self.rank)
                values.append(self.push_values(entry, sign * a, sign * b))
                done[entry.key] += 1
                first = before[entry.key]
                before[entry.key] = first[0] - sign * a, first[1] - sign * b
            self.push_list(some, values, before, sign)
        self.kv.barrier()
        some = self.own.sample(self.entries, self.own.randint(1, len(self.entries)))
        for entry, value in zip(some, self.pull(some), strict=True):
            self.check(entry, value, entry.value())
        self.kv.barrier()  # before others push on
        self.counts["barriers"] += 2
        if plan.random() < 0.15:
            self.delete_some(plan)

    def growth(self, entry: Entry, number: int, rank: int) -> tuple[int, int]:
        a, b = entry.gradient(self.seed, self.num_phases * 10 + number, rank)
        return abs(a), abs(b)

    def push_list(
        self,
        some: list[Entry],
        values: list[Any],
        before: dict[str, tuple[float, float]],
        sign: int,
    ) -> None:
        keys = [entry.key for entry in some]
        self.counts["pushes"] += len(some)
        if self.own.random() < 0.5:
            self.kv.push(keys, values, priority=self.own.randint(-2, 2))
            zero(values)
            if self.own.random() < 0.5:
                return
            outs = self.pull(some)
        else:
            outs = [torch.empty(entry.size) for entry in some]
            self.kv.pushpull(keys, values, out=outs)
        for entry, out in zip(some, outs, strict=True):
            first = tensor(entry.size, *before[entry.key])  # this rank's pushes
            last = entry.value()  # those of all ranks until the next barrier
            low, high = (last, first) if sign > 0 else (first, last)
            assert torch.all((low <= out) & (out <= high)), (entry, before[entry.key])
            self.counts["values"] += 1


def use_extra(number: int, rank: int) -> None:
    """A store that lives for a moment."""
    kv = torchkv.create("dist_sync", name="extra", timeout=TIMEOUT_S)
    kv.init("w", torch.zeros(40_000))
    kv.push("w", torch.full((40_000,), float(number + rank)))
    expected = NUM_RANKS * number + sum(range(NUM_RANKS))
    assert kv.pull("w").eq(expected).all()
    kv.barrier()
    kv.close()


def work(rank: int, seed: int, stop: str, least: int) -> dict[str, Any]:
    """A rank: phases until rank 0 sees the file `stop`, but at least so many."""
    torch.set_num_threads(1)
    plan, own = Random(seed), Random(f"{seed}/{rank}")
    stores = [
        Sync("sgd", "dist_sync", seed, rank, own),
        Sync("sum", "dist_sync", seed, rank, own),
        Async("async", "dist_async", seed, rank, own),
    ]
    for store in stores:
        store.init(plan, store.entries)
        for _ in range(3):
            store.phase(plan, is_storm=True)
    control = stores[1].kv
    control.init("stop", torch.zeros(1))
    stopping, num_phases, sampled = torch.zeros(1), 0, 0.0
    samples = {what: array.array("d") for what in USES}
    while not stopping:
        for _ in range(PHASES_PER_CHECK):
            plan.choice(stores).phase(plan)
            num_phases += 1
            if num_phases % NUM_PHASES_OF_EXTRA == 0:
                use_extra(num_phases, rank)
        done = num_phases >= least and os.path.exists(stop)
        stopping.fill_(rank == 0 and done)
        control.pushpull("stop", stopping)
        if time.monotonic() > sampled + 0.1:
            sampled = time.monotonic()
            for what, (measure, _) in USES.items():
                samples[what].append(measure())
    counts: Counter[str] = Counter(phases=num_phases)
    for store in stores:
        store.kv.barrier()
        counts.update(store.counts)
        store.kv.close()
    return {"counts": counts, "samples": samples}


@dataclass
class Report:
    """Of a run without a wrong value."""

    seconds: float = 0.0
    stops: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    # Of each rank: of each of USES, how much in the third quarter and in the last.
    uses: list[dict[str, tuple[float, float]]] = field(default_factory=list)

    def __str__(self) -> str:
        counts = ", ".join(f"{number:,} {what}" for what, number in self.counts.items())
        text = (
            f"{NUM_RANKS} ranks, {self.seconds:.0f} s, stopped {self.stops} times:"
            f" {counts}, of all ranks; all exact"
        )
        for what in USES:
            of_ranks = (
                f"{uses[what][0]:,.0f} to {uses[what][1]:,.0f}" for uses in self.uses
            )
            text += f"\n{what} per rank: {', '.join(of_ranks)}"
        return text

    def problems(self) -> list[str]:
        return [
            f"rank {rank} has {last - first:,.0f} more {what}"
            for rank, uses in enumerate(self.uses)
            for what, (first, last) in uses.items()
            if last - first > USES[what][1]
        ]


def ends(samples: array.array[float]) -> tuple[float, float]:
    """What is usual in the third quarter, and in the last."""
    quarter = max(1, len(samples) // 4)
    return (
        statistics.median(samples[-2 * quarter : -quarter] or samples),
        statistics.median(samples[-quarter:]),
    )


def disturb(job: ranks.Ranks, rng: Random) -> int:
    """Stops one or two ranks for up to two heartbeats; how many."""
    victims = rng.sample(range(NUM_RANKS), rng.choice([1, 1, 1, 2]))
    pause_s = rng.uniform(0.05, 2.0) * HEARTBEAT_S
    for number, seconds in ((signal.SIGSTOP, pause_s), (signal.SIGCONT, 0.0)):
        for rank in victims:
            with contextlib.suppress(ProcessLookupError):  # it has failed
                job.kill(rank, number)
        time.sleep(seconds)
    return len(victims)


def soak(seconds: float, seed: int, least_phases: int = 0) -> Report:
    """RankFailed if a rank pulls a wrong value, or anything raises."""
    rng, report = Random(seed), Report(seconds)
    with tempfile.TemporaryDirectory() as folder:
        stop = os.path.join(folder, "stop")
        end = time.monotonic() + seconds
        with ranks.Ranks(work, NUM_RANKS, seed, stop, least_phases) as job:
            with contextlib.suppress(ranks.RankFailed):  # join() names all of them
                while time.monotonic() < end:
                    time.sleep(rng.uniform(0.5, 3.0) * HEARTBEAT_S)
                    job.check()
                    report.stops += disturb(job, rng)
            open(stop, "w").close()
            for result in job.join():
                report.counts.update(result["counts"])
                samples = result["samples"].items()
                report.uses.append({what: ends(some) for what, some in samples})
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--seed", type=int, default=Random().randrange(1 << 32))
    args = parser.parse_args()
    print(f"--seed {args.seed}", flush=True)
    try:
        report = soak(args.seconds, args.seed)
    except ranks.RankFailed as error:
        print(f"FAILED: {error}", flush=True)
        return 1
    print(report, flush=True)
    for problem in report.problems():
        print(f"FAILED: {problem}", flush=True)
    return int(bool(report.problems()))


if __name__ == "__main__":
    sys.exit(main())
