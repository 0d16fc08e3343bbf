"""Copies of a store while its updater runs, and copies made by an updater.

The tests run in a forked child, where a deadlock is one failed test.
"""

import copy
import pickle
import threading
import time

import pytest
import torch

import torchkv
from helpers import (
    Add,
    add_input,
    assert_same,
    check_in_child,
    full,
    jit_save_load,
    run_threads,
    script,
    stored,
)

# Later Pythons warn about any fork beside threads; that is what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")

LIMIT_S = 20
REFUSALS = (RuntimeError, TypeError, ValueError)


class Holder(torch.nn.Module):
    """A module, to be scripted, that holds a store."""

    def __init__(self, kv):
        super().__init__()
        self.kv = kv.script_object

    def forward(self, x):
        self.kv.push(3, x)
        return x


def of_module(make):
    """A copy of the store by way of a scripted module that holds it."""
    return lambda kv: from_script(make(script(Holder(kv))).kv)


def from_script(script_object):
    return torchkv.KVStore.from_script_object(script_object)


def by_pickle(thing):
    return pickle.loads(pickle.dumps(thing))


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": by_pickle,
    "script object deepcopy": lambda kv: from_script(copy.deepcopy(kv.script_object)),
    "script object pickle": lambda kv: from_script(by_pickle(kv.script_object)),
    "module deepcopy": of_module(copy.deepcopy),
    "torch.jit.save": of_module(jit_save_load),
}

every_copy = pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)


def assert_usable(kv):
    """Whatever the store holds: a push, a pull and a copy do their work."""
    kv.set_updater(None)
    kv.push(3, full(7))
    assert_same(stored(kv, 3), full(7))
    assert_same(stored(copy.deepcopy(kv), 3), full(7))


def copy_while_others_push(kv, updater, copy_once):
    """Two threads push while a third copies five times."""
    kv.init(3, full(0))
    kv.set_updater(updater)
    done = threading.Event()

    def pusher():
        while not done.is_set():
            kv.push(3, full(1))

    def copier():
        try:
            for _ in range(5):
                copy_once()
        finally:
            done.set()

    run_threads([pusher, pusher, copier], LIMIT_S)
    assert_usable(kv)


@every_copy
def test_a_running_python_updater_makes_it_an_error_not_a_deadlock(make):
    def body():
        kv = torchkv.create()
        inside = threading.Event()

        def slow(key, input, stored):
            inside.set()
            time.sleep(0.02)
            stored += input

        def copy_once():
            inside.clear()
            assert inside.wait(LIMIT_S)
            with pytest.raises(REFUSALS, match="updater"):
                make(kv)

        copy_while_others_push(kv, slow, copy_once)

    check_in_child(body, LIMIT_S)


@every_copy
def test_copies_beside_a_running_script_updater(make):
    def body():
        kv = torchkv.create()

        def copy_once():
            other = make(kv)
            value = stored(other, 3)
            assert_same(value, full(value[0, 0].item()), "the value is whole")
            other.push(3, full(5))
            assert_same(stored(other, 3), value + 5, "the updater came along")

        copy_while_others_push(kv, script(Add()), copy_once)

    check_in_child(body, LIMIT_S)


@every_copy
def test_an_updater_copies_another_store_of_its_own(make):
    def body():
        kv, other = torchkv.create(), torchkv.create()

        def update(key, input, stored):
            stored += input
            make(other)

        for store in (kv, other):
            store.init(3, full(1))
            store.set_updater(update)
        with pytest.raises(REFUSALS, match="updater"):
            kv.push(3, full(2))
        assert_same(stored(kv, 3), full(3), "its own key keeps what was written")
        for store in (kv, other):
            assert_usable(store)

    check_in_child(body, LIMIT_S)


@every_copy
def test_an_updater_copies_its_own_store(make):
    def body():
        kv = torchkv.create()
        kv.init(3, full(1))
        kv.set_updater(lambda key, input, stored: make(kv))
        with pytest.raises(RuntimeError, match="updater"):
            kv.push(3, full(2))
        assert_usable(kv)

    check_in_child(body, LIMIT_S)


@every_copy
def test_an_updater_may_copy_a_store_that_has_another_updater(make):
    def body():
        kv, other = torchkv.create(), torchkv.create()
        for store in (kv, other):
            store.init(3, full(1))
        other.set_updater(script(Add()))
        copies = []
        kv.set_updater(lambda key, input, stored: copies.append(make(other)))
        kv.push(3, full(2))
        copies[0].push(3, full(2))
        assert_same(stored(copies[0], 3), full(3))
        assert_same(stored(other, 3), full(1))

    check_in_child(body, LIMIT_S)


class HoldsItsStore(torch.nn.Module):
    """An updater, to be scripted, with the store among its attributes."""

    def __init__(self, kv):
        super().__init__()
        self.kv = kv.script_object

    def forward(self, key: int, input: torch.Tensor, stored: torch.Tensor) -> None:
        stored.add_(input)


@every_copy
def test_a_script_updater_that_holds_its_store_is_not_copied(make):
    def body():
        kv = torchkv.create()
        kv.init(3, full(1))
        kv.set_updater(script(HoldsItsStore(kv)))
        kv.push(3, full(2))
        with pytest.raises(RuntimeError, match="updater"):
            make(kv)
        kv.push(3, full(2))
        assert_same(stored(kv, 3), full(5))
        assert_usable(kv)

    check_in_child(body, LIMIT_S)


class PushesWhenPrinted:
    def __init__(self, kv):
        self.kv = kv

    def __call__(self, key, input, stored):
        stored += input

    def __repr__(self):
        self.kv.push(3, full(1))
        return "PushesWhenPrinted()"


@every_copy
def test_an_updater_whose_repr_calls_the_store(make):
    def body():
        kv = torchkv.create()
        kv.init(3, full(1))
        kv.set_updater(PushesWhenPrinted(kv))
        with pytest.raises(TypeError, match="updater"):
            make(kv)
        kv.set_updater(add_input)
        assert_usable(kv)

    check_in_child(body, LIMIT_S)
