"""Plants bugs in the cores of the distributed store, and tells which are noticed.

    python tests/dist/mutants.py [--only TEXT] [--part I/N] [--runs N] [--seconds S]
        [--tests]

Each bug is a change of a few lines of the sources, in tests/dist/mutants/*.txt. The
changed sources are compiled into the simulation (tests/cpp/dist/simulation), which runs
seeds until one of its checks fails. With --tests, the unit tests of the cores run,
too. Exits with 1 if nothing notices a bug.

A mutant is a name, the cells of the simulation in which it should be noticed, and
replacements of lines: those that begin with "-" by those that begin with "+". White
space does not count, and what is replaced must be there exactly once.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

ROOT = Path(__file__).resolve().parents[2]
CXX = os.environ.get("CXX", "c++")
PROTOCOL = Path("csrc/dist/protocol")
SIMULATION = Path("tests/cpp/dist/simulation")
TESTS = Path("tests/cpp/dist/protocol")
CORE = [Path("csrc/core/key.cpp"), Path("csrc/core/text.cpp")]
GOOGLETEST = ("gtest-all", "gtest_main")
MODES = ("sync", "async", "ssp", "quorum")
PROFILES = ("calm", "flaky", "crash", "misuse", "restart")


@dataclass
class Change:
    """A replacement in one file."""

    path: Path
    old: str = ""
    new: str = ""


@dataclass
class Mutant:
    """A planted bug."""

    name: str
    cells: list[tuple[str, str]] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)


def sources(folder: Path, pattern: str) -> list[Path]:
    """Files of a folder of the repository."""
    return [path.relative_to(ROOT) for path in sorted((ROOT / folder).glob(pattern))]


def cells_of(text: str) -> list[tuple[str, str]]:
    """("sync", "crash") and so on for "sync/crash", or "sync" for all its cells."""
    cells = []
    for word in text.split():
        mode, _, profile = word.partition("/")
        if mode not in MODES or (profile and profile not in PROFILES):
            raise ValueError(f"no such cell: {word}")
        cells += [
            (mode, each)
            for each in ([profile] if profile else PROFILES)
            if mode == "sync" or each != "restart"
        ]
    return cells


def read(path: Path) -> Iterator[Mutant]:
    """The mutants of a file."""
    mutant = None
    for line in path.read_text().splitlines():
        if line.startswith("= "):
            if mutant:
                yield mutant
            mutant = Mutant(line[2:])
        elif mutant is None or not line:
            continue
        elif line.startswith("cells: "):
            mutant.cells = cells_of(line[7:])
        elif line.startswith("@ "):
            file = Path(line[2:])
            path_in_root = PROTOCOL / file if file.parent == Path() else file
            mutant.changes.append(Change(path_in_root))
        elif line[0] == "-":
            mutant.changes[-1].old += line[1:] + "\n"
        elif line[0] == "+":
            mutant.changes[-1].new += line[1:] + "\n"
        else:
            raise ValueError(f"{path.name}: what is this? {line}")
    if mutant:
        yield mutant


def tokens(text: str) -> list[str]:
    """Its words and signs, without comments."""
    return re.findall(r"\w+|[^\w\s]", re.sub(r"//[^\n]*", "", text))


def replaced(source: str, change: Change) -> str:
    """`source` with the change. Raises ValueError unless it fits exactly once."""
    gap = r"(?:\s|//[^\n]*\n)*"
    found = list(re.finditer(gap.join(map(re.escape, tokens(change.old))), source))
    if len(found) != 1:
        raise ValueError(f"{len(found)} places in {change.path}:\n{change.old}")
    begin, end = found[0].span()
    return source[:begin] + change.new + source[end:]


def compiler(root: Path, path: Path) -> list[str]:
    """The command that compiles what stands for the file at `path` of a tree."""
    abi = int(torch.compiled_with_cxx11_abi())
    command = [CXX, "-std=c++20", "-O1", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    command += [f"-I{root / part}" for part in ("csrc", "tests/cpp", path.parent)]
    return command + [f"-I{folder}" for folder in include_paths()]


class Builder:
    """Compiles the sources, and again those that a mutant changes."""

    def __init__(self, folder: Path, tests: bool) -> None:
        self.folder = folder
        self.root = folder / "source"  # others may be at work on the files
        for each in (Path("csrc/core"), PROTOCOL, SIMULATION, TESTS):
            shutil.copytree(ROOT / each, self.root / each, dirs_exist_ok=True)
        self.core = CORE + sources(PROTOCOL, "*.cpp")
        self.simulation = sources(SIMULATION, "*.cpp")
        self.tests: list[Path] = []
        self.googletest: list[str] = []
        if tests:
            command = [str(ROOT / "tools/get_googletest")]
            googletest = Path(subprocess.check_output(command, text=True).strip())
            self.googletest = [f"-I{googletest / 'include'}", f"-I{googletest}"]
            self.tests = sources(TESTS, "*_test.cpp")
            self.tests += [googletest / "src" / f"{part}.cc" for part in GOOGLETEST]

    def object(self, path: Path, folder: Path) -> Path:
        """The object of the source at `path`."""
        return folder / (str(path).strip("/").replace("/", "_") + ".o")

    def compile(self, source: Path, path: Path, folder: Path) -> None:
        """Compiles `source`, which stands for the file at `path`."""
        command = compiler(self.root, path) + self.googletest
        command += ["-c", str(source), "-o", str(self.object(path, folder))]
        subprocess.run(command, check=True)

    def build_all(self, pool: ThreadPoolExecutor) -> None:
        """Compiles the sources as they are, unless that has been done."""
        folders = [PROTOCOL, SIMULATION, TESTS]
        headers = [each for folder in folders for each in sources(folder, "*.h")]
        latest = max((self.root / header).stat().st_mtime for header in headers)
        begun = []
        for path in self.core + self.simulation + self.tests:
            done = self.object(path, self.folder)
            newest = max(latest, (self.root / path).stat().st_mtime)
            if not done.exists() or done.stat().st_mtime < newest:
                begun.append(
                    pool.submit(self.compile, self.root / path, path, self.folder)
                )
        for compiling in begun:
            compiling.result()

    def link(self, name: str, paths: list[Path], folder: Path) -> Path:
        """A program, of the objects in `folder` and of others that are unchanged."""
        changed = [self.object(path, folder) for path in paths]
        unchanged = [self.object(path, self.folder) for path in paths]
        objects = [
            str(mine if mine.exists() else other)
            for mine, other in zip(changed, unchanged, strict=True)
        ]
        libraries = library_paths()[0]
        command = [CXX, *objects, "-o", str(folder / name), "-pthread"]
        command += [f"-L{libraries}", "-lc10", f"-Wl,-rpath,{libraries}"]
        subprocess.run(command, check=True)
        return folder / name

    def mutate(self, mutant: Mutant, folder: Path) -> None:
        """Compiles what the mutant changes into `folder`."""
        texts: dict[Path, str] = {}
        for change in mutant.changes:
            text = texts.get(change.path) or (self.root / change.path).read_text()
            texts[change.path] = replaced(text, change)
        for path, text in texts.items():
            source = folder / path.name
            source.write_text(text)
            self.compile(source, path, folder)


@dataclass
class Failure:
    """A seed whose simulation fails."""

    seed: int
    text: str


def first_failure(program: Path, cell: tuple[str, str], seeds: range) -> Failure | None:
    """The first of the seeds that fails."""
    mode, profile = cell
    command = [str(program), "--first", "--mode", mode, "--profile", profile]
    command += ["--start", str(seeds.start), "--seeds", str(len(seeds))]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        return Failure(seeds.start, f"{mode} {profile}: does not end")
    if not result.returncode:
        return None
    found = re.search(r"^FAIL (\d+) (.*)", result.stdout, re.MULTILINE)
    if not found:
        return Failure(seeds.start, f"{mode} {profile}: crash")
    return Failure(int(found.group(1)), found.group(2)[:90])


def simulate(
    program: Path, unchanged: Path, mutant: Mutant, runs: int, seconds: float
) -> str | None:
    """How the simulation has noticed the mutant, or None.

    What fails without the mutant, too, does not count.
    """
    start, done, size = time.monotonic(), 0, 5
    while done < runs and time.monotonic() - start < seconds:
        for i, cell in enumerate(mutant.cells):
            first = done
            while failure := first_failure(program, cell, range(first, done + size)):
                seed = failure.seed
                if not first_failure(unchanged, cell, range(seed, seed + 1)):
                    tried = seed * len(mutant.cells) + i + 1
                    return f"after {tried:5d} runs: {failure.text}"
                first = seed + 1
        done += size
        size = min(size * 2, 200)
    return None


def failing_tests(program: Path) -> set[str]:
    """The unit tests that fail."""
    try:
        result = subprocess.run([program], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return {"do not end"}
    failed = re.findall(r"^\[  FAILED  \] (\w+\.\w+)", result.stdout, re.MULTILINE)
    return set(failed) or ({"crash"} if result.returncode else set())


class Judge:
    """Plants mutants, and tells who notices them."""

    def __init__(self, builder: Builder, runs: int, seconds: float) -> None:
        self.builder = builder
        self.limits = runs, seconds
        self.simulation = builder.core + builder.simulation
        self.unchanged = builder.link("simulate", self.simulation, builder.folder)
        self.known = self.failing_tests(builder.folder)

    def failing_tests(self, folder: Path) -> set[str]:
        """Those with the objects in `folder`."""
        if not self.builder.tests:
            return set()
        paths = self.builder.core + self.builder.tests
        return failing_tests(self.builder.link("tests", paths, folder))

    def __call__(self, mutant: Mutant) -> tuple[bool, str]:
        """Whether it was noticed, and how."""
        with tempfile.TemporaryDirectory(dir=self.builder.folder) as name:
            folder = Path(name)
            try:
                self.builder.mutate(mutant, folder)
            except (ValueError, subprocess.CalledProcessError) as error:
                return False, f"cannot be planted: {error}"
            program = self.builder.link("simulate", self.simulation, folder)
            notes = [simulate(program, self.unchanged, mutant, *self.limits)]
            failed = sorted(self.failing_tests(folder) - self.known)
            notes.append(f"tests: {failed[0]}" if failed else None)
        return any(notes), "; ".join(filter(None, notes)) or "NOT NOTICED"


def main() -> int:
    """Runs the mutants that the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutants with this in their name")
    parser.add_argument("--part", default="0/1", help="I/N: part I, from 0, of N")
    parser.add_argument("--runs", type=int, default=2000, help="of each cell, at most")
    parser.add_argument(
        "--seconds", type=float, default=60, help="for each alone, at most"
    )
    parser.add_argument("--tests", action="store_true", help="the unit tests, too")
    parser.add_argument("--folder", type=Path, help="keeps the objects there")
    arguments = parser.parse_args()
    files = sorted(Path(__file__).with_name("mutants").glob("*.txt"))
    mutants = [mutant for path in files for mutant in read(path)]
    part, count = map(int, arguments.part.split("/"))
    chosen = [mutant for mutant in mutants if arguments.only in mutant.name]
    chosen = chosen[part::count]
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="mutants"))
    folder.mkdir(parents=True, exist_ok=True)
    builder = Builder(folder, arguments.tests)
    missed = 0
    num_threads = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(num_threads) as pool:
        builder.build_all(pool)
        # Each simulation uses all processors, which so many then share.
        seconds = arguments.seconds * num_threads
        judge = Judge(builder, arguments.runs, seconds)
        for mutant, (noticed, text) in zip(
            chosen, pool.map(judge, chosen), strict=True
        ):
            missed += not noticed
            print(f"{mutant.name:50} {text}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} noticed")
    if not arguments.folder:
        shutil.rmtree(folder)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
