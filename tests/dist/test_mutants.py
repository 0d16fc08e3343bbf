"""The planted bugs of `make mutants` fit the sources, and compile."""

import subprocess
from pathlib import Path

import pytest

import mutants

FOLDER = Path(__file__).with_name("mutants")
ALL = [mutant for path in sorted(FOLDER.glob("*.txt")) for mutant in mutants.read(path)]


def planted(mutant: mutants.Mutant, texts: dict[Path, str]) -> dict[Path, str]:
    """The sources that the mutant changes, those in `texts` instead of the tree's."""
    changed: dict[Path, str] = {}
    for change in mutant.changes:
        text = changed.get(change.path) or texts.get(change.path)
        text = text or (mutants.ROOT / change.path).read_text()
        changed[change.path] = mutants.replaced(text, change)
    return changed


def sources() -> list[tuple[Path, str]]:
    """Sources, few of them, in each of which as many bugs are planted as fit."""
    trees: list[dict[Path, str]] = []
    for mutant in ALL:
        for tree in [*trees, {}]:
            try:
                tree |= planted(mutant, tree)
            except ValueError:  # it changes what another has changed
                continue
            if tree not in trees:
                trees.append(tree)
            break
    return [item for tree in trees for item in tree.items()]


SOURCES = sources()


def test_names_are_unique():
    names = [mutant.name for mutant in ALL]
    assert len({*names}) == len(names) > 80


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_fits(mutant):
    assert mutant.cells and mutant.changes
    assert planted(mutant, {})


@pytest.mark.parametrize(
    ("path", "text"),
    SOURCES,
    ids=[f"{i}-{path.name}" for i, (path, _) in enumerate(SOURCES)],
)
def test_compiles(path, text, tmp_path):
    source = tmp_path / path.name
    source.write_text(text)
    command = mutants.compiler(mutants.ROOT, path)
    done = subprocess.run(
        [*command, "-fsyntax-only", str(source)], capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
