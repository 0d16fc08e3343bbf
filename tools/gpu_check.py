"""All checks that need a GPU, within minutes: `make gpu-check`.

Builds torchkv in this tree, as users get it, with the torch of this Python, and runs
the CUDA tests, the CUDA benchmarks, the tests again with one GPU as four places, some
of them under compute-sanitizer, and an example. Reports missing requirements first and
skips only the steps that need them. A step that is out of time is interrupted and
prints its results so far; unused time goes to later steps. Writes summary.txt,
results.json, log.txt and the benchmarks' JSON into the given folder.

Exit status: 0 if every step passed, 1 if not, 2 if nothing could start.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

import cuda_kernels
import print_failures

ROOT = Path(__file__).resolve().parents[1]
MINUTES = 9.0
# One device as four, each with its own stream on a GPU.
PLACES = 4
# Time for an interrupted step to print its results.
GRACE_S = 10.0
# The tests of benchmarks, examples and tools do not use a GPU.
NOT_OF_GPUS = [f"--ignore=tests/{name}" for name in ("benchmarks", "examples", "tools")]
# Values of any size are sharded over logical devices, so large ones are not needed.
ON_PLACES = ["-k", "not large"]
# Tiny tests: a sanitizer slows kernels down a hundredfold. The dtypes left out run
# through the same kernels as others, or through PyTorch's.
SANITIZED = [
    "tests/cuda/test_cuda_results.py",
    "tests/kvstore/test_compression_codecs.py",
    "tests/kvstore/test_row_sparse_push.py",
    "-k",
    "tiny and not (uint or float8 or complex) or on_gpus and (FP8 or Int4 or TopK)"
    " or on_gpus and sparse_push",
]
SANITIZERS = {
    # Only in torchkv's kernels; the others would take most of the time.
    "memcheck": ["--padding", "2048", "--kernel-name", "kernel_substring=torchkv"],
    # In all kernels, to see the writes to the memory that torchkv's kernels read.
    "initcheck": [],
    "synccheck": ["--kernel-name", "kernel_substring=torchkv"],
    # Of what the threads of a block share.
    "racecheck": ["--kernel-name", "kernel_substring=torchkv"],
}
# For a dry run without a GPU: the same store on the CPU.
DRY_TESTS = [
    "tests/kvstore/test_push.py",
    "tests/kvstore/test_pull.py",
    *("-m", "not slow and not cuda"),
]
LIBRARY = ROOT / "torchkv" / "lib" / "libtorchkv.so"


# --- What is needed ---------------------------------------------------------------


class Need(NamedTuple):
    """A program or a package that some steps need."""

    name: str
    is_there: Callable[[], bool]
    advice: str  # how to install it
    wheel: str = ""  # the requirement, if a wheel provides it


def release_of(package: str) -> tuple[int, ...]:
    """The numbers of its version; empty if it is missing."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def package(name: str, least: int = 0, without: str = "") -> Need:
    """A Python package with a minimum major version."""
    told = f"{name}>={least}" if least else name
    advice = f"{without}pip install '{told}', or --wheels with a folder that has it"
    return Need(name, lambda: release_of(name) >= (least,), advice, told)


def program(name: str, advice: str) -> Need:
    """A program on the PATH."""
    return Need(name, lambda: shutil.which(name) is not None, advice)


def has_compiler() -> bool:
    """Searches like setup.py."""
    named = shlex.split(os.environ.get("CXX", ""))
    return any(map(shutil.which, named[:1] or ["c++", "g++", "clang++"]))


def toolkit_has(name: str) -> bool:
    """Whether the CUDA toolkit that setup.py finds has a program."""
    try:
        toolkit = cuda_kernels.find_toolkit()
    except (SystemExit, OSError, subprocess.CalledProcessError):
        return False
    return toolkit is not None and (toolkit.home / "bin" / name).is_file()


NEEDS = [
    Need("g++", has_compiler, "apt install g++, or set CXX"),
    Need(
        "Python.h",
        lambda: Path(sysconfig.get_path("include"), "Python.h").exists(),
        f"apt install python{sys.version_info[0]}.{sys.version_info[1]}-dev",
    ),
    package("setuptools", 77),
    package("ninja", without="the build takes longer without; "),
    package("pytest", 9),
    package("pytest-timeout", without="a test that hangs ends its step without; "),
    package("pyzmq", 27, without="the tests of several processes fail without; "),
    package("numpy", without="the tests that import it fail without; "),
    package("safetensors", without="the tests that import it fail without; "),
    package("matplotlib"),
    package("scikit-learn"),
    package("tqdm"),
    Need("nvcc", lambda: toolkit_has("nvcc"), "set CUDA_HOME to the CUDA toolkit"),
    Need("cuobjdump", lambda: toolkit_has("cuobjdump"), "install cuda-cuobjdump"),
    program("compute-sanitizer", "it is in the CUDA toolkit, in its bin"),
    program("ncu", "only to look into a kernel; it is in Nsight Compute"),
]


def missing(needs: Iterable[Need]) -> list[Need]:
    """The missing ones."""
    importlib.invalidate_caches()
    return [need for need in needs if not need.is_there()]


def install(needs: Iterable[Need], wheels: Path, target: Path) -> None:
    """Installs what is missing from a folder of wheels, without a network."""
    for need in needs:
        if need.wheel:
            subprocess.run(
                [sys.executable, "-m", "pip", "install", "--quiet", "--no-index"]
                + ["--find-links", str(wheels), "--target", str(target), need.wheel],
                capture_output=True,  # what is still missing is reported afterwards
            )
    sys.path.insert(0, str(target))
    os.environ["PYTHONPATH"] = joined(str(target), os.environ.get("PYTHONPATH"))
    os.environ["PATH"] = joined(str(target / "bin"), os.environ["PATH"])


def joined(*folders: str | None) -> str:
    """The folders in the form of a PATH variable."""
    return os.pathsep.join(filter(None, folders))


# --- The plan ---------------------------------------------------------------------


class Step(NamedTuple):
    """A command, and its share of the remaining time when it starts."""

    name: str
    command: Sequence[str]
    share: float
    variables: Mapping[str, str] = {}
    needs: Sequence[str] = ()


class Result(NamedTuple):
    """The result of a step."""

    name: str
    outcome: str  # passed, failed (<status>), out of time, not run
    seconds: float
    last_words: str  # the last line of output


def build_steps(folder: Path, dry: bool) -> list[Step]:
    """The build for all architectures, as for users, and its kernels' resources."""
    where = ["--build-lib", str(folder / "built")] if dry else ["--inplace"]
    python = sys.executable
    variables = {"TORCH_CUDA_ARCH_LIST": ""}
    if not dry:  # a dry run reuses the objects of the last build
        variables |= {"TORCHKV_USE_CUDA": "1", "TORCHKV_WERROR": "0"}
    build = Step(
        "build",
        [python, "setup.py", "build_ext", *where],
        40,
        variables,
        ["g++", "Python.h", "setuptools", *([] if dry else ["nvcc"])],
    )
    kernels = ROOT / "torchkv" / "lib" / "libtorchkv_cuda.so"
    listed = [python, "tools/check_sass.py", "--list", str(kernels)]
    if dry and not kernels.exists():
        return [build]
    return [build, Step("check_sass", listed, 16, {}, ["cuobjdump"])]


def pytest_command(dry: bool, *arguments: str) -> list[str]:
    """Tests that report each failure immediately."""
    chosen = DRY_TESTS if dry else ["-m", "cuda and not slow", *NOT_OF_GPUS, *arguments]
    return [
        *(sys.executable, "-m", "pytest", "-q", "-p", "print_failures"),
        *("--continue-on-collection-errors", *chosen),
    ]


def test_steps(folder: Path, dry: bool) -> list[Step]:
    """All tests that need a GPU."""
    variables = {} if dry else {"FAIL_WITHOUT_CUDA": "1"}
    return [Step("tests", pytest_command(dry), 30, variables, ["pytest"])]


def benchmark_steps(folder: Path, dry: bool) -> list[Step]:
    """All GPU benchmarks."""
    names = ["cuda_model", "cuda_other", "cuda_reduce", "cuda_optimizers", "cuda_rows"]
    tiny = ["--device", "cpu", "--smoke"] if dry else []
    return [
        Step(
            name,
            [sys.executable, f"benchmarks/{name}.py", *tiny]
            + ["--json", str(folder / f"{name}.json")],
            share,
        )
        for name, share in zip(names, [5, 10, 5, 9, 4], strict=True)
    ]


def places_of(dry: bool) -> str:
    """One device, repeated."""
    return ",".join(["cpu" if dry else "cuda:0"] * PLACES)


def place_steps(folder: Path, dry: bool) -> list[Step]:
    """The tests again, with every store of type device sharding its values."""
    variables = {"TORCHKV_PLACES": places_of(dry)}
    if not dry:
        variables["FAIL_WITHOUT_CUDA"] = "1"
    return [Step("places", pytest_command(dry, *ON_PLACES), 10, variables, ["pytest"])]


def sanitizer_steps(folder: Path, dry: bool) -> list[Step]:
    """Some tests under each tool; a dry run's tests, without one."""
    steps = []
    for tool, options in SANITIZERS.items():
        sanitizer = ["compute-sanitizer", "--tool", tool, *options]
        sanitizer += ["--error-exitcode", "1", "--report-api-errors", "no"]
        sanitizer += ["--target-processes", "application-only"]
        # torch's allocator would hide the ends of allocations.
        variables = {"FAIL_WITHOUT_CUDA": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        if dry:
            sanitizer, variables = [], {}
        command = [*sanitizer, *pytest_command(dry, *SANITIZED)]
        needs = ["pytest"] if dry else ["pytest", "compute-sanitizer"]
        steps.append(Step(tool, command, 3, variables, needs))
    return steps


def digits_steps(folder: Path, dry: bool) -> list[Step]:
    """A training run."""
    places = places_of(dry)
    command = [sys.executable, "examples/train_digits.py", "--devices", places]
    return [
        Step(
            "digits",
            [*command, "--plot", str(folder / "digits.png")],
            3,
            {"TORCHKV_PLACES": places},
            ["matplotlib", "scikit-learn", "tqdm"],
        )
    ]


GROUPS: dict[str, Callable[[Path, bool], list[Step]]] = {
    "build": build_steps,
    "tests": test_steps,
    "benchmarks": benchmark_steps,
    "places": place_steps,
    "sanitizers": sanitizer_steps,
    "digits": digits_steps,
}


def plan(only: Sequence[str], folder: Path, dry: bool = False) -> list[Step]:
    """The steps of the groups, in their order."""
    return [step for name in only for step in GROUPS[name](folder, dry)]


# --- Steps ------------------------------------------------------------------------


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Delays the handlers of SIGINT and SIGTERM until the block has ended."""
    came: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, frame: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for late in came:
            signal.raise_signal(late)


def run(step: Step, limit_s: float, grace_s: float, log: IO[str]) -> Result:
    """Runs a step, and ends all of its processes when its time is over.

    Its output goes into the log; failures also go to the terminal immediately.
    """
    path = joined(str(ROOT), str(ROOT / "tools"), os.environ.get("PYTHONPATH"))
    variables = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **step.variables}
    log.write(f"\n=== {step.name}: {shlex.join(step.command)}\n")
    log.flush()
    started = time.monotonic()
    process = None
    last_words = ""

    def listen(output: IO[str]) -> None:
        nonlocal last_words
        for said in output:
            log.write(said)
            log.flush()
            if said.startswith(print_failures.PREFIX):
                print(said, end="", flush=True)
            elif said.strip():
                last_words = said.strip("= \n")

    try:
        with signals_held():  # an exception within Popen would lose the process
            process = subprocess.Popen(
                step.command,
                cwd=ROOT,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        output = process.stdout
        assert output is not None
        listener = threading.Thread(target=listen, args=[output], daemon=True)
        listener.start()
        outcome = ended(process, limit_s, grace_s)
    except BaseException:  # its process group would continue
        if process is not None:
            kill_group(process)
        raise
    listener.join(timeout=grace_s)
    if not listener.is_alive():  # an escaped child may keep the pipe open
        output.close()
    return Result(step.name, outcome, time.monotonic() - started, last_words)


def ended(process: subprocess.Popen[str], limit_s: float, grace_s: float) -> str:
    """How a process ended: by itself, interrupted, or killed."""
    try:
        status = process.wait(timeout=limit_s)
        return f"failed ({status})" if status else "passed"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=grace_s)
    kill_group(process)  # processes that ignored it, and children
    process.wait()
    return f"out of time ({limit_s:.0f} s)"


def kill_group(process: subprocess.Popen[str]) -> None:
    """Kills a step's processes that still run."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def reason_not_to_run(
    step: Step, results: Sequence[Result], absent: Iterable[str]
) -> str | None:
    """Why a step cannot run, or None."""
    for name in step.needs:
        if name in absent:
            return f"no {name}"
    build = next((result for result in results if result.name == "build"), None)
    if step.name != "build":
        is_built = build.outcome == "passed" if build else LIBRARY.exists()
        if not is_built:
            return "no build"
    return None


def run_all(
    steps: Sequence[Step],
    budget_s: float,
    log: IO[str],
    absent: Sequence[str] = (),
    tell: Callable[[Sequence[Result]], None] = lambda results: None,
) -> list[Result]:
    """Runs the steps in order; each has its share of the remaining time.

    Calls `tell` with the results so far after each.
    """
    deadline = time.monotonic() + budget_s
    results: list[Result] = []
    for i, step in enumerate(steps):
        left_s = deadline - time.monotonic()
        own_s = left_s * step.share / sum(other.share for other in steps[i:])
        grace_s = min(GRACE_S, own_s / 2)
        reason = reason_not_to_run(step, results, absent)
        if reason is None and own_s <= 0:
            reason = "no time left"
        if reason is None:
            result = run(step, own_s - grace_s, grace_s, log)
        else:
            result = Result(step.name, "not run", 0, reason)
        results.append(result)
        print(line(result), flush=True)
        tell(results)
    return results


def line(result: Result) -> str:
    """A result as a line of text."""
    return (
        f"{result.name:16}{result.outcome:22}{result.seconds:6.1f} s"
        f"  {result.last_words[:120]}"
    )


# --- Results --------------------------------------------------------------


def targets_in(folder: Path) -> list[dict[str, Any]]:
    """The benchmarks' targets, with the measured values."""
    return [
        target
        for path in sorted(folder.glob("cuda_*.json"))
        for target in json.loads(path.read_text()).get("targets", [])
    ]


def targets_table(targets: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each target."""
    if not targets:
        return []
    told = {True: "yes", False: "NO", None: "not measured"}
    rows = [("target", "limit", "measured", "reached")]
    for target in targets:
        value, unit = target["value"], target["unit"]
        bound = f"{'>=' if target['at_least'] else '<='} {target['limit']:g} {unit}"
        came_to = "-" if value is None else f"{value:.3g} {unit}"
        rows.append((target["what"], bound, came_to, told[target["reached"]]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def said_by(*command: str) -> str:
    """The output of a program, if it is installed."""
    if not shutil.which(command[0]):
        return f"no {command[0]}"
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or done.stderr.strip()


def facts_of_gpu() -> dict[str, str]:
    """The machine and the versions."""
    import torch

    nvcc = re.search(r"release \S+ \S+", said_by("nvcc", "--version"))
    return {
        "gpu": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}",
        "driver": said_by(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        ),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "nvcc": nvcc[0] if nvcc else "none",
        "cores": str(len(os.sched_getaffinity(0))),
    }


# --- The program ------------------------------------------------------------------


def refuse(problem: str) -> NoReturn:
    """Exits with a one-line error."""
    print(f"gpu_check: {problem}", file=sys.stderr)
    raise SystemExit(2)


def check_torch() -> None:
    """Refuses a Python whose torch cannot use a GPU."""
    try:
        import torch
    except ImportError:
        refuse(
            f"{sys.executable} has no torch; "
            "name one that has: make gpu-check PYTHON=..."
        )
    if not torch.cuda.is_available():
        refuse(f"torch {torch.__version__} can use no GPU here")


def names_of(text: str) -> list[str]:
    """The groups that --only names, in its order."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in GROUPS:
            refuse(
                f"--only: expected names out of {', '.join(GROUPS)}, but got {name!r}"
            )
    return list(dict.fromkeys(names))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the results go")
    parser.add_argument(
        "--only",
        metavar="NAMES",
        default=",".join(GROUPS),
        help="steps, in this order (%(default)s)",
    )
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="in all (%(default)g)"
    )
    parser.add_argument(
        "--wheels", type=Path, help="a folder of wheels for what is missing"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="every step on the CPU, tiny"
    )
    options = parser.parse_args(arguments)
    options.only = names_of(options.only)
    if not options.minutes > 0:
        refuse(f"--minutes: expected more than 0, but got {options.minutes:g}")
    if options.wheels and not options.wheels.is_dir():
        refuse(f"--wheels: there is no folder {options.wheels}")
    if options.folder.exists() and not options.folder.is_dir():
        refuse(f"{options.folder} is no folder")
    if "build" in options.only and not has_compiler():
        refuse("there is no C++ compiler to build with: apt install g++, or set CXX")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the plan, and fails unless every step passes."""
    options = parse(arguments)
    started = time.monotonic()
    if not options.dry_run:
        check_torch()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for figures in folder.glob("cuda_*.json"):
        figures.unlink()  # from an earlier run
    # Steps inherit the handlers. A shell's background jobs ignore SIGINT; job
    # schedulers send SIGTERM.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("gpu_check: terminated"))
    # Not in the folder of results.
    with tempfile.TemporaryDirectory() as packages:
        if options.wheels:
            install(missing(NEEDS), options.wheels, Path(packages))
        absent = missing(NEEDS)
        notes = [f"missing: {need.name}: {need.advice}" for need in absent]
        dry = {"dry run": "on the CPU, tiny: figures are meaningless"}
        facts = dry if options.dry_run else facts_of_gpu()
        heading = [*(f"{name:16}{value}" for name, value in facts.items()), *notes]
        print("\n".join(heading), flush=True)

        def write(results: Sequence[Result]) -> None:
            targets = targets_in(folder)
            lines = [*heading, *map(line, results), "", *targets_table(targets)]
            (folder / "summary.txt").write_text("\n".join(lines) + "\n")
            written = {
                **facts,
                "missing": [need.name for need in absent],
                "steps": [result._asdict() for result in results],
                "targets": targets,
            }
            text = json.dumps(written, indent=2) + "\n"
            (folder / "results.json").write_text(text)

        budget_s = 60 * options.minutes - (time.monotonic() - started)
        with (folder / "log.txt").open("w") as log:
            results = run_all(
                plan(options.only, folder, options.dry_run),
                budget_s,
                log,
                [need.name for need in absent],
                write,
            )
    print("\n".join(["", *targets_table(targets_in(folder))]), flush=True)
    if any(result.outcome != "passed" for result in results):
        sys.exit(f"gpu_check: not everything passed, see {folder / 'log.txt'}")


if __name__ == "__main__":
    main()
