"""Throughput of a push, compared with torch, MXNet and the memory bandwidth.

A push of n replicas moves n + 1 times their bytes: n are read, the sum is written. The
bound is what ``torch.add(a, b, out=c)`` moves in fp32: two are read, one is written.

    python benchmarks/reduce.py [--json PATH] [--plot PATH] [--rounds N] [--smoke]
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any, NamedTuple

import torch

import contestants as ways
from contestants import Arrays, available_bytes
from harness import Contestant, Plan, Times, measure, median_ratio
from mxnet_peer import NAME as MXNET
from mxnet_peer import Case, Choice, MXNet, fastest, measure_beside
from report import (
    Table,
    Target,
    contestants_table,
    environment,
    finish,
    min_and_median,
    parser,
    plan_for,
    start_mxnet,
)

BOUND = "torch.add(a, b, out=c)"
OURS = "torchkv push"
CHAIN = "torch.add"
STACK = "torch.stack().sum()"
FOREACH = "torch._foreach_add_"
PEERS = {CHAIN: ways.torch_add, STACK: ways.torch_stack, FOREACH: ways.torch_foreach}

BOTH = "torchkv push, pull"
AT_ONCE = "torchkv pushpull"
PULL_PEERS = {
    BOTH: ways.torchkv_push_pull,
    AT_ONCE: ways.torchkv_pushpull,
    "torch.add, copy_": ways.torch_add,
}

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# MXNet 1.9.1 has no bf16 in Python.
MXNET_DTYPES = {"fp32": "float32", "fp16": "float16"}

# Relative to the bound's bytes per second, and to MXNet's speed.
PUSH_TARGETS = {"fp32": 1.05, "bf16": 0.95, "fp16": 0.95}
MXNET_TARGET = 3.8

# MXNet's fastest configuration is searched up to this size. Above it, they differ less
# and take long to try, so the one for this size is used.
CHOOSE_UP_TO = 1_000_000

# Contestants have their own arrays if all of them take at most this part of the
# available memory; otherwise they share. A case that still does not fit is skipped.
OWN_FRACTION = 0.5
SHARED_FRACTION = 0.9


class Sizes(NamedTuple):
    """The sizes and the duration of a run."""

    replicas: list[int]
    elements: list[int]
    large: int
    grid_plan: Plan
    large_plan: Plan


def sizes_for(options: argparse.Namespace) -> Sizes:
    """Minutes on two cores; seconds for a smoke run."""
    plans = (
        plan_for(options, rounds=11, turn_s=0.02, budget_s=0.8),
        plan_for(options, rounds=25, turn_s=0.1, budget_s=15),
    )
    if options.smoke:
        return Sizes([1, 4], [1000, 10_000], 10_000, *plans)
    return Sizes([1, 2, 4, 8], [10**k for k in range(3, 9)], 25_000_000, *plans)


# --- 4 x 25 million elements --------------------------------------------------


def measure_push(elements: int, plan: Plan) -> Times:
    """A push of four replicas in every dtype, and the bound."""
    shapes = [(elements,)]
    contestants = {BOUND: ways.bound(elements)}
    for name, dtype in DTYPES.items():
        arrays = Arrays(shapes, dtype, 4, 0)
        contestants[name] = ways.torchkv_push(arrays, ways.sums_of(shapes, dtype, 4))
    return measure(contestants, plan)


def measure_push_pull(elements: int, plan: Plan, mxnet: MXNet | None) -> dict[str, Any]:
    """A push of four fp32 replicas and a pull into four outs."""
    shapes = [(elements,)]
    sums = ways.sums_of(shapes, torch.float32, 4)
    contestants = {}
    for name, way in PULL_PEERS.items():
        arrays = Arrays(shapes, torch.float32, 4, 4)
        contestants[name] = ways.on(arrays, way(arrays), sums)
    return measure_beside(mxnet, Case(shapes, "float32", 4, 4), contestants, plan)


def push_table(times: Times, elements: int) -> Table:
    """Bytes per second of every dtype, compared with the bound."""
    rows = []
    for name, seconds in times.items():
        ratio = "" if name == BOUND else f"{of_bound(times, name):.2f}"
        moved = moved_bytes(name) * elements
        rows.append(
            [
                name if name == BOUND else f"{OURS}, {name}",
                *min_and_median(seconds),
                gigabytes(moved, seconds),
                ratio,
            ]
        )
    title = f"Push of 4 x {elements:,} elements"
    return Table(title, ["contestant", "min", "median", "GB/s", "of the bound"], rows)


def moved_bytes(name: str) -> int:
    """The bytes per element that the bound, or a push of four, moves."""
    return 3 * 4 if name == BOUND else 5 * DTYPES[name].itemsize


def of_bound(times: Times, name: str) -> float:
    """Its bytes per second, relative to the bound."""
    faster = median_ratio(times[BOUND], times[name])
    return faster * moved_bytes(name) / moved_bytes(BOUND)


def gigabytes(moved: int, seconds: list[float]) -> str:
    """Gigabytes per second of the median round."""
    return f"{moved / statistics.median(seconds) / 1e9:.1f}"


# --- the grid -----------------------------------------------------------------


def needed_bytes(replicas: int, elements: int, dtype: torch.dtype, shared: bool) -> int:
    """The memory of a case: replicas of every set, stack and MXNet; sums; the bound."""
    sets = 1 if shared else 1 + len(PEERS)
    tensors = (sets + 2) * replicas + 2 * sets + 4
    return tensors * elements * dtype.itemsize + 4 * elements * 4


def grid_contestants(
    replicas: int, elements: int, dtype: torch.dtype, shared: bool
) -> dict[str, Contestant]:
    """All contestants of this process."""
    shapes = [(elements,)]
    sums = ways.sums_of(shapes, dtype, replicas)
    arrays = Arrays(shapes, dtype, replicas, 0)
    contestants = {
        BOUND: ways.bound(elements),
        OURS: ways.torchkv_push(arrays, sums),
    }
    for name, way in PEERS.items():
        if not shared:
            arrays = Arrays(shapes, dtype, replicas, 0)
        contestants[name] = ways.on(arrays, way(arrays), sums)
    return contestants


def measure_grid(sizes: Sizes, mxnet: MXNet | None) -> list[dict[str, Any]]:
    """A push of every dtype, number of replicas and size that memory allows."""
    cases = []
    for dtype_name, dtype in DTYPES.items():
        for replicas in sizes.replicas:
            choice: Choice | None = None
            for elements in sizes.elements:
                available = available_bytes()
                shape = (replicas, elements, dtype)
                if needed_bytes(*shape, shared=True) > SHARED_FRACTION * available:
                    print(f"not enough memory: {replicas} x {elements:,} {dtype_name}")
                    continue
                shared = needed_bytes(*shape, shared=False) > OWN_FRACTION * available
                contestants = grid_contestants(*shape, shared)
                # MXNet's push of one array only stores a reference.
                if mxnet and dtype_name in MXNET_DTYPES and replicas > 1:
                    case = Case([(elements,)], MXNET_DTYPES[dtype_name], replicas, 0)
                    if choice is None or elements <= CHOOSE_UP_TO:
                        choice = fastest(mxnet.try_all(case), "default")
                    contestants[MXNET] = mxnet.prepare(case, choice)
                times = measure(contestants, sizes.grid_plan)
                del contestants
                if mxnet:
                    mxnet.drop()
                cases.append(
                    {
                        "dtype": dtype_name,
                        "replicas": replicas,
                        "elements": elements,
                        "bytes": (replicas + 1) * elements * dtype.itemsize,
                        "bound_bytes": 3 * elements * 4,
                        "shared_arrays": shared,
                        "mxnet": {MXNET: str(choice)} if MXNET in times else {},
                        "seconds": times,
                    }
                )
    return cases


def grid_table(cases: list[dict[str, Any]], mxnet: bool) -> Table:
    """A line per case: torchkv's times and its speed-up over each peer."""
    peers = [*PEERS, *([MXNET] if mxnet else [])]
    rows = []
    for case in cases:
        times = case["seconds"]
        of_bound = median_ratio(times[BOUND], times[OURS])
        of_bound *= case["bytes"] / case["bound_bytes"]
        rows.append(
            [
                f"{case['dtype']}, {case['replicas']} x {case['elements']:.0e}",
                *min_and_median(times[OURS]),
                gigabytes(case["bytes"], times[OURS]),
                f"{of_bound:.2f}",
                *(
                    f"{median_ratio(times[peer], times[OURS]):.2f}"
                    if peer in times
                    else ""
                    for peer in peers
                ),
            ]
        )
    header = ["push", "min", "median", "GB/s", "of the bound", *peers]
    return Table("Every size: torchkv, and the others' time against it", header, rows)


def draw(figure: Any, cases: list[dict[str, Any]]) -> None:
    """Gigabytes per second by size: a panel per dtype and number of replicas."""
    figure.set_size_inches(14, 9)
    dtypes = list(dict.fromkeys(case["dtype"] for case in cases))
    counts = list(dict.fromkeys(case["replicas"] for case in cases))
    panels = figure.subplots(len(dtypes), len(counts), sharex=True, squeeze=False)
    for row, dtype in enumerate(dtypes):
        for column, count in enumerate(counts):
            axes = panels[row][column]
            axes.set_title(f"{dtype}, {count} x", fontsize="medium")
            axes.set_xscale("log")
            axes.grid(alpha=0.3)
            for name, color in COLORS.items():
                points = [
                    (case["elements"], rate(case, name))
                    for case in cases
                    if (case["dtype"], case["replicas"]) == (dtype, count)
                    and name in case["seconds"]
                ]
                if points:
                    style = "--" if name == BOUND else "-"
                    axes.plot(
                        *zip(*points, strict=True), style, color=color, label=name
                    )
    for axes in panels[-1]:
        axes.set_xlabel("elements per replica")
    handles, labels = panels[0][-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.supylabel("GB/s: n read and one written")


COLORS = {
    BOUND: "black",
    OURS: "tab:blue",
    CHAIN: "tab:orange",
    STACK: "tab:green",
    FOREACH: "tab:purple",
    MXNET: "tab:red",
}


def rate(case: dict[str, Any], name: str) -> float:
    """Gigabytes per second of the median round."""
    moved = case["bound_bytes"] if name == BOUND else case["bytes"]
    return float(moved / statistics.median(case["seconds"][name]) / 1e9)


def targets_of(push: Times, both: Times, elements: int) -> list[Target]:
    """The targets for four replicas."""
    size = f"4 x {elements:,}"
    targets = [
        Target(f"push of {size} {name}, of the bound", of_bound(push, name), limit)
        for name, limit in PUSH_TARGETS.items()
    ]
    faster = median_ratio(both[MXNET], both[BOTH]) if MXNET in both else None
    what = f"push, pull of {size} fp32, faster than MXNet"
    return [*targets, Target(what, faster, MXNET_TARGET)]


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints tables, and writes JSON and a plot if requested."""
    options = parser(__doc__ or "", rounds=25).parse_args(arguments)
    sizes = sizes_for(options)
    with start_mxnet(options) as mxnet:
        facts = environment(mxnet)
        push = measure_push(sizes.large, sizes.large_plan)
        both = measure_push_pull(sizes.large, sizes.large_plan, mxnet)
        cases = measure_grid(sizes, mxnet)

    targets = targets_of(push, both["seconds"], sizes.large)
    figures = {
        **facts,
        "large_elements": sizes.large,
        "push_seconds": push,
        "push_pull": both,
        "grid": cases,
    }
    tables = [
        push_table(push, sizes.large),
        contestants_table(
            f"Push of 4 x {sizes.large:,} fp32 and pull into 4", both, BOTH
        ),
        grid_table(cases, mxnet is not None),
    ]
    finish(options, figures, tables, targets, lambda figure: draw(figure, cases))


if __name__ == "__main__":
    main()
