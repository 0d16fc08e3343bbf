"""How tools/cuda_kernels.py finds a CUDA toolkit and decides what to compile."""

import os
import subprocess
import sys

import pytest

import cuda_kernels

# A fake nvcc: records the sources, and calls the C++ compiler.
FAKE_NVCC = """\
#!{python}
import os, subprocess, sys
arguments = sys.argv[1:]
if "--version" in arguments:
    print("Cuda compilation tools, release 13.0, V13.0.88")
elif "--dryrun" in arguments:
    print("#$ TOP={home}/bin/..", file=sys.stderr)
else:
    start = arguments.index("-MD")
    with open("{home}/compiled", "a") as compiled:
        print(os.path.basename(arguments[arguments.index("-c") + 1]), file=compiled)
    command = ["c++", "-fPIC", "-x", "c++", *arguments[start:]]
    sys.exit(subprocess.run(command).returncode)
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A toolkit of one program, named by CUDA_HOME."""
    home = tmp_path / "toolkit"
    (home / "bin").mkdir(parents=True)
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(FAKE_NVCC.format(python=sys.executable, home=home))
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(home))
    for name in ("CUDA_PATH", "TORCH_CUDA_ARCH_LIST", "NVCC_CCBIN"):
        monkeypatch.delenv(name, raising=False)
    return home


@pytest.fixture
def build(home, tmp_path, monkeypatch):
    """Builds two sources, of which one has a header; returns which were compiled."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "part.h").write_text("int part();\n")
    (sources / "a.cu").write_text('#include "part.h"\nint a() { return part(); }\n')
    (sources / "b.cu").write_text("int part() { return 1; }\n")
    monkeypatch.setattr(cuda_kernels, "SOURCES", sources)
    cudart = tmp_path / "libcudart_static.a"
    subprocess.run(["ar", "rc", cudart], check=True)

    def build():
        compiled = home / "compiled"
        compiled.write_text("")
        cuda_kernels.build(
            tmp_path / "libtorchkv_cuda.so",
            tmp_path / "objects",
            cuda_kernels.find_toolkit(),
            cudart,
        )
        return sorted(compiled.read_text().split())

    return build


def touch(path):
    """Makes a file newer than all others."""
    later = path.stat().st_mtime + 3600
    os.utime(path, (later, later))


def test_compiles_what_is_new(build, tmp_path):
    assert build() == ["a.cu", "b.cu"]
    assert (tmp_path / "libtorchkv_cuda.so").is_file()
    assert build() == []
    touch(tmp_path / "sources" / "b.cu")
    assert build() == ["b.cu"]


def test_compiles_what_includes_a_new_header(build, tmp_path):
    build()
    touch(tmp_path / "sources" / "part.h")
    assert build() == ["a.cu"]


def test_compiles_all_for_other_flags(build, monkeypatch):
    build()
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert build() == ["a.cu", "b.cu"]


def test_compiles_again_what_failed(build, tmp_path):
    source = tmp_path / "sources" / "b.cu"
    good = source.read_text()
    source.write_text("int part() { return }\n")
    with pytest.raises(SystemExit, match="did not compile"):
        build()
    source.write_text(good)
    assert "b.cu" in build()


def test_cuda_home_comes_first(home):
    assert cuda_kernels.find_toolkit().home == home
    assert cuda_kernels.find_toolkit().release == "13.0"


def test_cuda_home_without_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(SystemExit, match=f"no bin/nvcc in CUDA_HOME={tmp_path}"):
        cuda_kernels.find_toolkit()


def test_compiler_behind_a_script(home, monkeypatch, tmp_path):
    wrapper = tmp_path / "programs" / "nvcc"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {home}/bin/nvcc "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", str(wrapper.parent), prepend=os.pathsep)
    assert cuda_kernels.find_toolkit().home == home


@pytest.mark.parametrize(
    ("archs", "flags"),
    [
        ("9.0", ["arch=compute_90,code=[sm_90]"]),
        (
            "9.0;8.0+PTX 9.0a",
            [
                "arch=compute_90a,code=sm_90a",
                "arch=compute_80,code=[sm_90,sm_80,compute_80]",
            ],
        ),
        ("Ampere", ["arch=compute_80,code=[sm_80,sm_86,compute_80]"]),
    ],
)
def test_archs(monkeypatch, archs, flags):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", archs)
    assert cuda_kernels.arch_flags() == [f"-gencode={flag}" for flag in flags]


def test_unknown_arch(monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0;sm_80")
    with pytest.raises(SystemExit, match="TORCH_CUDA_ARCH_LIST: .* but got 'sm_80'"):
        cuda_kernels.arch_flags()


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"TORCHKV_USE_CUDA": "on"}, "TORCHKV_USE_CUDA: expected 0 or 1, but got 'on'"),
        (
            {"TORCHKV_USE_CUDA": "1", "CUDA_HOME": "nowhere"},
            "there is no bin/nvcc in CUDA_HOME=nowhere",
        ),
    ],
)
def test_setup_stops_before_it_compiles(tmp_path, variables, problem):
    done = subprocess.run(
        [sys.executable, cuda_kernels.ROOT / "setup.py", "build_ext"],
        cwd=tmp_path,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"torchkv: {problem}"
