"""A scripted module that holds a store: jit.save, jit.load and copy.deepcopy."""

import copy

import pytest
import torch

import torchkv
from helpers import (
    Add,
    Momentum,
    MomentumStr,
    add_input,
    assert_same,
    full,
    jit_save_load,
    script,
    scripted_add_twice,
    snapshot,
    stored,
)


class Model(torch.nn.Module):
    """A weight, an optimizer and a store; `step` trains by the store."""

    def __init__(self, kv):
        super().__init__()
        self.kv = kv.script_object
        self.opt = Momentum()
        self.weight = torch.nn.Parameter(full(1))

    def forward(self, x):
        return x * self.weight

    @torch.jit.export
    def use_updater(self):
        self.kv.set_updater(self.opt)

    @torch.jit.export
    def step(self, gradient):
        self.kv.push(3, [gradient, gradient])
        self.kv.pull(3, self.weight)
        return self.weight


COPIES = {"save and load": jit_save_load, "deepcopy": copy.deepcopy}

every_copy = pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)


def store_of(module):
    return torchkv.KVStore.from_script_object(module.kv)


@every_copy
def test_keys_values_and_type(kv, store_type, make):
    values = [full(2), torch.arange(5, dtype=torch.int8), torch.zeros(0, 3).bfloat16()]
    kv.init([9, -3, 2**40], values)
    other = make(script(Model(kv)))
    assert store_of(other).type == store_type
    assert snapshot(store_of(other)) == snapshot(kv)
    store_of(other).push(9, full(50))
    assert_same(stored(kv, 9), full(2), "two stores from here on")
    assert_same(other(full(3)), full(3))


@every_copy
def test_str_keys(kv, make):
    kv.init(["w", "größe"], [full(1), full(2)])
    other = store_of(make(script(Model(kv))))
    assert snapshot(other) == snapshot(kv)
    with pytest.raises(TypeError):
        other.init(3, full(1))


@every_copy
def test_training_continues_where_it_stopped(kv, make):
    kv.init(3, full(100))
    model = script(Model(kv))
    model.use_updater()
    model.step(full(1))
    other = make(model)
    twin = make(other)
    for gradient in (1, 0, 2):
        expected = model.step(full(gradient)).clone()
        assert_same(other.step(full(gradient)), expected)
    assert_same(twin.step(full(1)), full(100 - 2 - 6))


@every_copy
def test_a_copy_has_an_updater_of_its_own(kv, make):
    kv.init(3, full(100))
    model = script(Model(kv))
    model.use_updater()
    model.step(full(1))
    assert_same(model.opt.momentum[3], full(2), "shared before")
    other = make(model)
    other.step(full(1))
    assert_same(other.opt.momentum[3], full(2), "the submodule is no longer shared")
    assert_same(stored(store_of(other), 3), full(100 - 2 - 6))
    assert_same(model.opt.momentum[3], full(2))
    other.use_updater()
    other.step(full(1))
    assert_same(other.opt.momentum[3], full(6), "set again, shared again")


@every_copy
@pytest.mark.parametrize(
    "updater", [scripted_add_twice, lambda: script(Add())], ids=["function", "module"]
)
def test_an_updater_set_in_python_is_copied(kv, make, updater):
    kv.set_updater(updater())
    kv.init(3, full(1))
    other = store_of(make(make(script(Model(kv)))))
    for store in (kv, other):
        store.push(3, full(2))
    assert snapshot(other) == snapshot(kv)
    other.set_updater(None)
    other.push(3, full(9))
    assert_same(stored(other, 3), full(9))


class Twice(torch.nn.Module):
    """Two modules that hold one store."""

    def __init__(self, kv):
        super().__init__()
        self.inner = Model(kv)
        self.kv = self.inner.kv

    def forward(self, x):
        self.kv.push(3, x)
        return self.inner.step(torch.ones_like(x))


@every_copy
def test_one_store_held_twice_stays_one(kv, make):
    kv.init(3, full(1))
    kv.set_updater(script(Add()))
    other = make(script(Twice(kv)))
    assert_same(other(full(5)), full(8))
    assert_same(stored(store_of(other), 3), full(8))
    assert_same(stored(kv, 3), full(1))


@every_copy
def test_str_state_is_copied(kv, make):
    kv.set_updater(script(MomentumStr()))
    kv.init("w", full(100))
    kv.push("w", full(1))
    other = store_of(make(script(Model(kv))))
    for store in (kv, other):
        store.push("w", full(1))
    assert_same(stored(other, "w"), full(96))
    assert snapshot(other) == snapshot(kv)


@every_copy
def test_a_python_updater_makes_it_an_error(kv, make):
    kv.init(3, full(1))
    model = script(Model(kv))
    kv.set_updater(add_input)
    with pytest.raises((RuntimeError, TypeError, ValueError), match="updater"):
        make(model)
    kv.set_updater(None)
    assert snapshot(store_of(make(model))) == snapshot(kv)


def test_a_closed_store_cannot_be_saved(kv):
    model = script(Model(kv))
    kv.close()
    with pytest.raises(RuntimeError, match="clos"):
        jit_save_load(model)
