"""Updaters that do more to their tensors than writing to them.

The tests run in a forked child, where a crash is one failed test.
"""

import copy
import functools

import pytest
import torch

import torchkv
from helpers import add_input, assert_same, check_in_child, script, stored

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")

VALUE = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
OTHER = torch.tensor([[5.0, 7.0], [9.0, 11.0]])


def set_data(tensor):
    tensor.data = OTHER


def script_t(tensor: torch.Tensor):
    tensor.t_()


def script_as_strided(tensor: torch.Tensor):
    tensor.as_strided_([2, 2], [1, 2])


def script_unsqueeze(tensor: torch.Tensor):
    tensor.unsqueeze_(0)


def script_flatten(tensor: torch.Tensor):
    tensor.resize_([4])


def script_shrink(tensor: torch.Tensor):
    tensor.resize_([1, 2])


def script_grow(tensor: torch.Tensor):
    tensor.resize_([3, 3])


def script_set(tensor: torch.Tensor):
    tensor.set_(torch.ones([2, 2]))


# Each changes a tensor, but not its numbers.
REPLACEMENTS = {
    "t_": lambda tensor: tensor.t_(),
    "transpose_": lambda tensor: tensor.transpose_(0, 1),
    "as_strided_": lambda tensor: tensor.as_strided_((2, 2), (1, 2)),
    "as_strided_ of less": lambda tensor: tensor.as_strided_((2, 2), (0, 1)),
    "unsqueeze_": lambda tensor: tensor.unsqueeze_(0),
    "resize_ flat": lambda tensor: tensor.resize_(4),
    "resize_ smaller": lambda tensor: tensor.resize_(1, 2),
    "resize_ empty": lambda tensor: tensor.resize_(0),
    "resize_ larger": lambda tensor: tensor.resize_(3, 3),
    "resize_as_": lambda tensor: tensor.resize_as_(torch.ones(5)),
    "set_": lambda tensor: tensor.set_(OTHER),
    "set_ nothing": lambda tensor: tensor.set_(),
    "set_ its own storage": lambda tensor: tensor.set_(
        tensor.untyped_storage(), 1, (2, 1), (1, 1)
    ),
    "data": set_data,
    "script t_": script(script_t),
    "script as_strided_": script(script_as_strided),
    "script unsqueeze_": script(script_unsqueeze),
    "script resize_ flat": script(script_flatten),
    "script resize_ smaller": script(script_shrink),
    "script resize_ larger": script(script_grow),
    "script set_": script(script_set),
}
STORAGE_SIZES = [0, 4, 15, 1000]


def updater_of(replace, which):
    """An updater that does it to one of its tensors; scripted if `replace` is."""
    if not isinstance(replace, torch.jit.ScriptFunction):
        return lambda key, input, stored: (replace(stored if which else input), None)[1]

    class Replaces(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.to_stored: bool = which

        def forward(self, key: int, input: torch.Tensor, stored: torch.Tensor):
            replace(stored if self.to_stored else input)

    return script(Replaces())


def in_a_child(test):
    """Runs a test's body in a forked child."""

    @functools.wraps(test)
    def run(**arguments):
        check_in_child(lambda: test(**arguments))

    return run


def assert_whole(kv, value):
    """The store holds `value` and does its work."""
    assert kv.shape(3) == (2, 2) and kv.dtype(3) == torch.float32
    assert_same(stored(kv, 3), value)
    assert stored(kv, 3).stride() == (2, 1)
    kv.set_updater(None)
    assert_same(stored(copy.deepcopy(kv), 3), value)
    for updater in (add_input, None):
        kv.set_updater(updater)
        kv.push(3, [OTHER, OTHER])
        kv.push(3, OTHER)
    assert_same(stored(kv, 3), OTHER)
    kv.set_updater(add_input)
    kv.push(3, OTHER)
    assert_same(stored(kv, 3), OTHER * 2)


@pytest.mark.parametrize("replace", REPLACEMENTS.values(), ids=REPLACEMENTS)
@in_a_child
def test_the_stored_tensor_cannot_be_replaced(store_type, replace):
    kv = torchkv.create(store_type)
    kv.init(3, VALUE)
    for pushed in (OTHER, [OTHER, OTHER]):
        kv.set_updater(updater_of(replace, True))
        with pytest.raises(RuntimeError, match="in place|not resizable"):
            kv.push(3, pushed)
    assert_whole(kv, VALUE)


@pytest.mark.parametrize("replace", REPLACEMENTS.values(), ids=REPLACEMENTS)
@in_a_child
def test_changes_to_the_input_do_not_matter(store_type, replace):
    kv = torchkv.create(store_type)
    kv.init(3, VALUE)
    kv.set_updater(updater_of(replace, False))
    for pushed in (OTHER, [OTHER, OTHER]):
        try:
            kv.push(3, pushed)
        except RuntimeError as error:
            assert "not resizable" in str(error)
    assert_same(OTHER, torch.tensor([[5.0, 7.0], [9.0, 11.0]]))
    assert_whole(kv, VALUE)


@pytest.mark.parametrize("size", STORAGE_SIZES)
@pytest.mark.parametrize("which", ["input", "stored"])
@in_a_child
def test_the_memory_cannot_be_resized(store_type, which, size):
    kv = torchkv.create(store_type)
    kv.init(3, VALUE)
    sizes = []

    def resize(key, input, stored):
        tensor = input if which == "input" else stored
        sizes.append(tensor.untyped_storage().nbytes())
        tensor.untyped_storage().resize_(size)

    kv.set_updater(resize)
    for pushed in (OTHER, [OTHER, OTHER]):
        with pytest.raises(RuntimeError):
            kv.push(3, pushed)
    assert sizes == [16, 16]
    assert_whole(kv, VALUE)


@pytest.mark.parametrize("size", STORAGE_SIZES)
@pytest.mark.parametrize("which", ["input", "stored"])
@in_a_child
def test_memory_that_an_updater_keeps_may_be_resized_later(store_type, which, size):
    """By then the updater owns it, or it still refuses."""
    kv = torchkv.create(store_type)
    kv.init(3, VALUE)
    kept = []

    def keep(key, input, stored):
        kept.append((input if which == "input" else stored).untyped_storage())

    kv.set_updater(keep)
    for pushed in (OTHER, [OTHER, OTHER]):
        kv.push(3, pushed)
    for storage in kept:
        try:
            storage.resize_(size)
        except RuntimeError as error:
            assert "not resizable" in str(error)
    assert_whole(kv, VALUE)


HARMLESS = {
    "requires_grad_": lambda tensor: tensor.requires_grad_(),
    "detach_": lambda tensor: tensor.detach_(),
    "share_memory_": lambda tensor: tensor.share_memory_(),
    "grad": lambda tensor: setattr(tensor, "grad", torch.ones(2, 2)),
    "other name": lambda tensor: setattr(tensor, "name_of_mine", "w"),
    "resize_ to its own shape": lambda tensor: tensor.resize_(2, 2),
}


@pytest.mark.parametrize("which", ["input", "stored"])
@pytest.mark.parametrize("touch", HARMLESS.values(), ids=HARMLESS)
@in_a_child
def test_changes_that_keep_memory_and_shape_are_allowed(store_type, touch, which):
    kv = torchkv.create(store_type)
    kv.init(3, VALUE)

    def update(key, input, stored):
        assert not input.requires_grad and not stored.requires_grad
        touch(input if which == "input" else stored)
        stored += input

    kv.set_updater(update)
    kv.push(3, OTHER)
    kv.push(3, [OTHER, OTHER])
    assert_whole(kv, VALUE + 3 * OTHER)
