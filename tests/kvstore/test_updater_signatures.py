"""What set_updater refuses: wrong signatures, and objects that are not callable."""

import pytest
import torch

from helpers import add_input, assert_same, bits, full, script, stored


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
def test_objects_that_are_not_callable_are_refused(kv, thing):
    kv.init(3, full(1))
    with pytest.raises(TypeError, match="updater"):
        kv.set_updater(thing)
    kv.push(3, full(5))
    assert_same(stored(kv, 3), full(5))


def test_a_script_function_without_init_is_refused(kv):
    kv.init(3, full(1))
    function = torch.jit.ScriptFunction.__new__(torch.jit.ScriptFunction)
    with pytest.raises(TypeError, match="whose __init__ was not called"):
        kv.set_updater(function)
    kv.push(3, full(2))
    assert_same(stored(kv, 3), full(2))
