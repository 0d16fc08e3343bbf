"""Builds torchkv's binaries and installs what C++ programs need.

torchkv/lib/libtorchkv.so        the store: links LibTorch, does not depend on Python
torchkv/lib/libtorchkv_cuda.so   the CUDA kernels, if built: does not link torch
torchkv/_C.<suffix>.so           the Python binding: csrc/bindings/python/module.cpp
torchkv/include, share           headers and the CMake package config
"""

from __future__ import annotations

import copy
import os
import re
import shlex
import shutil
import sys
import sysconfig
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))
import cuda_kernels  # noqa: E402

CSRC = ROOT / "csrc"
OLDEST_TORCH = (2, 11)
OLDEST_SETUPTOOLS = 77  # the first that reads the licence as pyproject.toml has it


def stop(problem: str) -> NoReturn:
    """Ends the build with one line that says what to do."""
    sys.exit(f"torchkv: {problem}")


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: '2.13.0+cpu' gives (2, 13, 0)."""
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3]))


def check_platform() -> None:
    """Finds the compiler and Python.h, before anything slow is imported."""
    if sys.platform != "linux":
        stop(f"only Linux is supported so far, but this is {sys.platform}")
    # torch and setuptools choose a compiler independently unless CXX is set.
    if not os.environ.get("CXX"):
        found = [cxx for cxx in ("c++", "g++", "clang++") if shutil.which(cxx)]
        if not found:
            stop(
                "a C++ compiler is needed to build: apt install g++, "
                "or set CXX to the one to use"
            )
        os.environ["CXX"] = found[0]
    elif not shutil.which(shlex.split(os.environ["CXX"])[0]):
        stop(f"the C++ compiler CXX={os.environ['CXX']} was not found")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        stop(
            "Python's headers are needed to build: apt install "
            f"python{sys.version_info[0]}.{sys.version_info[1]}-dev"
        )


check_platform()
# An environment that is not activated has its ninja off the PATH.
os.environ["PATH"] += os.pathsep + sysconfig.get_path("scripts")

try:
    import setuptools
except ImportError:
    stop("setuptools is needed to build: pip install setuptools")
if release(setuptools.__version__) < (OLDEST_SETUPTOOLS,):
    stop(
        f"setuptools {OLDEST_SETUPTOOLS} or newer is needed to build, but "
        f"{setuptools.__version__} is installed: pip install --upgrade "
        f"'setuptools>={OLDEST_SETUPTOOLS}'"
    )

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, include_paths, library_paths
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    stop(
        "PyTorch is needed to build: pip install "
        f"'torch>={OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}' and then "
        "pip install --no-build-isolation ."
    )
if release(torch.__version__) < OLDEST_TORCH:
    stop(
        f"PyTorch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or newer is needed, but "
        f"{torch.__version__} is installed: pip install --upgrade torch"
    )

from setuptools import Extension, setup  # noqa: E402
from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402
from setuptools.command.build import build  # noqa: E402

import torch_flags  # noqa: E402

TORCH_MINOR = "{}.{}".format(*release(torch.__version__))
TORCH = Path(torch.__file__).parent
LIBRARY = "torchkv.lib.libtorchkv"
# The folders of csrc/ compiled as one source, by its name; the others join kvstore.cpp.
UNITS = {
    # Both include TorchScript's headers.
    "bindings": "script",
    "update": "script",
    "comm": "comm",
    "core": "memory",
    "dist": "dist",
    "dist/protocol": "protocol",
    "dist/transport": "protocol",
    "device": "memory",
    "memory": "memory",
}
OBJECTS = torch_flags.objects("")


def library_sources() -> list[str]:
    """The sources of libtorchkv, from the list that CMake reads too."""
    lines = (CSRC / "sources.txt").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and line[0] != "#"]


def public_headers() -> list[Path]:
    """Those for programs and all that they include, relative to csrc/."""
    found = [CSRC / "kvstore.h", CSRC / "store" / "registry.h"]
    for header in found:
        for name in re.findall(r'^#include "(.+)"', header.read_text(), re.MULTILINE):
            included = (header.parent / name).resolve()
            # built_for_torch.h is written by the installation.
            if included not in found and included.is_file():
                found.append(included)
    return sorted(header.relative_to(CSRC) for header in found)


def unity_sources(sources: list[str], folder: Path) -> list[str]:
    """The sources to compile: one for each group of UNITS, and the kernels.

    Most of the time of a small source goes to torch's headers, so each group parses
    them once. Kernels are compiled separately, so that grouping cannot change the code
    generated for them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    result = []
    groups: dict[str, list[str]] = {}
    for source in sources:
        path = Path(source).relative_to("csrc").parent
        part = path.parts[0] if path.parts else ""
        if part == "kernels":
            result.append(source)
        else:
            name = UNITS.get(str(path)) or UNITS.get(part, "kvstore")
            groups.setdefault(name, []).append(source)
    for name, members in groups.items():
        unit = folder / f"{name}.cpp"
        text = "".join(f'#include "{ROOT / member}"\n' for member in members)
        if not unit.is_file() or unit.read_text() != text:
            unit.write_text(text)
        result.append(str(unit.relative_to(ROOT)))
    return result


def compile_flags() -> list[str]:
    """Flags of the C++ sources; the -std flag comes from torch."""
    flags = [
        "-O3",
        # The same bits whichever instructions the processor has (kernels/cpu).
        "-ffp-contract=off",
        # errno is not read, and setting it keeps loops with sqrt from being vectorized.
        "-fno-math-errno",
        "-g0",  # setuptools asks for -g, which triples the time and the objects
        "-Wall",
        "-Wextra",
        # gcc follows the data flow into torch's inline functions, system
        # headers or not, and these warn of what cannot happen there.
        "-Wno-unknown-warning-option",
        "-Wno-array-bounds",
        "-Wno-maybe-uninitialized",
        "-Wno-stringop-overflow",
        "-fvisibility=hidden",
        # ATen's headers then include the operators that they need, not all.
        "-DAT_PER_OPERATOR_HEADERS",
        # Else gcc stops inlining in the grouped sources; clang ignores these.
        "--param=inline-unit-growth=400",
        "--param=large-unit-insns=100000",
        "-Wno-ignored-optimization-argument",
        # File names in error messages: csrc/key.cpp, torch/include/c10/...
        f"-ffile-prefix-map={ROOT}/=",
        f"-ffile-prefix-map={TORCH.parent}/=",
    ]
    if os.environ.get("TORCHKV_WERROR", "1") != "0":
        flags.append("-Werror")
    # Other people's headers must not warn, so they come as system headers.
    for folder in include_paths():
        flags += ["-isystem", folder]
    return flags + openmp_flags()


def openmp_flags() -> list[str]:
    """at::parallel_for is inline: without OpenMP it runs on one thread."""
    uses_openmp = "backend: OpenMP" in torch.__config__.parallel_info()
    return ["-fopenmp"] if uses_openmp else []


def cuda_toolkit() -> cuda_kernels.Toolkit | None:
    """What compiles the CUDA kernels; None leaves them out.

    That this machine has a GPU does not matter, for it need not be the one on which the
    package is used.
    """
    wanted = os.environ.get("TORCHKV_USE_CUDA", "")
    if wanted not in ("", "0", "1"):
        stop(f"TORCHKV_USE_CUDA: expected 0 or 1, but got '{wanted}'")
    if wanted == "0" or (not wanted and torch.version.cuda is None):
        return None
    toolkit = cuda_kernels.find_toolkit()
    if toolkit:
        return toolkit
    missing = "nvcc was not found; set CUDA_HOME to the CUDA toolkit"
    if wanted:
        stop(f"TORCHKV_USE_CUDA=1 asks for the CUDA kernels, but {missing}")
    print(f"torchkv: building without CUDA kernels: {missing}", file=sys.stderr)
    return None


def find_cudart(toolkit: cuda_kernels.Toolkit) -> Path:
    """The CUDA runtime for the kernels: the one that torch loads, or a static one."""
    if (torch.version.cuda or "").partition(".")[0] != toolkit.major:
        # No CUDA in this torch, or a runtime that these kernels cannot use.
        return toolkit.find("libcudart_static.a", [])
    packages = TORCH.parent / "nvidia"
    return toolkit.find(
        f"libcudart.so.{toolkit.major}",
        [packages / f"cu{toolkit.major}/lib", packages / "cuda_runtime/lib"],
    )


def extensions() -> list[Extension]:
    """The two C++ binaries, in the order in which they are built."""
    headers = [str(path.relative_to(ROOT)) for path in sorted(CSRC.rglob("*.h"))]
    library = Extension(
        LIBRARY,
        library_sources(),
        depends=headers,
        include_dirs=[str(CSRC)],
        library_dirs=library_paths(),
        libraries=["torch", "torch_cpu", "c10"],
        extra_compile_args=compile_flags(),
        extra_link_args=[
            *openmp_flags(),
            "-Wl,--no-undefined",
            "-Wl,-soname,libtorchkv.so",
            # For C++ programs; in Python, torch is loaded already.
            "-Wl,-rpath,$ORIGIN/../../torch/lib",
        ],
        language="c++",
    )
    binding = Extension(
        "torchkv._C",
        ["csrc/bindings/python/module.cpp"],
        depends=headers,
        include_dirs=[str(CSRC)],
        library_dirs=library_paths(),  # build_extension adds that of libtorchkv
        libraries=["torchkv", "torch_python", "torch", "torch_cpu", "c10"],
        extra_compile_args=[
            *compile_flags(),
            "-isystem",
            sysconfig.get_path("include"),
        ],
        extra_link_args=["-Wl,-rpath,$ORIGIN/lib"],
        language="c++",
    )
    return [library, binding]


def built_for_torch() -> str:
    """A header that refuses to be compiled with another torch's headers."""
    message = f'#error "torchkv was built for torch {TORCH_MINOR}, but these are the'
    major, minor = TORCH_MINOR.split(".")
    lines = [
        "// Written by setup.py.",
        "#pragma once",
        "#include <torch/version.h>",
        f"#if TORCH_VERSION_MAJOR != {major} || TORCH_VERSION_MINOR != {minor}",
    ]
    for i, other in enumerate(range(OLDEST_TORCH[1], OLDEST_TORCH[1] + 20)):
        condition = f"TORCH_VERSION_MAJOR == {major} && TORCH_VERSION_MINOR == {other}"
        lines += [
            f"#{'elif' if i else 'if'} {condition}",
            f'{message} headers of torch {major}.{other}"',
        ]
    lines += ["#else", f'{message} headers of another one"', "#endif", "#endif", ""]
    return "\n".join(lines)


class Wheel(bdist_wheel):
    """A wheel whose build tag names what it is for: '2.13.cpu', '2.15.cu130'."""

    def finalize_options(self) -> None:
        """Sets the tag: all wheels of one version have the same name otherwise."""
        if self.build_number is None:
            toolkit = cuda_toolkit()
            kernels = "cu" + toolkit.release.replace(".", "") if toolkit else "cpu"
            self.build_number = f"{TORCH_MINOR}.{kernels}"
        super().finalize_options()


class Build(build):
    """A build whose result holds nothing of earlier builds."""

    def run(self) -> None:
        """Starts from an empty folder; a removed file must leave the wheel."""
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class BuildBinaries(BuildExtension):
    """torch's build_ext, which can also build a library that is no Python module."""

    def finalize_options(self) -> None:
        """Keeps the objects: editable installs would throw them away."""
        super().finalize_options()
        self.build_temp = str(OBJECTS)
        self.library_linked = threading.Event()
        if os.environ.get("MAX_JOBS") != "1":
            self.parallel = 2  # the bindings are compiled beside the library

    def get_ext_filename(self, name: str) -> str:
        """libtorchkv.so has no Python in its name; asked with and without package."""
        if name.rpartition(".")[2] == LIBRARY.rpartition(".")[2]:
            return os.path.join(*name.split(".")) + ".so"
        return super().get_ext_filename(name)

    def build_extensions(self) -> None:
        """Without Python's headers for the library: including them is an error."""
        python = {sysconfig.get_path(name) for name in ("include", "platinclude")}
        kept = [d for d in self.compiler.include_dirs if d not in python]
        self.compiler.include_dirs = kept
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        """Builds each extension in a separate folder: ninja keeps its state there."""
        own = copy.copy(self)  # the other extension is built at the same time
        own.build_temp = str(OBJECTS / ext.name)
        if ext.name == LIBRARY:
            ext.depends += ext.sources
            ext.sources = unity_sources(ext.sources, OBJECTS / "units")
        else:
            ext.library_dirs.insert(0, os.path.join(self.build_lib, "torchkv", "lib"))
        try:
            super(BuildBinaries, own).build_extension(ext)
        finally:
            if ext.name == LIBRARY:
                self.library_linked.set()

    def get_libraries(self, ext: Extension) -> list[str]:
        """Asked for just before linking: the bindings link the library."""
        if ext.name != LIBRARY:
            self.library_linked.wait()
        return super().get_libraries(ext)

    def run(self) -> None:
        """Builds the binaries, then puts the C++ interface beside them."""
        toolkit = cuda_toolkit()  # whether it is there, before anything slow
        package = ROOT / "torchkv" if self.inplace else Path(self.build_lib, "torchkv")
        (package / "lib").mkdir(parents=True, exist_ok=True)
        # The compilers of both are programs, so a thread is enough to start one.
        with ThreadPoolExecutor(1) as pool:
            kernels = pool.submit(
                self.add_cuda_kernels, package / "lib" / "libtorchkv_cuda.so", toolkit
            )
            super().run()
            kernels.result()
        self.add_headers(package / "include" / "torchkv")
        self.add_cmake_config(package / "share" / "cmake" / "torchkv")
        # For torchkv/__init__.py, which compares it before it loads the library.
        (package / "_built_for.py").write_text(f'TORCH = "{TORCH_MINOR}"\n')

    def add_cuda_kernels(
        self, library: Path, toolkit: cuda_kernels.Toolkit | None
    ) -> None:
        """Compiles the kernels, or removes those of an earlier build."""
        library.unlink(missing_ok=True)
        if toolkit:
            # No torch in this name: the kernels' objects are the same for all.
            objects = ROOT / "build" / f"cuda-{toolkit.release}"
            cuda_kernels.build(library, objects, toolkit, find_cudart(toolkit))

    def add_headers(self, include: Path) -> None:
        """Copies the headers; an editable install gets links to those of csrc/."""
        if include.is_symlink():  # of an older build
            include.unlink()
        shutil.rmtree(include, ignore_errors=True)
        for header in public_headers():
            target = include / header
            target.parent.mkdir(parents=True, exist_ok=True)
            if self.inplace:
                target.symlink_to(CSRC / header)
            else:
                shutil.copyfile(CSRC / header, target)
        (include / "built_for_torch.h").write_text(built_for_torch())

    def add_cmake_config(self, folder: Path) -> None:
        """Fills in the templates that find_package(torchkv) reads."""
        values = {
            "@TORCHKV_VERSION@": self.distribution.get_version(),
            "@TORCHKV_TORCH_VERSION@": TORCH_MINOR,
        }
        folder.mkdir(parents=True, exist_ok=True)
        for template in sorted((ROOT / "cmake").glob("*.cmake.in")):
            text = template.read_text()
            for name, value in values.items():
                text = text.replace(name, value)
            (folder / template.stem).write_text(text)


setup(
    ext_modules=extensions(),
    cmdclass={"bdist_wheel": Wheel, "build": Build, "build_ext": BuildBinaries},
    # torch's C++ ABI changes with every minor release.
    install_requires=[f"torch=={TORCH_MINOR}.*", "pyzmq>=27"],
)
