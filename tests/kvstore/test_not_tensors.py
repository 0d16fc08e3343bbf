"""Objects that pass for tensors in Python but have none of a tensor's memory."""

import unittest.mock

import pytest
import torch

from error_scene import Scene
from helpers import check_in_child, full, in_child, outcome


@pytest.mark.parametrize("op", ["init", "push", "pull"])
def test_a_tensor_under_functionalization_is_refused(store_type, op):
    def attempt():
        scene = Scene(store_type)
        wrapped = torch._to_functional_tensor(full(1))
        calls = {
            "init": lambda: scene.kv.init(1, wrapped),
            "push": lambda: scene.kv.push(3, wrapped),
            "pull": lambda: scene.kv.pull(3, out=wrapped),
        }
        return outcome(calls[op])

    # In a child, so that a crash is one failed test.
    assert in_child(attempt).startswith("NotImplementedError")


MOCKED = {
    "value": lambda s, mock: s.kv.push(3, mock),
    "replica": lambda s, mock: s.kv.push(3, [s.good, mock]),
    "value of a key": lambda s, mock: s.kv.push([3, 5], [s.good, mock]),
    "replica of a key": lambda s, mock: s.kv.push([3, 5], [[s.good], [mock]]),
    "first value": lambda s, mock: s.kv.init(1, mock),
    "out": lambda s, mock: s.kv.pull(3, out=mock),
    "one of the outs": lambda s, mock: s.kv.pull(3, out=[s.out, mock]),
    "out of a key": lambda s, mock: s.kv.pull([3, 5], out=[s.out, mock]),
    "pushpull": lambda s, mock: s.kv.pushpull(3, mock),
    "broadcast": lambda s, mock: s.kv.broadcast(1, s.good, mock),
    "key": lambda s, mock: s.kv.pull(mock),
}


@pytest.mark.parametrize("place", MOCKED)
def test_a_mock_of_a_tensor_is_refused(store_type, place):
    """Even where isinstance says that it is one."""

    def body():
        scene = Scene(store_type)
        before = scene.everything()
        for subclass in (torch.Tensor, torch.nn.Parameter):
            mock = unittest.mock.Mock(spec=subclass)
            assert isinstance(mock, subclass)
            with pytest.raises(TypeError, match="expected a"):
                MOCKED[place](scene, mock)
        assert scene.everything() == before

    # In a child, so that a crash is one failed test.
    check_in_child(body)
