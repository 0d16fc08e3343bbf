"""Negative and conjugate views, as values and as outs, of any dtype.

PyTorch's own ``copy_`` between float32 and float16 drops the sign of such a view.
"""

import itertools

import pytest
import torch

import torchkv
from helpers import assert_same, stored

REALS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
NUMBERS = torch.tensor([1.0, -2.0, 3.0])


def negative(dtype):
    return torch._neg_view(NUMBERS.to(dtype))


@pytest.mark.parametrize(("kept", "given"), [*itertools.product(REALS, REALS)], ids=str)
def test_negative_views(kv, kept, given):
    kv.init(3, torch.zeros(3, dtype=kept))
    kv.push(3, negative(given))
    assert_same(stored(kv, 3), -NUMBERS.to(kept), "one value")
    kv.push(3, [negative(given), NUMBERS.to(given), negative(given)])
    assert_same(stored(kv, 3), -NUMBERS.to(kept), "several")

    base = torch.zeros(3, dtype=given)
    kv.pull(3, out=torch._neg_view(base))
    assert_same(base, NUMBERS.to(given), "an out")
    kv.init(4, negative(given))
    assert_same(stored(kv, 4), -NUMBERS.to(given), "the first value")


@pytest.mark.parametrize("given", REALS, ids=str)
def test_a_negative_gradient(kv, given):
    kv.init([3, 4], [torch.zeros(3)] * 2)
    kv.set_optimizer("sgd", learning_rate=1)
    kv.push([3, 4], [[negative(given)], [negative(given), negative(given)]])
    assert_same(stored(kv, 3), NUMBERS)
    assert_same(stored(kv, 4), 2 * NUMBERS)


def test_negative_states(kv):
    kv.init(3, torch.zeros(3))
    kv.set_optimizer(torchkv.optim.SGD(lr=1, momentum=0.5))
    kv.push(3, NUMBERS)
    state = kv.optimizer.state_dict()
    state["state"][3]["momentum_buffer"] = negative(torch.float16)
    kv.optimizer.load_state_dict(state)
    loaded = kv.optimizer.state_dict()["state"][3]["momentum_buffer"]
    assert_same(loaded, -NUMBERS)


@pytest.mark.parametrize(
    ("kept", "given"),
    [*itertools.product([torch.complex64, torch.complex128], repeat=2)],
    ids=str,
)
def test_conjugates(kv, kept, given):
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    expected = torch.tensor([1 - 2j, 3 + 4j]).to(kept)
    kv.init(3, torch.zeros(2, dtype=kept))
    kv.push(3, numbers.to(given).conj())
    assert_same(stored(kv, 3), expected)
    kv.push(3, [numbers.to(given).conj(), numbers.to(given).conj()])
    assert_same(stored(kv, 3), 2 * expected)
    kv.push(3, torch._neg_view(numbers.to(given).conj()))
    assert_same(stored(kv, 3), -expected)
    base = torch.zeros(2, dtype=given)
    kv.pull(3, out=base.conj())
    assert_same(base, -numbers.to(given))


def test_the_imaginary_part_of_a_conjugate(kv):
    part = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert part.is_neg()
    kv.init(3, torch.zeros(2, dtype=torch.float16))
    kv.push(3, part)
    assert_same(stored(kv, 3), torch.tensor([-2.0, 4.0], dtype=torch.float16))
