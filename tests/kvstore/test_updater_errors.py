"""Updaters that raise, call back into their store, or have the wrong signature."""

import copy
import pickle

import numpy as np
import pytest
import torch

import torchkv
from helpers import add_input, assert_same, bits, full, script, snapshot, stored


class Custom(Exception):
    def __init__(self, text, code):
        super().__init__(text)
        self.code = code


def failing_at(bad_key, error):
    """Adds the input, then raises `error` at `bad_key`."""

    def update(key, input, stored):
        stored += input
        if key == bad_key:
            raise error

    return update


def scripted_sum():
    def update(key: int, input: torch.Tensor, stored: torch.Tensor):
        return stored + input

    return script(update)


def scripted_tuple():
    def update(key: int, input: torch.Tensor, stored: torch.Tensor):
        return key, [{"sum": stored + input}]

    return script(update)


def scripted_tuple_with_stored():
    def update(key: int, input: torch.Tensor, stored: torch.Tensor):
        return stored.add_(input), input * 2

    return script(update)


def scripted_in_place():
    def update(key: int, input: torch.Tensor, stored: torch.Tensor):
        return stored.add_(input)

    return script(update)


@pytest.mark.parametrize(
    "make",
    [
        lambda: lambda key, input, stored: stored + input,
        lambda: lambda key, input, stored: input,
        lambda: lambda key, input, stored: torch.ones(()),
        lambda: lambda key, input, stored: (stored + input, None),
        lambda: lambda key, input, stored: [stored + input],
        lambda: lambda key, input, stored: {"sum": stored + input},
        lambda: lambda key, input, stored: (1, [{"sum": (stored + input,)}]),
        lambda: lambda key, input, stored: (stored + input).numpy(),
        scripted_sum,
        scripted_tuple,
    ],
    ids=[
        "sum",
        "input",
        "constant",
        "tuple",
        "list",
        "dict",
        "nested",
        "numpy",
        "scripted",
        "scripted tuple",
    ],
)
def test_a_new_tensor_instead_of_a_write_is_an_error(kv, make):
    kv.init([3, 5], [full(1)] * 2)
    kv.set_updater(make())
    with pytest.raises(TypeError, match=r"stored.copy_\(result\).*\(key 3\)"):
        kv.push([3, 5], [full(1)] * 2)
    assert_same(stored(kv, 3), full(1))
    assert_same(stored(kv, 5), full(1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: lambda key, input, stored: stored.add_(input),
        lambda: lambda key, input, stored: stored.view(-1).add_(input.view(-1)),
        lambda: lambda key, input, stored: stored.data.add_(input),
        lambda: lambda key, input, stored: (stored.add_(input), input)[1],
        lambda: lambda key, input, stored: (stored.add_(input), "done"),
        lambda: (
            lambda key, input, stored: {"new": input * 2, "old": stored.add_(input)}
        ),
        lambda: (
            lambda key, input, stored: np.add(
                stored.numpy(), input.numpy(), out=stored.numpy()
            )
        ),
        scripted_in_place,
        scripted_tuple_with_stored,
    ],
    ids=[
        "add_",
        "of a view",
        "of data",
        "input",
        "tuple",
        "dict",
        "numpy",
        "scripted",
        "scripted tuple",
    ],
)
def test_what_an_updater_that_writes_returns_does_not_matter(kv, make):
    kv.init(3, full(1))
    kv.set_updater(make())
    kv.push(3, full(1))
    kv.push(3, [full(1), full(1)])
    assert_same(stored(kv, 3), full(4))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("boom"),
        KeyError("boom"),
        IndexError("boom"),
        NotImplementedError("boom"),
        Custom("boom", 7),
        StopIteration("boom"),
        KeyboardInterrupt("boom"),
        SystemExit("boom"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_exception_itself_reaches_the_caller(kv, error):
    kv.init([3, 5, 7], [full(0)] * 3)
    kv.set_updater(failing_at(5, error))
    with pytest.raises(type(error), match="boom") as caught:
        kv.push([3, 5, 7], [full(1)] * 3)
    assert caught.value is error
    assert "update" in [entry.name for entry in caught.traceback]
    assert_same(stored(kv, 3), full(1), "a key before it is updated")
    assert_same(stored(kv, 5), full(1), "its own key keeps what was written")
    assert_same(stored(kv, 7), full(0), "a key after it is not updated")
    kv.push([7, 3], [full(1)] * 2)
    assert_same(stored(kv, 3), full(2), "the store stays usable")
    kv.set_updater(None)
    kv.push(5, full(9))
    assert_same(stored(kv, 5), full(9))


def test_an_error_of_torch_in_a_python_updater(kv):
    kv.init(3, full(0))
    kv.set_updater(lambda key, input, stored: stored.add_(torch.ones(7)))
    with pytest.raises(RuntimeError, match="size of tensor"):
        kv.push(3, full(1))
    kv.set_updater(lambda key: None)
    with pytest.raises(TypeError, match="positional argument"):
        kv.push(3, full(1))
    assert_same(stored(kv, 3), full(0))


def test_pushpull_with_a_failing_updater_writes_no_out(kv):
    kv.init([3, 5], [full(0)] * 2)
    kv.set_updater(failing_at(5, ValueError("boom")))
    values, outs = [full(1), full(2)], [full(7), full(8)]
    with pytest.raises(ValueError, match="boom"):
        kv.pushpull([3, 5], values, out=outs)
    with pytest.raises(ValueError, match="boom"):
        kv.pushpull([3, 5], values)
    for tensor, was in zip(values + outs, [1, 2, 7, 8], strict=True):
        assert_same(tensor, full(was))


def scripted_raise(kind):
    def value_error(key: int, input: torch.Tensor, stored: torch.Tensor):
        stored.add_(input)
        if key == 5:
            raise ValueError("boom")

    def key_error(key: int, input: torch.Tensor, stored: torch.Tensor):
        stored.add_(input)
        if key == 5:
            raise KeyError("boom")

    def failed_assert(key: int, input: torch.Tensor, stored: torch.Tensor):
        stored.add_(input)
        assert key != 5, "boom"

    def failed_op(key: int, input: torch.Tensor, stored: torch.Tensor):
        stored.add_(input)
        if key == 5:
            stored.add_(torch.ones(7))

    functions = {
        "ValueError": value_error,
        "KeyError": key_error,
        "assert": failed_assert,
        "operator": failed_op,
    }
    return script(functions[kind])


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("ValueError", ValueError, "boom"),
        ("KeyError", KeyError, "boom"),
        # torch gives a failed assert no Python type of its own.
        ("assert", Exception, "AssertionError: boom"),
        ("operator", RuntimeError, "size of tensor"),
    ],
)
def test_script_updater_that_raises(kv, kind, error, message):
    kv.init([3, 5, 7], [full(0)] * 3)
    kv.set_updater(scripted_raise(kind))
    with pytest.raises(error, match=message):
        kv.push([3, 5, 7], [full(1)] * 3)
    assert_same(stored(kv, 3), full(1))
    assert_same(stored(kv, 5), full(1))
    assert_same(stored(kv, 7), full(0))
    kv.push([7, 3], [full(1)] * 2)
    assert_same(stored(kv, 3), full(2))


class Odd(Exception):
    """TorchScript takes it for an exception made of one message."""

    def __init__(self, text, code, *, more):
        super().__init__(text, code, more)


def raise_unicode_decode_error(key: int, input: torch.Tensor, stored: torch.Tensor):
    stored.add_(input)
    raise UnicodeDecodeError("boom")


def raise_unicode_encode_error(key: int, input: torch.Tensor, stored: torch.Tensor):
    stored.add_(input)
    raise UnicodeEncodeError("boom")


def raise_odd(key: int, input: torch.Tensor, stored: torch.Tensor):
    stored.add_(input)
    raise Odd("boom")


def raise_group(key: int, input: torch.Tensor, stored: torch.Tensor):
    stored.add_(input)
    raise ExceptionGroup("boom")


@pytest.mark.parametrize(
    "update",
    [raise_unicode_decode_error, raise_unicode_encode_error, raise_odd, raise_group],
)
def test_script_updater_that_raises_what_takes_more_than_a_message(kv, update):
    kv.init(3, full(0))
    kv.set_updater(script(update))
    with pytest.raises(Exception, match="boom") as error:
        kv.push(3, full(1))
    assert "argument" not in str(error.value)
    assert_same(stored(kv, 3), full(1))
    kv.set_updater(add_input)
    kv.push(3, full(1))
    assert_same(stored(kv, 3), full(2))


REENTRANT = {
    "init": lambda kv: kv.init(11, full(1)),
    "push the same key": lambda kv: kv.push(3, full(1)),
    "push another key": lambda kv: kv.push(5, full(1)),
    "pull the same key": lambda kv: kv.pull(3, out=full(0)),
    "pull another key": lambda kv: kv.pull(5),
    "pushpull": lambda kv: kv.pushpull(5, full(1)),
    "broadcast": lambda kv: kv.broadcast(11, full(1), full(0)),
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


def test_reentry_by_way_of_another_store(kv, store_type):
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


def test_stored_kept_by_an_updater_that_raises_is_no_door(kv):
    kept = []

    def update(key, input, stored):
        stored += input
        kept.append(stored)
        raise ValueError("boom")

    kv.init(3, full(1))
    kv.set_updater(update)
    with pytest.raises(ValueError, match="boom"):
        kv.push(3, full(2))
    kept[0].fill_(99)
    assert_same(stored(kv, 3), full(3))


REPLACEMENTS = {
    "resize_": lambda stored, other: stored.resize_(7),
    "set_": lambda stored, other: stored.set_(other),
    "data": lambda stored, other: setattr(stored, "data", other),
}


@pytest.mark.parametrize("how", REPLACEMENTS)
def test_an_updater_cannot_replace_the_stored_memory(kv, how):
    other = full(7)
    kv.init(3, full(1))
    kv.set_updater(lambda key, input, stored: REPLACEMENTS[how](stored, other))
    with pytest.raises(RuntimeError, match="in place|not resizable"):
        kv.push(3, full(2))
    kv.set_updater(add_input)
    other.fill_(99)
    kv.push(3, full(2))
    assert kv.shape(3) == (2, 3)
    assert_same(stored(kv, 3), full(3))


def wrong_signatures():
    def too_few(key: int, input: torch.Tensor):
        input.add_(1)

    def too_many(key: int, input: torch.Tensor, stored: torch.Tensor, lr: float):
        stored.add_(input * lr)

    def key_is_float(key: float, input: torch.Tensor, stored: torch.Tensor):
        stored.add_(input)

    def key_is_tensor(key, input, stored):
        stored.add_(input)

    def input_is_list(key: int, input: list[torch.Tensor], stored: torch.Tensor):
        stored.add_(input[0])

    def stored_is_optional(key: int, input: torch.Tensor, stored: int):
        input.add_(stored)

    def key_is_str(key: str, input: torch.Tensor, stored: torch.Tensor):
        stored.add_(input)

    def nothing():
        pass

    class Module(torch.nn.Module):
        def forward(self, input: torch.Tensor):
            return input

    class NoForward(torch.nn.Module):
        @torch.jit.export
        def update(self, key: int, input: torch.Tensor, stored: torch.Tensor):
            stored.add_(input)

    return [
        too_few,
        too_many,
        key_is_float,
        key_is_tensor,
        input_is_list,
        stored_is_optional,
        key_is_str,
        nothing,
        Module(),
        NoForward(),
    ]


@pytest.mark.parametrize(
    "thing",
    wrong_signatures(),
    ids=lambda thing: getattr(thing, "__name__", type(thing).__name__),
)
def test_wrong_script_signature_is_refused(kv, thing):
    kv.init(3, full(1))
    kv.set_updater(add_input)
    with pytest.raises(TypeError) as error:
        kv.set_updater(script(thing))
    expected = "forward(key: int, input: Tensor, stored: Tensor)"
    assert expected in str(error.value)
    kv.push(3, full(1))
    assert_same(stored(kv, 3), full(2), "the updater from before is still in place")


def test_int_signature_is_refused_by_a_store_of_str_keys(kv):
    def update(key: int, input: torch.Tensor, stored: torch.Tensor):
        stored.add_(input)

    kv.init("w", full(1))
    before = bits(stored(kv, "w"))
    with pytest.raises(TypeError) as error:
        kv.set_updater(script(update))
    expected = "forward(key: str, input: Tensor, stored: Tensor)"
    assert expected in str(error.value)
    assert bits(stored(kv, "w")) == before


@pytest.mark.parametrize("thing", [3, "sgd", [add_input], torch.ones(2), object()])
def test_what_cannot_be_called_is_no_updater(kv, thing):
    kv.init(3, full(1))
    with pytest.raises(TypeError, match="updater"):
        kv.set_updater(thing)
    kv.push(3, full(5))
    assert_same(stored(kv, 3), full(5))


def test_a_script_function_without_its_init_is_no_updater(kv):
    kv.init(3, full(1))
    function = torch.jit.ScriptFunction.__new__(torch.jit.ScriptFunction)
    with pytest.raises(TypeError, match="whose __init__ was not called"):
        kv.set_updater(function)
    kv.push(3, full(2))
    assert_same(stored(kv, 3), full(2))
