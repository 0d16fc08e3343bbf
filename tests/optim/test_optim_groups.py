"""``param_groups`` as a list, which only the optimizer's methods change."""

import copy
import pickle

import pytest
import torch

from helpers import assert_same, full, stored


@pytest.mark.parametrize(
    "change",
    [
        lambda groups: groups.clear(),
        lambda groups: groups.pop(),
        lambda groups: groups.append({}),
        lambda groups: groups.extend([{}]),
        lambda groups: groups.insert(0, {}),
        lambda groups: groups.remove(groups[0]),
        lambda groups: groups.reverse(),
        lambda groups: groups.sort(),
        lambda groups: groups.__setitem__(0, {}),
        lambda groups: groups.__delitem__(0),
        lambda groups: groups.__iadd__([{}]),
        lambda groups: groups.__imul__(2),
    ],
)
@pytest.mark.parametrize("set_one", [lambda: "sgd", lambda: torch.optim.SGD])
def test_the_list_of_groups_is_read_only(kv, change, set_one):
    kv.init([3, 5], [full(1)] * 2)
    kv.set_optimizer(set_one(), lr=0.5)
    kv.set_param_groups([{"keys": [5], "lr": 1.0}])
    groups = kv.optimizer.param_groups
    with pytest.raises(ValueError, match="param_groups: .*set_param_groups"):
        change(groups)
    with pytest.raises(ValueError, match="cannot be replaced"):
        kv.optimizer.param_groups = [dict(groups[0])]
    assert kv.optimizer.param_groups is groups and len(groups) == 2
    plain = copy.deepcopy(groups)
    assert type(plain) is list and plain[1]["keys"] == [5]
    kv.push([3, 5], [full(1)] * 2)
    assert_same(stored(kv, 3), full(0.5))
    assert_same(stored(kv, 5), full(0))


@pytest.mark.parametrize("set_one", [lambda: "sgd", lambda: torch.optim.SGD])
def test_params_lists_the_keys(kv, set_one):
    kv.set_optimizer(set_one(), lr=0.5)
    first = kv.optimizer.param_groups[0]
    assert first["params"] == []
    kv.init([3, 5, 4], [full(1)] * 3)
    assert sorted(first["params"]) == [3, 4, 5] and first["keys"] is None
    kv.set_param_groups([{"keys": [5], "lr": 1.0}])
    groups = kv.optimizer.param_groups
    assert [sorted(group["params"]) for group in groups] == [[3, 4], [5]]
    assert sorted(first.get("params")) == [3, 4] and first.get("absent", 7) == 7
    groups[1]["params"].append(3)  # a copy
    assert groups[1]["params"] == groups[1]["keys"] == [5]
    kv.delete(3)
    assert first["params"] == [4]
    assert "'params': [4]" in repr(groups) and "'params': [5]" in repr(groups)
    for plain in (dict(first), {**first}, first.copy(), first | {}, {} | first):
        assert type(plain) is dict and plain["params"] == [4]
    assert dict(first.items()) == plain and [4] in first.values()
    assert pickle.loads(pickle.dumps(first)) == copy.deepcopy(first) == plain
    assert plain == first == plain and first != {**plain, "params": []} and first != 3
    assert copy.deepcopy(groups) == list(groups)
    with pytest.raises(TypeError, match="unsupported operand"):
        first | 5
    kv.set_updater(None)
    assert first["params"] == []
