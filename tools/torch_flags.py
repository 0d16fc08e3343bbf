"""Prints the location and build options of the installed PyTorch as CMake code.

CMakeLists.txt uses this instead of find_package(Torch), which rejects a CUDA build
of PyTorch on machines without the full CUDA toolkit.
"""

import re
import sys
import sysconfig
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths


def cxx_standard() -> str:
    """The C++ standard of torch's headers, as in its package config."""
    config = Path(torch.utils.cmake_prefix_path, "Torch", "TorchConfig.cmake")
    found = re.search(r"CXX_STANDARD (\d+)", config.read_text())
    return found.group(1) if found else "20"


def objects(extension: str) -> Path:
    """Where setup.py leaves the objects of an extension.

    A folder per torch and Python: objects of different ABIs never meet, and ninja finds
    those of the last build, whoever starts it.
    """
    root = Path(__file__).resolve().parents[1]
    abi = f"torch-{torch.__version__}-{sys.implementation.cache_tag}"
    return root / "build" / abi / extension


def main() -> None:
    """Prints one set() per fact."""
    facts = {
        "TORCH_VERSION": torch.__version__,
        "TORCH_INCLUDE_DIRS": ";".join(include_paths()),
        "TORCH_LIBRARY_DIR": library_paths()[0],
        "TORCH_CXX_STANDARD": cxx_standard(),
        "TORCH_CXX11_ABI": int(torch.compiled_with_cxx11_abi()),
        "TORCH_OPENMP": int("backend: OpenMP" in torch.__config__.parallel_info()),
        "TORCHKV_OBJECTS": objects("torchkv.lib.libtorchkv"),
        "PYTHON_INCLUDE_DIR": sysconfig.get_path("include"),
    }
    for name, value in facts.items():
        print(f'set({name} "{value}")')


if __name__ == "__main__":
    main()
