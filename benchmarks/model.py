"""A training step's push and pull of real models' parameters: torchkv, torch, MXNet.

ResNet-50 in fp32, and in bf16 a transformer of 1.3 billion parameters, of which as many
layers are kept as memory holds. Four replicas push all keys in one call, four pull.

    python benchmarks/model.py [--json PATH] [--plot PATH] [--rounds N] [--smoke]
"""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

import torch

import contestants as ways
from contestants import Arrays, available_bytes
from harness import Plan, Times, median_ratio
from mxnet_peer import NAME as MXNET
from mxnet_peer import Case, MXNet, measure_beside
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
    contestants_table,
    draw_bars,
    environment,
    finish,
    parser,
    plan_for,
    start_mxnet,
)

REPLICAS = 4
# The part of the available memory that one list may use with all of its copies.
MEMORY_FRACTION = 0.7

OURS = "torchkv push, pull"
FOREACH = {
    "torch._foreach_add_, _foreach_copy_": ways.torch_foreach,
    "the same, by groups of keys": ways.torch_foreach_grouped,
    "torch.add(out=), then the same": ways.torch_add_foreach,
}
CONTESTANTS = {
    OURS: ways.torchkv_push_pull,
    "torchkv pushpull": ways.torchkv_pushpull,
    **FOREACH,
    "torch.add, copy_, key by key": ways.torch_add,
}
# A contestant's replicas, stored values and outs; besides, each of torchkv's two
# stores has its values, and there are the right sums.
ARRAYS = REPLICAS + 1 + REPLICAS
SHARED_COPIES = ARRAYS + 2 + 1
OWN_COPIES = ARRAYS * (len(CONTESTANTS) + 1) + 2 + 1  # one for MXNet

# MXNet's names. MXNet 1.9.1 has no bf16 in Python.
MXNET_DTYPES = {torch.float32: "float32"}

MXNET_TARGET = 3.8
FOREACH_TARGET = 1.5


class Model(NamedTuple):
    """A parameter list to measure."""

    name: str
    shapes: list[Shape]
    dtype: torch.dtype
    kept: str

    @property
    def num_bytes(self) -> int:
        """Of one copy."""
        return num_parameters(self.shapes) * self.dtype.itemsize

    @property
    def title(self) -> str:
        """What it is."""
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.name} ({self.kept}): {len(self.shapes)} keys, "
            f"{num_parameters(self.shapes) / 1e6:.1f} million parameters, {dtype}"
        )


def models(smoke: bool) -> list[Model]:
    """The lists; of the transformer, as many layers as memory holds of all copies."""
    if smoke:
        return [
            Model("ResNet-50", shrunk(resnet50()), torch.float32, "shrunk"),
            Model("OPT-1.3B", shrunk(opt_1_3b(1)), torch.bfloat16, "shrunk"),
        ]
    layers = opt_that_fits(
        MEMORY_FRACTION * available_bytes(), SHARED_COPIES * torch.bfloat16.itemsize
    )
    kept = f"{layers} of {OPT_LAYERS} layers"
    return [
        Model("ResNet-50", resnet50(), torch.float32, "whole"),
        Model("OPT-1.3B", opt_1_3b(layers), torch.bfloat16, kept),
    ]


def measure_model(model: Model, plan: Plan, mxnet: MXNet | None) -> dict[str, Any]:
    """A push of all keys from four replicas and a pull into four."""
    shared = OWN_COPIES * model.num_bytes > MEMORY_FRACTION * available_bytes()
    sums = ways.sums_of(model.shapes, model.dtype, REPLICAS)
    contestants, arrays = {}, None
    for name, way in CONTESTANTS.items():
        if arrays is None or not shared:
            arrays = Arrays(model.shapes, model.dtype, REPLICAS, REPLICAS)
        contestants[name] = ways.on(arrays, way(arrays), sums)
    dtype = MXNET_DTYPES.get(model.dtype, "")
    figures = measure_beside(
        mxnet if dtype else None,
        Case(model.shapes, dtype, REPLICAS, REPLICAS),
        contestants,
        plan,
    )
    return {
        "model": model.name,
        "kept": model.kept,
        "keys": len(model.shapes),
        "parameters": num_parameters(model.shapes),
        "dtype": str(model.dtype),
        "shared_arrays": shared,
        **figures,
    }


def fastest_foreach(times: Times) -> str:
    """The name of torch's fastest implementation."""
    return min(FOREACH, key=lambda name: statistics.median(times[name]))


def targets_of(resnet: Times) -> list[Target]:
    """The targets for ResNet-50."""
    what = "push, pull of ResNet-50, faster than"
    mxnet = median_ratio(resnet[MXNET], resnet[OURS]) if MXNET in resnet else None
    foreach = fastest_foreach(resnet)
    return [
        Target(f"{what} MXNet", mxnet, MXNET_TARGET),
        Target(
            f"{what} torch._foreach_* ({foreach})",
            median_ratio(resnet[foreach], resnet[OURS]),
            FOREACH_TARGET,
        ),
    ]


def draw(figure: Any, measured: dict[str, Times]) -> None:
    """A bar per contestant: its median, with a line at its minimum."""
    figure.set_size_inches(9, 6)
    medians = {
        title: {name: statistics.median(each) * 1e3 for name, each in times.items()}
        for title, times in measured.items()
    }
    panels = draw_bars(figure, medians, "milliseconds, median (black: minimum)")
    for axes, times in zip(panels, measured.values(), strict=True):
        for row, seconds in enumerate(times.values()):
            axes.plot([min(seconds) * 1e3] * 2, [row - 0.4, row + 0.4], color="black")


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints tables, and writes JSON and a plot if requested."""
    options = parser(__doc__ or "", rounds=25).parse_args(arguments)
    plan = plan_for(options, rounds=25, turn_s=0.1, budget_s=20)
    with start_mxnet(options) as mxnet:
        facts = environment(mxnet)
        lists = models(options.smoke)
        measured = {model.title: measure_model(model, plan, mxnet) for model in lists}

    seconds = {title: each["seconds"] for title, each in measured.items()}
    finish(
        options,
        {**facts, "models": list(measured.values())},
        [contestants_table(title, each, OURS) for title, each in measured.items()],
        targets_of(seconds[lists[0].title]),
        lambda figure: draw(figure, seconds),
    )


if __name__ == "__main__":
    main()
