"""Many threads on one store: atomic per key, one updater at a time, no deadlock."""

import random
import threading
import time

import pytest
import torch

import torchkv
from helpers import Add, add_input, assert_same, full, run_threads, script, stored
from kv_model import KVModel

THREADS = 8
SIZE = 4099


class OwnKeys:
    """One thread's random calls on keys of its own, against its own model."""

    def __init__(self, kv, seed, thread, updater):
        self.kv, self.random = kv, random.Random(seed * 100 + thread)
        self.model = KVModel()
        self.model.updater = updater
        self.names = [thread * 1000 + i for i in range(5)]
        self.note = f"seed {seed}, thread {thread}"

    def number(self, _=None):
        return torch.full((SIZE,), float(self.random.randint(-3, 3)))

    def step(self):
        used = list(self.model.stored)
        free = [name for name in self.names if name not in used]
        op = self.random.choice(["init", "delete", "push", "push", "pull", "pushpull"])
        keys = self.random.choices(used, k=self.random.randint(1, 3)) if used else []
        if op == "init" and free:
            value = self.number()
            for store in (self.kv, self.model):
                store.init(free[0], value)
        elif op == "delete" and used:
            for store in (self.kv, self.model):
                store.delete(used[0])
        elif op == "push" and used:
            values = [[self.number() for _ in range(2)] for _ in keys]
            for store in (self.kv, self.model):
                store.push(keys, values)
        elif op == "pull" and used:
            pairs = zip(self.kv.pull(keys), self.model.pull(keys), strict=True)
            for actual, expected in pairs:
                assert_same(actual, expected, self.note)
        elif op == "pushpull" and used:
            value = self.number()
            outs = [torch.zeros(SIZE), torch.zeros(SIZE)]
            for store, out in zip((self.kv, self.model), outs, strict=True):
                store.pushpull(keys[0], value, out=out)
            assert_same(*outs, self.note)

    def look_around(self):
        """What other threads are doing to the table must never show as nonsense."""
        present = self.kv.keys()
        assert len(set(present)) == len(present), self.note
        own = [key for key in present if key // 1000 == self.names[0] // 1000]
        assert own == list(self.model.stored), self.note
        assert all((name in self.kv) == (name in own) for name in self.names), self.note
        assert 0 <= len(self.kv) <= THREADS * len(self.names) + 3


UPDATERS = {
    "assign": lambda: (None, None),
    "python": lambda: (add_input, add_input),
    "script": lambda: (script(Add()), add_input),
}


@pytest.mark.parametrize("updater", UPDATERS)
@pytest.mark.parametrize("seed", range(3))
def test_random_calls_of_eight_threads(kv, updater, seed):
    theirs, models = UPDATERS[updater]()
    kv.set_updater(theirs)
    kv.init(-1, torch.zeros(SIZE))
    players = [OwnKeys(kv, seed, thread, models) for thread in range(THREADS)]
    shared_pushes = 40

    def body(player):
        for step in range(120):
            player.step()
            if step % 3 == 0:
                kv.push(-1, [torch.ones(SIZE), torch.ones(SIZE)])
                value = kv.pull(-1)
                assert (value == value[0]).all(), f"torn value; {player.note}"
            if step % 10 == 0:
                player.look_around()

    run_threads([lambda player=player: body(player) for player in players])
    for player in players:
        for key, value in player.model.stored.items():
            assert_same(stored(kv, key), value, player.note)
    total = 2 if theirs is None else 2 * shared_pushes * THREADS
    assert_same(stored(kv, -1), torch.full((SIZE,), float(total)), f"seed {seed}")


@pytest.mark.parametrize("replicas", [1, 3])
def test_each_push_is_atomic_per_key(kv, replicas):
    size = 200003
    kv.init(3, torch.zeros(size))
    done = threading.Event()

    def pusher(number):
        values = [torch.full((size,), float(number)) for _ in range(replicas)]
        for _ in range(60):
            kv.push(3, values)
        done.set()

    def puller():
        out = torch.zeros(size)
        while not done.is_set():
            kv.pull(3, out=out)
            assert (out == out[0]).all(), "a pull saw half a push"

    bodies = [lambda n=n: pusher(n) for n in range(1, 4)] + [puller] * 2
    run_threads(bodies)
    assert stored(kv, 3)[0].item() in [n * replicas for n in range(1, 4)]


def test_a_python_updater_never_runs_twice_at_once(kv):
    inside, worst = [], []

    def update(key, input, stored):
        inside.append(key)
        worst.append(len(inside))
        time.sleep(0.0005)
        stored += input
        inside.remove(key)

    keys = list(range(THREADS))
    kv.init(keys, [full(0)] * THREADS)
    kv.set_updater(update)
    order = [random.Random(n).sample(keys, THREADS) for n in keys]
    run_threads(
        [lambda o=o: [kv.push(o, [full(1)] * THREADS) for _ in range(3)] for o in order]
    )
    assert max(worst) == 1 and len(worst) == 3 * THREADS * THREADS
    for key in keys:
        assert_same(stored(kv, key), full(3 * THREADS))


class LongCount(torch.nn.Module):
    """Reads, works, then writes its counter: two at once would lose a count."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, key: int, input: torch.Tensor, stored: torch.Tensor) -> None:
        count = self.count
        for _ in range(5):
            stored.add_(input)
        self.count = count + 1


def test_a_script_updater_never_runs_twice_at_once(kv):
    updater = script(LongCount())
    keys = list(range(THREADS))
    kv.init(keys, [torch.zeros(SIZE)] * THREADS)
    kv.set_updater(updater)
    value = torch.ones(SIZE)
    run_threads(
        [lambda key=key: [kv.push(key, value) for _ in range(200)] for key in keys]
    )
    assert updater.count == 200 * THREADS
    for key in keys:
        assert_same(stored(kv, key), torch.full((SIZE,), 1000.0))


def test_a_script_updater_of_several_stores_runs_once_at_a_time(store_type):
    updater = script(LongCount())
    stores = [torchkv.create(store_type) for _ in range(4)]
    for store in stores:
        store.init(0, torch.zeros(SIZE))
        store.set_updater(updater)
    value = torch.ones(SIZE)
    run_threads([lambda s=s: [s.push(0, value) for _ in range(200)] for s in stores])
    assert updater.count == 200 * len(stores)


def test_a_python_updater_of_several_stores_runs_once_at_a_time(store_type):
    inside, worst = [], []

    def update(key, input, stored):
        inside.append(key)
        worst.append(len(inside))
        time.sleep(0.0005)
        inside.pop()

    stores = [torchkv.create(store_type) for _ in range(4)]
    for store in stores:
        store.init(0, full(0))
        store.set_updater(update)
    run_threads([lambda s=s: [s.push(0, full(1)) for _ in range(20)] for s in stores])
    assert len(worst) == 80 and max(worst) == 1


def test_program_order_of_each_thread(kv):
    kv.init(list(range(THREADS)), [torch.zeros(SIZE)] * THREADS)

    def body(key):
        out = torch.zeros(SIZE)
        for number in range(150):
            kv.push(key, torch.full((SIZE,), float(number)))
            kv.pull(key, out=out)
            assert (out == number).all()

    run_threads([lambda key=key: body(key) for key in range(THREADS)])


@pytest.mark.parametrize("updater", UPDATERS)
def test_calls_in_opposite_key_orders_do_not_deadlock(kv, updater):
    kv.init([3, 5], [torch.zeros(SIZE)] * 2)
    kv.set_updater(UPDATERS[updater]()[0])
    values = [torch.ones(SIZE)] * 2
    outs = [[torch.zeros(SIZE) for _ in range(2)] for _ in range(4)]

    def body(keys, out):
        for _ in range(150):
            kv.push(keys, values)
            kv.pull(keys, out=out)
            kv.pushpull(keys, values, out=out)

    run_threads(
        [
            lambda i=i, out=out: body([3, 5] if i % 2 else [5, 3], out)
            for i, out in enumerate(outs)
        ]
    )


def test_an_updater_that_raises_in_one_thread_does_not_affect_the_others(kv):
    def update(key, input, stored):
        if key == 0:
            raise ValueError("boom")
        stored += input

    kv.init(list(range(4)), [full(0)] * 4)
    kv.set_updater(update)

    def body(key):
        for _ in range(50):
            if key:
                kv.push(key, full(1))
            else:
                with pytest.raises(ValueError, match="boom"):
                    kv.push(0, full(1))

    run_threads([lambda key=key: body(key) for key in range(4)])
    assert_same(stored(kv, 0), full(0))
    assert_same(stored(kv, 3), full(50))
