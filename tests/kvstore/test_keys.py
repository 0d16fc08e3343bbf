"""Keys: 64-bit ints and strs, one kind per store, and the lifetime of a key."""

import enum
import random

import numpy as np
import pytest
import torch

import torchkv
from helpers import add_input, assert_same, full, stored

EDGES = [0, 1, -1, 2, 2**32 + 2, 2**31, -(2**31), 2**63 - 1, -(2**63)]


class Index:
    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


class Color(enum.IntEnum):
    RED = 7


class Name(str):
    pass


def test_int_keys_are_64_bits(kv):
    for number, key in enumerate(EDGES):
        kv.init(key, full(number))
    kv.push(2**32 + 2, full(-5))
    assert kv.keys() == EDGES
    for number, key in enumerate(EDGES):
        assert_same(stored(kv, key), full(-5 if key == 2**32 + 2 else number))


def test_many_keys(kv):
    rng = random.Random(0)
    keys = [rng.randint(-(2**63), 2**63 - 1) for _ in range(5000)]
    kv.init(keys, [torch.tensor(i) for i in range(len(keys))])
    assert kv.keys() == keys
    assert [int(value) for value in kv.pull(keys)] == list(range(len(keys)))


@pytest.mark.parametrize(
    "key",
    [
        np.int64(7),
        np.int8(7),
        np.uint64(7),
        np.int32(7),
        Index(7),
        Color.RED,
        torch.tensor(7),
    ],
    ids=lambda key: type(key).__name__ + str(getattr(key, "dtype", "")),
)
def test_objects_with_index_are_int_keys(kv, key):
    kv.init(key, full(1))
    assert kv.keys() == [7] and type(kv.keys()[0]) is int
    assert key in kv and 7 in kv
    kv.push(7, full(2))
    assert_same(stored(kv, key), full(2))
    kv.push([key, 7], [full(2), full(3)])
    assert_same(stored(kv, 7), full(5), "one key in two spellings")
    assert kv.shape(key) == (2, 3)
    kv.delete(key)
    assert kv.keys() == []


@pytest.mark.parametrize(
    "key", ["w", "", "3", "fc.weight", "größe", "层", "a\0b", "k" * 10000, "🙂"]
)
def test_str_keys(kv, key):
    kv.init(key, full(1))
    kv.init("a", full(5))
    kv.push(key, full(2))
    assert kv.keys() == [key, "a"]
    assert_same(stored(kv, key), full(2))
    assert_same(stored(kv, "a"), full(5))


def test_subclass_of_str_is_a_str(kv):
    kv.init(Name("w"), full(1))
    assert "w" in kv and np.str_("w") in kv
    assert type(kv.keys()[0]) is str


def test_one_store_takes_one_kind(kv, store_type):
    kv.init(3, full(1))
    with pytest.raises(TypeError, match=r"(?s)(int.*str|str.*int)"):
        kv.init("w", full(1))
    with torchkv.create(store_type) as named:
        named.init("w", full(1))
        with pytest.raises(TypeError, match=r"(?s)(int.*str|str.*int)"):
            named.init(3, full(1))
        with pytest.raises(TypeError, match=r"(?s)(int.*str|str.*int)"):
            named.pull(3)
        assert named.keys() == ["w"]
    with pytest.raises(TypeError, match=r"(?s)(int.*str|str.*int)"):
        kv.push("3", full(1))
    assert kv.keys() == [3]
    assert_same(stored(kv, 3), full(1))


def test_failed_init_does_not_fix_the_kind(kv):
    with pytest.raises(TypeError):
        kv.init(3, None)
    with pytest.raises(TypeError, match=r"(?s)(int.*str|str.*int)"):
        kv.init([3, "w"], [full(1), full(1)])
    kv.init("w", full(1))
    assert kv.keys() == ["w"]


def test_tuples_work_wherever_lists_do(kv):
    kv.init((5, 7), (full(1), full(2)))
    kv.push((5, 7), ((full(1), full(2)), (full(3), full(4))))
    kv.push(5, (full(1), full(2)))
    a, b, c, d = (full(0) for _ in range(4))
    kv.pull((5, 7), out=((a, b), (c, d)))
    assert_same(a, full(3))
    assert_same(b, full(3))
    assert_same(c, full(7))
    assert_same(d, full(7))
    kv.pull(7, out=(a, b))
    assert_same(b, full(7))
    first, second = kv.pull((5, 7))
    assert_same(first, full(3))
    assert_same(second, full(7))
    kv.delete((5, 7))
    assert kv.keys() == []


def test_len_contains_and_order_of_init(kv):
    assert len(kv) == 0 and kv.keys() == [] and 3 not in kv
    kv.init([9, 5], [full(1)] * 2)
    kv.init(7, full(1))
    assert len(kv) == 3
    assert kv.keys() == [9, 5, 7]
    assert 5 in kv and 6 not in kv
    kv.delete(9)
    assert kv.keys() == [5, 7] and len(kv) == 2 and 9 not in kv
    kv.init(9, full(1))
    assert kv.keys() == [5, 7, 9]


def test_keys_returns_a_new_list(kv):
    kv.init(3, full(1))
    kv.keys().append(4)
    assert kv.keys() == [3]


def test_delete(kv):
    kv.init([3, 5, 7], [full(3), full(5), full(7)])
    kv.delete(3)
    for call in [
        lambda: kv.push(3, full(1)),
        lambda: kv.pull(3),
        lambda: kv.shape(3),
        lambda: kv.delete(3),
    ]:
        with pytest.raises(KeyError, match="3"):
            call()
    with pytest.raises(KeyError, match="9"):
        kv.delete([5, 9])
    assert kv.keys() == [5, 7], "nothing goes when one key is unknown"
    kv.delete([5, 7])
    assert kv.keys() == []


def test_init_again_after_delete_with_another_shape_and_dtype(kv):
    kv.init(3, full(1))
    kv.push(3, [full(1)] * 4)
    kv.delete(3)
    kv.init(3, torch.arange(7, dtype=torch.int16))
    assert kv.shape(3) == (7,) and kv.dtype(3) is torch.int16
    kv.push(3, [torch.ones(7, dtype=torch.int16)] * 3)
    assert_same(stored(kv, 3), torch.full((7,), 3, dtype=torch.int16))


def test_updater_stays_when_keys_go(kv):
    kv.set_updater(add_input)
    kv.init(3, full(1))
    kv.delete(3)
    kv.init(3, full(2))
    kv.push(3, full(5))
    assert_same(stored(kv, 3), full(7))


def test_the_first_init_fixes_the_kind_of_keys(kv):
    kv.init(3, full(1))
    kv.delete(3)
    with pytest.raises(TypeError, match=r"(?s)(int.*str|str.*int)"):
        kv.init("w", full(1))
    assert kv.keys() == []


def test_init_twice_keeps_the_value(kv):
    kv.init(3, full(1))
    with pytest.raises(ValueError, match="3"):
        kv.init(3, full(2))
    with pytest.raises(ValueError, match="3"):
        kv.init([5, 3], [full(2)] * 2)
    assert kv.keys() == [3]
    assert_same(stored(kv, 3), full(1))


def test_shape_and_dtype(kv):
    kv.init([3, 5], [full(1), torch.zeros((), dtype=torch.bool)])
    assert kv.shape(3) == torch.Size((2, 3)) and isinstance(kv.shape(3), torch.Size)
    assert kv.shape(5) == torch.Size(())
    assert kv.dtype(3) is torch.float32 and kv.dtype(5) is torch.bool
    for ask in (kv.shape, kv.dtype):
        with pytest.raises(KeyError, match="9"):
            ask(9)


def test_init_copies(kv):
    value = full(1)
    shared = torch.arange(12.0).reshape(3, 4)
    kv.init([3, 5], [value, shared.t()])
    value.fill_(9)
    shared.fill_(9)
    assert_same(stored(kv, 3), full(1))
    assert_same(stored(kv, 5), torch.arange(12.0).reshape(3, 4).t())


def test_one_tensor_inits_several_keys(kv):
    kv.init([3, 5], [full(1)] * 2)
    kv.push(3, full(7))
    assert_same(stored(kv, 5), full(1))


def test_init_takes_a_list_of_one(kv):
    kv.init(3, [full(1)])
    kv.init([5, 7], [[full(2)], [full(3)]])
    assert_same(stored(kv, 7), full(3))


def test_pulled_tensors_outlive_the_key(kv):
    kv.init(3, full(1))
    out = kv.pull(3)
    kv.delete(3)
    assert_same(out, full(1))
