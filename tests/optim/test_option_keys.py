"""Options of keys: unknown keys are errors."""

import pickle

import numpy as np
import pytest
import torch
from torch import nn

import torchkv
from helpers import assert_same, full, stored
from torchkv import optim

MAKERS = {
    "built-in": lambda: optim.SGD(1.0),
    "torch.optim": lambda: optim.TorchOptimizer(torch.optim.SGD, lr=1.0),
}

SETTERS = {
    "set_lr_mult": lambda x, name: x.set_lr_mult({name: 0.5}),
    "set_wd_mult": lambda x, name: x.set_wd_mult({name: 0.5}),
    "set_param_groups": lambda x, name: x.set_param_groups(
        [{"keys": [name], "lr": 0.5}]
    ),
}


@pytest.fixture(params=MAKERS.values(), ids=MAKERS)
def optimizer(request):
    return request.param()


@pytest.mark.parametrize("setter", SETTERS)
def test_an_unknown_name_is_an_error(kv, optimizer, setter):
    kv.init(["fc.weight", "fc.bias"], [full(0)] * 2)
    kv.set_optimizer(optimizer)
    before = optimizer.state_dict()["param_groups"]
    for target in (kv, optimizer):
        with pytest.raises(
            KeyError,
            match=f"{setter}: .*'fc.wieght'.*did you mean 'fc.weight'.*key 'fc.wieght'",
        ):
            SETTERS[setter](target, "fc.wieght")
    assert optimizer.state_dict()["param_groups"] == before
    assert not optimizer.state_dict()["lr_mult"]
    kv.push("fc.weight", full(1))
    assert_same(stored(kv, "fc.weight"), full(-1))
    SETTERS[setter](kv, "fc.weight")


def test_an_unknown_name_in_a_new_group(kv, optimizer):
    kv.init([3, 5], [full(0)] * 2)
    kv.set_optimizer(optimizer)
    with pytest.raises(KeyError, match=r"add_param_group: .*\(key 7\)"):
        optimizer.add_param_group({"keys": [3, 7], "lr": 0.5})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"keys": [3], "lr": 0.5})


@pytest.mark.parametrize("setter", SETTERS)
def test_an_empty_store_checks_at_the_first_push(kv, optimizer, setter):
    kv.set_optimizer(optimizer)
    SETTERS[setter](optimizer, "fc.wieght")
    kv.init(["fc.weight", "fc.bias"], [full(0)] * 2)
    for call in (kv.push, kv.pushpull):
        with pytest.raises(KeyError, match="did you mean 'fc.weight'"):
            call("fc.bias", full(1))
    assert_same(stored(kv, "fc.bias"), full(0))
    SETTERS[setter](optimizer, "fc.weight")  # instead of the one that is unknown
    kv.push("fc.bias", full(1))
    assert_same(stored(kv, "fc.bias"), full(-1))


def test_an_optimizer_with_options_is_set_on_a_store(kv, optimizer):
    optimizer.set_lr_mult({"a": 2.0})
    kv.set_optimizer(optimizer)
    kv.init("b", full(0))
    with pytest.raises(KeyError, match=r"push: .*\(key 'a'\)"):
        kv.push("b", full(1))
    kv.init("a", full(0))
    kv.push(["a", "b"], [full(1)] * 2)
    assert_same(stored(kv, "a"), full(-2))

    other = torchkv.create()
    other.init("b", full(0))
    kv.set_updater(None)
    with pytest.raises(KeyError, match=r"set_optimizer: .*\(key 'a'\)"):
        other.set_optimizer(optimizer)
    assert other.optimizer is None


def test_a_known_key_may_be_deleted_and_initialised_again(kv, optimizer):
    kv.set_optimizer(optimizer)
    kv.init([3, 5], [full(0)] * 2)
    optimizer.set_lr_mult({3: 2.0})
    kv.push(3, full(1))
    kv.delete(3)
    optimizer.lr = 0.5
    kv.push(5, full(1))
    kv.init(3, full(0))
    kv.push(3, full(1))
    assert_same(stored(kv, 3), full(-1))
    with pytest.raises(KeyError):
        optimizer.set_lr_mult({4: 2.0})


@pytest.mark.parametrize("made", ["sgd", torch.optim.SGD])
def test_loaded_options_replace_those_of_keys_to_come(kv, made):
    other = torchkv.create(kv.type)
    for store in (kv, other):
        store.set_optimizer(made, lr=1)
    kv.set_lr_mult({3: 2.0})
    kv.optimizer.load_state_dict(other.optimizer.state_dict())
    kv.init(5, full(0))
    kv.push(5, full(1))
    assert_same(stored(kv, 5), full(-1))


def test_options_of_a_deleted_key_are_saved(kv, tmp_path):
    kv.set_optimizer("sgd", learning_rate=1)
    kv.init([3, 5], [full(0)] * 2)
    kv.set_lr_mult({3: 2.0})
    kv.delete(3)
    kv.save(tmp_path)
    for copy in (torchkv.load(tmp_path), torchkv.create()):
        if not len(copy):
            copy.load_state_dict(kv.state_dict())
        copy.init(3, full(0))
        copy.push([3, 5], [full(1)] * 2)
        assert_same(stored(copy, 3), full(-2))


def test_frozen_parameters_of_a_trainer_may_have_options():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    optimizer = optim.SGD(0.5)
    optimizer.set_lr_mult({"0.weight": 0.0, "1.weight": 2.0})
    trainer = torchkv.Trainer(model, optimizer)
    trainer.optimizer.set_wd_mult({"0.bias": 0.0, "1.bias": 0.0})
    before = model[1].weight.detach().clone()
    for parameter in model[1].parameters():
        parameter.grad = torch.ones_like(parameter)
    trainer.step()
    assert_same(model[1].weight, before - 1)
    with pytest.raises(KeyError, match="did you mean '0.weight'"):
        trainer.optimizer.set_lr_mult({"0.wieght": 0.0})
    with pytest.raises(KeyError, match="Trainer: .*'2.weight'"):
        optimizer = optim.SGD(0.5)
        optimizer.set_lr_mult({"2.weight": 0.0})
        torchkv.Trainer(nn.Linear(2, 2), optimizer)


def copies_of(store, folder):
    """Copies of a store by each way of saving it."""
    store.save(folder)
    other = torchkv.create()
    other.load_state_dict(store.state_dict())
    return torchkv.load(folder), other, pickle.loads(pickle.dumps(store))


@pytest.mark.parametrize("name", ["fc.weight", 3])
def test_an_empty_store_is_saved_with_options(kv, name, tmp_path):
    kv.set_optimizer("sgd", learning_rate=1)
    kv.set_lr_mult({name: 2.0})
    for copy in copies_of(kv, tmp_path):
        copy.init(name, full(0))
        copy.push(name, full(1))
        assert_same(stored(copy, name), full(-2))


def test_a_copy_of_an_empty_store_checks_its_names(kv, tmp_path):
    kv.set_optimizer("sgd", learning_rate=1)
    kv.set_lr_mult({"fc.wieght": 2.0})
    for copy in copies_of(kv, tmp_path):
        copy.init("fc.weight", full(0))
        with pytest.raises(KeyError, match="did you mean 'fc.weight'"):
            copy.push("fc.weight", full(1))


def test_names_are_not_checked_again_after_all_keys_are_deleted(kv, optimizer):
    kv.set_optimizer(optimizer)
    kv.init([3, 5], [full(0)] * 2)
    optimizer.set_lr_mult({3: 2.0})
    kv.delete([3, 5])
    optimizer.lr = 0.5
    kv.init(5, full(0))
    kv.push(5, full(1))
    assert_same(stored(kv, 5), full(-0.5))


def test_options_of_keys_of_the_wrong_kind(kv, optimizer):
    kv.set_optimizer(optimizer)
    optimizer.set_lr_mult({"a": 2.0})
    kv.init(3, full(0))
    with pytest.raises(TypeError, match=r"push: .*int keys.*\(key 'a'\)"):
        kv.push(3, full(1))
    assert_same(stored(kv, 3), full(0))


@pytest.mark.parametrize(
    ("key", "error"),
    [
        (2**63, ValueError),
        (-(2**63) - 1, ValueError),
        (True, TypeError),
        (1.5, TypeError),
        (None, TypeError),
        ("\ud800", ValueError),
    ],
)
def test_invalid_keys(kv, optimizer, key, error):
    for set_before in (False, True):
        if set_before:
            kv.set_optimizer(optimizer)
        with pytest.raises(error, match="set_lr_mult: "):
            optimizer.set_lr_mult({key: 0.5})
    kv.init(3, full(0))
    kv.push(3, full(1))
    assert_same(stored(kv, 3), full(-1))


def test_a_numpy_integer_is_an_int_key(kv, optimizer):
    kv.set_optimizer(optimizer)
    kv.init(3, full(0))
    optimizer.set_lr_mult({np.uint64(3): 2.0})
    kv.push(3, full(1))
    assert_same(stored(kv, 3), full(-2))


def test_a_rejected_trainer_changes_nothing():
    model = nn.Linear(2, 2)
    store = torchkv.create("device")
    optimizer = optim.SGD(0.5)
    optimizer.set_lr_mult({"wieght": 2.0})
    before = torchkv.create("device")
    with pytest.raises(KeyError, match="Trainer: .*did you mean 'weight'"):
        torchkv.Trainer(model, optimizer, kvstore=store)
    assert len(store) == 0
    assert store.optimizer is None
    before.set_optimizer(optimizer)  # it is on no store
