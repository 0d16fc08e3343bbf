"""Training of a small model, shared by the tests of the Trainer."""

import torch
import torch.nn.functional as F
from torch import nn

from helpers import assert_same

BATCH = 12


def make_model():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def make_batches(count=10):
    torch.manual_seed(8)
    return [
        (torch.randn(BATCH, 5), torch.randint(0, 3, (BATCH,))) for _ in range(count)
    ]


def summed_loss(model, x, y):
    return F.cross_entropy(model(x), y, reduction="sum")


def weights(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def train_plainly(optimizer, options, batches=None, model=None):
    model = model or make_model()
    plain = optimizer(model.parameters(), **options)
    for x, y in batches or make_batches():
        plain.zero_grad()
        F.cross_entropy(model(x), y).backward()
        plain.step()
    return weights(model)


def assert_near(actual, expected, atol=1e-6):
    assert list(actual) == list(expected)
    for name in expected:
        difference = (actual[name] - expected[name]).abs().max().item()
        assert difference <= atol, name


def assert_same_weights(actual, expected):
    assert list(actual) == list(expected)
    for name in expected:
        assert_same(actual[name], expected[name], name)


def fill_gradients(module, value=1.0):
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, value)
