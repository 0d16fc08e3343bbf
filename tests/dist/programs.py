"""The C++ programs that `make test` builds for tests, and names in the environment."""

import os
import subprocess

import pytest

from torchkv.distributed import _zeromq_library


def path_of(variable: str) -> str:
    """Of the program; skips the test if `make test` does not run it."""
    path = os.environ.get(variable)
    if not path:
        pytest.skip(f"{variable} is not set")
    return os.path.abspath(path)


def run_as_rank(
    program: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """As the rank that this process would be."""
    return subprocess.run(
        [program, *arguments],
        env={**os.environ, "TORCHKV_LIBZMQ": _zeromq_library(), **environment},
        capture_output=True,
        text=True,
        timeout=50,
    )
