"""libtorchkv_cuda.so, as far as it goes without a GPU."""

import ctypes
import os
import re
from pathlib import Path

import pytest

import torchkv

PACKAGE = Path(torchkv.__file__).parent
ROOT = Path(__file__).parents[2]


def test_loads_without_gpu_and_driver():
    path = PACKAGE / "lib" / "libtorchkv_cuda.so"
    if not path.exists():
        assert os.environ.get("TORCHKV_USE_CUDA") != "1"
        pytest.skip("torchkv was built without CUDA kernels")
    library = ctypes.CDLL(path)
    library.torchkv_cuda_table.restype = ctypes.POINTER(ctypes.c_uint32)
    header = ROOT / "csrc" / "kernels" / "cuda" / "params.h"
    found = library.torchkv_cuda_table()[0]
    assert found > 0
    if header.exists():  # the tests of a wheel are without the sources
        abi = re.search(r"kAbi = (\d+);", header.read_text())
        assert found == int(abi[1])
