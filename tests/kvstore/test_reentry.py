"""Updaters that call their own store, directly or through another one."""

import copy
import pickle

import pytest
import torch

import torchkv
from helpers import add_input, assert_same, full, script, snapshot, stored

REENTRANT = {
    "init": lambda kv: kv.init(11, full(1)),
    "push the same key": lambda kv: kv.push(3, full(1)),
    "push another key": lambda kv: kv.push(5, full(1)),
    "pull the same key": lambda kv: kv.pull(3, out=full(0)),
    "pull another key": lambda kv: kv.pull(5),
    "pushpull": lambda kv: kv.pushpull(5, full(1)),
    "broadcast": lambda kv: kv.broadcast(11, full(1), full(0)),
    "assign": lambda kv: kv.assign(5, full(1)),
    "delete": lambda kv: kv.delete(5),
    "set_updater": lambda kv: kv.set_updater(None),
    "set_optimizer": lambda kv: kv.set_optimizer("sgd"),
    "close": lambda kv: kv.close(),
    "script_object": lambda kv: kv.script_object.pull(5),
    "len": len,
    "in": lambda kv: 5 in kv,
    "keys": lambda kv: kv.keys(),
    "repr": repr,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
}


@pytest.mark.parametrize("call", REENTRANT)
def test_calling_the_store_from_its_own_updater(kv, call):
    def update(key, input, stored):
        REENTRANT[call](kv)

    kv.init([3, 5], [full(1)] * 2)
    kv.set_updater(update)
    before = snapshot(kv)
    with pytest.raises(RuntimeError, match="updater"):
        kv.push(3, full(2))
    assert snapshot(kv) == before
    kv.set_updater(add_input)
    kv.push([3, 5], [full(2)] * 2)
    assert_same(stored(kv, 3), full(3))


def test_an_updater_may_catch_the_error_of_reentry(kv):
    caught = []

    def update(key, input, stored):
        try:
            kv.pull(5)
        except RuntimeError as error:
            caught.append(str(error))
        stored += input

    kv.init([3, 5], [full(1)] * 2)
    kv.set_updater(update)
    kv.push([3, 5], [full(2)] * 2)
    assert len(caught) == 2
    assert_same(stored(kv, 3), full(3))
    assert_same(stored(kv, 5), full(3))


def test_an_updater_may_use_another_store(kv, store_type):
    with torchkv.create(store_type) as other:
        other.init(3, full(0))
        other.set_updater(add_input)

        def update(key, input, stored):
            other.push(3, input)
            stored.copy_(other.pull(3))

        kv.init(3, full(1))
        kv.set_updater(update)
        kv.push(3, full(2))
        kv.push(3, full(2))
        assert_same(stored(kv, 3), full(4))


def test_reentry_through_another_store(kv, store_type):
    with torchkv.create(store_type) as other:
        kv.init(3, full(1))
        other.init(3, full(1))
        kv.set_updater(lambda key, input, stored: other.push(3, input))
        other.set_updater(lambda key, input, stored: kv.pull(3))
        with pytest.raises(RuntimeError, match="updater"):
            kv.push(3, full(2))
        for store in (kv, other):
            store.set_updater(None)
            store.push(3, full(2))
            assert_same(stored(store, 3), full(2))


def test_reentry_of_a_script_updater(kv):
    class Calls(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.kv = kv.script_object

        def forward(self, key: int, input: torch.Tensor, stored: torch.Tensor):
            self.kv.push(5, input)

    kv.init([3, 5], [full(1)] * 2)
    kv.set_updater(script(Calls()))
    with pytest.raises(RuntimeError, match="updater"):
        kv.push(3, full(2))
    kv.set_updater(None)
    kv.push(3, full(2))
    assert_same(stored(kv, 3), full(2))
    assert_same(stored(kv, 5), full(1))
