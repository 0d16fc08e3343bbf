"""An optimizer's state: saved, loaded, copied with the store, refused when damaged."""

import copy
import io
import pickle

import pytest
import torch

import torchkv
from helpers import (
    ScriptHolder,
    assert_same,
    full,
    jit_save_load,
    script,
    snapshot,
    stored,
)
from torchkv import optim

KINDS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.1},
    "Adam": {"amsgrad": True},
    "AdamW": {"accumulate": 2, "max_norm": 1.0},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "Lion": {},
    "LAMB": {},
}

pytestmark = pytest.mark.parametrize("name", KINDS)


def trained(store, name, keys=(3, 5), steps=3, dtype=torch.float32):
    store.init(list(keys), [torch.randn(4, 3).to(dtype) for _ in keys])
    store.set_optimizer(getattr(optim, name)(**KINDS[name]))
    store.set_param_groups([{"keys": keys[1], "lr": 0.3}])
    store.set_wd_mult({keys[0]: 2.0})
    push(store, steps)


def push(store, steps=3, keys=None):
    keys = keys or store.keys()
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        store.push(keys, [torch.randn(4, 3, generator=generator) for _ in keys])


def assert_equal(actual, expected):
    """Equality of nested dicts, with every bit of their tensors."""
    if isinstance(expected, torch.Tensor):
        assert_same(actual, expected)
    elif isinstance(expected, dict):
        assert {*actual} == {*expected}
        for name, value in expected.items():
            assert_equal(actual[name], value)
    else:
        assert actual == expected


def through_torch_save(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.cfloat], ids=str
)
@pytest.mark.parametrize("keys", [(3, 5), ("a", "b")], ids=str)
@pytest.mark.parametrize("steps", [0, 3])
def test_state_goes_on_where_it_was_saved(kv, name, dtype, keys, steps):
    trained(kv, name, keys, steps, dtype)
    state = through_torch_save(kv.optimizer.state_dict())
    with torchkv.create() as other:
        other.init(list(keys), kv.pull(list(keys)))
        other.set_optimizer(getattr(optim, name)())
        other.optimizer.load_state_dict(state)
        assert_equal(other.optimizer.state_dict(), state)
        push(kv)
        push(other)
        assert snapshot(kv) == snapshot(other)


def test_state_in_a_file(kv, name, tmp_path):
    trained(kv, name)
    values = kv.pull([3, 5])
    path = tmp_path / "states"
    kv.save_optimizer_states(path)
    kv.save_optimizer_states(str(path))
    assert [p.name for p in tmp_path.iterdir()] == ["states"]
    push(kv)
    after = snapshot(kv)
    with torchkv.create() as other:
        other.init([3, 5], values)
        other.set_optimizer(getattr(optim, name)())
        other.load_optimizer_states(path)
        push(other)
        assert snapshot(other) == after


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_a_distributed_checkpoint_takes_it(kv, name, tmp_path):
    import torch.distributed.checkpoint as dcp

    trained(kv, name)
    values = kv.pull([3, 5])
    expected = kv.optimizer.state_dict()
    dcp.save({"optimizer": kv.optimizer}, checkpoint_id=tmp_path, no_dist=True)
    with torchkv.create() as other:
        other.init([3, 5], values)
        other.set_optimizer(getattr(optim, name)(**KINDS[name]))
        dcp.load({"optimizer": other.optimizer}, checkpoint_id=tmp_path, no_dist=True)
        assert_equal(other.optimizer.state_dict(), expected)
        push(kv)
        push(other)
        assert snapshot(kv) == snapshot(other)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda kv: pickle.loads(pickle.dumps(kv)),
    "jit.save": lambda kv: torchkv.KVStore.from_script_object(
        jit_save_load(script(ScriptHolder(kv))).kv
    ),
}


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("keys", [(3, 5), ("a", "b")], ids=str)
def test_it_is_copied_with_the_store(kv, name, make, keys):
    trained(kv, name, keys)
    other = make(kv)
    assert_equal(other.optimizer.state_dict(), kv.optimizer.state_dict())
    push(kv)
    push(other)
    assert snapshot(kv) == snapshot(other)
    other.optimizer.lr = 0.77
    assert kv.optimizer.lr != 0.77


def test_an_optimizer_alone_is_copied_without_its_store(kv, name):
    trained(kv, name)
    for other in (
        copy.deepcopy(kv.optimizer),
        pickle.loads(pickle.dumps(kv.optimizer)),
    ):
        assert repr(other) == repr(kv.optimizer)
        assert other.param_groups == kv.optimizer.param_groups
        assert other.state_dict()["state"] == {}
        with pytest.raises(RuntimeError, match="set on a store"):
            other.load_state_dict(kv.optimizer.state_dict())


def damaged(state, path, value):
    state = copy.deepcopy(state)
    at = state
    for step in path[:-1]:
        at = at[step]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return state


DAMAGES = [
    (["optimizer"], "NAdam", "NAdam"),
    (["optimizer"], None, "optimizer"),
    (["state"], None, "state"),
    (["state", 5], None, r"missing \(key 5\)"),
    (["state", 7], {"step": 1, "num_accumulated": 0}, r"too many \(key 7\)"),
    (["state", 5], 7, "key 5"),
    (["state", 5, "step"], None, "step.*key 5"),
    (["state", 5, "step"], -1, "key 5"),
    (["state", 5, "odd"], torch.ones(4, 3), "'odd'.*key 5"),
    (["state", 5, "odd"], 7, "'odd'.*key 5"),
    (["param_groups"], [], "group"),
    (["param_groups", 0, "lr"], -1.0, "learning rate"),
    (["param_groups", 1, "lr"], None, "'lr'"),
    (["param_groups", 0, "keys"], [3], "keys"),
    (["lr_mult"], [(3, -1.0)], "multiplier"),
    (["gradient", "max_norm"], -1.0, "max_norm"),
    (["gradient", "max_nrom"], 1.0, "max_nrom"),
]


@pytest.mark.parametrize(("path", "value", "text"), DAMAGES)
def test_a_damaged_state_is_refused_whole(kv, name, path, value, text):
    trained(kv, name, steps=4)
    before = repr(kv.optimizer.state_dict())
    good = kv.optimizer.state_dict()
    with pytest.raises(ValueError, match=text):
        kv.optimizer.load_state_dict(damaged(good, path, value))
    assert repr(kv.optimizer.state_dict()) == before


def test_a_state_of_another_shape_or_a_tensor_missing(kv, name):
    trained(kv, name, steps=4)
    good = kv.optimizer.state_dict()
    before = repr(good)
    kv.optimizer.lr = 0.9
    after = repr(kv.optimizer.state_dict())
    tensor = next(n for n, v in good["state"][5].items() if isinstance(v, torch.Tensor))
    for value in (torch.ones(4, 2), None):
        if value is None and name == "SGD":
            continue  # a momentum that has just begun
        with pytest.raises(ValueError, match="key 5"):
            kv.optimizer.load_state_dict(damaged(good, ["state", 5, tensor], value))
    assert repr(kv.optimizer.state_dict()) == after
    kv.optimizer.load_state_dict(good)
    assert repr(kv.optimizer.state_dict()) == before


def test_not_strict_takes_what_both_have(kv, name):
    trained(kv, name)
    state = kv.optimizer.state_dict()
    kv.init(9, full(1).new_ones(4, 3))
    kv.delete(3)
    with pytest.raises(ValueError, match="missing"):
        kv.optimizer.load_state_dict(state)
    push(kv, keys=[5, 9])
    kv.optimizer.load_state_dict(state, strict=False)
    loaded = kv.optimizer.state_dict()["state"]
    assert repr(loaded[5]) == repr(state["state"][5])
    assert loaded[9]["step"] > 0
    assert_same(stored(kv, 5), stored(kv, 5))
