"""Contestants are interleaved, A B A B, and wrong results are not timed."""

import pytest

from harness import (
    MIN_ROUNDS,
    Contestant,
    Plan,
    calls_that_fit,
    interleave,
    measure,
    median_ratio,
    seconds_per_call,
    timed,
)


class Recorder:
    """Contestants that record their turns and return given times."""

    def __init__(self, seconds):
        self.turns = []
        self.contestants = {
            name: Contestant(lambda calls, name=name: self.run(name, calls), self.right)
            for name in seconds
        }
        self.seconds = seconds

    def run(self, name, calls):
        self.turns.append((name, calls))
        return calls * self.seconds[name]

    def right(self):
        return True


def test_interleave_gives_each_one_turn_per_round():
    recorder = Recorder({"a": 1.0, "b": 0.5, "c": 2.0})
    runs = {name: each.run for name, each in recorder.contestants.items()}
    times = interleave(runs, {"a": 1, "b": 4, "c": 2}, rounds=3)

    assert recorder.turns == [("a", 1), ("b", 4), ("c", 2)] * 3
    assert times == {"a": [1.0] * 3, "b": [0.5] * 3, "c": [2.0] * 3}


@pytest.mark.parametrize(
    ("budget_s", "rounds"),
    [(0, MIN_ROUNDS), (2.05 * 5, 5), (1000, 7)],
    ids=["at least three", "what fits", "at most as asked"],
)
def test_measure_takes_turns_within_its_budget(budget_s, rounds):
    recorder = Recorder({"torchkv": 0.25, "MXNet": 1.0})
    times = measure(recorder.contestants, Plan(rounds=7, turn_s=1.0, budget_s=budget_s))
    assert recorder.turns[-2 * rounds :] == [("torchkv", 4), ("MXNet", 1)] * rounds
    assert {name: len(each) for name, each in times.items()} == {
        "torchkv": rounds,
        "MXNet": rounds,
    }
    # Before: a call to check the result, and a pilot.
    assert recorder.turns[: -2 * rounds] == [("torchkv", 1), ("MXNet", 1)] * 2


def test_measure_refuses_a_wrong_result():
    recorder = Recorder({"right": 1.0})
    wrong = Contestant(lambda calls: 1.0, lambda: False)
    with pytest.raises(AssertionError, match="^wrong does not have the result"):
        measure({**recorder.contestants, "wrong": wrong}, Plan(3, 0.0, 0.0))


def test_several_calls_start_with_one_that_is_not_counted():
    calls = []
    run = timed(lambda: calls.append(None))
    assert run(1) > 0
    assert len(calls) == 1
    run(10)
    assert len(calls) == 1 + 1 + 10


def test_pilot_grows_until_it_fills_a_quarter_of_a_turn():
    recorder = Recorder({"a": 0.01})
    run = recorder.contestants["a"].run
    assert seconds_per_call(run, turn_s=1.0) == pytest.approx(0.01)
    assert recorder.turns == [("a", 1), ("a", 4), ("a", 16), ("a", 64)]


def test_a_turn_has_at_least_a_call_and_not_too_many():
    assert calls_that_fit(1.0, 3.0) == 1
    assert calls_that_fit(1.0, 0.26) == 3
    assert calls_that_fit(1.0, 1e-9) == 5000


def test_ratio_is_the_median_of_the_rounds():
    assert median_ratio([2.0, 9.0, 8.0], [1.0, 1.0, 4.0]) == 2.0
    with pytest.raises(ValueError, match="zip"):
        median_ratio([1.0, 2.0], [1.0])
