"""Threads that concurrently create, delete and look up keys or set the updater."""

import functools
import threading
import time
import weakref

import pytest
import torch

import torchkv
from helpers import Add, add_input, full, outcome, run_threads, script

SIZE = 4099
ROUNDS = 30
RACES = 600
DELAYS = 60
LIMIT_S = 30


def test_one_of_several_inits_wins_as_a_whole(store_type):
    keys = list(range(20))
    for _ in range(ROUNDS):
        kv = torchkv.create(store_type)
        won = []

        def body(number, kv=kv, won=won):
            values = [torch.full((100,), float(number))] * len(keys)
            try:
                kv.init(keys, values)
                won.append(number)
            except ValueError:
                pass

        run_threads([lambda n=n: body(n) for n in range(6)])
        assert len(won) == 1 and kv.keys() == keys
        for key in keys:
            assert (kv.pull(key) == won[0]).all()


def test_the_first_init_of_several_threads_fixes_the_kind(store_type):
    for _ in range(ROUNDS):
        kv = torchkv.create(store_type)
        won = []

        def body(key, kv=kv, won=won):
            try:
                kv.init(key, full(1))
                won.append(key)
            except TypeError:
                pass

        run_threads([lambda k=k: body(k) for k in [1, "a", 2, "b"]])
        assert won and len({type(key) for key in won}) == 1
        assert sorted(kv.keys()) == sorted(won)


def test_one_of_several_deletes_wins_as_a_whole(kv):
    for _ in range(ROUNDS):
        kv.init([3, 5], [full(1)] * 2)
        won = []

        def body(won=won):
            try:
                kv.delete([3, 5])
                won.append(1)
            except KeyError:
                pass

        run_threads([body] * 4)
        assert won == [1] and kv.keys() == []


def test_readers_of_the_table_while_keys_come_and_go(kv):
    done = threading.Event()
    kv.init(-7, full(1))

    def writer(first):
        keys = list(range(first, first + 20))
        for _ in range(40):
            kv.init(keys, [full(1)] * 20)
            kv.delete(keys)
        done.set()

    def reader():
        while not done.is_set():
            assert -7 in kv.keys() and -7 in kv and len(kv) >= 1
            assert kv.shape(-7) == (2, 3)
            repr(kv)

    run_threads([lambda: writer(0), lambda: writer(100), reader, reader])


def test_delete_while_others_push(kv):
    def pusher():
        for _ in range(300):
            try:
                kv.push(3, [torch.ones(SIZE)] * 2)
                assert kv.pull(3)[0].item() in (0.0, 2.0)
            except KeyError:
                pass

    def deleter():
        for _ in range(300):
            kv.init(3, torch.zeros(SIZE))
            kv.delete(3)

    run_threads([pusher, pusher, deleter])


def test_set_updater_while_others_push(kv):
    kv.init(3, torch.zeros(SIZE))
    updaters = [None, add_input, script(Add())]

    def pusher():
        for _ in range(200):
            kv.push(3, [torch.ones(SIZE)] * 2)
            value = kv.pull(3)
            assert (value == value[0]).all()

    def setter():
        for step in range(300):
            kv.set_updater(updaters[step % 3])

    run_threads([pusher, pusher, setter])


class PlainUpdater:
    def __call__(self, key, input, stored):
        stored += input


class Racer(torch.nn.Module):
    """Does something to a store when the gate is opened, without the GIL."""

    def __init__(self):
        super().__init__()
        self.register_buffer("waits", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("is_open", torch.zeros(1, dtype=torch.int64))

    def wait(self, delay: int):
        self.waits.add_(1)
        spins = 0
        while int(self.is_open) == 0 and spins < 5000000:
            spins += 1
        for _ in range(delay):
            spins += int(self.is_open)


class Closer(Racer):
    def forward(self, kv: torch.classes.torchkv.KVStore, delay: int) -> None:
        self.wait(delay)
        kv.close()


class Initializer(Racer):
    def forward(self, kv: torch.classes.torchkv.KVStore, delay: int) -> None:
        value = torch.ones([1])
        self.wait(delay)
        kv.init("w", value)


class Race:
    """A scripted call and a Python call, started at the same time."""

    def __init__(self, racer):
        self.racer = script(racer)
        # Through numpy, and always the same arrays: nothing here takes or gives
        # the GIL away, nor does the script wait for it.
        self.waits = self.racer.waits.numpy()
        self.is_open = self.racer.is_open.numpy()

    def run(self, kv, call, delay):
        """The outcomes of both; the racer starts `delay` steps after `call`."""
        self.waits[0] = self.is_open[0] = 0
        scripted, outcomes = kv.script_object, []

        def raced():
            outcomes.append(outcome(lambda: self.racer(scripted, delay)))

        thread = threading.Thread(target=raced, daemon=True)
        thread.start()
        while not self.waits[0]:
            time.sleep(0)
        self.is_open[0] = 1
        called = outcome(call)
        thread.join(LIMIT_S)
        assert not thread.is_alive()
        return called, outcomes[0]


def set_until_closed(kv, updater):
    while True:
        kv.set_updater(updater)


def test_an_updater_set_while_the_store_is_closed_is_released():
    race = Race(Closer())
    for turn in range(RACES):
        kv = torchkv.create()
        updater = PlainUpdater()
        alive = weakref.ref(updater)
        setting = functools.partial(set_until_closed, kv, updater)
        ended, closed = race.run(kv, setting, turn % DELAYS)
        assert closed == "no error"
        assert ended.startswith("RuntimeError") and "clos" in ended
        del updater, setting
        assert alive() is None, f"turn {turn}: a closed store keeps its updater"


def test_an_updater_and_a_first_key_of_different_kinds_are_not_both_accepted():
    race = Race(Initializer())
    updater = script(Add())
    for turn in range(RACES):
        kv = torchkv.create()
        set_it = functools.partial(kv.set_updater, updater)
        set_it, init = race.run(kv, set_it, turn % DELAYS)
        assert (set_it == "no error") != (init == "no error"), (set_it, init)
        assert kv.keys() == ([] if set_it == "no error" else ["w"])


@pytest.mark.parametrize("calls", [1, 4])
def test_pull_of_several_keys_while_they_are_pushed(kv, calls):
    """Each key is whole, whatever the others are."""
    keys = list(range(8))
    kv.init(keys, [torch.zeros(SIZE)] * 8)
    done = threading.Event()

    def pusher(first):
        for number in range(60):
            kv.push(keys, [torch.full((SIZE,), float(first + number))] * 8)
        done.set()

    def puller():
        while not done.is_set():
            for value in kv.pull(keys):
                assert (value == value[0]).all()

    run_threads([lambda n=n: pusher(1000 * n) for n in range(calls)] + [puller])
