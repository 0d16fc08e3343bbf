"""A source distribution has all that is in the repository, and nothing else."""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MADE = {"PKG-INFO", "setup.cfg"}


def test_has_the_files_of_the_repository(tmp_path):
    if not (ROOT / ".git").exists():
        pytest.skip("needs the repository")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = {name for name in listed.stdout.split("\0") if (ROOT / name).is_file()}
    for name in files:
        copy = tmp_path / "tree" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy)
    (tmp_path / "tree/torchkv/_built_for.py").write_text("# of this build")
    subprocess.run(
        [
            sys.executable,
            "-c",
            "from setuptools import build_meta; build_meta.build_sdist('../dist')",
        ],
        cwd=tmp_path / "tree",
        capture_output=True,
        check=True,
    )
    (archive,) = (tmp_path / "dist").glob("torchkv-*.tar.gz")
    with tarfile.open(archive) as tar:
        packed = {member.name.partition("/")[2] for member in tar if member.isfile()}
    packed = {name for name in packed if not name.startswith("torchkv.egg-info/")}
    assert packed - MADE == files
