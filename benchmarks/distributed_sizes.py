"""The time of a sum over ranks by its size: torchkv's carriers, MXNet, Gloo.

One value, summed over 2, 3 and 4 ranks of one thread each, without an optimizer:
`pushpull` through shared memory, sockets of the file system and tcp; MXNet's
`pushpull`; Gloo's `all_reduce` in place, after a copy.

    python benchmarks/distributed_sizes.py [--json PATH] [--plot PATH] [--smoke]
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from typing import Any

import torch

from harness import Times
from jobs import Job, prefix_of_other_host
from report import Table, environment, finish, min_and_median, parser

ROUNDS = 7
MIN_ROUNDS = 3
SETTLE_S = 0.03  # between turns, until the others' threads sleep
TURN_S = 0.2
NUM_RANKS = (2, 3, 4)
SIZES = [16, 256, 4_096, 65_536, 1_048_576, 25_000_000]  # elements of fp32

MEMORY = "torchkv, shared memory"
SOCKETS = "torchkv, sockets"
TCP = "torchkv, tcp"
MXNET = "MXNet"
GLOO = "Gloo"
COLORS = {
    MEMORY: "tab:blue",
    SOCKETS: "tab:cyan",
    TCP: "tab:purple",
    MXNET: "tab:red",
    GLOO: "tab:gray",
}
NAMES = {MXNET: "pushpull", GLOO: "gloo-sum"}  # in the jobs; torchkv's: "torchkv"


def start(options: argparse.Namespace, num_ranks: int) -> dict[str, Job]:
    """The jobs of all contestants that take part."""
    jobs = {
        MEMORY: Job.of_torch(MEMORY, "torchkv", num_ranks),
        SOCKETS: Job.of_torch(
            SOCKETS, "torchkv", num_ranks, environment={"TORCHKV_SHARED_MEMORY": "0"}
        ),
    }
    if prefix := prefix_of_other_host():
        # The last rank is on the other host: the others share a host, with ipc.
        jobs[TCP] = Job.of_torch(
            TCP,
            "torchkv",
            num_ranks,
            other_host=prefix,
            environment={"TORCHKV_SHARED_MEMORY": "0"},
        )
    if not options.no_mxnet and options.mxnet.exists():
        jobs[MXNET] = Job.of_mxnet(MXNET, options.mxnet, num_ranks)
    return {**jobs, GLOO: Job.of_torch(GLOO, "gloo", num_ranks)}


def ask(jobs: dict[str, Job], name: str, do: str, **arguments: Any) -> list[Any]:
    """The ranks' answers."""
    contestant = NAMES.get(name, "torchkv")
    return jobs[name].ask(do, contestant=contestant, **arguments)


def seconds_of(answers: list[dict[str, Any]]) -> float:
    """The median of a turn's steps, on the slowest rank."""
    return max(statistics.median(answer["seconds"]) for answer in answers)


def check(jobs: dict[str, Job]) -> None:
    """Raises unless all ranks of all contestants have the sum."""
    for name in jobs:
        if not all(answer["agrees"] for answer in ask(jobs, name, "check")):
            raise AssertionError(f"{name}: wrong sums")


def measure(
    jobs: dict[str, Job], num_ranks: int, size: int, rounds: int
) -> dict[str, Any]:
    """All contestants' times, interleaved."""
    steps = {}
    for name in jobs:
        ask(
            jobs,
            name,
            "prepare",
            type="dist_sync",
            shapes=[(size,)],
            optimizer=None,
            lr=0.0,
        )
        first = seconds_of(ask(jobs, name, "run", steps=3))
        steps[name] = max(3, min(300, int(TURN_S / first)))
    check(jobs)
    times: Times = {name: [] for name in jobs}
    order = list(jobs)
    for _ in range(max(MIN_ROUNDS, rounds)):
        random.Random(size).shuffle(order)
        for name in order:
            time.sleep(SETTLE_S)
            answers = ask(jobs, name, "run", steps=steps[name])
            times[name].append(seconds_of(answers))
    check(jobs)
    for job in jobs.values():
        job.ask("drop")
    return {"ranks": num_ranks, "elements": size, "seconds": times}


def tables_of(cases: list[dict[str, Any]]) -> list[Table]:
    """One for each number of ranks: medians, and how many times as long Gloo's are."""
    tables = []
    for num_ranks in dict.fromkeys(case["ranks"] for case in cases):
        of_ranks = [case for case in cases if case["ranks"] == num_ranks]
        names = list(of_ranks[0]["seconds"])
        lines = []
        for case in of_ranks:
            seconds = case["seconds"]
            middle = {name: statistics.median(seconds[name]) for name in names}
            lines.append(
                [
                    f"{4 * case['elements']:,} B",
                    *(min_and_median(seconds[name])[1] for name in names),
                    f"{middle[GLOO] / middle[MEMORY]:.2f}",
                ]
            )
        header = ["", *names, f"{GLOO} / {MEMORY}"]
        tables.append(Table(f"{num_ranks} ranks, medians", header, lines))
    return tables


def draw(figure: Any, cases: list[dict[str, Any]]) -> None:
    """Time by size: a panel per number of ranks."""
    counts = list(dict.fromkeys(case["ranks"] for case in cases))
    figure.set_size_inches(5 * len(counts), 5)
    panels = figure.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    for axes, count in zip(panels, counts, strict=True):
        of_ranks = [case for case in cases if case["ranks"] == count]
        for name in of_ranks[0]["seconds"]:
            points = [
                (4 * case["elements"], 1e3 * statistics.median(case["seconds"][name]))
                for case in of_ranks
            ]
            axes.plot(
                *zip(*points, strict=True), marker=".", color=COLORS[name], label=name
            )
        axes.set_title(f"{count} ranks", fontsize="medium")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("bytes")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("milliseconds, median")
    panels[0].legend()


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints tables, and writes JSON and a plot if requested."""
    options = parser(__doc__ or "", rounds=ROUNDS).parse_args(arguments)
    rounds = options.rounds or (MIN_ROUNDS if options.smoke else ROUNDS)
    torch.set_num_threads(1)
    facts = {**environment(None), "mxnet": None}
    cases = []
    for num_ranks in NUM_RANKS[:1] if options.smoke else NUM_RANKS:
        jobs = start(options, num_ranks)
        with contextlib.ExitStack() as stack:
            for job in jobs.values():
                stack.enter_context(job)
            if MXNET in jobs:
                facts["mxnet"] = jobs[MXNET].ask("versions")[0]
            for size in SIZES[:2] if options.smoke else SIZES:
                cases.append(measure(jobs, num_ranks, size, rounds))
    finish(
        options,
        {**facts, "cases": cases},
        tables_of(cases),
        [],
        lambda figure: draw(figure, cases),
    )


if __name__ == "__main__":
    main()
