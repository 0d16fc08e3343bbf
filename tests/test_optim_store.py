"""Which store an optimizer is on, and how long."""

import pytest
import torch

import torchkv
from helpers import ScriptHolder, assert_same, full, script, stored
from torchkv import optim


def test_an_optimizer_whose_store_is_gone_is_free(kv):
    optimizer = optim.SGD(0.5, momentum=0.5)
    store = torchkv.create()
    store.init(3, full(1))
    store.set_optimizer(optimizer)
    store.push(3, full(1))
    with pytest.raises(ValueError, match="on another one"):
        kv.set_optimizer(optimizer)
    del store
    kv.init(3, full(1))
    kv.set_optimizer(optimizer)
    kv.push(3, full(1))
    assert_same(stored(kv, 3), full(0.5), "without the state that it had")


def test_an_optimizer_whose_trainer_is_gone_is_free():
    optimizer = optim.SGD(0.5)
    for _ in range(2):
        model = torch.nn.Linear(2, 2)
        trainer = torchkv.Trainer(model, optimizer)
        with pytest.raises(ValueError, match="on another one"):
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
    with pytest.raises(ValueError, match="on another one"):
        again.set_optimizer(optimizer)
