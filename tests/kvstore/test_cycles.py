"""Stores in reference cycles are freed by Python's garbage collector."""

import gc
import weakref

import pytest
import torch

import torchkv
from helpers import assert_same, full


class Trainer:
    """Holds a store whose updater holds the trainer: the usual cycle."""

    def __init__(self, store_type, as_method):
        self.lr = 2.0
        self.kv = torchkv.create(store_type)
        self.kv.init(3, full(1))
        self.kv.set_updater(
            self.update if as_method else lambda *args: self.update(*args)
        )

    def update(self, key, input, stored):
        stored -= self.lr * input


@pytest.mark.parametrize("as_method", [True, False], ids=["method", "closure"])
def test_a_cycle_through_the_updater_is_freed(store_type, as_method):
    trainer = Trainer(store_type, as_method)
    trainer.kv.push(3, full(1))
    died = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert died() is None


def test_a_store_in_use_survives_the_collector(store_type):
    trainer = Trainer(store_type, as_method=True)
    gc.collect()
    trainer.kv.push(3, full(1))
    assert_same(trainer.kv.pull(3), full(-1))


def test_a_store_held_by_torchscript_survives_its_trainer(store_type):
    trainer = Trainer(store_type, as_method=True)
    script_object = trainer.kv.script_object
    died = weakref.ref(trainer)
    del trainer
    gc.collect()
    script_object.push(3, full(1))
    assert_same(script_object.pull(3), full(-1))
    script_object.close()
    gc.collect()
    assert died() is None


def test_the_collector_runs_beside_pushes_and_inside_updaters(store_type):
    kv = torchkv.create(store_type)
    kv.init(3, torch.zeros(2))

    def update(key, input, stored):
        gc.collect()
        stored += input

    kv.set_updater(update)
    for _ in range(3):
        kv.push(3, torch.ones(2))
    assert_same(kv.pull(3), torch.full((2,), 3.0))
