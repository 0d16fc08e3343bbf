"""Stores as arguments of processes that are started by 'spawn'."""

import pytest
import torch

import spawn_worker
import torchkv
from helpers import (
    Momentum,
    MomentumStr,
    add_input,
    assert_same,
    full,
    script,
    scripted_add_twice,
    stored,
)

LIMIT_S = 60

spawn = torch.multiprocessing.get_context("spawn")


def in_spawned(target, *args):
    """What `target(*args, queue)` puts on its queue in another process."""
    queue = spawn.Queue()
    process = spawn.Process(target=target, args=(*args, queue), daemon=True)
    process.start()
    try:
        answer = queue.get(timeout=LIMIT_S)
        process.join(LIMIT_S)
        assert process.exitcode == 0
        return answer
    finally:
        process.kill()
        process.join()


def test_a_spawned_process_gets_copies():
    """One process for all cases, as each has to import torch."""
    stores, expected = [], []

    def add(kv, key, updater, after):
        kv.init(key, full(1))
        kv.init(key * 2, torch.arange(6.0).reshape(3, 2).t())
        kv.set_updater(updater)
        stores.append(kv)
        values = [(k, kv.pull(k).tolist()) for k in kv.keys()]
        expected.append((kv.type, values, full(after).tolist()))

    for type in ("local", "device"):
        add(torchkv.create(type), 3, None, 3)
        add(torchkv.create(type), "w", None, 3)
        add(torchkv.create(type), 3, scripted_add_twice(), 7)
        add(torchkv.create(type), 3, script(Momentum()), -2)
        add(torchkv.create(type), "w", script(MomentumStr()), -2)
    assert in_spawned(spawn_worker.use, stores) == expected
    for kv in stores:
        assert_same(stored(kv, kv.keys()[0]), full(1), "the parent's are its own")


def test_a_store_comes_back_from_a_process():
    queue, done = spawn.Queue(), spawn.Event()
    process = spawn.Process(
        target=spawn_worker.make_and_send, args=(queue, done), daemon=True
    )
    process.start()
    try:
        kv = queue.get(timeout=LIMIT_S)
        assert kv.type == "device" and kv.keys() == ["w"]
        assert_same(stored(kv, "w"), torch.arange(6.0).reshape(2, 3))
        done.set()
        process.join(LIMIT_S)
        assert process.exitcode == 0
        kv.push("w", full(1))
        assert_same(stored(kv, "w"), full(1))
    finally:
        process.kill()
        process.join()


def test_a_store_with_a_python_updater_cannot_be_sent(kv):
    kv.init(3, full(1))
    kv.set_updater(add_input)
    process = spawn.Process(target=spawn_worker.read, args=(kv, spawn.Queue()))
    with pytest.raises((RuntimeError, TypeError), match="updater"):
        process.start()
    kv.push(3, full(1))
    assert_same(stored(kv, 3), full(2))
