"""One key of every size on a GPU: the cases and their tables.

Bytes per second are in percent of those of ``copy_`` in the same round.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpu import COPY, copy_of, free_bytes, num_turns
from harness import Contestant, Plan, measure, median_ratio
from report import Table, Target, min_and_median, plan_for

MEMORY_FRACTION = 0.9
# Twice what the second-level cache of an H200 holds, and more.
ROTATED_BYTES = 1 << 27
MIB = 1 << 20


class Sizes(NamedTuple):
    """The sizes and the duration of a run."""

    replicas: list[int]
    replica_bytes: list[int]
    large: int  # limited by memory bandwidth from this size on: targets apply
    rotated_bytes: int
    plan: Plan


def sizes_for(options: argparse.Namespace) -> Sizes:
    """A minute on a GPU; a smoke run, seconds on any device."""
    plan = plan_for(options, rounds=11, turn_s=0.001, budget_s=1)
    if options.smoke:
        return Sizes([1, 4], [1 << 14, 1 << 10], 1 << 14, 1 << 17, plan)
    # Cases with targets come first, as the run may be interrupted.
    sizes = [256 * MIB, 1024 * MIB, 16 * MIB, MIB]
    return Sizes([2, 1, 4, 8], sizes, 256 * MIB, ROTATED_BYTES, plan)


class Case(NamedTuple):
    """One push of replicas of one key, rotating over several keys."""

    name: str  # of the operation, with its dtype
    replicas: int
    replica_bytes: int
    moved_bytes: int  # by a push, at least
    turns: int  # the keys

    @property
    def title(self) -> str:
        """Its name in tables."""
        return f"{self.name}, {self.replicas} x {size_text(self.replica_bytes)}"


def size_text(num_bytes: int) -> str:
    """A size with its unit."""
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes} B"


def measure_cases(
    name: str,
    sizes: Sizes,
    device: str,
    moved_per_byte: Callable[[int], float],
    held_per_byte: Callable[[int], float],
    contestants_of: Callable[[Case], dict[str, Contestant]],
) -> Iterator[dict[str, Any]]:
    """Every size and number of replicas that memory allows, and ``copy_``.

    Args:
        name: the operation, with its dtype.
        sizes: the grid.
        device: ``cuda`` or ``cpu``.
        moved_per_byte: for a number of replicas, the bytes that a push must move for
            each byte of a replica.
        held_per_byte: the bytes that all contestants hold, likewise, without copy_'s.
        contestants_of: creates the contestants.

    Yields:
        Each case with its ``"seconds"``, or with an ``"error"``.
    """
    for replica_bytes in sizes.replica_bytes:
        for replicas in sizes.replicas:
            moved = int(moved_per_byte(replicas) * replica_bytes)
            turns = num_turns(moved, sizes.rotated_bytes)
            case = Case(name, replicas, replica_bytes, moved, turns)
            held = turns * (held_per_byte(replicas) * replica_bytes + moved)
            if held > MEMORY_FRACTION * free_bytes(device):
                print(f"not enough memory: {case.title}")
                continue
            try:
                copy = copy_of(moved, sizes.rotated_bytes, device)
                times = measure({COPY: copy, **contestants_of(case)}, sizes.plan)
            except Exception as error:  # the other cases are still measured
                yield {"title": case.title, "error": repr(error)}
                continue
            finally:
                copy = None
            yield {**case._asdict(), "title": case.title, "seconds": times}


def of_copy(case: Mapping[str, Any], ours: str) -> float:
    """Its bytes per second, relative to ``copy_`` of as many bytes."""
    return median_ratio(case["seconds"][COPY], case["seconds"][ours])


def table(
    title: str, cases: Sequence[Mapping[str, Any]], ours: str, peers: Sequence[str]
) -> Table:
    """A line per case: torchkv's times and its speed-up over each peer."""
    rows = []
    for case in cases:
        times = case["seconds"]
        rate = case["moved_bytes"] / statistics.median(times[ours]) / 1e9
        rows.append(
            [
                case["title"],
                *min_and_median(times[ours]),
                f"{rate:.0f}",
                f"{100 * of_copy(case, ours):.1f}",
                *(
                    f"{median_ratio(times[peer], times[ours]):.2f}"
                    if peer in times
                    else ""
                    for peer in peers
                ),
            ]
        )
    return Table(title, [ours, "min", "median", "GB/s", "% of copy_", *peers], rows)


def copy_targets(
    cases: Sequence[Mapping[str, Any]], sizes: Sizes, ours: str, percent: float
) -> list[Target]:
    """The targets for bytes per second, at sizes limited by memory bandwidth."""
    return [
        Target(
            f"{case['title']}, of copy_", 100 * of_copy(case, ours), percent, True, "%"
        )
        for case in cases
        if case["replica_bytes"] >= sizes.large
    ]


def peer_targets(
    cases: Sequence[Mapping[str, Any]],
    sizes: Sizes,
    ours: str,
    limits: Mapping[str, float],
) -> list[Target]:
    """The targets relative to each peer, for four large replicas and for all cases."""
    targets = []
    for peer, limit in limits.items():
        met = [case for case in cases if peer in case["seconds"]]
        large = [
            case
            for case in met
            if case["replicas"] == 4 and case["replica_bytes"] >= sizes.large
        ]
        for where, some, least in [("4 large replicas", large, limit), ("all", met, 1)]:
            ratios = [
                median_ratio(case["seconds"][peer], case["seconds"][ours])
                for case in some
            ]
            what = f"{where}: the least against {peer}"
            targets.append(Target(what, min(ratios, default=None), least))
    return targets


def draw(figure: Any, cases: Sequence[Mapping[str, Any]], ours: str) -> None:
    """Percent of copy_ by size: a panel per name, a line per number of replicas."""
    figure.set_size_inches(12, 4.5)
    names = list(dict.fromkeys(case["name"] for case in cases))
    if not names:
        return
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        own = [case for case in cases if case["name"] == name]
        for count in dict.fromkeys(case["replicas"] for case in own):
            points = sorted(
                (case["replica_bytes"], 100 * of_copy(case, ours))
                for case in own
                if case["replicas"] == count
            )
            axes.plot(*zip(*points, strict=True), marker="o", label=f"{count} replicas")
        axes.set_xscale("log", base=2)
        axes.set_title(name, fontsize="medium")
        axes.set_xlabel("bytes of a replica")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("% of the bytes per second of copy_")
    panels[0].legend()
