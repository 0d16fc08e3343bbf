"""Every combination agrees with its model or is refused; the page has all of them."""

from pathlib import Path

import pytest

import composition

PAGE = Path(__file__).parents[1] / "docs" / "composition.md"

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
]


@pytest.mark.parametrize("updater", composition.UPDATERS)
def test_each_cell_agrees_or_is_refused(updater, devices):
    types = [*composition.TYPES, *(["nccl"] if devices[0].type == "cuda" else [])]
    for cell in composition.cells(updater, types):
        text = composition.refusal(cell, devices)
        if cell.type == "local" and cell.codec is not None:
            assert text is not None and "but got 'local'" in text
        elif cell.key == "row-sparse" and not composition.takes_rows(updater):
            assert text is not None and "the key is row-sparse" in text
        else:
            assert text is None, cell


def test_the_page_is_that_of_the_tests():
    assert PAGE.read_text() == composition.page()
