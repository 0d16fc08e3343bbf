"""Copies: repr, copy.deepcopy and pickle of a store and of a module that holds one."""

import copy
import pickle

import pytest
import torch

import torchkv
from helpers import (
    Momentum,
    MomentumStr,
    add_input,
    assert_same,
    full,
    run_threads,
    script,
    scripted_add_twice,
    snapshot,
    stored,
    torch_save_load,
)

COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "oldest pickle": lambda thing: pickle.loads(pickle.dumps(thing, protocol=2)),
    "torch.save": torch_save_load,
}

every_copy = pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)


class Holder(torch.nn.Module):
    def __init__(self, kv):
        super().__init__()
        self.kv = kv
        self.again = kv
        self.weight = torch.nn.Parameter(full(1))


def test_repr_names_type_keys_and_bytes(kv, store_type):
    assert repr(kv) == f"KVStore(type='{store_type}', keys=0, bytes=0)"
    kv.init([3, 5, 7], [full(1)] * 3)
    assert repr(kv) == f"KVStore(type='{store_type}', keys=3, bytes=72)"
    kv.push(3, [full(1)] * 4)
    assert repr(kv) == f"KVStore(type='{store_type}', keys=3, bytes=72)"
    kv.init(9, torch.zeros(1000, dtype=torch.int16)[::2])
    assert repr(kv) == f"KVStore(type='{store_type}', keys=4, bytes=1072)"
    kv.delete([3, 9])
    assert repr(kv) == f"KVStore(type='{store_type}', keys=2, bytes=48)"


@every_copy
def test_a_copy_has_everything_and_shares_nothing(kv, store_type, make):
    kv.init(
        [9, -5, 2**40],
        [full(1), torch.tensor(7, dtype=torch.int64), torch.zeros(0).half()],
    )
    kv.push(9, [full(1), full(2)])
    before = snapshot(kv)
    other = make(kv)
    assert isinstance(other, torchkv.KVStore)
    assert other.type == store_type and other is not kv
    assert snapshot(other) == before
    other.push(9, full(50))
    other.delete(-5)
    other.init(1, full(1))
    assert snapshot(kv) == before
    kv.push(9, full(60))
    assert_same(stored(other, 9), full(50))
    with pytest.raises(TypeError):
        other.init("w", full(1))


@every_copy
def test_str_keys_and_an_empty_store(store_type, make):
    with torchkv.create(store_type) as store:
        assert make(store).keys() == []
        store.init(["w", "größe"], [full(1), full(2)])
        other = make(store)
        assert other.keys() == ["w", "größe"]
        assert_same(stored(other, "größe"), full(2))


@every_copy
def test_strided_and_odd_values(kv, make):
    kv.init([3, 5], [torch.arange(12.0).reshape(3, 4).t(), torch.arange(5)[1:]])
    kv.init(7, torch.complex(full(1), full(2)).conj())
    assert snapshot(make(kv)) == snapshot(kv)


@every_copy
@pytest.mark.parametrize("kind", [int, str])
def test_a_script_module_is_copied_with_its_state(store_type, make, kind):
    key = 3 if kind is int else "w"
    with torchkv.create(store_type) as kv:
        updater = script(Momentum() if kind is int else MomentumStr())
        kv.set_updater(updater)
        kv.init(key, full(100))
        kv.push(key, full(1))
        other = make(kv)
        assert snapshot(other) == snapshot(kv)
        other.push(key, full(1))
        assert_same(stored(other, key), full(96))
        assert_same(updater.momentum[key], full(1), "the copy has its own state")
        kv.push(key, full(0))
        assert_same(stored(kv, key), full(97))


@every_copy
def test_a_script_function_is_copied_with_the_store(kv, make):
    kv.set_updater(scripted_add_twice())
    kv.init(3, full(1))
    other = make(kv)
    other.push(3, full(2))
    assert_same(stored(other, 3), full(5))
    again = make(other)
    again.push(3, full(2))
    assert_same(stored(again, 3), full(9))


def scaled(input: torch.Tensor, key: int) -> torch.Tensor:
    return input * key


@every_copy
def test_a_script_function_is_copied_with_the_functions_it_calls(kv, make):
    def update(key: int, input: torch.Tensor, stored: torch.Tensor):
        stored.add_(scaled(input, key))

    kv.set_updater(script(update))
    kv.init(3, full(1))
    other = make(make(kv))
    other.push(3, full(2))
    assert_same(stored(other, 3), full(7))


@every_copy
def test_a_python_updater_makes_it_an_error(kv, make):
    kv.init(3, full(1))
    kv.set_updater(add_input)
    for thing in (kv, Holder(kv)):
        with pytest.raises((RuntimeError, TypeError, ValueError), match="updater"):
            make(thing)
    kv.push(3, full(1))
    assert_same(stored(kv, 3), full(2), "the store itself is as it was")
    kv.set_updater(None)
    assert snapshot(make(kv)) == snapshot(kv)


@every_copy
def test_a_module_that_holds_a_store(kv, make):
    kv.set_updater(scripted_add_twice())
    kv.init(3, full(1))
    holder = Holder(kv)
    other = make(holder)
    assert other.kv is other.again
    other.kv.push(3, full(1))
    assert_same(stored(other.again, 3), full(3))
    assert_same(stored(kv, 3), full(1))
    assert_same(other.weight, full(1))


class NamedStore(torchkv.KVStore):
    """A store with attributes and a constructor of its own."""

    def __init__(self, name, type="local", *, more):
        super().__init__(type)
        self.name = name
        self.more = more

    def pull_first(self):
        return self.pull(self.keys()[0])


class SlottedStore(torchkv.KVStore):
    """A store with a slot, and one that is never filled."""

    __slots__ = ("name", "unset")


@every_copy
def test_a_subclass_stays_one_with_its_attributes(store_type, make):
    kv = NamedStore("weights", store_type, more=[full(1), "a"])
    kv.set_updater(scripted_add_twice())
    kv.init(3, full(1))
    with torchkv.create(store_type) as inner:
        inner.init("w", full(5))
        kv.inner = inner
        other = make(kv)
    assert type(other) is NamedStore and other.type == store_type
    assert other.name == "weights" and other.more[1] == "a"
    assert_same(other.more[0], full(1))
    assert other.more is not kv.more and other.more[0] is not kv.more[0]
    assert_same(stored(other.inner, "w"), full(5))
    other.push(3, full(1))
    assert_same(other.pull_first(), full(3))
    assert_same(kv.pull_first(), full(1))


@every_copy
def test_the_slots_of_a_subclass_are_copied(store_type, make):
    kv = SlottedStore(store_type)
    kv.name = "weights"
    kv.init(3, full(1))
    other = make(kv)
    assert type(other) is SlottedStore and other.name == "weights"
    assert not hasattr(other, "unset")
    assert snapshot(other) == snapshot(kv)


@every_copy
def test_a_store_that_refers_to_itself(kv, make):
    store = NamedStore("weights", kv.type, more=None)
    store.more = {"me": store}
    store.init(3, full(1))
    other = make(store)
    assert other.more["me"] is other and other is not store


@every_copy
def test_a_closed_store_is_not_copied(store_type, make):
    store = torchkv.create(store_type)
    store.init(3, full(1))
    store.close()
    with pytest.raises(RuntimeError, match="clos"):
        make(store)


def test_a_copy_outlives_the_original(kv):
    kv.init(3, full(1))
    kv.set_updater(scripted_add_twice())
    other = copy.deepcopy(kv)
    kv.close()
    other.push(3, full(1))
    assert_same(stored(other, 3), full(3))


def test_copies_beside_pushes_have_consistent_values(kv):
    kv.init(3, torch.zeros(100003))

    def pusher():
        for number in range(40):
            kv.push(3, torch.full((100003,), float(number)))

    def copier():
        for _ in range(5):
            value = stored(copy.deepcopy(kv), 3)
            assert (value == value[0]).all()

    run_threads([pusher, copier, copier])
