"""Shared by the GPU benchmarks: the device, its clock, rotating memory."""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import report
from contestants import Call, available_bytes
from harness import Contestant, Plan, Run

COPY = "copy_ of as many bytes"

# Calls that are enqueued together, so that no launch blocks on a full queue,
# which holds about 1000.
BATCH = 16
# The GPU waits while the host enqueues a batch, but no longer than this.
MAX_DELAY_S = 0.02


def parse(doc: str, rounds: int, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The common options and ``--device``; exits if the device is missing."""
    parser = report.parser(doc, rounds)
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda",
        help="cpu: the same calls without a GPU, to check that they run",
    )
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            f"{parser.prog}: torch {torch.__version__} can use no GPU here; "
            "--device cpu makes the same calls without one"
        )
    return options


def facts(device: str) -> dict[str, Any]:
    """Versions and the machine, with its GPU."""
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    return {**report.environment(None), "gpu": gpu, "cuda": torch.version.cuda}


def free_bytes(device: str) -> int:
    """The available memory of the device."""
    if device == "cpu":
        return available_bytes()
    gc.collect()  # torch's optimizers are in reference cycles
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def num_turns(turn_bytes: int, rotated_bytes: int) -> int:
    """How many sets of tensors to rotate, so that none is still in a cache."""
    return -(-rotated_bytes // turn_bytes)


def timed(calls: Sequence[Call], device: str) -> Run:
    """Makes the calls in turn, and returns the device's time.

    The first run makes each call once, so that allocations and loading are done and
    all results can be checked.
    """
    turns = itertools.cycle(calls)
    seconds = seconds_of_gpu() if device == "cuda" else seconds_of_host
    is_first = True

    def run(count: int) -> float:
        nonlocal is_first
        made = len(calls) if is_first else count
        is_first = False
        return seconds(turns, made) * count / made

    return run


def seconds_of_host(turns: Iterator[Call], count: int) -> float:
    """How long calls block the host; the queue is empty before every batch."""
    total = 0.0
    for batch in batches(count):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        for call in itertools.islice(turns, batch):
            call()
        total += time.perf_counter() - start
    return total


def seconds_of_gpu() -> Callable[[Iterator[Call], int], float]:
    """A clock of the GPU alone, started after the host has enqueued the calls."""
    cycles_per_s = clock_rate()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    delay_s = 0.001

    def seconds(turns: Iterator[Call], count: int) -> float:
        nonlocal delay_s
        total = 0.0
        for batch in batches(count):
            torch.cuda._sleep(int(delay_s * cycles_per_s))
            begin.record()
            start = time.perf_counter()
            for call in itertools.islice(turns, batch):
                call()
            # From this batch for the next, with some margin.
            delay_s = min(1.5 * (time.perf_counter() - start), MAX_DELAY_S)
            end.record()
            end.synchronize()
            total += begin.elapsed_time(end) / 1e3
        return total

    return seconds


def batches(count: int) -> Iterator[int]:
    """The count, in parts of at most BATCH."""
    for made in range(0, count, BATCH):
        yield min(BATCH, count - made)


@functools.cache
def clock_rate() -> float:
    """The cycles of ``_sleep`` in a second."""
    cycles = 20_000_000
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):  # the first also warms up the GPU
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
    return cycles / begin.elapsed_time(end) * 1e3


def copy_of(num_bytes: int, rotated_bytes: int, device: str) -> Contestant:
    """The bound: ``copy_`` of as many bytes, half of them read and half written."""
    elements = max(1, num_bytes // 8)
    pairs = [
        (torch.ones(elements, device=device), torch.zeros(elements, device=device))
        for _ in range(num_turns(num_bytes, rotated_bytes))
    ]
    calls: list[Call] = [lambda pair=pair: pair[1].copy_(pair[0]) for pair in pairs]
    return Contestant(
        timed(calls, device), lambda: all(torch.equal(*pair) for pair in pairs)
    )


def measure_cases(
    doc: str,
    title: str,
    cases: Callable[[Plan, bool, str], Iterator[dict[str, Any]]],
    targets_of: Callable[[list[dict[str, Any]]], list[report.Target]],
    arguments: Sequence[str] | None,
) -> None:
    """The main program of a benchmark whose cases are independent.

    Args:
        doc: the benchmark's documentation, for ``--help``.
        title: that of the table.
        cases: makes the cases' figures one after the other, from a plan, whether it is
            a smoke run, and the device.
        targets_of: the targets for the cases that were measured.
        arguments: those of the command line; None: this process's.
    """
    options = parse(doc, 25, arguments)
    plan = report.plan_for(options, rounds=25, turn_s=0.005, budget_s=2)
    environment = facts(options.device)
    figures = report.collect(
        options, environment, "cases", cases(plan, options.smoke, options.device)
    )
    report.finish(
        options,
        {**environment, "cases": figures},
        [cases_table(title, figures)] if figures else [],
        targets_of(figures),
        lambda figure: draw_cases(figure, figures),
    )


def cases_table(title: str, figures: list[dict[str, Any]]) -> report.Table:
    """A line per contestant of each case, and per clock."""
    keys = {"seconds": "", "host_seconds": ", host", "second_call": ", once more"}
    rows = [
        [
            f"{figure['case']}: {name}{what}",
            report.duration(min(times)),
            report.duration(statistics.median(times)),
        ]
        for figure in figures
        for key, what in keys.items()
        for name, times in figure.get(key, {}).items()
    ]
    return report.Table(title, ["case", "min", "median"], rows)


def draw_cases(figure: Any, figures: list[dict[str, Any]]) -> None:
    """A bar per contestant of each case: its median."""
    figure.set_size_inches(9, 8)
    medians = {
        each["case"]: {
            name: statistics.median(times) * 1e3
            for name, times in each["seconds"].items()
        }
        for each in figures
    }
    if medians:
        report.draw_bars(figure, medians, "milliseconds, median")
