"""Draws the pages' Mermaid diagrams as SVG when the site is built.

GitHub draws the same diagrams itself. Mermaid's own program needs a browser, so this
has the part of the language that the pages use: flowcharts, which Graphviz lays out,
and sequence diagrams. Anything else is an error, which fails the build.
"""

from __future__ import annotations

import re
import subprocess
from html import escape

# Becomes the color of the page's text, in light and in dark mode.
INK = "#010203"

NODE = r"(?P<id>\w+)(?P<shape>\[\(|\[|\{|\()?(?:\"?(?P<label>.*?)\"?(?:\)\]|\]|\}|\)))?"
EDGE = re.compile(r" (?P<line>-->|-\.->|---)(?:\|\"?(?P<label>[^|\"]*)\"?\|)? ")
SHAPES = {None: "box", "[": "box", "[(": "cylinder", "{": "diamond", "(": "box"}


class Unknown(Exception):
    """A line that this part of Mermaid does not have."""


def quoted(text: str) -> str:
    """A string of Graphviz, with Mermaid's line breaks."""
    text = re.sub(r"<br ?/?>", "\n", text).replace("\\", r"\\").replace('"', r"\"")
    return '"' + text.replace("\n", r"\n") + '"'


def dot_of_node(text: str, known: set[str]) -> tuple[str, list[str]]:
    """A node's name and, where the diagram first has it, its definition."""
    found = re.fullmatch(NODE, text.strip())
    if not found:
        raise Unknown(text)
    label = found["label"]
    name = "n_" + found["id"]  # "node" is a word of Graphviz's
    if label is None and name in known:
        return name, []
    known.add(name)
    style = "rounded" if found["shape"] != "[" or label is None else ""
    attributes = f'shape={SHAPES[found["shape"]]} style="{style}"'
    return name, [f"{name} [label={quoted(label or found['id'])} {attributes}];"]


def dot_of(lines: list[str], direction: str) -> str:
    """A flowchart in Graphviz's language."""
    ink = f'color="{INK}" fontcolor="{INK}" fontname="Helvetica" fontsize=12'
    result = [
        f"digraph {{ rankdir={'TB' if direction == 'TD' else direction}; {ink};",
        f"bgcolor=transparent; compound=true; nodesep=0.35; ranksep=0.4; node [{ink}];"
        f" edge [{ink} arrowsize=0.7];",
    ]
    known: set[str] = set()
    for line in lines:
        if found := re.fullmatch(r"subgraph (\w+)(?:\[\"?(.*?)\"?\])?", line):
            title = quoted(found[2] or found[1])
            result.append(f"subgraph cluster_{found[1]} {{ label={title};")
        elif line == "end":
            result.append("}")
        else:
            edges = list(EDGE.finditer(line))
            starts = [0, *(edge.end() for edge in edges)]
            ends = [*(edge.start() for edge in edges), len(line)]
            ids = []
            for start, end in zip(starts, ends, strict=True):
                name, definition = dot_of_node(line[start:end], known)
                ids.append(name)
                result += definition
            for edge, tail, head in zip(edges, ids, ids[1:], strict=False):
                label = quoted(f" {edge['label'] or ''} ")
                style = "dashed" if edge["line"] == "-.->" else "solid"
                arrow = "none" if edge["line"] == "---" else "normal"
                result.append(
                    f"{tail} -> {head} [label={label} style={style} arrowhead={arrow}];"
                )
    return "\n".join([*result, "}"])


def draw_flowchart(lines: list[str], direction: str) -> str:
    """A flowchart as SVG."""
    done = subprocess.run(
        ["dot", "-Tsvg"],
        input=dot_of(lines, direction),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise Unknown(done.stderr)
    svg = done.stdout[done.stdout.index("<svg") :]
    return svg.replace(INK, "currentColor")


MESSAGE = re.compile(r"(?P<tail>\w+)(?P<line>--?>>)(?P<head>\w+): (?P<text>.*)")
COLUMN, ROW, MARGIN, LETTER = 165, 38, 80, 6.6


def draw_sequence(lines: list[str]) -> str:
    """A sequence diagram as SVG."""
    names: dict[str, str] = {}
    steps: list[re.Match[str]] = []
    for line in lines:
        if found := re.fullmatch(r"participant (\w+) as (.+)", line):
            names[found[1]] = found[2]
        elif found := MESSAGE.fullmatch(line) or re.fullmatch(
            r"Note over (?P<note>\w+): (?P<text>.*)", line
        ):
            steps.append(found)
        else:
            raise Unknown(line)
    x = {name: MARGIN + i * COLUMN for i, name in enumerate(names)}
    width, height = 2 * MARGIN + (len(names) - 1) * COLUMN, ROW * (len(steps) + 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="Helvetica,sans-serif" '
        'font-size="12" fill="currentColor" stroke="none">'
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 10 5 0 10z"/></marker></defs>'
    ]

    def text(at: float, y: float, words: str) -> None:
        parts.append(
            f'<text x="{at}" y="{y}" text-anchor="middle">{escape(words)}</text>'
        )

    for name, label in names.items():
        text(x[name], ROW / 2, label)
        parts.append(
            f'<line x1="{x[name]}" y1="{ROW * 0.75}" x2="{x[name]}" y2="{height}" '
            'stroke="currentColor" stroke-opacity="0.35"/>'
        )
    for i, step in enumerate(steps):
        y = ROW * (i + 1.9)
        words = step["text"]
        if "note" in step.re.groupindex:
            size = LETTER * len(words)
            parts.append(
                f'<rect x="{x[step["note"]] - size / 2}" y="{y - 17}" width="{size}" '
                'height="24" fill="none" stroke="currentColor" rx="3"/>'
            )
            text(x[step["note"]], y, words)
            continue
        tail, head = x[step["tail"]], x[step["head"]]
        dash = ' stroke-dasharray="4 3"' if step["line"] == "-->>" else ""
        parts.append(
            f'<line x1="{tail}" y1="{y}" x2="{head}" y2="{y}" stroke="currentColor"'
            f'{dash} marker-end="url(#tip)"/>'
        )
        text((tail + head) / 2, y - 6, words)
    return "".join([*parts, "</svg>"])


def draw(source: str) -> str:
    """A diagram as SVG. Raises Unknown for one that uses more of Mermaid."""
    first, *lines = [line.strip() for line in source.splitlines() if line.strip()]
    if first == "sequenceDiagram":
        return draw_sequence(lines)
    found = re.fullmatch(r"flowchart (TD|TB|LR)", first)
    if not found:
        raise Unknown(first)
    return draw_flowchart(lines, found[1])
