"""The cost of a call: push and pull of 16 floats compared with ``c.copy_(a)``.

All are called from Python, in one run, interleaved. The ratio to ``c.copy_(a)`` is the
median of the ratios within a round, because the machine's speed drifts. Also prints
the time that ``import torchkv`` adds to ``import torch``, four replicas of 16 floats
compared with MXNet, and the time per key in a call with very many.

    python benchmarks/overhead.py [--json PATH] [--plot PATH] [--rounds N] [--smoke]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

import contestants as ways
import torchkv
from contestants import Arrays
from harness import Contestant, Plan, Times, interleave, measure, median_ratio, timed
from mxnet_peer import NAME as MXNET
from mxnet_peer import Case, MXNet, measure_beside
from report import (
    Table,
    Target,
    contestants_table,
    environment,
    finish,
    parser,
    start_mxnet,
)

# The target for the time of a call, as a multiple of c.copy_(a).
LIMITS = {
    "push(key, t)": 1.5,
    "pull(key, out=t)": 1.3,
    "push(key, [t] * 4)": 2.0,
}
IMPORT_LIMIT_MS = 50.0
BASELINE = "c.copy_(a)"

SMALL = "torchkv push, pull"
MXNET_TARGET = 10.0

# The target in microseconds per key, by number of keys.
KEY_LIMITS_US = {10_000: 0.5, 1_000_000: 1.0}
KEY_ELEMENTS = 100
PUSH, PULL, COPY = "push", "pull", "torch._foreach_copy_"


def make_calls() -> dict[str, Callable[[], object]]:
    """The calls to time, each with its own tensors and store."""
    a, c, t = torch.randn(16), torch.empty(16), torch.randn(16)
    replicas = [t] * 4
    store = torchkv.create("local")
    store.init(3, t)
    return {
        BASELINE: lambda: c.copy_(a),
        "push(key, t)": lambda: store.push(3, t),
        "pull(key, out=t)": lambda: store.pull(3, out=c),
        "push(key, [t] * 4)": lambda: store.push(3, replicas),
    }


def time_calls(rounds: int, calls_per_round: int = 2000) -> Times:
    """Microseconds per call of every round, with the calls interleaved."""
    runs = {name: timed(call) for name, call in make_calls().items()}
    times = interleave(runs, dict.fromkeys(runs, calls_per_round), rounds)
    return {name: [each * 1e6 for each in seconds] for name, seconds in times.items()}


def time_imports(rounds: int) -> Times:
    """Milliseconds of ``import torch`` and of ``import torchkv`` after it."""
    program = (
        "import time; start = time.perf_counter(); import torch; "
        "middle = time.perf_counter(); import torchkv; end = time.perf_counter(); "
        "print((middle - start) * 1e3, (end - middle) * 1e3)"
    )
    times: Times = {"import torch": [], "import torchkv": []}
    for _ in range(rounds):
        output = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout
        for name, text in zip(times, output.split(), strict=True):
            times[name].append(float(text))
    return times


def measure_small(plan: Plan, mxnet: MXNet | None) -> dict[str, Any]:
    """A push of four replicas of 16 floats and a pull into four."""
    shapes = [(16,)]
    sums = ways.sums_of(shapes, torch.float32, 4)
    arrays = Arrays(shapes, torch.float32, 4, 4)
    contestants = {SMALL: ways.on(arrays, ways.torchkv_push_pull(arrays), sums)}
    return measure_beside(mxnet, Case(shapes, "float32", 4, 4), contestants, plan)


def measure_keys(num_keys: int, plan: Plan) -> Times:
    """Seconds per key of one push, and of one pull, of all keys."""
    values, outs, copies = (
        [row.clone() for row in torch.rand(num_keys, KEY_ELEMENTS)] for _ in range(3)
    )
    keys = list(range(num_keys))
    store = torchkv.create("local")
    store.init(keys, copies)

    def are_values(tensors: list[torch.Tensor]) -> bool:
        return all(map(torch.equal, tensors, values))

    contestants = {
        PUSH: Contestant(
            timed(lambda: store.push(keys, values)),
            lambda: are_values(store.pull(keys)),
        ),
        PULL: Contestant(
            timed(lambda: store.pull(keys, out=outs)), lambda: are_values(outs)
        ),
        COPY: Contestant(
            timed(lambda: torch._foreach_copy_(copies, values)),
            lambda: are_values(copies),
        ),
    }
    times = measure(contestants, plan)
    return {name: [s / num_keys for s in seconds] for name, seconds in times.items()}


def calls_table(times: Times, ratios: dict[str, float]) -> Table:
    """Calls on 16 floats compared with the baseline."""
    rows = [
        [
            name,
            f"{min(rounds):.3f}",
            f"{statistics.median(rounds):.3f}",
            f"{ratios[name]:.2f}",
            f"{LIMITS[name]:.1f}" if name in LIMITS else "-",
        ]
        for name, rounds in times.items()
    ]
    header = ["call", "min us", "median us", "ratio", "limit"]
    return Table("Calls on 16 floats", header, rows)


def imports_table(imports: Times) -> Table:
    """The time of the imports."""
    rows = [
        [
            name,
            f"{min(rounds):.1f}",
            f"{statistics.median(rounds):.1f}",
            f"{IMPORT_LIMIT_MS:.0f}" if name == "import torchkv" else "-",
        ]
        for name, rounds in imports.items()
    ]
    return Table("Imports", ["import", "min ms", "median ms", "limit"], rows)


def keys_table(keys: dict[int, Times]) -> Table:
    """The time per key, by the number of keys in the call."""
    rows = [
        [
            f"{name}, {number:,} keys",
            f"{min(seconds) * 1e6:.3f}",
            f"{statistics.median(seconds) * 1e6:.3f}",
            f"{median_ratio(times[COPY], seconds):.2f}",
        ]
        for number, times in keys.items()
        for name, seconds in times.items()
    ]
    header = ["one value each", "min us/key", "median us/key", f"faster than {COPY}"]
    return Table(f"Keys of {KEY_ELEMENTS} floats in one call", header, rows)


def targets_of(
    ratios: dict[str, float],
    imports: Times,
    small: Times,
    keys: dict[int, Times],
) -> list[Target]:
    """The targets."""
    faster = median_ratio(small[MXNET], small[SMALL]) if MXNET in small else None
    import_ms = statistics.median(imports["import torchkv"])
    return [
        *(
            Target(f"{name}, of {BASELINE}", ratios[name], limit, at_least=False)
            for name, limit in LIMITS.items()
        ),
        Target("import torchkv", import_ms, IMPORT_LIMIT_MS, False, "ms"),
        Target("push, pull of 4 x 16 floats, faster than MXNet", faster, MXNET_TARGET),
        *(
            Target(
                f"{name} of {number:,} keys, a key",
                statistics.median(times[name]) * 1e6,
                limit,
                at_least=False,
                unit="us",
            )
            for (number, times), limit in zip(
                keys.items(), KEY_LIMITS_US.values(), strict=True
            )
            for name in (PUSH, PULL)
        ),
    ]


def draw(figure: Any, times: Times, keys: dict[int, Times]) -> None:
    """Plots the fastest round of each call with its limit, and of each key."""
    figure.set_size_inches(7, 6)
    calls, many = figure.subplots(2)
    fastest = {name: min(rounds) for name, rounds in times.items()}
    calls.barh(list(fastest), list(fastest.values()), color="tab:blue")
    for row, name in enumerate(fastest):
        if name in LIMITS:
            limit = LIMITS[name] * fastest[BASELINE]
            calls.plot([limit, limit], [row - 0.4, row + 0.4], color="tab:red")
    calls.invert_yaxis()
    calls.set_xlabel("microseconds per call (red: the limit)")

    costs = {
        f"{name}, {number:,} keys": min(seconds) * 1e6
        for number, times in keys.items()
        for name, seconds in times.items()
    }
    many.barh(list(costs), list(costs.values()), color="tab:blue")
    many.invert_yaxis()
    many.set_xlabel(f"microseconds per key of {KEY_ELEMENTS} floats")


def measure_all(options: argparse.Namespace, mxnet: MXNet | None) -> dict[str, Any]:
    """All figures."""
    rounds = options.rounds or (3 if options.smoke else 51)
    plan = Plan(rounds, turn_s=0.05, budget_s=10)
    calls_per_round, num_keys = 2000, list(KEY_LIMITS_US)
    if options.smoke:
        plan = Plan(rounds, turn_s=0, budget_s=0)
        calls_per_round, num_keys = 20, [100, 1000]
    return {
        "microseconds": time_calls(rounds, calls_per_round),
        "import_milliseconds": time_imports(
            1 if options.smoke else max(3, rounds // 10)
        ),
        "small": measure_small(plan, mxnet),
        "keys": {number: measure_keys(number, plan) for number in num_keys},
    }


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints tables, and writes JSON and a plot if requested."""
    options = parser(__doc__ or "", rounds=51).parse_args(arguments)
    with start_mxnet(options) as mxnet:
        facts = environment(mxnet)
        figures = measure_all(options, mxnet)

    times, imports = figures["microseconds"], figures["import_milliseconds"]
    small, keys = figures["small"], figures["keys"]
    ratios = {name: median_ratio(each, times[BASELINE]) for name, each in times.items()}
    targets = targets_of(ratios, imports, small["seconds"], keys)
    figures = {
        **facts,
        **figures,
        "ratios": ratios,
        "limits": LIMITS,
    }
    tables = [
        calls_table(times, ratios),
        imports_table(imports),
        contestants_table("Push of 4 x 16 floats and pull into 4", small, SMALL),
        keys_table(keys),
    ]
    finish(options, figures, tables, targets, lambda figure: draw(figure, times, keys))


if __name__ == "__main__":
    main()
