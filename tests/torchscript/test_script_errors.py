"""TorchScript errors: the same text as in Python, and the same type if torch keeps it.

Inside a scripted function torch's interpreter turns an error into a RuntimeError with
the same text; NotImplementedError alone keeps its type. A method called on the script
object from Python keeps every type.
"""

from typing import Any

import pytest
import torch

from helpers import AddStr, assert_same, full, script, snapshot, stored


def push(kv: torch.classes.torchkv.KVStore, key: int, x: torch.Tensor) -> None:
    kv.push(key, x)


def push_list(
    kv: torch.classes.torchkv.KVStore, keys: list[int], x: list[torch.Tensor]
) -> None:
    kv.push(keys, x)


def push_float_key(kv: torch.classes.torchkv.KVStore, x: torch.Tensor) -> None:
    kv.push(3.0, x)


def push_str_key(kv: torch.classes.torchkv.KVStore, x: torch.Tensor) -> None:
    kv.push("w", x)


def push_bool_key(kv: torch.classes.torchkv.KVStore, x: torch.Tensor) -> None:
    kv.push(True, x)


def push_deep(kv: torch.classes.torchkv.KVStore, x: torch.Tensor) -> None:
    kv.push([3, 5], [[[x]], [[x]]])


def push_none(kv: torch.classes.torchkv.KVStore) -> None:
    kv.push(3, None)


def pull(kv: torch.classes.torchkv.KVStore, key: int, out: torch.Tensor) -> None:
    kv.pull(key, out)


def init_again(kv: torch.classes.torchkv.KVStore, x: torch.Tensor) -> None:
    kv.init([1, 2, 3], [x, x, x])


def delete(kv: torch.classes.torchkv.KVStore, key: int) -> None:
    kv.delete([3, key])


def pull_any(kv: torch.classes.torchkv.KVStore, key: Any) -> Any:
    return kv.pull(key)


def wide():
    return torch.ones(7)


SCRIPTED = [
    (push, lambda: (99, full(1)), RuntimeError, r"99.*init\(99"),
    (push, lambda: (3, wide()), RuntimeError, r"push: expected .*\(key 3\)"),
    (push, lambda: (3, full(1j, dtype=torch.cfloat)), RuntimeError, r"\(key 3\)"),
    (push, lambda: (3, full(1).to("meta")), NotImplementedError, "meta"),
    (push, lambda: (3, full(1).to_sparse()), RuntimeError, "one sparse dimension"),
    (push_list, lambda: ([3, 5], [full(1), wide()]), RuntimeError, r"\(key 5\)"),
    (push_list, lambda: ([3, 5], [full(1)]), RuntimeError, "push: expected"),
    (push_list, lambda: ([3, 5], []), RuntimeError, "push: expected"),
    (push_list, lambda: ([], []), RuntimeError, "push: expected"),
    (push_float_key, lambda: (full(1),), RuntimeError, "push: expected .*key"),
    (push_bool_key, lambda: (full(1),), RuntimeError, "push: expected .*key"),
    (push_str_key, lambda: (full(1),), RuntimeError, "(?s)(int.*str|str.*int)"),
    (push_deep, lambda: (full(1),), RuntimeError, "push: expected"),
    (push_none, lambda: (), RuntimeError, r"push: expected .*\(key 3\)"),
    (pull, lambda: (3, wide()), RuntimeError, r"pull: expected .*\(key 3\)"),
    (pull, lambda: (3, full(1).int()), RuntimeError, r"pull: expected .*\(key 3\)"),
    (init_again, lambda: (full(1),), RuntimeError, "init.*3"),
    (delete, lambda: (99,), RuntimeError, "99"),
    (pull_any, lambda: (None,), RuntimeError, "pull: expected .*key"),
    (pull_any, lambda: (full(1),), RuntimeError, "pull: expected .*key"),
]


@pytest.mark.parametrize(("function", "args", "error", "message"), SCRIPTED)
def test_errors_inside_scripted_code(kv, function, args, error, message):
    kv.init([3, 5], [full(1), full(2)])
    before = snapshot(kv)
    with pytest.raises(error, match=f"(?s){message.removeprefix('(?s)')}"):
        script(function)(kv.script_object, *args())
    assert snapshot(kv) == before


FROM_PYTHON = [
    (lambda kv: kv.push(99, full(1)), IndexError, r"99.*init\(99"),
    (lambda kv: kv.pull("w"), TypeError, "(?s)(int.*str|str.*int)"),
    (lambda kv: kv.push(3, wide()), ValueError, r"\(key 3\)"),
    (lambda kv: kv.push([3, 5], [full(1), wide()]), ValueError, r"\(key 5\)"),
    (lambda kv: kv.push(3, full(1j, dtype=torch.cfloat)), TypeError, r"\(key 3\)"),
    (lambda kv: kv.init(3, full(1)), ValueError, "3"),
    (lambda kv: kv.init([1, 1], [full(1)] * 2), ValueError, "1"),
    (lambda kv: kv.push(3.0, full(1)), TypeError, "key"),
    (lambda kv: kv.push(True, full(1)), TypeError, "key"),
    (lambda kv: kv.push(None, full(1)), TypeError, "key"),
    (lambda kv: kv.push(3, None), TypeError, r"\(key 3\)"),
    (lambda kv: kv.push(3, "x"), TypeError, r"\(key 3\)"),
    (lambda kv: kv.push([3, 5], [full(1)]), ValueError, "push: expected"),
    (lambda kv: kv.pull(3, full(1).int()), TypeError, r"\(key 3\)"),
    (lambda kv: kv.pull(3, torch.zeros(3).expand(2, 3)), ValueError, r"\(key 3\)"),
    (lambda kv: kv.delete([3, 99]), IndexError, "99"),
    (lambda kv: kv.push(3, full(1).to("meta")), NotImplementedError, "meta"),
    (lambda kv: kv.push(3, full(1).to_sparse()), ValueError, "one sparse dimension"),
    (lambda kv: kv.init(7, full(1).to_sparse()), ValueError, "one sparse dimension"),
    (lambda kv: kv.set_updater(5), TypeError, "updater"),
    (lambda kv: kv.set_updater(torch.ones(2)), TypeError, "updater"),
]


@pytest.mark.parametrize(("call", "error", "message"), FROM_PYTHON)
def test_errors_of_the_script_object_keep_their_types(kv, call, error, message):
    kv.init([3, 5], [full(1), full(2)])
    before = snapshot(kv)
    with pytest.raises(error, match=message):
        call(kv.script_object)
    assert snapshot(kv) == before


class Chooser(torch.nn.Module):
    """Sets its submodule as the updater, from inside TorchScript."""

    def __init__(self, kv, updater):
        super().__init__()
        self.kv = kv.script_object
        self.updater = updater

    def forward(self):
        self.kv.set_updater(self.updater)


@pytest.mark.parametrize("updater", [AddStr(), torch.nn.ReLU()])
def test_wrong_signature_inside_scripted_code(kv, updater):
    kv.init(3, full(1))
    with pytest.raises(RuntimeError) as error:
        script(Chooser(kv, updater))()
    assert "forward(key: int, input: Tensor, stored: Tensor)" in str(error.value)
    kv.push(3, full(5))
    assert_same(stored(kv, 3), full(5))


def test_an_updater_that_raises_inside_scripted_code(kv):
    def boom(key: int, input: torch.Tensor, stored: torch.Tensor):
        raise ValueError("boom")

    kv.init(3, full(1))
    for updater in (boom, script(boom)):
        kv.set_updater(updater)
        with pytest.raises(Exception, match="boom"):
            script(push)(kv.script_object, 3, full(1))
    kv.set_updater(None)
    script(push)(kv.script_object, 3, full(9))
    assert_same(stored(kv, 3), full(9))
