"""Trainer.state_dict and load_state_dict."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

import torchkv
from training import (
    assert_same_weights,
    fill_gradients,
    make_batches,
    make_model,
    summed_loss,
    weights,
)

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIMIZERS = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.9},
    "adamw": {"learning_rate": 0.1},
    "lamb": {"learning_rate": 0.1},
    "NAdam": {"lr": 0.1},  # a class of torch.optim
}
some_optimizers = pytest.mark.parametrize("name", ["adamw", "NAdam"])


def make_trainer(model, name="adamw", **options):
    optimizer = getattr(torch.optim, name, name)
    return torchkv.Trainer(model, optimizer, OPTIMIZERS[name], **options)


def train(model, trainer, batches):
    for x, y in batches:
        summed_loss(model, x, y).backward()
        trainer.step(len(x))


def zeroed(model):
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    return other


@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_continues_bit_for_bit(tmp_path, name, on_store):
    model = make_model()
    trainer = make_trainer(model, name, update_on_kvstore=on_store)
    batches = make_batches()
    train(model, trainer, batches[:5])
    trainer.optimizer.lr = 0.03
    torch.save(trainer.state_dict(), tmp_path / "state.pt")
    at_that_time = weights(model)
    train(model, trainer, batches[5:])

    other = zeroed(model)
    loaded = make_trainer(other, name, update_on_kvstore=on_store)
    train(other, loaded, batches[:1])
    optimizer = loaded.optimizer
    loaded.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert_same_weights(weights(other), at_that_time)
    assert loaded.optimizer is optimizer and loaded.learning_rate == 0.03
    train(other, loaded, batches[5:])
    assert_same_weights(weights(other), weights(model))


@some_optimizers
def test_all_replicas_follow(name):
    replicas = torchkv.replicate(make_model(), ["cpu", "cpu"])
    trainer = make_trainer(replicas, name)
    state = trainer.state_dict()
    for module in replicas:
        fill_gradients(module)
    trainer.step()
    trainer.load_state_dict(state)
    for module in replicas:
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter, state["keys"][name]["value"])


def test_weights_written_between_steps_are_in_the_state():
    model = make_model()
    trainer = make_trainer(model)
    with torch.no_grad():
        model[0].weight.fill_(3)
    assert trainer.state_dict()["keys"]["0.weight"]["value"].eq(3).all()


@some_optimizers
@pytest.mark.parametrize("compiled", [(True, False), (False, True), (True, True)])
def test_names_are_those_without_torch_compile(compiled, name):
    models = [make_model(), zeroed(make_model())]
    trainers = []
    for model, is_compiled in zip(models, compiled, strict=True):
        seen = torch.compile(model) if is_compiled else model
        trainers.append(make_trainer(seen, name))
    trainers[0].optimizer.set_lr_mult({next(iter(trainers[0].kvstore.keys())): 0.5})
    fill_gradients(models[0])
    trainers[0].step()
    state = trainers[0].state_dict()
    assert list(state["keys"]) == [*weights(models[0])]
    if name == "NAdam":
        assert list(state["torch_optimizer"]["state"]) == [*weights(models[0])]
    trainers[1].load_state_dict(state)
    for model in models:
        fill_gradients(model)
    for trainer in trainers:
        trainer.step()
    assert_same_weights(weights(models[1]), weights(models[0]))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@some_optimizers
def test_torch_distributed_checkpoint(name, tmp_path):
    model = make_model()
    trainer = make_trainer(model, name)
    batches = make_batches()
    train(model, trainer, batches[:5])
    assert isinstance(trainer, Stateful)
    dcp.save({"trainer": trainer}, checkpoint_id=tmp_path)
    other = zeroed(model)
    loaded = make_trainer(other, name)
    dcp.load({"trainer": loaded}, checkpoint_id=tmp_path)
    assert_same_weights(weights(other), weights(model))
    for each, its in (model, trainer), (other, loaded):
        train(each, its, batches[5:])
    assert_same_weights(weights(other), weights(model))


@some_optimizers
@pytest.mark.parametrize("names", ["int", "two models"])
def test_names_that_are_not_renamed(name, names):
    """Positions, and those of which two would become one."""

    def make():
        model = make_model()
        parameters = list(model.parameters())
        if names == "two models":
            keys = "weight", "bias", "_orig_mod.weight", "_orig_mod.bias"
            parameters = dict(zip(keys, parameters, strict=True))
        return model, make_trainer(parameters, name)

    (model, trainer), (other, loaded) = make(), make()
    keys = trainer.optimizer.param_groups[0]["params"]
    trainer.optimizer.set_param_groups([{"keys": [keys[1], keys[3]], "lr": 0.5}])
    trainer.optimizer.set_lr_mult({keys[0]: 0.5, keys[2]: 0.25})
    batches = make_batches()
    train(model, trainer, batches[:3])
    loaded.load_state_dict(trainer.state_dict())
    for each, its in (model, trainer), (other, loaded):
        train(each, its, batches[3:])
    assert_same_weights(weights(other), weights(model))


def test_what_does_not_fit_changes_nothing():
    model = make_model()
    trainer = make_trainer(model)
    fill_gradients(model)
    trainer.step()
    before = weights(model)
    wider = nn.Sequential(nn.Linear(9, 6), nn.ReLU(), nn.Linear(6, 3))
    states = [
        (
            make_trainer(wider).state_dict(),
            r"shape \[8, 5\], but got torch.float32 and \[6, 9\]",
        ),
        (
            make_trainer(make_model(), "sgd").state_dict(),
            "the optimizer 'adamw', as the store has, but got one of .* 'mxnet_sgd'",
        ),
        (make_trainer(nn.Linear(2, 2)).state_dict(), "but got a state with 4 missing"),
        ({}, "returned, but got a dict without 'format'"),
        (
            {**trainer.state_dict(), "keys": 3},
            "expected 'keys' in the state as dict, but got 3",
        ),
    ]
    for state, message in states:
        with pytest.raises(ValueError, match=message):
            trainer.load_state_dict(state)
        assert_same_weights(weights(model), before)


def test_one_class_of_torch_optim_does_not_load_anothers_state():
    state = make_trainer(make_model(), "NAdam").state_dict()
    for optimizer, name in (
        (torch.optim.Adagrad, "class Adagrad of torch.optim"),
        ("adamw", "optimizer 'adamw'"),
    ):
        trainer = torchkv.Trainer(make_model(), optimizer)
        with pytest.raises(ValueError, match=f"{name}, .* the class NAdam of torch"):
            trainer.load_state_dict(state)
