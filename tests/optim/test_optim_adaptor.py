"""Classes of torch.optim on a store: what they must and need not do."""

import contextlib

import pytest
import torch

import torchkv
from helpers import assert_same, full, stored


@contextlib.contextmanager
def default_device():
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


class ReplacesData(torch.optim.SGD):
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad


class ReplacesParameter(torch.optim.SGD):
    def step(self):
        group = self.param_groups[0]
        group["params"][0] = torch.nn.Parameter(group["params"][0] - 1)


class Transposes(torch.optim.SGD):
    def step(self):
        p = self.param_groups[0]["params"][0]
        p.data = p.data.t()


@pytest.mark.parametrize("cls", [ReplacesData, ReplacesParameter, Transposes])
def test_a_step_that_replaces_the_weight_is_an_error(kv, cls):
    value = torch.arange(4.0).view(2, 2)
    kv.init([3, 5], [value, value])
    kv.set_optimizer(cls, lr=0.5)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=rf"{cls.__name__}.step\(\) to write .*\(key 3\)"
        ):
            kv.push([3, 5], [torch.ones(2, 2)] * 2)
    assert_same(stored(kv, 3), value)
    assert_same(stored(kv, 5), value)


def test_sparse_adam_is_refused_where_it_is_set(kv):
    kv.init(3, full(1))
    with pytest.raises(ValueError, match="set_optimizer: .*SparseAdam.*sparse"):
        kv.set_optimizer(torch.optim.SparseAdam, lr=0.5)
    assert kv.optimizer is None


@pytest.mark.parametrize("cls", [torch.optim.NAdam, torch.optim.Adam])
@pytest.mark.parametrize("scope", [lambda: torch.device("meta"), default_device])
def test_the_default_device_does_not_matter(kv, cls, scope):
    expected = torchkv.create(kv.type)
    for store in (kv, expected):
        store.init(3, full(1))
        store.set_optimizer(cls, lr=0.5)
        store.push(3, full(2))
    value, gradient = full(1), full(2)
    with scope():
        kv.init(4, value)
        kv.push([3, 4], [gradient] * 2)
        state = kv.optimizer.state_dict()
        assert all(
            x.device.type == "cpu"
            for x in state["state"][4].values()
            if isinstance(x, torch.Tensor)
        )
        kv.optimizer.load_state_dict(state)
        kv.push([3, 4], [gradient] * 2)
    expected.init(4, value)
    for _ in range(2):
        expected.push([3, 4], [gradient] * 2)
    for key in (3, 4):
        assert_same(stored(kv, key), stored(expected, key))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"lr": True}, TypeError),
        ({"lr": float("nan")}, ValueError),
        ({"lr": float("inf")}, ValueError),
        ({"lr": 10**400}, ValueError),
        ({"lr": 0.5, "weight_decay": float("nan")}, ValueError),
    ],
)
def test_numbers_that_a_class_would_step_to_nan_with(kv, options, error):
    kv.init(3, full(1))
    with pytest.raises(error, match="set_optimizer: expected"):
        kv.set_optimizer(torch.optim.SGD, **options)
    assert kv.optimizer is None
    kv.set_optimizer(torch.optim.SGD, lr=0.5)
    for name, value in options.items():
        if value != 0.5:
            with pytest.raises(error, match="SGD: expected"):
                kv.optimizer.param_groups[0][name] = value
    kv.push(3, full(1))
    assert_same(stored(kv, 3), full(0.5))


class Negates(torch.optim.SGD):
    """Makes the weight a negative view of its memory."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.data = torch._neg_view(parameter.data)


def test_a_step_that_negates_the_view_is_an_error(kv):
    kv.init(3, full(1))
    kv.set_optimizer(Negates, lr=0.5)
    with pytest.raises(RuntimeError, match=r"\(key 3\)"):
        kv.push(3, full(1))
    assert_same(stored(kv, 3), full(1))
