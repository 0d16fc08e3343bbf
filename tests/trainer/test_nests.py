"""torchkv.trainer.nests: results have the structure of the inputs."""

import types
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch

from torchkv.trainer.nests import map_nests

Point = namedtuple("Point", ["x", "y"])


@dataclass
class Plain:
    x: object
    y: object = None


@dataclass(frozen=True, slots=True)
class Frozen:
    x: object


@dataclass
class Derived:
    x: object
    twice: object = field(init=False)

    def __post_init__(self):
        self.twice = self.x


NESTS = {
    "leaf": (1, 2),
    "none": (None, None),
    "dict": ({"a": 1, 5: 2}, {"a": 2, 5: 4}),
    "list": ([1, [2, 3]], [2, [4, 6]]),
    "tuple": ((1, ()), (2, ())),
    "named tuple": (Point(1, 2), Point(2, 4)),
    "dataclass": (Plain(1, [2]), Plain(2, [4])),
    "frozen dataclass with slots": (Frozen(1), Frozen(2)),
    "field without init": (Derived(1), Derived(2)),
    "OrderedDict": (OrderedDict(b=1, a=2), OrderedDict(b=2, a=4)),
    "defaultdict": (defaultdict(list, a=1), defaultdict(list, a=2)),
    "UserDict": (UserDict(a=1), UserDict(a=2)),
    "mapping proxy": (types.MappingProxyType({"a": 1}), {"a": 2}),
}


def double(_, leaf):
    return leaf if leaf is None else 2 * leaf


@pytest.mark.parametrize(("nest", "expected"), NESTS.values(), ids=NESTS)
def test_a_nest_keeps_its_structure(nest, expected):
    mapped = map_nests(double, [nest], "nest")
    assert type(mapped) is type(nest)
    assert mapped == expected


class Alike:
    """Keys of a dict that look alike."""

    def __repr__(self):
        return "alike"


def test_keys_that_look_alike():
    a, b = Alike(), Alike()
    nest = {a: 1, b: 2, 1: 3, "1": 4}
    assert map_nests(double, [nest], "nest") == {a: 2, b: 4, 1: 6, "1": 8}


@dataclass
class Output(OrderedDict):
    """A dict and a dataclass, as the outputs of transformers' models."""

    loss: object = None
    logits: object = None

    def __post_init__(self):
        if isinstance(self.loss, dict):
            raise TypeError("fields by name")
        for name in ("loss", "logits"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)


def test_a_dict_that_is_a_dataclass():
    mapped = map_nests(double, [Output(logits=3)], "nest")
    assert type(mapped) is Output and mapped == {"logits": 6}
    assert mapped.logits == 6 and mapped.loss is None


@dataclass
class Caching:
    x: object

    def __post_init__(self):
        self.cache = {"a": [self.x]}


def test_a_tensor_outside_of_a_dataclasses_fields():
    with pytest.raises(TypeError, match=r"x\[0\]: .*only in fields.*'cache'"):
        map_nests(double, [[Caching(torch.ones(2))]], "x")
    assert map_nests(double, [Caching(1)], "x").x == 2


def test_a_mapped_nest_is_another_object():
    inner = [1]
    nest = Plain({"a": inner})
    mapped = map_nests(double, [nest], "nest")
    assert nest == Plain({"a": [1]}) and nest.x["a"] is inner
    assert mapped == Plain({"a": [2]})


def test_torchs_own_tuples():
    values = torch.ones(2, 3).max(1)
    mapped = map_nests(double, [values], "nest")
    assert type(mapped) is type(values)
    assert mapped.values.tolist() == [2, 2]


def test_paths_and_columns():
    seen = {}

    def note(path, *leaves):
        seen[path] = list(leaves)

    map_nests(note, [{"a": [1, Point(2, 3)]}, {"a": [4, Point(5, 6)]}], "x")
    assert seen == {"x['a'][0]": [1, 4], "x['a'][1].x": [2, 5], "x['a'][1].y": [3, 6]}


@pytest.mark.parametrize(
    ("a", "b", "told"),
    [
        ([1], [1, 2], "list of 1 and list of 2"),
        ([1], (1,), "list of 1 and tuple of 1"),
        ({"a": 1}, {"b": 1}, "dict of 1 and dict of 1"),
        ({"a": 1}, 3, "dict of 1 and int"),
    ],
)
def test_different_structures(a, b, told):
    with pytest.raises(
        ValueError, match=rf"x\[0\]: expected the same structure.*{told}"
    ):
        map_nests(double, [[a], [b]], "x")
