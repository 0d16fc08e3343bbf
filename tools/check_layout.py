"""Checks which folders of csrc/ include which, and how long files are; for make lint.

A file of csrc/ includes its own folder and those below it in LAYERS. Code that nvcc
compiles includes no header of torch, so that one library of kernels serves every torch.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# From the top. The name of a file at the root of csrc/ begins with its layer.
LAYERS = (
    "bindings",
    "kvstore",
    "dist",
    "store",
    "comm",
    "update",
    "memory",
    "device",
    "kernels",
    "core",
)
OF_TORCH = re.compile(r"(ATen|c10|caffe2|torch)/")
LIMITS = {"csrc": 400, "torchkv": 400, "tests": 500}
SOURCES = {".cpp", ".cu", ".cuh", ".h", ".py", ".pyi"}
REASON = re.compile(r"^\s*(//|#).*\bsize: \S", re.MULTILINE)


def layer(path: Path) -> str:
    """The layer of a path relative to csrc/."""
    return path.parts[0] if len(path.parts) > 1 else path.stem.partition("_")[0]


def includes(path: Path) -> Iterator[tuple[int, str, bool]]:
    """A file's includes: the line's number, the name, and whether nvcc reads it.

    For nvcc only ``#ifdef __CUDACC__`` is looked at, and its ``#else``.
    """
    conditions: list[bool] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if re.match(r"#\s*if", line):
            conditions.append(not re.match(r"#\s*ifndef __CUDACC__", line))
        elif re.match(r"#\s*else", line) and conditions:
            conditions[-1] = not conditions[-1]
        elif re.match(r"#\s*endif", line) and conditions:
            conditions.pop()
        elif found := re.match(r'#\s*include ["<]([^">]+)[">]', line):
            yield number, found[1], all(conditions)


def wrong_directions(csrc: Path) -> Iterator[str]:
    """Includes of a higher layer, and files that no layer has."""
    for path in sorted(csrc.rglob("*.*")):
        if path.suffix not in SOURCES:
            continue
        own = layer(path.relative_to(csrc))
        if own not in LAYERS:
            yield f"{path}: expected one of the folders {', '.join(LAYERS)}"
            continue
        for number, name, _ in includes(path):
            included = (path.parent / name).resolve()
            if not included.is_file() or not included.is_relative_to(csrc):
                continue
            other = layer(included.relative_to(csrc))
            if other in LAYERS and LAYERS.index(other) < LAYERS.index(own):
                yield f"{path}:{number}: {own} includes {other}: {name}"


def torch_on_devices(csrc: Path) -> Iterator[str]:
    """Headers of torch in what nvcc reads."""
    reached = [*sorted(csrc.rglob("*.cu")), *sorted(csrc.rglob("*.cuh"))]
    for path in reached:
        for number, name, by_nvcc in includes(path):
            included = (path.parent / name).resolve()
            if by_nvcc and OF_TORCH.match(name):
                yield f"{path}:{number}: device code includes torch: {name}"
            elif by_nvcc and included.is_file() and included not in reached:
                reached.append(included)


def too_long(root: Path) -> Iterator[str]:
    """Files above their limit without a comment ``size: <reason>`` near the top."""
    for folder, limit in LIMITS.items():
        for path in sorted((root / folder).rglob("*.*")):
            if path.suffix not in SOURCES or path.is_symlink():
                continue
            lines = path.read_text().splitlines()
            if len(lines) > limit and not REASON.search("\n".join(lines[:20])):
                yield f"{path}: {len(lines)} lines, limit {limit}"


def main(root: Path = ROOT) -> int:
    """Prints what is wrong; 1 if anything is."""
    csrc = root.resolve() / "csrc"
    found = [*wrong_directions(csrc), *torch_on_devices(csrc), *too_long(csrc.parent)]
    for complaint in found:
        print(complaint.removeprefix(f"{csrc.parent}/"))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
