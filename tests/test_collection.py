"""pytest without arguments runs every test."""

from fnmatch import fnmatch
from pathlib import Path

TESTS = Path(__file__).parent


def test_no_folder_is_left_out(pytestconfig):
    patterns = pytestconfig.getini("norecursedirs")
    folders = {
        part
        for path in TESTS.rglob("test_*.py")
        for part in path.relative_to(TESTS).parts[:-1]
    }
    assert "dist" in folders
    assert not [
        folder
        for folder in folders
        if any(fnmatch(folder, pattern) for pattern in patterns)
    ]
