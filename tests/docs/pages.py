"""The pages of the documentation, and the blocks of code on them."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The tests of a wheel run without.
needs_sources = pytest.mark.skipif(
    not (ROOT / "csrc").is_dir(), reason="needs the sources"
)
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]

BLOCK = re.compile(
    r"(?:<!-- (?P<how>[^\n]*) -->\n)?"
    r"^```(?P<language>\w+)\n(?P<source>.*?)^```$"
    r"(?:\n\n```text\n(?P<output>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)


@dataclass
class Block:
    page: Path
    line: int
    how: str
    language: str
    source: str
    output: str | None


def blocks_of(page, language):
    text = page.read_text()
    return [
        Block(
            page,
            text.count("\n", 0, found.start("source")),
            found["how"] or "",
            found["language"],
            found["source"],
            found["output"],
        )
        for found in BLOCK.finditer(text)
        if found["language"] == language
    ]


def name_of(page):
    return page.relative_to(ROOT).as_posix()
