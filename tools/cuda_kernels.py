"""Compiles csrc/kernels/cuda with nvcc into libtorchkv_cuda.so, for setup.py.

The kernels include no header of torch, and no GPU is needed.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "csrc" / "kernels" / "cuda"
DEFAULT_ARCHS = "8.0;9.0;10.0;12.0+PTX"
# The valid names in TORCH_CUDA_ARCH_LIST, as in torch.
NAMED_ARCHS = {
    "Turing": "7.5+PTX",
    "Ampere": "8.0;8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell": "10.0;10.3;12.0;12.1+PTX",
}


def stop(problem: str) -> NoReturn:
    """Ends the build with a one-line error."""
    raise SystemExit(f"torchkv: {problem}")


class Toolkit:
    """A CUDA toolkit, or the part of it that compiles kernels."""

    def __init__(self, home: Path) -> None:
        """Asks the nvcc in home for its version."""
        self.home = home
        self.nvcc = home / "bin" / "nvcc"
        said = subprocess.run(
            [self.nvcc, "--version"], check=True, capture_output=True, text=True
        )
        self.release = re.findall(r"release (\d+\.\d+)", said.stdout)[0]
        self.major = self.release.partition(".")[0]

    def find(self, name: str, first: list[Path]) -> Path:
        """A library, in one of the given folders or in the toolkit's."""
        folders = [*first, self.home / "lib64", self.home / "lib"]
        for folder in folders:
            if (folder / name).is_file():
                return folder / name
        searched = ", ".join(map(str, folders))
        stop(f"{name} is needed for the CUDA kernels, but not in {searched}")


def find_toolkit() -> Toolkit | None:
    """The toolkit of CUDA_HOME, of the nvcc on the PATH, or in the default location."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(variable)
        if home and not Path(home, "bin", "nvcc").is_file():
            stop(f"there is no bin/nvcc in {variable}={home}")
        if home:
            return Toolkit(Path(home))
    homes = [Path("/usr/local/cuda")]
    if on_path := shutil.which("nvcc"):
        # nvcc may be a link or a script elsewhere, so ask it for its location.
        plan = subprocess.run(
            [on_path, "--dryrun", "-x", "cu", os.devnull],
            capture_output=True,
            text=True,
        )
        homes[:0] = map(Path, re.findall(r"^#\$ TOP=(.+)$", plan.stderr, re.MULTILINE))
    for folder in homes:
        if (folder / "bin" / "nvcc").is_file():
            return Toolkit(folder.resolve())
    return None


def arch_flags() -> list[str]:
    """The flags for the architectures in TORCH_CUDA_ARCH_LIST.

    All are assembled from one PTX, that of the oldest: one PTX for each takes twice the
    time and spills registers that this does not.
    """
    archs = os.environ.get("TORCH_CUDA_ARCH_LIST") or DEFAULT_ARCHS
    for name, numbers in NAMED_ARCHS.items():
        archs = archs.replace(name, numbers)
    codes, flags, with_ptx = [], [], False
    for arch in archs.replace(";", " ").split():
        read = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", arch)
        if not read:
            stop(
                f"TORCH_CUDA_ARCH_LIST: expected something like '{DEFAULT_ARCHS}', "
                f"but got '{arch}'"
            )
        number = read[1] + read[2]
        if not read[3]:
            codes.append(int(number))
            with_ptx = with_ptx or bool(read[4])
            continue
        # Architecture-specific features need their own PTX.
        number += read[3]
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
    if codes:
        oldest = f"compute_{min(codes)}"
        names = [f"sm_{code}" for code in codes] + ([oldest] if with_ptx else [])
        flags.append(f"-gencode=arch={oldest},code=[{','.join(names)}]")
    return flags


def compile_flags() -> list[str]:
    """The flags of nvcc for every source."""
    flags = [
        "-O3",
        "-std=c++17",
        # The same bits as the kernels for the CPU (-ffp-contract=off in setup.py).
        "--fmad=false",
        "-Xfatbin=-compress-all",  # a tenth of the size
        "-Xcompiler=-fPIC,-fvisibility=hidden",
        *arch_flags(),
    ]
    if os.environ.get("TORCHKV_WERROR", "1") != "0":
        flags += ["-Werror", "all-warnings"]
    # nvcc cannot run a CXX of several words (ccache g++).
    cxx = shlex.split(os.environ.get("CXX", ""))
    if len(cxx) == 1 and not os.environ.get("NVCC_CCBIN"):
        flags += ["-ccbin", cxx[0]]
    return flags


def is_fresh(target: Path, command: list[str]) -> bool:
    """Whether the same command made the object, and no input is newer."""
    made_by = target.with_suffix(".command")
    if not (target.is_file() and made_by.is_file()):
        return False
    if made_by.read_text() != shlex.join(command):
        return False
    rule = target.with_suffix(".d").read_text().replace("\\\n", " ")
    made_at = target.stat().st_mtime
    read = [ROOT / name for name in shlex.split(rule.partition(":")[2])]
    return all(path.exists() and path.stat().st_mtime <= made_at for path in read)


def run(command: list[str]) -> None:
    """Runs a compiler, which reports its own errors."""
    print(shlex.join(command), flush=True)
    if subprocess.run(command, cwd=ROOT).returncode:
        stop("the CUDA kernels did not compile")


def compile_object(source: Path, target: Path, nvcc: list[str]) -> None:
    """Compiles one source, unless it is up to date.

    The paths are relative, so that a copy of the tree can take over the objects.
    """
    paths = (target.with_suffix(".d"), source, target)
    depfile, code, made = (os.path.relpath(path, ROOT) for path in paths)
    command = [*nvcc, "-MD", "-MF", depfile, "-c", code, "-o", made]
    if is_fresh(target, command):
        return
    made_by = target.with_suffix(".command")
    made_by.unlink(missing_ok=True)  # an interrupted compiler leaves a partial object
    run(command)
    made_by.write_text(shlex.join(command))


def build(library: Path, objects: Path, toolkit: Toolkit, cudart: Path) -> None:
    """Compiles what changed and links it with cudart, shared (.so) or static (.a)."""
    sources = sorted(SOURCES.glob("*.cu"))
    targets = [objects / f"{source.stem}.o" for source in sources]
    nvcc = [str(toolkit.nvcc), *compile_flags()]
    objects.mkdir(parents=True, exist_ok=True)
    jobs = int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(compile_object, sources, targets, [nvcc] * len(sources)))
    if cudart.suffix == ".a":
        # It does not conflict with other libraries' cudart.
        runtime = [str(cudart), "-ldl", "-lpthread", "-lrt", "-Wl,--exclude-libs,ALL"]
    else:
        # The path is for C++ programs; in Python, torch has loaded it already.
        folder = f"$ORIGIN/../../nvidia/cu{toolkit.major}/lib"
        runtime = [str(cudart), f"-Wl,-rpath,{folder}"]
    run(
        [
            *shlex.split(os.environ.get("CXX") or "c++"),
            "-shared",
            "-o",
            str(library),
            *map(str, targets),
            *runtime,
            "-Wl,--no-undefined",
            f"-Wl,-soname,{library.name}",
        ]
    )
