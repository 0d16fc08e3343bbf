"""Runs commands of the documentation in a folder, with the torchkv under test."""

import os
import subprocess
import sys
from pathlib import Path

from helpers import free_port
from pages import ROOT


def environment_in(folder):
    programs = Path(sys.executable).parent
    return {
        **os.environ,
        "HOME": str(folder),
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PET_MASTER_PORT": str(free_port()),  # torchrun's: others may use its default
    }


def shell(source, folder, environment, alone=False):
    """Starts it; `alone` with mounts of its own, by which ranks tell hosts."""
    return subprocess.Popen(
        [*["unshare", "--mount"] * alone, "bash", "-euc", source],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
