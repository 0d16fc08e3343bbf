"""What a running updater holds up, and what goes on beside it.

Every wait here ends by an event of the test, so that a lock too many shows as a
deadlock (and a failure) and never as a matter of time.
"""

import threading

import pytest
import torch

from helpers import assert_same, full, run_threads, stored

LIMIT_S = 20


class Busy:
    """An updater that stays inside key 3 until it is let go."""

    def __init__(self):
        self.inside, self.go_on = threading.Event(), threading.Event()

    def __call__(self, key, input, stored):
        if key == 3 and not self.go_on.is_set():
            self.inside.set()
            assert self.go_on.wait(LIMIT_S), "nothing went on beside the updater"
        stored += input


@pytest.fixture
def busy(kv):
    kv.init([3, 5], [full(0), full(5)])
    updater = Busy()
    kv.set_updater(updater)
    return updater


BESIDE = {
    "pull of another key": lambda kv: kv.pull(5, out=full(0)),
    "pull without out": lambda kv: kv.pull(5),
    "init": lambda kv: kv.init(7, full(7)),
    "delete of another key": lambda kv: kv.delete(5),
    "keys": lambda kv: kv.keys(),
    "len": len,
    "in": lambda kv: 3 in kv,
    "shape": lambda kv: kv.shape(3),
    "broadcast": lambda kv: kv.broadcast(7, full(7), full(0)),
}


@pytest.mark.parametrize("call", BESIDE)
def test_calls_go_on_beside_a_running_updater(kv, busy, call):
    def beside():
        assert busy.inside.wait(LIMIT_S)
        BESIDE[call](kv)
        busy.go_on.set()

    run_threads([lambda: kv.push(3, full(1)), beside])
    assert_same(stored(kv, 3), full(1))


WAITING = {
    "push of the same key": lambda kv: kv.push(3, full(1)),
    "push of another key": lambda kv: kv.push(5, full(1)),
    "pull of the same key": lambda kv: kv.pull(3),
    "pushpull": lambda kv: kv.pushpull(3, full(1), out=full(0)),
    "set_updater": lambda kv: kv.set_updater(None),
    "set_optimizer": lambda kv: kv.set_optimizer("sgd"),
    "push of several keys": lambda kv: kv.push([5, 3], [full(1)] * 2),
    "pull of several keys": lambda kv: kv.pull([5, 3], out=[full(0), full(0)]),
}


@pytest.mark.parametrize("call", WAITING)
def test_waiting_for_an_updater_releases_the_gil(kv, busy, call):
    """A waiter that holds the GIL would block the updater itself."""
    about_to_wait = threading.Event()

    def waiter():
        assert busy.inside.wait(LIMIT_S)
        about_to_wait.set()
        WAITING[call](kv)

    def opener():
        assert about_to_wait.wait(LIMIT_S)
        # Enough for the waiter to reach its lock; correctness does not depend on it.
        threading.Event().wait(0.05)
        busy.go_on.set()

    run_threads([lambda: kv.push(3, full(1)), waiter, opener])
    assert kv.keys() == [3, 5]


def test_a_pull_of_the_same_key_sees_the_whole_update(kv):
    half_done, looked = threading.Event(), []
    kv.init(3, torch.zeros(2))

    def update(key, input, stored):
        stored[0] += input[0]
        half_done.set()
        threading.Event().wait(0.05)
        stored[1] += input[1]

    def puller():
        assert half_done.wait(LIMIT_S)
        looked.append(kv.pull(3))

    kv.set_updater(update)
    run_threads([lambda: kv.push(3, torch.ones(2)), puller])
    assert_same(looked[0], torch.ones(2))
