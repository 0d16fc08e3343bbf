"""Outs of one pull that share memory: written in order, so the last one counts."""

import itertools

import pytest
import torch

from helpers import assert_same, full, stored
from kv_model import KVModel

KEYS = [3, 5, 7, 9]
# The large ones are worth several threads, and more than 1 MiB each.
SIZES = {"small": 7, "large": 300_000}
NUM_PULLS = 5


@pytest.fixture(params=["python", "torchscript"])
def binding(request, kv):
    """The store, or its TorchScript object: both have `pull(key, out)`."""
    return kv if request.param == "python" else kv.script_object


@pytest.fixture(params=SIZES.values(), ids=SIZES)
def size(request):
    """Elements of each value."""
    return request.param


def fill(kv, size):
    """A store's keys, and a model with the same values."""
    model = KVModel()
    values = [torch.full((size,), float(key)) + torch.arange(size) % 2 for key in KEYS]
    for store in (kv, model):
        store.init(KEYS, values)
    return model


# Outs of KEYS, made of one buffer with room for eight values of `n` elements.
OUTS = {
    "one tensor": lambda b, n: [b[:n]] * 4,
    "one tensor, replicas": lambda b, n: [[b[:n]] * 3] * 4,
    "parts of a flat buffer": lambda b, n: list(b[: 4 * n].split(n)),
    "parts, last first": lambda b, n: list(b[: 4 * n].split(n))[::-1],
    "parts, any order": lambda b, n: [b[i * n :][:n] for i in (2, 0, 3, 1)],
    "parts with gaps": lambda b, n: [b[i * (n + 3) + 1 :][:n] for i in range(4)],
    "one element in common": lambda b, n: [b[i * (n - 1) :][:n] for i in range(4)],
    "one in common, last first": lambda b, n: [
        b[i * (n - 1) :][:n] for i in (3, 2, 1, 0)
    ],
    "halves in common": lambda b, n: [b[i * (n // 2) :][:n] for i in (1, 3, 0, 2)],
    "shifted by one": lambda b, n: [b[i:][:n] for i in range(4)],
    "shifted by one, back": lambda b, n: [b[4 - i :][:n] for i in range(4)],
    "first and last are one": lambda b, n: [b[:n], b[n:][:n], b[2 * n :][:n], b[:n]],
    "a far one first": lambda b, n: [b[6 * n :][:n], b[:n], b[n - 1 :][:n], b[:n]],
    "interleaved": lambda b, n: [b[i : 4 * n : 4] for i in range(4)],
    "interleaved and one dense": lambda b, n: [
        b[: 2 * n : 2], b[1 : 2 * n : 2], b[:n], b[3:][:n]
    ],
    "replicas across keys": lambda b, n: [
        [b[i * n :][:n], b[(i + 1) * n - 2 :][:n]] for i in range(4)
    ],
    "twice under one key": lambda b, n: [
        [b[:n], b[:n]], [b[n:][:n]] * 2, [b[2:][:n], b[2:][:n]], [b[5 * n :][:n]]
    ],
    "transposed": lambda b, n: [
        b[: 2 * n].view(n, 2).t()[0], b[: 2 * n].view(2, n)[1],
        b[: 2 * n].view(n, 2).t()[1], b[: 2 * n].view(2, n)[0],
    ],
}  # fmt: skip


@pytest.mark.parametrize("outs", OUTS.values(), ids=OUTS)
def test_outs_are_written_as_if_one_by_one(kv, binding, size, outs):
    model = fill(kv, size)
    expected = torch.full((8 * size,), -1.0)
    model.pull(KEYS, outs(expected, size))
    for _ in range(NUM_PULLS):
        buffer = torch.full((8 * size,), -1.0)
        binding.pull(KEYS, outs(buffer, size))
        assert_same(buffer, expected)


def test_the_last_key_counts_in_every_order(kv, binding, size):
    model = fill(kv, size)
    out = torch.zeros(size)
    for keys in itertools.permutations(KEYS):
        binding.pull(list(keys), [out] * 4)
        assert_same(out, model.stored[keys[-1]])


def test_repeated_keys_and_one_out(kv, binding, size):
    """A repeated key counts at its first position, with all its outs."""
    model = fill(kv, size)
    out, other = torch.zeros(size), torch.zeros(size)
    binding.pull([3, 5, 3], [out, out, other])
    assert_same(out, model.stored[5])
    assert_same(other, model.stored[3])
    binding.pull([3, 5, 3, 5, 3], [out] * 5)
    assert_same(out, model.stored[5])
    binding.pull([7, 7, 7], [out, out, other])
    assert_same(out, model.stored[7])
    assert_same(other, model.stored[7])


def test_outs_of_different_sizes(kv, binding):
    """A large out with small ones inside of it, before and after."""
    sizes = {3: 400_000, 5: 10, 7: 1000, 9: 0}
    model = KVModel()
    for store in (kv, model):
        store.init(
            list(sizes), [torch.full((n,), float(key)) for key, n in sizes.items()]
        )
    for keys in itertools.permutations(sizes):
        buffer, expected = torch.zeros(400_000), torch.zeros(400_000)
        places = {3: 0, 5: 399_990, 7: 123_456, 9: 5}
        for store, memory in ((binding, buffer), (model, expected)):
            outs = [memory[places[key] :][: sizes[key]] for key in keys]
            store.pull(list(keys), outs)
        assert_same(buffer, expected, str(keys))


def test_more_keys_than_one_pass_processes(kv, binding):
    keys = list(range(5000))
    kv.init(keys, list(torch.arange(5000.0)))
    out = torch.tensor(-1.0)
    binding.pull(keys, [out] * 5000)
    assert_same(out, torch.tensor(4999.0))
    binding.pull(keys[::-1], [out] * 5000)
    assert_same(out, torch.tensor(0.0))
    flat = torch.zeros(5001)
    binding.pull(keys, [flat[i] for i in keys[::-1]])
    assert_same(flat[:5000], torch.arange(5000.0).flip(0))


@pytest.mark.parametrize("shared", [1, 2, 63])
def test_a_chain_of_many_outs(kv, binding, shared):
    """Each begins before the previous one ends, also at the border of two threads."""
    count, size = 3000, 64
    keys = list(range(count))
    kv.init(keys, [torch.full((size,), float(key)) for key in keys])
    for step in (size - shared, shared - size):
        expected = torch.zeros((count - 1) * abs(step) + size)
        places = [(key if step > 0 else count - 1 - key) * abs(step) for key in keys]
        for key, place in zip(keys, places, strict=True):
            expected[place : place + size] = key
        for _ in range(NUM_PULLS):
            flat = torch.zeros_like(expected)
            binding.pull(keys, [flat[place : place + size] for place in places])
            assert_same(flat, expected)


def test_pushpull_and_broadcast(kv, binding, size):
    fill(kv, size)
    out, value = torch.zeros(size), torch.full((size,), 6.0)
    kv.set_optimizer("sgd", learning_rate=0.5)
    binding.pushpull(KEYS, [value] * 4, [out] * 4)
    assert_same(out, stored(kv, 9))
    # Without outs, over the values, which were all read before.
    binding.pushpull(KEYS, [value] * 4, None)
    assert_same(value, stored(kv, 9))
    assert_same(stored(kv, 3), torch.arange(size) % 2 + 3.0 - 3.0 - 3.0)
    values = [torch.full((size,), float(key)) for key in (20, 21, 22)]
    binding.broadcast([20, 21, 22], values, [out] * 3)
    assert_same(out, values[2])


def test_the_pushed_buffer_as_out(kv, binding):
    """Views of one buffer, pushed and pulled in place, two to a key."""
    kv.init(KEYS, [full(0)] * 4)
    buffer = torch.arange(48.0)
    views = [[buffer[i:][:6].view(2, 3), buffer[i + 3 :][:6].view(2, 3)] for i in KEYS]
    sums = [a + b for a, b in views]
    binding.pushpull(KEYS, views, views)
    expected = torch.arange(48.0)
    for i, total in zip(KEYS, sums, strict=True):
        expected[i:][:6] = total.flatten()
        expected[i + 3 :][:6] = total.flatten()
    assert_same(buffer, expected)
