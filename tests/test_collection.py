"""pytest without arguments runs every test."""

from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import conftest

TESTS = Path(__file__).parent


class Item:
    """A test that is slow if its number is even."""

    def __init__(self, number):
        self.nodeid = f"tests/test_x.py::test_y[{number}]"
        self.is_slow = number % 2 == 0

    def get_closest_marker(self, name):
        return self if name == "slow" and self.is_slow else None


def test_every_slow_test_is_in_one_part():
    every = [Item(number) for number in range(100)]
    parts, left_out = [], []
    for part in (None, "0/3", "1/3", "2/3"):
        items = list(every)
        hook = SimpleNamespace(
            pytest_deselected=lambda items: left_out.append(len(items))
        )
        config = SimpleNamespace(getoption=lambda name, part=part: part, hook=hook)
        conftest.pytest_collection_modifyitems(config, items)
        parts.append(items)
    assert parts[0] == every
    quick = {item for item in every if not item.is_slow}
    slow = [{*part} - quick for part in parts[1:]]
    assert all(quick < {*part} for part in parts[1:])
    assert sum(map(len, slow)) == 50 and set.union(*slow) == {*every} - quick
    assert left_out == [50 - len(part) for part in slow]


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
