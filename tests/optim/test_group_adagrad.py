"""MXNet's GroupAdaGrad on whole values and on rows: one history for each row."""

import pytest
import torch

from dtypes import FLOATS
from helpers import assert_same, stored
from kv_model import OPMATH
from row_values import numbers, some_rows
from torchkv import optim

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

EPS = 1e-5
# Rows of 4,096 numbers are read in several blocks.
SHAPES = [(), (5,), (7, 3), (3, 4096), (300, 2, 5), (2, 2049)]


@pytest.fixture
def kv(each_kv):
    return each_kv


def step(weight, history, gradient, lr, clip=None):
    """In the arithmetic of the value; complex numbers are pairs of numbers."""
    if weight.is_complex():
        parts = [torch.view_as_real(x) for x in (weight, history, gradient)]
        step(*parts, lr, clip)
        return
    if clip is not None:
        gradient = gradient.clamp(-clip, clip)
    rest = tuple(range(1, gradient.dim()))
    square = gradient.double().square()
    history += square.mean(rest, keepdim=True).to(weight.dtype) if rest else square
    weight -= lr * (gradient / (history + EPS).sqrt())


def history_of(kv, key=3):
    return kv.optimizer.state_dict()["state"][key]["history"]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_formula(kv, shape, dtype):
    arithmetic = OPMATH.get(dtype, dtype)
    value = torch.randn(shape, dtype=dtype)
    kv.init(3, value)
    kv.set_optimizer(optim.mxnet.GroupAdaGrad(learning_rate=0.1, clip_gradient=2))
    weight = value.to(arithmetic)
    history = torch.zeros(shape, dtype=arithmetic)
    for _ in range(3):
        pushed = [torch.randn(shape, dtype=dtype) for _ in range(2)]
        kv.push(3, pushed)
        step(weight, history, pushed[0].to(arithmetic) + pushed[1], 0.1, clip=2)
        torch.testing.assert_close(history_of(kv), history, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(
            kv.pull(3),
            weight.to(dtype),
            rtol=1.6e-2 if dtype != arithmetic else 1e-5,
            atol=1e-5,
        )


@pytest.mark.parametrize("shape", [(7, 3), (3, 4096)], ids=str)
def test_values_of_other_strides_and_dtypes(kv, shape):
    """Same bits as one contiguous value that is their sum."""
    value = torch.randn(shape)
    kv.init([3, 5], [value, value])
    kv.set_optimizer(optim.mxnet.GroupAdaGrad())
    for _ in range(2):
        first = torch.randn(shape[::-1]).T
        second = torch.randn(shape, dtype=torch.float64)
        kv.push([3, 5], [[first, second], (first.double() + second).float()])
        assert_same(stored(kv, 3), stored(kv, 5))


@pytest.mark.parametrize("num_values", [1, 2])
def test_stored_values_that_are_not_contiguous(kv, num_values):
    value = torch.randn(3, 7).T
    kv.init([3, 5], [value, value.contiguous()])
    assert not kv.pull(3).is_contiguous()
    kv.set_optimizer(optim.mxnet.GroupAdaGrad(learning_rate=0.1))
    for _ in range(2):
        gradients = [torch.randn(7, 3) for _ in range(num_values)]
        kv.push([3, 5], [gradients, gradients])
        torch.testing.assert_close(kv.pull(3), kv.pull(5))


@pytest.mark.parametrize("options", [{}, {"lazy": False}, {"accumulate": 2}], ids=str)
def test_row_sparse_keys_are_as_dense_ones(kv, options):
    """Rows without gradients do not change, whether they are stepped or not."""
    shape = (9, 40)
    kv.init_rows(3, shape[1:], num_rows=shape[0])
    kv.init(5, torch.zeros(shape))
    kv.set_optimizer(optim.mxnet.GroupAdaGrad(learning_rate=0.1, **options))
    for step in range(4):
        values = [some_rows(shape, 4), some_rows(shape, 2)]
        if step == 2:
            values.insert(1, numbers(shape))  # makes all rows
        kv.push([3, 5], [values, values])
        assert_same(kv.pull(3).to_dense(), stored(kv, 5))


def test_a_norm_limits_rows(kv):
    """``max_norm`` is of the gradients, before ``clip_gradient``."""
    shape = (6, 50)
    value = torch.zeros(shape)
    kv.init(3, value.clone())
    kv.set_optimizer(optim.mxnet.GroupAdaGrad(learning_rate=0.1, max_norm=1))
    pushed = some_rows(shape, 3, coalesced=True)
    kv.push(3, pushed)
    gradient = pushed.to_dense()
    assert kv.optimizer.grad_norm == pytest.approx(float(gradient.norm()), rel=1e-5)
    step(value, torch.zeros(shape), gradient / (gradient.norm() + 1e-6), 0.1)
    torch.testing.assert_close(kv.pull(3), value)
