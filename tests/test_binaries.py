"""Errors of ``import torchkv`` if its libraries are missing or for another torch."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchkv

PACKAGE = Path(torchkv.__file__).parent

# An editable installation would find the libraries elsewhere.
IMPORTS = """
import sys
sys.meta_path[:] = [x for x in sys.meta_path if "Editable" not in type(x).__name__
                    and "Editable" not in getattr(x, "__name__", "")]
import torchkv
"""


def copied(folder, *left_out):
    """The package in another folder, without some of its parts."""
    ignored = shutil.ignore_patterns("include", "share", "__pycache__", *left_out)
    shutil.copytree(PACKAGE, folder / "torchkv", ignore=ignored)
    return folder


def import_error(folder):
    """The last line that an import from the folder prints."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "missing", [["_C*", "lib", "_built_for.py"], ["_C*"], ["lib"], ["_built_for.py"]]
)
def test_a_source_tree_without_binaries_says_what_to_do(tmp_path, missing):
    error = import_error(copied(tmp_path, *missing))
    assert error.startswith("ImportError: torchkv: ")
    assert "lacks compiled libraries" in error
    assert "pip install --no-build-isolation -e ." in error


def test_another_torch_is_named_before_the_library_is_loaded(tmp_path):
    folder = copied(tmp_path)
    for library in [*folder.rglob("*.so")]:
        library.write_bytes(b"not to be loaded")
    (folder / "torchkv" / "_built_for.py").write_text('TORCH = "2.5"\n')
    error = import_error(folder)
    assert error.startswith("ImportError: torchkv: this build is for torch 2.5, but ")
    assert torch.__version__ in error


def test_the_torch_of_the_build_is_accepted(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS + "print(torchkv.__file__)"],
        cwd=copied(tmp_path),
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
    )
    assert done.stdout.startswith(str(tmp_path))
