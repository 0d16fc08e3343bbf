"""Schedulers of torch.optim.lr_scheduler on an optimizer of a store."""

import copy
import pickle

import pytest
import torch

from helpers import full, stored
from torchkv import optim

S = torch.optim.lr_scheduler
SCHEDULERS = {
    "LambdaLR": lambda o: S.LambdaLR(o, lambda n: 0.9**n),
    "MultiplicativeLR": lambda o: S.MultiplicativeLR(o, lambda n: 0.95),
    "StepLR": lambda o: S.StepLR(o, 3),
    "MultiStepLR": lambda o: S.MultiStepLR(o, [2, 5, 9]),
    "ConstantLR": lambda o: S.ConstantLR(o),
    "LinearLR": lambda o: S.LinearLR(o),
    "ExponentialLR": lambda o: S.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: S.SequentialLR(
        o, [S.ConstantLR(o), S.ExponentialLR(o, 0.8)], [4]
    ),
    "CosineAnnealingLR": lambda o: S.CosineAnnealingLR(o, 7),
    "ChainedScheduler": lambda o: S.ChainedScheduler(
        [S.ConstantLR(o), S.ExponentialLR(o, 0.8)]
    ),
    "ReduceLROnPlateau": lambda o: S.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: S.CyclicLR(o, 0.001, 0.1, 4),
    "CosineAnnealingWarmRestarts": lambda o: S.CosineAnnealingWarmRestarts(o, 4),
    "OneCycleLR": lambda o: S.OneCycleLR(o, 0.1, total_steps=31),
    "PolynomialLR": lambda o: S.PolynomialLR(o, 12, 2.0),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.001),
}


def test_all_schedulers_are_tested():
    assert {*S.__all__} - {"LRScheduler"} <= {*SCHEDULERS}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("cls", [optim.SGD, optim.Adam, torch.optim.NAdam])
def test_schedulers_match_torch(kv, scheduler, cls):
    values = [torch.randn(5), torch.randn(3)]
    parameters = [torch.nn.Parameter(v.clone()) for v in values]
    options = {"momentum": 0.9} if cls is optim.SGD else {}
    theirs = getattr(torch.optim, cls.__name__)(
        [{"params": parameters[0]}, {"params": parameters[1], "lr": 0.02}],
        lr=0.05,
        foreach=False,
        **options,
    )
    kv.init([0, 1], values)
    kv.set_optimizer(cls, lr=0.05, **options)
    kv.set_param_groups([{"keys": [1], "lr": 0.02}])
    make = SCHEDULERS[scheduler]
    schedulers = make(kv.optimizer), make(theirs)
    for step in range(30):
        gradients = [torch.randn_like(v) for v in values]
        kv.push([0, 1], gradients)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        theirs.step()
        for each in schedulers:
            each.step(*([1.0] if scheduler == "ReduceLROnPlateau" else []))
        names = {"lr", "betas", "momentum"} & kv.optimizer.defaults.keys()
        for a, b in zip(kv.optimizer.param_groups, theirs.param_groups, strict=True):
            assert [a[n] for n in names] == [b[n] for n in names], step
    for key, parameter in enumerate(parameters):
        torch.testing.assert_close(
            stored(kv, key), parameter.detach(), rtol=2e-6, atol=1e-6
        )


def test_a_copied_store_has_the_items_of_its_scheduler(kv):
    kv.init(3, full(8))
    kv.set_optimizer("sgd", learning_rate=0.5)
    S.StepLR(kv.optimizer, 3)
    for other in (copy.deepcopy(kv), pickle.loads(pickle.dumps(kv))):
        assert other.optimizer is not kv.optimizer
        S.StepLR(other.optimizer, 3, last_epoch=2)  # wants its initial_lr
