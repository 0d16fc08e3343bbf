"""A closed store answers every call with the same clear error."""

import pytest

import torchkv
from helpers import Add, add_input, assert_same, bits, full, script, stored

CALLS = {
    "init": lambda kv, a, b: kv.init(9, a),
    "push": lambda kv, a, b: kv.push(3, a),
    "push a list": lambda kv, a, b: kv.push([3, 5], [[a, a], [a]]),
    "pull": lambda kv, a, b: kv.pull(3, out=b),
    "pull without out": lambda kv, a, b: kv.pull([3, 5]),
    "pushpull": lambda kv, a, b: kv.pushpull(3, a, out=b),
    "broadcast": lambda kv, a, b: kv.broadcast(9, a, b),
    "assign": lambda kv, a, b: kv.assign(3, a),
    "delete": lambda kv, a, b: kv.delete(3),
    "keys": lambda kv, a, b: kv.keys(),
    "len": lambda kv, a, b: len(kv),
    "in": lambda kv, a, b: 3 in kv,
    "shape": lambda kv, a, b: kv.shape(3),
    "dtype": lambda kv, a, b: kv.dtype(3),
    "set_updater": lambda kv, a, b: kv.set_updater(add_input),
    "set_updater(None)": lambda kv, a, b: kv.set_updater(None),
    "script updater": lambda kv, a, b: kv.set_updater(script(Add())),
    "set_optimizer": lambda kv, a, b: kv.set_optimizer("sgd"),
    "barrier": lambda kv, a, b: kv.barrier(),
    "num_dead_node": lambda kv, a, b: kv.num_dead_node(),
    "script object": lambda kv, a, b: kv.script_object.push(3, a),
}


@pytest.mark.parametrize("call", CALLS)
def test_use_after_close(store_type, call):
    kv = torchkv.create(store_type)
    kv.init([3, 5], [full(3), full(5)])
    kv.close()
    value, out = full(11), full(13)
    with pytest.raises(RuntimeError, match="clos"):
        CALLS[call](kv, value, out)
    assert bits(value) == bits(full(11)) and bits(out) == bits(full(13))


def test_closing_twice_is_allowed(kv):
    kv.init(3, full(1))
    assert kv.close() is None
    kv.close()


def test_a_context_closes_its_store_also_after_an_error(store_type):
    with torchkv.create(store_type) as kv:
        kv.init(3, full(1))
        assert_same(stored(kv, 3), full(1))
    with pytest.raises(RuntimeError, match="clos"):
        kv.keys()
    with pytest.raises(ZeroDivisionError), torchkv.create(store_type) as kv:
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="clos"):
        kv.keys()


def test_a_closed_store_can_be_printed(kv, store_type):
    kv.close()
    assert f"type='{store_type}'" in repr(kv) and "closed" in repr(kv)
    assert kv.type == store_type


def test_pulled_tensors_outlive_the_store(kv):
    kv.init(3, full(1))
    out = kv.pull(3)
    kv.close()
    assert_same(out, full(1))
