"""Checks that the compiled libraries exist and match torch before loading them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

if not (
    importlib.util.find_spec("torchkv._C")
    and importlib.util.find_spec("torchkv._built_for")
    and any(Path(__file__).parent.glob("lib/libtorchkv.*"))
):
    raise ImportError(
        f"torchkv: the source tree {Path(__file__).parent} lacks compiled libraries; "
        "change to another folder to import the installed torchkv, or build this one "
        "with pip install --no-build-isolation -e ."
    )

from torchkv._built_for import TORCH

_major, _minor = torch.__version__.split(".")[:2]
if f"{_major}.{_minor}" != TORCH:
    raise ImportError(
        f"torchkv: this build is for torch {TORCH}, but torch {torch.__version__} is "
        f"installed; install torch {TORCH}, or rebuild torchkv with pip install "
        "--no-build-isolation"
    )
