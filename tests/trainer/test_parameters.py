"""The parameters that a Trainer accepts, their forms and their keys."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchkv
from training import (
    assert_near,
    assert_same_weights,
    fill_gradients,
    make_batches,
    make_model,
    train_plainly,
    weights,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "form",
    [
        lambda m: m,
        lambda m: m.parameters(),
        lambda m: list(m.parameters()),
        lambda m: m.named_parameters(),
        lambda m: dict(m.named_parameters()),
        lambda m: [m],
        lambda m: nn.ModuleList([m]),
    ],
    ids=["module", "parameters", "list", "named", "dict", "modules", "ModuleList"],
)
def test_forms_of_params(form):
    model = make_model()
    trainer = torchkv.Trainer(form(model), "sgd", {"learning_rate": 0.1})
    for x, y in make_batches():
        F.cross_entropy(model(x), y).backward()
        trainer.step()
    assert_near(weights(model), train_plainly(torch.optim.SGD, {"lr": 0.1}))
    assert repr(trainer).startswith("Trainer(4 parameters, 1 replicas, mxnet.SGD(")


def test_a_trainer_of_a_closed_store_can_be_printed():
    trainer = torchkv.Trainer(make_model(), "sgd")
    trainer.kvstore.close()
    assert repr(trainer) == (
        "Trainer(4 parameters, 1 replicas, KVStore(type='device', closed))"
    )


def test_keys_are_names_or_positions():
    model = make_model()
    named = torchkv.Trainer(model.named_parameters(), "sgd")
    assert named.kvstore.keys() == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert torchkv.Trainer(model.parameters(), "sgd").kvstore.keys() == [0, 1, 2, 3]
    named.optimizer.set_lr_mult({"0.weight": 0.0})
    before = weights(model)
    fill_gradients(model)
    named.step()
    for name, value in weights(model).items():
        assert torch.equal(value, before[name]) == (name == "0.weight")


def test_tied_parameters_have_one_key():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    copies = torchkv.replicate(model, ["cpu"] * 2)
    plain = copy.deepcopy(model)
    trainer = torchkv.Trainer(copies, "sgd", {"learning_rate": 0.1})
    assert trainer.kvstore.keys() == ["0.weight", "0.bias", "1.bias"]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    x = torch.randn(6, 4)
    copies.backward(lambda m, x: m(x).pow(2).sum(), x)
    trainer.step()
    plain(x).pow(2).sum().backward()
    optimizer.step()
    assert copies[1][0].weight is copies[1][1].weight
    assert_near(weights(copies[1]), weights(plain), 1e-5)
    alone = nn.Parameter(torch.ones(2))
    assert len(torchkv.Trainer([alone, alone], "sgd").kvstore) == 1


def test_a_module_list_is_a_module():
    """Its layers of the same shape are not replicas of each other."""
    torch.manual_seed(3)
    layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    before = weights(layers)
    trainer = torchkv.Trainer(layers, "sgd", {"learning_rate": 0.5})
    assert trainer.kvstore.keys() == list(before)
    assert_same_weights(weights(layers), before)
    fill_gradients(layers)
    layers[1].weight.grad.mul_(2)
    trainer.step()
    expected = {
        name: weight - (1.0 if name == "1.weight" else 0.5)
        for name, weight in before.items()
    }
    assert_same_weights(weights(layers), expected)


def test_replicas_of_a_module_list_are_trained():
    copies = torchkv.replicate(nn.ModuleList([nn.Linear(2, 2)] * 2), ["cpu"] * 2)
    trainer = torchkv.Trainer(copies, "sgd", {"learning_rate": 0.5})
    assert trainer.kvstore.keys() == ["0.weight", "0.bias"]


@pytest.mark.parametrize(
    "form",
    [lambda m: m.children(), lambda m: m.modules(), lambda m: {m[0]}, iter],
    ids=["children", "modules", "set", "iterator"],
)
def test_other_iterables_of_modules_are_not_replicas(form):
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(TypeError, match="Trainer: .*replicas .*but got modules in a"):
        torchkv.Trainer(form(layers), "sgd")


@pytest.mark.parametrize(
    "form",
    [
        lambda copies: copies.parameters(),
        lambda copies: copies.module,
        lambda copies: copies[1],
        lambda copies: [copies[0], copies[2]],
        lambda copies: [copies[0].weight],
        lambda copies: [p for module in copies for p in module.parameters()],
    ],
    ids=["parameters", "module", "a replica", "two of three", "a parameter", "a list"],
)
def test_some_replicas_without_the_others_are_rejected(form):
    copies = torchkv.replicate(nn.Linear(2, 2), ["cpu"] * 3)
    with pytest.raises(ValueError, match="expected all 3 replicas of a parameter"):
        torchkv.Trainer(form(copies), "sgd")
    torchkv.Trainer(copies, "sgd")
    torchkv.Trainer(tuple(copies), "sgd")


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copies_of_replicas_are_replicas(duplicate):
    copies = duplicate(torchkv.replicate(nn.Linear(2, 2), ["cpu"] * 3))
    with pytest.raises(ValueError, match="expected all 3 replicas of a parameter"):
        torchkv.Trainer(copies.module, "sgd")
    torchkv.Trainer(copies, "sgd")


def test_replicas_of_some_replicas_are_trained():
    copies = torchkv.replicate(nn.Linear(2, 2), ["cpu"] * 3)
    some = torchkv.Replicas(copies[:2], ["cpu"] * 2)
    torchkv.Trainer(some, "sgd")
    with pytest.raises(ValueError, match="expected all"):
        torchkv.Trainer([copies[0], copies[2]], "sgd")


def test_a_module_whose_replicas_were_freed_is_one_module():
    model = nn.Linear(2, 2)
    torchkv.replicate(model, ["cpu"] * 2)
    assert len(torchkv.Trainer(model, "sgd").kvstore) == 2


def test_replicas_start_with_the_values_of_the_first():
    first, second = (
        make_model(),
        nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)),
    )
    second[0].requires_grad_(False)
    torchkv.Trainer([first, second], "sgd")
    assert_same_weights(weights(second), weights(first))


MODEL = make_model()
OTHER = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
WEIGHT = nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(
    ("params", "kind", "message"),
    [
        ([], ValueError, "at least one parameter, but got none"),
        ([nn.Tanh()], ValueError, "at least one parameter, but got none"),
        (3, TypeError, r"expected a module, parameters\(\).*but got int"),
        (WEIGHT, TypeError, "expected a module.*but got Parameter"),
        ([WEIGHT, 3], TypeError, "one with an item of type"),
        ([WEIGHT * 2], ValueError, r"result of an operation \(key 0\)"),
        ([("w", WEIGHT), ("w", WEIGHT.detach())], ValueError, "repeated name"),
        (nn.LazyLinear(3), ValueError, r"lazy module; run .*\(key 'weight'\)"),
        ([MODEL, MODEL], ValueError, r"two that share one \(key '0.weight'"),
        ([MODEL, OTHER], ValueError, r"\[9, 5\] and .*\[8, 5\].*replica 1"),
        ([MODEL, OTHER[:2]], ValueError, "replicas of the same"),
    ],
)
def test_errors(params, kind, message):
    with pytest.raises(kind, match=message):
        torchkv.Trainer(params, "sgd")
