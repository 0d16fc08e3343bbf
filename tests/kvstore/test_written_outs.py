"""pushpull of large values, whose outs are written in the pass of the update."""

import pytest
import torch

import torchkv
from helpers import assert_same

SIZES = [300_001, 7, 140_000]  # more than 1 MiB together, and not all large
KEYS = ["a", "b", "c"]
SGD = {"optimizer": "sgd", "learning_rate": 0.1}
OPTIMIZERS = {
    "sum": None,
    "sgd": SGD,
    "momentum": {**SGD, "momentum": 0.9},
    "adam": {"optimizer": "adam", "learning_rate": 0.01},
    "lamb": {"optimizer": "lamb", "learning_rate": 0.01},
    "lars": {"optimizer": "lars", "learning_rate": 0.1},
    "group": {"optimizer": "groupadagrad", "learning_rate": 0.1},
    "clipped": {**SGD, "max_norm": 1.0},
    "accumulated": {**SGD, "accumulate": 2},
}


def normal(size, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator).to(dtype)


def stores(optimizer, dtype=torch.float32):
    """Two of the same: of one, the outs are written in another way."""
    both = torchkv.create("local"), torchkv.create("local")
    for kv in both:
        kv.init(KEYS, [normal(size, 1, dtype) for size in SIZES])
        if optimizer:
            kv.set_optimizer(**optimizer)
    return both


def steps(optimizer, values_of, dtype=torch.float32):
    """Compares pushpull with push and pull, for some steps."""
    kv, other = stores(optimizer, dtype)
    outs = [torch.empty(size, dtype=dtype) for size in SIZES]
    for step in range(3):
        versions = [out._version for out in outs]
        kv.pushpull(KEYS, values_of(step), out=outs)
        other.push(KEYS, values_of(step))
        for key, out, version in zip(KEYS, outs, versions, strict=True):
            assert_same(out, other.pull(key))
            assert_same(kv.pull(key), other.pull(key))
            assert kv.version(key) == other.version(key)
            assert out._version > version


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_bits_are_those_of_push_and_pull(optimizer, num_threads):
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        steps(optimizer, lambda step: [normal(size, step + 2) for size in SIZES])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_of_other_dtypes(dtype):
    def values_of(step):
        return [normal(size, step, dtype) for size in SIZES]

    steps(SGD, values_of, dtype)


@pytest.mark.parametrize("optimizer", [None, SGD], ids=["sum", "sgd"])
def test_of_several_values(optimizer):
    def values_of(step):
        return [[normal(size, step), normal(size, 9)] for size in SIZES]

    steps(optimizer, values_of)


@pytest.mark.parametrize("optimizer", [None, SGD], ids=["sum", "sgd"])
def test_of_values_with_gaps(optimizer):
    steps(optimizer, lambda step: [normal((size, 2), step)[:, 0] for size in SIZES])


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_into_the_values(optimizer):
    kv, other = stores(optimizer)
    for step in range(3):
        values = [normal(size, step + 2) for size in SIZES]
        other.push(KEYS, values)
        kv.pushpull(KEYS, values)
        for key, value in zip(KEYS, values, strict=True):
            assert_same(value, other.pull(key))


def test_into_the_values_of_other_keys():
    kv, _ = stores(None)
    kv.delete(KEYS)
    kv.init(["x", "y"], [torch.zeros(300_000)] * 2)
    x, y = torch.full((300_000,), 1.0), torch.full((300_000,), 2.0)
    kv.pushpull(["x", "y"], [x, y], out=[y, x])
    assert x.eq(2.0).all() and y.eq(1.0).all()
    assert kv.pull("x").eq(1.0).all() and kv.pull("y").eq(2.0).all()


def test_a_skipped_step_still_fills_the_outs():
    kv, _ = stores({**SGD, "skip_nonfinite": True})
    values = [normal(size, 2) for size in SIZES]
    values[1][3] = float("inf")
    outs = [torch.empty(size) for size in SIZES]
    kv.pushpull(KEYS, values, out=outs)
    for size, out in zip(SIZES, outs, strict=True):
        assert_same(out, normal(size, 1))


def test_stored_values_in_another_order_of_dimensions():
    start = normal((8, 3, 100, 150), 1).to(memory_format=torch.channels_last)
    value, out = normal((8, 3, 100, 150), 2), torch.empty(8, 3, 100, 150)
    kv = torchkv.create("local")
    kv.init(0, start)
    kv.set_optimizer(**SGD)
    kv.pushpull(0, value, out=out)
    assert_same(out, kv.pull(0).contiguous())
    torch.testing.assert_close(out, start.add(value, alpha=-0.1).contiguous())


def test_stats_count_the_outs():
    kv, _ = stores(SGD)
    values = [normal(size, 2) for size in SIZES]
    kv.pushpull(KEYS, values, out=[torch.empty(size) for size in SIZES])
    for key, size in zip(KEYS, SIZES, strict=True):
        stats = kv.stats()[key]
        assert (stats["pushes"], stats["pulls"]) == (1, 1)
        assert stats["bytes_pulled"] == 4 * size
