"""What C++ programs are told where the torch they build with is another one."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import torchkv

PACKAGE = Path(torchkv.__file__).parent
INCLUDE = PACKAGE / "include"
MINOR = ".".join(torch.__version__.split(".")[:2])


def preprocessed(tmp_path, major, minor):
    """The compiler's errors about <torchkv/kvstore.h> beside torch's version.h."""
    version = tmp_path / "torch" / "version.h"
    version.parent.mkdir()
    version.write_text(
        f"#define TORCH_VERSION_MAJOR {major}\n#define TORCH_VERSION_MINOR {minor}\n"
    )
    done = subprocess.run(
        [
            *(os.environ.get("CXX") or "c++").split(),
            *("-x", "c++", "-std=c++17", "-fsyntax-only", "-I", str(tmp_path)),
            *("-I", str(INCLUDE), "-"),
        ],
        input="#include <torchkv/built_for_torch.h>\n",
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    return [line for line in done.stderr.splitlines() if " error: " in line]


def test_headers_refuse_another_torch(tmp_path):
    (error,) = preprocessed(tmp_path, 2, 12 if MINOR != "2.12" else 13)
    other = "2.12" if MINOR != "2.12" else "2.13"
    assert f"torchkv was built for torch {MINOR}, but these are the headers of" in error
    assert f"torch {other}" in error


def test_headers_refuse_a_torch_that_is_not_known(tmp_path):
    (error,) = preprocessed(tmp_path, 3, 0)
    assert f"torchkv was built for torch {MINOR}, but these are" in error


def test_headers_take_their_torch(tmp_path):
    assert preprocessed(tmp_path, *MINOR.split(".")) == []


def test_the_headers_ask_first():
    header = INCLUDE / "torchkv" / "kvstore.h"
    for first in ("core/export.h", "../built_for_torch.h"):
        lines = header.read_text().splitlines()
        includes = [line for line in lines if line.startswith("#include")]
        assert f'"{first}"' in includes[0]
        header = header.parent / first


@pytest.mark.skipif(not shutil.which("cmake"), reason="needs cmake")
def test_cmake_names_both(tmp_path):
    other = tmp_path / "Torch" / "share" / "cmake" / "Torch"
    other.mkdir(parents=True)
    (other / "TorchConfig.cmake").write_text("set(TORCH_LIBRARIES torch)\n")
    (other / "TorchConfigVersion.cmake").write_text(
        "set(PACKAGE_VERSION 2.5.1)\nset(PACKAGE_VERSION_COMPATIBLE TRUE)\n"
    )
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(program LANGUAGES NONE)\n"
        "find_package(torchkv REQUIRED)\n"
    )
    done = subprocess.run(
        [
            *("cmake", "-S", str(tmp_path), "-B", str(tmp_path / "build")),
            f"-DTorch_DIR={other}",
            f"-Dtorchkv_DIR={PACKAGE / 'share' / 'cmake' / 'torchkv'}",
        ],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode != 0
    told = " ".join(done.stderr.split())
    assert f"torchkv was built for torch {MINOR}, but torch 2.5.1 was found" in told
