"""What a call costs: push and pull of 16 floats against ``c.copy_(a)``.

All are called from Python, in one run, turn by turn. The ratio is the median over
the rounds of what a call took against ``c.copy_(a)`` in the same round, because the
machine's own speed drifts. It also prints what ``import torchkv`` adds to ``import
torch``.

    python benchmarks/overhead.py [--json PATH] [--plot PATH] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import torchkv

# What a call may cost, as a multiple of c.copy_(a).
LIMITS = {
    "push(key, t)": 1.5,
    "pull(key, out=t)": 1.3,
    "push(key, [t] * 4)": 2.0,
}
IMPORT_LIMIT_MS = 50.0
BASELINE = "c.copy_(a)"


def make_calls() -> dict[str, Callable[[], object]]:
    """The calls to time, each on tensors and a store of its own."""
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


def time_calls(rounds: int, calls_per_round: int = 2000) -> dict[str, list[float]]:
    """Microseconds per call of every round, the calls taking turns."""
    calls = make_calls()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(calls_per_round):
                call()
            elapsed = time.perf_counter() - start
            times[name].append(elapsed / calls_per_round * 1e6)
    return times


def time_imports(rounds: int) -> dict[str, list[float]]:
    """Milliseconds of ``import torch`` and of ``import torchkv`` after it."""
    program = (
        "import time; start = time.perf_counter(); import torch; "
        "middle = time.perf_counter(); import torchkv; end = time.perf_counter(); "
        "print((middle - start) * 1e3, (end - middle) * 1e3)"
    )
    times: dict[str, list[float]] = {"import torch": [], "import torchkv": []}
    for _ in range(rounds):
        output = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout
        for name, text in zip(times, output.split(), strict=True):
            times[name].append(float(text))
    return times


def cpu_name() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if "model name" in line),
        platform.processor(),
    )


def plot(times: dict[str, list[float]], path: Path) -> None:
    """Draws the fastest round of each call beside its limit."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fastest = {name: min(rounds) for name, rounds in times.items()}
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    axes.barh(list(fastest), list(fastest.values()), color="tab:blue")
    for row, name in enumerate(fastest):
        if name in LIMITS:
            limit = LIMITS[name] * fastest[BASELINE]
            axes.plot([limit, limit], [row - 0.4, row + 0.4], color="tab:red")
    axes.invert_yaxis()
    axes.set_xlabel("microseconds per call (red: the limit)")
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints a table, writes JSON and a plot where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--plot", type=Path, help="draw the figures here (PNG)")
    parser.add_argument("--rounds", type=int, default=51)
    options = parser.parse_args(arguments)

    times = time_calls(options.rounds)
    imports = time_imports(max(3, options.rounds // 10))

    print(f"torchkv {torchkv.__version__}, torch {torch.__version__}, {cpu_name()}")
    print(f"{'call':<22}{'min us':>8}{'median us':>11}{'ratio':>7}{'limit':>7}")
    ratios = {}
    for name, rounds in times.items():
        ratios[name] = statistics.median(
            mine / base for mine, base in zip(rounds, times[BASELINE], strict=True)
        )
        limit = f"{LIMITS[name]:.1f}" if name in LIMITS else "-"
        print(
            f"{name:<22}{min(rounds):>8.3f}{statistics.median(rounds):>11.3f}"
            f"{ratios[name]:>7.2f}{limit:>7}"
        )
    for name, rounds in imports.items():
        limit = f"limit {IMPORT_LIMIT_MS:.0f}" if name == "import torchkv" else ""
        print(
            f"{name:<22}{min(rounds):>8.1f}{statistics.median(rounds):>11.1f} ms  "
            f"{limit}"
        )

    if options.json:
        figures = {
            "torchkv": torchkv.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cpu": cpu_name(),
            "microseconds": times,
            "ratios": ratios,
            "limits": LIMITS,
            "import_milliseconds": imports,
        }
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    if options.plot:
        plot(times, options.plot)


if __name__ == "__main__":
    main()
