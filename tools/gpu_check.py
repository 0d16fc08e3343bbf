"""Everything that only a GPU can show, within minutes: `make gpu-check`.

Builds torchkv in this tree for the GPU at hand, with the torch of this Python, and runs
the CUDA tests, once more with one GPU as four places, some of them under
compute-sanitizer, and the CUDA benchmarks. Leaves a summary.txt, results.json, log.txt
and the benchmarks' JSON in the folder it is given.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BUDGET_S = 540.0
# One GPU as four, each with a stream of its own.
PLACES = ",".join(["cuda:0"] * 4)
# Tests of the store: values are cut at any size there, so none need be large.
ON_PLACES = ["--ignore=tests/benchmarks", "--ignore=tests/examples", "-k", "not large"]
# Tiny tests: a sanitizer slows kernels down a hundredfold. The dtypes left out run
# through the same kernels as others, or through PyTorch's.
SANITIZED = [
    "tests/test_cuda_results.py",
    "-k",
    "tiny and not (uint or float8 or complex)",
]
SANITIZERS = {
    # Only in our kernels; other's would take most of the time.
    "memcheck": ["--padding", "2048", "--kernel-name", "kernel_substring=torchkv"],
    # In all kernels, for it must see who writes what ours read.
    "initcheck": [],
    "synccheck": ["--kernel-name", "kernel_substring=torchkv"],
}


class Step(NamedTuple):
    """A command with a limit of its own."""

    name: str
    command: Sequence[str]
    limit_s: float
    variables: dict[str, str] = {}


class Result(NamedTuple):
    """What came of a step."""

    name: str
    outcome: str  # passed, failed (<status>), out of time, not run
    seconds: float
    last_words: str  # the last line of output


def plan(folder: Path, arch: str) -> list[Step]:
    """The steps; those that follow are of no use if the first fails."""
    python = sys.executable
    pytest = [python, "-m", "pytest", "-q", "-m", "cuda and not slow"]
    steps = [
        Step(
            "build",
            [python, "setup.py", "build_ext", "--inplace"],
            180,
            {"TORCHKV_USE_CUDA": "1", "TORCH_CUDA_ARCH_LIST": arch},
        ),
        Step("tests", pytest, 180, {"FAIL_WITHOUT_CUDA": "1"}),
        Step(
            "places",
            [*pytest, *ON_PLACES],
            90,
            {"FAIL_WITHOUT_CUDA": "1", "TORCHKV_PLACES": PLACES},
        ),
        Step(
            "digits",
            [python, "examples/train_digits.py", "--devices", PLACES]
            + ["--plot", str(folder / "digits.png")],
            60,
            {"TORCHKV_PLACES": PLACES},
        ),
    ]
    for tool, options in SANITIZERS.items():
        sanitizer = ["compute-sanitizer", "--tool", tool, *options]
        sanitizer += ["--error-exitcode", "1", "--report-api-errors", "no"]
        sanitizer += ["--target-processes", "application-only"]
        # torch's allocator would hide where an allocation ends.
        variables = {"FAIL_WITHOUT_CUDA": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        steps.append(Step(tool, [*sanitizer, *pytest, *SANITIZED], 90, variables))
    for benchmark in sorted((ROOT / "benchmarks").glob("cuda_*.py")):
        figures = str(folder / f"{benchmark.stem}.json")
        command = [python, str(benchmark.relative_to(ROOT)), "--json", figures]
        steps.append(Step(benchmark.stem, command, BUDGET_S))
    return steps


def run(step: Step, limit_s: float, log: IO[str]) -> Result:
    """Runs a step, and ends all that it started once its time is over."""
    variables = {**os.environ, **step.variables}
    variables["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    )
    log.write(f"\n=== {step.name}: {shlex.join(step.command)}\n")
    log.flush()
    started_at = log.tell()
    started = time.monotonic()
    process = subprocess.Popen(
        step.command,
        cwd=ROOT,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        status = process.wait(timeout=limit_s)
        outcome = f"failed ({status})" if status else "passed"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        outcome = f"out of time ({limit_s:.0f} s)"
    log.seek(started_at)
    said = [line for line in log.read().splitlines() if line.strip()]
    last_words = said[-1].strip("= ") if said else ""
    return Result(step.name, outcome, time.monotonic() - started, last_words)


def run_all(steps: Sequence[Step], budget_s: float, log: IO[str]) -> list[Result]:
    """Runs the steps in order, as long as there is time."""
    deadline = time.monotonic() + budget_s
    results: list[Result] = []
    for step in steps:
        left_s = deadline - time.monotonic()
        if results and results[0].outcome != "passed":
            result = Result(step.name, "not run", 0, f"no {results[0].name}")
        elif left_s <= 0:
            result = Result(step.name, "not run", 0, "no time left")
        elif not shutil.which(step.command[0]):
            result = Result(step.name, "not run", 0, f"no {step.command[0]}")
        else:
            result = run(step, min(step.limit_s, left_s), log)
        results.append(result)
        print(line(result), flush=True)
    return results


def line(result: Result) -> str:
    """A result for people."""
    return (
        f"{result.name:12}{result.outcome:22}{result.seconds:6.1f} s"
        f"  {result.last_words[:120]}"
    )


def said_by(*command: str) -> str:
    """What a program prints, if it is there."""
    if not shutil.which(command[0]):
        return f"no {command[0]}"
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or done.stderr.strip()


def gpu() -> tuple[str, dict[str, str]]:
    """The GPU's architecture, and what else to know about this machine."""
    try:
        import torch
    except ImportError:
        sys.exit(
            f"gpu_check: {sys.executable} has no torch; "
            "name one that has: make gpu-check PYTHON=..."
        )
    if not torch.cuda.is_available():
        sys.exit(f"gpu_check: torch {torch.__version__} can use no GPU here")
    properties = torch.cuda.get_device_properties(0)
    nvcc = re.search(r"release \S+ \S+", said_by("nvcc", "--version"))
    return f"{properties.major}.{properties.minor}", {
        "gpu": f"{torch.cuda.device_count()} x {properties.name}",
        "driver": said_by(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        ),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "nvcc": nvcc[0] if nvcc else "none",
    }


def main() -> None:
    """Runs the plan, and fails unless every step passes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the results go")
    parser.add_argument("--dry-run", action="store_true", help="show the plan only")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds in all")
    arguments = parser.parse_args()

    folder = arguments.folder.resolve()
    if arguments.dry_run:
        for step in plan(folder, "9.0"):
            settings = [f"{name}={value}" for name, value in step.variables.items()]
            print(f"{step.name}, at most {step.limit_s:.0f} s:")
            print("  " + shlex.join([*settings, *step.command]))
        return
    arch, facts = gpu()
    folder.mkdir(parents=True, exist_ok=True)
    heading = "\n".join(f"{name:12}{value}" for name, value in facts.items())
    print(heading, flush=True)
    with (folder / "log.txt").open("w+") as log:
        results = run_all(plan(folder, arch), arguments.budget, log)
    (folder / "summary.txt").write_text(
        "\n".join([heading, *map(line, results)]) + "\n"
    )
    (folder / "results.json").write_text(
        json.dumps({**facts, "steps": [r._asdict() for r in results]}, indent=2) + "\n"
    )
    if any(result.outcome != "passed" for result in results):
        sys.exit(f"gpu_check: not everything passed, see {folder / 'log.txt'}")


if __name__ == "__main__":
    main()
