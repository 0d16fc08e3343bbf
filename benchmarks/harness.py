"""Times contestants interleaved, A B A B, so that drift affects all of them equally.

A contestant is a function that makes a number of calls and returns the seconds that
they took. In every round each contestant has one turn; a ratio is the median over the
rounds of the ratio within a round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

Run = Callable[[int], float]
"""Makes this many calls in sequence, and returns the seconds they took.

Several calls start with one that is not counted: it brings back into the caches what
the other contestants have driven out. Calls too long to be repeated do not need it."""

Times = dict[str, list[float]]
"""By contestant, the seconds per call of every round."""

MIN_ROUNDS = 3
MAX_CALLS = 5000


class Contestant(NamedTuple):
    """What is timed, and a check of its last call's result."""

    run: Run
    agrees: Callable[[], bool]


class Plan(NamedTuple):
    """How long to measure one set of contestants."""

    rounds: int  # at most; MIN_ROUNDS are always made
    turn_s: float  # a turn has as many calls as fit into this, at least one
    budget_s: float  # for all rounds


def timed(call: Callable[[], object]) -> Run:
    """A contestant that calls a function of this process."""

    def run(calls: int) -> float:
        if calls > 1:
            call()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return time.perf_counter() - start

    return run


def interleave(runs: Mapping[str, Run], calls: Mapping[str, int], rounds: int) -> Times:
    """Runs one turn of each contestant per round, in the order of `runs`."""
    times: Times = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(run(calls[name]) / calls[name])
    return times


def measure(contestants: Mapping[str, Contestant], plan: Plan) -> Times:
    """Checks each contestant's result, then times them all, interleaved."""
    runs = {name: contestant.run for name, contestant in contestants.items()}
    for name, contestant in contestants.items():
        contestant.run(1)
        if not contestant.agrees():
            raise AssertionError(f"{name} does not have the result of the others")
    seconds = {name: seconds_per_call(run, plan.turn_s) for name, run in runs.items()}
    calls = {name: calls_that_fit(plan.turn_s, s) for name, s in seconds.items()}
    round_s = sum(calls[name] * seconds[name] for name in runs)
    rounds = max(MIN_ROUNDS, min(plan.rounds, int(plan.budget_s / round_s)))
    return interleave(runs, calls, rounds)


def seconds_per_call(run: Run, turn_s: float) -> float:
    """The time of a call, estimated over at least a quarter of a turn."""
    calls = 1
    while (seconds := run(calls)) < turn_s / 4 and calls < MAX_CALLS:
        calls *= 4
    return seconds / calls


def calls_that_fit(turn_s: float, seconds: float) -> int:
    """The number of calls of a turn."""
    return max(1, min(MAX_CALLS, int(turn_s / seconds)))


def median_ratio(over: list[float], under: list[float]) -> float:
    """The median over the rounds of the ratio of their times."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))
