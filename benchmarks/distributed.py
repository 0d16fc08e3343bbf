"""Two ranks on one host, of one thread each: torchkv's dist types, MXNet's, Gloo.

ResNet-50's list with SGD on the servers, 64 bytes, a pull behind a large push, and what
an idle rank costs.

    python benchmarks/distributed.py [--json PATH] [--plot PATH] [--rounds N] [--smoke]
"""

from __future__ import annotations

import argparse
import contextlib
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
LR = 2.0**-6  # and small integers as gradients: all weights are exact
SMALL: list[Shape] = [(16,)]  # 64 bytes

OURS = "torchkv pushpull"
OURS_TWO_CALLS = "torchkv push, pull"
OURS_SOCKETS = "torchkv pushpull, sockets"
MXNET = "MXNet push, pull"
MXNET_PUSHPULL = "MXNet pushpull"
GLOO_SUM = "Gloo all_reduce"
GLOO = "Gloo all_reduce, 25 MB buckets, fused SGD"
GLOO_VIEWS = "Gloo all_reduce, gradients in buckets, fused SGD"
# Contestants' jobs, and how each calls it.
JOBS = {
    OURS: ("torchkv", "pushpull"),
    OURS_TWO_CALLS: ("torchkv two calls", "push, pull"),
    OURS_SOCKETS: ("torchkv sockets", "pushpull"),
    MXNET: ("MXNet", "push, pull"),
    MXNET_PUSHPULL: ("MXNet", "pushpull"),
    GLOO_SUM: ("Gloo", ""),
    GLOO: ("Gloo", ""),
    GLOO_VIEWS: ("Gloo views", ""),
}

BEHIND = "pull of 64 B from each server"
PUSH = "the push of 100 MB, until it was applied"


class Row(NamedTuple):
    """A case, and what it is compared with."""

    what: str
    type: str
    shapes: list[Shape]
    lr: float | None  # None: the sum, without an optimizer
    steps: int  # of a turn
    contestants: tuple[str, ...]
    targets: dict[str, float]  # by contestant, how many times as fast torchkv is

    @property
    def title(self) -> str:
        """Of its table."""
        if len(self.shapes) == 1:
            return f"{self.what}, {self.type}"
        return (
            f"{self.what}, {self.type}: {len(self.shapes)} keys, "
            f"{num_parameters(self.shapes) / 1e6:.1f} million parameters, SGD"
        )


def rows(smoke: bool) -> list[Row]:
    """The cases; MXNet's optimizer stays once it is set, so 64 bytes come first."""
    shapes = shrunk(resnet50()) if smoke else resnet50()
    steps = 1 if smoke else 4
    many = 10 if smoke else 300
    mxnet = (MXNET, MXNET_PUSHPULL)
    return [
        Row(
            "64 B",
            "dist_sync",
            SMALL,
            None,
            many,
            (OURS, OURS_TWO_CALLS, OURS_SOCKETS, *mxnet, GLOO_SUM),
            {MXNET: 6.0, GLOO_SUM: 3.0},
        ),
        Row(
            "ResNet-50",
            "dist_sync",
            shapes,
            LR,
            steps,
            (OURS, OURS_TWO_CALLS, OURS_SOCKETS, *mxnet, GLOO, GLOO_VIEWS),
            {MXNET: 3.5, GLOO: 1.0},
        ),
        Row(
            "ResNet-50",
            "dist_async",
            shapes,
            LR,
            steps,
            (OURS, *mxnet),
            {MXNET: 3.5},
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
            name = "torchkv two calls"
            self._add(name, Job.of_torch(name, "torchkv-two-calls"))
            name, sockets = "torchkv sockets", {"TORCHKV_SHARED_MEMORY": "0"}
            job = Job.of_torch(name, "torchkv", environment=sockets)
            self._add(name, job)
            self._add("Gloo", Job.of_torch("Gloo", "gloo"))
            self._add("Gloo views", Job.of_torch("Gloo views", "gloo-views"))
            if prefix := prefix_of_other_host():
                job = Job.of_torch("torchkv, tcp", "torchkv", ([], prefix), "none")
                self._add("tcp", job)
            else:
                print("tcp is skipped: `unshare --mount` fails, so all is one host\n")
            if not options.no_mxnet and options.mxnet.exists():
                for type in ("dist_sync", "dist_async"):
                    job = Job.of_mxnet(f"MXNet, {type}", options.mxnet)
                    self._add(f"MXNet {type}", job)
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

    def find(self, contestant: str, type: str = "") -> Job | None:
        """The processes of a contestant, if it takes part."""
        return self._jobs.get(contestant) or self._jobs.get(f"{contestant} {type}")


def checked(job: Job, what: str) -> None:
    """Raises unless both ranks have the right values."""
    if not all(answer["agrees"] for answer in job.ask("check")):
        raise AssertionError(f"{what}: the values are not those of these steps")


def seconds_of(row: Row, answers: list[dict[str, Any]]) -> float:
    """A turn's seconds per step, on the slower rank."""
    middle = statistics.median if len(row.shapes) == 1 else statistics.fmean
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
            answers = turns[name].ask("run", way=JOBS[name][1], steps=row.steps)
            times[name].append(seconds_of(row, answers))
    for name, job in turns.items():
        checked(job, f"{name}, {row.title}")
    for job in set(turns.values()):
        job.ask("drop")
    return {"title": row.title, "type": row.type, "seconds": times}


def prepare(row: Row, job: Job, name: str) -> None:
    """Makes arrays, takes a step, and checks it."""
    way = JOBS[name][1]
    job.ask("prepare", type=row.type, shapes=row.shapes, lr=row.lr)
    job.ask("run", way=way, steps=1)
    checked(job, f"{name}, {row.title}")


def measure_behind(jobs: Jobs, rounds: int, smoke: bool) -> dict[str, Any] | None:
    """A pull of higher priority behind a large push, over tcp; None if not possible."""
    job = jobs.find("tcp")
    if job is None:
        return None
    namespaces = {answer["namespace"] for answer in job.ask("namespace")}
    assert len(namespaces) == 2, "the ranks are on one host"
    large: Shape = (10_000 if smoke else 25_000_000,)
    shapes = [large, *SMALL, *SMALL]  # integer keys alternate between the servers
    job.ask("prepare", type="dist_sync", shapes=shapes, lr=None, behind=True)
    seconds: Times = {BEHIND: [], PUSH: []}
    for _ in range(max(MIN_ROUNDS, rounds)):
        answers = job.ask("run", way="behind", steps=3)
        for name, field in {BEHIND: "seconds", PUSH: "pushes"}.items():
            both = zip(*(answer[field] for answer in answers), strict=True)
            seconds[name].extend(map(max, both))
    checked(job, BEHIND)
    job.ask("drop")
    return {"title": "64 B behind 100 MB, tcp", "seconds": seconds}


def measure_idle(jobs: Jobs, seconds: float) -> float:
    """The share of a core that an idle rank with an open store uses, in percent."""
    job = jobs.find("torchkv")
    assert job is not None
    job.ask("prepare", type="dist_sync", shapes=SMALL, lr=None)
    job.ask("run", way="pushpull", steps=10)
    share = max(answer["share"] for answer in job.ask("idle", seconds=seconds))
    job.ask("drop")
    return 100 * share


def ratio(times: Times, name: str, least: bool = False) -> float:
    """How many times as long as torchkv's steps another's take."""
    middle = min if least else statistics.median
    return middle(times[name]) / middle(times[OURS])


def table_of(measured: Mapping[str, Any]) -> Table:
    """The times, and their ratios to torchkv's where that takes part."""
    times = measured["seconds"]
    header = ["", "min", "median", "max"]
    lines = [
        [name, *min_and_median(each), *min_and_median([max(each)])[:1]]
        for name, each in times.items()
    ]
    if OURS in times:
        header += ["ratio of minima", "ratio of medians"]
        for line, name in zip(lines, times, strict=True):
            line += [
                f"{ratio(times, name, least=True):.2f}",
                f"{ratio(times, name):.2f}",
            ]
    return Table(measured["title"], header, lines)


def targets_of(
    cases: list[tuple[Row, dict[str, Any]]],
    behind: Mapping[str, Any] | None,
    idle: float,
) -> list[Target]:
    """All targets; ratios are those of medians."""
    targets = []
    for row, measured in cases:
        times = measured["seconds"]
        for name, limit in row.targets.items():
            value = ratio(times, name) if name in times else None
            what = f"{row.what}, {row.type}, faster than {name}"
            targets.append(Target(what, value, limit))
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
