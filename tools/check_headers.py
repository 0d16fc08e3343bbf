"""Compiles each installed header alone, as C++17 and C++20; for make lint.

The headers of ``torchkv/include``, with all warnings as errors, by the C++ compiler and
by clang: clang++ where it is installed, else clang-tidy, which reports the same.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch.utils.cpp_extension import include_paths

INCLUDE = Path(__file__).resolve().parents[1] / "torchkv" / "include"
STANDARDS = ("c++17", "c++20")
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
# The header of torch that ours need most; where it asks for C++20, so do ours.
OF_TORCH = "ATen/core/ivalue.h"


def compilers() -> list[str]:
    """The programs to check with."""
    gcc = shlex.split(os.environ.get("CXX") or "c++")[0]
    clang = next(filter(shutil.which, ("clang++", "clang-tidy")), None)
    return [gcc] + ([clang] if clang else [])


def complaint(compiler: str, standard: str, header: str, include: Path) -> str:
    """What a compiler says of a source that includes only this header."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "alone.cpp")
        source.write_text(f"#include <{header}>\n")
        flags = [f"-std={standard}", "-fsyntax-only", *WARNINGS, f"-I{include}"]
        for path in include_paths():
            flags += ["-isystem", path]
        if compiler == "clang-tidy":
            start = [compiler, "--quiet", "--allow-no-checks", "--checks=-*"]
            command = [*start, "--header-filter=.*", str(source), "--", *flags]
        else:
            command = [compiler, *flags, str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
    return (done.stdout + done.stderr or "failed") if done.returncode else ""


def main(include: Path = INCLUDE) -> int:
    """Prints what the compilers complain of; 1 if they do."""
    headers = sorted(str(x.relative_to(include)) for x in include.rglob("*.h"))
    if not headers:
        print(f"no headers in {include}: build torchkv first")
        return 1
    failed = 0
    jobs = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(jobs) as pool:
        for compiler in compilers():
            for standard in STANDARDS:
                if standard == "c++17" and complaint(
                    compiler, standard, OF_TORCH, include
                ):
                    print(f"{compiler} -std={standard}: not with this torch")
                    continue
                n = len(headers)
                arguments = [compiler] * n, [standard] * n, headers, [include] * n
                said = pool.map(complaint, *arguments)
                for header, text in zip(headers, said, strict=True):
                    if text:
                        failed += 1
                        print(f"{header} ({compiler} -std={standard}):\n{text}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
