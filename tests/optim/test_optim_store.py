"""The store that an optimizer is set on, and the lifetimes of both."""

import pytest
import torch

import torchkv
from helpers import ScriptHolder, assert_same, full, script, stored
from torchkv import optim


def test_an_optimizer_can_be_set_again_after_its_store_is_freed(kv):
    optimizer = optim.SGD(0.5, momentum=0.5)
    store = torchkv.create()
    store.init(3, full(1))
    store.set_optimizer(optimizer)
    store.push(3, full(1))
    with pytest.raises(ValueError, match="on another store"):
        kv.set_optimizer(optimizer)
    del store
    kv.init(3, full(1))
    kv.set_optimizer(optimizer)
    kv.push(3, full(1))
    assert_same(stored(kv, 3), full(0.5), "without the state that it had")


def test_an_optimizer_can_be_set_again_after_its_trainer_is_freed():
    optimizer = optim.SGD(0.5)
    for _ in range(2):
        model = torch.nn.Linear(2, 2)
        trainer = torchkv.Trainer(model, optimizer)
        with pytest.raises(ValueError, match="on another store"):
            torchkv.Trainer(torch.nn.Linear(2, 2), optimizer)
        del trainer


def test_an_optimizer_stays_on_a_store_that_torchscript_holds(kv):
    kv.init(3, full(1))
    kv.set_optimizer(optimizer := optim.SGD(0.5))
    holder = script(ScriptHolder(kv))
    again = torchkv.create(kv.type)
    if kv.type == "local":
        store = torchkv.create()
        store.init(3, full(1))
        store.set_optimizer(optimizer := optim.SGD(0.5))
        holder = script(ScriptHolder(store))
        del store
    optimizer.lr = 0.25
    holder.kv.push(3, full(1))
    assert_same(holder.kv.pull(3), full(0.75))
    with pytest.raises(ValueError, match="on another store"):
        again.set_optimizer(optimizer)


@pytest.mark.parametrize(
    "make",
    [
        lambda: optim.SGD(0.5, momentum=0.5, skip_nonfinite=True),
        lambda: optim.TorchOptimizer(torch.optim.SGD, lr=0.5),
    ],
    ids=["built-in", "torch.optim"],
)
def test_the_state_is_freed_with_the_store(make):
    optimizer = make()
    assert optimizer.state_dict()["state"] == {}, "no store, no state"
    store = torchkv.create()
    store.init(3, full(1))
    store.set_optimizer(optimizer)
    store.push(3, full(1))
    assert list(optimizer.state_dict()["state"]) == [3]
    del store
    for call in (
        optimizer.state_dict,
        lambda: optimizer.grad_norm,
        lambda: optimizer.num_skipped,
    ):
        with pytest.raises(RuntimeError, match="state was freed"):
            call()


def test_adam_with_decoupled_weight_decay_is_adamw(kv):
    """TorchScript sets both names, and keeps the state."""
    kv.init(3, full(1))
    kv.set_optimizer(optim.AdamW(0.5))
    kv.push(3, full(1))
    before = kv.optimizer.state_dict()["state"][3]
    numbers = {"lr": 0.25, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    kv.script_object.set_optimizer("adam", {**numbers, "decoupled": 1.0})
    after = kv.optimizer.state_dict()["state"][3]
    assert after["step"] == before["step"] == 1
    assert_same(after["exp_avg"], before["exp_avg"])
    kv.script_object.set_optimizer("adam", numbers)
    assert kv.optimizer.state_dict()["state"][3]["step"] == 0, "another optimizer"
