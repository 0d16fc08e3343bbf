"""Valid and invalid numbers of an optimizer."""

from fractions import Fraction

import numpy as np
import pytest
import torch

import torchkv
from helpers import assert_same, full, stored
from torchkv import optim

HUGE = 10**400  # Python's float() overflows

SETS = {
    "MXNet's name": lambda kv, x: kv.set_optimizer("sgd", learning_rate=x),
    "a class": lambda kv, x: optim.SGD(lr=x),
    "another option": lambda kv, x: optim.Adagrad(lr_decay=x),
    "betas": lambda kv, x: optim.Adam(betas=(x, 0.9)),
    "lr": lambda kv, x: setattr(kv.optimizer, "lr", x),
    "a group": lambda kv, x: kv.optimizer.param_groups[0].update(momentum=x),
    "set_param_groups": lambda kv, x: kv.set_param_groups([{"keys": [3], "lr": x}]),
    "set_lr_mult": lambda kv, x: kv.set_lr_mult({3: x}),
    "rescale_grad": lambda kv, x: setattr(kv.optimizer, "rescale_grad", x),
    "clip_value": lambda kv, x: optim.SGD(clip_value=x),
    "max_norm": lambda kv, x: optim.SGD(max_norm=x),
    "accumulate": lambda kv, x: optim.SGD(accumulate=x),
}


@pytest.fixture
def trained(kv):
    kv.init(3, full(1))
    kv.set_optimizer(optim.SGD(0.5))
    yield kv
    kv.push(3, full(1))
    assert_same(stored(kv, 3), full(0.5), "nothing has changed")


@pytest.mark.parametrize("sets", SETS.values(), ids=SETS)
def test_a_number_that_overflows_is_a_value_error(trained, sets):
    with pytest.raises(ValueError):
        sets(trained, HUGE)


@pytest.mark.parametrize("sets", SETS.values(), ids=SETS)
@pytest.mark.parametrize("value", [True, np.bool_(True), "0.1", [0.1]])
def test_a_value_that_is_not_a_number_is_a_type_error(trained, sets, value):
    with pytest.raises(TypeError):
        sets(trained, value)


@pytest.mark.parametrize("value", [Fraction(1, 4), np.float32(0.25), np.float64(0.25)])
def test_other_numbers(kv, value):
    kv.init(3, full(1))
    kv.set_optimizer("sgd", learning_rate=value)
    kv.push(3, full(1))
    assert_same(stored(kv, 3), full(0.75))


def test_the_batch_size_of_a_trainer():
    model = torch.nn.Linear(2, 2)
    trainer = torchkv.Trainer(model, "sgd")
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.detach().clone()
    with pytest.raises(ValueError, match="batch_size"):
        trainer.step(HUGE)
    with pytest.raises(TypeError, match="batch_size, but got bool"):
        trainer.step(True)
    assert_same(model.weight, before)
