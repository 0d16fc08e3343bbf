"""state_dict and load_state_dict of stores whose updater is a class of torch.optim."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torchkv
from helpers import add_input, assert_same, full, stored

CLASSES = {
    "NAdam": {"lr": 0.5},
    "SGD": {"lr": 0.5, "momentum": 0.5},
    "Adam": {"lr": 0.5, "amsgrad": True},
    "ASGD": {"lr": 0.1, "t0": 1.0},
}


def make_store(name="NAdam", keys=(3, 10), type="local", dtype=torch.float32):
    store = torchkv.create(type)
    store.init(list(keys), [full(2).to(dtype) for _ in keys])
    store.set_optimizer(getattr(torch.optim, name), **CLASSES[name])
    return store


def push(store, *values):
    keys = store.keys()
    for value in values:
        dtype = store.dtype(keys[0])
        pairs = [(full(value), full(i)) for i in range(len(keys))]
        store.push(keys, [[x.to(dtype) for x in pair] for pair in pairs])


def content(store):
    return {
        key: (stored(store, key).tolist(), store.version(key), str(state))
        for key, state in store.optimizer.state.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("keys", [(3, 10), ("a", "3")])
@pytest.mark.parametrize("name", CLASSES)
def test_training_continues_bit_for_bit(name, keys, dtype, tmp_path):
    store = make_store(name, keys, dtype=dtype)
    other = make_store(name, keys, "device", dtype)
    push(store, 1, 2, 1)
    torch.save(store.state_dict(), tmp_path / "state.pt")
    push(store, 3, 4)
    push(other, 7)  # whose state is replaced
    other.optimizer.lr = 0.1
    optimizer = other.optimizer
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.optimizer is optimizer and optimizer.lr == CLASSES[name]["lr"]
    push(other, 3, 4)
    assert content(other) == content(store)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("name", CLASSES)
def test_torch_distributed_checkpoint(name, tmp_path):
    store, other = make_store(name), make_store(name)
    push(store, 1, 2)
    store.optimizer.lr = 0.25
    dcp.save({"store": store}, checkpoint_id=tmp_path)
    dcp.load({"store": other}, checkpoint_id=tmp_path)
    assert other.optimizer.lr == 0.25
    for each in store, other:
        push(each, 3)
    assert content(other) == content(store)


def test_the_state_shares_no_memory():
    store = make_store()
    push(store, 1)
    before = content(store)
    state = store.state_dict()
    for part in (state["keys"]["3"]["value"], state["torch_optimizer"]["state"]["3"]):
        (part if isinstance(part, torch.Tensor) else part["exp_avg"]).fill_(9)
    assert content(store) == before


def test_a_learning_rate_that_is_a_tensor_is_copied():
    store = make_store()
    store.set_optimizer(torch.optim.Adam, lr=torch.tensor(0.5))
    (group,) = store.state_dict()["torch_optimizer"]["param_groups"]
    group["lr"].fill_(9)
    assert float(store.optimizer.lr) == 0.5


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_row_sparse_keys_have_no_state(tmp_path):
    """Such a class cannot step them; they may be pushed before it is set."""
    stores = [torchkv.create(), torchkv.create()]
    for store in stores:
        store.init_rows(4, (2,), num_rows=9)
        store.push(4, torch.ones(9, 2).to_sparse(1))
        store.init(3, full(2))
        store.set_optimizer(torch.optim.SGD, lr=0.5, momentum=0.5)
        store.push(3, full(1))
    dcp.save({"store": stores[0]}, checkpoint_id=tmp_path)
    stores[1].push(3, full(1))
    dcp.load({"store": stores[1]}, checkpoint_id=tmp_path)
    assert_same(stored(stores[1], 3), stored(stores[0], 3))
    assert stores[0].optimizer.state[4] == {}


def test_keys_that_only_one_has():
    store, other = make_store(keys=(3, 5)), make_store(keys=(3, 10))
    for each in store, other:
        push(each, 1)
    before, state = content(other), store.state_dict()
    push(other, 2)
    with pytest.raises(ValueError, match=r"with 1 missing \(key 10\)"):
        other.load_state_dict(state)
    after = content(other)
    other.load_state_dict(state, strict=False)
    assert content(other) == {3: before[3], 10: after[10]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"torch_optimizer": None}, "expected a state of the class NAdam of torch.opt"),
        ({"torch_optimizer": 3}, "expected 'torch_optimizer' in the state as dict"),
        (
            {"torch_optimizer": {}},
            "class NAdam of torch.optim, .* got one of the class",
        ),
        ({"torch_optimizer": {"optimizer": "NAdam"}}, "without 'param_groups'"),
        ({"keys": {"3": 5}}, "expected key 3 as dict"),
    ],
)
def test_what_does_not_fit_changes_nothing(change, message):
    store = make_store()
    push(store, 1)
    state = {**store.state_dict(), **change}
    push(store, 2)
    before = content(store)
    with pytest.raises(ValueError, match=message):
        store.load_state_dict(state)
    assert content(store) == before


@pytest.mark.parametrize("damage", ["version", "missing state", "shape"])
def test_damage_deep_inside_changes_nothing(damage):
    store = make_store()
    push(store, 1)
    state = store.state_dict()
    of_optimizer = state["torch_optimizer"]["state"]
    if damage == "version":
        state["keys"]["3"]["version"] = -1
    elif damage == "shape":
        of_optimizer["10"]["exp_avg"] = full(1)[:1]
    else:
        del of_optimizer["10"]
    push(store, 2)
    before = content(store)
    with pytest.raises(ValueError, match=r"load.*key (3|10)"):
        store.load_state_dict(state)
    assert content(store) == before


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (torchkv.create, "no optimizer"),
        (lambda: make_store("SGD"), "the class SGD of torch.optim"),
        (lambda: set_sgd(torchkv.create()), "the optimizer 'sgd'"),
    ],
)
def test_the_class_must_be_set_before(make, name):
    state, store = make_store().state_dict(), make()
    message = f"expected a state of {name}, as the store has, .* class NAdam of torch"
    with pytest.raises(ValueError, match=message):
        store.load_state_dict(state)
    assert not store.keys() or store.version(3) == 0


def set_sgd(store):
    store.set_optimizer(torchkv.optim.SGD(lr=0.5))
    return store


def test_groups_and_multipliers_are_those_of_the_state():
    store = make_store()
    store.optimizer.set_param_groups([{"keys": [10], "lr": 0.125}])
    other = make_store()
    other.optimizer.set_lr_mult({3: 0.5})
    other.load_state_dict(store.state_dict())
    assert other.optimizer.param_groups[1]["lr"] == 0.125
    for each in store, other:
        push(each, 1, 2)
    assert content(other) == content(store)


def test_a_folder_has_no_classes(tmp_path):
    store = make_store()
    message = r"the class NAdam of torch.optim; save_optimizer_states\(\) writes its"
    with pytest.raises(TypeError, match=message):
        store.save(tmp_path / "store")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("store_type", ["local", "device"])
def test_other_python_updaters_are_refused(store_type):
    store = make_store(type=store_type)
    state = store.state_dict()
    store.set_updater(add_input)
    message = "expected an updater that can be copied .* Python callable of type func"
    for call in (store.state_dict, lambda: store.load_state_dict(state)):
        with pytest.raises(TypeError, match=message):
            call()
    assert_same(stored(store, 3), full(2))
