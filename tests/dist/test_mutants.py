"""The planted bugs of `make mutants` fit the sources."""

from pathlib import Path

import pytest

import mutants

FOLDER = Path(__file__).with_name("mutants")
ALL = [mutant for path in sorted(FOLDER.glob("*.txt")) for mutant in mutants.read(path)]


def test_names_are_unique():
    names = [mutant.name for mutant in ALL]
    assert len({*names}) == len(names) > 80


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_fits(mutant):
    assert mutant.cells and mutant.changes
    texts = {}
    for change in mutant.changes:
        text = texts.get(change.path) or (mutants.ROOT / change.path).read_text()
        texts[change.path] = mutants.replaced(text, change)
