"""Draws the plots of the page "Performance" from the tables in benchmarks.md.

    python docs/plots.py [FOLDER]

A row that a plot needs and the page no longer has is a KeyError, which fails the build.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "benchmarks.md"
COLORS = {"torchkv": "#1f6feb", "PyTorch": "#e36209", "MXNet": "#8a8f98"}
PART = r"\*\*(.+)\*\*"  # a row with the name of the rows below it

Table = dict[tuple[str, str], dict[str, str]]  # row by (part, first cell)


class Bar(NamedTuple):
    """How many times as long as torchkv somebody takes for a case."""

    case: str
    who: str
    ratio: float


def cells(line: str) -> list[str]:
    """The cells of a row, without the marks of code."""
    text = line.strip().strip("|").replace("`", "")
    return [cell.strip() for cell in text.split("|")]


def tables(page: str) -> Iterator[Table]:
    """The tables of a page, in order."""
    for block in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        head, _, *rows = map(cells, block.splitlines())
        # A second column of one name is "name 2".
        for i, name in reversed(list(enumerate(head))):
            count = head[: i + 1].count(name)
            head[i] = name if count == 1 else f"{name} {count}"
        table: Table = {}
        part = found[1] if (found := re.fullmatch(PART, head[0])) else head[0]
        for row in rows:
            if found := re.fullmatch(PART, row[0]):
                part = found[1]
            else:
                table[part, row[0]] = dict(zip(head[1:], row[1:], strict=False))
        yield table


class Page:
    """The rows of a page's tables."""

    def __init__(self, text: str) -> None:
        """Reads the tables."""
        self._tables = list(tables(text))

    def table(self, part: str) -> Table:
        """The table that has rows of a part, by the name at its head or in a row."""
        for table in self._tables:
            if any(of == part for of, _ in table):
                return table
        raise KeyError(part)

    def number(self, part: str, row: str, column: str) -> float:
        """The first number of a cell; the row is found by the text it begins with."""
        for (of, name), values in self.table(part).items():
            if of == part and name.startswith(row):
                (number,) = re.findall(r"^[\d.]+", values[column])
                return float(number)
        raise KeyError(f"{part}: {row}")


def one_process(page: Page) -> list[Bar]:
    """Cases of one process, against the fastest way of torch, and MXNet."""
    ratio = "against torchkv"
    sums = "push of 4 x 25,000,000 fp32 and pull into 4"
    model = "ResNet-50: push from 4, pull into 4"
    steps = "ResNet-50, 4 replicas"
    fused, mxnet = "foreach sum, fused step, _foreach_copy_", "MXNet"
    return [
        Bar("sum of 4 x 100 MB", "PyTorch", page.number(sums, "torch.add", ratio)),
        Bar("sum of 4 x 100 MB", "MXNet", page.number(sums, mxnet, ratio)),
        Bar("ResNet-50, sums", "PyTorch", page.number(model, "the same, by", ratio)),
        Bar("ResNet-50, sums", "MXNet", page.number(model, mxnet, ratio)),
        Bar("ResNet-50, momentum", "PyTorch", page.number(steps, fused, ratio)),
        Bar("ResNet-50, momentum", "MXNet", page.number(steps, mxnet, ratio)),
        Bar("ResNet-50, Adam", "PyTorch", page.number(steps, fused, f"{ratio} 2")),
        Bar("ResNet-50, Adam", "MXNet", page.number(steps, mxnet, f"{ratio} 2")),
    ]


def several_processes(page: Page) -> list[Bar]:
    """Cases of several processes, against Gloo, and MXNet."""

    def bar(case: str, part: str, row: str, who: str) -> Bar:
        return Bar(case, who, page.number(part, row, "ratio of medians"))

    buckets, one = "Gloo, gradients in buckets", "Gloo, gradients in one bucket"
    four = "ResNet-50, SGD, 4 ranks on the 2 cores"
    small = "10,000 keys of 100 floats, sum"
    return [
        bar("ResNet-50, SGD", "ResNet-50, SGD", buckets, "PyTorch"),
        bar("ResNet-50, SGD", "ResNet-50, SGD", "MXNet push, pull", "MXNet"),
        bar("ResNet-50, AdamW", "ResNet-50, AdamW", buckets, "PyTorch"),
        bar("the Trainer's step", "ResNet-50, SGD, the Trainer", "Dist", "PyTorch"),
        bar("4 ranks on 2 cores", four, buckets, "PyTorch"),
        bar("through TCP", "ResNet-50, SGD, tcp", "Gloo", "PyTorch"),
        bar("one key of 100 MB", "one key of 100 MB, SGD", one, "PyTorch"),
        bar("64 bytes", "64 bytes, sum", "Gloo", "PyTorch"),
        bar("64 bytes", "64 bytes, sum", "MXNet push, pull", "MXNet"),
        bar("10,000 small keys", small, "Gloo", "PyTorch"),
    ]


UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "MB": 10**6, "us": 1.0, "ms": 1e3}


def measure(text: str) -> float:
    """Bytes, or microseconds."""
    number, unit = text.split()
    return float(number) * UNITS[unit]


Lines = dict[str, list[tuple[float, float]]]


def sizes(page: Page) -> dict[str, Lines]:
    """Bytes and microseconds of a sum, by number of ranks and who makes it."""
    panels: dict[str, Lines] = {}
    for (part, size), values in page.table("2 ranks").items():
        lines = panels.setdefault(part, {})
        for who, time in values.items():
            if time.endswith("s"):
                name = f"torchkv, {who}" if who in ("sockets", "tcp") else who
                lines.setdefault(name, []).append((measure(size), measure(time)))
    return panels


def draw_bars(bars: list[Bar], pyplot: Any) -> Any:
    """Ratios as horizontal bars; 1 is torchkv."""
    figure, axes = pyplot.subplots(figsize=(7, 0.6 + 0.36 * len(bars)))
    labels = []
    for i, bar in enumerate(bars):
        is_first = i == 0 or bars[i - 1].case != bar.case
        labels.append(bar.case if is_first else "")
        axes.barh(-i, bar.ratio, color=COLORS[bar.who], height=0.7)
        axes.text(bar.ratio, -i, f" {bar.ratio:.2f}", va="center", fontsize=9)
    axes.axvline(1, color=COLORS["torchkv"])
    axes.set_yticks([-i for i in range(len(bars))], labels)
    axes.set_xlabel("time, torchkv = 1")
    axes.margins(x=0.12)
    for who in ("PyTorch", "MXNet"):
        axes.barh(0, 0, color=COLORS[who], label=who)
    axes.plot([], [], color=COLORS["torchkv"], label="torchkv")
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.4, 1), ncols=3)
    return figure


def draw_sizes(panels: dict[str, Lines], pyplot: Any) -> Any:
    """Times by size, both logarithmic, for each number of ranks."""
    figure, all_axes = pyplot.subplots(
        1, len(panels), figsize=(10, 4), sharey=True, layout="constrained"
    )
    for axes, (part, lines) in zip(all_axes, panels.items(), strict=True):
        for who, points in lines.items():
            axes.loglog(*zip(*points, strict=True), marker="o", markersize=3, label=who)
        axes.set_title(part)
        axes.set_xlabel("bytes")
    all_axes[0].set_ylabel("microseconds")
    all_axes[0].legend(frameon=False, fontsize=8)
    return figure


PLOTS: dict[str, tuple[Callable[[Page], Any], Callable[[Any, Any], Any]]] = {
    "one_process": (one_process, draw_bars),
    "several_processes": (several_processes, draw_bars),
    "sizes": (sizes, draw_sizes),
}


def draw_all(folder: Path) -> None:
    """Writes all plots as SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    page = Page(PAGE.read_text())
    # Text stays text, and the same tables give the same files.
    style = {"svg.fonttype": "none", "svg.hashsalt": "torchkv", "font.size": 10}
    with pyplot.rc_context(style):
        for name, (data, draw) in PLOTS.items():
            figure = draw(data(page), pyplot)
            for axes in figure.axes:
                axes.spines[["top", "right"]].set_visible(False)
            path = folder / f"{name}.svg"
            figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
            pyplot.close(figure)


if __name__ == "__main__":
    draw_all(Path(sys.argv[1] if len(sys.argv) > 1 else DOCS / "drawn"))
