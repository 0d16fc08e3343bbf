"""The diagrams and plots of the documentation."""

import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

import diagrams
import plots

ROOT = Path(__file__).parents[2]
DIAGRAMS = [
    pytest.param(source, id=f"{page.name} {i}")
    for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
    for i, source in enumerate(
        re.findall(
            r"^```mermaid\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
        )
    )
]
needs_graphviz = pytest.mark.skipif(not shutil.which("dot"), reason="needs graphviz")


# --- Diagrams -------------------------------------------------------------------


@needs_graphviz
@pytest.mark.parametrize("source", DIAGRAMS)
def test_every_diagram_is_drawn(source):
    svg = ElementTree.fromstring(diagrams.draw(source))
    shown = " ".join("".join(svg.itertext()).split())
    for label in re.findall(r'\["?([^"\]]+)"?\]', source):
        for line in re.split(r"<br ?/?>", label):
            assert line.strip('()"') in shown


def test_nodes_and_edges_of_a_flowchart():
    dot = diagrams.dot_of(
        ['subgraph s["title"]', 'a["A"] -->|"of it"| node{B}', "end", "a -.-> c[(C)]"],
        "LR",
    )
    for line in (
        "rankdir=LR",
        'subgraph cluster_s { label="title";',
        'n_a [label="A" shape=box',
        'n_node [label="B" shape=diamond',
        'n_a -> n_node [label=" of it " style=solid',
        'n_c [label="C" shape=cylinder',
        "n_a -> n_c [label=",
    ):
        assert line in dot
    assert dot.count("n_a [label=") == 1, "defined once"


def test_messages_of_a_sequence():
    svg = ElementTree.fromstring(
        diagrams.draw(
            "sequenceDiagram\n  participant A as one\n  participant B as two\n"
            "  A->>B: x < y\n  B-->>A: done\n  Note over A: sum"
        )
    )
    shown = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert shown == ["one", "two", "x < y", "done", "sum"]


@pytest.mark.parametrize(
    "source",
    [
        "pie\n  a: 3",
        "sequenceDiagram\n  loop forever",
        "flowchart TD\n  a ==> b",
        "flowchart TD\n  click a callback",
    ],
)
def test_the_rest_of_mermaid_is_refused(source):
    with pytest.raises(diagrams.Unknown):
        diagrams.draw(source)


# --- Plots ----------------------------------------------------------------------

TEXT = """
| push | time | ratio |
|---|---|---|
| torchkv `push` | 2 ms | 1.00 |
| MXNet (x) | 4 ms | 2.00 (target: 3) |

| step | ratio |
|---|---|
| **first** | |
| Gloo | 3.5 |
| **second** | |
| Gloo | 0.5 |
"""


def test_rows_are_found_by_part_and_name():
    page = plots.Page(TEXT)
    assert page.number("push", "torchkv push", "ratio") == 1
    assert page.number("push", "MXNet", "ratio") == 2
    assert page.number("first", "Gloo", "ratio") == 3.5
    assert page.number("second", "Gloo", "ratio") == 0.5
    for part, row in ("third", "Gloo"), ("first", "MXNet"):
        with pytest.raises(KeyError):
            page.number(part, row, "ratio")


def test_the_data_of_the_page():
    page = plots.Page(plots.PAGE.read_text())
    text = plots.PAGE.read_text()
    bars = [*plots.one_process(page), *plots.several_processes(page)]
    assert len(bars) == 18
    for bar in bars:
        assert f" {bar.ratio:.2f} " in text or f" {bar.ratio} " in text, bar
    panels = plots.sizes(page)
    assert list(panels) == ["2 ranks", "3 ranks", "4 ranks"]
    for lines in panels.values():
        assert {len(points) for points in lines.values()} == {6}
    assert panels["2 ranks"]["torchkv, sockets"][0] == (64, 199)
    assert panels["4 ranks"]["MXNet"][-1] == (100e6, 499e3)


def test_plots_are_drawn(tmp_path):
    plots.draw_all(tmp_path)
    for name in plots.PLOTS:
        ElementTree.parse(tmp_path / f"{name}.svg")
