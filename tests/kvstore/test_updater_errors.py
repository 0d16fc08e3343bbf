"""Updaters that raise, return a new tensor or replace the stored memory."""

import numpy as np
import pytest
import torch

from helpers import add_input, assert_same, full, script, stored


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
def test_returning_a_new_tensor_is_an_error(kv, make):
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
def test_the_return_value_of_an_updater_in_place_is_ignored(kv, make):
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
    """TorchScript assumes that an exception takes one message."""

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
def test_script_updater_that_raises_an_exception_with_several_arguments(kv, update):
    kv.init(3, full(0))
    kv.set_updater(script(update))
    with pytest.raises(Exception, match="boom") as error:
        kv.push(3, full(1))
    assert "argument" not in str(error.value)
    assert_same(stored(kv, 3), full(1))
    kv.set_updater(add_input)
    kv.push(3, full(1))
    assert_same(stored(kv, 3), full(2))


def test_stored_tensor_kept_by_an_updater_that_raises_is_not_an_alias(kv):
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
