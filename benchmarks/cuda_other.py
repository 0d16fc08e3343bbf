"""Other figures of a GPU: first, captured, misaligned and compressed pushes.

The first push of a process loads the kernels and allocates state; it is compared with
torch's first sum and fused step, each in a new process. A captured step is a push and a
pull of ResNet-50 with SGD, captured once in a CUDA graph and replayed. Misaligned
gradients are views into a flat buffer at an offset of one element. Pushes of four
replicas with gradient compression are compared with one without, and a push with
``topk`` with PyTorch's operators.

    python benchmarks/cuda_other.py [--json PATH] [--plot PATH] [--rounds N] [--smoke]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import contestants as ways
import gpu
import torchkv
from compression import ONE_TOPK, TorchTopK
from contestants import Arrays, Call
from cuda_model import HOST_CALLS, host_timed
from cuda_optimizers import MOMENTUM
from harness import (
    Contestant,
    Plan,
    interleave,
    measure,
    median_ratio,
)
from optimizers import all_close, stepped
from parameter_lists import resnet50, shrunk
from report import Target
from torchkv.compression import BF16, FP8, Codec, Int4, TopK, TwoBit

FIRST = "first push"
REPLICAS = 2
CAPTURED, EAGER = "captured push, pull", "torchkv push, pull"
ALIGNED, MISALIGNED = "aligned", "one element behind"
COMPRESSED, PLAIN = "compressed", "without compression"
COMPRESSED_REPLICAS = 4
OURS, OPERATORS = "torchkv push", "PyTorch's operators"
CODECS: list[Codec] = [TwoBit(), BF16(), FP8(), Int4()]
PROCESSES = 5

FIRST_TARGET = 1.5
CAPTURED_TARGET = 1.0
MISALIGNED_PERCENT = 70
TOPK_TARGET = 1.0

# The program of each process; it prints the seconds of the first and second call.
BEGIN = """
import json, sys, time
import torch
device = sys.argv[1]
gradients = [torch.ones(1 << 16, device=device) for _ in range(2)]
weight = torch.zeros(1 << 16, device=device)
torch.add(gradients[0], 1)  # initializes CUDA
def seconds(call):
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
"""
PROCESS_OF = {
    FIRST: """
import torchkv
store = torchkv.create("device")
store.init(0, weight)
store.set_optimizer(torchkv.optim.AdamW())
call = lambda: store.push(0, gradients)
""",
    "torch's first sum and fused step": """
weight = torch.nn.Parameter(weight)
weight.grad = torch.zeros_like(weight)
optimizer = torch.optim.AdamW([weight], fused=True)
def call():
    torch.add(*gradients, out=weight.grad)
    optimizer.step()
""",
}
END = "print(json.dumps([seconds(call), seconds(call)]))"


def first_calls(num_processes: int, device: str) -> dict[str, Any]:
    """The seconds of the first and of the second call, in new processes."""
    first: dict[str, list[float]] = {name: [] for name in PROCESS_OF}
    second: dict[str, list[float]] = {name: [] for name in PROCESS_OF}
    for _ in range(num_processes):
        for name, code in PROCESS_OF.items():
            done = subprocess.run(
                [sys.executable, "-c", BEGIN + code + END, device],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            times = json.loads(done.stdout.splitlines()[-1])
            first[name].append(times[0])
            second[name].append(times[1])
    return {"case": FIRST, "seconds": first, "second_call": second}


def captured(call: Call, device: str) -> Call:
    """Replays the call or, without a GPU, makes it."""
    if device == "cpu":
        return call
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def captured_step(plan: Plan, smoke: bool, device: str) -> dict[str, Any]:
    """The seconds of the GPU and of the host, for a replay and for the calls."""
    shapes = shrunk(resnet50()) if smoke else resnet50()
    expected = stepped(MOMENTUM, shapes, torch.float32, REPLICAS, device)
    contestants, calls = {}, {}
    for name in (CAPTURED, EAGER):
        arrays = Arrays(shapes, torch.float32, REPLICAS, REPLICAS, device)
        store, keys = ways.store_for(arrays, "device")
        store.set_optimizer(MOMENTUM.ours())
        # Gradients of zero change no weight, and the step allocates its state.
        zeros = [[torch.zeros_like(v) for v in values] for values in arrays.values]
        store.push(keys, zeros)
        store.pull(keys, out=arrays.outs)
        del zeros

        def step(store: Any = store, keys: Any = keys, arrays: Any = arrays) -> None:
            store.push(keys, arrays.values)
            store.pull(keys, out=arrays.outs)

        def agrees(arrays: Any = arrays) -> bool:
            columns = zip(*arrays.outs, strict=True)
            return all(all_close(list(column), expected) for column in columns)

        calls[name] = captured(step, device) if name == CAPTURED else step
        contestants[name] = Contestant(gpu.timed([calls[name]], device), agrees)
    seconds = measure(contestants, plan)
    host = interleave(
        {name: host_timed(call) for name, call in calls.items()},
        dict.fromkeys(calls, HOST_CALLS),
        plan.rounds,
    )
    return {"case": CAPTURED, "seconds": seconds, "host_seconds": host}


def views(arrays: Arrays, behind: int) -> list[list[Tensor]]:
    """The same gradients, as views with an offset of this many elements."""

    def view(value: Tensor) -> Tensor:
        flat = torch.empty(value.numel() + behind, device=value.device)
        return flat[behind:].copy_(value)

    return [[view(value) for value in values] for values in arrays.values]


def misaligned(plan: Plan, smoke: bool, device: str) -> dict[str, Any]:
    """Sums of gradients with an offset of zero and of one element."""
    elements = 1 << 12 if smoke else 1 << 26
    shapes = [(elements,)]
    sums = ways.sums_of(shapes, torch.float32, REPLICAS, device)
    moved = 4 * elements * (REPLICAS + 1)
    contestants = {gpu.COPY: gpu.copy_of(moved, 1, device)}
    for name, behind in {ALIGNED: 0, MISALIGNED: 1}.items():
        arrays = Arrays(shapes, torch.float32, REPLICAS, 0, device)
        store, keys = ways.store_for(arrays, "device")
        values = views(arrays, behind)

        def push(store: Any = store, keys: Any = keys, values: Any = values) -> None:
            store.push(keys, values)

        contestants[name] = Contestant(
            gpu.timed([push], device),
            lambda store=store, keys=keys: all(
                map(torch.equal, store.pull(keys), sums)
            ),
        )
    return {"case": MISALIGNED, "seconds": measure(contestants, plan)}


def compressed(plan: Plan, smoke: bool, device: str) -> dict[str, Any]:
    """Pushes with each codec. All send the numbers as they are."""
    elements = 1 << 12 if smoke else 25_000_000
    value = torch.randint(-1, 2, (elements,), device=device) * TwoBit().threshold
    contestants = {}
    for codec in (None, *CODECS):
        values = [value.clone() for _ in range(COMPRESSED_REPLICAS)]
        store = torchkv.create("device")
        store.init(0, torch.zeros_like(value))
        if codec is not None:
            store.set_gradient_compression(codec)

        def push(store: Any = store, values: Any = values) -> None:
            store.push(0, values)

        def agrees(store: Any = store) -> bool:
            return torch.allclose(store.pull(0), COMPRESSED_REPLICAS * value)

        name = PLAIN if codec is None else codec.type
        contestants[name] = Contestant(gpu.timed([push], device), agrees)
    return {"case": COMPRESSED, "seconds": measure(contestants, plan)}


def top(plan: Plan, smoke: bool, device: str) -> dict[str, Any]:
    """Pushes of one replica with topk. Of equal magnitudes, PyTorch sends any."""
    elements = 1 << 12 if smoke else 25_000_000
    value = torch.randn(elements, device=device)
    count = elements // 100
    torchs = TorchTopK(value, count)
    store = torchkv.create("device")
    store.init(0, torch.zeros_like(value))
    store.set_gradient_compression(TopK(k=count))

    def agrees(sent: Tensor) -> bool:
        """After the first call, which has a residual of zeros."""
        magnitudes = sent.abs().sort(descending=True).values[:count]
        largest = value.abs().topk(count).values
        return int(sent.count_nonzero()) == count and torch.equal(magnitudes, largest)

    contestants = {
        OURS: Contestant(
            gpu.timed([lambda: store.push(0, value)], device),
            lambda: agrees(store.pull(0)),
        ),
        OPERATORS: Contestant(
            gpu.timed([torchs.push], device),
            lambda: agrees(torchs.sent),
        ),
    }
    return {"case": ONE_TOPK, "seconds": measure(contestants, plan)}


def cases(plan: Plan, smoke: bool, device: str) -> Iterator[dict[str, Any]]:
    """All cases, one after the other."""
    yield misaligned(plan, smoke, device)
    yield compressed(plan, smoke, device)
    yield top(plan, smoke, device)
    yield captured_step(plan, smoke, device)
    yield first_calls(1 if smoke else PROCESSES, device)


def targets_of(figures: list[dict[str, Any]]) -> list[Target]:
    """The targets for the measured cases."""
    targets = []
    for figure in figures:
        seconds = figure["seconds"]
        if figure["case"] == FIRST:
            ours, torchs = (statistics.median(times) for times in seconds.values())
            what = f"{FIRST}, of torch's first sum and fused step"
            targets.append(Target(what, ours / torchs, FIRST_TARGET, at_least=False))
        elif figure["case"] == CAPTURED:
            for key, clock in [("seconds", "GPU"), ("host_seconds", "host")]:
                ratio = median_ratio(figure[key][EAGER], figure[key][CAPTURED])
                what = f"{CAPTURED}, faster than the calls, {clock}"
                targets.append(Target(what, ratio, CAPTURED_TARGET))
        elif figure["case"] == MISALIGNED:
            percent = 100 * median_ratio(seconds[gpu.COPY], seconds[MISALIGNED])
            what = "misaligned gradients, of copy_"
            targets.append(Target(what, percent, MISALIGNED_PERCENT, True, "%"))
        elif figure["case"] == ONE_TOPK:
            ratio = median_ratio(seconds[OPERATORS], seconds[OURS])
            what = f"topk, faster than {OPERATORS}"
            targets.append(Target(what, ratio, TOPK_TARGET))
    return targets


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints tables, and writes JSON and a plot if requested."""
    title = "What else a GPU shows"
    gpu.measure_cases(__doc__ or "", title, cases, targets_of, arguments)


if __name__ == "__main__":
    main()
