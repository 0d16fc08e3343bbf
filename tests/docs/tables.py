"""The tables of the pages of the documentation."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def rows_below(page, heading):
    """The rows of the first table below a heading, as dicts."""
    text = (DOCS / page).read_text().partition(f"\n## {heading}\n")[2]
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)[0].splitlines()
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table
    ]
    return [dict(zip(head, row, strict=True)) for row in rows]
