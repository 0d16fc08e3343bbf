"""The tables of the pages of the documentation."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def tables_of(page):
    """By the heading above: the rows of each table, as dicts."""
    tables = {}
    text = re.sub(
        r"^```.*?^```$", "", (DOCS / page).read_text(), flags=re.DOTALL | re.MULTILINE
    )
    heading = None
    for part in re.findall(r"^#+ .*$|(?:^\|.*\n)+", text, re.MULTILINE):
        if not part.startswith("|"):
            heading = part.lstrip("#").strip()
            continue
        head, _, *rows = [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in part.splitlines()
        ]
        made = [dict(zip(head, row, strict=True)) for row in rows]
        tables.setdefault(heading, []).append(made)
    return tables


def rows_below(page, heading):
    """The rows of the first table below a heading."""
    return tables_of(page)[heading][0]


def code_in(cell):
    return re.findall(r"`([^`]+)`", cell)


class RowTests:
    """The tests of the rows of some tables of from_mxnet.md, by a row's first cell."""

    def __init__(self, *headings):
        self.headings = headings
        self.tested = set()

    def __call__(self, *cells):
        """Decorates a test of the rows with these first cells."""
        self.tested.update(cells)
        return lambda test: test

    def check(self):
        """Every row has a test, and every test a row."""
        rows = {
            next(iter(row.values()))
            for heading in self.headings
            for row in rows_below("from_mxnet.md", heading)
        }
        assert self.tested == rows
