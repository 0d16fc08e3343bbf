"""Gradient compression: pushes of four replicas with each codec, and single codecs.

A push with a codec is compared with one without; ``2bit`` with MXNet's; ``topk`` with
PyTorch's operators, which keep the residual as well; ``int4`` with ``torch.add``, by
the bytes they read.

    python benchmarks/compression.py [--json PATH] [--plot PATH] [--rounds N] [--smoke]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import torchkv
from contestants import filled
from harness import Contestant, Plan, Times, measure, median_ratio, timed
from mxnet_peer import NAME as MXNET
from mxnet_peer import Case, MXNet, measure_beside
from peers.pattern import replica_pattern, sign_pattern
from report import (
    Target,
    contestants_table,
    draw_times,
    environment,
    finish,
    parser,
    plan_for,
    start_mxnet,
)
from torchkv.compression import BF16, FP8, FP16, Codec, Int4, OneBit, TopK, TwoBit

REPLICAS = 4
FULL, SMOKE = 25_000_000, 2_000
PLAIN = "without"
CODECS: list[Codec] = [
    OneBit(),
    TwoBit(),
    FP16(),
    BF16(),
    FP8(),
    Int4(),
    TopK(ratio=0.01),
]
TORCH = "torch"
OURS = "torchkv push"

TWO_BIT_TARGET = 1.5
MXNET_TARGET = 4.0
INT4_TARGET = 0.5

PUSHES = "4 replicas"
ONE_TWO_BIT = "2bit, one replica"
ONE_TOPK = "topk of 1 %, one replica"
ONE_INT4 = "int4, one replica"


class TorchTopK:
    """What TopK does, with PyTorch's operators."""

    def __init__(self, value: Tensor, count: int) -> None:
        """Without a residual."""
        self.value, self.count = value, count
        self.residual = torch.zeros_like(value)
        self.sent = torch.zeros_like(value)

    def push(self) -> None:
        """Sends the largest elements, and keeps the others."""
        self.residual += self.value
        index = torch.topk(self.residual.abs(), self.count, sorted=False).indices
        self.sent.zero_()
        self.sent[index] = self.residual[index]
        self.residual[index] = 0


def store_with(codec: Codec | None, num_elements: int) -> torchkv.KVStore:
    """A store with a value of zeros."""
    store = torchkv.create("device")
    store.init("w", torch.zeros(num_elements))
    store.set_gradient_compression(codec)
    return store


def contestant(
    call: Callable[[], object], found: Callable[[], Tensor], expected: Tensor
) -> Contestant:
    """A contestant whose first call must add up about what was pushed."""

    def agrees() -> bool:
        value = found()
        # Each codec loses something else: the direction stays.
        cosine = torch.nn.functional.cosine_similarity(value, expected, dim=0)
        return bool(value.isfinite().all()) and cosine.item() > 0.2

    return Contestant(timed(call), agrees)


def push_of(codec: Codec | None, values: list[Tensor]) -> Contestant:
    """A push of all replicas."""
    store = store_with(codec, values[0].numel())
    return contestant(
        lambda: store.push("w", values), lambda: store.pull("w"), sum(values)
    )


def measure_two_bit(
    num_elements: int, plan: Plan, mxnet: MXNet | None
) -> dict[str, Any]:
    """A push of one replica with 2bit, beside MXNet's."""
    threshold, shape = 1.0, (num_elements,)
    value = filled(shape, torch.float32, replica_pattern(0, 0))
    store = store_with(TwoBit(threshold), num_elements)
    ours = Contestant(
        timed(lambda: store.push("w", value)),
        lambda: torch.equal(
            store.pull("w"), filled(shape, torch.float32, sign_pattern(0, 1))
        ),
    )
    compression = {"type": "2bit", "threshold": threshold}
    case = Case([shape], "float32", replicas=1, outs=0, compression=compression)
    return measure_beside(mxnet, case, {OURS: ours}, plan)


def measure_all(num_elements: int, plan: Plan) -> dict[str, Times]:
    """The times of the other tables."""
    values = [torch.randn(num_elements) for _ in range(REPLICAS)]
    pushes: dict[str, Contestant] = {PLAIN: push_of(None, values)}
    pushes |= {codec.type: push_of(codec, values) for codec in CODECS}
    result = {PUSHES: measure(pushes, plan)}
    del pushes

    value = values[0]
    torchs = TorchTopK(value, max(1, num_elements // 100))
    result[ONE_TOPK] = measure(
        {
            OURS: push_of(TopK(ratio=0.01), [value]),
            TORCH: contestant(torchs.push, lambda: torchs.sent, value),
        },
        plan,
    )
    out = torch.empty(num_elements)
    result[ONE_INT4] = measure(
        {
            OURS: push_of(Int4(), [value]),
            TORCH: contestant(
                lambda: torch.add(value, values[1], out=out), lambda: out, value
            ),
        },
        plan,
    )
    return result


def targets_of(seconds: dict[str, Times], two_bit: Times) -> list[Target]:
    """Of all tables."""
    pushes = seconds[PUSHES]
    faster = median_ratio(two_bit[MXNET], two_bit[OURS]) if MXNET in two_bit else None
    topk, int4 = seconds[ONE_TOPK], seconds[ONE_INT4]
    # torch.add reads two tensors, int4 one.
    bytes_ratio = median_ratio(int4[TORCH], int4[OURS]) / 2
    return [
        Target(
            "2bit, time against a push without compression",
            median_ratio(pushes["2bit"], pushes[PLAIN]),
            TWO_BIT_TARGET,
            at_least=False,
        ),
        Target("2bit, faster than MXNet", faster, MXNET_TARGET),
        Target("topk, faster than torch", median_ratio(topk[TORCH], topk[OURS]), 1.0),
        Target("int4, bytes read against torch.add", bytes_ratio, INT4_TARGET),
    ]


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints tables, and writes JSON and a plot if requested."""
    options = parser(__doc__ or "", rounds=25).parse_args(arguments)
    plan = plan_for(options, rounds=25, turn_s=0.1, budget_s=10)
    torch.manual_seed(0)
    num_elements = SMOKE if options.smoke else FULL
    with start_mxnet(options) as mxnet:
        facts: dict[str, Any] = environment(mxnet)
        two_bit = measure_two_bit(num_elements, plan, mxnet)
    seconds = measure_all(num_elements, plan)
    names = {PUSHES: PLAIN, ONE_TOPK: OURS, ONE_INT4: OURS}
    finish(
        options,
        {**facts, "elements": num_elements, "two_bit": two_bit, "cases": seconds},
        [
            contestants_table(ONE_TWO_BIT, two_bit, OURS),
            *(
                contestants_table(title, {"seconds": times}, names[title])
                for title, times in seconds.items()
            ),
        ],
        targets_of(seconds, two_bit["seconds"]),
        lambda figure: draw_times(figure, {PUSHES: seconds[PUSHES]}, PLAIN),
    )


if __name__ == "__main__":
    main()
