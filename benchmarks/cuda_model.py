"""A training step's push and pull of real models' parameters on a GPU.

ResNet-50, and a decoder of 1.3 billion parameters with as many layers as fit, in fp32:
two replicas push all gradients in one call, SGD with momentum steps, and two pull.
Prints the GPU's time, by events, and the time that calls block the host.

    python benchmarks/cuda_model.py [--json PATH] [--plot PATH] [--rounds N] [--smoke]
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import torch

import contestants as ways
import gpu
from contestants import Arrays, Call
from cuda_optimizers import MOMENTUM
from harness import Contestant, Plan, Run, interleave, measure, median_ratio
from optimizers import TORCH, Torch, all_close, stepped
from parameter_lists import (
    OPT_LAYERS,
    Shape,
    num_parameters,
    opt_1_3b,
    opt_that_fits,
    resnet50,
    shrunk,
)
from report import (
    Target,
    collect,
    contestants_table,
    draw_bars,
    finish,
    plan_for,
)

REPLICAS = 2
OURS = "torchkv push, pull"
CLOCKS = {"GPU": "seconds", "host": "host_seconds"}

# In fp32: replicas, momentum and weight are read, the last two and both outs written;
# the pull reads the weight once more.
MOVED_PER_PARAMETER = 4 * (REPLICAS + 4 + 1 + REPLICAS)
# Replicas; values, state, gradients and outs of both; expected, pulled; copy_'s two.
HELD_PER_PARAMETER = 4 * (REPLICAS + 6 + 2 * REPLICAS + 2) + MOVED_PER_PARAMETER
MEMORY_FRACTION = 0.8

# With more, torch's launches for the large list would block on the GPU.
HOST_CALLS = 2

GPU_LIMIT_MS = 0.25
HOST_LIMIT_US = 60.0


def models(smoke: bool, device: str) -> dict[str, list[Shape]]:
    """Parameter lists by title."""
    if smoke:
        return {
            "ResNet-50 (shrunk)": shrunk(resnet50()),
            "OPT-1.3B (shrunk)": shrunk(opt_1_3b(1)),
        }
    layers = opt_that_fits(MEMORY_FRACTION * gpu.free_bytes(device), HELD_PER_PARAMETER)
    return {
        "ResNet-50": resnet50(),
        f"OPT-1.3B ({layers} of {OPT_LAYERS} layers)": opt_1_3b(layers),
    }


def host_timed(call: Call) -> Run:
    """Measures how long calls block the host."""
    return lambda count: gpu.seconds_of_host(itertools.repeat(call), count)


def measure_model(shapes: list[Shape], plan: Plan, device: str) -> dict[str, Any]:
    """Seconds of the GPU and of the host for each contestant."""
    expected = stepped(MOMENTUM, shapes, torch.float32, REPLICAS, device)
    arrays = Arrays(shapes, torch.float32, REPLICAS, REPLICAS, device)
    store, keys = ways.store_for(arrays, "device")
    store.set_optimizer(MOMENTUM.ours())

    def push_pull() -> None:
        store.push(keys, arrays.values)
        store.pull(keys, out=arrays.outs)

    torchs = Torch(MOMENTUM, arrays.with_own_results())
    calls: dict[str, Call] = {OURS: push_pull, TORCH: torchs.push_pull}
    results = {OURS: lambda: store.pull(keys), TORCH: lambda: torchs.stored}
    contestants = {
        name: Contestant(
            gpu.timed([call], device),
            lambda name=name: all_close(results[name](), expected),
        )
        for name, call in calls.items()
    }
    moved = MOVED_PER_PARAMETER * num_parameters(shapes)
    contestants[gpu.COPY] = gpu.copy_of(moved, 1, device)
    seconds = measure(contestants, plan)
    host = interleave(
        {name: host_timed(call) for name, call in calls.items()},
        dict.fromkeys(calls, HOST_CALLS),
        plan.rounds,
    )
    return {
        "keys": len(shapes),
        "parameters": num_parameters(shapes),
        "moved_bytes": moved,
        "seconds": seconds,
        "host_seconds": host,
    }


def targets_of(title: str, resnet: dict[str, Any]) -> list[Target]:
    """The targets for ResNet-50."""
    seconds, host = resnet["seconds"], resnet["host_seconds"]
    return [
        Target(
            f"push, pull of {title}, GPU",
            statistics.median(seconds[OURS]) * 1e3,
            GPU_LIMIT_MS,
            at_least=False,
            unit="ms",
        ),
        Target(
            f"push, pull of {title}, host",
            statistics.median(host[OURS]) * 1e6,
            HOST_LIMIT_US,
            at_least=False,
            unit="us",
        ),
        Target(
            f"push, pull of {title}, faster than torch",
            median_ratio(seconds[TORCH], seconds[OURS]),
            1.0,
        ),
    ]


def draw(figure: Any, measured: dict[str, dict[str, Any]]) -> None:
    """A bar per contestant, its median: first of the GPU, then of the host."""
    figure.set_size_inches(9, 8)
    medians = {
        f"{title}, {what}": {
            name: statistics.median(each) * 1e3 for name, each in figures[key].items()
        }
        for title, figures in measured.items()
        for what, key in CLOCKS.items()
    }
    if medians:
        draw_bars(figure, medians, "milliseconds, median")


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints tables, and writes JSON and a plot if requested."""
    options = gpu.parse(__doc__ or "", 25, arguments)
    plan = plan_for(options, rounds=25, turn_s=0.005, budget_s=5)
    facts = gpu.facts(options.device)
    lists = models(options.smoke, options.device)
    figures = collect(
        options,
        facts,
        "models",
        (
            {"model": title, **measure_model(shapes, plan, options.device)}
            for title, shapes in lists.items()
        ),
    )
    measured = {each["model"]: each for each in figures}
    finish(
        options,
        {**facts, "models": figures},
        [
            contestants_table(
                f"{title}, {figures['keys']} keys, {what}",
                {"seconds": figures[key], "mxnet": {}},
                OURS,
            )
            for title, figures in measured.items()
            for what, key in CLOCKS.items()
        ],
        targets_of(figures[0]["model"], figures[0]) if figures else [],
        lambda figure: draw(figure, measured),
    )


if __name__ == "__main__":
    main()
