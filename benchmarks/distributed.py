"""Ranks on one host, of one thread each: torchkv's dist types, MXNet's, Gloo.

ResNet-50's list with an optimizer on the servers, by two ranks or four, over tcp, and
as a step of the Trainer; 100 MB, also compressed, 64 bytes, many small keys, some rows
of a table; a pull behind a large push, and what an idle rank costs.

    python benchmarks/distributed.py [--json PATH] [--plot PATH] [--rounds N] [--smoke]
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import statistics
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from harness import Times
from jobs import Job, prefix_of_other_host
from parameter_lists import Shape, num_parameters, resnet50, shrunk
from report import (
    Table,
    Target,
    draw_bars,
    environment,
    finish,
    min_and_median,
    parser,
)

ROUNDS = 21
MIN_ROUNDS = 3
SETTLE_S = 0.03  # between turns, until the others' threads sleep
LR = 2.0**-6  # and small integers as gradients: SGD's weights are exact
SMALL: list[Shape] = [(16,)]  # 64 bytes
LARGE: list[Shape] = [(25_000_000,)]  # 100 MB
MANY: list[Shape] = [(100,)] * 10_000
TABLE: list[Shape] = [(250_000, 64)]

OURS = "torchkv pushpull"
OURS_TWO_CALLS = "torchkv push, pull"
OURS_SOCKETS = "torchkv pushpull, sockets"
OURS_TCP = "torchkv pushpull, tcp"
OURS_2BIT = "torchkv pushpull, 2bit"
OURS_2BIT_SOCKETS = "torchkv pushpull, 2bit, sockets"
OURS_2BIT_TCP = "torchkv pushpull, 2bit, tcp"
OURS_ROWS = "torchkv push, row_sparse_pull"
OURS_ROWS_SOCKETS = "torchkv push, row_sparse_pull, sockets"
OURS_TABLE = "torchkv push, row_sparse_pull, row-sparse key"
OURS_TABLE_SOCKETS = "torchkv push, row_sparse_pull, row-sparse key, sockets"
OURS_OF_4 = "torchkv pushpull, 4 ranks"
TRAINER = "torchkv Trainer"
MXNET = "MXNet push, pull"
MXNET_PUSHPULL = "MXNet pushpull"
MXNET_2BIT = "MXNet push, pull, 2bit"
MXNET_ROWS = "MXNet push, row_sparse_pull"
GLOO_SUM = "Gloo all_reduce"
GLOO = "Gloo all_reduce, 25 MB buckets, fused step"
GLOO_VIEWS = "Gloo all_reduce, gradients in buckets, fused step"
GLOO_FLAT = "Gloo all_reduce, gradients in one bucket, fused step"
GLOO_COPIED = "Gloo all_reduce, copied into one bucket and back"
GLOO_VIEWS_OF_4 = "Gloo, gradients in buckets, 4 ranks"
GLOO_FLAT_OF_4 = "Gloo, gradients in one bucket, 4 ranks"
DDP = "DistributedDataParallel, fused step"
COPIES = "a copy of the list on each rank"
# Contestants' jobs, and their names there (dist_rank.py).
JOBS = {
    OURS: ("torchkv", "torchkv"),
    OURS_TWO_CALLS: ("torchkv", "two-calls"),
    OURS_SOCKETS: ("torchkv sockets", "torchkv"),
    OURS_TCP: ("torchkv tcp", "torchkv"),
    OURS_2BIT: ("torchkv", "2bit"),
    OURS_2BIT_SOCKETS: ("torchkv sockets", "2bit"),
    OURS_2BIT_TCP: ("torchkv tcp", "2bit"),
    OURS_ROWS: ("torchkv", "rows"),
    OURS_ROWS_SOCKETS: ("torchkv sockets", "rows"),
    OURS_TABLE: ("torchkv", "table rows"),
    OURS_TABLE_SOCKETS: ("torchkv sockets", "table rows"),
    OURS_OF_4: ("torchkv 4", "torchkv"),
    TRAINER: ("torchkv", "trainer"),
    MXNET: ("MXNet", "push, pull"),
    MXNET_PUSHPULL: ("MXNet", "pushpull"),
    MXNET_2BIT: ("MXNet 2bit", "2bit"),
    MXNET_ROWS: ("MXNet", "rows"),
    GLOO_SUM: ("Gloo", "gloo-sum"),
    GLOO: ("Gloo", "gloo"),
    GLOO_VIEWS: ("Gloo", "gloo-views"),
    GLOO_FLAT: ("Gloo", "gloo-flat"),
    GLOO_COPIED: ("Gloo", "gloo"),
    GLOO_VIEWS_OF_4: ("Gloo 4", "gloo-views"),
    GLOO_FLAT_OF_4: ("Gloo 4", "gloo-flat"),
    DDP: ("Gloo", "ddp"),
    COPIES: ("Gloo", "copies"),
}

BEHIND = "pull of 64 B from each server"
PUSH = "the push of 100 MB, until it was applied"


class Goal(NamedTuple):
    """How many times as fast as another a contestant must be."""

    ours: str
    other: str
    limit: float


class Row(NamedTuple):
    """A case, and what it is compared with."""

    what: str
    type: str
    shapes: list[Shape]
    optimizer: str | None  # None: the sum
    steps: int  # of a turn
    contestants: tuple[str, ...]  # times are compared with the first's
    goals: tuple[Goal, ...]
    most_copies: float = math.inf  # how many times as long as COPIES

    @property
    def title(self) -> str:
        """Of its table."""
        title = f"{self.what}, {self.type}, {self.optimizer or 'sum'}"
        if len(self.shapes) > 1:
            millions = num_parameters(self.shapes) / 1e6
            title += f": {len(self.shapes)} keys, {millions:.1f} million parameters"
        return title


def goals(ours: str, limit: float, *others: str) -> tuple[Goal, ...]:
    """The same for all the others."""
    return tuple(Goal(ours, other, limit) for other in others)


def rows(smoke: bool) -> list[Row]:
    """The cases; MXNet's optimizer stays once it is set, so sums come first."""
    shapes = shrunk(resnet50()) if smoke else resnet50()
    large = shrunk(LARGE) if smoke else LARGE
    many = MANY[:100] if smoke else MANY
    steps = 1 if smoke else 4
    mxnet = (MXNET, MXNET_PUSHPULL)
    in_buckets = (GLOO_VIEWS, GLOO_FLAT)

    def resnet(
        optimizer: str, contestants: tuple[str, ...], *all: Goal, how: str = ""
    ) -> Row:
        what = f"ResNet-50{how}"
        return Row(what, "dist_sync", shapes, optimizer, steps, contestants, all)

    return [
        Row(
            "64 B",
            "dist_sync",
            SMALL,
            None,
            10 if smoke else 300,
            (OURS, OURS_TWO_CALLS, OURS_SOCKETS, *mxnet, GLOO_SUM),
            (
                *goals(OURS, 6.0, MXNET),
                *goals(OURS, 3.0, GLOO_SUM),
                *goals(OURS, 1 / 1.2, OURS_SOCKETS),
            ),
        ),
        Row(
            "many small keys",
            "dist_sync",
            many,
            None,
            steps,
            (OURS, GLOO_COPIED),
            goals(OURS, 0.95, GLOO_COPIED),
        ),
        resnet(
            "sgd",
            (
                *(OURS, OURS_TWO_CALLS, OURS_SOCKETS, *mxnet),
                *(GLOO, *in_buckets, COPIES),
            ),
            *goals(OURS, 6.0, *mxnet),
            *goals(OURS, 1.0, GLOO),
            *goals(OURS, 2.0, *in_buckets),
            *goals(OURS_TWO_CALLS, 1.4, *in_buckets),
        )._replace(most_copies=2.5),
        resnet("momentum", (OURS, *in_buckets), *goals(OURS, 2.0, *in_buckets)),
        resnet("adamw", (OURS, *in_buckets), *goals(OURS, 2.0, *in_buckets)),
        resnet("sgd", (OURS_TCP, GLOO), *goals(OURS_TCP, 1.1, GLOO), how=" over tcp"),
        resnet("sgd", (TRAINER, DDP), *goals(TRAINER, 1.8, DDP), how=", Trainer"),
        resnet(
            "sgd",
            (OURS_OF_4, GLOO_VIEWS_OF_4, GLOO_FLAT_OF_4),
            *goals(OURS_OF_4, 1.5, GLOO_VIEWS_OF_4, GLOO_FLAT_OF_4),
            how=", 4 ranks",
        ),
        Row(
            "100 MB",
            "dist_sync",
            large,
            "sgd",
            steps,
            (OURS, OURS_TWO_CALLS, *mxnet, GLOO_FLAT),
            (
                *goals(OURS, 6.0, *mxnet),
                *goals(OURS, 2.0, GLOO_FLAT),
                *goals(OURS_TWO_CALLS, 1.4, GLOO_FLAT),
            ),
        ),
        *(
            Row(
                "100 MB",
                "dist_sync",
                large,
                optimizer,
                steps,
                (OURS, GLOO_FLAT),
                goals(OURS, 2.0, GLOO_FLAT),
            )
            for optimizer in ("momentum", "adamw")
        ),
        Row(
            "100 MB, compressed",
            "dist_sync",
            large,
            "sgd",
            steps,
            (
                *(OURS_2BIT_SOCKETS, OURS_2BIT, OURS_2BIT_TCP),
                *(OURS, OURS_SOCKETS, OURS_TCP, MXNET_2BIT),
            ),
            (
                *goals(OURS_2BIT_SOCKETS, 4.0, MXNET_2BIT),
                *goals(OURS_2BIT_TCP, 1.0, OURS_TCP),
            ),
        ),
        Row(
            "a 50th of a table's rows on each rank",
            "dist_sync",
            [(5_000, 4)] if smoke else TABLE,
            "sgd",
            steps,
            (
                *(OURS_ROWS, OURS_ROWS_SOCKETS, OURS_TABLE, OURS_TABLE_SOCKETS),
                *(OURS, OURS_SOCKETS, MXNET_ROWS),
            ),
            (
                *goals(OURS_ROWS, 2.5, MXNET_ROWS),
                *goals(OURS_TABLE, 2.0, MXNET_ROWS),
            ),
        ),
        Row(
            "ResNet-50",
            "dist_async",
            shapes,
            "sgd",
            steps,
            (OURS, *mxnet),
            goals(OURS, 3.5, MXNET),
        ),
    ]


class Jobs:
    """All processes, which stay alive; those of MXNet are one job per type."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Starts them."""
        self._jobs: dict[str, Job] = {}
        self._stack = contextlib.ExitStack()
        self.mxnet: dict[str, Any] | None = None
        try:
            self._add("torchkv", Job.of_torch("torchkv", "torchkv"))
            name, sockets = "torchkv sockets", {"TORCHKV_SHARED_MEMORY": "0"}
            self._add(name, Job.of_torch(name, "torchkv", environment=sockets))
            self._add("Gloo", Job.of_torch("Gloo", "gloo"))
            for name, kind in (("torchkv 4", "torchkv"), ("Gloo 4", "gloo")):
                self._add(name, Job.of_torch(name, kind, 4))
            if prefix := prefix_of_other_host():
                name = "torchkv tcp"
                self._add(name, Job.of_torch(name, "torchkv", other_host=prefix))
            else:
                print("tcp is skipped: `unshare --mount` fails, so all is one host\n")
            if not options.no_mxnet and options.mxnet.exists():
                for name in ("dist_sync", "dist_async", "2bit"):
                    job = Job.of_mxnet(f"MXNet, {name}", options.mxnet)
                    self._add(f"MXNet {name}", job)
                self.mxnet = job.ask("versions")[0]
            elif not options.no_mxnet:
                print(
                    "MXNet is not installed and is skipped; install: "
                    "`make bench-peers`\n"
                )
        except BaseException:
            self._stack.close()
            raise

    def _add(self, name: str, job: Job) -> None:
        self._jobs[name] = self._stack.enter_context(job)

    def __enter__(self) -> Jobs:
        """The jobs themselves."""
        return self

    def __exit__(self, *error: object) -> None:
        """Ends all processes."""
        self._stack.__exit__(*error)

    def find(self, job: str, type: str = "") -> Job | None:
        """The processes of a job, if it takes part."""
        return self._jobs.get(job) or self._jobs.get(f"{job} {type}")


def checked(job: Job, contestant: str, what: str) -> None:
    """Raises unless all ranks have the right values."""
    if not all(answer["agrees"] for answer in job.ask("check", contestant=contestant)):
        raise AssertionError(f"{what}: the values are not those of these steps")


def seconds_of(row: Row, answers: list[dict[str, Any]]) -> float:
    """A turn's seconds per step, on the slowest rank."""
    middle = statistics.median if row.shapes == SMALL else statistics.fmean
    return max(middle(answer["seconds"]) for answer in answers)


def measure_row(row: Row, jobs: Jobs, rounds: int) -> dict[str, Any]:
    """All contestants' times, interleaved; values are checked before and after."""
    turns: dict[str, Job] = {}
    for name in row.contestants:
        job = jobs.find(JOBS[name][0], row.type)
        if job is not None:
            turns[name] = job
    times: Times = {name: [] for name in turns}
    shuffle = random.Random(0).shuffle
    for name, job in turns.items():  # one MXNet job has two contestants
        prepare(row, job, name)
    order = list(turns)
    for _ in range(max(MIN_ROUNDS, rounds)):
        shuffle(order)
        for name in order:
            time.sleep(SETTLE_S)
            answers = turns[name].ask("run", contestant=JOBS[name][1], steps=row.steps)
            times[name].append(seconds_of(row, answers))
    for name, job in turns.items():
        checked(job, JOBS[name][1], f"{name}, {row.title}")
    for job in set(turns.values()):
        job.ask("drop")
    return {"title": row.title, "type": row.type, "seconds": times}


def prepare(row: Row, job: Job, name: str) -> None:
    """Makes arrays, takes a step, and checks it."""
    contestant = JOBS[name][1]
    job.ask(
        "prepare",
        contestant=contestant,
        type=row.type,
        shapes=row.shapes,
        optimizer=row.optimizer,
        lr=LR,
    )
    job.ask("run", contestant=contestant, steps=1)
    checked(job, contestant, f"{name}, {row.title}")


def measure_behind(jobs: Jobs, rounds: int, smoke: bool) -> dict[str, Any] | None:
    """A pull of higher priority behind a large push, over tcp; None if not possible."""
    job = jobs.find("torchkv tcp")
    if job is None:
        return None
    namespaces = {answer["namespace"] for answer in job.ask("namespace")}
    assert len(namespaces) == 2, "the ranks are on one host"
    large: Shape = (10_000 if smoke else 25_000_000,)
    shapes = [large, *SMALL, *SMALL]  # integer keys alternate between the servers
    task = {"type": "dist_sync", "shapes": shapes, "optimizer": None, "lr": LR}
    job.ask("prepare", contestant="behind", **task)
    seconds: Times = {BEHIND: [], PUSH: []}
    for _ in range(max(MIN_ROUNDS, rounds)):
        answers = job.ask("run", contestant="behind", steps=3)
        for name, field in {BEHIND: "seconds", PUSH: "pushes"}.items():
            both = zip(*(answer[field] for answer in answers), strict=True)
            seconds[name].extend(map(max, both))
    checked(job, "behind", BEHIND)
    job.ask("drop")
    return {"title": "64 B behind 100 MB, tcp", "seconds": seconds}


def measure_idle(jobs: Jobs, seconds: float) -> float:
    """The share of a core that an idle rank with an open store uses, in percent."""
    job = jobs.find("torchkv")
    assert job is not None
    task = {"type": "dist_sync", "shapes": SMALL, "optimizer": None, "lr": LR}
    job.ask("prepare", contestant="torchkv", **task)
    job.ask("run", contestant="torchkv", steps=10)
    share = max(answer["share"] for answer in job.ask("idle", seconds=seconds))
    job.ask("drop")
    return 100 * share


def ratio(times: Times, other: str, ours: str, least: bool = False) -> float:
    """How many times as long as one's steps another's take."""
    middle = min if least else statistics.median
    return middle(times[other]) / middle(times[ours])


def table_of(measured: Mapping[str, Any]) -> Table:
    """The times; those of contestants also as ratios to the first's."""
    times = measured["seconds"]
    header = ["", "min", "median", "max"]
    lines = [
        [name, *min_and_median(each), *min_and_median([max(each)])[:1]]
        for name, each in times.items()
    ]
    if "type" in measured:
        ours = next(iter(times))
        header += ["ratio of minima", "ratio of medians"]
        for line, name in zip(lines, times, strict=True):
            line += [
                f"{ratio(times, name, ours, least=True):.2f}",
                f"{ratio(times, name, ours):.2f}",
            ]
    return Table(measured["title"], header, lines)


def targets_of(
    cases: list[tuple[Row, dict[str, Any]]],
    behind: Mapping[str, Any] | None,
    idle: float,
) -> list[Target]:
    """All targets; ratios are those of medians, to copies those of minima."""
    targets = []
    for row, measured in cases:
        times = measured["seconds"]
        case = row.title.split(":")[0]
        for ours, other, limit in row.goals:
            took_part = ours in times and other in times
            value = ratio(times, other, ours) if took_part else None
            what = f"{case}: {ours}, faster than {other}"
            targets.append(Target(what, value, limit))
        if row.most_copies < math.inf:
            value = ratio(times, OURS, COPIES, least=True)
            what = f"{case}: {OURS}, in copies, minima"
            targets.append(Target(what, value, row.most_copies, at_least=False))
    pull = statistics.median(behind["seconds"][BEHIND]) * 1e3 if behind else None
    what = "64 B pull behind a 100 MB push, tcp, median"
    if behind is None:
        what += " (skipped: no second host)"
    targets += [
        Target(what, pull, 5, at_least=False, unit="ms"),
        Target("idle rank, of a core", idle, 0.1, at_least=False, unit="%"),
    ]
    return targets


def draw(figure: Any, measured: list[dict[str, Any]]) -> None:
    """A bar per contestant: its median."""
    figure.set_size_inches(9, 2 * len(measured))
    medians = {
        case["title"]: {
            name: statistics.median(each) * 1e3
            for name, each in case["seconds"].items()
        }
        for case in measured
    }
    draw_bars(figure, medians, "milliseconds, median")


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints tables, and writes JSON and a plot if requested."""
    options_parser = parser(__doc__ or "", rounds=ROUNDS)
    options_parser.add_argument(
        "--idle", type=float, help="seconds of idleness (60; 10 in a smoke run)"
    )
    options = options_parser.parse_args(arguments)
    rounds = options.rounds or (MIN_ROUNDS if options.smoke else ROUNDS)
    torch.set_num_threads(1)
    with Jobs(options) as jobs:
        facts = {**environment(None), "mxnet": jobs.mxnet}
        cases = [(row, measure_row(row, jobs, rounds)) for row in rows(options.smoke)]
        behind = measure_behind(jobs, rounds, options.smoke)
        idle = measure_idle(jobs, options.idle or (10 if options.smoke else 60))

    measured = [case for _, case in cases] + ([behind] if behind else [])
    finish(
        options,
        {**facts, "cases": measured, "idle_percent": idle},
        [table_of(case) for case in measured],
        targets_of(cases, behind, idle),
        lambda figure: draw(figure, measured),
    )


if __name__ == "__main__":
    main()
