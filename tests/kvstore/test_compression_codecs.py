"""What each codec sends and keeps, against its definition."""

import math

import pytest
import torch

import torchkv
from compression_model import (
    ALL,
    WITH_FEEDBACK,
    Model,
    each_codec,
    each_float,
    some,
)
from helpers import assert_same, bits, full, stored
from torchkv.compression import BF16, FP8, FP16, Int4, OneBit, TopK, TwoBit

SHAPES = [(), (1,), (5,), (2, 3), (1025,), (37, 83), (0, 3)]


@pytest.fixture
def kv(device_kv):
    """An empty store of type device, of one place or several."""
    return device_kv


# -- every codec, against its definition


@each_codec
@each_float
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_and_residuals(kv, codec, dtype, shape):
    kv.init("w", torch.zeros(shape, dtype=dtype))
    kv.set_gradient_compression(codec)
    model = Model(codec, shape, dtype)
    for num_values in (1, 3, 2):
        values = [some(shape, dtype) for _ in range(num_values)]
        before = [bits(value) for value in values]
        kv.push("w", values)
        assert [bits(value) for value in values] == before
        assert torch.equal(stored(kv, "w"), model.sum(values).to(dtype))
    residuals = kv.state_dict()["keys"]["w"]["residuals"]
    for actual, expected in zip(residuals, model.residuals, strict=True):
        assert torch.equal(actual, expected)


@each_codec
def test_large_values_and_any_number_of_threads(kv, codec):
    shape, results = (300_001,), []
    values = [some(shape) for _ in range(3)]
    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            kv.set_gradient_compression(codec)
            kv.init(num_threads, torch.zeros(shape))
            kv.push(num_threads, values)
            kv.push(num_threads, values)
            results.append(stored(kv, num_threads))
    finally:
        torch.set_num_threads(threads)
    model = Model(codec, shape)
    model.sum(values)
    assert torch.equal(results[0], model.sum(values))
    assert_same(results[1], results[0])


@pytest.mark.parametrize("codec", ALL, ids=str)
def test_layouts_and_dtypes_of_values(kv, codec):
    kv.init("a", torch.zeros(4, 6))
    kv.init("b", torch.zeros(4, 6))
    kv.set_gradient_compression(codec)
    values = [some((4, 6)).half().double() for _ in range(3)]
    others = [
        values[0].float().t().contiguous().t(),
        values[1].half(),
        torch.stack([values[2].float()] * 2, -1)[..., 1],
    ]
    if isinstance(codec, Int4):  # its random numbers follow from the key
        kv.delete("b")
        kv.push("a", values)
        first = stored(kv, "a")
        kv.delete("a")
        kv.init("a", torch.zeros(4, 6))
        kv.push("a", others)
        assert_same(stored(kv, "a"), first)
        return
    for _ in range(2):
        kv.push("a", values)
        kv.push("b", others)
        assert_same(stored(kv, "b"), stored(kv, "a"))


def test_a_value_of_another_memory_layout_than_the_stored_one(kv):
    kv.init("w", torch.zeros(6, 4).t())
    kv.set_gradient_compression(TopK(k=1))
    value = torch.zeros(4, 6)
    value[0, 5] = value[3, 0] = 2  # of equal magnitudes: the first in memory
    kv.push("w", value)
    expected = torch.zeros(4, 6)
    expected[3, 0] = 2
    assert torch.equal(stored(kv, "w"), expected)
    kv.push("w", torch.zeros(4, 6))
    assert torch.equal(stored(kv, "w"), value - expected)


@pytest.mark.parametrize("codec", [FP16(), BF16(), FP8(), TopK(k=3)], ids=str)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_numbers_that_are_not_finite_leave_no_residual(kv, codec, bad):
    kv.init(3, full(0))
    kv.set_gradient_compression(codec)
    value = full(0.25)
    value[0, 1] = bad
    kv.push(3, value)
    assert not stored(kv, 3)[0, 1].isfinite()
    for _ in range(9):
        kv.push(3, full(0))
        assert stored(kv, 3).isfinite().all()


@pytest.mark.parametrize(("codec", "most"), [(FP16(), 65504.0), (BF16(), 3.38953e38)])
def test_values_beyond_the_range_are_sent_in_parts(kv, codec, most):
    value = full(3.4e38 if isinstance(codec, BF16) else 1e5)
    kv.init(3, full(0))
    kv.set_gradient_compression(codec)
    kv.push(3, value)
    first = stored(kv, 3)
    torch.testing.assert_close(first, full(most))
    kv.push(3, full(0))
    whole = first.double() + stored(kv, 3)
    torch.testing.assert_close(whole, value.double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("codec", WITH_FEEDBACK, ids=str)
def test_nothing_is_lost(kv, codec):
    """What has been sent and what is left make what was pushed."""
    shape, scale = (2000,), 0.125
    kv.init("w", torch.zeros(shape, dtype=torch.float64))
    kv.set_gradient_compression(codec)
    pushed = torch.zeros(shape, dtype=torch.float64)
    sent = torch.zeros(shape, dtype=torch.float64)
    for _ in range(20):
        value = some(shape, torch.float64, scale)
        pushed += value
        kv.push("w", value)
        sent += stored(kv, "w")
    (residual,) = kv.state_dict()["keys"]["w"]["residuals"]
    torch.testing.assert_close(sent + residual, pushed, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("codec", "most"),
    # Of a normal distribution: the error of rounding, relative to the values. That of
    # a sign is 2 - 2 * sqrt(2 / pi).
    [
        (OneBit(threshold=0), 0.41),
        (TwoBit(threshold=1), 0.36),
        (FP16(), 1e-7),
        (BF16(), 4e-6),
        (FP8(), 1e-3),
        (Int4(), 0.06),
        (TopK(ratio=0.5), 0.1),
    ],
    ids=str,
)
def test_mean_squared_error(kv, codec, most):
    value = some((100_000,))
    kv.init("w", torch.zeros_like(value))
    kv.set_gradient_compression(codec)
    kv.push("w", value)
    error = (stored(kv, "w") - value).square().mean() / value.square().mean()
    assert 0 < error < most


def test_int4_is_unbiased(kv):
    """The mean of many pushes is the value, within 5 standard errors."""
    count, num_elements = 400, 4096
    value = some((num_elements,))
    kv.init("w", torch.zeros_like(value))
    kv.set_gradient_compression(Int4(seed=1))
    total = torch.zeros(num_elements, dtype=torch.float64)
    for _ in range(count):
        kv.push("w", value)
        total += stored(kv, "w") - value
    levels = (value.view(-1, 128).abs().amax(1, keepdim=True) / 7).expand(-1, 128)
    levels = levels.flatten().double()
    up = (value / levels) % 1  # the probability to be rounded up
    standard_error = levels * (up * (1 - up) / count).sqrt()
    # Rare events are not normally distributed.
    assert (total / count).abs().le(5 * standard_error + 5 * levels / count).all()
    normal = total / count / standard_error
    normal = normal[(up > 0.1) & (up < 0.9)]
    assert abs(normal.mean()) < 5 / math.sqrt(len(normal))
    assert 0.95 < normal.std() < 1.05


def test_int4_sends_whole_numbers_of_scales_as_they_are(kv):
    value = torch.zeros(200_000, 128)
    value[:, 0] = 7
    value[:, 1:8] = torch.arange(-3.0, 4)
    kv.init("w", torch.zeros_like(value))
    kv.set_gradient_compression(Int4())
    for _ in range(2):
        kv.push("w", value)
        assert torch.equal(stored(kv, "w"), value)


def test_int4_sends_15_levels(kv):
    value = some((4096,))
    kv.init("w", torch.zeros_like(value))
    kv.set_gradient_compression(Int4(seed=1))
    kv.push("w", value)
    levels = value.view(-1, 128).abs().amax(1, keepdim=True) / 7
    codes = (stored(kv, "w").view(-1, 128) / levels).round()
    torch.testing.assert_close(stored(kv, "w").view(-1, 128), codes * levels)
    assert codes.abs().max() == 7


def test_int4_follows_from_seed_key_position_and_push():
    def pushed(seed=0, key="w", num_values=1, num_pushes=1):
        store = torchkv.create("device")
        store.init(key, torch.zeros(500))
        store.set_gradient_compression(Int4(seed=seed))
        for _ in range(num_pushes):
            store.push(key, [torch.linspace(-1, 1, 500)] * num_values)
        return bits(store.pull(key))

    assert pushed() == pushed()
    results = [pushed(), pushed(seed=1), pushed(key="v"), pushed(num_pushes=2)]
    assert len({str(result) for result in results}) == 4
    store = torchkv.create("device")
    store.init("w", torch.zeros(500))
    store.set_gradient_compression(Int4())
    store.push("w", [torch.linspace(-1, 1, 500), -torch.linspace(-1, 1, 500)])
    assert stored(store, "w").abs().max() > 0.01  # they do not cancel out


@pytest.mark.parametrize("count", [1, 3, 6, 100])
def test_topk_sends_the_first_of_equal_magnitudes(kv, count):
    value = torch.tensor([1.0, -2.0, 2.0, 0.5, -1.0, 1.0])
    kv.init("w", torch.zeros(6))
    kv.set_gradient_compression({"type": "topk", "k": count})
    kv.push("w", value)
    order = [1, 2, 0, 4, 5, 3][:count]
    expected = torch.zeros(6)
    expected[order] = value[order]
    assert_same(stored(kv, "w"), expected)


@pytest.mark.cuda
@pytest.mark.parametrize("codec", ALL, ids=str)
@each_float
def test_values_on_gpus(codec, dtype):
    """The bits of the CPU; fake GPUs test more (mock_cuda/compression_test.cpp)."""
    stores = [torchkv.create("device") for _ in range(2)]
    for kv in stores:
        kv.init("w", torch.zeros(37, 83, dtype=dtype))
        kv.set_gradient_compression(codec)
    for num_values in (1, 3, 2):
        values = [some((37, 83), dtype) for _ in range(num_values)]
        for kv, device in zip(stores, ("cpu", "cuda"), strict=True):
            kv.push("w", [value.to(device) for value in values])
        on_cpu, on_gpu = [stored(kv, "w").cpu() for kv in stores]
        assert_same(on_gpu, on_cpu)
    on_cpu, on_gpu = [kv.state_dict()["keys"]["w"]["residuals"] for kv in stores]
    assert [bits(each) for each in on_gpu] == [bits(each) for each in on_cpu]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 2**19, 2**20 + 2**12])
def test_topk_of_many_equal_numbers_on_gpus(dtype, count):
    """More chunks than blocks count, and digits of the indices of equal numbers."""
    value = torch.randint(-2, 3, (2**20 + 2**12 + 1,)).to(dtype)
    stores = [torchkv.create("device") for _ in range(2)]
    for kv, device in zip(stores, ("cpu", "cuda"), strict=True):
        kv.init("w", torch.zeros_like(value))
        kv.set_gradient_compression(TopK(k=count))
        kv.push("w", value.to(device))
    on_cpu, on_gpu = [stored(kv, "w").cpu() for kv in stores]
    assert_same(on_gpu, on_cpu)
