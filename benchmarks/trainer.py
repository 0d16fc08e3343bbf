"""A step of the Trainer with one replica, beside a fused step of torch.optim.

Both have the gradients in ``.grad``, step, and set ``.grad`` to None. The Trainer's
weights are the stored values themselves, so nothing is copied. On one thread.

    python benchmarks/trainer.py [--json PATH] [--plot PATH] [--rounds N] [--smoke]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import torchkv
from harness import Contestant, Plan, measure, median_ratio, timed
from parameter_lists import Shape, resnet50, shrunk
from report import (
    Target,
    contestants_table,
    draw_times,
    environment,
    finish,
    parser,
    plan_for,
)

OURS, TORCH = "torchkv Trainer", "torch.optim.AdamW, fused"
TARGET = 1.1
LR = 0.125
MIB_64 = 1 << 24  # elements in fp32


class Weights:
    """Parameters and their gradients, the same for both."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        """Makes them, and writes to them."""
        generator = torch.Generator().manual_seed(0)
        self.gradients = [torch.randn(shape, generator=generator) for shape in shapes]
        self.parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]

    def set_gradients(self) -> None:
        """What backward does."""
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient

    def values(self) -> list[Tensor]:
        """The weights."""
        return [parameter.detach() for parameter in self.parameters]


def contestants(shapes: Sequence[Shape]) -> dict[str, Contestant]:
    """Both ways to make a step; the first call is compared."""
    ours, theirs, first = (Weights(shapes) for _ in range(3))
    trainer = torchkv.Trainer(
        ours.parameters, torchkv.optim.AdamW(lr=LR, weight_decay=0.01)
    )
    optimizer = torch.optim.AdamW(theirs.parameters, lr=LR, fused=True)

    def our_step() -> None:
        ours.set_gradients()
        trainer.step()

    def their_step() -> None:
        theirs.set_gradients()
        optimizer.step()
        optimizer.zero_grad()

    first.set_gradients()
    torch.optim.AdamW(first.parameters, lr=LR, foreach=False).step()

    def agrees(found: Weights) -> bool:
        return all(
            torch.allclose(a, b, rtol=1e-5, atol=1e-7)
            for a, b in zip(found.values(), first.values(), strict=True)
        )

    return {
        OURS: Contestant(timed(our_step), lambda: agrees(ours)),
        TORCH: Contestant(timed(their_step), lambda: agrees(theirs)),
    }


def measure_list(title: str, shapes: Sequence[Shape], plan: Plan) -> dict[str, Any]:
    """Seconds per step of both."""
    num_bytes = 4 * sum(torch.Size(shape).numel() for shape in shapes)
    return {
        "weights": title,
        "bytes": num_bytes,
        "seconds": measure(contestants(shapes), plan),
    }


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints tables, and writes JSON and a plot if requested."""
    options = parser(__doc__ or "", rounds=51).parse_args(arguments)
    plan = plan_for(options, rounds=51, turn_s=0.1, budget_s=40)
    smoke = options.smoke
    torch.set_num_threads(1)
    lists: dict[str, list[Shape]] = {
        "one of 64 MiB": [(1000 if smoke else MIB_64,)],
        "ResNet-50": shrunk(resnet50()) if smoke else resnet50(),
    }
    measured = [measure_list(title, shapes, plan) for title, shapes in lists.items()]
    seconds = {each["weights"]: each["seconds"] for each in measured}
    finish(
        options,
        {**environment(None), "trainer": measured},
        [
            contestants_table(f"a step of AdamW, {each['weights']}", each, OURS)
            for each in measured
        ],
        [
            Target(
                f"a step of AdamW, {title}, of torch's time",
                median_ratio(times[OURS], times[TORCH]),
                TARGET,
                False,
            )
            for title, times in seconds.items()
        ],
        lambda figure: draw_times(figure, seconds, OURS),
    )


if __name__ == "__main__":
    main()
