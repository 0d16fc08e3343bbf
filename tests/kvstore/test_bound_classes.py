"""Every method of every bound class, called on objects of other classes.

Each call runs in a forked child, where a crash is one failed test.
"""

import inspect
import pickle

import pytest
import torch

import torchkv
from helpers import check_in_child, full
from torchkv import _C

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")

CLASSES = [value for value in vars(_C).values() if inspect.isclass(value)]


def methods_of(cls):
    """The bound functions that take an object of the class first."""
    for name, member in vars(cls).items():
        if isinstance(member, property):
            yield name, member.fget
        elif callable(member) and not isinstance(member, staticmethod):
            if name.startswith("__") and name != "__repr__":
                continue
            yield name, member


METHODS = [
    pytest.param(cls, function, id=f"{cls.__name__}.{name}")
    for cls in CLASSES
    for name, function in methods_of(cls)
]


def arguments_of(function):
    """None for each parameter after self."""
    signature = (function.__doc__ or "").partition("\n")[0]
    return [None] * (signature.partition(")")[0].count(",") if signature else 0)


def test_every_class_has_methods():
    assert {cls.__name__ for cls in CLASSES} >= {"KVStore", "Work", "WeakKVStore"}
    assert len(METHODS) > 30


@pytest.mark.parametrize(("cls", "function"), METHODS)
def test_an_object_of_another_class_is_a_type_error(cls, function):
    def body():
        uninitialized = cls.__new__(cls)
        for self in (None, uninitialized, object(), 3, full(1)):
            with pytest.raises(TypeError):
                function(self, *arguments_of(function))
        with pytest.raises(TypeError):
            function()

    check_in_child(body)


@pytest.mark.parametrize(("cls", "function"), METHODS)
def test_none_is_an_error_for_every_argument(cls, function):
    if cls is not _C.KVStore or not arguments_of(function):
        pytest.skip("takes none")

    def body():
        store = _C.KVStore("local")
        store.init(3, full(1), False, False)
        try:
            function(store, *arguments_of(function))
        except (TypeError, ValueError):
            return
        assert function.__name__ == "set_updater"  # None is one

    check_in_child(body)


def test_a_script_object_without_a_store():
    def body():
        store = _C.KVStore("local")
        for function, arguments in [
            (store.take, [None]),
            (_C.KVStore.from_state, [None]),
            (_C.KVStore.from_script_object, [None]),
            (torchkv.KVStore.from_script_object, [None]),
            (torchkv.KVStore.from_script_object, [3]),
        ]:
            with pytest.raises(TypeError):
                function(*arguments)

    check_in_child(body)


def test_an_empty_script_object_is_refused():
    def body():
        empty = torch.ScriptObject.__new__(torch.ScriptObject)
        with pytest.raises(TypeError, match="from_script_object: .*but got"):
            torchkv.KVStore.from_script_object(empty)

    check_in_child(body)


def test_from_script_object_of_an_empty_object():
    store = torchkv.create()
    weak = store._impl.weak()
    assert weak.lock() is store._impl
    del store
    assert weak.lock() is None
    with pytest.raises(TypeError):
        pickle.dumps(weak)


def test_a_wrong_object_deep_in_an_argument_is_a_type_error():
    with pytest.raises(TypeError):
        _C.did_you_mean("a", [object()])
    with pytest.raises(TypeError):
        _C.KVStore("local").set_optimizer("sgd", [{"lr": "x"}], {}, {}, False)
