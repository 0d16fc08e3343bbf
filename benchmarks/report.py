"""Shared by the benchmarks: options, tables, JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import statistics
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import mxnet_peer
import torchkv
from harness import Plan, Times, median_ratio
from mxnet_peer import MXNet


class Target(NamedTuple):
    """A target and the measured value."""

    what: str
    value: float | None  # None: its peer is not installed
    limit: float
    at_least: bool = True
    unit: str = "x"

    @property
    def reached(self) -> bool | None:
        """Whether the target is met."""
        if self.value is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def row(self) -> list[str]:
        """Its line of the table."""
        value = "-" if self.value is None else f"{self.value:.2f} {self.unit}"
        limit = f"{'>=' if self.at_least else '<='} {self.limit:g} {self.unit}"
        told = {True: "yes", False: "no", None: "not measured"}[self.reached]
        return [self.what, value, limit, told]

    def as_dict(self) -> dict[str, Any]:
        """Its entry in the JSON."""
        return {**self._asdict(), "reached": self.reached}


class Table(NamedTuple):
    """Rows under a header; the first column is text, the others are figures."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        """For a terminal."""
        columns = list(zip(self.header, *self.rows, strict=True))
        widths = [max(map(len, column)) for column in columns]

        def line(cells: Sequence[str]) -> str:
            first, *rest = zip(cells, widths, strict=True)
            figures = (f"{cell:>{width}}" for cell, width in rest)
            return "  ".join([f"{first[0]:<{first[1]}}", *figures]).rstrip()

        return "\n".join([self.title, *map(line, [self.header, *self.rows])])

    def markdown(self) -> str:
        """For docs/benchmarks.md."""
        rule = ["---", *["---:"] * (len(self.header) - 1)]
        lines = [self.header, *self.rows]
        table = [re.sub(r"([_*])", r"\\\1", f"| {' | '.join(row)} |") for row in lines]
        table.insert(1, f"| {' | '.join(rule)} |")
        return "\n".join([self.title, "", *table])


def targets_table(targets: Sequence[Target]) -> Table:
    """The targets and the measured values."""
    header = ["target", "measured", "limit", "reached"]
    return Table("Targets", header, [target.row() for target in targets])


def duration(seconds: float) -> str:
    """A time with a suitable unit."""
    for factor, unit in [(1e6, "us"), (1e3, "ms")]:
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def min_and_median(seconds: Sequence[float]) -> list[str]:
    """The two times in every table."""
    return [duration(min(seconds)), duration(statistics.median(seconds))]


def contestants_table(title: str, figures: dict[str, Any], ours: str) -> Table:
    """The times of all contestants, and their ratios to torchkv's."""
    times, mxnet = figures["seconds"], figures.get("mxnet", {})
    rows = [
        [
            f"{name} ({mxnet[name]})" if name in mxnet else name,
            *min_and_median(seconds),
            f"{median_ratio(seconds, times[ours]):.2f}",
        ]
        for name, seconds in times.items()
    ]
    return Table(title, ["contestant", "min", "median", f"against {ours}"], rows)


def parser(doc: str, rounds: int) -> argparse.ArgumentParser:
    """The options common to all benchmarks."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--plot", type=Path, help="draw the figures here (PNG)")
    parser.add_argument("--rounds", type=int, help=f"at most so many ({rounds})")
    parser.add_argument("--markdown", action="store_true", help="tables in Markdown")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, some seconds")
    parser.add_argument("--no-mxnet", action="store_true", help="leave MXNet out")
    parser.add_argument(
        "--mxnet",
        type=Path,
        default=mxnet_peer.PYTHON,
        help="the Python that has MXNet",
    )
    return parser


def plan_for(
    options: argparse.Namespace, rounds: int, turn_s: float, budget_s: float
) -> Plan:
    """The plan, with the options' number of rounds; a smoke run has no turns."""
    if options.smoke:
        return Plan(options.rounds or 3, turn_s=0, budget_s=0)
    return Plan(options.rounds or rounds, turn_s, budget_s)


@contextlib.contextmanager
def start_mxnet(options: argparse.Namespace) -> Iterator[MXNet | None]:
    """MXNet, unless it is missing (prints a note) or disabled."""
    if options.no_mxnet or not options.mxnet.exists():
        if not options.no_mxnet:
            print(
                "MXNet is not installed and is skipped; install: `make bench-peers`\n"
            )
        yield None
    else:
        threads = torch.get_num_threads()
        with MXNet.start(options.mxnet, threads, options.smoke) as mxnet:
            yield mxnet


def environment(mxnet: MXNet | None) -> dict[str, Any]:
    """Versions and the machine, for the JSON."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "torchkv": torchkv.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "mxnet": mxnet.versions if mxnet else None,
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "memory_gib": round(pages / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }


def cpu_name() -> str:
    """The processor's name, if known."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if "model name" in line),
        platform.processor(),
    )


def headline(facts: dict[str, Any]) -> str:
    """The environment in a line."""
    peer = f"MXNet {facts['mxnet']['mxnet']}" if facts["mxnet"] else "no MXNet"
    processor = ", ".join(filter(None, [facts.get("gpu"), facts["cpu"]]))
    return (
        f"torchkv {facts['torchkv']}, torch {facts['torch']}, {peer}, {processor}, "
        f"{facts['cores']} cores, {facts['threads']} threads, "
        f"{facts['memory_gib']} GiB"
    )


def draw_bars(
    figure: Any, lengths: Mapping[str, Mapping[str, float]], label: str
) -> Sequence[Any]:
    """Panels by title, in each a bar per contestant; ours are blue.

    Returns:
        The panels' axes.
    """
    panels: Sequence[Any] = figure.subplots(len(lengths), squeeze=False)[:, 0]
    for axes, (title, bars) in zip(panels, lengths.items(), strict=True):
        colors = ["tab:blue" if "torchkv" in name else "tab:gray" for name in bars]
        axes.barh(list(bars), list(bars.values()), color=colors)
        axes.invert_yaxis()
        axes.set_title(title, fontsize="medium")
    panels[-1].set_xlabel(label)
    return panels


def draw_times(figure: Any, measured: Mapping[str, Times], ours: str) -> None:
    """A bar per contestant: its median ratio to torchkv's time."""
    figure.set_size_inches(9, 5)
    ratios = {
        title: {name: median_ratio(each, times[ours]) for name, each in times.items()}
        for title, times in measured.items()
    }
    draw_bars(figure, ratios, f"time, as a multiple of {ours}")


def collect(
    options: argparse.Namespace,
    facts: Mapping[str, Any],
    name: str,
    cases: Iterable[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Measures case by case, and writes the JSON after each, if requested.

    Ctrl-C or an error ends the measurements, not the program, which still reports them.
    A case with an ``"error"`` has failed; the others continue, and `finish` fails.

    Args:
        options: what `parser` parsed.
        facts: the environment.
        name: of the cases in the JSON.
        cases: an iterator that measures each case.
    """
    measured = []
    options.failed = []
    try:
        for case in cases:
            if "error" in case:
                options.failed.append(case)
                print(f"failed: {case['title']}: {case['error']}", flush=True)
            else:
                measured.append(case)
            if options.json:
                figures = {**facts, name: measured, "failed": options.failed}
                write_json(options.json, figures)
    except KeyboardInterrupt:
        print(f"stopped after {len(measured)} cases\n")
    except Exception:  # report what was measured
        traceback.print_exc()
        options.failed.append({"title": f"case {len(measured) + 1}"})
    return measured


def write_json(path: Path, figures: Mapping[str, Any]) -> None:
    """Writes the file atomically."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(json.dumps(figures, indent=2) + "\n")
    unfinished.replace(path)


def finish(
    options: argparse.Namespace,
    figures: dict[str, Any],
    tables: Sequence[Table],
    targets: Sequence[Target],
    draw: Callable[[Any], None],
) -> None:
    """Prints the tables; writes the JSON and the plot if requested.

    Args:
        options: what `parser` parsed.
        figures: the content of the JSON, the environment first; targets are added.
        tables: the tables to print; the targets' table is added.
        targets: the targets.
        draw: draws on an empty figure of Matplotlib's.
    """
    figures = {**figures, "targets": [target.as_dict() for target in targets]}
    tables = [*tables, targets_table(targets)]
    print(headline(figures))
    if options.smoke:
        print("A smoke run: too small and too short to say anything about speed.")
    for table in tables:
        print("\n" + (table.markdown() if options.markdown else table.text()))
    if options.json:
        write_json(options.json, figures)
    if options.plot:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure = plt.figure(layout="constrained")
        draw(figure)
        figure.savefig(options.plot, dpi=120)
    if failed := getattr(options, "failed", []):
        sys.exit(f"{len(failed)} cases failed: {', '.join(c['title'] for c in failed)}")
