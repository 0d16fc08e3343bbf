"""Updaters: ASSIGN, Python callables, TorchScript functions and modules with state."""

import gc
import unittest.mock
import warnings
import weakref

import pytest
import torch

import torchkv
from helpers import (
    Add,
    AddStr,
    Momentum,
    MomentumStr,
    add_input,
    assert_same,
    check_in_child,
    full,
    script,
    scripted_add_twice,
    snapshot,
    stored,
)
from kv_model import KVModel


class PlainModule(torch.nn.Module):
    def forward(self, key, input, stored):
        stored += input


class Callable:
    def __call__(self, key, input, stored):
        stored += input

    def method(self, key, input, stored):
        stored += input


ADDERS = {
    "function": lambda: add_input,
    "lambda": lambda: lambda key, input, stored: stored.add_(input),
    "object": Callable,
    "bound method": lambda: Callable().method,
    "torch.nn.Module": PlainModule,
    "script module": lambda: script(Add()),
}


@pytest.mark.parametrize("name", ADDERS)
def test_every_kind_of_updater(kv, devices, name):
    kv.init([3, 5], [full(1, devices[0])] * 2)
    kv.set_updater(ADDERS[name]())
    kv.push(3, full(2, devices[0]))
    kv.push([3, 5], [[full(1, device) for device in devices]] * 2)
    assert_same(stored(kv, 3), full(7))
    assert_same(stored(kv, 5), full(5))


def test_a_mock_as_updater(kv):
    updater = unittest.mock.Mock()
    kv.init(3, full(1))
    kv.set_updater(updater)
    kv.push(3, [full(1), full(2)])
    (key, input, value), _ = updater.call_args
    assert key == 3
    assert_same(input, full(3))
    assert_same(value, full(1))


def test_script_function(kv):
    kv.set_updater(scripted_add_twice())
    kv.init(3, full(1))
    kv.push(3, [full(1), full(2)])
    assert_same(stored(kv, 3), full(7))


UNIT = """
def scaled(input: Tensor, scale: int):
    return input * scale

def update(key: int, input: Tensor, stored: Tensor):
    stored.add_(scaled(input, key))
"""


@pytest.mark.parametrize("pushed_before", [False, True])
def test_a_script_function_keeps_alive_what_it_calls(kv, pushed_before):
    def body():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"`torch\.jit\.\w+`")
            unit = torch.jit.CompilationUnit(UNIT)
        store = torchkv.create(kv.type)
        store.init(3, full(1))
        store.set_updater(unit.update)
        if pushed_before:
            store.push(3, full(1))
        del unit
        gc.collect()
        for _ in range(3):
            store.push(3, full(1))
        assert_same(stored(store, 3), full(13 if pushed_before else 10))

    # In a child, so that a crash is one failed test.
    check_in_child(body)


@pytest.mark.parametrize("kind", [int, str])
def test_script_module_keeps_its_state_in_a_dict(kv, kind):
    make = Momentum if kind is int else MomentumStr
    updater = script(make())
    kv.set_updater(updater)
    model = KVModel()
    model.updater = make()
    keys = [3, 5] if kind is int else ["w", "b"]
    for store in (kv, model):
        store.init(keys, [full(100), full(200)])
        for step in range(4):
            store.push(keys[0], full(step))
            store.push(keys, [[full(1), full(step)], [full(2)] * 2])
    for key in keys:
        assert_same(stored(kv, key), model.stored[key])
        assert_same(updater.momentum[key], model.updater.momentum[key])


@pytest.mark.parametrize("setter", ["set_updater", "_set_updater"])
def test_none_restores_assign(kv, setter):
    kv.init(3, full(1))
    getattr(kv, setter)(add_input)
    kv.push(3, full(1))
    getattr(kv, setter)(None)
    assert_same(stored(kv, 3), full(2), "setting an updater changes no value")
    kv.push(3, full(7))
    assert_same(stored(kv, 3), full(7))


def test_setting_an_updater_changes_no_value(kv):
    kv.init([3, 5], [full(1), full(2)])
    before = snapshot(kv)
    for updater in (add_input, script(Add()), scripted_add_twice(), None):
        kv.set_updater(updater)
        assert snapshot(kv) == before


@pytest.mark.parametrize("keys", [[5, 7, 9], [9, 5, 7], [7, 9, 7, 5, 9]])
def test_updates_run_in_the_order_of_the_call(kv, keys):
    seen = []
    kv.init([5, 7, 9], [full(0)] * 3)
    kv.set_updater(lambda key, input, stored: seen.append(key))
    kv.push(keys, [full(1)] * len(keys))
    assert seen == list(dict.fromkeys(keys))
    assert all(type(key) is int for key in seen)


def test_str_keys_arrive_as_str(kv):
    seen = []
    kv.init(["w", "b", "3"], [full(0)] * 3)
    kv.set_updater(lambda key, input, stored: seen.append(key))
    kv.push(["3", "w", "b"], [full(1)] * 3)
    assert seen == ["3", "w", "b"] and all(type(key) is str for key in seen)


def test_str_keys_reach_a_script_updater_as_str(kv):
    def update(key: str, input: torch.Tensor, stored: torch.Tensor):
        stored.add_(input * len(key))

    kv.init(["w", "bias"], [full(0)] * 2)
    kv.set_updater(script(update))
    kv.push(["w", "bias"], [full(1)] * 2)
    assert_same(stored(kv, "w"), full(1))
    assert_same(stored(kv, "bias"), full(4))


def test_big_int_keys_reach_every_updater_unchanged(kv):
    def update(key: int, input: torch.Tensor, stored: torch.Tensor):
        stored.fill_(key)

    keys = [2**32 + 2, -(2**63), 2**63 - 1]
    kv.init(keys, [torch.zeros(2, dtype=torch.int64)] * 3)
    for updater in (update, script(update)):
        kv.set_updater(updater)
        kv.push(keys, [torch.zeros(2, dtype=torch.int64)] * 3)
        for key in keys:
            assert stored(kv, key).tolist() == [key, key]


def test_the_arguments_of_an_updater(kv):
    seen = []

    def update(key, input, stored):
        seen.append((input.dtype, input.shape, input.requires_grad))
        seen.append((stored.dtype, stored.shape, stored.requires_grad))
        assert not torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        stored += input
        return full(99)

    kv.init(3, full(1, dtype=torch.float16))
    kv.set_updater(update)
    weight = torch.nn.Parameter(full(2))
    assert kv.push(3, weight * 1) is None
    kv.push(3, [weight, full(3, dtype=torch.float64)])
    with torch.enable_grad():
        kv.push(3, full(1, dtype=torch.int32))
    assert set(seen) == {(torch.float16, (2, 3), False)}
    assert_same(stored(kv, 3), full(9, dtype=torch.float16), "the result is ignored")


def test_a_script_updater_may_return_something(kv):
    def update(key: int, input: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
        return stored.add_(input) * 7

    kv.init(3, full(1))
    kv.set_updater(script(update))
    kv.push(3, full(2))
    assert_same(stored(kv, 3), full(3))


def test_state_made_under_inference_mode_is_usable_outside(kv):
    kv.init(3, full(0))
    kv.set_updater(script(Momentum()))
    with torch.inference_mode():
        kv.push(3, full(1))
    kv.push(3, full(1))
    assert_same(stored(kv, 3), full(-4))


KEEPERS = {
    "whole": lambda tensor: tensor,
    "view": lambda tensor: tensor[0],
    "detached": lambda tensor: tensor.detach(),
    "numpy": lambda tensor: torch.from_numpy(tensor.numpy()),
}


@pytest.mark.parametrize("keep", KEEPERS)
@pytest.mark.parametrize("replicas", [1, 3])
def test_an_updater_may_keep_its_arguments(kv, keep, replicas):
    inputs, values, expected = [], [], []

    def update(key, input, stored):
        stored += input
        inputs.append(KEEPERS[keep](input))
        values.append(KEEPERS[keep](stored))
        expected.append((inputs[-1].clone(), values[-1].clone()))

    kv.init(3, full(0))
    kv.set_updater(update)
    for step in range(1, 4):
        gradients = [full(step) for _ in range(replicas)]
        kv.push(3, gradients)
        for gradient in gradients:
            gradient.zero_()
    assert_same(stored(kv, 3), full(6 * replicas))
    for input, (was_input, _) in zip(inputs, expected, strict=True):
        assert_same(input, was_input, "a kept input stays as it was")
    for value in values:
        value.fill_(99)
    for input in inputs:
        input.fill_(99)
    assert_same(stored(kv, 3), full(6 * replicas), "kept tensors are not aliases")
    kv.set_updater(None)
    kv.push(3, full(5))
    assert all((value == 99).all() for value in values)


def test_a_script_updater_may_keep_its_arguments(kv):
    class Keeper(torch.nn.Module):
        kept: list[torch.Tensor]

        def __init__(self):
            super().__init__()
            self.kept = []

        def forward(self, key: int, input: torch.Tensor, stored: torch.Tensor):
            stored.add_(input)
            self.kept.append(input)
            self.kept.append(stored)

    updater = script(Keeper())
    kv.init(3, full(0))
    kv.set_updater(updater)
    gradient = full(1)
    for _ in range(3):
        kv.push(3, gradient)
        kv.push(3, [gradient, gradient])
    gradient.zero_()
    assert_same(stored(kv, 3), full(9))
    for index, value in enumerate([1, 2, 1, 2, 1, 2]):
        assert_same(updater.kept[2 * index], full(value))
    for kept in updater.kept:
        kept.fill_(99)
    assert_same(stored(kv, 3), full(9))


def test_an_input_kept_by_the_updater_is_not_reused(kv):
    pointers = []
    kv.init([3, 5], [full(0)] * 2)
    kv.set_updater(lambda key, input, stored: pointers.append(input))
    kv.push([3, 5], [full(1), full(2)])
    assert_same(pointers[0], full(1))
    assert_same(pointers[1], full(2))


def test_an_updater_is_released(kv):
    for let_go in (kv.set_updater, kv.script_object.set_updater):
        updater = Callable()
        alive = weakref.ref(updater)
        kv.set_updater(updater)
        del updater
        gc.collect()
        assert alive() is not None, "the store keeps its updater alive"
        let_go(None)
        gc.collect()
        assert alive() is None


def test_close_releases_the_updater(store_type):
    updater = Callable()
    alive = weakref.ref(updater)
    store = torchkv.create(store_type)
    store.set_updater(updater)
    store.close()
    del updater
    gc.collect()
    assert alive() is None


def test_script_updater_set_before_the_first_init_fits_the_keys(kv):
    kv.set_updater(script(AddStr()))
    with pytest.raises(TypeError, match="key: int"):
        kv.init(3, full(1))
    assert kv.keys() == []
    kv.init("w", full(1))
    kv.push("w", full(2))
    assert_same(stored(kv, "w"), full(3))


def test_two_stores_share_one_script_updater(store_type):
    updater = script(Momentum())
    with torchkv.create(store_type) as one, torchkv.create(store_type) as two:
        for store in (one, two):
            store.set_updater(updater)
            store.init(3, full(0))
            store.push(3, full(1))
        assert_same(stored(two, 3), full(-3))
