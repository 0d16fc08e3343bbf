"""Runs a benchmark as users do, tiny, and checks the output common to all."""

import json
import math
import re
from pathlib import Path

from helpers import run_program

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run_smoke(name, folder, *options):
    """What the benchmark printed, and its JSON."""
    figures, plot = folder / "figures.json", folder / "plot.png"
    result = run_program(
        BENCHMARKS / f"{name}.py",
        *("--smoke", "--json", figures, "--plot", plot, *options),
    )
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr, result.stderr
    assert plot.read_bytes().startswith(b"\x89PNG")

    written = json.loads(figures.read_text())
    for fact in ["torchkv", "torch", "python", "cpu", "cores", "threads", "system"]:
        assert written[fact], fact
    assert f"torchkv {written['torchkv']}, torch {written['torch']}" in result.stdout
    for target in written["targets"]:
        assert target["what"] in result.stdout
        if target["value"] is not None:
            assert math.isfinite(target["value"]) and target["value"] > 0
            assert isinstance(target["reached"], bool)
    assert not re.search(r"(^|[^\w.])/(home|root|tmp|work|Users)/", figures.read_text())
    return result.stdout, written


def assert_rounds(seconds, contestants, rounds=3):
    """Each contestant has the times of all rounds."""
    assert set(seconds) == set(contestants)
    for times in seconds.values():
        assert len(times) == rounds
        assert all(time > 0 for time in times)
