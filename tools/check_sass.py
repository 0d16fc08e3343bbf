"""Compares the machine code of the CUDA kernels with limits.

Reads libtorchkv_cuda.so, as setup.py built it, with cuobjdump. A kernel that spills
registers, needs too many for its blocks to be in flight together, or accesses memory in
small units is correct but slow, which no other test detects. One with a constant offset
that wrapped around reads zeros on a GPU instead of its parameters.
"""

import argparse
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import cuda_kernels

# The compiler that the limits are for: tools/get_nvcc.
RELEASE = "13.0"


class Limits(NamedTuple):
    """The limits of a kernel."""

    registers: int  # at most, of a thread: 65536 / (256 threads * blocks in flight)
    stack: int  # at most, bytes of a thread: registers spilled, arrays not in registers
    loads: int  # at least, of 16 bytes, in the code
    stores: int  # at least, of 16 bytes, in the code
    # At least, loads of fewer bytes: several in flight where tensors are not aligned.
    narrow: int = 8


# Farther before a register than any field of a struct: an offset above 32767 that ptxas
# stored in 16 bits. For sm_80 it adds 65536 to the register before.
WRAPPED = 1 << 14
WITH_CARRY = {"sm_75", "sm_80", "sm_86", "sm_87", "sm_89"}
# In the order of kernels/cuda/params.h.
RULES = ("assign", "sgd", "adam", "other", "norm", "measure", "scaled")
# In the order of core/codec.h.
CODECS = ("none", "1bit", "2bit", "fp16", "bf16", "fp8", "int4", "topk")
HALF = "(__half|__nv_bfloat16)"
FEEDBACK = "(1bit|2bit|fp16|bf16|fp8|topk)"  # codecs with residuals
# Kernels by name, sum<values, stored, rule, number of values> and send<values, codec,
# packs> as --list shows them; the first match applies. 40, 48, 64, 80 and 128 registers
# leave room for 6, 5, 4, 3 and 2 blocks.
LIMITS = {
    r"copy_kernel<.*": Limits(registers=64, stack=0, loads=4, stores=28),
    r"sum<float, float, assign, [234]> .*": Limits(48, 0, loads=3, stores=1),
    r"sum<float, float, assign, 8> .*": Limits(64, 0, loads=3, stores=1),
    r"sum<float, float, sgd, [1234]> .*": Limits(64, 0, loads=4, stores=2),
    r"sum<float, float, sgd, 8> .*": Limits(80, 0, loads=10, stores=2),
    r"sum<float, float, adam, [1234]> .*": Limits(48, 0, loads=5, stores=4),
    r"sum<float, float, adam, 8> .*": Limits(80, 0, loads=12, stores=4),
    rf"sum<{HALF}, {HALF}, assign, [234]> .*": Limits(48, 0, loads=3, stores=1),
    rf"sum<{HALF}, {HALF}, assign, 8> .*": Limits(64, 0, loads=3, stores=1),
    rf"sum<{HALF}, {HALF}, sgd, [1234]> .*": Limits(64, 0, loads=6, stores=5),
    rf"sum<{HALF}, {HALF}, sgd, 8> .*": Limits(80, 0, loads=13, stores=5),
    # These read halves by 8 bytes, and fp32 tensors beside them by 16.
    rf"sum<{HALF}, {HALF}, adam, [1234]> .*": Limits(48, 0, loads=4, stores=4),
    rf"sum<{HALF}, {HALF}, adam, 8> .*": Limits(80, 0, loads=4, stores=4),
    r"sum<float, float, norm, 1> .*": Limits(64, 0, loads=4, stores=0),
    rf"sum<{HALF}, {HALF}, norm, 1> .*": Limits(64, 0, loads=4, stores=0),
    r"sum<double, double, norm, 1> .*": Limits(64, 0, loads=4, stores=0),
    r"sum<float, float, norm, 0> .*": Limits(64, 0, loads=4, stores=0, narrow=4),
    rf"sum<{HALF}, {HALF}, norm, 0> .*": Limits(64, 0, loads=4, stores=0, narrow=4),
    r"sum<double, double, norm, 0> .*": Limits(64, 0, loads=4, stores=0, narrow=4),
    # Weight, two states and four values; the states, or the weight.
    r"sum<float, float, (measure|scaled), 0> .*": Limits(64, 0, loads=8, stores=2),
    rf"sum<{HALF}, \w+, (measure|scaled), 0> .*": Limits(64, 0, loads=4, stores=2),
    r"rate_kernel<\d+ul>": Limits(64, 0, loads=0, stores=0),
    # Any number of values, in groups of four.
    r"sum<float, float, \w+, 0> .*": Limits(80, 0, loads=5, stores=1, narrow=4),
    rf"sum<{HALF}, {HALF}, assign, 0> .*": Limits(64, 0, loads=6, stores=1, narrow=4),
    rf"sum<{HALF}, float, assign, 0> .*": Limits(64, 0, loads=6, stores=2, narrow=4),
    rf"sum<{HALF}, float, sgd, 0> .*": Limits(64, 8, loads=10, stores=4, narrow=4),
    rf"sum<{HALF}, {HALF}, sgd, 0> .*": Limits(64, 0, loads=10, stores=4, narrow=4),
    rf"sum<{HALF}, \w+, (adam|other), 0> .*": Limits(
        80, 0, loads=5, stores=4, narrow=4
    ),
    r"sum<double, double, \w+, 0> .*": Limits(128, 0, loads=5, stores=1, narrow=4),
    r"sum<unsigned (short|int|long), .*": Limits(64, 0, loads=5, stores=1, narrow=4),
    # The value and the residual; what is sent, or its codes, and the new residual.
    rf"send<float, {FEEDBACK}, false>": Limits(40, 0, loads=2, stores=2),
    rf"send<float, {FEEDBACK}, true>": Limits(40, 0, loads=2, stores=1),
    r"send<float, int4, false>": Limits(40, 0, loads=1, stores=1, narrow=4),
    r"send<float, int4, true>": Limits(40, 0, loads=1, stores=0, narrow=4),
    # These read halves by 8 bytes.
    rf"send<{HALF}, {FEEDBACK}, false>": Limits(40, 0, loads=1, stores=2),
    rf"send<{HALF}, {FEEDBACK}, true>": Limits(40, 0, loads=1, stores=1),
    rf"send<{HALF}, int4, false>": Limits(40, 0, loads=0, stores=1, narrow=4),
    rf"send<{HALF}, int4, true>": Limits(40, 0, loads=0, stores=0, narrow=4),
    rf"send<double, {FEEDBACK}, false>": Limits(64, 0, loads=4, stores=4),
    rf"send<double, {FEEDBACK}, true>": Limits(64, 0, loads=4, stores=2),
    r"send<double, int4, false>": Limits(64, 0, loads=2, stores=2, narrow=4),
    r"send<double, int4, true>": Limits(64, 0, loads=2, stores=0, narrow=4),
    # The value and the residual.
    r"top_count_kernel<float>.*": Limits(40, 0, loads=2, stores=0),
    rf"top_count_kernel<{HALF}>.*": Limits(40, 0, loads=1, stores=0),
    r"top_count_kernel<double>.*": Limits(64, 0, loads=4, stores=0),
    r"top_choice_kernel.*": Limits(40, 0, loads=0, stores=0),
    # A sum and a dense value, or codes by words; the sum.
    r"receive_kernel<float, \w+>": Limits(40, 0, loads=2, stores=1),
    r"receive_kernel<double, \w+>": Limits(64, 0, loads=4, stores=2),
    # Words of four rows together, or elements.
    r"row_sum_kernel<float, 4>": Limits(64, 0, loads=4, stores=1, narrow=2),
    rf"row_sum_kernel<{HALF}, 8>": Limits(64, 0, loads=4, stores=2, narrow=2),
    r"row_sum_kernel<Bool, 16>": Limits(64, 160, loads=4, stores=1, narrow=2),
    r"row_sum_kernel<\w+( \w+)*, \d+>": Limits(64, 0, loads=0, stores=0, narrow=2),
    # Four rows together, the weight, the master and three states; halves by 8 bytes.
    r"row_step_kernel<float, \w+, 4>": Limits(80, 0, loads=8, stores=4, narrow=2),
    r"row_step_kernel<double, double, 2>": Limits(80, 0, loads=8, stores=4, narrow=2),
    rf"row_step_kernel<{HALF}, \w+, 4>": Limits(80, 0, loads=4, stores=4, narrow=4),
    r"row_step_kernel<\w+, \w+, 1>": Limits(80, 0, loads=0, stores=0),
    # Byte by byte: not performance-critical.
    r"sum<(Bool|unsigned char), .*": Limits(64, 0, loads=0, stores=0, narrow=4),
}


class Kernel(NamedTuple):
    """What cuobjdump reports on one kernel for one architecture."""

    arch: str
    name: str
    registers: int
    stack: int
    loads: int
    stores: int
    narrow: int
    wrapped: int = 0  # constant offsets

    def breaches(self, limits: Limits) -> list[str]:
        """The limits that it exceeds, in words."""
        found = []
        for what in ("registers", "stack"):
            if getattr(self, what) > getattr(limits, what):
                found.append(
                    f"{what} {getattr(self, what)}, at most {getattr(limits, what)}"
                )
        for what, told in (
            ("loads", "loads of 16 bytes"),
            ("stores", "stores of 16 bytes"),
            ("narrow", "loads of less"),
        ):
            if getattr(self, what) < getattr(limits, what):
                found.append(
                    f"{told} {getattr(self, what)}, at least {getattr(limits, what)}"
                )
        if self.wrapped:
            found.append(f"constant offsets that wrapped around {self.wrapped}")
        return found


def is_wrapped(instruction: str) -> bool:
    """Whether a constant offset has wrapped around: c[0x0][R5+-0x7e28]."""
    found = re.search(r"c\[\w+\]\[(?:\w+\+)?-0x([0-9a-f]+)\]", instruction)
    return found is not None and int(found[1], 16) > WRAPPED


def run(*command: str | Path, text: str | None = None) -> str:
    """The output of a program."""
    done = subprocess.run(
        command, input=text, check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def short_names(symbols: list[str]) -> dict[str, str]:
    """Mangled names to short ones, such as 'sum<float, float, (Rule)1, 4> 4096'."""
    names = {}
    for symbol, name in zip(
        symbols, run("c++filt", text="\n".join(symbols)).splitlines(), strict=True
    ):
        name = re.sub(r"^void |\(anonymous namespace\)::|(\w+::)+", "", name)
        calls = r"Params<|Send\)|Receive\)|RowSums\)|RowStepParams<"
        name = re.sub(rf"\(({calls}).*", "", name)
        for number, rule in enumerate(RULES):
            name = name.replace(f"(Rule){number}", rule)
        for number, codec in enumerate(CODECS):
            name = name.replace(f"(Id){number}", codec)
        name = name.replace("send_kernel<", "send<")
        names[symbol] = re.sub(r"sum_kernel<Sum(<.*>), (\d+)ul>", r"sum\1 \2", name)
    return names


def read_kernels(library: Path, cuobjdump: Path) -> list[Kernel]:
    """All kernels of a library, of every architecture."""
    usage: dict[tuple[str, str], tuple[int, int]] = {}
    for line in run(cuobjdump, "-res-usage", library).splitlines():
        if found := re.match(r"arch = (\w+)", line):
            arch = found[1]
        elif found := re.match(r" Function (\S+):", line):
            symbol = found[1]
        elif found := re.match(r"\s+REG:(\d+) STACK:(\d+)", line):
            usage[arch, symbol] = int(found[1]), int(found[2])

    counts: Counter[tuple[str, str, str]] = Counter()
    for line in run(cuobjdump, "-sass", library).splitlines():
        if found := re.match(r"\s*arch = (\w+)", line):
            arch = found[1]
        elif found := re.match(r"\s*Function : (\S+)", line):
            symbol = found[1]
        elif found := re.search(r"\b(LDG|STG)(\.\S*)", line):
            kind = found[1] if "128" in found[2] else f"narrow {found[1]}"
            counts[arch, symbol, kind] += 1
        elif arch not in WITH_CARRY and is_wrapped(line):
            counts[arch, symbol, "wrapped"] += 1

    names = short_names(sorted({symbol for _, symbol in usage}))
    return sorted(
        Kernel(
            arch,
            names[symbol],
            *numbers,
            loads=counts[arch, symbol, "LDG"],
            stores=counts[arch, symbol, "STG"],
            narrow=counts[arch, symbol, "narrow LDG"],
            wrapped=counts[arch, symbol, "wrapped"],
        )
        for (arch, symbol), numbers in usage.items()
    )


def complaints(kernels: list[Kernel]) -> list[str]:
    """The errors in the kernels or in the table of limits."""
    found = []
    archs = {kernel.arch for kernel in kernels}
    unused = {(arch, pattern) for arch in archs for pattern in LIMITS}
    for kernel in kernels:
        pattern = next((p for p in LIMITS if re.fullmatch(p, kernel.name)), None)
        if pattern is None:
            found.append(f"{kernel.arch} {kernel.name}: has no limits")
            continue
        unused.discard((kernel.arch, pattern))
        found += [
            f"{kernel.arch} {kernel.name}: {breach}"
            for breach in kernel.breaches(LIMITS[pattern])
        ]
    # Limits for a renamed kernel would have no effect.
    found += [f"{arch}: no kernel is {name}" for arch, name in sorted(unused)]
    return found


def main() -> None:
    """Prints the kernels that exceed limits, and fails if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path, help="a libtorchkv_cuda.so")
    parser.add_argument("--list", action="store_true", help="show every kernel")
    arguments = parser.parse_args()

    toolkit = cuda_kernels.find_toolkit()
    if toolkit is None or toolkit.release != RELEASE:
        sys.exit(
            f"check_sass: the limits are for the compiler of CUDA {RELEASE}: "
            "set CUDA_HOME to what tools/get_nvcc prints"
        )
    kernels = read_kernels(arguments.library, toolkit.home / "bin" / "cuobjdump")
    if arguments.list:
        for kernel in kernels:
            print(
                f"{kernel.arch:7}{kernel.name:50}"
                f"{kernel.registers:4} registers {kernel.stack:4} B stack "
                f"{kernel.loads:3} loads {kernel.stores:3} stores "
                f"{kernel.narrow:3} narrow loads"
            )
    archs = {kernel.arch for kernel in kernels}
    expected = re.findall(r"sm_\w+", " ".join(cuda_kernels.arch_flags()))
    if archs != set(expected):
        sys.exit(f"check_sass: expected code for {expected}, but got {sorted(archs)}")
    found = complaints(kernels)
    if found:
        print("\n".join(found))
        sys.exit(f"check_sass: {len(found)} limits broken")
    print(f"check_sass: {len(kernels)} kernels within their limits")


if __name__ == "__main__":
    main()
